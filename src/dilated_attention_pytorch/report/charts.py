"""Line charts as SVG: they follow the colour of the text around them and need no script."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from .axes import Axis, length_axis, linear_axis, log_axis

# Okabe and Ito's colours, which colour-blind readers can tell apart, without yellow, which fades on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
# Around (0, 0); as many as do not divide the number of colours, so that pairs repeat late.
MARKERS = (
    "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0z",
    "M-4,-4h8v8h-8z",
    "M0,-5.5L5,4H-5z",
    "M0,-6L5,0L0,6L-5,0z",
    "M0,5.5L5,-4H-5z",
    "M-6,-2h4v-4h4v4h4v4h-4v4h-4v-4h-4z",
)
MOST_MARKERS = 48  # of a series: more would hide its line
WIDTH, HEIGHT, FONT = 640, 300, 15  # of the plot without the rows of text above and below it
LETTER = 0.58 * FONT  # about the width of a character


@dataclass(frozen=True)
class Series:
    """A named line through `points` (x, y); `low_high` are bounds of each y, drawn as whiskers."""

    name: str
    points: tuple[tuple[float, float], ...]
    low_high: tuple[tuple[float, float], ...] | None = None


@dataclass(frozen=True)
class _Frame:
    """The plot's place in the picture, and both axes."""

    left: float
    right: float
    top: float
    x_axis: Axis
    y_axis: Axis

    @property
    def bottom(self) -> float:
        return self.top + HEIGHT

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = self.left + self.x_axis.share(x) * (self.right - self.left)
        return across, self.bottom - self.y_axis.share(y) * HEIGHT


def plain_number(value: float) -> str:
    """12,345 and 0.0123."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:,.4g}"


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = True,
    log_y: bool = True,
    x_text: Callable[[float], str] = plain_number,
    y_text: Callable[[float], str] = plain_number,
    chart_id: str,
) -> str:
    """An `<svg>` of the series, with axes, grid, legend, and a tooltip on each marked point.

    A logarithmic x axis has its ticks at powers of two. `x_text` and `y_text` write the values of ticks and
    tooltips. Raises ValueError for what cannot be drawn.
    """
    _check(series, log_x, log_y, chart_id)
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points]
    ys += [y for each in series for pair in each.low_high or () for y in pair]
    y_axis = (log_axis if log_y else linear_axis)(ys)
    left = 16 + LETTER * max(len(y_text(tick)) for tick in y_axis.ticks)
    x_axis = _fitting_axis(length_axis if log_x else linear_axis, xs, x_text, WIDTH - left)
    right = WIDTH - 8 - LETTER * len(x_text(x_axis.ticks[-1])) / 2  # the last text is centred below its tick
    legend, rows = _legend(series)
    frame = _Frame(left, right, 66.0 + 22 * rows, x_axis, y_axis)
    height = frame.bottom + 54
    parts = [
        f'<svg id="{chart_id}" role="img" aria-label="{escape(f"{title}: {y_label} by {x_label}")}" '
        f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'font-family="system-ui, sans-serif" font-size="{FONT}" fill="currentColor">',
        f'<text x="8" y="20" font-weight="bold" font-size="{FONT + 2}">{escape(title)}</text>',
        *legend,
        *_grid(frame, x_text, y_text),
        f'<text x="8" y="{frame.top - 14:g}">{escape(y_label)}</text>',
        f'<text x="{(frame.left + frame.right) / 2:g}" y="{height - 8:g}" text-anchor="middle">'
        f"{escape(x_label)}</text>",
    ]
    for number, each in enumerate(series):
        parts += _line(frame, each, *_style(number), x_text, y_text)
    return "\n".join([*parts, "</svg>"])


def _check(series: Sequence[Series], log_x: bool, log_y: bool, chart_id: str) -> None:
    if not re.fullmatch(r"[A-Za-z][\w-]*", chart_id):
        raise ValueError(f"chart_id must be a letter and then letters, digits, - or _ only, got {chart_id!r}")
    if not series:
        raise ValueError("a chart must have at least one series, got none")
    for each in series:
        if not each.points:
            raise ValueError(f"a series must have at least one point, got none in {each.name!r}")
        bounds = each.low_high
        if bounds is not None and len(bounds) != len(each.points):
            got = f"{len(bounds)} for {len(each.points)} points in {each.name!r}"
            raise ValueError(f"low_high must have a pair for each point, got {got}")
        for (_, y), (low, high) in zip(each.points, bounds or (), strict=False):
            if not low <= y <= high:
                raise ValueError(f"a point must lie within its low_high, got {y} and {(low, high)}")
        _check_values("x", [x for x, _ in each.points], log_x, each.name)
        _check_values(
            "y", [y for _, y in each.points] + [y for pair in bounds or () for y in pair], log_y, each.name
        )


def _check_values(axis: str, values: Sequence[float], is_log: bool, name: str) -> None:
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"{axis} must be finite, got {value} in {name!r}")
        if is_log and value <= 0:
            raise ValueError(f"{axis} must be positive on a logarithmic axis, got {value} in {name!r}")


def _fitting_axis(
    make: Callable[[Sequence[float], int], Axis],
    values: Sequence[float],
    text: Callable[[float], str],
    width: float,
) -> Axis:
    """With as many ticks as their texts leave room for, 12 at most."""
    for most in range(12, 2, -1):
        axis = make(values, most)
        if sum(LETTER * len(text(tick)) + 12 for tick in axis.ticks) <= width:
            break
    return axis


def _style(number: int) -> tuple[str, str]:
    """The colour and the marker of a series by its place."""
    return COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]


def _legend(series: Sequence[Series]) -> tuple[list[str], int]:
    """The names beside their markers from left to right, in as many rows as they need."""
    parts, x, row = [], 8.0, 0
    for number, each in enumerate(series):
        width = 44 + LETTER * len(each.name)
        if x > 8 and x + width > WIDTH:
            x, row = 8.0, row + 1
        colour, marker = _style(number)
        y = 44 + 22 * row
        parts.append(
            f'<g><path d="M{x:g},{y - 5}h24" stroke="{colour}" stroke-width="2"/>'
            f'<path d="{marker}" transform="translate({x + 12:g} {y - 5})" fill="{colour}"/>'
            f'<text x="{x + 30:g}" y="{y}">{escape(each.name)}</text></g>'
        )
        x += width
    return parts, row + 1


def _grid(frame: _Frame, x_text: Callable[[float], str], y_text: Callable[[float], str]) -> Iterator[str]:
    left, right, bottom = frame.left, frame.right, frame.bottom
    for tick in frame.y_axis.ticks:
        _, y = frame.at(frame.x_axis.low, tick)
        yield f'<path d="M{left:.1f},{y:.1f}H{right:.1f}" stroke="currentColor" stroke-opacity="0.15"/>'
        yield f'<text x="{left - 8:.1f}" y="{y + 5:.1f}" text-anchor="end">{escape(y_text(tick))}</text>'
    for tick in frame.x_axis.ticks:
        x, _ = frame.at(tick, frame.y_axis.low)
        yield f'<path d="M{x:.1f},{frame.top:.1f}V{bottom:.1f}" stroke="currentColor" stroke-opacity="0.15"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 23:.1f}" text-anchor="middle">{escape(x_text(tick))}</text>'
    yield (
        f'<path d="M{left:.1f},{frame.top:.1f}V{bottom:.1f}H{right:.1f}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.6"/>'
    )


def _line(
    frame: _Frame,
    series: Series,
    colour: str,
    marker: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
) -> Iterator[str]:
    places = [frame.at(x, y) for x, y in series.points]
    if len(places) > 1:
        path = "L".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>'
    for (x, _), (low, high) in zip(series.points, series.low_high or (), strict=False):
        (across, bottom), (_, top) = frame.at(x, low), frame.at(x, high)
        whisker = f"M{across:.1f},{bottom:.1f}V{top:.1f}m-4,0h8M{across - 4:.1f},{bottom:.1f}h8"
        yield f'<path d="{whisker}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    every = -(-len(places) // MOST_MARKERS)
    for (x, y), (across, up) in list(zip(series.points, places, strict=True))[::every]:
        yield (
            f'<path d="{marker}" transform="translate({across:.1f} {up:.1f})" fill="{colour}">'
            f"<title>{escape(f'{series.name}: {x_text(x)}, {y_text(y)}')}</title></path>"
        )
