"""Runs a case: the gate first, then the measurement."""

from __future__ import annotations

from collections.abc import Callable

from ..core import AttentionBufferManager
from .candidates import bare_candidate, count_flops, dilated_candidate, pool_candidates
from .cases import Case, PoolCase, TimeCase
from .child import measure_in_child
from .gate import accept, check_case
from .measure import interleave
from .record import Result, make_result


def run_case(case: Case, repeats: int | None = None, say: Callable[[str], None] = lambda _: None) -> Result:
    """Measures a case after its gate; a `WrongAnswerError` leaves it unmeasured."""
    if repeats is None or not isinstance(case, (TimeCase, PoolCase)):
        repeats = case.repeats
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
