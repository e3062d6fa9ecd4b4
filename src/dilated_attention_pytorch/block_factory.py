"""Block-sparse attention modules by variant and preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .checks import refuse_unknown
from .factory import LOGGER, Choice
from .modules import (
    BlockSparseAdaptiveDilatedAttention,
    BlockSparseDilatedAttention,
    BlockSparseMultiheadDilatedAttention,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
)
from .plan import BlockPattern
from .spec import SparsePatternConfig, resolve_branches

VARIANTS: Mapping[str, type[BlockSparseDilatedAttention] | type[BlockSparseMultiheadDilatedAttention]] = {
    "base": BlockSparseDilatedAttention,
    "ring": BlockSparseRingDilatedAttention,
    "hierarchical": BlockSparseDilatedAttention,
    "adaptive": BlockSparseAdaptiveDilatedAttention,
    "multihead": BlockSparseMultiheadDilatedAttention,
    "distributed": BlockSparseRingDilatedAttention,  # with embed_dim its multihead module
}
# What a variant's pattern must be; the other variants take any.
_PATTERN_TYPES = {"hierarchical": "hierarchical", "adaptive": "adaptive"}
_OWN_NAMES = ("variant", "sparsity_ratio", "block_size", "pattern_type", "preset")
PRESETS: Mapping[str, SparsePatternConfig] = {
    "local": SparsePatternConfig("local_window", 0.05),
    "document": SparsePatternConfig("global_local", 0.05),
    "genome": SparsePatternConfig("dilated_sparse", 0.02),
    "multiscale": SparsePatternConfig("hierarchical", 0.05, hierarchy="long_range"),
    "extreme": SparsePatternConfig("dilated_sparse", 0.01, 256),
}


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
    known = ("auto", *VARIANTS)
    if variant not in known:
        raise ValueError(f"variant must be one of {', '.join(known)}, got {variant!r}")
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    changes = {"sparsity_ratio": sparsity_ratio, "block_size": block_size, "pattern_type": pattern_type}
    changes = {name: value for name, value in changes.items() if value is not None}
    if sparse_config is not None and (changes or preset is not None):
        others = [*changes, *(["preset"] if preset is not None else [])]
        raise ValueError(f"sparse_config is the whole pattern, got {', '.join(others)} beside it")
    reasons = []
    config: SparsePatternConfig | BlockPattern
    if isinstance(sparse_config, BlockPattern):
        config = sparse_config
    elif sparse_config is not None:
        config = SparsePatternConfig.of(sparse_config)
    else:
        config = PRESETS[preset] if preset is not None else SparsePatternConfig()
        if variant in _PATTERN_TYPES and preset is None:
            changes.setdefault("pattern_type", _PATTERN_TYPES[variant])
        config = replace(config, **changes)  # type: ignore[arg-type]
        changed = "".join(f", {name}={value!r}" for name, value in changes.items())
        reasons.append(f"pattern: {'the default' if preset is None else f'preset {preset!r}'}{changed}")
    kind = None if isinstance(config, BlockPattern) else config.pattern_type
    wanted = _PATTERN_TYPES.get(variant)
    if wanted is not None and kind != wanted:
        raise ValueError(f"variant {variant!r} needs a pattern of that type, got {kind or 'a BlockPattern'}")
    if variant == "auto":
        variant = "multihead" if "embed_dim" in options else kind if kind in _PATTERN_TYPES else "base"
        why = "embed_dim is given" if variant == "multihead" else f"pattern {kind or 'given as blocks'}"
        reasons.append(f"variant: {why}")
    longest, heads = options.pop("max_length", None), options.get("num_heads")
    branches = resolve_branches(segment_lengths, dilation_rates, longest, heads)
    made: dict[str, Any] = {
        "segment_lengths": branches[0],
        "dilation_rates": branches[1],
        "sparse_config": config,
        **options,
    }
    make = VARIANTS[variant]
    if variant == "distributed" and "embed_dim" in options:
        make = BlockSparseRingMultiheadDilatedAttention
        reasons.append("multihead: embed_dim is given")
    refuse_unknown("create_block_sparse_attention", options, make.option_names(), _OWN_NAMES)
    choice = Choice(variant, made, tuple(reasons), make.__name__)
    LOGGER.info("%s", choice)
    module: nn.Module = make(**made)
    module.choice = choice  # type: ignore[assignment]
    return module
