"""A report as one HTML file: no script and no request, for phones, printers and dark rooms too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark;
  --paper: #fff; --ink: #1d2125; --faint: #5c6670; --line: #d5dade; --box: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #e4e7ea; --faint: #9aa4ae; --line: #3a4149; --box: #1f2429; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 1rem 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-bottom: .2rem;
  border-bottom: 1px solid var(--line); }
p, figure, pre { max-width: 50rem; }
p { margin: .6rem 0; }
.lead { font-size: 1.15rem; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem 1.2rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td { white-space: nowrap; }
th { vertical-align: bottom; color: var(--faint); font-weight: 600; }
th:first-child, td:first-child, .words td, .words th { text-align: left; }
td:first-child, .long { white-space: normal; }
figure { margin: 1.2rem 0; }
figure svg { display: block; width: 100%; min-width: 21rem; height: auto; }
figcaption { color: var(--faint); font-size: .9rem; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: .3rem; padding: .8rem;
  overflow-x: auto; font-size: .85rem; line-height: 1.4; }
@media (max-width: 40rem) { table { font-size: .9rem; } th, td { padding-right: .8rem; } }
@media print { .wide { overflow: visible; } pre { white-space: pre-wrap; } }
"""
LONG = 28  # characters from which on a cell is text, which may wrap; a shorter one is a figure in one piece
# Should a part ever ask for something from elsewhere, the browser refuses.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Page:
    """Collects the parts of a page in order; `render` gives the file. All text is escaped."""

    def __init__(self, title: str, lead: str) -> None:
        self.title, self.lead = title, lead
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        self._parts.append(f"<p>{escape(text)}</p>")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], *, is_numbers: bool = True) -> None:
        """A table of texts; with `is_numbers` all columns but the first are aligned to the right."""
        for row in rows:
            if len(row) != len(head):
                raise ValueError(f"a row must have a cell for each of {len(head)} columns, got {len(row)}")
        lines = ["<tr>" + "".join(map(_heading, head)) + "</tr>"] if any(head) else []
        lines += ["<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows]
        kind = "" if is_numbers else ' class="words"'
        self._parts.append("\n".join([f'<div class="wide"><table{kind}>', *lines, "</table></div>"]))

    def figure(self, svg: str, caption: str) -> None:
        """A drawing of ours, as `line_chart` returns it, which is not escaped; its caption is."""
        if not svg.lstrip().startswith("<svg"):
            raise ValueError(f"a figure must be an <svg> element, got {svg[:20]!r}")
        caption = f"<figcaption>{escape(caption)}</figcaption>"
        self._parts.append(f'<figure><div class="wide">{svg}</div>{caption}</figure>')

    def preformatted(self, text: str) -> None:
        """Text whose line breaks and spaces matter."""
        self._parts.append(f"<pre>\n{escape(text)}</pre>")

    def render(self) -> str:
        """The whole file."""
        title = escape(self.title)
        return "\n".join(
            [
                "<!DOCTYPE html>",
                '<html lang="en">',
                "<head>",
                '<meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
                '<link rel="icon" href="data:,">',
                f"<title>{title}</title>",
                f"<style>{STYLE}</style>",
                "</head>",
                "<body>",
                f"<h1>{title}</h1>",
                f'<p class="lead">{escape(self.lead)}</p>',
                *self._parts,
                "</body>",
                "</html>",
                "",
            ]
        )


def _heading(text: str) -> str:
    """Names such as MultiheadDilatedAttention may break before a capital letter."""
    return f"<th>{re.sub(r'(?<=[a-z]{4})(?=[A-Z])', '<wbr>', escape(text))}</th>"


def _cell(text: str) -> str:
    kind = ' class="long"' if len(text) >= LONG else ""
    return f"<td{kind}>{escape(text)}</td>"
