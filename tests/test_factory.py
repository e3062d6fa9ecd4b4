"""The factories: kinds, variants and presets, the automatic pool, choices that win, reasons, errors."""

from __future__ import annotations

import copy
import logging
import pickle
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
    DilatedAttention,
    ImprovedDilatedAttention,
    ImprovedDilatedAttentionV2,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2,
    SparsePatternConfig,
    block_sparse_attention,
    choose_dilated_attention,
    create_block_sparse_attention,
    create_dilated_attention,
    factory,
)
from dilated_attention_pytorch.core.host_memory import Memory
from dilated_attention_pytorch.factory import PRESETS, VARIANTS, create_multihead_dilated_attention
from dilated_attention_pytorch.modules import ring as ring_module
from dilated_attention_pytorch.modules.multihead import MULTIHEAD_KINDS, MultiheadDilatedAttention

SHORT, LONG = [256, 512], [2048, 4096]
RATES = [1, 2]


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "device_memory", lambda device: Memory(2**40, 2**40))


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("standard", DilatedAttention),
        ("improved", ImprovedDilatedAttention),
        ("improved_v2", ImprovedDilatedAttentionV2),
        ("ring", RingDilatedAttentionV2),
        ("distributed", RingDilatedAttentionProduction),
    ],
)
def test_kinds_compute_the_same(kind: str, cls: type, plenty: None) -> None:
    module = create_dilated_attention(kind, SHORT, RATES)
    assert type(module) is cls
    q, k, v = torch.randn(3, 2, 700, 4, 8).unbind(0)
    assert torch.equal(module(q, k, v), DilatedAttention(SHORT, RATES)(q, k, v))


def test_auto_goes_by_the_length(plenty: None) -> None:
    assert type(create_dilated_attention("auto", SHORT, RATES)) is DilatedAttention
    assert (
        type(create_dilated_attention(segment_lengths=LONG, dilation_rates=RATES)) is ImprovedDilatedAttention
    )
    assert type(create_dilated_attention("auto", LONG, RATES, seq_len=4095)) is DilatedAttention


def test_ring_kinds_take_their_options(plenty: None) -> None:
    ring: Any = create_dilated_attention("ring", SHORT, RATES, ring_size=8, strategy="ring")
    assert (ring.ring_size, ring.strategy) == (8, "ring")
    distributed: Any = create_dilated_attention(
        "distributed", LONG, RATES, ring_size=8, mixed_precision=True, memory_pool_size=3
    )
    assert (distributed.ring_size, distributed.memory_pool.pool_size) == (8, 3)
    assert distributed.config.mixed_precision
    with pytest.raises(ValueError, match="the memory of this module is pooled"):
        create_dilated_attention("distributed", LONG, RATES, enable_memory_pool=False)


def test_auto_is_local_also_with_several_processes(plenty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data-parallel run has a sequence in each process."""
    monkeypatch.setattr(ring_module, "group_size", lambda group: 4)
    assert type(create_dilated_attention("auto", SHORT, RATES)) is DilatedAttention
    assert type(create_dilated_attention("auto", LONG, RATES)) is ImprovedDilatedAttention


@pytest.mark.parametrize("kind", ["auto", "standard", "improved", "improved_v2", "ring"])
def test_the_pool_turns_itself_on_for_long_segments(kind: str, plenty: None) -> None:
    assert not create_dilated_attention(kind, SHORT, RATES).enable_memory_pool
    assert create_dilated_attention(kind, LONG, RATES).enable_memory_pool
    assert not create_dilated_attention(kind, LONG, RATES, enable_memory_pool=False).enable_memory_pool
    assert create_dilated_attention(kind, SHORT, RATES, enable_memory_pool=True).enable_memory_pool
    assert not create_dilated_attention(kind, LONG, RATES, seq_len=1000).enable_memory_pool


def test_little_memory_means_small_tiles_and_nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "device_memory", lambda device: Memory(2**30, 2**34))
    module = create_dilated_attention("auto", LONG, RATES)
    assert module.lightweight_pool
    assert module.workspace_bytes == 2**22
    asked = create_dilated_attention("auto", LONG, RATES, workspace_bytes=2**25, lightweight_pool=False)
    assert (asked.workspace_bytes, asked.lightweight_pool) == (2**25, False)
    assert not create_dilated_attention("auto", LONG, RATES, enable_memory_pool=False).lightweight_pool


def test_the_choice_explains_itself(plenty: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dilated_attention_pytorch"):
        module = create_dilated_attention("auto", LONG, RATES, dropout=0.1)
    choice = choose_dilated_attention("auto", LONG, RATES, dropout=0.1)
    assert module.choice == choice
    assert str(choice).splitlines() == [
        "ImprovedDilatedAttention(segment_lengths=(2048, 4096), dilation_rates=(1, 2), "
        "enable_memory_pool=True, dropout=0.1)",
        "- kind: segments reach over 4096 positions, 4096 or more",
        "- enable_memory_pool: segments reach over 4096 positions, 4096 or more",
    ]
    assert str(choice) in caplog.text
    assert "- enable_memory_pool: as asked" in str(
        choose_dilated_attention("improved", LONG, RATES, enable_memory_pool=False)
    )


def test_made_modules_copy_and_pickle(plenty: None) -> None:
    module = create_dilated_attention("improved_v2", LONG, RATES)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module)
        assert twin.choice == module.choice


def test_bad_arguments() -> None:
    kinds = "auto, standard, improved, improved_v2, ring, block_sparse, distributed"
    with pytest.raises(ValueError, match=f"kind must be one of {kinds}, got 'fast'"):
        create_dilated_attention("fast", SHORT, RATES)
    with pytest.raises(ValueError, match="seq_len must be a positive integer, got 0"):
        create_dilated_attention("auto", SHORT, RATES, seq_len=0)
    with pytest.raises(ValueError, match="same length"):
        create_dilated_attention("auto", SHORT, [1])
    with pytest.raises(TypeError, match="has no 'speed'"):
        create_dilated_attention("auto", SHORT, RATES, speed=11)


BLOCKS = {"sparse_config": {"pattern_type": "local_window", "block_size": 64}}


@pytest.mark.parametrize("kind", MULTIHEAD_KINDS)
def test_multihead_kinds(kind: str, plenty: None) -> None:
    options = BLOCKS if kind.startswith("block_sparse") else {}
    made = create_multihead_dilated_attention(kind, 32, 4, SHORT, RATES, num_kv_heads=2, **options)
    assert type(made) is MULTIHEAD_KINDS[kind]
    assert (made.embed_dim, made.num_heads, made.num_kv_heads) == (32, 4, 2)
    direct = MULTIHEAD_KINDS[kind](32, 4, SHORT, RATES, num_kv_heads=2, **options)
    direct.load_state_dict(made.state_dict())
    x = torch.randn(2, 700, 32)
    assert torch.equal(made(x, is_causal=True)[0], direct(x, is_causal=True)[0])


@pytest.mark.parametrize("kind", ["auto", *MULTIHEAD_KINDS])
def test_the_pool_of_multihead_modules(kind: str, plenty: None) -> None:
    def make(lengths: list[int], **options: Any) -> MultiheadDilatedAttention:
        return create_multihead_dilated_attention(kind, 32, 4, lengths, RATES, **options)

    assert not make(SHORT).attention.enable_memory_pool
    assert make(LONG).attention.enable_memory_pool
    assert not make(LONG, enable_memory_pool=False).attention.enable_memory_pool
    assert not make(LONG, seq_len=1000).attention.enable_memory_pool


def test_multihead_auto_goes_by_the_length_and_says_so(
    plenty: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="dilated_attention_pytorch"):
        module = create_multihead_dilated_attention(
            "auto", 32, 4, LONG, RATES, position_encoding="rotary", dropout=0.1
        )
    assert str(module.choice).splitlines() == [
        "ImprovedMultiheadDilatedAttention(embed_dim=32, num_heads=4, segment_lengths=(2048, 4096), "
        "dilation_rates=(1, 2), enable_memory_pool=True, position_encoding='rotary', dropout=0.1)",
        "- kind: segments reach over 4096 positions, 4096 or more",
        "- enable_memory_pool: segments reach over 4096 positions, 4096 or more",
    ]
    assert str(module.choice) in caplog.text
    assert type(create_multihead_dilated_attention("auto", 32, 4, SHORT, RATES)) is MultiheadDilatedAttention
    assert create_multihead_dilated_attention().embed_dim == 768


def test_multihead_with_little_memory_and_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "device_memory", lambda device: Memory(2**30, 2**34))
    attention = create_multihead_dilated_attention("auto", 32, 4, LONG, RATES).attention
    assert (attention.lightweight_pool, attention.workspace_bytes) == (True, 2**22)
    monkeypatch.undo()
    assert create_multihead_dilated_attention(device="meta").out_proj.weight.is_meta


def test_bad_arguments_of_multihead() -> None:
    kinds = "auto, standard, improved, ring, block_sparse, block_sparse_ring"
    with pytest.raises(ValueError, match=f"kind must be one of {kinds}, got 'improved_v2'"):
        create_multihead_dilated_attention("improved_v2")
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads, got 10 and 3"):
        create_multihead_dilated_attention("auto", 10, 3)
    with pytest.raises(ValueError, match="seq_len must be a positive integer, got 0"):
        create_multihead_dilated_attention("auto", 12, 3, seq_len=0)
    with pytest.raises(TypeError, match="has no 'speed'"):
        create_multihead_dilated_attention("auto", 12, 3, speed=11)


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
def test_block_variants(variant: str, cls: type, kind: str) -> None:
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
def test_block_presets(preset: str) -> None:
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


def test_choice_of_blocks_is_kept_and_logged(caplog: pytest.LogCaptureFixture) -> None:
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


def test_bad_arguments_of_block_sparse() -> None:
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
