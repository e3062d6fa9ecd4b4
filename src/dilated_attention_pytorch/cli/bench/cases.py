"""Compares candidates: the gate of every one, then their times in turn, then each one's peak memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...reference import block_sparse_attention_reference, dilated_attention_reference
from ..report import Series, line_chart
from .candidates import BASELINE, Attend, CannotRunError, Config, Entry, entry_of, remarks, window_mask
from .gate import (
    accept,
    block_keys,
    call,
    choose_rows,
    definition_error,
    dilated_keys,
    make_inputs,
    rows_error,
)
from .measure import Measured, interleave, measure_in_child, read_status, reset_peak_memory
from .record import Figure, Record, Result, Section, Table, case_of

REDUCED_BLOCK, REDUCED_BLOCKS = 16, 24
WARMUP_LENGTH = 1024
Say = Callable[[str], None]


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


def run_case(case: Case, say: Say) -> Result:
    """Measures the candidates that can run; of the others the notes say why they cannot."""
    notes: dict[str, str] = {}
    error = 0.0
    candidates: dict[str, Callable[[], object]] = {}
    kinds = {entry_of(name).projects for name in case.candidates}
    inputs = {projects: _inputs(case, projects) for projects in kinds}
    for name in case.candidates:
        entry = entry_of(name)
        say(f"{case.name}: checking {name}")
        try:
            error = max(error, check_candidate(case, name))
            attend = entry.make(case.config, case.n)
        except CannotRunError as reason:
            notes[name] = f"cannot run: {reason}"
            continue
        candidates[name] = partial(run_candidate, attend, *inputs[entry.projects])
        notes[name] = remarks(name, case.config)
    if not candidates:
        no_one = "no candidate can run"
        return Result(case_of(case), case.repeats, None, why_not=no_one, notes=notes)
    say(f"{case.name}: right within {error:.0e}, timing {case.repeats} rounds")
    at_most = {} if case.dense_repeats is None else {BASELINE: min(case.dense_repeats, case.repeats)}
    timings = interleave(candidates, case.repeats, at_most=at_most)
    counts: dict[str, int] = {}
    for name in candidates:
        say(f"{case.name}: memory of {name}, in a process of its own")
        measured = measure_in_child(measure_candidate, case, name, needed=case.tensor_bytes)
        if measured.error is not None:
            error = max(error, accept(f"{case.name}, {name}", measured.error, case.config.dtype))
        if measured.why_not:
            notes[name] += f"; memory not measured: {measured.why_not}"
        counts |= {f"{what} {name}": count for what, count in measured.counts.items()}
    seconds = {name: timing.seconds for name, timing in timings.items()}
    figures = speed_ups({name: timing.minimum for name, timing in timings.items()})
    return Result(case_of(case), case.repeats, error, seconds, counts, figures, None, notes)


def speed_ups(minima: dict[str, float]) -> tuple[Figure, ...]:
    """By candidate how many times as fast as dense attention it is, if that was measured."""
    return tuple(
        Figure(f"{name}: speed-up over {BASELINE}", minima[BASELINE] / minimum, at_least=True)
        for name, minimum in minima.items()
        if BASELINE in minima and name != BASELINE
    )


def run_candidate(attend: Attend, inputs: Sequence[Tensor], grad_out: Tensor | None) -> list[Tensor]:
    """out, and the gradients of the inputs and of the weights if it has any."""
    return call(attend, inputs, grad_out, [*attend.parameters()] if isinstance(attend, nn.Module) else ())


def measure_candidate(case: Case, name: str) -> Measured:
    """In a child: the error of rows, bytes of a call above its inputs and of the whole process, its time."""
    entry, config = entry_of(name), case.config
    # Short, so that what it frees is too little for the measured call to hide in.
    short = max(1, min(case.n // 4, WARMUP_LENGTH) // config.block_size) * config.block_size
    run_candidate(entry.make(config, short), *_inputs(replace(case, n=short, b=1), entry.projects))
    rows = choose_rows(config.segment_lengths[0], case.n)
    attend = entry.make(config, case.n)
    inputs, grad_out = _inputs(case, entry.projects, rows)
    peak_before = read_status("VmHWM")
    before = reset_peak_memory()
    start = time.perf_counter()
    out, *gradients = run_candidate(attend, inputs, grad_out)
    seconds = time.perf_counter() - start
    peak = read_status("VmHWM")
    counts = {"peak_extra": peak - before, "peak_total": max(peak_before, peak)}
    error = None
    if not entry.projects and entry.kind in ("dense", "dilated", "block-sparse"):
        error = rows_error(inputs, grad_out, out, gradients, keys_of_rows(entry.kind, config, case.n, rows))
    return Measured(error, counts, {"attention": (seconds,)})


def keys_of_rows(kind: str, config: Config, n: int, rows: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """By row the keys that it meets in attention of a kind, and how often."""
    if kind == "block-sparse":
        pattern = config.make_pattern(n)
        return {t: block_keys(pattern, config.h, t) for t in rows}
    branches = config.branches if kind == "dilated" else ((n,), (1,))
    return {t: dilated_keys(branches, config.is_causal, config.h, n, t) for t in rows}


def _inputs(
    case: Case, projects: bool, rows: Sequence[int] | None = None
) -> tuple[list[Tensor], Tensor | None]:
    h, d = case.config.h, case.config.d
    shape = (case.b, case.n, h * d) if projects else (case.b, case.n, h, d)
    count = 1 if projects else 3
    return make_inputs(shape, case.config.dtype, count=count, backward=case.backward, rows=rows)


def check_candidate(case: Case, name: str) -> float:
    """The largest error of a candidate in a reduced copy of a case; `WrongAnswerError`, `CannotRunError`."""
    entry = entry_of(name)
    if reason := entry.reason(case.backward):
        raise CannotRunError(reason)
    reduced = reduce_case(case, entry.kind)
    attend = entry.make(reduced.config, reduced.n)
    inputs, grad_out = _inputs(reduced, entry.projects)
    error = definition_error(attend, _definition(entry, reduced, attend, inputs), inputs, grad_out)
    return accept(f"{case.name}, {name}", error, case.config.dtype)


def reduce_case(case: Case, kind: str) -> Case:
    """The case with smaller blocks, shorter segments and as many tokens as a dense reference fits."""
    config = case.config
    block = min(config.block_size, REDUCED_BLOCK)
    n = (block * max(1, min(case.n // block, REDUCED_BLOCKS)) + 3) | 1  # the last block is partial
    n -= n % block if kind == "local" else 0
    factor = max(1.0, case.n / n)
    config = replace(
        config,
        block_size=block,
        sparsity=max(config.sparsity, 4 / REDUCED_BLOCKS),
        segment_lengths=tuple(max(block, int(w / factor)) for w in config.segment_lengths),
    )
    return replace(case, config=config, n=n, b=min(case.b, 2))


def _definition(entry: Entry, case: Case, attend: Any, inputs: Sequence[Tensor]) -> Any:
    """What a candidate should compute, on float64 tensors."""
    config, n, is_causal = case.config, case.n, case.config.is_causal
    branches = ((n,), (1,)) if entry.kind == "dense" else config.branches
    mask: Tensor | None = None
    if entry.kind == "block-sparse":
        mask = config.make_pattern(n).to_dense()
    elif entry.kind == "local":
        mask = window_mask(n, config.block_size, is_causal)

    def reference(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Any:
        if mask is not None:
            return block_sparse_attention_reference(q, k, v, mask, is_causal=is_causal)
        return dilated_attention_reference(q, k, v, *branches, is_causal=is_causal)

    if entry.kind == "adaptive":
        return _adaptive_definition(attend, inputs)
    if not entry.projects:
        return reference
    exact = copy.deepcopy(attend).double()
    exact.module.attention.forward = reference
    return exact


def _adaptive_definition(attend: Any, inputs: Sequence[Tensor]) -> Any:
    """The dense reference over the blocks that an adaptive module chose, with its scores among q and k."""
    module, is_causal = attend.module, attend.is_causal
    mask = module.choose(*module.features(*inputs[:2], is_causal), is_causal).to_dense()
    exact = copy.deepcopy(module).double()

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prepared = exact._prepare(q, k, is_causal, None)
        wide = F.pad(v, (0, prepared.key.shape[-1] - v.shape[-1]))
        options: dict[str, Any] = {"is_causal": is_causal, "scale": prepared.scale}
        out = block_sparse_attention_reference(prepared.query, prepared.key, wide, mask, **options)
        assert isinstance(out, Tensor)
        return out[..., : v.shape[-1]]

    return reference


def describe(case: dict[str, Any]) -> str:
    """The sizes of a case in a few words. Its candidates stand in the table."""
    config = case["config"]
    words = [f"b = {case['b']}", f"n = {case['n']}", *describe_config(config)]
    words.insert(-1, f"blocks of {config['block_size']} with density {config['sparsity']:g}")
    if (rounds := case["dense_repeats"]) is not None:
        words.append(f"dense attention in {rounds} round{'' if rounds == 1 else 's'}")
    return ", ".join(filter(None, words))


def describe_config(config: dict[str, Any]) -> list[str]:
    """Heads, dtype and branches; the last word says how calls run, and is empty for their own way."""
    branches = zip(config["segment_lengths"], config["dilation_rates"], strict=True)
    how = [f"memory {config['memory']}"] if config["memory"] else []
    how += [] if config["use_pattern_cache"] else ["no pattern cache"]
    return [
        *(f"h = {config['h']}", f"d = {config['d']}", config["dtype"]),
        *(["causal"] if config["is_causal"] else []),
        "branches " + ", ".join(f"({w}, {r})" for w, r in branches),
        ", ".join(how),
    ]


def make_table(results: Sequence[Result]) -> Table:
    """One row a case and candidate; what could not be measured or heeded stands in the last column."""
    rows = []
    for result in results:
        minima = {name: min(values) for name, values in result.seconds.items()}
        tokens = result.case["b"] * result.case["n"]
        speeds = {name: f"{tokens / minimum:,.0f}" for name, minimum in minima.items()}
        over = {figure.name.partition(":")[0]: f"{figure.value:.2f}" for figure in speed_ups(minima)}
        for name in result.case["candidates"]:
            times = [result.milliseconds(name), speeds.get(name, ""), over.get(name, "")]
            cells = [*times, result.mebibytes(f"peak_extra {name}"), result.notes.get(name, "")]
            rows.append([f"{result.name}, {name}", *cells])
    head = ["case and candidate", "ms", "tokens/s", f"speed-up over {BASELINE}", "peak extra, MiB", "remarks"]
    return Table(head, rows)


SECTION = Section("**Modules compared**, on the same inputs", make_table, describe)


def draw_charts(record: Record) -> list[tuple[str | None, str]]:
    """Time and memory over the length, forward and training, each with its caption."""
    charts = []
    for backward, name in ((False, "forward"), (True, "training")):
        results = [
            r for r in record.results if r.case["kind"] == "compare" and r.case["backward"] == backward
        ]
        times, peaks = _series(results)
        seconds = lambda value: f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"  # noqa: E731
        for what, caption, series, y_text in (
            ("time", "median of a call; whiskers from the fastest to the slowest", times, seconds),
            ("memory", "peak memory that a call adds to its inputs", peaks, "{:,.4g} MiB".format),
        ):
            if series:
                labels: dict[str, Any] = {"title": f"{what}, {name}", "x_label": "tokens", "y_label": what}
                svg = line_chart(series, y_text=y_text, chart_id=f"{what}-{name}", **labels)
                charts.append((svg, f"{caption}, {name}"))
    return charts


def _series(results: Sequence[Result]) -> tuple[list[Series], list[Series]]:
    """By candidate its times over the length, with their range, and its peak memory in MiB."""
    times, peaks = [], []
    ordered = sorted(results, key=lambda result: int(result.case["n"]))
    for name in dict.fromkeys(name for result in ordered for name in result.case["candidates"]):
        timed = [(result.case["n"], timing) for result in ordered if (timing := result.timing(name))]
        spread = tuple((timing.minimum, max(timing.seconds)) for _, timing in timed)
        times += [Series(name, tuple((n, timing.median) for n, timing in timed), spread)] if timed else []
        held = [(r.case["n"], r.counts.get(f"peak_extra {name}", 0) / 2**20) for r in ordered]
        held = [(n, peak) for n, peak in held if peak > 0]
        peaks += [Series(name, tuple(held))] if held else []
    return times, peaks
