"""The native kernel against what torch has: dtypes, head sizes, dense and block-sparse attention, a decoding
step, short calls; and the share of the machine's peak that it reaches.

    python benchmarks/native.py --threads 2 --out benchmarks/results/native.json
    python benchmarks/native.py --render --update docs/benchmarks.md --markers native

The speed of long and short float32 calls over the bare kernel is measured by `cpu.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import common
import cpu
import models
import sparse
import torch
from common import Config, Say, main, run_case
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch import functional
from dilated_attention_pytorch.cli import forecast
from dilated_attention_pytorch.cli.bench.gate import accept
from dilated_attention_pytorch.cli.bench.measure import Measured, interleave
from dilated_attention_pytorch.cli.bench.record import Figure, Result, Section, Table
from dilated_attention_pytorch.plan import Shape

MATRIX = 2048  # rows and columns of the matrices whose product stands for the machine's peak


@dataclass(frozen=True)
class TileCase(cpu.TimeCase):
    """How many times as fast as the bare kernel on ready-made tiles."""

    repeats: int = 7
    kind: ClassVar[str] = "tiles"
    base: ClassVar[str] = "bare"

    def figures(self, found: Measured) -> list[Figure]:
        return faster(found, "dilated", self.base, self.target)


@dataclass(frozen=True)
class DenseCase(TileCase):
    """How many times as fast as torch's dense attention, which gets contiguous tensors by head."""

    kind: ClassVar[str] = "dense"
    base: ClassVar[str] = "sdpa"

    def candidates(self) -> dict[str, cpu.Candidate]:
        return {"sdpa": sdpa_candidate(self), "dilated": cpu.dilated_candidate(self)}


@dataclass(frozen=True)
class ShortCase(cpu.TimeCase):
    """Microseconds of a call of a few tokens without gradients, most of which are not attention."""

    kind: ClassVar[str] = "short"

    def candidates(self) -> dict[str, cpu.Candidate]:
        calls = [tensors[:3] for tensors in common.arena_calls(self.config, self.calls)]
        branches, is_causal = self.config.branches, self.config.is_causal

        @torch.no_grad()
        def run() -> None:
            for q, k, v in calls:
                functional.dilated_attention(q, k, v, *branches, is_causal=is_causal)

        return {"sdpa": sdpa_candidate(self), "dilated": run}

    def run(self, say: Say) -> Measured:
        found, number = super().run(say), len(self.calls)
        seconds = {name: tuple(x / number for x in values) for name, values in found.seconds.items()}
        return replace(found, seconds=seconds)

    def figures(self, found: Measured) -> list[Figure]:
        return [Figure("microseconds a call", 1e6 * min(found.seconds["dilated"]), "us", self.target)]


@dataclass(frozen=True)
class PeakCase(cpu.TimeCase):
    """The rate at which pairs are scored, over that of a product of large float32 matrices by torch."""

    repeats: int = 7
    kind: ClassVar[str] = "peak"

    def candidates(self) -> dict[str, cpu.Candidate]:
        one, other = torch.randn(2, MATRIX, MATRIX).unbind()
        return {"product": lambda: one @ other, "dilated": cpu.dilated_candidate(self)}

    def run(self, say: Say) -> Measured:
        found, config = super().run(say), self.config
        shapes = [Shape(b, n, config.h, config.h, config.d) for b, n in self.calls]
        dtype = getattr(torch, config.dtype)
        pairs = sum(forecast.Call(x, dtype, config.spec).plan("forward").num_pairs for x in shapes)
        scored = 2 * (7 if self.backward else 2) * config.d * pairs
        return replace(found, counts={**found.counts, "flops scored": scored, "flops product": 2 * MATRIX**3})

    def figures(self, found: Measured) -> list[Figure]:
        """The share of the peak, by minima."""
        own, peak = rates(found.counts, found.seconds)
        return [Figure("share of the peak", own / peak, target=self.target, at_least=True)]


@dataclass(frozen=True)
class StepCase:
    """A decoding step at a position, how many times as fast as with `kernel="stock"`."""

    name: str
    config: Config
    n: int
    steps: int = 32  # timed together
    target: float | None = None
    repeats: int = 15
    kind: ClassVar[str] = "step"

    def run(self, say: Say) -> Measured:
        say(f"{self.name}: checking")
        first = self.n // max(self.config.segment_lengths) * max(self.config.segment_lengths)
        kernels = ("stock", "auto")
        caches = {kernel: models.filled_cache(self.config, self.n, first, kernel) for kernel in kernels}
        error = accept(self.name, max(models.step_error(self.config, cache) for cache in caches.values()))
        say(f"{self.name}: right within {error:.0e}, timing {self.repeats} rounds")
        token = models.tokens(self.config, 0, 1)

        def decode(cache: Any) -> None:
            for _ in range(self.steps):
                cache.attend(*token)

        candidates = {kernel: partial(decode, cache) for kernel, cache in caches.items()}
        timings = interleave(candidates, self.repeats)
        return Measured(error, {}, {name: tuple(x / self.steps for x in t) for name, t in timings.items()})

    def figures(self, found: Measured) -> list[Figure]:
        return faster(found, "auto", "stock", self.target)


def faster(found: Measured, name: str, base: str, target: float | None) -> list[Figure]:
    """How many times as fast as the base: by minima, which the target is for, and by medians."""
    minima, medians = common.time_figures(found, base, name)
    by_minima = replace(minima, name="times as fast, by minima", target=target, at_least=True)
    return [by_minima, replace(medians, name="times as fast, by medians", at_least=True)]


def sdpa_candidate(case: cpu.TimeCase) -> Callable[[], None]:
    """Dense attention of all calls of a case."""
    tensors = common.arena_calls(case.config, case.calls)
    calls = [[x.transpose(1, 2).contiguous() for x in each[:3]] for each in tensors]

    @torch.no_grad()
    def run() -> None:
        for q, k, v in calls:
            scaled_dot_product_attention(q, k, v, is_causal=case.config.is_causal)

    return run


def rates(counts: dict[str, int], seconds: Any) -> tuple[float, float]:
    """FLOP a second over the pairs that are scored, and of the product of matrices."""
    return counts["flops scored"] / min(seconds["dilated"]), counts["flops product"] / min(seconds["product"])


_LONG, _ONE = Config(12, 64, (2048, 4096, 8192), (1, 2, 4)), ((1, 16384),)
_DENSE = Config(8, 64, (8192,), (1,))
_SHORT, _SHORTEST = Config(8, 64, (64,), (1,)), Config(1, 8, (64,), (1,))
_STREAM = Config(8, 64, (2048, 4096, 8192, 16384), (1, 2, 4, 8), is_causal=True)
_BLOCKS = sparse.SparseConfig(8, 64, 128)
_ENTRIES = tuple(
    sparse.Entry(kind, kept, target)
    for kept, target in ((0.1, 8.0), (0.01, 60.0))
    for kind in ("local_window", "dilated_sparse", "random")
)


def both_masks(
    case: type[cpu.TimeCase],
    name: str,
    config: Config,
    calls: tuple[tuple[int, int], ...],
    targets: tuple[float | None, float | None] = (None, None),
    **more: Any,
) -> list[cpu.TimeCase]:
    """A case, and the same under a causal mask."""
    full, causal = targets
    return [
        case(name, config, calls, target=full, **more),
        case(f"{name}, causal", replace(config, is_causal=True), calls, target=causal, **more),
    ]


CASES = (
    *both_masks(TileCase, "bfloat16", replace(_LONG, dtype="bfloat16"), _ONE, (1.4, 1.4)),
    *both_masks(TileCase, "d = 128", replace(_LONG, h=6, d=128), _ONE, (1.2, 1.2)),
    *both_masks(TileCase, "d = 48", replace(_LONG, d=48), _ONE, (1.2, 1.2)),
    *both_masks(TileCase, "d = 24", replace(_LONG, d=24), _ONE, (1.2, 1.2)),
    *both_masks(DenseCase, "one segment", _DENSE, ((1, 8192),), (1.0, 1.2)),
    sparse.SparseTimeCase("block-sparse", _BLOCKS, 32768, _ENTRIES, dense_n=8192, dense_repeats=5),
    StepCase("step at a million", _STREAM, 1_000_000),
    ShortCase("64 tokens", _SHORT, ((1, 64),) * 200, repeats=25),
    # Nearly nothing to compute: what a call costs besides.
    ShortCase("64 tokens, one small head", _SHORTEST, ((1, 64),) * 200, target=60.0, repeats=25),
    *both_masks(PeakCase, "peak, forward", _LONG, _ONE),
    *both_masks(PeakCase, "peak, forward + backward", _LONG, _ONE, backward=True),
)
_QUICK = common.QUICK_CONFIG
_SMALL = sparse.SparseConfig(2, 16, 32, "dilated_sparse", 0.1, (128, 256), (1, 2))
QUICK = (
    *both_masks(TileCase, "quick bfloat16", replace(_QUICK, dtype="bfloat16"), ((1, 256),), repeats=2),
    DenseCase("quick one segment", Config(4, 16, (256,), (1,)), ((1, 256),), repeats=2),
    sparse.SparseTimeCase("quick blocks", _SMALL, 512, (sparse.Entry("random", 0.1),), 256, dense_n=256),
    StepCase("quick step", replace(_QUICK, is_causal=True), 3000, steps=4, repeats=3),
    ShortCase("quick 64 tokens", Config(4, 16, (64,), (1,)), ((1, 64),) * 5, repeats=3),
    PeakCase("quick peak", _QUICK, ((1, 512),), repeats=2),
)


def describe_step(case: dict[str, Any]) -> str:
    return f"position {case['n']:,}, b = 1, {common.show_config(case['config'])}"


def speed_table(results: Sequence[Result], unit: str = "ms") -> Table:
    rows = []
    for result in results:
        times, (minimum, median) = [result.times(name, unit) for name in result.seconds], result.figures
        rows.append([result.name, *times, minimum.number, median.number, minimum.verdict])
    head = ["case", f"baseline, {unit}", f"this library, {unit}", "times as fast", "by medians", "target"]
    return Table(head, rows)


def short_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        times = [result.times(name, "µs") for name in ("sdpa", "dilated")]
        rows.append([result.name, *times, result.figures[0].verdict])
    return Table(["case", "SDPA, µs", "this library, µs", "target"], rows)


def peak_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        shown = [f"{rate / 1e9:.0f}" for rate in rates(result.counts, result.seconds)]
        pairs = result.counts["flops scored"] / result.counts["flops"]
        rows.append([result.name, result.times("dilated"), f"{pairs:.3f}", *shown, result.figures[0].number])
    head = ["case", "ms", "pairs scored over defined", "GFLOP/s of the pairs scored"]
    return Table([*head, f"GFLOP/s of a product of {MATRIX} x {MATRIX}", "share"], rows)


SECTIONS = {
    "tiles": Section(
        "**Other dtypes and head sizes**, against the bare kernel on ready-made tiles",
        speed_table,
        cpu.describe_calls,
    ),
    "dense": Section("**Dense attention** as one segment, against SDPA", speed_table, cpu.describe_calls),
    "sparse time": sparse.SECTIONS["sparse time"],
    "step": Section(
        '**A decoding step**, against `kernel="stock"`',
        partial(speed_table, unit="µs"),
        describe_step,
    ),
    "short": Section("**Short calls**: one call, beside SDPA's", short_table, cpu.describe_calls),
    "peak": Section(
        "**Share of the peak**, for which the best rate of a float32 product of matrices by torch stands",
        peak_table,
        cpu.describe_calls,
    ),
}
run = run_case

if __name__ == "__main__":
    sys.exit(main("native"))
