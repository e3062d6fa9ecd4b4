"""Block-sparse attention: time against dense attention, memory, builds of patterns, modules against the base.

python benchmarks/sparse.py --out benchmarks/results/sparse.json
python benchmarks/sparse.py --render --update docs/block_sparse.md
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from common import (
    BACKWARD_OP,
    FORWARD_OP,
    Call,
    Say,
    gather,
    main,
    measure_once,
    ratio,
    run_case,
    show_branches,
)
from torch import Tensor
from torch.nn import functional as torch_functional

from dilated_attention_pytorch import block_sparse, modules
from dilated_attention_pytorch.cli.bench import gate
from dilated_attention_pytorch.cli.bench.gate import WrongAnswerError, accept
from dilated_attention_pytorch.cli.bench.measure import Measured, Timing, interleave, measure_in_child
from dilated_attention_pytorch.cli.bench.record import Figure, Result, Section, Table
from dilated_attention_pytorch.plan import BlockPattern
from dilated_attention_pytorch.reference import block_sparse_attention_reference
from dilated_attention_pytorch.spec import SparsePatternConfig

RING, BASE = "BlockSparseRingDilatedAttention", "BlockSparseDilatedAttention"
STRUCTURED = ("local_window", "dilated_sparse", "global_local", "hierarchical", "strided")
BUILT = (*STRUCTURED, "random")
REDUCED_BLOCK, REDUCED_BLOCKS, WARMUP_BLOCKS = 16, 48, 4


@dataclass(frozen=True)
class SparseConfig:
    """The attention of a case: heads, head size, and the blocks that it keeps."""

    h: int
    d: int
    block_size: int
    pattern_type: Any = "dilated_sparse"
    sparsity_ratio: float = 0.1
    segment_lengths: tuple[int, ...] = (2048, 4096, 8192)
    dilation_rates: tuple[int, ...] = (1, 2, 4)
    dtype: str = "float32"
    is_causal: bool = False

    @property
    def sparse_config(self) -> SparsePatternConfig:
        return SparsePatternConfig(self.pattern_type, self.sparsity_ratio, self.block_size)

    @property
    def branches(self) -> dict[str, Any]:
        return {"segment_lengths": self.segment_lengths, "dilation_rates": self.dilation_rates}

    def make_pattern(self, n: int) -> BlockPattern:
        """The pattern of a config, built as users build it."""
        return block_sparse.build_block_pattern(
            self.sparse_config, n, self.h, is_causal=self.is_causal, **self.branches
        )


@dataclass(frozen=True)
class Entry:
    """One pattern of a case, and how many times as fast as dense attention it should be."""

    pattern_type: str
    sparsity_ratio: float
    target: float | None = None

    @property
    def name(self) -> str:
        return f"{self.pattern_type} {self.sparsity_ratio:g}"


@dataclass(frozen=True)
class SparseTimeCase:
    """Dense attention over the time of block-sparse attention, for several patterns in one interleaved run.

    Dense attention, the longest by far, takes part in `dense_repeats` of the rounds. With `dense_n`
    it attends to that many positions, and its time is scaled by the square of the lengths.
    """

    name: str
    config: SparseConfig
    n: int
    patterns: tuple[Entry, ...]
    bare_n: int = 8192
    backward: bool = False
    repeats: int = 5
    dense_repeats: int = 2
    dense_n: int | None = None
    kind: ClassVar[str] = "sparse time"

    def run(self, say: Say) -> Measured:
        say(f"{self.name}: checking")
        patterns, errors = {}, []
        for entry in self.patterns:
            kept = {"pattern_type": entry.pattern_type, "sparsity_ratio": entry.sparsity_ratio}
            config = replace(self.config, **kept)
            pattern = patterns[entry.name] = config.make_pattern(self.n)
            label = f"{self.name}, {entry.name}"
            check_density(label, config, len(pattern), pattern.columns.numel(), self.n)
            errors.append(reduced_error(config, self.n, backward=self.backward))
            call = make_call(config, self.n, pattern, backward=self.backward)
            errors.append(call.error(call.run()))
        error = accept(self.name, max(errors), self.config.dtype)
        rounds = {"dense": min(self.dense_repeats, self.repeats)}
        say(f"{self.name}: right within {error:.0e}, timing {self.repeats} rounds")
        # The gate has just made each sparse call at full length: nothing is left to warm up.
        timings = interleave(time_candidates(self, patterns), self.repeats, warmup=0, at_most=rounds)
        factor = (self.n / (self.dense_n or self.n)) ** 2
        timings["dense"] = Timing(factor * seconds for seconds in timings["dense"])
        flops = {f"flops {name}": number for name, number in count_flops(self, patterns).items()}
        return Measured(error, flops, timings)

    def figures(self, found: Measured) -> list[Figure]:
        """By pattern how many times as fast as dense attention, and its FLOP rate over the bare kernel's."""
        minima = {name: min(values) for name, values in found.seconds.items()}
        rates = {name: found.counts[f"flops {name}"] / value for name, value in minima.items()}
        figures = []
        for entry in self.patterns:
            faster, share = minima["dense"] / minima[entry.name], rates[entry.name] / rates["bare"]
            label = f"{entry.name}: speed-up over dense"
            figures.append(Figure(label, faster, target=entry.target, at_least=True))
            figures.append(Figure(f"{entry.name}: share of the bare FLOP rate", share))
        return figures


@dataclass(frozen=True)
class SparseMemoryCase:
    """One forward: peak memory that it adds, over out and lse; time of the pattern's build, over its own."""

    name: str
    config: SparseConfig
    n: int
    target: float | None = 1.25
    build_target: float | None = 0.05
    repeats: int = 1
    kind: ClassVar[str] = "sparse memory"

    def run(self, say: Say) -> Measured:
        error = check(self, say)
        found = measure_in_child(measure_memory, self, needed=tensor_bytes(self))
        return gather(self, {"": found}, error)

    def figures(self, found: Measured) -> list[Figure]:
        over = ratio(found.counts, "peak_extra", "results")
        minima = {name: min(values) for name, values in found.seconds.items()}
        share = ratio(minima, "build", "attention")
        return [
            Figure("peak extra memory over out and lse", over, target=self.target),
            Figure("time of the build over attention", share, target=self.build_target),
        ]


@dataclass(frozen=True)
class PatternCase:
    """The build of a pattern alone: its time, and the peak memory that it adds."""

    name: str
    config: SparseConfig
    n: int
    memory_target: int | None = None
    repeats: int = 3
    kind: ClassVar[str] = "pattern"

    def run(self, say: Say) -> Measured:
        error = check(self, say, backward=False)
        found = measure_in_child(measure_build, self)
        if found.counts:
            check_density(self.name, self.config, found.counts["layouts"], found.counts["blocks"], self.n)
        return replace(found, error=error)

    def figures(self, found: Measured) -> list[Figure]:
        return [Figure("peak extra memory", found.counts.get("peak_extra"), "bytes", self.memory_target)]


@dataclass(frozen=True)
class ModuleMemoryCase:
    """Peak memory that one forward of a module adds, over that of another; both are names in `modules`."""

    name: str
    config: SparseConfig
    n: int
    module: str = RING
    base: str = BASE
    target: float | None = 1.05
    repeats: int = 1
    kind: ClassVar[str] = "module memory"

    def run(self, say: Say) -> Measured:
        error = check(self, say)
        found = {
            role: measure_in_child(measure_module, self, name, needed=tensor_bytes(self))
            for role, name in (("module", self.module), ("base", self.base))
        }
        gathered = gather(self, found, error, "_")
        seconds = {name.removeprefix("attention_"): values for name, values in gathered.seconds.items()}
        return replace(gathered, seconds=seconds)

    def figures(self, found: Measured) -> list[Figure]:
        over = ratio(found.counts, "peak_extra_module", "peak_extra_base")
        return [Figure("peak extra memory over that of the base", over, target=self.target)]


def make_call(config: SparseConfig, n: int, pattern: BlockPattern, *, backward: bool = False) -> Call:
    rows = gate.choose_rows(config.block_size, n)
    shape = (1, n, config.h, config.d)
    inputs, grad_out = gate.make_inputs(shape, config.dtype, backward=backward, rows=rows)
    keys = {t: gate.block_keys(pattern, config.h, t) for t in rows}
    return Call(_attend(config, pattern), inputs, grad_out, keys)


def _attend(config: SparseConfig, pattern: BlockPattern) -> Callable[..., Any]:
    """out and lse of the library under test: the one call that is checked and measured."""
    options: dict[str, Any] = {"is_causal": config.is_causal, "return_lse": True}
    return lambda q, k, v: block_sparse.block_sparse_attention(q, k, v, pattern, **options)


def check(case: Any, say: Say, backward: bool = True) -> float:
    """Of a case whose rows are checked after they are measured, on the very results."""
    say(f"{case.name}: checking")
    error = reduced_error(case.config, case.n, backward=backward)
    say(f"{case.name}: off by {error:.0e} when reduced, measuring in a process of its own")
    return accept(case.name, error, case.config.dtype)


def check_density(name: str, config: SparseConfig, layouts: int, blocks: int, n: int) -> None:
    """Refuses a pattern whose density is not what was asked, within a block a row."""
    rows = -(-n // config.block_size)
    total = rows * (rows + 1) / 2 if config.is_causal else rows**2
    kept, asked = blocks / layouts, config.sparsity_ratio * total
    if abs(kept - asked) > rows:
        raise WrongAnswerError(
            f"{name}: the density is {kept / total:.4f} where {config.sparsity_ratio} was asked: not measured"
        )


def reduced_error(config: SparseConfig, n: int, *, backward: bool) -> float:
    """Error against the dense reference, with smaller blocks and fewer of them."""
    block = min(config.block_size, REDUCED_BLOCK)
    reduced_n = (block * min(n // config.block_size, REDUCED_BLOCKS) + 3) | 1  # the last block is partial
    config = replace(
        config,
        block_size=block,
        sparsity_ratio=max(config.sparsity_ratio, 4 / REDUCED_BLOCKS),
        segment_lengths=tuple(max(block, w * reduced_n // n) for w in config.segment_lengths),
    )
    pattern = config.make_pattern(reduced_n)
    shape = (1, reduced_n, config.h, config.d)
    inputs, grad_out = gate.make_inputs(shape, config.dtype, backward=backward)
    mask, options = pattern.to_dense(), {"is_causal": config.is_causal, "return_lse": True}

    def reference(*qkv: Tensor) -> Any:
        return block_sparse_attention_reference(*qkv, mask, **options)

    return max(gate.compare(_attend(config, pattern), reference, inputs, grad_out))


def time_candidates(
    case: SparseTimeCase, patterns: dict[str, BlockPattern]
) -> dict[str, Callable[[], object]]:
    """All of a case by name: "dense", "bare", and block-sparse attention with each of the patterns.

    Dense attention is PyTorch's own, on contiguous tensors of the layout that it prefers; the bare kernel has
    out and lse ready for the backward.
    """
    config = case.config
    shape = (1, case.n, config.h, config.d)
    inputs, grad_out = gate.make_inputs(shape, config.dtype, backward=True)
    by_head = [x[:, : case.dense_n].transpose(1, 2).contiguous() for x in (*inputs, grad_out)]
    q, k, v, dout = (x[:, : case.bare_n].transpose(1, 2).contiguous() for x in (*inputs, grad_out))
    out, lse = FORWARD_OP(q, k, v)

    def bare() -> None:
        FORWARD_OP(q, k, v)
        if case.backward:
            BACKWARD_OP(dout, q, k, v, out, lse, 0.0, False)

    def candidate(attend: Callable[..., Any], tensors: Sequence[Any]) -> Callable[[], object]:
        return lambda: gate.call(attend, tensors[:3], tensors[3] if case.backward else None)

    def dense(*qkv: Tensor) -> Tensor:
        return torch_functional.scaled_dot_product_attention(*qkv, is_causal=config.is_causal)

    sparse = {name: candidate(_attend(config, x), (*inputs, grad_out)) for name, x in patterns.items()}
    return {"dense": candidate(dense, by_head), "bare": bare, **sparse}


def count_flops(case: SparseTimeCase, patterns: dict[str, BlockPattern]) -> dict[str, int]:
    """Operations of the matrix products of each candidate: 2 a pair and feature in forward, 5 in backward."""
    h, n = case.config.h, case.n
    pairs = {
        "dense": h * (n * (n + 1) // 2 if case.config.is_causal else n * n),
        "bare": h * min(case.bare_n, n) ** 2,
        **{name: h * pattern.num_pairs // len(pattern) for name, pattern in patterns.items()},
    }
    each = 2 * (7 if case.backward else 2) * case.config.d
    return {name: each * number for name, number in pairs.items()}


def tensor_bytes(case: SparseMemoryCase | ModuleMemoryCase) -> int:
    config = case.config
    itemsize: int = getattr(torch, config.dtype).itemsize
    return case.n * config.h * (4 * itemsize * config.d + 4)


def warm_up(config: SparseConfig) -> None:
    n = WARMUP_BLOCKS * config.block_size
    make_call(config, n, config.make_pattern(n)).run()


def measure_memory(case: SparseMemoryCase) -> Measured:
    """Time of the pattern's build and of the call; peak memory above that of the inputs and the pattern."""
    warm_up(case.config)
    pattern, build, build_seconds = measure_once(lambda: case.config.make_pattern(case.n))
    call = make_call(case.config, case.n, pattern)
    results, counts, seconds = measure_once(call.run)
    sizes = {"results": sum(x.nbytes for x in results), "pattern": pattern.nbytes}
    counts |= {**sizes, "build_peak_extra": build["peak_extra"]}
    return Measured(call.error(results), counts, {"build": (build_seconds,), "attention": (seconds,)})


def measure_module(case: ModuleMemoryCase, name: str) -> Measured:
    """Peak memory above that of the inputs in one forward of a module, which builds its pattern itself."""
    config = case.config
    module = getattr(modules, name)(**config.branches, sparse_config=config.sparse_config).eval()
    call = make_call(config, case.n, config.make_pattern(case.n))
    call = call._replace(attend=lambda *qkv: module(*qkv, is_causal=config.is_causal))
    short = WARMUP_BLOCKS * config.block_size
    call._replace(inputs=[x[:, :short] for x in call.inputs]).run()
    (out,), counts, seconds = measure_once(call.run)
    error = call.error([out], has_lse=False)
    return Measured(error, {**counts, "results": out.nbytes}, {"attention": (seconds,)})


def measure_build(case: PatternCase) -> Measured:
    """Time and peak memory of the build alone. `error` is None: there is no result to check."""
    warm_up(case.config)

    def build() -> tuple[float, dict[str, int]]:
        start = time.perf_counter()
        pattern = case.config.make_pattern(case.n)
        seconds = time.perf_counter() - start
        blocks = pattern.columns.numel()
        return seconds, {"pattern": pattern.nbytes, "blocks": blocks, "layouts": len(pattern)}

    built, counts, _ = measure_once(lambda: [build() for _ in range(case.repeats)])
    return Measured(None, {**counts, **built[-1][1]}, {"build": tuple(seconds for seconds, _ in built)})


def _entries(kept: float, structured: float | None, by_chance: float | None) -> tuple[Entry, ...]:
    return (*(Entry(kind, kept, structured) for kind in STRUCTURED), Entry("random", kept, by_chance))


def _memory_cases(n: int) -> list[SparseMemoryCase]:
    cases = _LONG.items()
    return [SparseMemoryCase(f"sparse memory, n = {n}, segments {name}", config, n) for name, config in cases]


_SPEED = SparseConfig(8, 64, 128)
_BOTH = _entries(0.1, 4.0, 3.0)
_LONG = {
    name: SparseConfig(8, 64, 256, "dilated_sparse", 0.01, *branches, dtype="bfloat16")
    for name, branches in (("2048", ((2048,), (1,))), ("65536 and 131072", ((65536, 131072), (1, 2))))
}
_SMALL = SparseConfig(2, 16, 32, "dilated_sparse", 0.1, (128, 256), (1, 2))
CASES = (
    SparseTimeCase("sparse forward", _SPEED, 32768, (*_entries(0.1, 5.0, 4.0), *_entries(0.01, 25.0, 25.0))),
    SparseTimeCase("sparse forward + backward", _SPEED, 32768, _BOTH, backward=True, repeats=2),
    *(
        PatternCase(f"build of {kind}", SparseConfig(8, 64, 128, kind, 0.01), 2**20, 200 * 10**6)
        for kind in BUILT
    ),
    *_memory_cases(2**17),
    ModuleMemoryCase("ring over base memory", _LONG["2048"], 2**17),
    *_memory_cases(2**20),
)
_ALL = _entries(0.1, None, None)
QUICK = (
    SparseTimeCase("quick sparse forward + backward", _SMALL, 512, _ALL, 256, True, repeats=2),
    PatternCase("quick build", _SMALL, 16384),
    SparseMemoryCase("quick sparse memory", _SMALL, 8192, None, None),
    ModuleMemoryCase("quick ring over base memory", _SMALL, 8192, target=None),
)


def describe(case: dict[str, Any]) -> str:
    """The sizes of a case in a few words."""
    config = case["config"]
    patterns = case.get("patterns", [])
    words = [
        f"n = {case['n']}",
        f"h = {config['h']}",
        f"d = {config['d']}",
        f"blocks of {config['block_size']}",
    ]
    words += [] if patterns else [f"density {config['sparsity_ratio']:g}"]
    words += [] if case["kind"] == "pattern" else [config["dtype"]]
    words += ["causal"] if config["is_causal"] else []
    if "dilated_sparse" in {entry["pattern_type"] for entry in patterns or [config]}:
        words.append(show_branches(config))
    if patterns:
        words.append(f"the bare kernel with n = {case['bare_n']}")
        words.append(f"dense attention in {case['dense_repeats']} of the rounds")
        if dense_n := case.get("dense_n"):  # which older records leave out
            words.append(f"with n = {dense_n} and its time multiplied by {(case['n'] / dense_n) ** 2:g}")
    return ", ".join(words)


def time_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        figures = {figure.name.partition(":")[0]: figure for figure in result.figures[::2]}
        flops = {name: result.counts[f"flops {name}"] for name in result.seconds}
        rates = {name: flops[name] / min(values) / 1e9 for name, values in result.seconds.items()}
        for name in result.seconds:
            density = "" if name == "bare" else f"{flops[name] / flops['dense']:.4f}"
            cells = [f"{result.name}, {name}", density, result.times(name), f"{rates[name]:.0f}"]
            share = f"{rates[name] / rates['bare']:.2f}"
            found = [figures[name].number, figures[name].verdict] if name in figures else ["", ""]
            rows.append([*cells, share, *found])
    head = ["case and pattern", "density", "ms", "GFLOP/s", "of the bare rate", "speed-up over dense"]
    return Table([*head, "target"], rows)


def _seconds(result: Result, name: str) -> str:
    return f"{min(result.seconds[name]):.3f}" if name in result.seconds else ""


def memory_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        memory, build = result.figures
        sizes = [result.mebibytes(name) for name in ("peak_extra", "results")]
        times = [result.mebibytes("pattern"), *(_seconds(result, name) for name in ("build", "attention"))]
        rows.append([result.name, *sizes, *result.shown(memory), *times, *result.shown(build)])
    head = ["case", "peak extra, MiB", "out + lse, MiB", "ratio", "target"]
    return Table([*head, "pattern, MiB", "build, s", "attention, s", "ratio", "target"], rows)


def build_table(results: Sequence[Result]) -> Table:
    rows = [[x.name, _seconds(x, "build"), x.mebibytes("pattern"), *x.shown(x.figures[0])] for x in results]
    return Table(["case", "s", "pattern, MiB", "peak extra", "target"], rows)


def module_table(results: Sequence[Result]) -> Table:
    names = ("peak_extra_module", "peak_extra_base")
    rows = [[x.name, *map(x.mebibytes, names), *x.shown(x.figures[0])] for x in results]
    return Table(["case", "peak extra, MiB", "of the base, MiB", "ratio", "target"], rows)


SECTIONS = {
    "sparse time": Section(
        "**Block-sparse time** against dense attention of the same shape", time_table, describe
    ),
    "sparse memory": Section(
        "**Block-sparse memory** that a call adds to its inputs", memory_table, describe
    ),
    "pattern": Section("**Pattern builds** alone", build_table, describe),
    "module memory": Section("**Modules**: memory that a call adds, over the base", module_table, describe),
}
run = run_case

if __name__ == "__main__":
    sys.exit(main("sparse"))
