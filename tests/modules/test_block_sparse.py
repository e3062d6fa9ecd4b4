"""Block-sparse modules: the function with a config, a recipe or a pattern kept in a module."""

from __future__ import annotations

import copy
import pickle
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import dilated_attention_pytorch as package
from dilated_attention_pytorch import (
    BlockPattern,
    BlockSparseDilatedAttention,
    BlockSparseRingDilatedAttention,
    SparsePatternConfig,
    block_sparse_attention,
    build_block_pattern,
)
from dilated_attention_pytorch.core import PersistentPatternCache, get_block_pattern_cache
from dilated_attention_pytorch.modules import block_sparse as block_sparse_module, ring as ring_module
from dilated_attention_pytorch.reference import block_sparse_attention_reference
from dilated_attention_pytorch.spec import PatternType
from support.tolerances import assert_close, assert_same_gradients

BRANCHES: dict[str, Any] = {"segment_lengths": (64, 128), "dilation_rates": (1, 2)}
DOUBLE = torch.float64
Base, Ring = BlockSparseDilatedAttention, BlockSparseRingDilatedAttention
ADAPTIVE = {"pattern_type": "adaptive"}


def tensors(n: int = 150, h: int = 4, h_kv: int = 2, d: int = 8, b: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(n)
    return tuple(torch.randn(b, n, x, d, dtype=DOUBLE, requires_grad=True) for x in (h, h_kv, h_kv))


def content(kind: str, query: Tensor, key: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What the pattern of a type depends on beside lengths."""
    return {"query": query, "key": key, "key_mask": mask} if kind == "adaptive" else {}


@pytest.mark.parametrize("cls", [Base, Ring])
@pytest.mark.parametrize("kind", [*get_args(PatternType), "a layout a head"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_the_reference(kind: str, is_causal: bool, cls: Any) -> None:
    q, k, v = tensors()
    mask = torch.rand(2, 150) > 0.2
    if kind == "a layout a head":
        config = pattern = BlockPattern.from_layout(torch.rand(4, 10, 10) > 0.5, 150, 16)
    else:
        config, how = SparsePatternConfig(kind, 0.4, 16, seed=3), {**BRANCHES, **content(kind, q, k, mask)}
        pattern = build_block_pattern(config, 150, 4, is_causal=is_causal, **how)
    out = cls(**BRANCHES, sparse_config=config)(q, k, v, is_causal, mask)
    dense = pattern.to_dense()
    expected = block_sparse_attention_reference(q, k, v, dense, is_causal=is_causal, key_mask=mask)
    assert_close(out, expected, DOUBLE)
    assert_same_gradients(out, expected, (q, k, v), DOUBLE)


def test_config_as_dict_pattern_or_default() -> None:
    q, k, v = tensors()
    fields = {"pattern_type": "local_window", "sparsity_ratio": 0.3, "block_size": 16}
    by_dict = Base(sparse_config=fields)
    by_config = Base(sparse_config=SparsePatternConfig("local_window", 0.3, 16))
    assert by_dict.sparse_config == by_config.sparse_config
    by_pattern = Base(sparse_config=by_config.get_pattern(150, 4))
    out = by_config(q, k, v)
    assert torch.equal(out, by_dict(q, k, v))
    assert torch.equal(out, by_pattern(q, k, v))
    assert Base().sparse_config == SparsePatternConfig()
    assert by_pattern.sparse_config is None
    assert by_pattern.get_pattern(150, 4, is_causal=True).is_causal
    with pytest.raises(ValueError, match="the pattern is for a length of 150, got 149"):
        by_pattern.get_pattern(149, 4)
    with pytest.raises(ValueError, match="the pattern is for a length of 150, got tensors of length 149"):
        by_pattern(q[:, 1:], k[:, 1:], v[:, 1:])


def test_patterns_are_cached_and_shared() -> None:
    cache = get_block_pattern_cache()
    assert isinstance(cache, PersistentPatternCache)
    assert cache.max_size == PersistentPatternCache().max_size == 100
    config = SparsePatternConfig("random", 0.31, 16, seed=12345)
    module = Ring(sparse_config=config)
    assert module.pattern_cache is module._pattern_cache is cache
    q, k, v = tensors()
    before = cache.get_stats()
    first = module(q, k, v)
    assert torch.equal(module(q, k, v), first)
    after = cache.get_stats()
    assert (after["misses"] - before["misses"], after["hits"] - before["hits"]) == (1, 1)
    off = Ring(sparse_config=config, use_pattern_cache=False)
    assert off.pattern_cache is None
    assert torch.equal(off(q, k, v), first)
    assert cache.get_stats()["misses"] == after["misses"]


@pytest.mark.parametrize("ring_size", [None, 1, 3, 8])
@pytest.mark.parametrize("kind", ["random", "adaptive"])
def test_ring_of_one_process_is_the_base(ring_size: int | None, kind: str) -> None:
    q, k, v = tensors()
    config = SparsePatternConfig(kind, 0.4, 16)
    ring = Ring(sparse_config=config, ring_size=ring_size, timeout=5)
    assert (ring.ring_size, ring.is_sharded) == (ring_size or 1, False)
    assert torch.equal(ring(q, k, v), Base(sparse_config=config)(q, k, v))
    assert copy.deepcopy(ring).ring is ring.ring
    assert repr(pickle.loads(pickle.dumps(ring))) == repr(ring)


def test_ring_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for two other processes with 50 and 0 positions; `tests/ring` has real ones."""
    calls: list[Any] = []

    def attend(tensors: Any, pattern: Any, make_spec: Any, settings: Any) -> Tensor:
        options = tensors._asdict() | vars(make_spec()) | vars(settings.execution) | settings._asdict()
        calls.append((pattern(50 + tensors.q.shape[1]), options))
        return tensors.q

    monkeypatch.setattr(ring_module, "group_size", lambda group: 3)
    monkeypatch.setattr(block_sparse_module, "attend_ring_blocks", attend)
    q, k, v = tensors()
    mask = torch.ones(2, 150, dtype=torch.bool)
    config = SparsePatternConfig("random", 0.3, 16, seed=77)
    module = Ring(sparse_config=config, ring_size=6, timeout=2.5, softmax_scale=0.5, dropout=0.1)
    assert (module.ring_size, module.is_sharded) == (6, True)
    for _ in range(2):
        assert module(q, k, v, True, mask) is q
    pattern, options = calls[0]
    assert calls[1][0] is pattern  # from the cache
    assert torch.equal(pattern.to_dense(), build_block_pattern(config, 200, 4, is_causal=True).to_dense())
    assert options["key_mask"] is mask
    names = ("is_causal", "scale", "dropout_p", "timeout", "steps", "memory")
    assert [options[name] for name in names] == [True, 0.5, 0.1, 2.5, 2, "fresh"]
    given = Ring(sparse_config=pattern)
    given(q, k, v, True)
    with pytest.raises(ValueError, match="the pattern is for a length of 200, got 199"):
        given(q[:, 1:], k[:, 1:], v[:, 1:])


def test_what_parts_of_a_sequence_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/ring` runs these modules in several processes; here the group only says so."""
    monkeypatch.setattr(ring_module, "group_size", lambda group: 3)
    config = SparsePatternConfig("random", 0.3, 16, seed=77)
    module, (q, k, _) = Ring(sparse_config=config, ring_size=6), tensors()
    assert (module.ring_size, module.is_sharded) == (6, True)
    with pytest.raises(ValueError, match="must divide ring_size, got 3 processes and ring_size=8"):
        Ring(ring_size=8)
    with pytest.raises(ValueError, match=r"depends on all keys, .* got a part in each of 3"):
        Ring(sparse_config=ADAPTIVE)
    with pytest.raises(ValueError, match="attention_weights needs the whole sequence in one process"):
        module.attention_weights(q, k)


def test_adaptive_ring_whose_group_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Ring(sparse_config=ADAPTIVE)
    monkeypatch.setattr(ring_module, "group_size", lambda group: 2)
    with pytest.raises(ValueError, match='an "adaptive" pattern depends on all keys'):
        module(*tensors())


@pytest.mark.parametrize("memory", [{"enable_memory_pool": True}, {"workspace_bytes": 5000}])
def test_memory_options_change_no_number(memory: dict[str, Any]) -> None:
    q, k, v = tensors()
    config = SparsePatternConfig("global_local", 0.4, 16)
    out = Base(sparse_config=config)(q, k, v)
    other = Base(sparse_config=config, **memory)(q, k, v)
    assert_close(other, out, DOUBLE)
    assert_same_gradients(other, out, (q, k, v), DOUBLE)


def test_dropout_in_training_only() -> None:
    q, k, v = tensors()
    module = Base(dropout=0.5, sparse_config=SparsePatternConfig("strided", 0.4, 16))
    dropped = module(q, k, v)
    module.eval()
    whole = module(q, k, v)
    assert not torch.allclose(dropped, whole)
    assert torch.equal(whole, module(q, k, v))


def test_copies_pickles_and_shows_itself() -> None:
    q, k, v = tensors()
    layout = BlockPattern.from_layout(torch.eye(10) > 0, 150, 16)
    for config in (SparsePatternConfig("random", 0.3, 16), layout):
        module = Ring(**BRANCHES, sparse_config=config)
        out = module(q, k, v)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert repr(twin) == repr(module)
            assert torch.equal(twin(q, k, v), out)
        assert repr(config) in repr(module)


@pytest.mark.parametrize("kind", ["dilated_sparse", "random", "custom"])
def test_compiles_whole(kind: str) -> None:
    layout = BlockPattern.from_layout(torch.rand(10, 10) > 0.5, 150, 16)
    config = layout if kind == "custom" else SparsePatternConfig(kind, 0.3, 16)
    module = Base(**BRANCHES, sparse_config=config)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for n in (150,) if kind == "custom" else (150, 97, 200):
        q, k, v = tensors(n=n)
        out, expected = compiled(q, k, v, True), module(q, k, v, True)
        assert torch.equal(out, expected)
        assert_same_gradients(out, expected, (q, k, v), DOUBLE)


def test_adaptive_type_compiles_with_a_break() -> None:
    module = Base(sparse_config=SparsePatternConfig("adaptive", 0.3, 16))
    q, k, v = (x.detach() for x in tensors())
    assert torch.equal(torch.compile(module, backend="aot_eager")(q, k, v), module(q, k, v))


def test_what_calls_refuse() -> None:
    with pytest.raises(ValueError, match="an adaptive pattern is made in each call"):
        Base(sparse_config=ADAPTIVE).get_pattern(100, 1)
    with pytest.raises(TypeError, match=r"made for torch.float32, got torch.float64"):
        Base(dtype=torch.float32)(*tensors())


@pytest.mark.parametrize("ring", ["", "Ring"])
def test_multihead(ring: str) -> None:
    cls = getattr(package, f"BlockSparse{ring}MultiheadDilatedAttention")
    torch.manual_seed(0)
    config = SparsePatternConfig("local_window", 0.3, 16)
    module = cls(32, 4, sparse_config=config, num_kv_heads=2, layer_norm=False, dtype=DOUBLE)
    x = torch.randn(2, 100, 32, dtype=DOUBLE, requires_grad=True)
    ignored = torch.rand(2, 100) < 0.2
    out, weights = module(x, key_padding_mask=ignored, is_causal=True, need_weights=True)
    q, k, v = module.qkv_proj(x).split([32, 16, 16], -1)
    q, k, v = (y.unflatten(-1, (-1, 8)) for y in (q, k, v))
    pattern = build_block_pattern(config, 100, 4, is_causal=True)
    heads = block_sparse_attention(q, k, v, pattern, is_causal=True, key_mask=~ignored)
    assert_close(out, module.out_proj(heads.flatten(2)), DOUBLE)
    assert weights is not None
    dense = pattern.to_dense() & ~ignored[:, None]
    assert bool(((weights > 0) <= dense).all())
    assert weights.sum(-1).sub(dense.any(-1).double()).abs().max() < 1e-12
    assert torch.equal(module.attention.attention_weights(q, k, True, ~ignored), weights)


@pytest.mark.parametrize(("d", "is_causal"), [(5, False), (8, True)])
@pytest.mark.parametrize("kind", ["local_window", "random", "adaptive"])
def test_attention_weights_are_the_probabilities(kind: str, d: int, is_causal: bool) -> None:
    module = Base(sparse_config={"pattern_type": kind, "block_size": 16})
    q, k, _ = tensors(50, d=d)
    mask = torch.rand(2, 50) > 0.2
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / d**0.5
    config = SparsePatternConfig.of(module.sparse_config)
    dense = build_block_pattern(config, 50, 4, is_causal=is_causal, **content(kind, q, k, mask)).to_dense()
    dense = dense.view(-1, min(4, len(dense)), 50, 50) & mask[:, None, None]
    empty = ~dense.any(-1, keepdim=True)
    expected = scores.masked_fill(~dense, -torch.inf).masked_fill(empty, 0.0).softmax(-1)
    expected = expected.masked_fill(empty, 0.0).mean(1)
    weights = module.attention_weights(q, k, is_causal, mask)
    assert_close(weights, expected, DOUBLE)
    assert_same_gradients(weights, expected, [q, k], DOUBLE)


def test_persistent_cache_holds_so_many() -> None:
    cache = PersistentPatternCache(max_size=2)
    for n in (16, 32, 48):
        cache.get_or_build(n, lambda n=n: build_block_pattern(SparsePatternConfig(block_size=16), n, 1))
    assert (len(cache), cache.get_stats()["evictions"]) == (2, 1)


def test_ring_holds_no_more_than_the_base() -> None:
    """What one process does not need is not there: no buffers, no parameters, the same attributes."""
    base, ring = Base(), Ring()
    assert set(vars(ring)) - set(vars(base)) == {"ring"}
    assert not [*ring.parameters(), *ring.buffers()]
    assert not [x for x in vars(ring).values() if isinstance(x, (Tensor, dict, list)) and len(x)]
