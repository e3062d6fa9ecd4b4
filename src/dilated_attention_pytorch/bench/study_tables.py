"""Tables of forecasts and of the experiment on quality."""

from __future__ import annotations

from collections.abc import Iterable

from .cells import Table, mebibytes, number, verdict
from .measure import Timing
from .quality_cases import ATTENTIONS
from .record import Result


def forecast_table(results: Iterable[Result]) -> Table:
    """What was forecast and measured, and by what factor it was off."""
    rows = []
    for result in results:
        time, memory = result.figures
        counts = result.counts
        dense, dilated = (Timing(result.seconds[name]).minimum for name in ("sdpa", "dilated_attention"))
        times = [f"{counts['time forecast, millionths'] / 1e6:.3f}", f"{dilated / dense:.3f}"]
        peaks = [mebibytes(counts.get(f"peak {name}")) for name in ("forecast", "measured")]
        cells = [*times, number(time), verdict(time), *peaks, number(memory), verdict(memory)]
        rows.append([result.case.name, *cells])
    head = ["case", "time over dense, forecast", "measured", "off by", "target"]
    return Table([*head, "peak, forecast, MiB", "measured, MiB", "off by", "target"], rows)


def quality_table(results: Iterable[Result]) -> Table:
    """Bits per byte and training time by context and attention."""
    rows = []
    for result in results:
        figures = {figure.name: figure for figure in result.figures}
        for name in ATTENTIONS:
            bits, time = (figures.get(f"{name}: {what} over dense") for what in ("bits", "time"))
            quality, speed = ([number(x), verdict(x)] if x else ["", ""] for x in (bits, time))
            seconds = f"{sum(result.seconds[name]):.0f}"
            cells = [number(figures[f"{name}: bits per byte"]), *quality, seconds, *speed]
            rows.append([f"{result.case.name}, {name}", *cells])
    head = ["case and attention", "bits per byte", "over dense", "target", "training, s", "over dense"]
    return Table([*head, "target"], rows)
