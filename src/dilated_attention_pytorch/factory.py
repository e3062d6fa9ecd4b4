"""Attention modules by kind or pattern, with settings that suit lengths and machine, and reasons for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from . import modules
from .checks import check_device, check_positive_int, refuse_unknown
from .core.host_memory import describe_bytes, device_memory
from .modules import MULTIHEAD_KINDS, MultiheadDilatedAttention
from .modules.attention import AttentionModule
from .plan import BlockPattern
from .spec import DilatedSpec, SparsePatternConfig, resolve_branches

LOGGER = logging.getLogger("dilated_attention_pytorch")
POOL_FROM = 4096  # segments of this length turn the memory pool on
LITTLE_MEMORY = 2 * 2**30
KINDS: Mapping[str, type[AttentionModule]] = {
    "standard": modules.DilatedAttention,
    "improved": modules.ImprovedDilatedAttention,
    "improved_v2": modules.ImprovedDilatedAttentionV2,
    "ring": modules.RingDilatedAttentionV2,
    "block_sparse": modules.BlockSparseDilatedAttention,
    "distributed": modules.RingDilatedAttentionProduction,
}
VARIANTS: Mapping[str, Any] = {
    "base": modules.BlockSparseDilatedAttention,
    "ring": modules.BlockSparseRingDilatedAttention,
    "hierarchical": modules.BlockSparseDilatedAttention,
    "adaptive": modules.BlockSparseAdaptiveDilatedAttention,
    "multihead": modules.BlockSparseMultiheadDilatedAttention,
    "distributed": modules.BlockSparseRingDilatedAttention,
}
_OVER_EMBEDDINGS = {"distributed": modules.BlockSparseRingMultiheadDilatedAttention}  # with embed_dim
_PATTERN_TYPES = ("hierarchical", "adaptive")  # variants whose pattern is of that type; others take any
PRESETS: Mapping[str, SparsePatternConfig] = {
    "local": SparsePatternConfig("local_window", 0.05),
    "document": SparsePatternConfig("global_local", 0.05),
    "genome": SparsePatternConfig("dilated_sparse", 0.02),
    "multiscale": SparsePatternConfig("hierarchical", 0.05, hierarchy="long_range"),
    "extreme": SparsePatternConfig("dilated_sparse", 0.01, 256),
}


@dataclass(frozen=True)
class Choice:
    """What a factory makes; `print(choice)` explains it."""

    kind: str
    options: Mapping[str, Any]
    reasons: tuple[str, ...]
    made: type[nn.Module]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return "\n".join([f"{self.made.__name__}({options})", *(f"- {why}" for why in self.reasons)])

    def make(self) -> Any:
        """The module, which keeps the choice; the choice is logged."""
        LOGGER.info("%s", self)
        module: Any = self.made(**self.options)
        module.choice = self
        return module


def create_dilated_attention(
    kind: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    seq_len: int | None = None,
    **options: Any,
) -> AttentionModule:
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
    attention: AttentionModule = choice.make()
    return attention


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
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads}
    branches = (segment_lengths, dilation_rates, seq_len)
    choice = _choose("create_multihead_dilated_attention", MULTIHEAD_KINDS, kind, branches, options, sizes)
    multihead: MultiheadDilatedAttention = choice.make()
    return multihead


def create_block_sparse_attention(
    variant: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    sparse_config: SparsePatternConfig | Mapping[str, Any] | BlockPattern | None = None,
    *,
    sparsity_ratio: float | None = None,
    block_size: int | None = None,
    pattern_type: str | None = None,
    preset: str | None = None,
    **options: Any,
) -> nn.Module:
    """A block-sparse module: "base", "ring", "hierarchical", "adaptive", "multihead" or "distributed".

    "auto" is "multihead" if `embed_dim` is among the options, "adaptive" or "hierarchical" if the pattern is
    of that type, else "base". "ring" takes (b, n, h, d) and shares its sequences with the processes of a
    group; "distributed" does so, too, and with `embed_dim` it is the multihead module of that ring.
    `module.choice` holds what was chosen and why; it is also logged.

    Args:
        segment_lengths, dilation_rates: the branches of "dilated_sparse" patterns; or `max_length`, the
            longest sequence, for which `branches_for` gives them.
        sparse_config: the whole pattern: a `SparsePatternConfig`, its fields as a dict, or a `BlockPattern`.
        preset: a pattern by name instead: "local", "document", "genome", "multiscale" or "extreme".
        sparsity_ratio, block_size, pattern_type: change single fields of the preset or the default config.
        options: those of the variant's class, such as `embed_dim` and `num_heads` for "multihead", or
            `ring_size` and `group` for "ring".
    """
    _one_word("variant", variant, ("auto", *VARIANTS))
    given = {"sparsity_ratio": sparsity_ratio, "block_size": block_size, "pattern_type": pattern_type}
    changes = {name: value for name, value in given.items() if value is not None}
    config, reasons = _choose_pattern(variant, sparse_config, preset, changes)
    kind = None if isinstance(config, BlockPattern) else config.pattern_type
    if variant == "auto":
        variant = "multihead" if "embed_dim" in options else kind if kind in _PATTERN_TYPES else "base"
        why = "embed_dim is given" if variant == "multihead" else f"pattern {kind or 'given as blocks'}"
        reasons.append(f"variant: {why}")
    elif variant in _PATTERN_TYPES and kind != variant:
        raise ValueError(f"variant {variant!r} needs a pattern of that type, got {kind or 'a BlockPattern'}")
    made = VARIANTS[variant]
    if "embed_dim" in options and variant in _OVER_EMBEDDINGS:
        made = _OVER_EMBEDDINGS[variant]
        reasons.append("multihead: embed_dim is given")
    longest = options.pop("max_length", None)
    branches = resolve_branches(segment_lengths, dilation_rates, longest, options.get("num_heads"))
    refuse_unknown("create_block_sparse_attention", options, made.option_names(), ("preset", *given))
    named = dict(zip(("segment_lengths", "dilation_rates"), branches, strict=True))
    module: nn.Module = Choice(
        variant, {**named, "sparse_config": config, **options}, tuple(reasons), made
    ).make()
    return module


def _choose_pattern(
    variant: str,
    given: SparsePatternConfig | Mapping[str, Any] | BlockPattern | None,
    preset: str | None,
    changes: dict[str, Any],
) -> tuple[SparsePatternConfig | BlockPattern, list[str]]:
    """The pattern of `create_block_sparse_attention`, and why."""
    if preset is not None:
        _one_word("preset", preset, PRESETS)
    if given is not None:
        if others := [*changes, *(["preset"] if preset is not None else [])]:
            raise ValueError(f"sparse_config is the whole pattern, got {', '.join(others)} beside it")
        return given if isinstance(given, BlockPattern) else SparsePatternConfig.of(given), []
    if variant in _PATTERN_TYPES and preset is None:
        changes.setdefault("pattern_type", variant)
    config = PRESETS[preset] if preset is not None else SparsePatternConfig()
    changed = "".join(f", {name}={value!r}" for name, value in changes.items())
    reason = f"pattern: {'the default' if preset is None else f'preset {preset!r}'}{changed}"
    return replace(config, **changes), [reason]


def choose_dilated_attention(
    kind: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    seq_len: int | None = None,
    **options: Any,
) -> Choice:
    """What `create_dilated_attention` would make of the same arguments, from lengths, device and memory."""
    return _choose(
        "create_dilated_attention", KINDS, kind, (segment_lengths, dilation_rates, seq_len), options, {}
    )


def _choose(
    function: str,
    kinds: Mapping[str, Any],
    kind: str,
    branches: tuple[Any, Any, int | None],
    given: Mapping[str, Any],
    sizes: Mapping[str, Any],
) -> Choice:
    _one_word("kind", kind, ("auto", *kinds))
    (segment_lengths, dilation_rates, seq_len), options = branches, dict(given)
    max_length = options.pop("max_length", None)
    if seq_len is not None:
        check_positive_int("seq_len", seq_len)
        if max_length not in (None, seq_len):
            raise ValueError(f"seq_len and max_length are one, got {seq_len} and {max_length}")
    seq_len = max_length if seq_len is None else seq_len
    spec = DilatedSpec(*resolve_branches(segment_lengths, dilation_rates, seq_len, sizes.get("num_heads")))
    reach = min(max(spec.segment_lengths), seq_len or max(spec.segment_lengths))
    is_long = reach >= POOL_FROM
    length = f"segments reach over {reach} positions, {POOL_FROM} {'or more' if is_long else 'not reached'}"
    proposed: dict[str, tuple[Any, str]] = {}  # option -> value, reason
    if is_long and options.get("buffer_manager") is None:
        proposed["enable_memory_pool"] = True, length
    device = check_device(options.get("device")) or torch.get_default_device()
    memory = device_memory(device)
    if memory is not None and memory.available < LITTLE_MEMORY:
        little = f"{describe_bytes(memory.available)} available on {device}"
        if options.get("enable_memory_pool", bool(proposed)):
            proposed["lightweight_pool"] = True, f"{little}, so that no results are kept"
        proposed["workspace_bytes"] = max(2**20, memory.available // 256), little
    reasons = [] if kind != "auto" else [f"kind: {length}"]
    if seq_len is not None and segment_lengths is None:
        reasons.append(f"segments: LongNet's rule, until one spans {seq_len} tokens")
    reasons += [f"{name}: {'as asked' if name in options else why}" for name, (_, why) in proposed.items()]
    kind = kind if kind != "auto" else "improved" if is_long else "standard"
    refuse_unknown(function, options, kinds[kind].option_names(), ("kind", "seq_len"))
    named = {"segment_lengths": spec.segment_lengths, "dilation_rates": spec.dilation_rates}
    chosen = {name: value for name, (value, _) in proposed.items()}
    return Choice(kind, {**sizes, **named, **chosen, **options}, tuple(reasons), kinds[kind])


def _one_word(name: str, value: object, known: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
