"""Pages: one file, with everything that is not ours escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from dilated_attention_pytorch.report import Page, Series, line_chart

EVIL = '<script>alert("1")</script>&amp;'
VOID = {"meta", "link", "br"}


class Outline(HTMLParser):
    """The tags in order, the text in each kind of element, and whether all that is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)


def read(page: Page) -> Outline:
    outline = Outline()
    outline.feed(page.render())
    outline.close()
    assert outline.open == []
    return outline


def full_page() -> Page:
    page = Page(EVIL, EVIL)
    page.heading(EVIL)
    page.paragraph(EVIL)
    page.table((EVIL, "b"), [(EVIL, "1"), ("x", EVIL)])
    svg = line_chart([Series(EVIL, ((1, 1.0),))], title=EVIL, x_label=EVIL, y_label=EVIL, chart_id="chart")
    page.figure(svg, EVIL)
    page.preformatted("\n  two\n" + EVIL)
    return page


def test_all_text_is_escaped_and_kept() -> None:
    outline = read(full_page())
    assert "script" not in outline.tags
    for tag in ("title", "h1", "h2", "p", "th", "td", "figcaption", "text"):
        assert EVIL in outline.text[tag], tag
    assert "".join(outline.text["pre"]).lstrip("\n").endswith("two\n" + EVIL)
    assert "<pre>\n\n  two\n" in full_page().render()  # HTML drops the first line break of <pre>


def test_a_page_asks_for_nothing_from_elsewhere() -> None:
    outline = read(full_page())
    sources = [value for name, value in outline.attributes if name in ("src", "href", "srcset", "action")]
    assert sources == ["data:,"]
    assert not re.search(r"url\(|@import", full_page().render())
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in outline.attributes
    assert ("charset", "utf-8") in outline.attributes
    assert ("name", "viewport") in outline.attributes


def test_tables_have_their_cells_in_rows() -> None:
    page = Page("t", "l")
    page.table(("", ""), [("a", "b")], is_numbers=False)
    outline = read(page)
    assert outline.tags.count("tr") == 1
    assert ("class", "words") in outline.attributes
    with pytest.raises(ValueError, match="a row must have a cell for each of 2 columns, got 1"):
        page.table(("a", "b"), [("x",)])


def test_a_figure_must_be_a_drawing() -> None:
    with pytest.raises(ValueError, match="a figure must be an <svg> element, got '<b>no</b>'"):
        Page("t", "l").figure("<b>no</b>", "")
