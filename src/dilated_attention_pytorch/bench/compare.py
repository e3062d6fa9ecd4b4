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
FEWEST = 5  # durations of a side; with fewer, equal sides would too often look different
FACTS = ("cpu", "cores", "threads", "torch", "os", "python")
# How counts begin that depend on the run, bytes and others; what is left out, as flops, does not.
BYTES = ("peak", "build_peak", "cache", "received", "pattern", "tensors")
NUMBERS = ("confirmed", "bits")
# Fields of a case that say how it is measured or judged, not what is measured.
MANNERS = ("repeats", "dense_repeats", "seconds")


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
class CountChange:
    """A number of bytes, or of something else, in both records."""

    case: str
    what: str
    count_a: int
    count_b: int

    @property
    def ratio(self) -> float | None:
        return self.count_b / self.count_a if self.count_a else None

    @property
    def shown(self) -> tuple[str, str]:
        if self.what.startswith(NUMBERS):
            return f"{self.count_a:,}", f"{self.count_b:,}"
        return show_value(self.count_a, "bytes"), show_value(self.count_b, "bytes")


@dataclass(frozen=True)
class Comparison:
    """What both records hold, what only one of them holds, and what makes them hard to compare."""

    changes: tuple[Change, ...]
    count_changes: tuple[CountChange, ...]
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
        if _what(case_to_dict(first.case)) == _what(case_to_dict(second.case)):
            pairs.append((first, second))
        else:
            sizes = f"{describe(first.case)} and {describe(second.case)}"
            warnings.append(f"{first.case.name}: not compared, it is another case: {sizes}")
    return Comparison(
        tuple(change for pair in pairs for change in _changes(*pair)),
        tuple(change for pair in pairs for change in _count_changes(*pair)),
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
    count_changes = [{**asdict(c), "ratio": c.ratio} for c in comparison.count_changes]
    return {**asdict(comparison), "changes": changes, "count_changes": count_changes}


def comparison_markdown(comparison: Comparison) -> str:
    """Tables of times and bytes, then what stands in one record only, and warnings."""
    parts = [f"**Warning**: {warning}." for warning in comparison.warnings]
    if comparison.changes:
        parts += ["**Time**, B over A: ratio of medians with its 95 % interval", str(_time_table(comparison))]
    if comparison.count_changes:
        parts += ["**Bytes and counts**, B over A", str(_count_table(comparison))]
    if not comparison.changes and not comparison.count_changes:
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


def _count_table(comparison: Comparison) -> Table:
    rows = []
    for change in comparison.count_changes:
        ratio = "" if change.ratio is None else f"{change.ratio:.3f}"
        rows.append([f"{change.case}, {change.what}", *change.shown, ratio])
    return Table(["case and count", "A", "B", "B / A"], rows)


def _what(fields: Any) -> Any:
    """The fields of a case that say what is measured."""
    if isinstance(fields, dict):
        kept = {name: value for name, value in fields.items() if name not in MANNERS}
        return {name: _what(value) for name, value in kept.items() if not name.endswith("target")}
    return [_what(each) for each in fields] if isinstance(fields, (list, tuple)) else fields


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


def _count_changes(a: Result, b: Result) -> Iterator[CountChange]:
    for name, nbytes in a.counts.items():
        if name in b.counts and name.startswith((*BYTES, *NUMBERS)):
            yield CountChange(a.case.name, name, nbytes, b.counts[name])
