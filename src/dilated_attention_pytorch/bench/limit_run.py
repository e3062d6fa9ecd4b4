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
from .module_candidates import entry_of
from .module_cases import CompareCase
from .module_gate import check_candidate
from .peers import CannotRunError
from .record import Result, make_result

PARTS = (16, 8)  # the first lengths: these parts of what the bare tensors of the budget would allow
MOST_RUNS = 6
AIM, CLOSE = 0.99, 0.97  # parts of the budget: what a run aims at, and what is near enough to stop


@dataclass(frozen=True)
class Run:
    """One length that was run: peak bytes of its process, seconds of the call, the error of its rows."""

    n: int
    peak: int
    seconds: float
    error: float


class StoppedError(Exception):
    """The search ended early; the message says why."""


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
    error = max(error, *(run.error for run in runs))
    slope, base = fit_line(runs[-2:]) if len(runs) > 1 else (0.0, 0.0)
    counts = {"confirmed": best.n, "peak": best.peak, "bytes a token": round(slope), "fixed": round(base)}
    return make_result(case, 1, error, {"attention": (best.seconds,)}, counts, why_not)


def search(case: LimitCase, runs: list[Run], measure: Callable[[int], Run], end: float) -> None:
    """Adds runs until one comes close to the budget, or a longer one could not be within it."""
    for n in first_lengths(case):
        _check_time(runs, n, end)
        runs.append(measure(n))
        if runs[0].peak > case.budget:
            return
    while len(runs) < MOST_RUNS:
        fitting = max((run for run in runs if run.peak <= case.budget), key=lambda r: r.n, default=None)
        if fitting is not None and fitting.peak >= CLOSE * case.budget:
            return
        n = predict(case.budget, runs, token_bytes(case))
        too_long = min((run.n for run in runs if run.peak > case.budget), default=n + 1)
        n = min(n, too_long - 1)
        if n < 1 or any(run.n == n for run in runs):
            return
        _check_time(runs, n, end)
        runs.append(measure(n))


def first_lengths(case: LimitCase) -> list[int]:
    """Short lengths for the line: small parts of what the tensors alone would fill the budget with."""
    return [max(1, case.budget // token_bytes(case) // part) for part in PARTS]


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
        raise StoppedError(f"{n:,} tokens were not run to their end: {measured.why_not}")
    error = accept(f"{case.name}, n = {n}", measured.error or 0.0, TOLERANCES[case.config.dtype])
    (seconds,) = measured.seconds["attention"]
    peak = measured.nbytes["peak_total"]
    say(
        f"{case.name}: {n:,} tokens took {peak / 2**30:.2f} GiB and {seconds:.1f} s, right within {error:.0e}"
    )
    return Run(n, peak, seconds, error)


def _at(case: LimitCase, n: int) -> CompareCase:
    return CompareCase(case.name, case.config, n, (case.module,), case.b, case.backward)
