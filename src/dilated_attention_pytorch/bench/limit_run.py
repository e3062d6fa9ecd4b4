"""Finds the longest sequence within a budget of memory: predicts it from shorter ones, then runs it.

Memory grows linearly with the length, so two runs give a line. What is reported has been run, in a process
whose peak (`VmHWM`) stayed within the budget and whose rows were those of the definition.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .child import Measured, measure_in_child
from .gate import TOLERANCES, accept
from .limit_cases import LimitCase
from .module_candidates import entry_of, remarks
from .module_cases import CompareCase
from .module_gate import check_candidate
from .peers import CannotRunError
from .record import Result, make_result

PARTS = (16, 8)  # the first lengths: these parts of what the bare tensors of the budget would allow
MOST_RUNS = 6
AIM, CLOSE = 0.99, 0.97  # parts of the budget: what a run aims at, and what is near enough to stop


@dataclass(frozen=True)
class Run:
    """One length that was run: peak bytes of its process, seconds of the call, the error of its rows.

    `error` is None where no rows can be computed from the definition, as with random projections.
    """

    n: int
    peak: int
    seconds: float
    error: float | None


class StoppedError(Exception):
    """The search ended early; the message says why."""


class UnfinishedError(Exception):
    """A length was not run to its end; the message says why."""


def run_limit(case: LimitCase, say: Callable[[str], None]) -> Result:
    """The longest confirmed length, with the line that led to it."""
    if reason := entry_of(case.module).why_not(case.backward):
        return make_result(case, 1, None, {}, {}, f"{case.module} cannot run: {reason}")
    say(f"{case.name}: checking")
    end = math.inf if case.seconds is None else time.monotonic() + case.seconds
    try:
        error = check_candidate(_at(case, first_lengths(case)[0]), case.module)
    except CannotRunError as reason:
        return make_result(case, 1, None, {}, {}, f"{case.module} cannot run: {reason}")
    runs: list[Run] = []
    why_not = None
    try:
        search(case, runs, lambda n: _run(case, n, end - time.monotonic(), say), end)
    except StoppedError as reason:
        why_not = str(reason)
    fitting = [run for run in runs if run.peak <= case.budget]
    if not fitting:
        least = f"even {runs[0].n:,} tokens take {runs[0].peak:,} bytes" if runs else ""
        return make_result(case, 1, error, {}, {}, "; ".join(filter(None, [least, why_not])))
    best = max(fitting, key=lambda run: run.n)
    error = max(error, *(run.error or 0.0 for run in runs))
    note = remarks(case.module, case.config)
    if best.error is None:
        note += "; checked at a reduced length only"
    slope, base = fit_line(runs[-2:]) if len(runs) > 1 else (0.0, 0.0)
    counts = {"confirmed": best.n, "peak": best.peak, "bytes a token": round(slope), "fixed": round(base)}
    return make_result(case, 1, error, {"attention": (best.seconds,)}, counts, why_not, {case.module: note})


def search(case: LimitCase, runs: list[Run], measure: Callable[[int], Run], end: float) -> None:
    """Adds runs until one comes close to the budget, or a longer one could not be within it."""
    too_long, why = math.inf, ""
    for _ in range(MOST_RUNS):
        fitting = max((run for run in runs if run.peak <= case.budget), key=lambda r: r.n, default=None)
        if fitting is not None and fitting.peak >= CLOSE * case.budget:
            return
        n = _next_length(case, runs, fitting, too_long)
        if n < 1 or any(run.n == n for run in runs) or (runs and fitting is None):
            return
        if fitting is not None and too_long < math.inf and fitting.n >= CLOSE * too_long:
            break
        _check_time(runs, n, end)
        try:
            runs.append(measure(n))
        except UnfinishedError as reason:
            too_long, why = n, f"{n:,} tokens were not run to their end: {reason}"
            continue
        if runs[-1].peak > case.budget:
            too_long = min(too_long, n)
    if why:
        raise StoppedError(why)


def _next_length(case: LimitCase, runs: list[Run], fitting: Run | None, too_long: float) -> int:
    """The first lengths, then what the line predicts; halfway to what is too long where it does not tell."""
    tried = [run.n for run in runs]
    untried = [n for n in first_lengths(case) if n not in tried and n < too_long]
    if untried:
        return untried[0]
    n = predict(case.budget, runs, token_bytes(case)) if len(runs) > 1 else math.inf
    if n < too_long:
        return int(n)
    low = fitting.n if fitting else 0
    return low + int(too_long - low) // 2 if too_long < math.inf else 0


def first_lengths(case: LimitCase) -> list[int]:
    """Short lengths for the line: small parts of what the tensors alone would fill the budget with."""
    return sorted({max(1, case.budget // token_bytes(case) // part) for part in PARTS})


def token_bytes(case: LimitCase) -> int:
    """What a token takes in q, k, v and out, and with gradients in theirs."""
    itemsize: int = getattr(torch, case.config.dtype).itemsize
    return case.b * case.config.h * case.config.d * itemsize * (8 if case.backward else 4)


def predict(budget: int, runs: list[Run], least: int) -> int:
    """The length that the line through the two longest runs leaves within the budget, a little below it.

    A token takes `least` bytes or more: short runs may hide some in memory that was there before.
    """
    longest = sorted(runs, key=lambda run: run.n)[-2:]
    slope = max(least, fit_line(longest)[0])
    return longest[-1].n + math.floor((AIM * budget - longest[-1].peak) / slope)


def fit_line(runs: list[Run]) -> tuple[float, float]:
    """Bytes a token and the rest, of two runs."""
    first, second = runs
    slope = (second.peak - first.peak) / (second.n - first.n)
    return slope, second.peak - slope * second.n


def _check_time(runs: list[Run], n: int, end: float) -> None:
    """Raises where a run of n tokens would not end in time, as the power law of the runs so far tells."""
    left = end - time.monotonic()
    expected = expected_seconds(runs, n)
    if expected > left:
        raise StoppedError(
            f"a run of {n:,} tokens would take about {expected:.0f} s, and {left:.0f} s are left"
        )


def expected_seconds(runs: list[Run], n: int) -> float:
    """The time of n tokens: that of the longest run, times a power of the ratio of lengths."""
    if not runs:
        return 0.0
    ordered = sorted(runs, key=lambda run: run.n)
    last, power = ordered[-1], 1.0
    if len(ordered) > 1:
        first = ordered[0]
        power = max(1.0, math.log(last.seconds / first.seconds) / math.log(last.n / first.n))
    return float(last.seconds * (n / last.n) ** power)


def _run(case: LimitCase, n: int, left: float, say: Callable[[str], None]) -> Run:
    say(f"{case.name}: running {n:,} tokens in a process of its own")
    measured: Measured = measure_in_child(_at(case, n), 1, case.module, None if left == math.inf else left)
    if measured.why_not is not None:
        raise UnfinishedError(measured.why_not)
    error = measured.error
    if error is not None:
        error = accept(f"{case.name}, n = {n}", error, TOLERANCES[case.config.dtype])
    (seconds,) = measured.seconds["attention"]
    peak = measured.nbytes["peak_total"]
    right = "rows not checked at this length" if error is None else f"right within {error:.0e}"
    say(f"{case.name}: {n:,} tokens took {peak / 2**30:.2f} GiB and {seconds:.1f} s, {right}")
    return Run(n, peak, seconds, error)


def _at(case: LimitCase, n: int) -> CompareCase:
    return CompareCase(case.name, case.config, n, (case.module,), case.b, case.backward)
