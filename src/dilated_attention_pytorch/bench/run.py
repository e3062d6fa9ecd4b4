"""Runs a case: the gate first, then the measurement."""

from __future__ import annotations

from collections.abc import Callable

from .candidates import bare_candidate, count_flops, dilated_candidate
from .cases import Case, TimeCase
from .child import measure_in_child
from .gate import accept, check_case
from .measure import interleave
from .record import Result, make_result


def run_case(case: Case, repeats: int | None = None, say: Callable[[str], None] = lambda _: None) -> Result:
    """Measures a case after its gate; a `WrongAnswerError` leaves it unmeasured."""
    if repeats is None or not isinstance(case, TimeCase):
        repeats = case.repeats
    say(f"{case.name}: checking")
    error = check_case(case)
    if isinstance(case, TimeCase):
        say(f"{case.name}: right within {error:.0e}, timing {repeats} rounds")
        candidates = {"bare": bare_candidate(case), "dilated": dilated_candidate(case)}
        timings = interleave(candidates, repeats)
        seconds = {name: timing.seconds for name, timing in timings.items()}
        return make_result(case, repeats, error, seconds, {"flops": count_flops(case)})
    say(f"{case.name}: right within {error:.0e} when reduced, measuring in a process of its own")
    measured = measure_in_child(case, repeats)
    if measured.error is not None:
        error = max(error, accept(case.name, measured.error))
    return make_result(case, repeats, error, measured.seconds, measured.nbytes, measured.why_not)
