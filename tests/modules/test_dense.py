"""Dense attention: equal to softmax(q k) v for any number of keys, zeros where nothing is visible."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.modules.multihead import MultiheadModule
from dilated_attention_pytorch.modules.parts import DenseAttention
from support.tolerances import assert_close, assert_same_gradients

B, N, M, H, D = 3, 7, 11, 4, 6
DOUBLE = torch.float64


def plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output, and weights averaged over heads."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -math.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp_min(-1e9))
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return torch.einsum("bhij,bjhd->bihd", weights, v), weights.mean(1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("m", "is_causal"), [(N, False), (N, True), (1, False), (M, False)])
@pytest.mark.parametrize("h_kv", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.3, -0.4, 0.0, 1e-30, -3.0])  # the CPU's op multiplies -inf by it
def test_equals_the_plain_formula(
    masked: bool, m: int, is_causal: bool, h_kv: int, scale: float | None
) -> None:
    q = torch.randn(B, N, H, D, dtype=DOUBLE, requires_grad=True)
    k, v = (torch.randn(B, m, h_kv, D, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    mask = None
    if masked:
        mask = torch.rand(B, m) > 0.3
        mask[0] = False  # no key at all
        mask[1, 0] = False  # none for the first query of causal attention
    module = DenseAttention(scale)
    out = module(q, k, v, is_causal=is_causal, attention_mask=mask)
    expected, weights = plain(q, k, v, D**-0.5 if scale is None else scale, is_causal, mask)
    assert_close(out, expected, DOUBLE)
    assert_same_gradients(out, expected, [q, k, v], DOUBLE)
    assert_close(module.attention_weights(q, k, is_causal, mask), weights, DOUBLE)
    if masked:
        assert not out[0].any()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 1e-9])  # another op of torch
@pytest.mark.parametrize("is_causal", [False, True])
def test_scores_that_overflow(is_causal: bool, dropout: float, masked: bool) -> None:
    """A row whose scores are all -inf gives zeros, one that is NaN gives NaN, for few keys and for many."""
    mask = torch.arange(N) < torch.tensor([[N], [4], [2]]) if masked else None
    q, k, v = (torch.randn(B, N, H, D) for _ in range(3))
    q[..., 0] = 0.0
    q[:, 2, :, 0], k[..., 0] = 1e30, -1e30
    q.requires_grad_()
    module = DenseAttention(dropout=dropout)
    out, weights = module(q, k, v, is_causal, mask), module.attention_weights(q, k, is_causal, mask)
    for each in (out, weights, *torch.autograd.grad(out.sum() + weights.square().sum(), q)):
        assert each.isfinite().all()
        assert not each[:, 2].any()
    assert out[:, 3].any()
    with torch.no_grad():
        k[..., 0] = 0.0
        q[:, 2, :, 0], k[0, 0] = math.nan, math.nan
    out = module(q, k, v, is_causal, mask)
    assert out[0].isnan().all()
    assert out[1:].isnan().flatten(2).all(-1).tolist() == [[i == 2 for i in range(N)]] * 2
    assert not out[1:, 3].isnan().any()


def test_hidden_keys_may_hold_anything() -> None:
    q, k, v = (torch.randn(B, n, H, D, dtype=DOUBLE, requires_grad=True) for n in (N, M, M))
    mask = torch.arange(M) < torch.tensor([[M - 3], [M], [0]])
    bad_k, bad_v = (x.masked_fill(~mask[..., None, None], math.nan) for x in (k, v))
    module = DenseAttention()
    for of in (
        lambda k, v: module(q, k, v, attention_mask=mask),
        lambda k, _: module.attention_weights(q, k, False, mask),
    ):
        assert_close(of(bad_k, bad_v), of(k, v), DOUBLE)
    assert_same_gradients(
        module(q, bad_k, bad_v, attention_mask=mask), module(q, k, v, attention_mask=mask), [q, k, v], DOUBLE
    )


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("fused_qkv", [True, False])
def test_hidden_memory_may_hold_anything(batch_first: bool, fused_qkv: bool) -> None:
    options = {"batch_first": batch_first, "fused_qkv": fused_qkv, "dtype": DOUBLE}
    module = MultiheadModule(H * D, H, DenseAttention(), **options)
    x, key, value = (
        torch.randn((B, n, H * D) if batch_first else (n, B, H * D), dtype=DOUBLE) for n in (N, M, M)
    )
    ignored = torch.arange(M) >= torch.tensor([[M - 3], [M], [M - 1]])
    hidden = (ignored if batch_first else ignored.T)[..., None]
    bad_key, bad_value = (each.masked_fill(hidden, math.nan) for each in (key, value))
    for bad, good in (((bad_key, bad_key), (key, key)), ((bad_key, bad_value), (key, value))):
        got, expected = (module(x, *pair, key_padding_mask=ignored)[0] for pair in (bad, good))
        assert_close(got, expected, DOUBLE)
        assert_same_gradients(got, expected, list(module.parameters()), DOUBLE)


def test_dropout_in_training_only() -> None:
    module, x = DenseAttention(dropout=0.5), torch.randn(B, N, H, D)
    assert not torch.equal(module(x, x, x), module(x, x, x))
    module.eval()
    assert torch.equal(module(x, x, x), module(x, x, x))
    assert repr(module) == "DenseAttention(dropout=0.5)"


def test_autocast_and_half_precision() -> None:
    module = MultiheadModule(H * D, H, DenseAttention(), num_kv_heads=2)
    x, memory = torch.randn(B, N, H * D), torch.randn(B, M, H * D)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(x, memory)
    assert out.dtype == torch.bfloat16
    assert_close(out, copy.deepcopy(module).double()(x.double(), memory.double())[0], torch.bfloat16)


X, Y, ONES = torch.randn(B, N, H * D), torch.randn(B, M, H * D), torch.ones(N, M).bool()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"is_causal": True}, "is_causal needs as many keys as queries, got 11 and 7"),
        ({"attn_mask": ONES}, "attn_mask needs as many keys as queries, got 11 and 7"),
        ({"key": Y[:2]}, r"need one shape with the batch of query, got \(3, 7, 24\), \(2, 11, 24\)"),
        ({"value": X}, "need one shape with the batch of query"),
        ({"key": Y[:, :0]}, "k must have at least one position, got none"),
        ({"key_padding_mask": ONES[:B, :N]}, r"must be \(b, n\) = \(3, 11\), got \(3, 7\)"),
    ],
)
def test_bad_calls_of_cross_attention(arguments: dict[str, Any], message: str) -> None:
    module = MultiheadModule(H * D, H, DenseAttention())
    with pytest.raises(ValueError, match=message):
        module(X, **{"key": Y, **arguments})
    with pytest.raises(ValueError, match="attention_rows needs a dilated pattern, got a DenseAttention"):
        module.attention_rows(X, [0])


Q, SHAPE = (
    torch.randn(B, N, H, D),
    r"k and v must have the shape \(b, n, h_kv, d\) with the b and d of q, got",
)
HEADS = "the heads of q must be a multiple .* got 4 and"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Q[0], Q, Q), ValueError, r"q must have 4 dimensions \(b, n, h, d\), got shape \(7, 4, 6\)"),
        ((Q, Q, Q[:, 1:]), ValueError, SHAPE),
        ((Q, Q[1:], Q[1:]), ValueError, SHAPE),
        ((Q, Q[:, :, 1:], Q[:, :, 1:]), ValueError, f"{HEADS} 3"),
        ((Q, Q[:, 1:], Q[:, 1:], False, ONES[:B, :N]), ValueError, r"\(b, n\) = \(3, 6\), got \(3, 7\)"),
        ((Q, Q, Q.double()), TypeError, "q, k and v must have one dtype"),
        ((Q, Q, Q, False, torch.ones(B, N)), TypeError, "key_mask must be a bool tensor, got torch.float32"),
    ],
)
def test_bad_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DenseAttention()(*arguments)
    if arguments[1] is arguments[2]:
        with pytest.raises(error, match=message):
            DenseAttention().attention_weights(*arguments[:2], *arguments[3:])
