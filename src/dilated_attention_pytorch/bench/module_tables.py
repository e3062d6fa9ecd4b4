"""Tables of comparisons by name and of limits."""

from __future__ import annotations

from collections.abc import Iterable

from .cells import Table, mebibytes, milliseconds, shown
from .figures import show_value
from .limit_cases import DOCUMENTED, LimitCase
from .measure import Timing
from .module_cases import BASELINE, CompareCase
from .record import Result


def compare_table(results: Iterable[Result]) -> Table:
    """One row a case and candidate; what could not be measured or heeded stands in the last column."""
    rows = []
    for result in results:
        case = result.case
        assert isinstance(case, CompareCase)
        for name in case.candidates:
            peak = mebibytes(result.counts.get(f"peak_extra {name}"))
            times = _times(result, name) if name in result.seconds else ["", "", ""]
            rows.append([f"{case.name}, {name}", *times, peak, result.notes.get(name, "")])
    head = ["case and candidate", "ms", "tokens/s", f"speed-up over {BASELINE}", "peak extra, MiB", "remarks"]
    return Table(head, rows)


def _times(result: Result, name: str) -> list[str]:
    assert isinstance(result.case, CompareCase)
    timing = Timing(result.seconds[name])
    speed = f"{result.case.b * result.case.n / timing.minimum:,.0f}"
    if name == BASELINE or BASELINE not in result.seconds:
        return [milliseconds(timing), speed, ""]
    return [milliseconds(timing), speed, f"{Timing(result.seconds[BASELINE]).minimum / timing.minimum:.2f}"]


def limit_table(results: Iterable[Result]) -> Table:
    """The confirmed lengths, and beside them those that the requirement documents report for 8 GB."""
    rows = []
    for result in results:
        case = result.case
        assert isinstance(case, LimitCase)
        confirmed = result.counts.get("confirmed")
        peak, seconds = "", ""
        if confirmed is not None:
            peak = show_value(result.counts["peak"], "bytes")
            seconds = f"{result.seconds['attention'][0]:.1f}"
        budget = show_value(case.budget, "bytes")
        over, remark = ["" for _ in DOCUMENTED], [*result.notes.values()]
        if confirmed is not None:
            remark += [result.why_not] if result.why_not else []
            if case.target is not None:  # the documents speak of the budget and the sizes of the target
                over = [f"{confirmed / n:.1f} x" for n in DOCUMENTED.values()]
        tokens, target = shown(result, result.figures[0])
        rows.append([case.name, budget, tokens, target, peak, seconds, *over, "; ".join(remark)])
    documented = [f"over {n:,} ({what})" for what, n in DOCUMENTED.items()]
    head = ["case", "budget", "tokens", "target", "peak of the process", "s", *documented, "remarks"]
    return Table(head, rows)
