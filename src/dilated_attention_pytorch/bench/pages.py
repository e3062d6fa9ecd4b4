"""A record as an HTML page: time and memory over the length as charts, then all of its tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ..report import Page, Series, line_chart
from .measure import Timing
from .module_cases import CompareCase
from .record import Record, Result
from .tables import make_sections, origin

Point = tuple[float, float, float, float]  # x, y, the least y, the largest y


def to_page(record: Record) -> str:
    """The page; without comparisons by name it has tables only."""
    lead = "Every figure was measured after its candidate had given the right answer."
    page = Page("Attention, measured", lead)
    compared = [result for result in record.results if isinstance(result.case, CompareCase)]
    for backward, name in ((False, "forward"), (True, "training")):
        _add_charts(page, name, [r for r in compared if _case(r).backward == backward])
    for section in make_sections(record):
        page.heading(_plain(section.title))
        page.table([_plain(c) for c in section.table.head], [[*map(_plain, r)] for r in section.table.rows])
        for sentence in section.descriptions:
            page.paragraph(sentence)
    page.paragraph(origin(record))
    return page.render()


def _add_charts(page: Page, name: str, results: list[Result]) -> None:
    if not results:
        return
    page.heading(f"Over the length: {name}")
    charts: list[tuple[str, str, Callable[[Result, str], Point | None], Callable[[float], str]]] = [
        ("time", "median of a call; whiskers from the fastest to the slowest", _time_point, _show_seconds),
        ("memory", "peak memory that a call adds to its inputs", _memory_point, _show_mebibytes),
    ]
    for what, caption, point, text in charts:
        series = list(_series(results, point))
        if not series:
            continue
        svg = line_chart(
            series,
            title=f"{what}, {name}",
            x_label="tokens",
            y_label=what,
            log_x=True,
            log_y=True,
            y_text=text,
            chart_id=f"{what}-{name}",
        )
        page.figure(svg, f"{caption}, {name}")


def _series(results: list[Result], point: Callable[[Result, str], Point | None]) -> Iterable[Series]:
    names = dict.fromkeys(name for result in results for name in _case(result).candidates)
    for name in names:
        points = sorted(found for result in results if (found := point(result, name)) is not None)
        if points:
            spread = tuple((low, high) for _, _, low, high in points)
            yield Series(name, tuple((x, y) for x, y, _, _ in points), spread)


def _case(result: Result) -> CompareCase:
    assert isinstance(result.case, CompareCase)
    return result.case


def _time_point(result: Result, name: str) -> Point | None:
    if name not in result.seconds:
        return None
    timing = Timing(result.seconds[name])
    return _case(result).n, timing.median, timing.minimum, max(timing.seconds)


def _memory_point(result: Result, name: str) -> Point | None:
    peak = result.counts.get(f"peak_extra {name}", 0) / 2**20
    return (_case(result).n, peak, peak, peak) if peak > 0 else None


def _show_seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _show_mebibytes(value: float) -> str:
    return f"{value:,.4g} MiB"


def _plain(text: str) -> str:
    """Markdown's marks removed."""
    return re.sub(r"\*\*|`", "", text)
