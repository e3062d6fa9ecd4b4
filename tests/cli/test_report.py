"""Reports: charts show what they are given; pages are one file, with everything that is not ours escaped."""

from __future__ import annotations

import math
import re
import sys
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from dilated_attention_pytorch.cli.report import (
    CHARTS_ADVICE,
    COLOURS,
    MARKERS,
    MOST_MARKERS,
    WIDTH,
    Page,
    Series,
    line_chart,
    plain_number,
)

SVG = "{http://www.w3.org/2000/svg}"
EVIL = '<script>alert("1")</script>&amp;'
LABELS: dict[str, Any] = {"title": "Time", "x_label": "tokens", "y_label": "ms", "chart_id": "time"}
LINEAR = {"log_x": False, "log_y": False}


def draw(*series: Series, **options: Any) -> ElementTree.Element:
    svg = line_chart(series, **(LABELS | options))
    assert svg is not None
    return ElementTree.fromstring(svg)


def texts(svg: ElementTree.Element) -> dict[str, tuple[float, float]]:
    """What is written, and where."""
    found = list(svg.iter(f"{SVG}text"))
    return {x.text or "": (float(x.attrib.get("x", 0)), float(x.attrib.get("y", 0))) for x in found}


def marks(svg: ElementTree.Element) -> list[tuple[str, float, float]]:
    """The tooltip of each marked point, and where it is."""
    marked = [
        (each, title) for each in svg.iter(f"{SVG}use") if (title := each.find(f"{SVG}title")) is not None
    ]
    return [(title.text or "", float(each.attrib["x"]), float(each.attrib["y"])) for each, title in marked]


def test_names_ticks_and_labels_are_written_as_text() -> None:
    series = Series("dense <1> $x$", ((1024, 2.0), (4096, 40.0))), Series("dilated", ((1024, 1.0),))
    svg = draw(*series)
    attributes = {name: svg.attrib[name] for name in ("id", "role", "aria-label")}
    assert attributes == {"id": "time", "role": "img", "aria-label": "Time: ms by tokens"}
    expected = {
        "Time",
        "tokens",
        "ms",
        "dense <1> $x$",
        "dilated",
        "1,024",
        "2,048",
        "4,096",
        "1",
        "10",
        "20",
    }
    assert expected <= set(texts(svg))
    text = line_chart(series, **LABELS)
    assert text == line_chart(series, **LABELS)  # the same, whenever it is drawn
    assert "currentColor" in (text or "")  # it follows the colour of the text around it
    assert "metadata" not in (text or "")
    assert sorted(re.findall(r'<g id="', text or "")) == []  # which would be the same in every chart


def test_places_follow_the_axes() -> None:
    places = marks(draw(Series("a", tuple((2.0**i, 10.0**i) for i in range(4)))))
    assert [text for text, _, _ in places] == ["a: 1, 1", "a: 2, 10", "a: 4, 100", "a: 8, 1,000"]
    for axis, sign in ((1, 1), (2, -1)):
        steps = [sign * (b[axis] - a[axis]) for a, b in pairwise(places)]
        assert min(steps) > 20
        assert max(steps) - min(steps) <= 0.2
    (_, x0, y0), (_, x1, y1), (_, x2, y2) = marks(
        draw(Series("a", ((0, -1.0), (50, 0.0), (100, 1.0))), **LINEAR)
    )
    assert ((x0 + x2) / 2, (y0 + y2) / 2) == pytest.approx((x1, y1), abs=0.1)
    assert y0 > y2
    for options in ({}, LINEAR):  # a single point is drawn inside
        ((_, x, y),) = marks(draw(Series("a", ((4096, 3.0),)), **options))
        assert 60 < x < WIDTH
        assert 60 < y < 400


def test_whiskers_count_for_the_axis() -> None:
    svg = draw(Series("a", ((1, 10.0), (2, 20.0)), ((1.0, 30.0), (5.0, 900.0))))
    assert {"1", "500"} <= set(texts(svg))
    top = min(float(each.attrib["y"]) for each in svg.iter(f"{SVG}use"))
    assert top < min(y for _, _, y in marks(svg)) - 50  # the cap of a whisker is above all points


def test_long_series_are_marked_here_and_there() -> None:
    svg = draw(Series("a", tuple((float(i), 1.0 + i % 2) for i in range(1000))), **LINEAR)
    assert 10 < len(marks(svg)) <= MOST_MARKERS
    assert max(path.attrib["d"].count("L") for path in svg.iter(f"{SVG}path")) >= 999


def test_many_names_stay_inside_and_differ_in_looks() -> None:
    names = [f"a rather long name, number {i}" for i in range(12)]
    svg = draw(*(Series(name, ((1, 1.0), (2, 2.0))) for name in names))
    places = [texts(svg)[name] for name in names]
    assert len(set(places)) == 12
    assert all(x + 8 * len(name) < WIDTH for (x, _), name in zip(places, names, strict=True))
    assert math.gcd(len(COLOURS), len(MARKERS)) == 1  # so that pairs repeat late


@pytest.mark.parametrize("longest", [2**14, 2**18, 2**24])
def test_labels_of_the_x_axis_do_not_touch(longest: int) -> None:
    written = texts(draw(Series("a", ((1024, 1.0), (longest, 2.0)))))
    ticks = [
        (written[text][0], 8.5 * len(text) / 2) for i in range(10, 25) if (text := f"{2**i:,}") in written
    ]
    assert len(ticks) >= 3
    assert all(a + wide < b - next_wide for (a, wide), (b, next_wide) in pairwise(ticks))


@pytest.mark.parametrize(
    ("series", "options", "message"),
    [
        ([], {}, "a chart must have at least one series, got none"),
        ([Series("a", ())], {}, "a series must have at least one point, got none in 'a'"),
        ([Series("a", ((1, 0.0),))], {}, "y must be positive on a logarithmic axis, got 0.0 in 'a'"),
        ([Series("a", ((0, 1.0),))], {}, "x must be positive on a logarithmic axis, got 0 in 'a'"),
        ([Series("a", ((1, math.nan),))], {"log_y": False}, "y must be finite, got nan in 'a'"),
        ([Series("a", ((1, 1.0),), ())], {}, "argument 2 is shorter"),
        ([Series("a", ((1, 1.0),), ((2.0, 3.0),))], {}, "must not contain negative values"),
    ],
)
def test_what_cannot_be_drawn_is_refused(series: list[Series], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        draw(*series, **options)


def test_plain_numbers() -> None:
    assert [plain_number(x) for x in (0, 1048576, 0.25, 1234.567)] == ["0", "1,048,576", "0.25", "1,235"]


class Outline(HTMLParser):
    """The tags in order, the text in each kind of element, and whether all that is opened is closed."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(page.render())
        self.close()
        assert self.open == []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in {"meta", "link", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)


def full_page() -> Page:
    page = Page(EVIL, EVIL)
    page.heading(EVIL)
    page.paragraph(EVIL)
    page.table((EVIL, "b"), [(EVIL, "1"), ("x", EVIL)])
    names = {"title": EVIL, "x_label": EVIL, "y_label": EVIL, "chart_id": "chart"}
    page.figure(line_chart([Series(EVIL, ((1, 1.0),))], **names), EVIL)
    page.preformatted("\n  two\n" + EVIL)
    return page


def test_all_text_is_escaped_and_kept_and_nothing_is_asked_for() -> None:
    page = full_page()
    outline = Outline(page)
    assert "script" not in outline.tags
    for tag in ("title", "h1", "h2", "p", "th", "td", "figcaption", "text"):
        assert EVIL in outline.text[tag], tag
    assert "".join(outline.text["pre"]).lstrip("\n").endswith("two\n" + EVIL)
    assert "<pre>\n\n  two\n" in page.render()  # HTML drops the first line break of <pre>
    sources = {value for name, value in outline.attributes if name in ("src", "href", "srcset", "action")}
    assert sources == {"data:,"}
    assert not re.search(r"url\((?!#)|@import", page.render())  # charts refer to parts of their own
    policy = ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert {policy, ("charset", "utf-8"), ("name", "viewport")} <= set(outline.attributes)


def test_tables_and_figures_are_what_they_must_be() -> None:
    page = Page("t", "l")
    page.table(("", ""), [("a", "b")], is_numbers=False)
    outline = Outline(page)
    assert outline.tags.count("tr") == 1
    assert ("class", "words") in outline.attributes
    with pytest.raises(ValueError, match="a row must have a cell for each of 2 columns, got 1"):
        page.table(("a", "b"), [("x",)])
    with pytest.raises(ValueError, match="a figure must be an <svg> element, got '<b>no</b>'"):
        page.figure("<b>no</b>", "")


def test_without_matplotlib_a_page_says_once_how_to_get_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = Page("t", "l")
    for _ in range(2):
        page.figure(line_chart([Series("a", ((1, 1.0),))], **LABELS), "caption")
    assert Outline(page).text["p"] == ["l", CHARTS_ADVICE]
    assert "pip install 'dilated-attention[charts]'" in CHARTS_ADVICE
