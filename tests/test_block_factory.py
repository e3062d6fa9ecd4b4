"""`create_block_sparse_attention`: variants, presets, what was chosen and why, bad arguments."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import (
    BlockPattern,
    BlockSparseAdaptiveDilatedAttention,
    BlockSparseDilatedAttention,
    BlockSparseMultiheadDilatedAttention,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    SparsePatternConfig,
    block_sparse_attention,
    create_block_sparse_attention,
    create_dilated_attention,
)
from dilated_attention_pytorch.factory import PRESETS, VARIANTS

Q = torch.randn(1, 300, 4, 8)


@pytest.mark.parametrize(
    ("variant", "cls", "kind"),
    [
        ("auto", BlockSparseDilatedAttention, "dilated_sparse"),
        ("base", BlockSparseDilatedAttention, "dilated_sparse"),
        ("ring", BlockSparseRingDilatedAttention, "dilated_sparse"),
        ("hierarchical", BlockSparseDilatedAttention, "hierarchical"),
        ("adaptive", BlockSparseAdaptiveDilatedAttention, "adaptive"),
        ("distributed", BlockSparseRingDilatedAttention, "dilated_sparse"),
    ],
)
def test_variants(variant: str, cls: type, kind: str) -> None:
    module: Any = create_block_sparse_attention(variant, [128], [1], sparsity_ratio=0.3, block_size=32)
    assert type(module) is cls
    assert module.sparse_config == SparsePatternConfig(kind, 0.3, 32)
    assert module(Q, Q, Q).shape == Q.shape


def test_multihead_variant_by_name_and_by_embed_dim() -> None:
    for variant in ("multihead", "auto"):
        module: Any = create_block_sparse_attention(
            variant, [128], [1], sparsity_ratio=0.3, block_size=32, embed_dim=32, num_heads=4
        )
        assert type(module) is BlockSparseMultiheadDilatedAttention
        out, weights = module(torch.randn(2, 100, 32))
        assert (out.shape, weights) == ((2, 100, 32), None)


def test_distributed_with_embed_dim_is_the_multihead_module_of_the_ring() -> None:
    module: Any = create_block_sparse_attention(
        "distributed", [128], [1], sparsity_ratio=0.3, block_size=32, embed_dim=32, num_heads=4, ring_size=8
    )
    assert type(module) is BlockSparseRingMultiheadDilatedAttention
    assert module.attention.ring_size == 8
    assert "BlockSparseRingMultiheadDilatedAttention(" in str(module.choice)
    assert "- multihead: embed_dim is given" in str(module.choice)
    assert module(torch.randn(2, 100, 32))[0].shape == (2, 100, 32)


def test_auto_follows_the_pattern() -> None:
    for kind, cls in (
        ("adaptive", BlockSparseAdaptiveDilatedAttention),
        ("hierarchical", BlockSparseDilatedAttention),
        ("random", BlockSparseDilatedAttention),
    ):
        module: Any = create_block_sparse_attention(pattern_type=kind)
        assert type(module) is cls
        assert module.sparse_config.pattern_type == kind
        assert f"variant: pattern {kind}" in str(module.choice)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets(preset: str) -> None:
    module: Any = create_block_sparse_attention(preset=preset)
    assert module.sparse_config == PRESETS[preset]
    changed: Any = create_block_sparse_attention(preset=preset, sparsity_ratio=0.5, block_size=64)
    assert (changed.sparse_config.sparsity_ratio, changed.sparse_config.block_size) == (0.5, 64)
    assert changed.sparse_config.pattern_type == PRESETS[preset].pattern_type
    pattern = changed.get_pattern(300, 4)
    assert torch.equal(changed(Q, Q, Q), block_sparse_attention(Q, Q, Q, pattern))


def test_a_pattern_or_a_dict_is_the_whole_config() -> None:
    pattern = BlockPattern.from_layout(torch.rand(4, 10, 10) > 0.5, 300, 32)
    module: Any = create_block_sparse_attention("ring", sparse_config=pattern)
    assert torch.equal(module(Q, Q, Q), block_sparse_attention(Q, Q, Q, pattern))
    by_dict: Any = create_block_sparse_attention(sparse_config={"pattern_type": "strided", "block_size": 16})
    assert by_dict.sparse_config == SparsePatternConfig("strided", block_size=16)
    for extra in ({"sparsity_ratio": 0.1}, {"block_size": 32}, {"preset": "local"}):
        (name,) = extra
        with pytest.raises(ValueError, match=f"sparse_config is the whole pattern, got {name} beside it"):
            create_block_sparse_attention(sparse_config=SparsePatternConfig(), **extra)


def test_choice_is_kept_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dilated_attention_pytorch"):
        module: Any = create_block_sparse_attention("base", [2048], [1], sparsity_ratio=0.01)
    assert str(module.choice) in caplog.text
    assert "BlockSparseDilatedAttention(segment_lengths=[2048]" in str(module.choice)
    assert "- pattern: the default, sparsity_ratio=0.01" in str(module.choice)


def test_kind_of_the_dilated_factory() -> None:
    config = SparsePatternConfig("random", 0.2, 32)
    module = create_dilated_attention("block_sparse", [128], [1], sparse_config=config)
    assert type(module) is BlockSparseDilatedAttention
    assert module(Q, Q, Q).shape == Q.shape


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=f"variant must be one of auto, {', '.join(VARIANTS)}, got 'fast'"):
        create_block_sparse_attention("fast")
    for preset in ("books", ["local"]):
        with pytest.raises(ValueError, match="preset must be one of local, document, genome"):
            create_block_sparse_attention(preset=preset)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="segment_lengths must be a sequence of integers, got 2048"):
        create_block_sparse_attention("base", 2048, [1])  # type: ignore[arg-type]
    for variant in ("adaptive", "hierarchical"):
        with pytest.raises(ValueError, match=f"variant '{variant}' needs a pattern of that type, got random"):
            create_block_sparse_attention(variant, pattern_type="random")
    with pytest.raises(ValueError, match="sparsity_ratio is the fraction kept"):
        create_block_sparse_attention(sparsity_ratio=0)
    with pytest.raises(TypeError, match="speed"):
        create_block_sparse_attention("base", speed="high")
