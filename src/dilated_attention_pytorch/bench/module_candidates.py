"""WHO can be compared by name: modules and functions of this library, dense attention, and peers.

A candidate is made for a config and a length. It takes (q, k, v), each (b, n, h, d), or one with projections
takes x (b, n, h d), and gives what it attends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as torch_functional

from .. import block_sparse, functional, modules, ring
from ..checks import did_you_mean
from ..spec import Execution, SparsePatternConfig
from .module_cases import ModuleConfig
from .peers import FlexAttention, LocalWindows, why_not_flex, why_not_local, why_not_torchscale
from .sparse_candidates import make_pattern

Kind = Literal["dense", "dilated", "block-sparse", "adaptive", "local"]
Attend = Callable[..., Tensor]
OURS = ("memory", "pattern cache")


@dataclass(frozen=True)
class Entry:
    """A candidate: what it computes, how it is made, how it can be told to run, and why it cannot."""

    kind: Kind
    make: Callable[[ModuleConfig, int], Attend]
    heeds: tuple[str, ...] = ()
    projects: bool = False  # takes x, has weights
    why_not: Callable[[bool], str | None] = lambda backward: None

    @property
    def num_inputs(self) -> int:
        return 1 if self.projects else 3


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


def remarks(name: str, config: ModuleConfig) -> str:
    """What a reader must know beside a candidate's figures: what it computes, and options it cannot heed."""
    entry = entry_of(name)
    found = [f"{entry.kind}, with projections" if entry.projects else entry.kind]
    if config.memory is not None and ("memory" not in entry.heeds or _refuses(name, config)):
        has = "its memory is always pooled" if "memory" in entry.heeds else "it has no pool"
        found.append(f"not with memory {config.memory}: {has}")
    if not config.use_pattern_cache and "pattern cache" not in entry.heeds:
        found.append("it has no pattern cache to turn off")
    return "; ".join(found)


def _refuses(name: str, config: ModuleConfig) -> bool:
    return name == "RingDilatedAttentionProduction" and config.memory == "fresh"


def _options(name: str, config: ModuleConfig) -> dict[str, Any]:
    """Memory and cache as the options of modules."""
    options: dict[str, Any] = {"use_pattern_cache": config.use_pattern_cache}
    if config.memory in ("pool", "lightweight"):
        options |= {"enable_memory_pool": True, "lightweight_pool": config.memory == "lightweight"}
    elif config.memory == "fresh" and name == "ImprovedDilatedAttentionV2":
        options["enable_buffer_manager"] = False
    return options


def _call_options(config: ModuleConfig) -> dict[str, Any]:
    """The same for functions."""
    memory = "fresh" if config.memory is None else config.memory
    return {
        "is_causal": config.is_causal,
        "execution": Execution(memory=memory, use_pattern_cache=config.use_pattern_cache),
    }


def _module(name: str, kind: Kind = "dilated", projects: bool = False) -> Entry:
    """A module of this library by its public name."""

    def make(config: ModuleConfig, n: int) -> Attend:
        options = _options(name, config)
        if kind == "block-sparse":
            options["sparse_config"] = config.sparse_config
        if kind == "adaptive":
            options["sparse_config"] = SparsePatternConfig("adaptive", config.sparsity, config.block_size)
            options |= {"num_heads": config.h, "head_dim": config.d}
        if projects:
            sizes = {"embed_dim": config.h * config.d, "num_heads": config.h}
            options |= {**sizes, "dtype": getattr(torch, config.dtype)}
        torch.manual_seed(0)  # of weights
        module = getattr(modules, name)(
            segment_lengths=config.segment_lengths, dilation_rates=config.dilation_rates, **options
        )
        return Causal(module, config.is_causal)

    return Entry(kind, make, ("memory",) if kind == "adaptive" else OURS, projects)


def _dilated_function(module: Any, name: str) -> Entry:
    def make(config: ModuleConfig, n: int) -> Attend:
        branches, options = (config.segment_lengths, config.dilation_rates), _call_options(config)
        return lambda q, k, v: getattr(module, name)(q, k, v, *branches, **options)

    return Entry("dilated", make, OURS)


def _block_function(module: Any, name: str) -> Entry:
    def make(config: ModuleConfig, n: int) -> Attend:
        pattern, options = make_pattern(config, n), _call_options(config)
        return lambda q, k, v: getattr(module, name)(q, k, v, pattern, **options)

    return Entry("block-sparse", make, OURS)


def _make_sdpa(config: ModuleConfig, n: int) -> Attend:
    def attend(*tensors: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in tensors)
        out = torch_functional.scaled_dot_product_attention(q, k, v, is_causal=config.is_causal)
        return out.transpose(1, 2)

    return attend


def _make_flex(config: ModuleConfig, n: int) -> Attend:
    return FlexAttention(make_pattern(config, n), config.h)


def _make_local(config: ModuleConfig, n: int) -> Attend:
    return LocalWindows(n, config.block_size, config.is_causal)


def _make_nothing(config: ModuleConfig, n: int) -> Attend:
    raise NotImplementedError("this candidate never runs: see its why_not")


ENTRIES: dict[str, Entry] = {
    "sdpa": Entry("dense", _make_sdpa),
    "dilated_attention": _dilated_function(functional, "dilated_attention"),
    "DilatedAttention": _module("DilatedAttention"),
    "ImprovedDilatedAttention": _module("ImprovedDilatedAttention"),
    "ImprovedDilatedAttentionV2": _module("ImprovedDilatedAttentionV2"),
    "ring_dilated_attention": _dilated_function(ring, "ring_dilated_attention"),
    "RingDilatedAttentionV2": _module("RingDilatedAttentionV2"),
    "RingDilatedAttentionV3": _module("RingDilatedAttentionV3"),
    "RingDilatedAttentionProduction": _module("RingDilatedAttentionProduction"),
    "block_sparse_attention": _block_function(block_sparse, "block_sparse_attention"),
    "BlockSparseDilatedAttention": _module("BlockSparseDilatedAttention", "block-sparse"),
    "ring_block_sparse_attention": _block_function(ring, "ring_block_sparse_attention"),
    "BlockSparseRingDilatedAttention": _module("BlockSparseRingDilatedAttention", "block-sparse"),
    "BlockSparseAdaptiveDilatedAttention": _module("BlockSparseAdaptiveDilatedAttention", "adaptive"),
    "MultiheadDilatedAttention": _module("MultiheadDilatedAttention", projects=True),
    "ImprovedMultiheadDilatedAttention": _module("ImprovedMultiheadDilatedAttention", projects=True),
    "RingMultiheadDilatedAttention": _module("RingMultiheadDilatedAttention", projects=True),
    "BlockSparseMultiheadDilatedAttention": _module(
        "BlockSparseMultiheadDilatedAttention", "block-sparse", projects=True
    ),
    "BlockSparseRingMultiheadDilatedAttention": _module(
        "BlockSparseRingMultiheadDilatedAttention", "block-sparse", projects=True
    ),
    "flex_attention": Entry("block-sparse", _make_flex, why_not=why_not_flex),
    "local_attention": Entry("local", _make_local, why_not=why_not_local),
    "torchscale": Entry("dilated", _make_nothing, why_not=why_not_torchscale),
}
