"""Two records held against each other: ratios of times with confidence intervals, and of bytes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .record import Record, Result, Table, show_value

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
    ratio: float
    verdict: str


@dataclass(frozen=True)
class CountChange:
    """A number of bytes, or of something else, in both records."""

    case: str
    what: str
    count_a: int
    count_b: int
    ratio: float | None


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
    facts = [(fact, a.machine.get(fact), b.machine.get(fact)) for fact in FACTS]
    warnings = [f"{fact} differs: {one} and {other}" for fact, one, other in facts if one != other]
    firsts, seconds = ({_key(result): result for result in record.results} for record in (a, b))
    pairs = []
    for first, second in ((first, seconds[key]) for key, first in firsts.items() if key in seconds):
        one, other = _what(first.case), _what(second.case)
        if one == other:
            pairs.append((first, second))
        else:
            fields = [
                f"{x} {one.get(x)} and {other.get(x)}" for x in one | other if one.get(x) != other.get(x)
            ]
            warnings.append(f"{first.name}: not compared, it is another case: {'; '.join(fields)}")
    return Comparison(
        tuple(change for pair in pairs for change in _changes(*pair)),
        tuple(change for pair in pairs for change in _count_changes(*pair)),
        tuple(_missing(firsts, seconds, pairs)),
        tuple(_missing(seconds, firsts, [(second, first) for first, second in pairs])),
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
    return asdict(comparison)


def comparison_markdown(comparison: Comparison) -> str:
    """Tables of times and bytes, then what stands in one record only, and warnings."""
    parts = [f"**Warning**: {warning}." for warning in comparison.warnings]
    if comparison.changes:
        head = ["case and candidate", "A, ms", "B, ms", "B / A", "95 %", "rounds", "B is"]
        table = Table(head, [*map(_time_row, comparison.changes)])
        parts += ["**Time**, B over A: ratio of medians with its 95 % interval", str(table)]
    if comparison.count_changes:
        table = Table(["case and count", "A", "B", "B / A"], [*map(_count_row, comparison.count_changes)])
        parts += ["**Bytes and counts**, B over A", str(table)]
    if not comparison.changes and not comparison.count_changes:
        parts.append("Nothing in common was measured.")
    for which, names in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if names:
            parts.append("\n".join([f"Only in {which}:", "", *(f"- {name}" for name in names)]))
    return "\n\n".join(parts) + "\n"


def _time_row(change: Change) -> list[str]:
    medians = [f"{1e3 * value:.2f}" for value in (change.median_a, change.median_b)]
    interval = "" if change.low is None else f"{change.low:.3f} to {change.high:.3f}"
    rounds = " and ".join(map(str, change.rounds))
    label = f"{change.case}, {change.candidate}"
    return [label, *medians, f"{change.ratio:.3f}", interval, rounds, change.verdict]


def _count_row(change: CountChange) -> list[str]:
    unit = "tokens" if change.what.startswith(NUMBERS) else "bytes"
    counts = [show_value(count, unit) for count in (change.count_a, change.count_b)]
    return [f"{change.case}, {change.what}", *counts, "" if change.ratio is None else f"{change.ratio:.3f}"]


def _what(fields: Any) -> Any:
    """The fields of a case that say what is measured."""
    if isinstance(fields, dict):
        kept = {name: value for name, value in fields.items() if name not in MANNERS}
        return {name: _what(value) for name, value in kept.items() if not name.endswith("target")}
    return [_what(each) for each in fields] if isinstance(fields, list) else fields


def _key(result: Result) -> tuple[str, str]:
    return result.case["kind"], result.name


def _missing(here: dict[Any, Result], there: dict[Any, Result], pairs: Sequence[Any]) -> Iterator[str]:
    """Cases of one record that the other lacks, then candidates of the cases that both have."""
    yield from (result.name for key, result in here.items() if key not in there)
    for one, other in pairs:
        yield from (f"{one.name}, {name}" for name in one.seconds if name not in other.seconds)


def _changes(a: Result, b: Result) -> Iterator[Change]:
    for name in (name for name in a.seconds if name in b.seconds):
        first, second = a.seconds[name], b.seconds[name]
        rounds = (len(first), len(second))
        low, high = bootstrap_ratio(first, second) if min(rounds) >= FEWEST else (None, None)
        verdict = f"no interval: fewer than {FEWEST} rounds"
        if low is not None and high is not None:
            verdict = "faster" if high < 1.0 else "slower" if low > 1.0 else "no difference shown"
        medians = statistics.median(first), statistics.median(second)
        yield Change(a.name, name, *medians, rounds, low, high, medians[1] / medians[0], verdict)


def _count_changes(a: Result, b: Result) -> Iterator[CountChange]:
    for name, count in a.counts.items():
        if name in b.counts and name.startswith((*BYTES, *NUMBERS)):
            yield CountChange(a.name, name, count, b.counts[name], b.counts[name] / count if count else None)
