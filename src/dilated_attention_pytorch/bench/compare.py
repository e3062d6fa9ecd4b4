"""Two records held against each other: ratios of times with confidence intervals, and of bytes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .cases import case_to_dict, describe
from .cells import Table
from .figures import show_value
from .record import Record, Result

RESAMPLES = 2000
FEWEST = 3  # durations of a side, below which an interval would say nothing
FACTS = ("cpu", "cores", "threads", "torch", "os", "python")
# How counts that are bytes begin; others, as flops, do not depend on the run.
BYTES = ("peak", "build_peak", "cache", "received", "pattern", "tensors")


@dataclass(frozen=True)
class Change:
    """A candidate's medians in both records, B over A, and the bounds of that; None with too few rounds."""

    case: str
    candidate: str
    median_a: float
    median_b: float
    rounds: tuple[int, int]
    low: float | None
    high: float | None

    @property
    def ratio(self) -> float:
        return self.median_b / self.median_a

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return f"no interval: fewer than {FEWEST} rounds"
        if self.high < 1.0:
            return "faster"
        return "slower" if self.low > 1.0 else "no difference shown"


@dataclass(frozen=True)
class ByteChange:
    case: str
    what: str
    nbytes_a: int
    nbytes_b: int

    @property
    def ratio(self) -> float | None:
        return self.nbytes_b / self.nbytes_a if self.nbytes_a else None


@dataclass(frozen=True)
class Comparison:
    """What both records hold, what only one of them holds, and what makes them hard to compare."""

    changes: tuple[Change, ...]
    byte_changes: tuple[ByteChange, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    warnings: tuple[str, ...]


def compare_records(a: Record, b: Record) -> Comparison:
    """B against A; cases are matched by kind and name, and must have the same sizes."""
    others = {_key(result): result for result in b.results}
    shared = [(result, others[_key(result)]) for result in a.results if _key(result) in others]
    warnings = list(_fact_warnings(a, b))
    pairs = []
    for first, second in shared:
        sizes = describe(first.case), describe(second.case)
        if sizes[0] == sizes[1]:
            pairs.append((first, second))
        else:
            warnings.append(f"{first.case.name}: not compared, sizes differ: {sizes[0]} and {sizes[1]}")
    return Comparison(
        tuple(change for pair in pairs for change in _changes(*pair)),
        tuple(change for pair in pairs for change in _byte_changes(*pair)),
        tuple(_missing(a, b, pairs)),
        tuple(_missing(b, a, [(second, first) for first, second in pairs])),
        tuple(warnings),
    )


def bootstrap_ratio(a: Sequence[float], b: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The central 95 % of the ratios of medians, B over A, of durations drawn with replacement."""
    draw = random.Random(seed)
    ratios = sorted(
        statistics.median(draw.choices(b, k=len(b))) / statistics.median(draw.choices(a, k=len(a)))
        for _ in range(RESAMPLES)
    )
    cut = round(0.025 * RESAMPLES)
    return ratios[cut], ratios[-1 - cut]


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON can hold it."""
    changes = [{**asdict(c), "ratio": c.ratio, "verdict": c.verdict} for c in comparison.changes]
    byte_changes = [{**asdict(c), "ratio": c.ratio} for c in comparison.byte_changes]
    return {**asdict(comparison), "changes": changes, "byte_changes": byte_changes}


def comparison_markdown(comparison: Comparison) -> str:
    """Tables of times and bytes, then what stands in one record only, and warnings."""
    parts = [f"**Warning**: {warning}." for warning in comparison.warnings]
    if comparison.changes:
        parts += ["**Time**, B over A: ratio of medians with its 95 % interval", str(_time_table(comparison))]
    if comparison.byte_changes:
        parts += ["**Bytes**, B over A", str(_byte_table(comparison))]
    if not comparison.changes and not comparison.byte_changes:
        parts.append("Nothing in common was measured.")
    for which, names in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if names:
            parts.append("\n".join([f"Only in {which}:", "", *(f"- {name}" for name in names)]))
    return "\n\n".join(parts) + "\n"


def _time_table(comparison: Comparison) -> Table:
    rows = []
    for change in comparison.changes:
        medians = [f"{1e3 * value:.2f}" for value in (change.median_a, change.median_b)]
        interval = "" if change.low is None else f"{change.low:.3f} to {change.high:.3f}"
        rounds = " and ".join(map(str, change.rounds))
        rows.append(
            [
                f"{change.case}, {change.candidate}",
                *medians,
                f"{change.ratio:.3f}",
                interval,
                rounds,
                change.verdict,
            ]
        )
    return Table(["case and candidate", "A, ms", "B, ms", "B / A", "95 %", "rounds", "B is"], rows)


def _byte_table(comparison: Comparison) -> Table:
    rows = []
    for change in comparison.byte_changes:
        sizes = [show_value(value, "bytes") for value in (change.nbytes_a, change.nbytes_b)]
        ratio = "" if change.ratio is None else f"{change.ratio:.3f}"
        rows.append([f"{change.case}, {change.what}", *sizes, ratio])
    return Table(["case and count", "A", "B", "B / A"], rows)


def _key(result: Result) -> tuple[str, str]:
    return case_to_dict(result.case)["kind"], result.case.name


def _missing(here: Record, there: Record, pairs: Sequence[tuple[Result, Result]]) -> Iterator[str]:
    """Cases of one record that the other lacks, then candidates of the cases that both have."""
    known = {_key(result) for result in there.results}
    yield from (result.case.name for result in here.results if _key(result) not in known)
    for one, other in pairs:
        yield from (f"{one.case.name}, {name}" for name in one.seconds if name not in other.seconds)


def _fact_warnings(a: Record, b: Record) -> Iterator[str]:
    for fact in FACTS:
        first, second = a.machine.get(fact), b.machine.get(fact)
        if first != second:
            yield f"{fact} differs: {first} and {second}"


def _changes(a: Result, b: Result) -> Iterator[Change]:
    for name in a.seconds:
        if name in b.seconds:
            first, second = a.seconds[name], b.seconds[name]
            rounds = (len(first), len(second))
            bounds = bootstrap_ratio(first, second) if min(rounds) >= FEWEST else (None, None)
            medians = statistics.median(first), statistics.median(second)
            yield Change(a.case.name, name, *medians, rounds, *bounds)


def _byte_changes(a: Result, b: Result) -> Iterator[ByteChange]:
    for name, nbytes in a.counts.items():
        if name in b.counts and name.startswith(BYTES):
            yield ByteChange(a.case.name, name, nbytes, b.counts[name])
