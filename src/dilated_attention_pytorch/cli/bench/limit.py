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
from .cases import Case, Say, check_candidate, describe_config, measure_candidate
from .gate import accept
from .measure import measure_in_child
from .record import Figure, Result, Section, Table, case_of, show_value

PARTS = (16, 8)  # the first lengths: these parts of what the bare tensors of the budget would allow
MOST_RUNS = 6
AIM, CLOSE = 0.99, 0.97  # parts of the budget: what a run aims at, and what is near enough to stop
BUDGET, LIMITED = 8 * 2**30, "DilatedAttention"
# Cheap branches, of which the last spans whatever fits: the limit is one of memory.
CONFIG = Config(8, 64, *branches_for(2**21, first=1024, ratio=4), dtype="bfloat16")
TARGETS = {False: 1_800_000, True: 700_000}  # of BUDGET with the sizes of CONFIG, by whether it trains
# What the requirement documents report for a GTX 1080 with 8 GB.
DOCUMENTED = {"`ImprovedDilatedAttention` with a memory pool": 65_536, "base block-sparse attention": 131_072}


@dataclass(frozen=True)
class LimitCase:
    """The longest sequence of a module whose whole process stays within `budget` bytes: run, not predicted.

    `target` is in tokens. `seconds` is the most time that the search may take.
    """

    name: str
    config: Config
    module: str = LIMITED
    budget: int = BUDGET
    b: int = 1
    backward: bool = False
    target: int | None = None
    seconds: float | None = None
    repeats: int = 1
    kind: ClassVar[str] = "limit"

    def at(self, n: int) -> Case:
        return Case(self.name, self.config, n, (self.module,), self.b, self.backward)


class Run(NamedTuple):
    """One length that was run: peak bytes of its process, seconds of the call, the error of its rows.

    `error` is None where no rows can be computed from the definition, as with random projections.
    """

    n: int
    peak: int
    seconds: float
    error: float | None


class StoppedError(Exception):
    """The search ended early; the message says why."""


def limit_case(
    config: Config, module: str = LIMITED, budget: int = BUDGET, *, backward: bool = False, **more: Any
) -> LimitCase:
    """The case with its name, and with its target where its sizes are those that the target is for."""
    name = f"limit of {module}, {'training' if backward else 'forward'}"
    is_aimed = (config, module, budget, more.get("b", 1)) == (CONFIG, LIMITED, BUDGET, 1)
    target = TARGETS[backward] if is_aimed else None
    return LimitCase(name, config, module, budget, backward=backward, target=target, **more)


def run_limit(case: LimitCase, say: Say) -> Result:
    """The longest confirmed length, with the line that led to it."""
    end = math.inf if case.seconds is None else time.monotonic() + case.seconds
    runs: list[Run] = []
    error, why_not = None, None
    say(f"{case.name}: checking")
    try:
        error = check_candidate(case.at(case.budget // case.at(1).tensor_bytes // PARTS[0] or 1), case.module)
        search(case, runs, lambda n: _run(case, n, end, say), end)
    except CannotRunError as reason:
        why_not = f"{case.module} cannot run: {reason}"
    except StoppedError as reason:
        why_not = str(reason)
    figure = Figure("longest sequence", None, "tokens", case.target, at_least=True)
    written = case_of(case)
    best = max((run for run in runs if run.peak <= case.budget), default=None)
    if best is None:
        least = [f"even {runs[0].n:,} tokens take {runs[0].peak:,} bytes"] if runs else []
        reasons = "; ".join([*least, *([why_not] if why_not else [])])
        return Result(written, 1, error, figures=(figure,), why_not=reasons)
    note = remarks(case.module, case.config)
    note += "; checked at a reduced length only" if best.error is None else ""
    slope, base = fit_line(runs[-2:]) if len(runs) > 1 else (0.0, 0.0)
    counts = {"confirmed": best.n, "peak": best.peak, "bytes a token": round(slope), "fixed": round(base)}
    return Result(
        written,
        1,
        max(error or 0.0, *(run.error or 0.0 for run in runs)),
        {"attention": (best.seconds,)},
        counts,
        (Figure("longest sequence", best.n, "tokens", case.target, at_least=True),),
        why_not,
        {case.module: note},
    )


def search(case: LimitCase, runs: list[Run], measure: Callable[[int], Run | str], end: float) -> None:
    """Adds runs until one comes close to the budget, or a longer one could not be within it.

    `measure` gives a run, or says why it was not run to its end.
    """
    token_bytes = case.at(1).tensor_bytes
    firsts = sorted({max(1, case.budget // token_bytes // part) for part in PARTS})
    tried: set[int] = set()
    too_long, why = math.inf, ""
    for _ in range(MOST_RUNS):
        fitting = max((run for run in runs if run.peak <= case.budget), default=None)
        if (runs and fitting is None) or (fitting and fitting.peak >= CLOSE * case.budget):
            return
        low = fitting.n if fitting else 0
        untried = [n for n in firsts if n not in tried and n < too_long]
        if untried:
            n = untried[0]
        else:
            predicted = predict(case.budget, runs, token_bytes) if len(runs) > 1 else math.inf
            n = int(predicted if predicted < too_long else low + (too_long - low) // 2)
        if n < 1 or n in tried or low >= CLOSE * too_long:
            break
        left, expected = end - time.monotonic(), expected_seconds(runs, n)
        if expected > left:
            seconds = f"about {expected:.0f} s, and {left:.0f} s are left"
            raise StoppedError(f"a run of {n:,} tokens would take {seconds}")
        found = measure(n)
        tried.add(n)
        if isinstance(found, str):
            too_long, why = n, f"{n:,} tokens were not run to their end: {found}"
            continue
        runs.append(found)
        too_long = min(too_long, n) if found.peak > case.budget else too_long
    if why:
        raise StoppedError(why)


def predict(budget: int, runs: Sequence[Run], least: int) -> int:
    """The length that the line through the two longest runs leaves within the budget, a little below it.

    A token takes `least` bytes or more: short runs may hide some in memory that was there before.
    """
    longest = sorted(runs)[-2:]
    slope = max(least, fit_line(longest)[0])
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
    measured = measure_in_child(
        *(measure_candidate, at, case.module),
        needed=at.tensor_bytes,
        timeout=None if left == math.inf else max(0.0, left),
    )
    if measured.why_not is not None:
        return measured.why_not
    error, right = measured.error, "rows not checked at this length"
    if error is not None:
        right = f"right within {accept(f'{case.name}, n = {n}', error, case.config.dtype):.0e}"
    run = Run(n, measured.counts["peak_total"], measured.seconds["attention"][0], error)
    say(f"{case.name}: {n:,} tokens took {run.peak / 2**30:.2f} GiB and {run.seconds:.1f} s, {right}")
    return run


def describe(case: dict[str, Any]) -> str:
    """The sizes of a case in a few words."""
    guard = "" if case["seconds"] is None else f"at most {case['seconds']:g} s of search"
    words = [f"{case['budget'] / 2**30:g} GiB", f"b = {case['b']}", *describe_config(case["config"]), guard]
    return ", ".join(filter(None, words))


def make_table(results: Sequence[Result]) -> Table:
    """The confirmed lengths, and beside them those that the requirement documents report for 8 GB."""
    rows = []
    for result in results:
        confirmed = result.counts.get("confirmed")
        peak, seconds, over, remark = "", "", ["" for _ in DOCUMENTED], [*result.notes.values()]
        if confirmed is not None:
            peak = show_value(result.counts["peak"], "bytes")
            seconds = f"{result.seconds['attention'][0]:.1f}"
            remark += [result.why_not] if result.why_not else []
            if result.case["target"] is not None:  # the documents speak of the budget and sizes of the target
                over = [f"{confirmed / n:.1f} x" for n in DOCUMENTED.values()]
        cells = [show_value(result.case["budget"], "bytes"), *result.shown(result.figures[0]), peak, seconds]
        rows.append([result.name, *cells, *over, "; ".join(remark)])
    documented = [f"over {n:,} ({what})" for what, n in DOCUMENTED.items()]
    head = ["case", "budget", "tokens", "target", "peak of the process", "s", *documented, "remarks"]
    return Table(head, rows)


TITLE = "**Limits**: the longest sequence within a budget of memory"
SECTION = Section(TITLE, make_table, describe, has_rounds=False)
