"""The factories: kinds, variants and presets, the automatic pool, choices that win, reasons, errors."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch

import dilated_attention_pytorch as package
from dilated_attention_pytorch import (
    BlockPattern,
    DilatedAttention,
    SparsePatternConfig,
    block_sparse_attention,
    choose_dilated_attention,
    create_block_sparse_attention,
    create_dilated_attention,
    create_multihead_dilated_attention,
    factory,
)
from dilated_attention_pytorch.core.host_memory import Memory
from dilated_attention_pytorch.factory import PRESETS, VARIANTS
from dilated_attention_pytorch.modules import MULTIHEAD_KINDS, ring as ring_module

SHORT, LONG = [256, 512], [2048, 4096]
RATES = [1, 2]
BLOCKS = {"sparse_config": {"pattern_type": "local_window", "block_size": 64}}
Q = torch.randn(1, 300, 4, 8)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how much of it a device has: plenty."""

    def available(nbytes: int) -> None:
        monkeypatch.setattr(factory, "device_memory", lambda device: Memory(nbytes, 2**40))

    available(2**40)
    return available


def multihead(kind: str, lengths: list[int], rates: list[int], **options: Any) -> Any:
    """The attention of a multihead module."""
    return create_multihead_dilated_attention(kind, 32, 4, lengths, rates, **options).attention


def name_of(module: object) -> str:
    return type(module).__name__


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("standard", "DilatedAttention"),
        ("improved", "ImprovedDilatedAttention"),
        ("improved_v2", "ImprovedDilatedAttentionV2"),
        ("ring", "RingDilatedAttentionV2"),
        ("distributed", "RingDilatedAttentionProduction"),
    ],
)
def test_kinds_compute_the_same(kind: str, name: str) -> None:
    module = create_dilated_attention(kind, SHORT, RATES)
    assert type(module) is getattr(package, name)
    q, k, v = torch.randn(3, 2, 700, 4, 8).unbind(0)
    assert torch.equal(module(q, k, v), DilatedAttention(SHORT, RATES)(q, k, v))


@pytest.mark.parametrize("num_processes", [1, 4])  # a data-parallel run has a sequence in each
def test_auto_goes_by_the_length(monkeypatch: pytest.MonkeyPatch, num_processes: int) -> None:
    monkeypatch.setattr(ring_module, "group_size", lambda group: num_processes)
    long = {"segment_lengths": LONG, "dilation_rates": RATES}
    assert name_of(create_dilated_attention("auto", SHORT, RATES)) == "DilatedAttention"
    assert name_of(create_dilated_attention(**long)) == "ImprovedDilatedAttention"
    assert name_of(create_dilated_attention("auto", **long, seq_len=4095)) == "DilatedAttention"
    made = create_multihead_dilated_attention("auto", 32, 4, SHORT, RATES)
    assert name_of(made) == "MultiheadDilatedAttention"


def test_ring_kinds_take_their_options() -> None:
    ring: Any = create_dilated_attention("ring", SHORT, RATES, ring_size=8, strategy="ring")
    assert (ring.ring_size, ring.strategy) == (8, "ring")
    long: Any = create_dilated_attention(
        "distributed", LONG, RATES, ring_size=8, mixed_precision=True, memory_pool_size=3
    )
    assert (long.ring_size, long.memory_pool.pool_size, long.config.mixed_precision) == (8, 3, True)
    with pytest.raises(ValueError, match="the memory of this module is pooled"):
        create_dilated_attention("distributed", LONG, RATES, enable_memory_pool=False)


@pytest.mark.parametrize(
    ("create", "kind"),
    [
        *(
            (create_dilated_attention, kind)
            for kind in ("auto", "standard", "improved", "improved_v2", "ring")
        ),
        *((multihead, kind) for kind in ("auto", *MULTIHEAD_KINDS)),
    ],
)
def test_the_pool_turns_itself_on_for_long_segments(create: Any, kind: str) -> None:
    assert not create(kind, SHORT, RATES).enable_memory_pool
    assert create(kind, LONG, RATES).enable_memory_pool
    assert not create(kind, LONG, RATES, enable_memory_pool=False).enable_memory_pool
    assert create(kind, SHORT, RATES, enable_memory_pool=True).enable_memory_pool
    assert not create(kind, LONG, RATES, seq_len=1000).enable_memory_pool


@pytest.mark.parametrize("create", [create_dilated_attention, multihead])
def test_little_memory_means_small_tiles_and_nothing_kept(create: Any, memory: Any) -> None:
    memory(2**30)
    made = create("auto", LONG, RATES)
    assert (made.workspace_bytes, made.lightweight_pool) == (2**22, True)
    asked = create("auto", LONG, RATES, workspace_bytes=2**25, lightweight_pool=False)
    assert (asked.workspace_bytes, asked.lightweight_pool) == (2**25, False)
    assert not create("auto", LONG, RATES, enable_memory_pool=False).lightweight_pool


def test_the_choice_explains_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dilated_attention_pytorch"):
        module = create_dilated_attention("auto", LONG, RATES, dropout=0.1)
        heads = create_multihead_dilated_attention("auto", 32, 4, LONG, RATES, position_encoding="rotary")
        blocks: Any = create_block_sparse_attention("base", [2048], [1], sparsity_ratio=0.01)
    assert module.choice == choose_dilated_attention("auto", LONG, RATES, dropout=0.1)
    why = "segments reach over 4096 positions, 4096 or more"
    chosen = "segment_lengths=(2048, 4096), dilation_rates=(1, 2), enable_memory_pool=True"
    for made, first in (
        (module, f"ImprovedDilatedAttention({chosen}, dropout=0.1)"),
        (
            heads,
            f"ImprovedMultiheadDilatedAttention(embed_dim=32, num_heads=4, {chosen}, "
            "position_encoding='rotary')",
        ),
    ):
        assert str(made.choice).splitlines() == [first, f"- kind: {why}", f"- enable_memory_pool: {why}"]
    assert "BlockSparseDilatedAttention(segment_lengths=[2048]" in str(blocks.choice)
    assert "- pattern: the default, sparsity_ratio=0.01" in str(blocks.choice)
    assert all(str(made.choice) in caplog.text for made in (module, heads, blocks))
    asked = choose_dilated_attention("improved", LONG, RATES, enable_memory_pool=False)
    assert "- enable_memory_pool: as asked" in str(asked)


def test_made_modules_copy_and_pickle() -> None:
    module = create_dilated_attention("improved_v2", LONG, RATES)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module)
        assert twin.choice == module.choice


@pytest.mark.parametrize("kind", MULTIHEAD_KINDS)
def test_multihead_kinds(kind: str) -> None:
    options = BLOCKS if kind.startswith("block_sparse") else {}
    made = create_multihead_dilated_attention(kind, 32, 4, SHORT, RATES, num_kv_heads=2, **options)
    assert type(made) is MULTIHEAD_KINDS[kind]
    assert (made.embed_dim, made.num_heads, made.num_kv_heads) == (32, 4, 2)
    direct = MULTIHEAD_KINDS[kind](32, 4, SHORT, RATES, num_kv_heads=2, **options)
    direct.load_state_dict(made.state_dict())
    x = torch.randn(2, 700, 32)
    assert torch.equal(made(x, is_causal=True)[0], direct(x, is_causal=True)[0])


def test_multihead_defaults_and_meta() -> None:
    made = create_multihead_dilated_attention(device="meta")
    assert (made.embed_dim, made.out_proj.weight.is_meta) == (768, True)


@pytest.mark.parametrize(
    ("variant", "name", "kind"),
    [
        ("auto", "BlockSparseDilatedAttention", "dilated_sparse"),
        ("base", "BlockSparseDilatedAttention", "dilated_sparse"),
        ("ring", "BlockSparseRingDilatedAttention", "dilated_sparse"),
        ("hierarchical", "BlockSparseDilatedAttention", "hierarchical"),
        ("adaptive", "BlockSparseAdaptiveDilatedAttention", "adaptive"),
        ("distributed", "BlockSparseRingDilatedAttention", "dilated_sparse"),
    ],
)
def test_block_variants(variant: str, name: str, kind: str) -> None:
    module: Any = create_block_sparse_attention(variant, [128], [1], sparsity_ratio=0.3, block_size=32)
    assert type(module) is getattr(package, name)
    assert module.sparse_config == SparsePatternConfig(kind, 0.3, 32)
    assert module(Q, Q, Q).shape == Q.shape


@pytest.mark.parametrize(
    ("variant", "name", "reason"),
    [
        ("multihead", "BlockSparseMultiheadDilatedAttention", "pattern: the default"),
        ("auto", "BlockSparseMultiheadDilatedAttention", "variant: embed_dim is given"),
        ("distributed", "BlockSparseRingMultiheadDilatedAttention", "multihead: embed_dim is given"),
    ],
)
def test_variants_with_embed_dim_are_multihead_modules(variant: str, name: str, reason: str) -> None:
    options: Any = {"embed_dim": 32, "num_heads": 4, "sparsity_ratio": 0.3, "block_size": 32}
    options |= {"ring_size": 8} if variant == "distributed" else {}
    module: Any = create_block_sparse_attention(variant, [128], [1], **options)
    assert name_of(module) == name
    assert f"{name}(" in str(module.choice)
    assert f"- {reason}" in str(module.choice)
    assert getattr(module.attention, "ring_size", None) == options.get("ring_size")
    out, weights = module(torch.randn(2, 100, 32))
    assert (out.shape, weights) == ((2, 100, 32), None)


def test_auto_follows_the_pattern() -> None:
    for kind, name in (
        ("adaptive", "BlockSparseAdaptiveDilatedAttention"),
        ("hierarchical", "BlockSparseDilatedAttention"),
        ("random", "BlockSparseDilatedAttention"),
    ):
        module: Any = create_block_sparse_attention(pattern_type=kind)
        assert (name_of(module), module.sparse_config.pattern_type) == (name, kind)
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
    of_kind: Any = create_dilated_attention("block_sparse", [128], [1], sparse_config=by_dict.sparse_config)
    assert torch.equal(of_kind(Q, Q, Q), by_dict(Q, Q, Q))


CREATE = {
    "dilated": create_dilated_attention,
    "multihead": create_multihead_dilated_attention,
    "blocks": create_block_sparse_attention,
}
KINDS = "auto, standard, improved, improved_v2, ring, block_sparse, distributed"
MULTIHEAD = "auto, standard, improved, ring, block_sparse, block_sparse_ring"
CONFIG, RANDOM = {"sparse_config": SparsePatternConfig()}, {"pattern_type": "random"}
TYPED, WHOLE = "needs a pattern of that type, got random", "sparse_config is the whole pattern, got"


@pytest.mark.parametrize(
    ("create", "args", "options", "error", "message"),
    [
        ("dilated", ["fast"], {}, ValueError, f"kind must be one of {KINDS}, got 'fast'"),
        ("dilated", [], {"seq_len": 0}, ValueError, "seq_len must be a positive integer, got 0"),
        ("dilated", [], {"speed": 11}, TypeError, "has no 'speed'"),
        ("multihead", ["improved_v2"], {}, ValueError, f"must be one of {MULTIHEAD}, got 'improved_v2'"),
        ("multihead", [], {"speed": 11}, TypeError, "has no 'speed'"),
        ("blocks", ["fast"], {}, ValueError, f"must be one of auto, {', '.join(VARIANTS)}, got 'fast'"),
        ("blocks", [], {"preset": "books"}, ValueError, "preset must be one of local, document, genome"),
        ("blocks", ["adaptive"], RANDOM, ValueError, f"variant 'adaptive' {TYPED}"),
        ("blocks", ["hierarchical"], RANDOM, ValueError, f"variant 'hierarchical' {TYPED}"),
        ("blocks", ["base"], {"speed": "high"}, TypeError, "has no 'speed'"),
        ("blocks", [], {**CONFIG, "sparsity_ratio": 0.1}, ValueError, f"{WHOLE} sparsity_ratio beside it"),
        ("blocks", [], {**CONFIG, "block_size": 32}, ValueError, f"{WHOLE} block_size beside it"),
        ("blocks", [], {**CONFIG, "preset": "local"}, ValueError, f"{WHOLE} preset beside it"),
    ],
)
def test_bad_arguments(create: str, args: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CREATE[create](*args, **options)
