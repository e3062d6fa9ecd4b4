"""The figures that a case stands for, from the durations and byte counts that were measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from .cases import Case, LongCase, MemoryCase, PoolCase, TimeCase
from .forecast_cases import DILATED, ForecastCase
from .limit_cases import LimitCase
from .measure import Timing
from .model_cases import DecodeCase, SlideCase, TrainCase
from .module_cases import BASELINE, CompareCase
from .quality_cases import ATTENTIONS, QualityCase
from .ring_cases import STRATEGIES, RingMemoryCase, RingStepsCase, RingTimeCase
from .sparse_cases import ModuleMemoryCase, PatternCase, SparseMemoryCase, SparseTimeCase

Unit = Literal["x", "bytes", "tokens"]


@dataclass(frozen=True)
class Figure:
    """One number that a case stands for; `value` is None where it could not be measured.

    `target` is the most that it should be, or with `at_least` the least.
    """

    name: str
    value: float | None
    unit: Unit = "x"
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
        case RingTimeCase():
            return tuple(_ring_time_figures(case, timings))
        case RingMemoryCase():
            return tuple(_ring_memory_figures(case, counts))
        case RingStepsCase():
            return tuple(_ring_steps_figures(case, timings, counts))
        case DecodeCase():
            return tuple(_decode_figures(case, timings, counts))
        case TrainCase():
            plain, spared = (counts.get(f"peak_extra {name}") for name in ("plain", "checkpointed"))
            ratio = _ratio(counts, "peak_extra checkpointed", "peak_extra plain")
            return (
                Figure("peak extra memory", plain, "bytes"),
                Figure("peak extra memory with checkpoints", spared, "bytes"),
                Figure("with checkpoints over without", ratio),
            )
        case SlideCase():
            return (Figure("peak memory", counts.get("peak_total"), "bytes", case.memory_target),)
        case ForecastCase():
            return tuple(_forecast_figures(case, timings, counts))
        case QualityCase():
            return tuple(_quality_figures(case, timings, counts))
        case LongCase():
            peak = Figure("peak memory", counts.get("peak_total"), "bytes", case.memory_target)
            return (peak, *_time_figures(timings.get("long"), timings.get("base"), case.time_target))
        case CompareCase():
            return tuple(_compare_figures(timings))
        case LimitCase():
            confirmed = counts.get("confirmed")
            return (Figure("longest sequence", confirmed, "tokens", case.target, at_least=True),)


def show_value(value: float, unit: Unit) -> str:
    """A value with its unit: bytes in GiB, or in MiB below one."""
    if unit == "x":
        return f"{value:.3f}"
    if unit == "tokens":
        return f"{value:,.0f}"
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


def _compare_figures(timings: dict[str, Timing]) -> Iterator[Figure]:
    """By candidate how many times as fast as dense attention it is, if that was measured."""
    for name, timing in timings.items():
        if BASELINE in timings and name != BASELINE:
            speed_up = timings[BASELINE].minimum / timing.minimum
            yield Figure(f"{name}: speed-up over {BASELINE}", speed_up, at_least=True)


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


def _ring_time_figures(case: RingTimeCase, timings: dict[str, Timing]) -> Iterator[Figure]:
    """By strategy the ratios of minima and of medians to one process."""
    for strategy in STRATEGIES:
        pair = _time_figures(timings.get(strategy), timings.get("alone"), case.target)
        yield from (replace(figure, name=f"{strategy}: {figure.name}") for figure in pair)


def _ring_memory_figures(case: RingMemoryCase, counts: dict[str, int]) -> Iterator[Figure]:
    """By number of ranks the memory of all of them over that of the first number."""
    first = case.ranks[0]
    for size in case.ranks[1:]:
        ratio = _ratio(counts, f"peak {size}", f"peak {first}")
        scaled = None if ratio is None else ratio * size / first
        yield Figure(f"{size} ranks: memory of all over that of {first}", scaled, target=case.target)


def _ring_steps_figures(
    case: RingStepsCase, timings: dict[str, Timing], counts: dict[str, int]
) -> Iterator[Figure]:
    """By ring size the ratio of peak memory to the base, then of minimal times."""
    for size in case.ring_sizes:
        ratio = _ratio(counts, f"peak_extra {size}", "peak_extra base")
        yield Figure(f"ring_size {size}: peak extra memory over the base", ratio, target=case.target)
        time = timings[str(size)].minimum / timings["base"].minimum if timings else None
        yield Figure(f"ring_size {size}: time over the base", time)


def _decode_figures(case: DecodeCase, timings: dict[str, Timing], counts: dict[str, int]) -> Iterator[Figure]:
    """Times of late steps over early ones, then of the cache's memory."""
    for name in ("late", "alike"):
        figure, _ = _time_figures(timings.get(name), timings.get("early"), case.target)
        yield replace(figure, name=f"step at {case.positions[name]} over {case.early}")
    ratio = _ratio(counts, "cache alike", "cache early")
    yield Figure(f"cache at {case.positions['alike']} over {case.early}", ratio, target=1.0)


def _forecast_figures(
    case: ForecastCase, timings: dict[str, Timing], counts: dict[str, int]
) -> Iterator[Figure]:
    """By what factors the forecasts are off, whichever way."""
    measured = timings[DILATED].minimum / timings[BASELINE].minimum
    time = counts["time forecast, millionths"] / 1e6 / measured
    memory = _ratio(counts, "peak forecast", "peak measured")
    yield Figure("forecast of time, off by", max(time, 1 / time), target=case.time_target)
    off = None if memory is None else max(memory, 1 / memory)
    yield Figure("forecast of memory, off by", off, target=case.memory_target)


def _quality_figures(
    case: QualityCase, timings: dict[str, Timing], counts: dict[str, int]
) -> Iterator[Figure]:
    """Bits per byte by attention, then of the sparse ones over dense: bits and time of all steps."""
    for name in ATTENTIONS:
        yield Figure(f"{name}: bits per byte", counts[f"bits {name}"] / counts["validation bytes"])
    for name in ATTENTIONS[1:]:
        has_target = name == "dilated"
        bits = counts[f"bits {name}"] / counts["bits dense"]
        time = sum(timings[name].seconds) / sum(timings["dense"].seconds)
        yield Figure(f"{name}: bits over dense", bits, target=case.quality_target if has_target else None)
        yield Figure(f"{name}: time over dense", time, target=case.time_target if has_target else None)


def _time_figures(
    measured: Timing | None, baseline: Timing | None, target: float | None
) -> tuple[Figure, Figure]:
    """Ratios of minima, which the target is for, and of medians."""
    if measured is None or baseline is None:
        return Figure("time ratio of minima", None, target=target), Figure("time ratio of medians", None)
    minima, medians = measured.minimum / baseline.minimum, measured.median / baseline.median
    return Figure("time ratio of minima", minima, target=target), Figure("time ratio of medians", medians)
