"""Multihead modules with a cache, and their attention maps: equal to the full forward, strict about input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dilated_attention_pytorch.decode import DilatedKVCache
from dilated_attention_pytorch.modules.multihead import (
    BlockSparseMultiheadDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RingMultiheadDilatedAttention,
)
from support.tolerances import assert_close, assert_same_gradients
from support.weighed import randomised

B, N, E, H = 2, 29, 24, 4
SEGMENTS, RATES = (6, 16), (1, 3)
DOUBLE = torch.float64


def make(cls: type[MultiheadDilatedAttention] = MultiheadDilatedAttention, **options: Any) -> Any:
    branches = {"segment_lengths": SEGMENTS, "dilation_rates": RATES}
    return randomised(cls(E, H, **{**branches, "dtype": DOUBLE, **options}), 0.4).eval()


def tokens(b: int = B, n: int = N) -> Tensor:
    return torch.randn(b, n, E, dtype=DOUBLE)


@pytest.mark.parametrize(
    "cls", [MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention, RingMultiheadDilatedAttention]
)
@pytest.mark.parametrize("position_encoding", [None, "rotary", "xpos"])
@torch.no_grad()
def test_decoding_equals_the_full_forward(cls: Any, position_encoding: str | None) -> None:
    module = make(cls, position_encoding=position_encoding, num_kv_heads=2, head_offsets="blocked")
    x = tokens()
    expected, _ = module(x, is_causal=True)
    cache = module.make_cache(B)
    parts = [module(part, is_causal=True, cache=cache) for part in x.split([13, 1, 1, 7, 1, 6], 1)]
    assert cache.lengths == (N, N)
    assert {weights for _, weights in parts} == {None}
    assert_close(torch.cat([out for out, _ in parts], 1), expected, DOUBLE)


@given(
    st.lists(st.integers(0, 5), min_size=3, max_size=9),
    st.sampled_from([None, "rotary", "xpos"]),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
@torch.no_grad()
def test_ragged_rows_continue_where_each_of_them_is(
    lengths: list[int], position_encoding: str | None, batch_first: bool
) -> None:
    """Rows get different numbers of tokens in each call, and each equals the row alone."""
    module = make(position_encoding=position_encoding, batch_first=batch_first)
    flip = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    rows = [[count, 5 - count] for count in lengths]
    totals = torch.tensor(rows).sum(0).tolist()
    x = tokens(2, 5 * len(rows))
    expected = [module(flip(x[i : i + 1, : max(1, totals[i])]), is_causal=True)[0] for i in range(2)]
    cache, seen = module.make_cache(2), [0, 0]
    for counts in rows:
        part = torch.full((2, 5, E), torch.nan, dtype=DOUBLE)
        for i, count in enumerate(counts):
            part[i, :count] = x[i, seen[i] : seen[i] + count]
        out, _ = module(flip(part.nan_to_num(7.0)), is_causal=True, cache=cache, lengths=torch.tensor(counts))
        for i, count in enumerate(counts):
            if count:
                assert_close(flip(out)[i, :count], flip(expected[i])[0, seen[i] : seen[i] + count], DOUBLE)
            seen[i] += count
    assert list(cache.lengths) == totals


@torch.no_grad()
def test_positions_of_the_user_go_with_a_cache() -> None:
    module, x, positions = make(position_encoding="rotary"), tokens(), torch.arange(N) * 2
    how: dict[str, Any] = {"is_causal": True, "cache": module.make_cache(B)}
    parts = zip(x.split([11, N - 11], 1), positions.split([11, N - 11]), strict=True)
    out = torch.cat([module(part, positions=times, **how)[0] for part, times in parts], 1)
    assert_close(out, module(x, is_causal=True, positions=positions)[0], DOUBLE)


@torch.no_grad()
def test_compiled_decoding_compiles_once() -> None:
    torch._dynamo.reset()
    module, x = make(position_encoding="xpos"), tokens()
    compiled, cache = torch.compile(module, backend="aot_eager"), module.make_cache(B)
    parts = [module(x[:, :20], is_causal=True, cache=cache)[0]]
    parts.append(compiled(x[:, 20:21], is_causal=True, cache=cache)[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        parts += [compiled(token, is_causal=True, cache=cache)[0] for token in x[:, 21:].split(1, 1)]
    assert_close(torch.cat(parts, 1), module(x, is_causal=True)[0], DOUBLE)


def test_a_cache_has_the_settings_of_its_module() -> None:
    module = make(num_kv_heads=2, softmax_scale=0.3, head_mixing="grouped", tail="phantom", kernel="eager")
    cache = module.make_cache(3, "cpu", torch.float32)
    assert isinstance(cache, DilatedKVCache)
    assert (cache.batch_size, cache.num_heads, cache.num_kv_heads, cache.head_dim) == (3, 4, 2, 6)
    assert (cache.spec.scale, cache.spec.head_mixing, cache.dtype) == (0.3, "grouped", torch.float32)
    x = tokens(3)
    with torch.no_grad():
        with pytest.raises(TypeError, match=r"this cache holds torch.float32, got torch.float64"):
            module(x, is_causal=True, cache=cache)
        # Phantom keys lie after every query.
        cached, _ = module(x, is_causal=True, cache=module.make_cache(3))
        assert_close(cached, module(x, is_causal=True)[0], DOUBLE)


@torch.no_grad()
def test_autocast_decides_the_dtype_of_a_cache() -> None:
    module, x = make(dtype=torch.float32), tokens().float()
    cache = module.make_cache(B)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(x, is_causal=True, cache=cache)
    assert cache.dtype == torch.bfloat16
    assert_close(out, copy.deepcopy(module).double()(x.double(), is_causal=True)[0], torch.bfloat16)


PAST = "a cache holds the past of causal attention, got is_causal=False"
LONGER, BLOCKED = make(segment_lengths=(6, 17)), make(head_offsets="blocked")
HIDDEN, FUTURE = torch.zeros(B, N, dtype=torch.bool), torch.ones(N, N, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"is_causal": False}, ValueError, PAST),
        ({"key_padding_mask": HIDDEN}, ValueError, "key_padding_mask does not go with a cache"),
        ({"attn_mask": FUTURE}, ValueError, "attn_mask does not go with a cache"),
        ({"need_weights": True}, ValueError, "need_weights needs all keys, which a cache does not keep"),
        ({"cache": {}}, TypeError, "cache must be a DilatedKVCache, got dict"),
        ({"lengths": [1, N + 1]}, ValueError, "lengths"),
        ({"query": tokens(3)}, ValueError, "cache and query must have as many rows, got 2 and 3"),
        ({"cache": LONGER.make_cache(B)}, ValueError, r"its segment_lengths is \(6, 17\), not"),
        ({"cache": BLOCKED.make_cache(B)}, ValueError, "its head_offsets is blocked, not inter"),
        ({"cache": None, "lengths": [1, 2]}, ValueError, "lengths are for a cache, got none"),
    ],
)
@torch.no_grad()
def test_what_a_cache_refuses(call: dict[str, Any], error: type[Exception], message: str) -> None:
    module = make()
    with pytest.raises(error, match=message):
        module(**{"query": tokens(), "is_causal": True, "cache": module.make_cache(B), **call})


def test_a_cache_has_no_gradients_and_no_dropout() -> None:
    module = make(dropout=0.2)
    cache = module.make_cache(B)
    with pytest.raises((ValueError, RuntimeError), match="grad"):
        module(tokens(), is_causal=True, cache=cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"a cache has no dropout, got 0\.2 in training: call eval"):
            module.train()(tokens(), is_causal=True, cache=cache)
        assert cache.num_tokens == 0
        module.eval()(tokens(), is_causal=True, cache=cache)
    assert cache.num_tokens == N


def test_other_attention_has_no_cache_and_no_rows() -> None:
    config = {"pattern_type": "local_window", "block_size": 4}
    module = make(BlockSparseMultiheadDilatedAttention, sparse_config=config)
    with pytest.raises(ValueError, match=r"a cache needs dilated .* got a BlockSparseDilatedAttention"):
        module.make_cache(2)
    with pytest.raises(ValueError, match="a cache needs dilated attention"), torch.no_grad():
        module(tokens(), is_causal=True, cache=make().make_cache(B))
    with pytest.raises(ValueError, match="attention_rows needs a dilated pattern, got a BlockSparseDilated"):
        module.attention_rows(tokens(), [0])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position_encoding": "xpos"},
        {"tail": "phantom", "head_offsets": "blocked"},
        {"head_mixing": "grouped", "softmax_scale": 0.9},
    ],
)
def test_rows_and_weights_explain_the_output(is_causal: bool, options: dict[str, Any]) -> None:
    """Maps times values give the output, and its gradients."""
    module = make(num_kv_heads=2, **options)
    x = tokens().requires_grad_()
    ignored = torch.zeros(B, N, dtype=torch.bool)
    ignored[0, -4:] = ignored[1, 3] = True
    masks = {"key_padding_mask": ignored, "is_causal": is_causal}
    out, weights = module(x, need_weights=True, **masks)
    maps = module.attention_rows(x, range(N), **masks)
    assert maps.shape == (B, H, N, N)
    values = module.v_proj(x).unflatten(-1, (2, -1)).repeat_interleave(2, 2)
    inner = torch.einsum("bhij,bjhd->bihd", maps, values).flatten(2)
    expected = module.out_proj(module.inner_attn_ln(inner))
    assert_close(out, expected, DOUBLE)
    assert_same_gradients(out, expected, [x, *module.parameters()], DOUBLE)
    assert_close(weights, maps.mean(1), DOUBLE)
    chosen = module.attention_rows(x, torch.tensor([7, 0]), **masks)
    assert torch.equal(chosen, maps[:, :, [7, 0]])


def test_rows_of_tensors_with_time_first_and_bad_rows() -> None:
    module = make(batch_first=False)
    x = tokens()
    with torch.no_grad():
        maps = module.attention_rows(x.transpose(0, 1), [3], is_causal=True)
    module.batch_first = True
    assert_close(maps, module.attention_rows(x, [3], is_causal=True), DOUBLE)
    for query, row, causal, error, message in (
        (x, N, True, ValueError, "rows must lie between 0 and n - 1 = 28, got 29"),
        ([x], 0, True, TypeError, "query must be a tensor, got list"),
        (x, 0, 1, TypeError, "is_causal must be a bool, got 1"),
    ):
        with pytest.raises(error, match=message):
            module.attention_rows(query, [row], is_causal=causal)
