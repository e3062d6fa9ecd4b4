"""Block-sparse modules: the functional door with a config, a recipe or a pattern kept in a module."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dilated_attention_pytorch import (
    BlockPattern,
    BlockSparseDilatedAttention,
    BlockSparseMultiheadDilatedAttention,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    SparsePatternConfig,
    block_sparse_attention,
    build_block_pattern,
)
from dilated_attention_pytorch.core import PersistentPatternCache, get_block_pattern_cache
from dilated_attention_pytorch.modules import block_sparse as block_sparse_module
from dilated_attention_pytorch.modules import ring as ring_module
from dilated_attention_pytorch.reference import block_sparse_attention_reference
from support.tolerances import assert_close, assert_same_gradients

TYPES = ("dilated_sparse", "local_window", "global_local", "strided", "random", "hierarchical", "adaptive")
BRANCHES: Any = ((64, 128), (1, 2))


def tensors(n: int = 150, h: int = 4, h_kv: int = 2, d: int = 8, b: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(n)
    return tuple(
        torch.randn(b, n, heads, d, dtype=torch.float64, requires_grad=True) for heads in (h, h_kv, h_kv)
    )


@pytest.mark.parametrize("cls", [BlockSparseDilatedAttention, BlockSparseRingDilatedAttention])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_the_reference(kind: str, is_causal: bool, cls: type[nn.Module]) -> None:
    q, k, v = tensors()
    mask = torch.rand(2, 150) > 0.2
    config = SparsePatternConfig(kind, 0.4, 16, seed=3)
    content = {"query": q, "key": k, "key_mask": mask} if kind == "adaptive" else {}
    pattern = build_block_pattern(
        config,
        150,
        4,
        is_causal=is_causal,
        segment_lengths=BRANCHES[0],
        dilation_rates=BRANCHES[1],
        **content,
    )
    out = cls(*BRANCHES, sparse_config=config)(q, k, v, is_causal, mask)
    expected = block_sparse_attention_reference(
        q, k, v, pattern.to_dense(), is_causal=is_causal, key_mask=mask
    )
    assert isinstance(expected, Tensor)
    assert_close(out, expected, torch.float64)
    assert_same_gradients(out, expected, (q, k, v), torch.float64)


def test_config_as_dict_pattern_or_default() -> None:
    q, k, v = tensors()
    fields = {"pattern_type": "local_window", "sparsity_ratio": 0.3, "block_size": 16}
    by_dict = BlockSparseDilatedAttention(sparse_config=fields)
    by_config = BlockSparseDilatedAttention(sparse_config=SparsePatternConfig("local_window", 0.3, 16))
    assert by_dict.sparse_config == by_config.sparse_config
    by_pattern = BlockSparseDilatedAttention(sparse_config=by_config.get_pattern(150, 4))
    out = by_config(q, k, v)
    assert torch.equal(out, by_dict(q, k, v))
    assert torch.equal(out, by_pattern(q, k, v))
    assert BlockSparseDilatedAttention().sparse_config == SparsePatternConfig()
    assert by_pattern.sparse_config is None
    assert by_pattern.get_pattern(150, 4, is_causal=True).is_causal
    with pytest.raises(ValueError, match="the pattern is for a length of 150, got 149"):
        by_pattern.get_pattern(149, 4)
    with pytest.raises(ValueError, match="the pattern is for a length of 150, got tensors of length 149"):
        by_pattern(q[:, 1:], k[:, 1:], v[:, 1:])


def test_custom_layout_per_head_through_a_module() -> None:
    q, k, v = tensors(n=70)
    layout = torch.rand(4, 5, 5) > 0.5
    pattern = BlockPattern.from_layout(layout, 70, 16)
    out = BlockSparseRingDilatedAttention(sparse_config=pattern)(q, k, v)
    expected = block_sparse_attention_reference(q, k, v, pattern.to_dense())
    assert isinstance(expected, Tensor)
    assert_close(out, expected, torch.float64)


def test_patterns_are_cached_and_shared() -> None:
    cache = get_block_pattern_cache()
    assert isinstance(cache, PersistentPatternCache)
    assert cache.max_size == 100
    module = BlockSparseRingDilatedAttention(
        sparse_config=SparsePatternConfig("random", 0.31, 16, seed=12345)
    )
    assert module.pattern_cache is cache
    assert module._pattern_cache is cache
    q, k, v = tensors()
    before = cache.get_stats()
    first = module(q, k, v)
    second = module(q, k, v)
    after = cache.get_stats()
    assert torch.equal(first, second)
    assert (after["misses"] - before["misses"], after["hits"] - before["hits"]) == (1, 1)
    off = BlockSparseRingDilatedAttention(sparse_config=module.sparse_config, use_pattern_cache=False)
    assert off.pattern_cache is None
    assert torch.equal(off(q, k, v), first)
    assert cache.get_stats()["misses"] == after["misses"]


def test_persistent_cache_holds_so_many() -> None:
    cache = PersistentPatternCache(max_size=2)
    for n in (16, 32, 48):
        cache.get_or_build(n, lambda n=n: build_block_pattern(SparsePatternConfig(block_size=16), n, 1))
    assert (len(cache), cache.get_stats()["evictions"]) == (2, 1)
    assert PersistentPatternCache().max_size == 100


def test_ring_holds_no_more_than_the_base() -> None:
    """What one process does not need is not there: no buffers, no parameters, the same attributes."""
    base, ring = BlockSparseDilatedAttention(), BlockSparseRingDilatedAttention()
    assert set(vars(ring)) - set(vars(base)) == {"ring"}
    assert not list(ring.parameters())
    assert not list(ring.buffers())
    assert not [
        value for value in vars(ring).values() if isinstance(value, (Tensor, dict, list)) and len(value)
    ]
    for size in (0, -8, True, 1.5):
        with pytest.raises(ValueError, match=f"ring_size must be a positive integer, got {size}"):
            BlockSparseRingDilatedAttention(ring_size=size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"timeout must be positive and below 2.*, got 0"):
        BlockSparseRingDilatedAttention(timeout=0)


@pytest.mark.parametrize("ring_size", [None, 1, 3, 8])
@pytest.mark.parametrize("kind", ["random", "adaptive"])
def test_ring_of_one_process_is_the_base(ring_size: int | None, kind: str) -> None:
    q, k, v = tensors()
    config = SparsePatternConfig(kind, 0.4, 16)
    ring = BlockSparseRingDilatedAttention(sparse_config=config, ring_size=ring_size, timeout=5)
    assert (ring.ring_size, ring.is_sharded) == (ring_size or 1, False)
    assert torch.equal(ring(q, k, v), BlockSparseDilatedAttention(sparse_config=config)(q, k, v))
    assert copy.deepcopy(ring).ring is ring.ring
    assert repr(pickle.loads(pickle.dumps(ring))) == repr(ring)


def test_ring_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for two other processes with 50 and 0 positions; `tests/ring` has real ones."""
    calls: list[Any] = []

    def attend(query: Tensor, _key: Any, _value: Any, pattern: Any, *how: Any, **options: Any) -> Tensor:
        make_spec, execution, settings = how
        options |= {**vars(make_spec()), **vars(execution), **settings._asdict()}
        calls.append((pattern(50 + query.shape[1]), options))
        return query

    monkeypatch.setattr(ring_module, "group_size", lambda group: 3)
    monkeypatch.setattr(block_sparse_module, "attend_ring_blocks", attend)
    q, k, v = tensors()
    mask = torch.ones(2, 150, dtype=torch.bool)
    config = SparsePatternConfig("random", 0.3, 16, seed=77)
    module = BlockSparseRingDilatedAttention(
        sparse_config=config, ring_size=6, timeout=2.5, softmax_scale=0.5, dropout=0.1
    )
    assert (module.ring_size, module.is_sharded) == (6, True)
    for _ in range(2):
        assert module(q, k, v, True, mask) is q
    pattern, options = calls[0]
    assert calls[1][0] is pattern  # from the cache
    assert torch.equal(pattern.to_dense(), build_block_pattern(config, 200, 4, is_causal=True).to_dense())
    assert options["key_mask"] is mask
    names = ("is_causal", "scale", "dropout_p", "timeout", "steps", "memory")
    assert [options[name] for name in names] == [True, 0.5, 0.1, 2.5, 2, "fresh"]
    given = BlockSparseRingDilatedAttention(sparse_config=pattern)
    given(q, k, v, True)
    with pytest.raises(ValueError, match="the pattern is for a length of 200, got 199"):
        given(q[:, 1:], k[:, 1:], v[:, 1:])
    with pytest.raises(ValueError, match="must divide ring_size, got 3 processes and ring_size=8"):
        BlockSparseRingDilatedAttention(ring_size=8)
    with pytest.raises(ValueError, match=r"depends on all keys, .* got a part in each of 3"):
        BlockSparseRingDilatedAttention(sparse_config={"pattern_type": "adaptive"})
    with pytest.raises(ValueError, match="attention_weights needs the whole sequence in one process"):
        module.attention_weights(q, k)
    x = torch.randn(2, 150, 32)
    multihead = BlockSparseRingMultiheadDilatedAttention(32, 4, sparse_config=config)
    assert multihead(x, is_causal=True)[0].shape == x.shape
    causal = torch.ones(150, 150, dtype=torch.bool).triu(1)
    for refused in ({"attn_mask": causal}, {"need_weights": True}):
        with pytest.raises(ValueError, match="need the whole sequence in one process"):
            multihead(x, **refused)


def test_adaptive_ring_whose_group_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    module = BlockSparseRingDilatedAttention(sparse_config={"pattern_type": "adaptive"})
    monkeypatch.setattr(ring_module, "group_size", lambda group: 2)
    with pytest.raises(ValueError, match='an "adaptive" pattern depends on all keys'):
        module(*tensors())


@pytest.mark.parametrize("memory", [{"enable_memory_pool": True}, {"workspace_bytes": 5000}])
def test_memory_options_change_no_number(memory: dict[str, Any]) -> None:
    q, k, v = tensors()
    config = SparsePatternConfig("global_local", 0.4, 16)
    out = BlockSparseDilatedAttention(sparse_config=config)(q, k, v)
    other = BlockSparseDilatedAttention(sparse_config=config, **memory)(q, k, v)
    assert_close(other, out, torch.float64)
    assert_same_gradients(other, out, (q, k, v), torch.float64)


def test_dropout_in_training_only() -> None:
    q, k, v = tensors()
    module = BlockSparseDilatedAttention(dropout=0.5, sparse_config=SparsePatternConfig("strided", 0.4, 16))
    dropped = module(q, k, v)
    module.eval()
    whole = module(q, k, v)
    assert not torch.allclose(dropped, whole)
    assert torch.equal(whole, module(q, k, v))
    with pytest.raises(ValueError, match="dropout and attention_dropout are one option"):
        BlockSparseDilatedAttention(dropout=0.5, attention_dropout=0.1)


def test_copies_pickles_and_shows_itself() -> None:
    q, k, v = tensors()
    for config in (
        SparsePatternConfig("random", 0.3, 16),
        BlockPattern.from_layout(torch.eye(10) > 0, 150, 16),
    ):
        module = BlockSparseRingDilatedAttention(*BRANCHES, sparse_config=config)
        out = module(q, k, v)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert repr(twin) == repr(module)
            assert torch.equal(twin(q, k, v), out)
        assert repr(config) in repr(module)


@pytest.mark.parametrize("kind", ["dilated_sparse", "random", "custom"])
def test_compiles_whole(kind: str) -> None:
    config: Any = SparsePatternConfig(kind, 0.3, 16) if kind != "custom" else None
    if config is None:
        config = BlockPattern.from_layout(torch.rand(10, 10) > 0.5, 150, 16)
    module = BlockSparseDilatedAttention(*BRANCHES, sparse_config=config)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for n in (150,) if kind == "custom" else (150, 97, 200):
        q, k, v = tensors(n=n)
        out, expected = compiled(q, k, v, True), module(q, k, v, True)
        assert torch.equal(out, expected)
        assert_same_gradients(out, expected, (q, k, v), torch.float64)


def test_adaptive_type_compiles_with_a_break() -> None:
    module = BlockSparseDilatedAttention(sparse_config=SparsePatternConfig("adaptive", 0.3, 16))
    q, k, v = (x.detach() for x in tensors())
    assert torch.equal(torch.compile(module, backend="aot_eager")(q, k, v), module(q, k, v))


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="a block must fit a segment, got a block_size of 128 and a segment"):
        BlockSparseDilatedAttention((64,), (1,))
    with pytest.raises(TypeError, match="sparse_config must be a SparsePatternConfig or a dict, got str"):
        BlockSparseDilatedAttention(sparse_config="dilated_sparse")
    with pytest.raises(ValueError, match="sparse_config has the fields pattern_type"):
        BlockSparseDilatedAttention(sparse_config={"ratio": 0.1})
    with pytest.raises(TypeError, match="head_mixing"):
        BlockSparseDilatedAttention(head_mixing="all")
    with pytest.raises(ValueError, match="an adaptive pattern is made in each call"):
        BlockSparseDilatedAttention(sparse_config={"pattern_type": "adaptive"}).get_pattern(100, 1)
    module = BlockSparseDilatedAttention(dtype=torch.float32)
    q, k, v = tensors()
    with pytest.raises(TypeError, match=r"made for torch.float32, got torch.float64"):
        module(q, k, v)


@pytest.mark.parametrize(
    "cls", [BlockSparseMultiheadDilatedAttention, BlockSparseRingMultiheadDilatedAttention]
)
def test_multihead(cls: type[BlockSparseMultiheadDilatedAttention]) -> None:
    torch.manual_seed(0)
    config = SparsePatternConfig("local_window", 0.3, 16)
    module = cls(32, 4, sparse_config=config, num_kv_heads=2, layer_norm=False, dtype=torch.float64)
    x = torch.randn(2, 100, 32, dtype=torch.float64, requires_grad=True)
    ignored = torch.rand(2, 100) < 0.2
    out, weights = module(x, key_padding_mask=ignored, is_causal=True, need_weights=True)
    q, k, v = module.qkv_proj(x).split([32, 16, 16], -1)
    q, k, v = (y.unflatten(-1, (-1, 8)) for y in (q, k, v))
    pattern = build_block_pattern(config, 100, 4, is_causal=True)
    heads = block_sparse_attention(q, k, v, pattern, is_causal=True, key_mask=~ignored)
    assert_close(out, module.out_proj(heads.flatten(2)), torch.float64)
    assert weights is not None
    dense = pattern.to_dense() & ~ignored[:, None]
    assert bool(((weights > 0) <= dense).all())
    mean = torch.einsum("bnm,bmd->bnd", weights, v.repeat_interleave(2, 2).mean(2))
    assert weights.sum(-1).sub(dense.any(-1).double()).abs().max() < 1e-12
    assert mean.shape == (2, 100, 8)
    probs = module.attention.attention_weights(q, k, True, ~ignored)
    assert torch.equal(probs, weights)


def test_attention_weights_are_the_probabilities() -> None:
    q, k, _ = tensors(n=40, h=2, h_kv=2, d=5)
    module = BlockSparseDilatedAttention(sparse_config=SparsePatternConfig("random", 0.5, 8))
    weights = module.attention_weights(q, k)
    pattern = module.get_pattern(40, 2)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / 5**0.5
    expected = scores.masked_fill(~pattern.to_dense(), -torch.inf).softmax(-1).mean(1)
    assert_close(weights, expected, torch.float64)


@pytest.mark.parametrize("kind", ["local_window", "adaptive"])
def test_the_gradient_of_the_weights(kind: str) -> None:
    module = BlockSparseDilatedAttention(sparse_config={"pattern_type": kind, "block_size": 16})
    q, k, _ = tensors(50)
    mask = torch.rand(2, 50) > 0.2
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8**0.5
    config = SparsePatternConfig.of(module.sparse_config)
    content = {"query": q, "key": k, "key_mask": mask} if kind == "adaptive" else {}
    dense = build_block_pattern(config, 50, 4, is_causal=True, **content).to_dense()
    dense = dense.view(-1, dense.shape[0] if kind != "adaptive" else 4, 50, 50) & mask[:, None, None]
    empty = ~dense.any(-1, keepdim=True)
    expected = scores.masked_fill(~dense, -torch.inf).masked_fill(empty, 0.0).softmax(-1)
    expected = expected.masked_fill(empty, 0.0).mean(1)
    weights = module.attention_weights(q, k, True, mask)
    assert_close(weights, expected, torch.float64)
    assert_same_gradients(weights, expected, [q, k], torch.float64)
