"""Compares candidates: the gate of every one, then their times in turn, then each one's peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..report import Series, line_chart
from . import gate
from .candidates import BASELINE, CannotRunError, Config, entry_of, remarks
from .measure import Measured, interleave, measure_in_child, read_status, reset_peak_memory
from .record import Figure, Record, Result, Say, Section, Table, case_of

REDUCED_BLOCK, REDUCED_BLOCKS = 16, 24
WARMUP_LENGTH = 1024


@dataclass(frozen=True)
class Case:
    """Time, tokens a second and peak memory of candidates at one length.

    Dense attention takes part in `dense_repeats` of the rounds; None is all of them.
    """

    name: str
    config: Config
    n: int
    candidates: tuple[str, ...]
    b: int = 1
    backward: bool = False
    dense_repeats: int | None = None
    repeats: int = 5
    kind: ClassVar[str] = "compare"

    @property
    def tensor_bytes(self) -> int:
        """Bytes of q, k, v and out, and with gradients of theirs."""
        itemsize: int = getattr(torch, self.config.dtype).itemsize
        return self.b * self.n * self.config.h * self.config.d * itemsize * (8 if self.backward else 4)

    def inputs(self, name: str, rows: Sequence[int] | None = None) -> tuple[list[Tensor], Tensor | None]:
        """Of a candidate, and the gradient of out, of all rows or of these."""
        h, d, projects = self.config.h, self.config.d, entry_of(name).projects
        shape = (self.b, self.n, h * d) if projects else (self.b, self.n, h, d)
        how: dict[str, Any] = {"count": 1 if projects else 3, "backward": self.backward, "rows": rows}
        return gate.make_inputs(shape, self.config.dtype, **how)


def run_case(case: Case, say: Say) -> Result:
    """Measures the candidates that can run; of the others the notes say why they cannot."""
    notes: dict[str, str] = {}
    error = 0.0
    runs: dict[str, Callable[[], object]] = {}
    inputs: dict[bool, Any] = {}  # shared by the candidates that take x, and by those that take q, k and v
    for name in case.candidates:
        say(f"{case.name}: checking {name}")
        try:
            error = max(error, check_candidate(case, name))
            candidate = entry_of(name).make(case.config, case.n)
        except CannotRunError as reason:
            notes[name] = f"cannot run: {reason}"
            continue
        given = inputs.setdefault(entry_of(name).projects, case.inputs(name))
        runs[name] = partial(candidate.run, *given)
        notes[name] = remarks(name, case.config)
    if not runs:
        why_not = "no candidate can run"
        return Result(case_of(case), case.repeats, None, why_not=why_not, notes=notes)
    say(f"{case.name}: right within {error:.0e}, timing {case.repeats} rounds")
    at_most = {} if case.dense_repeats is None else {BASELINE: min(case.dense_repeats, case.repeats)}
    seconds = interleave(runs, case.repeats, at_most=at_most)
    counts: dict[str, int] = {}
    for name in runs:
        say(f"{case.name}: memory of {name}, in a process of its own")
        measured = measure_in_child(measure_candidate, case, name, needed=case.tensor_bytes)
        if measured.error is not None:
            error = max(error, gate.accept(f"{case.name}, {name}", measured.error, case.config.dtype))
        if measured.why_not:
            notes[name] += f"; memory not measured: {measured.why_not}"
        counts |= {f"{what} {name}": count for what, count in measured.counts.items()}
    return Result(case_of(case), case.repeats, error, seconds, counts, speed_ups(seconds), None, notes)


def speed_ups(seconds: Mapping[str, tuple[float, ...]]) -> tuple[Figure, ...]:
    """By candidate how many times as fast as dense attention it is, if that was measured, by minima."""
    minima = {name: min(values) for name, values in seconds.items()}
    return tuple(
        Figure(f"{name}: speed-up over {BASELINE}", minima[BASELINE] / minimum, at_least=True)
        for name, minimum in minima.items()
        if BASELINE in minima and name != BASELINE
    )


def measure_candidate(case: Case, name: str) -> Measured:
    """In a child: the error of rows, bytes of a call above its inputs and of the whole process, its time."""
    make, config = entry_of(name).make, case.config
    # Short, so that what it frees is too little for the measured call to hide in.
    short = max(1, min(case.n // 4, WARMUP_LENGTH) // config.block_size) * config.block_size
    make(config, short).run(*replace(case, n=short, b=1).inputs(name))
    rows = gate.choose_rows(config.segment_lengths[0], case.n)
    candidate = make(config, case.n)
    inputs, grad_out = case.inputs(name, rows)
    peak_before = read_status("VmHWM")
    before = reset_peak_memory()
    start = time.perf_counter()
    results = candidate.run(inputs, grad_out)
    seconds = time.perf_counter() - start
    peak = read_status("VmHWM")
    counts = {"peak_extra": peak - before, "peak_total": max(peak_before, peak)}
    error = None
    if candidate.keys is not None:
        error = gate.compare_rows(inputs, grad_out, results, {t: candidate.keys(t) for t in rows})
    return Measured(error, counts, {"attention": (seconds,)})


def check_candidate(case: Case, name: str) -> float:
    """The largest error of a candidate in a reduced copy of a case; `WrongAnswerError`, `CannotRunError`."""
    entry = entry_of(name)
    if reason := entry.reason(case.backward):
        raise CannotRunError(reason)
    reduced = reduce_case(case, entry.is_windowed)
    candidate = entry.make(reduced.config, reduced.n)
    errors = gate.compare(candidate.attend, candidate.reference, *reduced.inputs(name))
    return gate.accept(f"{case.name}, {name}", max(errors), case.config.dtype)


def reduce_case(case: Case, is_windowed: bool) -> Case:
    """The case with smaller blocks, shorter segments and as many tokens as a dense reference fits."""
    config = case.config
    block = min(config.block_size, REDUCED_BLOCK)
    n = (block * max(1, min(case.n // block, REDUCED_BLOCKS)) + 3) | 1  # the last block is partial
    n -= n % block if is_windowed else 0
    factor = max(1.0, case.n / n)
    config = replace(
        config,
        block_size=block,
        sparsity=max(config.sparsity, 4 / REDUCED_BLOCKS),
        segment_lengths=tuple(max(block, int(w / factor)) for w in config.segment_lengths),
    )
    return replace(case, config=config, n=n, b=min(case.b, 2))


def describe(case: dict[str, Any]) -> str:
    """The sizes of a case, compared or limited, in a few words. Its candidates stand in the table."""
    config, n, budget = case["config"], case.get("n"), case.get("budget")
    rounds, seconds = case.get("dense_repeats"), case.get("seconds")
    words = (
        (f"{(budget or 0) / 2**30:g} GiB", budget is not None),
        (f"b = {case['b']}", True),
        (f"n = {n}", n is not None),
        (f"h = {config['h']}, d = {config['d']}, {config['dtype']}", True),
        ("causal", config["is_causal"]),
        (show_branches(config), True),
        (f"blocks of {config['block_size']} with density {config['sparsity']:g}", n is not None),
        (f"memory {config['memory']}", config["memory"] is not None),
        ("no pattern cache", not config["use_pattern_cache"]),
        (f"dense attention in {rounds} round{'' if rounds == 1 else 's'}", rounds is not None),
        (f"at most {seconds or 0:g} s of search", seconds is not None),
    )
    return ", ".join(text for text, is_said in words if is_said)


def show_branches(config: dict[str, Any]) -> str:
    pairs = zip(config["segment_lengths"], config["dilation_rates"], strict=True)
    return "branches " + ", ".join(f"({w}, {r})" for w, r in pairs)


def make_table(results: Sequence[Result]) -> Table:
    """One row a case and candidate; what could not be measured or heeded stands in the last column."""
    rows = []
    for result in results:
        tokens = result.case["b"] * result.case["n"]
        speeds = {name: f"{tokens / min(values):,.0f}" for name, values in result.seconds.items()}
        over = {x.name.partition(":")[0]: f"{x.value:.2f}" for x in speed_ups(result.seconds)}
        for name in result.case["candidates"]:
            times = [result.times(name), speeds.get(name, ""), over.get(name, "")]
            cells = [*times, result.mebibytes(f"peak_extra {name}"), result.notes.get(name, "")]
            rows.append([f"{result.name}, {name}", *cells])
    head = ["case and candidate", "ms", "tokens/s", f"speed-up over {BASELINE}", "peak extra, MiB", "remarks"]
    return Table(head, rows)


SECTION = Section("**Modules compared**, on the same inputs", make_table, describe)


def draw_charts(record: Record) -> list[tuple[str | None, str]]:
    """Time and memory over the length, forward and training, each with its caption."""
    charts = []
    for backward, name in ((False, "forward"), (True, "training")):
        compared = [result for result in record.results if result.case["kind"] == Case.kind]
        results = [result for result in compared if result.case["backward"] == backward]
        times, peaks = _series(sorted(results, key=lambda result: int(result.case["n"])))
        for what, caption, series, y_text in (
            ("time", "median of a call; whiskers from the fastest to the slowest", times, _show_seconds),
            ("memory", "peak memory that a call adds to its inputs", peaks, "{:,.4g} MiB".format),
        ):
            if series:
                labels: dict[str, Any] = {"title": f"{what}, {name}", "x_label": "tokens", "y_label": what}
                svg = line_chart(series, y_text=y_text, chart_id=f"{what}-{name}", **labels)
                charts.append((svg, f"{caption}, {name}"))
    return charts


def _show_seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _series(results: Sequence[Result]) -> tuple[list[Series], list[Series]]:
    """By candidate its times over the length, with their range, and its peak memory in MiB."""
    times, peaks = [], []
    for name in dict.fromkeys(name for result in results for name in result.case["candidates"]):
        timed = [(result.case["n"], timing) for result in results if (timing := result.timing(name))]
        held = [(x.case["n"], x.counts.get(f"peak_extra {name}", 0) / 2**20) for x in results]
        held = [(n, peak) for n, peak in held if peak > 0]
        spread = tuple((timing.minimum, max(timing)) for _, timing in timed)
        times += [Series(name, tuple((n, timing.median) for n, timing in timed), spread)] if timed else []
        peaks += [Series(name, tuple(held))] if held else []
    return times, peaks
