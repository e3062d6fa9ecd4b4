"""WHAT is compared by name: modules, functions and peers on the same inputs. Plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..spec import DilatedSpec, SparsePatternConfig, branches_for
from .config import Config

Memory = Literal["fresh", "pool", "lightweight"]
BASELINE = "sdpa"
MAIN_CANDIDATES = (
    BASELINE,
    "DilatedAttention",
    "ImprovedDilatedAttentionV2",
    "RingDilatedAttentionV2",
    "BlockSparseDilatedAttention",
    "MultiheadDilatedAttention",
)
RATIO = 4  # of the branches that nobody named
DENSE_LENGTH = 8192  # beyond it dense attention takes part in fewer rounds


@dataclass(frozen=True)
class ModuleConfig:
    """What candidates are asked for. Dense ones need no branches and dilated ones no blocks. A kind of memory
    or a cache that one of them does not have is stated beside its figures.

    `memory` is where calls take memory from, None for each module's own way.
    """

    h: int
    d: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    dtype: str = "float32"
    is_causal: bool = False
    sparsity: float = 0.1
    block_size: int = 128
    memory: Memory | None = None
    use_pattern_cache: bool = True

    @property
    def spec(self) -> DilatedSpec:
        return DilatedSpec(self.segment_lengths, self.dilation_rates, self.is_causal)

    @property
    def sparse_config(self) -> SparsePatternConfig:
        return SparsePatternConfig("dilated_sparse", self.sparsity, self.block_size)

    @property
    def dilated(self) -> Config:
        """The part that dilated attention is defined by."""
        return Config(self.h, self.d, self.segment_lengths, self.dilation_rates, self.is_causal)


@dataclass(frozen=True)
class CompareCase:
    """Time, tokens a second and peak memory of candidates at one length.

    Dense attention takes part in `dense_repeats` of the rounds; None is all of them.
    """

    name: str
    config: ModuleConfig
    n: int
    candidates: tuple[str, ...]
    b: int = 1
    backward: bool = False
    dense_repeats: int | None = None
    repeats: int = 5


def compare_cases(
    config: ModuleConfig,
    lengths: tuple[int, ...],
    candidates: tuple[str, ...],
    *,
    passes: tuple[bool, ...] = (False,),
    b: int = 1,
    repeats: int = 5,
) -> tuple[CompareCase, ...]:
    """One case a pass (True with gradients) and length."""
    return tuple(
        CompareCase(
            f"{'training' if backward else 'forward'} at {n}",
            config,
            n,
            candidates,
            b,
            backward,
            None if n <= DENSE_LENGTH else 1,
            repeats,
        )
        for backward in passes
        for n in lengths
    )


_LENGTHS = (2048, 8192, 32768)
_SUITE = ModuleConfig(4, 64, *branches_for(max(_LENGTHS), ratio=RATIO))
MODULE_SUITE = compare_cases(_SUITE, _LENGTHS, MAIN_CANDIDATES, passes=(False, True), repeats=3)
_QUICK = ModuleConfig(2, 16, (32, 128), (1, 2), sparsity=0.5, block_size=32)
MODULE_QUICK = (
    CompareCase("quick modules", _QUICK, 256, ("sdpa", "DilatedAttention"), backward=True, repeats=2),
)


def describe_compare(case: CompareCase) -> str:
    """The sizes of a case in a few words. Its candidates stand in the table."""
    config = case.config
    words = [f"b = {case.b}", f"n = {case.n}", f"h = {config.h}", f"d = {config.d}", config.dtype]
    if config.is_causal:
        words.append("causal")
    words.append("branches " + ", ".join(f"({w}, {r})" for w, r in config.spec.branches))
    words.append(f"blocks of {config.block_size} with density {config.sparsity:g}")
    if config.memory is not None:
        words.append(f"memory {config.memory}")
    if not config.use_pattern_cache:
        words.append("no pattern cache")
    if case.dense_repeats is not None:
        rounds = "round" if case.dense_repeats == 1 else "rounds"
        words.append(f"dense attention in {case.dense_repeats} {rounds}")
    return ", ".join(words)


def read_module_config(data: dict[str, Any]) -> ModuleConfig:
    """A config as JSON holds it."""
    branches = {name: tuple(data[name]) for name in ("segment_lengths", "dilation_rates")}
    return ModuleConfig(**{**data, **branches})
