"""Attention modules by kind, with settings that suit the lengths and the machine, and reasons for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .checks import check_device, check_positive_int, refuse_unknown
from .core.host_memory import describe_bytes, device_memory
from .modules import (
    BlockSparseDilatedAttention,
    DilatedAttention,
    ImprovedDilatedAttention,
    ImprovedDilatedAttentionV2,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2,
)
from .modules.multihead import MULTIHEAD_KINDS, MultiheadDilatedAttention
from .modules.skin import AttentionSkin
from .spec import DilatedSpec, resolve_branches

LOGGER = logging.getLogger("dilated_attention_pytorch")
POOL_FROM = 4096  # segments of this length turn the memory pool on
LITTLE_MEMORY = 2 * 2**30
KINDS: Mapping[str, type[AttentionSkin]] = {
    "standard": DilatedAttention,
    "improved": ImprovedDilatedAttention,
    "improved_v2": ImprovedDilatedAttentionV2,
    "ring": RingDilatedAttentionV2,
    "block_sparse": BlockSparseDilatedAttention,
    "distributed": RingDilatedAttentionProduction,
}


@dataclass(frozen=True)
class Choice:
    """What a factory makes; `print(choice)` explains it."""

    kind: str
    options: Mapping[str, Any]
    reasons: tuple[str, ...]
    class_name: str

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return "\n".join([f"{self.class_name}({options})", *(f"- {why}" for why in self.reasons)])


def create_dilated_attention(
    kind: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    seq_len: int | None = None,
    **options: Any,
) -> AttentionSkin:
    """The attention module of a kind: "auto", or one of those below.

    - "standard", "improved" and "improved_v2" compute the same; they differ in where their memory comes from.
    - "ring" (`RingDilatedAttentionV2`) attends over a sequence of which each process holds a part.
    - "distributed" (`RingDilatedAttentionProduction`) is the ring for long runs on several machines: pooled
      memory, and by option checkpointing, mixed precision and memory logs.
    - "block_sparse" keeps the blocks of its `sparse_config`; see `create_block_sparse_attention`.

    "auto" is "standard" or "improved", also where torch.distributed runs: whether the processes share a
    sequence or, as in data parallel training, have one each, only the caller knows.

    The memory pool turns itself on for segments of 4096 and more. What the caller says in `options` (those of
    the kind's class) always wins. `module.choice` holds what was chosen and why; it is also logged.

    Args:
        segment_lengths, dilation_rates: one entry a branch; given together, or both left out.
        seq_len: the longest sequence that the module is meant for, if it is known; also `max_length`.
            `branches_for` gives the branches that are left out for it.
    """
    choice = choose_dilated_attention(kind, segment_lengths, dilation_rates, seq_len=seq_len, **options)
    LOGGER.info("%s", choice)
    make: Callable[..., AttentionSkin] = KINDS[choice.kind]
    module = make(**choice.options)
    module.choice = choice
    return module


def create_multihead_dilated_attention(
    kind: str = "auto",
    embed_dim: int = 768,
    num_heads: int = 12,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    seq_len: int | None = None,
    **options: Any,
) -> MultiheadDilatedAttention:
    """The multihead module of a kind: "auto", or one of those below, which are called alike.

    - "standard" has separate input projections, as those of torchscale are; "improved" fuses them.
    - "ring" attends over a sequence of which each process holds a part.
    - "block_sparse" keeps the blocks of its `sparse_config`, and "block_sparse_ring" does so in a ring.

    "auto", the memory pool, `seq_len`, `options` (those of the kind's class) and `module.choice` are as in
    `create_dilated_attention`.
    """
    heads = {"embed_dim": embed_dim, "num_heads": num_heads}
    branches = (segment_lengths, dilation_rates, seq_len)
    choice = _choose("create_multihead_dilated_attention", MULTIHEAD_KINDS, kind, *branches, options, heads)
    LOGGER.info("%s", choice)
    module = MULTIHEAD_KINDS[choice.kind](**choice.options)
    module.choice = choice
    return module


def choose_dilated_attention(
    kind: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    seq_len: int | None = None,
    **options: Any,
) -> Choice:
    """What `create_dilated_attention` would make of the same arguments, from lengths, device and memory."""
    branches = (segment_lengths, dilation_rates, seq_len)
    return _choose("create_dilated_attention", KINDS, kind, *branches, options, {})


def _choose(
    function: str,
    kinds: Mapping[str, type[AttentionSkin] | type[MultiheadDilatedAttention]],
    kind: str,
    segment_lengths: Sequence[int] | None,
    dilation_rates: Sequence[int] | None,
    seq_len: int | None,
    options: Mapping[str, Any],
    sizes: Mapping[str, Any],
) -> Choice:
    known = ("auto", *kinds)
    if kind not in known:
        raise ValueError(f"kind must be one of {', '.join(known)}, got {kind!r}")
    options, max_length = dict(options), options.get("max_length")
    options.pop("max_length", None)
    if seq_len is not None:
        check_positive_int("seq_len", seq_len)
        if max_length not in (None, seq_len):
            raise ValueError(f"seq_len and max_length are one, got {seq_len} and {max_length}")
    seq_len = max_length if seq_len is None else seq_len
    spec = DilatedSpec(*resolve_branches(segment_lengths, dilation_rates, seq_len, sizes.get("num_heads")))
    reach = min(max(spec.segment_lengths), seq_len or max(spec.segment_lengths))
    is_long = reach >= POOL_FROM
    length = f"segments reach over {reach} positions, {POOL_FROM} {'or more' if is_long else 'not reached'}"
    proposals: list[tuple[str, Any, str]] = []
    if is_long and options.get("buffer_manager") is None:
        proposals.append(("enable_memory_pool", True, length))
    device = check_device(options.get("device")) or torch.get_default_device()
    memory = device_memory(device)
    if memory is not None and memory.available < LITTLE_MEMORY:
        little = f"{describe_bytes(memory.available)} available on {device}"
        proposals.append(("workspace_bytes", max(2**20, memory.available // 256), little))
        if options.get("enable_memory_pool", bool(proposals[:-1])):
            proposals.append(("lightweight_pool", True, f"{little}, so that no results are kept"))
    reasons = [] if kind != "auto" else [f"kind: {length}"]
    if seq_len is not None and segment_lengths is None:
        reasons.append(f"segments: LongNet's rule, until one spans {seq_len} tokens")
    reasons += [f"{name}: {'as asked' if name in options else why}" for name, _, why in proposals]
    chosen = {name: value for name, value, _ in proposals}
    branches = {"segment_lengths": spec.segment_lengths, "dilation_rates": spec.dilation_rates}
    kind = kind if kind != "auto" else "improved" if is_long else "standard"
    refuse_unknown(function, options, kinds[kind].option_names(), ("kind", "seq_len"))
    made = {**sizes, **branches, **chosen, **options}
    return Choice(kind, made, tuple(reasons), kinds[kind].__name__)
