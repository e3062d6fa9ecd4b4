"""WHAT is measured of block-sparse attention: cases and their targets. Plain data, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..spec import DilatedSpec, PatternType, SparsePatternConfig

RING, BASE = "BlockSparseRingDilatedAttention", "BlockSparseDilatedAttention"
STRUCTURED: tuple[PatternType, ...] = (
    "local_window",
    "dilated_sparse",
    "global_local",
    "hierarchical",
    "strided",
)
BUILT: tuple[PatternType, ...] = (*STRUCTURED, "random")


@dataclass(frozen=True)
class SparseConfig:
    """The attention of a case: heads, head size, and the blocks that it keeps."""

    h: int
    d: int
    block_size: int
    pattern_type: PatternType = "dilated_sparse"
    sparsity_ratio: float = 0.1
    segment_lengths: tuple[int, ...] = (2048, 4096, 8192)
    dilation_rates: tuple[int, ...] = (1, 2, 4)
    dtype: str = "float32"
    is_causal: bool = False

    @property
    def spec(self) -> DilatedSpec:
        return DilatedSpec(self.segment_lengths, self.dilation_rates, self.is_causal)

    @property
    def sparse_config(self) -> SparsePatternConfig:
        return SparsePatternConfig(self.pattern_type, self.sparsity_ratio, self.block_size)


@dataclass(frozen=True)
class SparseEntry:
    """One pattern of a case, and how many times as fast as dense attention it should be."""

    pattern_type: PatternType
    sparsity_ratio: float
    target: float | None = None

    @property
    def name(self) -> str:
        return f"{self.pattern_type} {self.sparsity_ratio:g}"


@dataclass(frozen=True)
class SparseTimeCase:
    """Dense attention over the time of block-sparse attention, for several patterns in one interleaved run.

    Dense attention, the longest by far, takes part in `dense_repeats` of the rounds.
    """

    name: str
    config: SparseConfig
    n: int
    patterns: tuple[SparseEntry, ...]
    bare_n: int = 8192
    backward: bool = False
    repeats: int = 5
    dense_repeats: int = 2


@dataclass(frozen=True)
class SparseMemoryCase:
    """One forward: peak memory that it adds, over out and lse; time of the pattern's build, over its own."""

    name: str
    config: SparseConfig
    n: int
    target: float | None = 1.25
    build_target: float | None = 0.05
    repeats: int = 1


@dataclass(frozen=True)
class PatternCase:
    """The build of a pattern alone: its time, and the peak memory that it adds."""

    name: str
    config: SparseConfig
    n: int
    memory_target: int | None = None
    repeats: int = 3


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


SparseCase = SparseTimeCase | SparseMemoryCase | PatternCase | ModuleMemoryCase
SPARSE_KINDS: dict[str, type[SparseCase]] = {
    "sparse time": SparseTimeCase,
    "sparse memory": SparseMemoryCase,
    "pattern": PatternCase,
    "module memory": ModuleMemoryCase,
}


def _entries(ratio: float, structured: float | None, by_chance: float | None) -> tuple[SparseEntry, ...]:
    entries = [SparseEntry(kind, ratio, structured) for kind in STRUCTURED]
    return (*entries, SparseEntry("random", ratio, by_chance))


_SPEED = SparseConfig(8, 64, 128)
_SEGMENTS = {"2048": ((2048,), (1,)), "65536 and 131072": ((65536, 131072), (1, 2))}
_LONG = {
    name: SparseConfig(8, 64, 256, "dilated_sparse", 0.01, *branches, dtype="bfloat16")
    for name, branches in _SEGMENTS.items()
}
_QUICK = SparseConfig(2, 16, 32, "dilated_sparse", 0.1, (128, 256), (1, 2))


def _memory_cases(n: int) -> list[SparseMemoryCase]:
    return [
        SparseMemoryCase(f"sparse memory, n = {n}, segments {name}", config, n)
        for name, config in _LONG.items()
    ]


SPARSE_SUITE: tuple[SparseCase, ...] = (
    SparseTimeCase("sparse forward", _SPEED, 32768, (*_entries(0.1, 5.0, 4.0), *_entries(0.01, 25.0, 25.0))),
    SparseTimeCase(
        "sparse forward + backward", _SPEED, 32768, _entries(0.1, 4.0, 3.0), backward=True, repeats=2
    ),
    *(
        PatternCase(
            f"build of {kind}", SparseConfig(8, 64, 128, kind, 0.01), 2**20, memory_target=200 * 10**6
        )
        for kind in BUILT
    ),
    *_memory_cases(2**17),
    ModuleMemoryCase("ring over base memory", _LONG["2048"], 2**17),
    *_memory_cases(2**20),
)
SPARSE_QUICK: tuple[SparseCase, ...] = (
    SparseTimeCase("quick sparse forward", _QUICK, 1024, _entries(0.1, None, None), 256, repeats=3),
    SparseTimeCase(
        "quick sparse forward + backward", _QUICK, 512, _entries(0.1, None, None), 256, True, repeats=2
    ),
    PatternCase("quick build", _QUICK, 16384),
    SparseMemoryCase("quick sparse memory", _QUICK, 8192, None, None),
    ModuleMemoryCase("quick ring over base memory", _QUICK, 8192, target=None),
)


def describe_sparse(case: SparseCase) -> str:
    """The sizes of a case in a few words."""
    config = case.config
    words = [f"n = {case.n}", f"h = {config.h}", f"d = {config.d}", f"blocks of {config.block_size}"]
    kinds = {config.pattern_type}
    if isinstance(case, SparseTimeCase):
        kinds = {entry.pattern_type for entry in case.patterns}
    else:
        words.append(f"density {config.sparsity_ratio:g}")
    if not isinstance(case, PatternCase):
        words.append(config.dtype)
    if config.is_causal:
        words.append("causal")
    if "dilated_sparse" in kinds:
        words.append("branches " + ", ".join(f"({w}, {r})" for w, r in config.spec.branches))
    if isinstance(case, SparseTimeCase):
        words.append(f"the bare kernel with n = {case.bare_n}")
        words.append(f"dense attention in {case.dense_repeats} of the rounds")
    return ", ".join(words)


def sparse_targets(case: SparseCase) -> list[str]:
    """The targets of a case, in words."""
    if isinstance(case, SparseTimeCase):
        return [f"{entry.name} at least {entry.target:g}x" for entry in case.patterns if entry.target]
    if isinstance(case, PatternCase):
        return [f"{case.memory_target / 1e6:.0f} MB"] if case.memory_target else []
    targets = [f"memory {case.target}"] if case.target else []
    if isinstance(case, SparseMemoryCase) and case.build_target:
        targets.append(f"build {case.build_target}")
    return targets


def read_config(data: dict[str, Any]) -> SparseConfig:
    """A config as JSON holds it."""
    branches = {name: tuple(data[name]) for name in ("segment_lengths", "dilation_rates")}
    return SparseConfig(**{**data, **branches})


def read_entries(data: Sequence[dict[str, Any]]) -> tuple[SparseEntry, ...]:
    return tuple(SparseEntry(**entry) for entry in data)
