"""WHO can be compared by name: modules and functions of this library, dense attention, and peers.

A candidate is made for a config and a length. It takes (q, k, v), each (b, n, h, d), or one with projections
takes x (b, n, h d), and gives what it attends. fkodom's `dilated-attention-pytorch` is not among the peers:
it is imported by the same name as this package, so the two cannot be installed together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as torch_functional

from ... import block_sparse, functional, modules, ring
from ...checks import did_you_mean
from ...plan import BlockPattern
from ...spec import DilatedSpec, Execution, SparsePatternConfig

Kind = Literal["dense", "dilated", "block-sparse", "adaptive", "local"]
Attend = Callable[..., Tensor]
BASELINE = "sdpa"
MAIN = (
    BASELINE,
    "DilatedAttention",
    "ImprovedDilatedAttentionV2",
    "RingDilatedAttentionV2",
    "BlockSparseDilatedAttention",
    "MultiheadDilatedAttention",
)


class CannotRunError(Exception):
    """A candidate turned out not to run here; the message says why."""


@dataclass(frozen=True)
class Config:
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
    memory: str | None = None
    use_pattern_cache: bool = True

    @property
    def spec(self) -> DilatedSpec:
        return DilatedSpec(self.segment_lengths, self.dilation_rates, self.is_causal)

    @property
    def branches(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.segment_lengths, self.dilation_rates

    @property
    def sparse_config(self) -> SparsePatternConfig:
        return SparsePatternConfig("dilated_sparse", self.sparsity, self.block_size)

    def make_pattern(self, n: int) -> BlockPattern:
        """The pattern of block-sparse candidates, built as users build it."""
        return block_sparse.build_block_pattern(
            self.sparse_config,
            n,
            self.h,
            is_causal=self.is_causal,
            segment_lengths=self.segment_lengths,
            dilation_rates=self.dilation_rates,
        )


@dataclass(frozen=True)
class Entry:
    """A candidate: what it computes, how it is made, which options it heeds, and why it cannot run."""

    kind: Kind
    make: Callable[[Config, int], Attend]
    heeds: tuple[str, ...] = ("memory", "pattern cache")
    projects: bool = False  # takes x, has weights
    why_not: str | None = None
    why_no_backward: str | None = None

    def reason(self, backward: bool) -> str | None:
        """Why it cannot run here; None if it can."""
        return self.why_not or (self.why_no_backward if backward else None)


class Causal(nn.Module):
    """A module of this library that is told once whether it is causal; of pairs it returns the first."""

    def __init__(self, module: nn.Module, is_causal: bool) -> None:
        super().__init__()
        self.module, self.is_causal = module.eval(), is_causal

    def forward(self, *tensors: Tensor) -> Tensor:
        found = self.module(*tensors, is_causal=self.is_causal)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out


def entry_of(name: str) -> Entry:
    """The candidate of a name; a `ValueError` names those that are close."""
    if name in ENTRIES:
        return ENTRIES[name]
    raise ValueError(f"there is no candidate {name!r}.{did_you_mean(name, ENTRIES)} See --list.")


def remarks(name: str, config: Config) -> str:
    """What a reader must know beside a candidate's figures: what it computes, and options it cannot heed."""
    entry = entry_of(name)
    found = [f"{entry.kind}, with projections" if entry.projects else entry.kind]
    is_pooled = name == "RingDilatedAttentionProduction" and config.memory == "fresh"
    if config.memory is not None and ("memory" not in entry.heeds or is_pooled):
        has = "its memory is always pooled" if is_pooled else "it has no pool"
        found.append(f"not with memory {config.memory}: {has}")
    if not config.use_pattern_cache and "pattern cache" not in entry.heeds:
        found.append("it has no pattern cache to turn off")
    return "; ".join(found)


def _make_module(name: str, kind: Kind, projects: bool, config: Config, _: int) -> Attend:
    options: dict[str, Any] = {"use_pattern_cache": config.use_pattern_cache}
    if config.memory in ("pool", "lightweight"):
        options |= {"enable_memory_pool": True, "lightweight_pool": config.memory == "lightweight"}
    elif config.memory == "fresh" and name == "ImprovedDilatedAttentionV2":
        options["enable_buffer_manager"] = False
    if kind != "dilated":
        pattern_type: Any = "adaptive" if kind == "adaptive" else "dilated_sparse"
        options["sparse_config"] = SparsePatternConfig(pattern_type, config.sparsity, config.block_size)
    if kind == "adaptive":
        options |= {"num_heads": config.h, "head_dim": config.d}
    if projects:
        sizes = {"embed_dim": config.h * config.d, "num_heads": config.h}
        options |= {**sizes, "dtype": getattr(torch, config.dtype)}
    torch.manual_seed(0)  # of weights
    branches = dict(zip(("segment_lengths", "dilation_rates"), config.branches, strict=True))
    return Causal(getattr(modules, name)(**branches, **options), config.is_causal)


def _module(name: str, kind: Kind = "dilated", projects: bool = False) -> Entry:
    """A module of this library by its public name."""
    make = partial(_make_module, name, kind, projects)
    return Entry(kind, make, ("memory",) if kind == "adaptive" else Entry.heeds, projects)


def _function(kind: Kind, where: Any, name: str) -> Entry:
    """A function of this library."""

    def make(config: Config, n: int) -> Attend:
        how = Execution(memory=config.memory or "fresh", use_pattern_cache=config.use_pattern_cache)
        what: tuple[Any, ...] = config.branches if kind == "dilated" else (config.make_pattern(n),)
        return lambda *qkv: getattr(where, name)(*qkv, *what, is_causal=config.is_causal, execution=how)

    return Entry(kind, make)


def _by_head(attend: Callable[..., Any]) -> Attend:
    """An attention over (b, h, n, d) as one over (b, n, h, d)."""

    def transposed(*tensors: Tensor) -> Tensor:
        out: Tensor = attend(*(x.transpose(1, 2) for x in tensors))
        return out.transpose(1, 2)

    return transposed


def _make_sdpa(config: Config, _: int) -> Attend:
    return _by_head(partial(torch_functional.scaled_dot_product_attention, is_causal=config.is_causal))


def _make_flex(config: Config, n: int) -> Attend:
    """torch's compiled FlexAttention over the blocks of the block-sparse modules."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = config.make_pattern(n).to_block_mask("cpu", num_heads=config.h)
    compiled: Any = torch.compile(flex_attention)

    def attend(*tensors: Tensor) -> Any:
        try:
            return compiled(*tensors, block_mask=mask)
        except RuntimeError as error:  # what torch.compile raises, as without a C++ compiler
            first = str(error).strip().partition("\n")[0]
            raise CannotRunError(f"torch.compile of it failed: {first}") from error

    return _by_head(attend)


def _make_local(config: Config, n: int) -> Attend:
    """`LocalAttention` of lucidrains: each window sees itself, the one before and, not causal, the next."""
    if over := n % config.block_size:
        window = f"multiples of its window of {config.block_size}"
        raise CannotRunError(f"it takes {window}, and {over} of {n} are over")
    # Without `dim` it has no position embedding.
    made = import_module("local_attention").LocalAttention
    return _by_head(made(config.block_size, causal=config.is_causal, look_backward=1))


def window_mask(n: int, window: int, is_causal: bool) -> Tensor:
    """(1, n, n) bool: what local attention lets each query see."""
    index = torch.arange(n)
    ahead = index // window - (index // window)[:, None]
    seen = ahead.abs() <= 1
    return (seen & (index <= index[:, None]) if is_causal else seen)[None]


def _missing(package: str, otherwise: str | None = None) -> str | None:
    return otherwise if find_spec(package.replace("-", "_")) else f"the package {package} is not installed"


ENTRIES: dict[str, Entry] = {
    BASELINE: Entry("dense", _make_sdpa, ()),
    "dilated_attention": _function("dilated", functional, "dilated_attention"),
    "ring_dilated_attention": _function("dilated", ring, "ring_dilated_attention"),
    "block_sparse_attention": _function("block-sparse", block_sparse, "block_sparse_attention"),
    "ring_block_sparse_attention": _function("block-sparse", ring, "ring_block_sparse_attention"),
    **{
        name: _module(name)
        for name in (
            *("DilatedAttention", "ImprovedDilatedAttention", "ImprovedDilatedAttentionV2"),
            *("RingDilatedAttentionV2", "RingDilatedAttentionV3", "RingDilatedAttentionProduction"),
        )
    },
    "BlockSparseDilatedAttention": _module("BlockSparseDilatedAttention", "block-sparse"),
    "BlockSparseRingDilatedAttention": _module("BlockSparseRingDilatedAttention", "block-sparse"),
    "BlockSparseAdaptiveDilatedAttention": _module("BlockSparseAdaptiveDilatedAttention", "adaptive"),
    **{
        f"{kind}MultiheadDilatedAttention": _module(
            f"{kind}MultiheadDilatedAttention", "block-sparse" if "Block" in kind else "dilated", True
        )
        for kind in ("", "Improved", "Ring", "BlockSparse", "BlockSparseRing")
    },
    "flex_attention": Entry(
        *("block-sparse", _make_flex, ()), why_no_backward="FlexAttention has no backward pass on the CPU"
    ),
    "local_attention": Entry("local", _make_local, (), why_not=_missing("local-attention")),
    "torchscale": Entry(
        *("dilated", _make_sdpa, ()),  # never made
        why_not=_missing(
            "torchscale",
            "its dilated attention calls flash-attn or xformers on CUDA, and the CPU is measured here",
        ),
    ),
}
