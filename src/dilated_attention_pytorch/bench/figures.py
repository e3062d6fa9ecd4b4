"""The figures that a case stands for, from the durations and byte counts that were measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .cases import Case, LongCase, MemoryCase, PoolCase, TimeCase
from .measure import Timing
from .sparse_cases import ModuleMemoryCase, PatternCase, SparseMemoryCase, SparseTimeCase


@dataclass(frozen=True)
class Figure:
    """One number that a case stands for; `value` is None where it could not be measured.

    `target` is the most that it should be, or with `at_least` the least.
    """

    name: str
    value: float | None
    unit: Literal["x", "bytes"] = "x"
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.value is None or self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


def make_figures(case: Case, timings: dict[str, Timing], counts: dict[str, int]) -> tuple[Figure, ...]:
    """What the case's kind and targets call for; counts are empty where nothing could be measured."""
    match case:
        case TimeCase():
            return _time_figures(timings.get("dilated"), timings.get("bare"), case.target)
        case MemoryCase():
            ratio = _ratio(counts, "peak_extra", "results")
            return (Figure("peak extra memory over bytes of results", ratio, target=case.target),)
        case PoolCase():
            return tuple(_pool_figures(case, timings, counts))
        case SparseTimeCase():
            return tuple(_sparse_figures(case, timings, counts))
        case SparseMemoryCase():
            ratio = _ratio(counts, "peak_extra", "results")
            share = timings["build"].minimum / timings["attention"].minimum if timings else None
            return (
                Figure("peak extra memory over out and lse", ratio, target=case.target),
                Figure("time of the build over attention", share, target=case.build_target),
            )
        case PatternCase():
            return (Figure("peak extra memory", counts.get("peak_extra"), "bytes", case.memory_target),)
        case ModuleMemoryCase():
            ratio = _ratio(counts, "peak_extra_module", "peak_extra_base")
            return (Figure("peak extra memory over that of the base", ratio, target=case.target),)
        case LongCase():
            peak = Figure("peak memory", counts.get("peak_total"), "bytes", case.memory_target)
            return (peak, *_time_figures(timings.get("long"), timings.get("base"), case.time_target))


def show_value(value: float, unit: Literal["x", "bytes"]) -> str:
    """A value with its unit: bytes in GiB, or in MiB below one."""
    if unit == "x":
        return f"{value:.3f}"
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def _ratio(counts: dict[str, int], over: str, under: str) -> float | None:
    return counts[over] / counts[under] if counts.keys() >= {over, under} else None


def _sparse_figures(
    case: SparseTimeCase, timings: dict[str, Timing], counts: dict[str, int]
) -> Iterator[Figure]:
    """By pattern how many times as fast as dense attention, and its FLOP rate over the bare kernel's."""
    rates = {name: counts[f"flops {name}"] / timing.minimum for name, timing in timings.items()}
    for entry in case.patterns:
        speed_up = timings["dense"].minimum / timings[entry.name].minimum
        yield Figure(f"{entry.name}: speed-up over dense", speed_up, target=entry.target, at_least=True)
        yield Figure(f"{entry.name}: share of the bare FLOP rate", rates[entry.name] / rates["bare"])


def _pool_figures(case: PoolCase, timings: dict[str, Timing], counts: dict[str, int]) -> Iterator[Figure]:
    """By kind of memory the ratio of minimal times to that with fresh memory; then of peak memory."""
    fresh = timings["fresh"].minimum
    targets = {"pool": case.target, "lightweight": case.lightweight_target, "manager": case.target}
    for name, target in targets.items():
        yield Figure(f"time with {name}", timings[name].minimum / fresh, target=target)
    yield Figure("time with no plan cache", timings["no plan cache"].minimum / fresh)
    for name in ("pool", "manager"):
        measured = counts.keys() >= {"peak_fresh", f"peak_{name}"}
        ratio = counts[f"peak_{name}"] / counts["peak_fresh"] if measured else None
        yield Figure(f"peak memory with {name}", ratio, target=case.memory_target)


def _time_figures(
    measured: Timing | None, baseline: Timing | None, target: float | None
) -> tuple[Figure, Figure]:
    """Ratios of minima, which the target is for, and of medians."""
    if measured is None or baseline is None:
        return Figure("time ratio of minima", None, target=target), Figure("time ratio of medians", None)
    minima, medians = measured.minimum / baseline.minimum, measured.median / baseline.median
    return Figure("time ratio of minima", minima, target=target), Figure("time ratio of medians", medians)
