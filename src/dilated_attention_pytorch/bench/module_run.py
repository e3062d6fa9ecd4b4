"""Runs a comparison: the gate of every candidate, then their times in turn, then each one's peak memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from .candidates import Candidate
from .child import measure_in_child
from .gate import TOLERANCES, accept
from .measure import interleave
from .module_candidates import ENTRIES, entry_of, remarks
from .module_cases import CompareCase
from .module_gate import check_candidate, make_inputs, run_candidate
from .peers import CannotRunError
from .record import Result, make_result


def run_compare(case: CompareCase, repeats: int, say: Callable[[str], None]) -> Result:
    """Measures the candidates that can run; of the others the notes say why they cannot."""
    notes: dict[str, str] = {}
    error = 0.0
    candidates: dict[str, Candidate] = {}
    inputs: dict[bool, list[Tensor]] = {}
    for name in case.candidates:
        say(f"{case.name}: checking {name}")
        try:
            error = max(error, _gate(case, name))
            candidates[name] = _make(case, name, inputs)
        except CannotRunError as reason:
            notes[name] = f"cannot run: {reason}"
            continue
        notes[name] = remarks(name, case.config)
    if not candidates:
        return make_result(case, repeats, None, {}, {}, "no candidate can run", notes)
    say(f"{case.name}: right within {error:.0e}, timing {repeats} rounds")
    timings = interleave(candidates, repeats, at_most=_dense_rounds(case, repeats, candidates))
    seconds = {name: timing.seconds for name, timing in timings.items()}
    counts: dict[str, int] = {}
    for name in candidates:
        say(f"{case.name}: memory of {name}, in a process of its own")
        measured = measure_in_child(case, repeats, name)
        if measured.error is not None:
            error = max(error, accept(f"{case.name}, {name}", measured.error, TOLERANCES[case.config.dtype]))
        if measured.why_not:
            notes[name] += f"; memory not measured: {measured.why_not}"
        counts |= {f"{what} {name}": nbytes for what, nbytes in measured.nbytes.items()}
    return make_result(case, repeats, error, seconds, counts, None, notes)


def _gate(case: CompareCase, name: str) -> float:
    if reason := entry_of(name).why_not(case.backward):
        raise CannotRunError(reason)
    return check_candidate(case, name)


def _make(case: CompareCase, name: str, inputs: dict[bool, list[Tensor]]) -> Candidate:
    """The candidate on the inputs of the case: one set for those with projections, one for the others."""
    entry = entry_of(name)
    if entry.projects not in inputs:
        made = make_inputs(entry, case.config, case.b, case.n, backward=case.backward)
        inputs[entry.projects] = made
    return partial(run_candidate, entry.make(case.config, case.n), inputs[entry.projects], case.backward)


def _dense_rounds(case: CompareCase, repeats: int, candidates: dict[str, Candidate]) -> dict[str, int]:
    if case.dense_repeats is None:
        return {}
    dense = [name for name in candidates if ENTRIES[name].kind == "dense"]
    return {name: min(case.dense_repeats, repeats) for name in dense}
