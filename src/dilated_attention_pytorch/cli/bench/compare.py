"""Two records held against each other: ratios of times with confidence intervals, and of bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from .record import Record, Result, Table, show_value

RESAMPLES = 2000
FEWEST = 5  # durations of a side; with fewer, equal sides would too often look different
FACTS = ("cpu", "cores", "threads", "torch", "os", "python", "kernel")
# How counts begin that depend on the run, bytes and others; what is left out, as flops, does not.
BYTES = ("peak", "build_peak", "cache", "received", "pattern", "tensors")
NUMBERS = ("confirmed", "bits")
# Fields of a case that say how it is measured or judged, not what is measured.
MANNERS = ("repeats", "dense_repeats", "seconds")


def compare_records(a: Record, b: Record) -> dict[str, Any]:
    """B against A, as JSON can hold it; cases are matched by kind and name, and must have the same sizes.

    `changes` are medians of candidates and their ratios with bounds, None with too few rounds;
    `count_changes` are bytes and other counts; then what stands in one record only, and warnings.
    """
    warnings = [f"{fact} differs: {differ}" for fact, differ in _differences(a.machine, b.machine, FACTS)]
    firsts, seconds = ({(x.case["kind"], x.name): x for x in record.results} for record in (a, b))
    pairs = []
    for first, second in ((firsts[key], seconds[key]) for key in firsts if key in seconds):
        one, other = _what(first.case), _what(second.case)
        if fields := [f"{field} {differ}" for field, differ in _differences(one, other, one | other)]:
            warnings.append(f"{first.name}: not compared, it is another case: {'; '.join(fields)}")
        else:
            pairs.append((first, second))
    return {
        "changes": [change for pair in pairs for change in _changes(*pair)],
        "count_changes": [change for pair in pairs for change in _count_changes(*pair)],
        "only_in_a": [*_missing(firsts, seconds, pairs)],
        "only_in_b": [*_missing(seconds, firsts, [(second, first) for first, second in pairs])],
        "warnings": warnings,
    }


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], names: Any) -> Iterator[tuple[str, str]]:
    for name in names:
        if one.get(name) != other.get(name):
            yield name, f"{one.get(name)} and {other.get(name)}"


def _what(fields: Any) -> Any:
    """The fields of a case that say what is measured."""
    if isinstance(fields, dict):
        kept = {name: value for name, value in fields.items() if name not in MANNERS}
        return {name: _what(value) for name, value in kept.items() if not name.endswith("target")}
    return [_what(each) for each in fields] if isinstance(fields, list) else fields


def _missing(here: dict[Any, Result], there: dict[Any, Result], pairs: Sequence[Any]) -> Iterator[str]:
    """Cases of one record that the other lacks, then candidates of the cases that both have."""
    yield from (result.name for key, result in here.items() if key not in there)
    for one, other in pairs:
        yield from (f"{one.name}, {name}" for name in one.seconds if name not in other.seconds)


def _changes(a: Result, b: Result) -> Iterator[dict[str, Any]]:
    for name in (name for name in a.seconds if name in b.seconds):
        first, second = a.seconds[name], b.seconds[name]
        low, high, verdict = None, None, f"no interval: fewer than {FEWEST} rounds"
        if min(len(first), len(second)) >= FEWEST:
            low, high = bootstrap_ratio(first, second)
            verdict = "faster" if high < 1.0 else "slower" if low > 1.0 else "no difference shown"
        one, other = median(first), median(second)
        found = {"median_a": one, "median_b": other, "rounds": [len(first), len(second)]}
        found |= {"low": low, "high": high, "ratio": other / one, "verdict": verdict}
        yield {"case": a.name, "candidate": name, **found}


def bootstrap_ratio(a: Sequence[float], b: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The central 95 % of the ratios of medians, B over A, of durations drawn with replacement."""
    draw = random.Random(seed).choices
    ratios = sorted(median(draw(b, k=len(b))) / median(draw(a, k=len(a))) for _ in range(RESAMPLES))
    cut = round(0.025 * RESAMPLES)
    return ratios[cut], ratios[-1 - cut]


def _count_changes(a: Result, b: Result) -> Iterator[dict[str, Any]]:
    for name, count in a.counts.items():
        if name in b.counts and name.startswith((*BYTES, *NUMBERS)):
            ratio = b.counts[name] / count if count else None
            yield {"case": a.name, "what": name, "count_a": count, "count_b": b.counts[name], "ratio": ratio}


def comparison_markdown(comparison: dict[str, Any]) -> str:
    """Tables of times and bytes, then what stands in one record only, and warnings."""
    parts = [f"**Warning**: {warning}." for warning in comparison["warnings"]]
    if comparison["changes"]:
        head = ["case and candidate", "A, ms", "B, ms", "B / A", "95 %", "rounds", "B is"]
        table = Table(head, [_time_row(**change) for change in comparison["changes"]])
        parts += ["**Time**, B over A: ratio of medians with its 95 % interval", str(table)]
    if comparison["count_changes"]:
        rows = [_count_row(**change) for change in comparison["count_changes"]]
        parts += ["**Bytes and counts**, B over A", str(Table(["case and count", "A", "B", "B / A"], rows))]
    if not comparison["changes"] and not comparison["count_changes"]:
        parts.append("Nothing in common was measured.")
    for which in "AB":
        if names := comparison[f"only_in_{which.lower()}"]:
            parts.append("\n".join([f"Only in {which}:", "", *(f"- {name}" for name in names)]))
    return "\n\n".join(parts) + "\n"


def _time_row(case: str, candidate: str, low: float | None, high: float | None, **change: Any) -> list[str]:
    medians = [f"{1e3 * change[name]:.2f}" for name in ("median_a", "median_b")]
    interval = "" if low is None else f"{low:.3f} to {high:.3f}"
    rounds = " and ".join(map(str, change["rounds"]))
    return [f"{case}, {candidate}", *medians, f"{change['ratio']:.3f}", interval, rounds, change["verdict"]]


def _count_row(case: str, what: str, count_a: int, count_b: int, ratio: float | None) -> list[str]:
    unit = "tokens" if what.startswith(NUMBERS) else "bytes"
    counts = [show_value(count, unit) for count in (count_a, count_b)]
    return [f"{case}, {what}", *counts, "" if ratio is None else f"{ratio:.3f}"]
