"""Finds the longest sequence within a budget of memory: predicts it from shorter ones, then runs it.

Memory grows linearly with the length, so two runs give a line. What is reported has been run, in a process
whose peak (`VmHWM`) stayed within the budget and whose rows were those of the definition.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ...spec import branches_for
from .candidates import CannotRunError, Config, remarks
from .cases import Case, check_candidate, describe, measure_candidate
from .gate import accept
from .measure import measure_in_child
from .record import Figure, Result, Say, Section, Table, case_of, show_value

PARTS = (16, 8)  # the first lengths: these parts of what the bare tensors of the budget would allow
MOST_RUNS = 6
AIM, CLOSE = 0.99, 0.97  # parts of the budget: what a run aims at, and what is near enough to stop
BUDGET, LIMITED = 8 * 2**30, "DilatedAttention"
# Cheap branches, of which the last spans whatever fits: the limit is one of memory.
CONFIG = Config(8, 64, *branches_for(2**21, first=1024, ratio=4), dtype="bfloat16")


@dataclass(frozen=True)
class LimitCase:
    """The longest sequence of a module whose process stays within `budget` bytes: run, not predicted."""

    name: str
    config: Config
    module: str = LIMITED
    budget: int = BUDGET
    b: int = 1
    backward: bool = False
    target: int | None = None  # in tokens
    seconds: float | None = None  # the most that the search may take
    repeats: int = 1
    kind: ClassVar[str] = "limit"

    def at(self, n: int) -> Case:
        return Case(self.name, self.config, n, (self.module,), self.b, self.backward)


class Run(NamedTuple):
    """One length that was run: peak bytes of its process, seconds of the call, the error of its rows."""

    n: int
    peak: int
    seconds: float
    error: float | None  # None where no rows can be computed from the definition, as with projections


def limit_case(
    config: Config, module: str = LIMITED, budget: int = BUDGET, *, backward: bool = False, **more: Any
) -> LimitCase:
    """The case with its name."""
    name = f"limit of {module}, {'training' if backward else 'forward'}"
    return LimitCase(name, config, module, budget, backward=backward, **more)


def run_limit(case: LimitCase, say: Say) -> Result:
    """The longest confirmed length, with the line that led to it."""
    end = math.inf if case.seconds is None else time.monotonic() + case.seconds
    runs: list[Run] = []
    error = None
    say(f"{case.name}: checking")
    try:
        error = check_candidate(case.at(case.budget // case.at(1).tensor_bytes // PARTS[0] or 1), case.module)
        why_not = search(case, runs, lambda n: _run(case, n, end, say), end)
    except CannotRunError as reason:
        why_not = f"{case.module} cannot run: {reason}"
    best = max((run for run in runs if run.peak <= case.budget), default=None)
    figures = (Figure("longest sequence", best and best.n, "tokens", case.target, at_least=True),)
    if best is None:
        least = [f"even {runs[0].n:,} tokens take {runs[0].peak:,} bytes"] if runs else []
        reasons = "; ".join([*least, *([why_not] if why_not else [])])
        return Result(case_of(case), 1, error, figures=figures, why_not=reasons)
    note = remarks(case.module, case.config)
    note += "; checked at a reduced length only" if best.error is None else ""
    slope, base = fit_line(runs[-2:]) if len(runs) > 1 else (0.0, 0.0)
    counts = {"confirmed": best.n, "peak": best.peak, "bytes a token": round(slope), "fixed": round(base)}
    error = max(error or 0.0, *(run.error or 0.0 for run in runs))
    seconds, notes = {"attention": (best.seconds,)}, {case.module: note}
    return Result(case_of(case), 1, error, seconds, counts, figures, why_not, notes)


def search(case: LimitCase, runs: list[Run], measure: Callable[[int], Run | str], end: float) -> str | None:
    """Adds runs until one comes close to the budget, or a longer one could not be within it.

    `measure` gives a run, or says why it was not run to its end. Returns why the search ended early.
    """
    token_bytes = case.at(1).tensor_bytes
    firsts = sorted({max(1, case.budget // token_bytes // part) for part in PARTS})
    tried: set[int] = set()
    too_long, why = math.inf, None
    for _ in range(MOST_RUNS):
        fitting = max((run for run in runs if run.peak <= case.budget), default=None)
        if (runs and fitting is None) or (fitting and fitting.peak >= CLOSE * case.budget):
            return None
        low = fitting.n if fitting else 0
        if untried := [n for n in firsts if n not in tried and n < too_long]:
            n = untried[0]
        else:
            predicted = predict(case.budget, runs, token_bytes) if len(runs) > 1 else math.inf
            n = int(predicted if predicted < too_long else low + (too_long - low) // 2)
        if n < 1 or n in tried or low >= CLOSE * too_long:
            break
        left, expected = end - time.monotonic(), expected_seconds(runs, n)
        if expected > left:
            return f"a run of {n:,} tokens would take about {expected:.0f} s, and {left:.0f} s are left"
        found = measure(n)
        tried.add(n)
        if isinstance(found, str):
            too_long, why = n, f"{n:,} tokens were not run to their end: {found}"
            continue
        runs.append(found)
        too_long = min(too_long, n) if found.peak > case.budget else too_long
    return why


def predict(budget: int, runs: Sequence[Run], least: int) -> int:
    """The length that the line through the two longest runs leaves within the budget, a little below it."""
    longest = sorted(runs)[-2:]
    slope = max(least, fit_line(longest)[0])  # short runs may hide bytes in memory that was there before
    return longest[-1].n + math.floor((AIM * budget - longest[-1].peak) / slope)


def fit_line(runs: Sequence[Run]) -> tuple[float, float]:
    """Bytes a token and the rest, of two runs."""
    first, second = runs
    slope = (second.peak - first.peak) / (second.n - first.n)
    return slope, second.peak - slope * second.n


def expected_seconds(runs: Sequence[Run], n: int) -> float:
    """The time of n tokens: that of the longest run, times a power of the ratio of lengths."""
    if not runs:
        return 0.0
    first, last, power = min(runs), max(runs), 1.0
    if first.n < last.n:
        power = max(1.0, math.log(last.seconds / first.seconds) / math.log(last.n / first.n))
    return float(last.seconds * (n / last.n) ** power)


def _run(case: LimitCase, n: int, end: float, say: Say) -> Run | str:
    say(f"{case.name}: running {n:,} tokens in a process of its own")
    left, at = end - time.monotonic(), case.at(n)
    timeout = None if left == math.inf else max(0.0, left)
    measured = measure_in_child(measure_candidate, at, case.module, needed=at.tensor_bytes, timeout=timeout)
    if measured.why_not is not None:
        return measured.why_not
    error, right = measured.error, "rows not checked at this length"
    if error is not None:
        right = f"right within {accept(f'{case.name}, n = {n}', error, case.config.dtype):.0e}"
    run = Run(n, measured.counts["peak_total"], measured.seconds["attention"][0], error)
    say(f"{case.name}: {n:,} tokens took {run.peak / 2**30:.2f} GiB and {run.seconds:.1f} s, {right}")
    return run


def make_table(results: Sequence[Result]) -> Table:
    """The confirmed lengths, with peak memory and time of their runs."""
    rows = []
    for result in results:
        peak, seconds, remark = "", "", [*result.notes.values()]
        if "confirmed" in result.counts:
            peak = show_value(result.counts["peak"], "bytes")
            seconds = f"{result.seconds['attention'][0]:.1f}"
            remark += [result.why_not] if result.why_not else []
        cells = [show_value(result.case["budget"], "bytes"), *result.shown(result.figures[0]), peak, seconds]
        rows.append([result.name, *cells, "; ".join(remark)])
    return Table(["case", "budget", "tokens", "target", "peak of the process", "s", "remarks"], rows)


TITLE = "**Limits**: the longest sequence within a budget of memory"
SECTION = Section(TITLE, make_table, describe, has_rounds=False)
