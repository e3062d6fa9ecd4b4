"""Reports as one file of HTML: no script and no request, for phones, printers and dark rooms too.

Charts are drawn by matplotlib, an extra; without it a page has its tables, and says how to get charts.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from xml.etree import ElementTree

__all__ = ["Page", "Series", "line_chart"]

CHARTS_ADVICE = "For charts: pip install 'dilated-attention[charts]'"

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
table:has(th:nth-child(9)) { font-size: .8rem; }
table:has(th:nth-child(9)) :is(th, td) { padding-right: .7rem; white-space: normal; }
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

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p class="lead">{lead}</p>
{body}
</body>
</html>
"""


class Page:
    """Collects the parts of a page in order; `render` gives the file. All text is escaped."""

    def __init__(self, title: str, lead: str) -> None:
        self.title, self.lead = title, lead
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Adds nothing where there is no text."""
        self._parts += [f"<p>{escape(text)}</p>"] if text else []

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], *, is_numbers: bool = True) -> None:
        """A table of texts; with `is_numbers` all columns but the first are aligned to the right."""
        for row in rows:
            if len(row) != len(head):
                raise ValueError(f"a row must have a cell for each of {len(head)} columns, got {len(row)}")
        lines = ["<tr>" + "".join(map(_heading, head)) + "</tr>"] if any(head) else []
        lines += ["<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows]
        kind = "" if is_numbers else ' class="words"'
        self._parts.append("\n".join([f'<div class="wide"><table{kind}>', *lines, "</table></div>"]))

    def figure(self, svg: str | None, caption: str) -> None:
        """A drawing of ours, as `line_chart` returns it, which is not escaped; its caption is.

        Without a drawing, for want of matplotlib, the page says once how to get charts.
        """
        if svg is None:
            advice = f"<p>{escape(CHARTS_ADVICE)}</p>"
            self._parts += [advice] if advice not in self._parts else []
            return
        if not svg.lstrip().startswith("<svg"):
            raise ValueError(f"a figure must be an <svg> element, got {svg[:20]!r}")
        caption = f"<figcaption>{escape(caption)}</figcaption>"
        self._parts.append(f'<figure><div class="wide">{svg}</div>{caption}</figure>')

    def preformatted(self, text: str) -> None:
        """Text whose line breaks and spaces matter."""
        self._parts.append(f"<pre>\n{escape(text)}</pre>")

    def render(self) -> str:
        """The whole file."""
        title, lead = escape(self.title), escape(self.lead)
        return HEAD.format(policy=POLICY, title=title, style=STYLE, lead=lead, body="\n".join(self._parts))


def _heading(text: str) -> str:
    """Names such as MultiheadDilatedAttention may break before a capital letter."""
    return f"<th>{re.sub(r'(?<=[a-z]{4})(?=[A-Z])', '<wbr>', escape(text))}</th>"


def _cell(text: str) -> str:
    kind = ' class="long"' if len(text) >= LONG else ""
    return f"<td{kind}>{escape(text)}</td>"


# Okabe and Ito's colours, which colour-blind readers can tell apart, without yellow, which fades on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
MARKERS = "os^Dv*"  # as many as do not divide the number of colours, so that pairs repeat late
MOST_MARKERS = 48  # of a series: more would hide its line
WIDTH, HEIGHT, FONT = 640, 360, 15  # in pixels; each row of the legend adds to the height
INK = "#010203"  # stands for the colour of the text around a chart
SVG = "http://www.w3.org/2000/svg"


@dataclass(frozen=True)
class Series:
    """A named line through `points` (x, y); `low_high` are bounds of each y, drawn as whiskers."""

    name: str
    points: tuple[tuple[float, float], ...]
    low_high: tuple[tuple[float, float], ...] | None = None


def plain_number(value: float) -> str:
    """12,345 and 0.0123."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:,.4g}"


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    chart_id: str,
    log_x: bool = True,
    log_y: bool = True,
    y_text: Callable[[float], str] = plain_number,
) -> str | None:
    """An `<svg>` of the series, with axes, grid, legend, and a tooltip on each marked point.

    None without matplotlib. A logarithmic x axis has its ticks at powers of two. `y_text` writes the values
    of ticks and tooltips. Raises ValueError for what cannot be drawn.
    """
    _check(series, log_x, log_y)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator
    except ImportError:
        return None
    columns = max(1, int(WIDTH / (FONT * (4 + 0.6 * max(len(each.name) for each in series)))))
    height = HEIGHT + 1.6 * FONT * -(-len(series) // columns)
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": chart_id, "font.size": FONT}
    settings |= {"text.parse_math": False, **dict.fromkeys(inked, INK)}
    with rc_context(settings):
        figure = Figure((WIDTH / 72, height / 72), layout="constrained")
        axes = figure.add_subplot()
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.set_title(title, loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=INK, alpha=0.15)
        if log_x:
            axes.set_xscale("log", base=2)
            widest = max(len(plain_number(x)) for each in series for x, _ in each.points)
            room = int(0.85 * WIDTH / (0.65 * FONT * (widest + 1)))  # for so many texts of ticks
            axes.xaxis.set_major_locator(LogLocator(base=2, numticks=max(2, min(10, room))))
        if log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axes.xaxis.set_major_formatter(lambda value, _: plain_number(value))
        axes.yaxis.set_major_formatter(lambda value, _: y_text(value))
        axes.yaxis.set_minor_formatter(lambda *_: "")
        tips = [_draw_series(axes, number, each, y_text) for number, each in enumerate(series)]
        figure.legend(loc="outside upper left", ncols=columns, frameon=False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True)
    return _finish(drawn.getvalue(), chart_id, f"{title}: {y_label} by {x_label}", tips)


def _draw_series(axes: Any, number: int, series: Series, y_text: Callable[[float], str]) -> list[str]:
    """Draws a line, and returns the tooltips of its marked points."""
    x, y = zip(*series.points, strict=True)
    look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
    every = -(-len(x) // MOST_MARKERS)
    axes.plot(x, y, label=series.name, gid=f"series-{number}", markevery=every, markersize=9, lw=2, **look)
    if series.low_high is not None:
        bounds = [(b - low, high - b) for b, (low, high) in zip(y, series.low_high, strict=True)]
        axes.errorbar(x, y, [*zip(*bounds, strict=True)], fmt="none", ecolor=look["color"], capsize=4)
    return [f"{series.name}: {plain_number(a)}, {y_text(b)}" for a, b in series.points[::every]]


def _finish(svg: str, chart_id: str, label: str, tips: Sequence[Sequence[str]]) -> str:
    """Names the chart, gives each marker its tooltip, and removes what would disturb the page around it."""
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(svg)
    for number, texts in enumerate(tips):
        markers = root.iterfind(f".//{{{SVG}}}g[@id='series-{number}']//{{{SVG}}}use")
        for marker, text in zip(markers, texts, strict=True):
            ElementTree.SubElement(marker, f"{{{SVG}}}title").text = text
    for group in root.iter(f"{{{SVG}}}g"):
        group.attrib.pop("id", None)  # the same in every chart
    for child in [x for x in root if x.tag == f"{{{SVG}}}metadata"]:
        root.remove(child)
    root.attrib |= {"id": chart_id, "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode").replace(INK, "currentColor")


def _check(series: Sequence[Series], log_x: bool, log_y: bool) -> None:
    if not series:
        raise ValueError("a chart must have at least one series, got none")
    for each in series:
        if not each.points:
            raise ValueError(f"a series must have at least one point, got none in {each.name!r}")
        ys = [y for _, y in each.points] + [bound for pair in each.low_high or () for bound in pair]
        for axis, values, is_log in (("x", [x for x, _ in each.points], log_x), ("y", ys, log_y)):
            if odd := [value for value in values if not math.isfinite(value)]:
                raise ValueError(f"{axis} must be finite, got {odd[0]} in {each.name!r}")
            if is_log and (least := min(values)) <= 0:
                rule = f"{axis} must be positive on a logarithmic axis"
                raise ValueError(f"{rule}, got {least} in {each.name!r}")
