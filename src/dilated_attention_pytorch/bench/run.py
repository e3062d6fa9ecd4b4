"""Runs a case: the gate first, then the measurement."""

from __future__ import annotations

from collections.abc import Callable

from ..core import AttentionBufferManager
from .candidates import bare_candidate, count_flops, dilated_candidate, pool_candidates
from .cases import Case, PoolCase, TimeCase
from .child import measure_in_child
from .forecast_cases import ForecastCase
from .forecast_run import run_forecast
from .gate import accept, check_case
from .limit_cases import LimitCase
from .limit_run import run_limit
from .measure import interleave
from .model_cases import DecodeCase, ModelCase, TrainCase
from .module_cases import CompareCase
from .module_run import run_compare
from .quality_cases import QualityCase
from .quality_run import run_quality
from .record import Result, make_result
from .ring_cases import RingCase, RingStepsCase, RingTimeCase
from .ring_run import run_ring
from .sparse_candidates import count_sparse_flops, entry_config, make_pattern, time_candidates
from .sparse_cases import ModuleMemoryCase, PatternCase, SparseCase, SparseTimeCase
from .sparse_gate import accept_sparse, check_density, check_sparse_case

# Cases whose rounds a reader may choose.
TIMED = (
    TimeCase,
    PoolCase,
    SparseTimeCase,
    RingTimeCase,
    RingStepsCase,
    DecodeCase,
    CompareCase,
    ForecastCase,
)


def run_case(case: Case, repeats: int | None = None, say: Callable[[str], None] = lambda _: None) -> Result:
    """Measures a case after its gate; a `WrongAnswerError` leaves it unmeasured."""
    if repeats is None or not isinstance(case, TIMED):
        repeats = case.repeats
    if isinstance(case, RingCase):
        return run_ring(case, repeats, say)
    if isinstance(case, ForecastCase):
        return run_forecast(case, repeats, say)
    if isinstance(case, QualityCase):
        return run_quality(case, say)
    if isinstance(case, ModelCase):
        return _run_model(case, repeats, say)
    if isinstance(case, CompareCase):
        return run_compare(case, repeats, say)
    if isinstance(case, LimitCase):
        return run_limit(case, say)
    if isinstance(case, SparseCase):
        return _run_sparse(case, repeats, say)
    say(f"{case.name}: checking")
    error = check_case(case)
    if isinstance(case, TimeCase):
        say(f"{case.name}: right within {error:.0e}, timing {repeats} rounds")
        candidates = {"bare": bare_candidate(case), "dilated": dilated_candidate(case)}
        timings = interleave(candidates, repeats)
        seconds = {name: timing.seconds for name, timing in timings.items()}
        return make_result(case, repeats, error, seconds, {"flops": count_flops(case)})
    if isinstance(case, PoolCase):
        return _run_pool(case, repeats, error, say)
    say(f"{case.name}: right within {error:.0e} when reduced, measuring in a process of its own")
    measured = measure_in_child(case, repeats)
    if measured.error is not None:
        error = max(error, accept(case.name, measured.error))
    return make_result(case, repeats, error, measured.seconds, measured.nbytes, measured.why_not)


def _run_pool(case: PoolCase, repeats: int, error: float, say: Callable[[str], None]) -> Result:
    say(f"{case.name}: right within {error:.0e} and the same with each memory, timing {repeats} rounds")
    managers: list[AttentionBufferManager] = []
    timings = interleave(pool_candidates(case, managers), repeats)
    seconds = {name: timing.seconds for name, timing in timings.items()}
    counts: dict[str, int] = {}
    why_not = None
    for memory in ("fresh", "pool", "manager"):
        measured = measure_in_child(case, repeats, memory)
        why_not = why_not or measured.why_not
        if measured.error is not None:
            error = max(error, accept(case.name, measured.error))
            counts |= {f"{name}_{memory}": nbytes for name, nbytes in measured.nbytes.items()}
    return make_result(case, repeats, error, seconds, counts, why_not)


def _run_model(case: ModelCase, repeats: int, say: Callable[[str], None]) -> Result:
    """All in processes of their own, where what is measured is checked as well."""
    say(f"{case.name}: checking and measuring in a process of its own")
    variants = ("plain", "checkpointed") if isinstance(case, TrainCase) else ("",)
    error, why_not = None, None
    counts: dict[str, int] = {}
    seconds: dict[str, tuple[float, ...]] = {}
    for variant in variants:
        measured = measure_in_child(case, repeats, variant)
        why_not = why_not or measured.why_not
        if measured.error is not None:
            error = max(error or 0.0, accept(case.name, measured.error))
            counts |= {f"{name} {variant}".strip(): nbytes for name, nbytes in measured.nbytes.items()}
            seconds |= {f"{name} {variant}".strip(): values for name, values in measured.seconds.items()}
    return make_result(case, repeats, error, seconds, counts, why_not)


def _run_sparse(case: SparseCase, repeats: int, say: Callable[[str], None]) -> Result:
    if isinstance(case, SparseTimeCase):
        return _time_sparse(case, repeats, say)
    say(f"{case.name}: checking")
    error = check_sparse_case(case, {})
    say(f"{case.name}: right within {error:.0e} when reduced, measuring in a process of its own")
    if isinstance(case, ModuleMemoryCase):
        return _compare_modules(case, repeats, error)
    measured = measure_in_child(case, repeats)
    counts = measured.nbytes
    if measured.error is not None:
        error = max(error, accept_sparse(case, measured.error))
    if isinstance(case, PatternCase) and counts:
        check_density(case.name, case.config, counts["layouts"], counts["blocks"], case.n)
    return make_result(case, repeats, error, measured.seconds, counts, measured.why_not)


def _time_sparse(case: SparseTimeCase, repeats: int, say: Callable[[str], None]) -> Result:
    say(f"{case.name}: checking")
    patterns = {entry.name: make_pattern(entry_config(case.config, entry), case.n) for entry in case.patterns}
    error = check_sparse_case(case, patterns)
    dense_repeats = min(case.dense_repeats, repeats)
    say(f"{case.name}: right within {error:.0e}, timing {repeats} rounds, dense attention in {dense_repeats}")
    # The gate has just made each sparse call at full length: nothing is left to warm up.
    candidates = time_candidates(case, patterns)
    timings = interleave(candidates, repeats, warmup=0, at_most={"dense": dense_repeats})
    seconds = {name: timing.seconds for name, timing in timings.items()}
    flops = {f"flops {name}": number for name, number in count_sparse_flops(case, patterns).items()}
    return make_result(case, repeats, error, seconds, flops)


def _compare_modules(case: ModuleMemoryCase, repeats: int, error: float) -> Result:
    counts: dict[str, int] = {}
    seconds: dict[str, tuple[float, ...]] = {}
    why_not = None
    for role, name in (("module", case.module), ("base", case.base)):
        measured = measure_in_child(case, repeats, name)
        why_not = why_not or measured.why_not
        if measured.error is not None:
            error = max(error, accept_sparse(case, measured.error))
            counts |= {f"{what}_{role}": nbytes for what, nbytes in measured.nbytes.items()}
            seconds[role] = measured.seconds["attention"]
    return make_result(case, repeats, error, seconds, counts, why_not)
