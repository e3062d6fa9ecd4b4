"""Dilated attention against the bare kernel: time of long and short calls, memory, a million positions.

    python benchmarks/cpu.py --out benchmarks/results/cpu.json
    python benchmarks/cpu.py --render --update docs/benchmarks.md

The bare kernel is PyTorch's CPU flash attention, called directly on contiguous tensors of the shapes that the
engine's own plan cuts: for the forward pass the forward plan's tiles; for the backward pass the backward
plan's, with out and lse made beforehand. It packs nothing, merges nothing and keeps no result, and is so a
time that an engine over this kernel can approach but not beat; the native kernel, which scores each key once,
can.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import common
import torch
from common import Config, Say, main, make_call, reduced_error, run_case
from torch import Tensor

from dilated_attention_pytorch.cli.bench.gate import accept
from dilated_attention_pytorch.cli.bench.measure import Measured, interleave, measure_in_child, read_status
from dilated_attention_pytorch.cli.bench.record import Figure, Result, Section, Table
from dilated_attention_pytorch.core import reset_global_pattern_cache
from dilated_attention_pytorch.kernels.batches import batches_of
from dilated_attention_pytorch.plan import Plan, Shape, plan_dilated
from dilated_attention_pytorch.spec import branches_for

GIB = 2**30
Direction = Literal["forward", "backward"]
Candidate = Callable[[], object]


@dataclass(frozen=True)
class TimeCase:
    """Time of dilated attention over that of the bare kernel, summed over calls of the sizes (b, n)."""

    name: str
    config: Config
    calls: tuple[tuple[int, int], ...]
    backward: bool = False
    new_lengths: bool = False  # forget all plans before each round, as if no length had been seen before
    target: float | None = None
    repeats: int = 9
    kind: ClassVar[str] = "time"

    def run(self, say: Say) -> Measured:
        say(f"{self.name}: checking")
        errors = [reduced_error(self.config, max(n for _, n in self.calls), backward=self.backward)]
        for i, (b, n) in enumerate(self.calls):
            call = make_call(self.config, b, n, backward=self.backward, seed=i)
            errors.append(call.error(call.run()))
        error = accept(self.name, max(errors), self.config.dtype)
        say(f"{self.name}: right within {error:.0e}, timing {self.repeats} rounds")
        return Measured(error, {"flops": count_flops(self)}, interleave(self.candidates(), self.repeats))

    def candidates(self) -> dict[str, Candidate]:
        """What is timed in turn, the baseline first."""
        return {"bare": bare_candidate(self), "dilated": dilated_candidate(self)}

    def figures(self, found: Measured) -> list[Figure]:
        return common.time_figures(found, "dilated", "bare", self.target)


@dataclass(frozen=True)
class MemoryCase:
    """Peak memory that a call adds to its inputs, over the bytes of its results."""

    name: str
    config: Config
    n: int
    backward: bool = False
    target: float | None = None
    repeats: int = 1
    kind: ClassVar[str] = "memory"

    def run(self, say: Say) -> Measured:
        nbytes = 4 * self.n * self.config.h * ((8 if self.backward else 4) * self.config.d + 1)
        return run_in_child(self, measure_memory, nbytes, say)

    def figures(self, found: Measured) -> list[Figure]:
        over = common.ratio(found.counts, "peak_extra", "results")
        return [Figure("peak extra memory over bytes of results", over, target=self.target)]


@dataclass(frozen=True)
class LongCase:
    """One forward of `n` positions: peak memory in total, and time over that of `n / base_n` short calls."""

    name: str
    config: Config
    n: int
    base_n: int
    memory_target: int | None = None
    time_target: float | None = None
    repeats: int = 2
    kind: ClassVar[str] = "long"

    def run(self, say: Say) -> Measured:
        return run_in_child(self, measure_long, 4 * self.n * self.config.h * (4 * self.config.d + 1), say)

    def figures(self, found: Measured) -> list[Figure]:
        peak = Figure("peak memory", found.counts.get("peak_total"), "bytes", self.memory_target)
        return [peak, *common.time_figures(found, "long", "base", self.time_target)]


def run_in_child(case: Any, measure: Callable[..., Measured], nbytes: int, say: Say) -> Measured:
    """The rows of what is measured are checked in the child, on the very results."""
    say(f"{case.name}: checking")
    error = accept(case.name, reduced_error(case.config, case.n, backward=True))
    say(f"{case.name}: right within {error:.0e} when reduced, measuring in a process of its own")
    return common.gather(case, {"": measure_in_child(measure, case, needed=nbytes)}, error)


def dilated_candidate(case: TimeCase) -> Candidate:
    """All calls of a case."""
    calls = common.arena_calls(case.config, case.calls)

    def run() -> None:
        if case.new_lengths:
            reset_global_pattern_cache()
        common.run_calls(case.config, calls, case.backward)

    return run


def bare_candidate(case: TimeCase) -> Candidate:
    """The flash kernel alone, on ready-made tensors of the tile shapes of the case."""
    scale = 1.0 / math.sqrt(case.config.d)
    forward_tiles = _ready_tiles(case, "forward")
    backward_tiles = []
    ready = _ready_tiles(case, "backward") if case.backward else []
    gradients = common.Arena([tuple(q.shape) for q, *_ in ready], 3, case.config.dtype)
    for q, k, v, is_causal in ready:
        out, lse = common.FORWARD_OP(q, k, v, 0.0, is_causal, attn_mask=None, scale=scale)
        backward_tiles.append((gradients.take(tuple(q.shape)), q, k, v, out, lse, 0.0, is_causal))

    def run() -> None:
        for q, k, v, is_causal in forward_tiles:
            common.FORWARD_OP(q, k, v, 0.0, is_causal, attn_mask=None, scale=scale)
        for tile in backward_tiles:
            common.BACKWARD_OP(*tile, attn_mask=None, scale=scale)

    return run


def count_flops(case: TimeCase) -> int:
    """Of the matrix products: 2 a pair of the definition and feature in forward, 5 in backward."""
    pairs = sum(_plan(case.config, b, n, "forward").num_defined_pairs for b, n in case.calls)
    return 2 * (7 if case.backward else 2) * case.config.d * pairs


def _plan(config: Config, b: int, n: int, direction: Direction) -> Plan:
    shape = Shape(b, n, config.h, config.h, config.d)
    return plan_dilated(config.spec, shape, itemsize=_itemsize(config), direction=direction)


def _itemsize(config: Config) -> int:
    itemsize: int = getattr(torch, config.dtype).itemsize
    return itemsize


def _ready_tiles(case: TimeCase, direction: Direction) -> list[tuple[Tensor, Tensor, Tensor, bool]]:
    config = case.config
    plans = [_plan(case.config, b, n, direction) for b, n in case.calls]
    batches = [batch for plan in plans for _, each in batches_of(plan, _itemsize(config)) for batch in each]
    q_shapes = [(*batch.queries.shape, config.d) for batch in batches]
    k_shapes = [(*batch.keys[0].rows.shape, config.d) for batch in batches]
    shapes = (q_shapes, k_shapes, k_shapes)
    q, k, v = (common.Arena(each, seed, config.dtype) for seed, each in enumerate(shapes))
    return [
        (q.take(q_shape), k.take(k_shape), v.take(k_shape), batch.keys[0].is_causal)
        for batch, q_shape, k_shape in zip(batches, q_shapes, k_shapes, strict=True)
    ]


def measure_memory(case: MemoryCase) -> Measured:
    """Peak memory above the inputs', which are in place, as is all that the libraries set up once."""
    make_call(case.config, 1, common.WARMUP_LENGTH, backward=case.backward).run()
    call = make_call(case.config, 1, case.n, backward=case.backward)
    results, counts, _ = common.measure_once(call.run)
    return Measured(call.error(results), {**counts, "results": sum(x.nbytes for x in results)})


def measure_long(case: LongCase) -> Measured:
    """Time of one long call against as many short ones as give its length; peak memory of the process."""
    make_call(case.config, 1, common.WARMUP_LENGTH).run()
    call = make_call(case.config, 1, case.n)
    starts = range(0, case.n, case.base_n)
    pieces = [[x[:, start : start + case.base_n] for x in call.inputs] for start in starts]
    call.attend(*pieces[0])

    def run_base() -> None:
        for piece in pieces:
            call.attend(*piece)

    timings = interleave({"base": run_base, "long": call.run}, case.repeats, warmup=0)
    results = call.run()
    peak = read_status("VmHWM")
    return Measured(call.error(results), {"peak_total": peak}, timings)


def varied_calls(
    count: int, batch: tuple[int, int], length: tuple[int, int], seed: int = 0
) -> tuple[tuple[int, int], ...]:
    """`count` sizes (b, n), drawn evenly from inclusive ranges: odd lengths are as likely as even ones."""
    draw = random.Random(seed)
    return tuple((draw.randint(*batch), draw.randint(*length)) for _ in range(count))


_BRANCHES = ((2048, 4096, 8192), (1, 2, 4))
_SPEED = Config(12, 64, *_BRANCHES)
_SPEED_CAUSAL = replace(_SPEED, is_causal=True)
_SHORT = Config(8, 64, (256, 512, 1024), (1, 2, 4))
_SHORT_CALLS = varied_calls(48, (1, 4), (256, 2048))
_MEMORY = Config(8, 64, *_BRANCHES)
_LONG = Config(8, 64, *branches_for(2**20, ratio=4))  # from the first position to the last
_ONE = ((1, 16384),)
CASES = (
    TimeCase("forward", _SPEED, _ONE, target=1 / 1.35),
    TimeCase("causal forward", _SPEED_CAUSAL, _ONE, target=1 / 1.6),
    TimeCase("forward + backward", _SPEED, _ONE, backward=True, target=1 / 1.5),
    TimeCase("causal forward + backward", _SPEED_CAUSAL, _ONE, backward=True, target=1 / 1.8),
    TimeCase("short forward", _SHORT, _SHORT_CALLS, target=1 / 1.3),
    TimeCase("short forward, new lengths", _SHORT, _SHORT_CALLS, new_lengths=True, target=1.5),
    TimeCase("short forward + backward", _SHORT, _SHORT_CALLS, backward=True, target=1 / 1.3),
    MemoryCase("memory of forward", _MEMORY, 131072, target=1.05),
    MemoryCase("memory of forward + backward", _MEMORY, 131072, backward=True, target=1.25),
    LongCase("a million positions", _LONG, 2**20, 2**16, memory_target=19 * GIB // 2, time_target=1.15),
)
_QUICK = common.QUICK_CONFIG
_CAUSAL = replace(_QUICK, is_causal=True)
QUICK = (
    TimeCase("quick causal forward + backward", _CAUSAL, ((1, 512),), backward=True, repeats=3),
    TimeCase("quick short", _QUICK, varied_calls(6, (1, 4), (32, 256)), new_lengths=True, repeats=3),
    MemoryCase("quick memory", _QUICK, 16384, backward=True),
    LongCase("quick long", _QUICK, 16384, 4096, repeats=1),
)


def describe_calls(case: dict[str, Any]) -> str:
    what, calls = common.show_config(case["config"]), case["calls"]
    b, n = zip(*calls, strict=True)
    if len({(b, n) for b, n in calls}) > 1:
        return f"{len(calls)} calls, b = {min(b)} to {max(b)}, n = {min(n)} to {max(n)}, {what}"
    row = f"{len(calls)} calls in a row, " if len(calls) > 1 else ""
    return f"{row}b = {b[0]}, n = {n[0]}, {what}"


def describe_length(case: dict[str, Any]) -> str:
    return f"n = {case['n']}, {common.show_config(case['config'])}"


def time_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        minimum, median = result.figures
        speed = f"{result.counts['flops'] / min(result.seconds['dilated']) / 1e9:.0f}"
        times = [result.times(name) for name in ("bare", "dilated")]
        rows.append([result.name, *times, speed, minimum.number, median.number, minimum.verdict])
    head = ["case", "bare, ms", "dilated, ms", "GFLOP/s of the definition", "ratio of minima", "of medians"]
    return Table([*head, "target"], rows)


def memory_table(results: Sequence[Result]) -> Table:
    rows = [
        [x.name, x.mebibytes("peak_extra"), x.mebibytes("results"), *x.shown(x.figures[0])] for x in results
    ]
    return Table(["case", "peak extra, MiB", "results, MiB", "ratio", "target"], rows)


def long_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        times = [f"{min(result.seconds[x]):.2f} s" if result.seconds else "" for x in ("base", "long")]
        peak, minimum, _ = result.figures
        rows.append([result.name, *result.shown(peak), *times, *result.shown(minimum)])
    head = ["case", "peak memory", "target", "short calls", "long call", "ratio of minima", "target"]
    return Table(head, rows)


SECTIONS = {
    "time": Section("**Time** over that of the bare kernel on ready-made tiles", time_table, describe_calls),
    "memory": Section("**Memory** that a call adds to its inputs", memory_table, describe_length),
    "long": Section(
        "**Long**: one call against as many short ones as give its length", long_table, describe_length
    ),
}
run = run_case

if __name__ == "__main__":
    sys.exit(main("cpu"))
