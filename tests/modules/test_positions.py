"""Rotary and XPOS: equal to plain formulas, relative, precise far out, bounded over any length."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from dilated_attention_pytorch import (
    BlockSparseMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RingMultiheadDilatedAttention,
    shard_sequence,
)
from dilated_attention_pytorch.modules.positions import RotaryEmbedding, XPos
from dilated_attention_pytorch.reference import dilated_attention_reference
from integrations.transcription import xpos
from support.configurations import segment_and_rate
from support.ranks import run_ranks
from support.tolerances import assert_close, assert_same_gradients

D = 8
DOUBLE = torch.float64


def heads(n: int, h: int = 3, h_kv: int = 3, dtype: torch.dtype = DOUBLE) -> tuple[Tensor, Tensor]:
    return torch.randn(2, n, h, D, dtype=dtype), torch.randn(2, n, h_kv, D, dtype=dtype)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bihd,bjhd->bhij", q, k)


@pytest.mark.parametrize("positions", [torch.tensor([0, 3, 4, 900, 7]), torch.randint(1000, (2, 5))])
def test_rotary_is_multiplication_by_complex_units(positions: Tensor) -> None:
    q, k = (x.requires_grad_() for x in heads(5, 4, 2))
    got = RotaryEmbedding(D, 77.0)(q, k, positions)
    rates = torch.tensor([77.0 ** (-2 * i / D) for i in range(D // 2)], dtype=DOUBLE)
    angles = positions[..., None, None] * rates
    units = torch.polar(torch.ones_like(angles), angles)
    for x, turned in zip((q, k), got, strict=True):
        expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * units).flatten(-2)
        assert_close(turned, expected, DOUBLE)
        assert_same_gradients(turned, expected, [x], DOUBLE)


def test_memory_layouts_and_both_ways_to_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Complex numbers need pairs at even places; compilers get real ones."""
    encode, positions = RotaryEmbedding(D), torch.arange(5)
    wide = torch.randn(2, 5, 3, 2 * D + 1, dtype=DOUBLE, requires_grad=True)
    turned_over = wide[..., : 2 * D][..., :D].mT.contiguous().mT
    for view in (wide[..., 1::2], wide[..., 1 : D + 1], wide[..., :D], turned_over):
        expected, _ = encode(view.contiguous(), view, positions)
        weight = torch.randn_like(expected)
        (want,) = torch.autograd.grad((expected * weight).sum(), wide)
        for is_compiling in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda answer=is_compiling: answer)
                turned = encode(view, view, positions)
            for each in turned:
                assert_close(each, expected, DOUBLE)
            (got,) = torch.autograd.grad((turned[0] * weight).sum(), wide)
            assert_close(got, want, DOUBLE)


@pytest.mark.parametrize("n", [1, 2, 37])
def test_xpos_gives_the_scores_of_torchscale(n: int) -> None:
    q, k = (x.requires_grad_() for x in heads(n))
    encoded = XPos(D, (64, 16))(q, k, torch.arange(n))
    theirs = [xpos(q, 512, 1), xpos(k, 512, -1)]
    assert_close(scores(*encoded), scores(*theirs), DOUBLE)
    assert_same_gradients(scores(*encoded), scores(*theirs), [q, k], DOUBLE)


def test_xpos_fades_by_the_distance() -> None:
    encode, n = XPos(D, (4096,), scale_base=100.0), 300
    q = nn.functional.one_hot(torch.tensor(2), D).to(DOUBLE).expand(1, n, 1, D)  # of the second pair
    plain, faded = (scores(*each(q, q, torch.arange(n)))[0, 0] for each in (RotaryEmbedding(D), encode))
    zeta = (2 + 0.4 * D) / (1.4 * D)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    assert_close(faded, plain * zeta ** (distance.double() / 100.0), DOUBLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [10**6, 2**31 + 1, 2**40])
def test_far_positions_are_precise(dtype: torch.dtype, start: int) -> None:
    """Judged by `math.cos` of the very position: the first pair turns by one radian a position."""
    encode, n = RotaryEmbedding(D), 5
    q, k = heads(n, dtype=dtype)
    positions = torch.arange(start, start + n)
    turned, _ = encode(q, k, positions)
    cos, sin = (torch.tensor([f(p) for p in positions.tolist()])[:, None] for f in (math.cos, math.sin))
    expected = q[..., 0].double() * cos - q[..., 1].double() * sin
    assert turned.dtype == dtype
    assert_close(turned[..., 0], expected, dtype)


def test_half_precision_is_turned_in_float32() -> None:
    q, k = heads(50, dtype=torch.bfloat16)
    for encode in (RotaryEmbedding(D), XPos(D, (64,))):
        exact = encode(q.double(), k.double(), torch.arange(50))
        for got, want in zip(encode(q, k, torch.arange(50)), exact, strict=True):
            assert (got.double() - want).abs().max() <= want.abs().max() * 2**-8  # a single rounding


@given(
    st.lists(segment_and_rate(12, 3), min_size=1, max_size=3),
    st.integers(1, 90),
    st.booleans(),
    st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_periods_change_no_score_inside_segments(
    branches: list[tuple[int, int]], n: int, is_causal: bool, seed: int
) -> None:
    """Against factors of the plain distance, which no period interrupts."""
    segments, rates = zip(*branches, strict=True)
    torch.manual_seed(seed)
    q, k = heads(n)
    v = torch.randn_like(k)
    results = []
    for encode in (XPos(D, segments, scale_base=20.0), XPos(D, (4096,), scale_base=20.0)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        turned = encode(*leaves[:2], torch.arange(n))
        out = dilated_attention_reference(*turned, leaves[2], segments, rates, is_causal=is_causal)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, DOUBLE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_factors_stay_bounded_over_any_length(dtype: torch.dtype) -> None:
    encode = XPos(D, (2048, 4096))
    positions = torch.tensor([0, 1, 4095, 4096, 10**6, 10**9, 2**40])
    q, k = heads(len(positions), dtype=dtype)
    for each, x in zip(encode(q, k, positions), (q, k), strict=True):
        assert each.isfinite().all()
        assert ((each != 0) | (x == 0)).all()


def test_positions_beyond_the_range_of_a_dtype_are_refused() -> None:
    q, k = heads(1, dtype=torch.float32)
    for encode, period in ((XPos(D), "no period"), (XPos(D, (2**20, 3)), f"a period of {3 * 2**20}")):
        reach = encode.reach(torch.float32)
        assert 36000 < reach < 37000
        assert all(x.isfinite().all() for x in encode(q, k, torch.tensor([reach - 1])))
        message = f"xpos factors of torch.float32 reach over {reach} positions .*, with {period}"
        with pytest.raises(ValueError, match=message):
            encode(q, k, torch.tensor([reach]))
        encode(q.double(), k.double(), torch.tensor([reach]))
    assert 4500 < encode.reach(torch.float16) < 4600
    assert XPos(D, scale_base=1024).reach(torch.float32) > 2 * 36000
    assert XPos(D, (2**61 - 1, 2**61 - 2)).period is None


@pytest.mark.parametrize("kind", ["rotary", "xpos"])
def test_modules_encode_queries_and_keys_only(kind: str) -> None:
    """With GQA, and both ways of projecting; values are left alone."""
    n, segments, rates = 61, (8, 12), (1, 3)
    options: dict[str, Any] = {"position_encoding": kind, "num_kv_heads": 2, "rotary_base": 500.0}
    options |= {"xpos_scale_base": 30.0} if kind == "xpos" else {}
    module = MultiheadDilatedAttention(32, 4, segments, rates, **options, dtype=DOUBLE)
    x = torch.randn(2, n, 32, dtype=DOUBLE)
    q, k, v = module._project(x, x, x)
    encode = RotaryEmbedding(D, 500.0) if kind == "rotary" else XPos(D, (4096,), 500.0, 30.0)
    q, k = encode(q, k, torch.arange(n))
    inner = dilated_attention_reference(q, k, v, segments, rates, is_causal=True)
    expected = module.out_proj(module.inner_attn_ln(inner.flatten(2)))
    assert_close(module(x, is_causal=True)[0], expected, DOUBLE)
    time_first = copy.deepcopy(module)
    time_first.batch_first = False
    assert_close(time_first(x.transpose(0, 1), is_causal=True)[0].transpose(0, 1), expected, DOUBLE)


def test_patterns_that_leave_segments_have_no_period() -> None:
    """A window of blocks crosses from one segment into the next, and sees plain distances there."""
    torch.manual_seed(0)
    config = {"pattern_type": "local_window", "block_size": 4, "window_size": 40, "sparsity_ratio": 1.0}
    positions: dict[str, Any] = {"position_encoding": "xpos", "xpos_scale_base": 20.0}
    module = BlockSparseMultiheadDilatedAttention(
        32, 4, (8,), (1,), sparse_config=config, dtype=DOUBLE, **positions
    )
    x = torch.randn(2, 37, 32, dtype=DOUBLE)
    q, k, v = module._project(x, x, x)
    q, k = XPos(D, (4096,), scale_base=20.0)(q, k, torch.arange(37))
    inner = module.attention(q, k, v, is_causal=True).flatten(2)
    expected = module.out_proj(module.inner_attn_ln(inner))
    assert_close(module(x, is_causal=True)[0], expected, DOUBLE)


def test_positions_of_the_user() -> None:
    class Shown(nn.Module):
        def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(positions)
            return q, k

    seen: list[Tensor] = []
    module = MultiheadDilatedAttention(32, 4, (8,), (1,))
    module.positions = Shown()
    x = torch.randn(2, 9, 32)
    module(x)
    given = torch.randint(50, (2, 9), dtype=torch.int32)
    module(x, positions=given)
    module(x, positions=given[0])
    module.attention_rows(x, [3], positions=given)
    expected = [torch.arange(9), given, given[0], given]
    assert [each.tolist() for each in seen] == [each.tolist() for each in expected]
    assert all(each.dtype == torch.int64 for each in seen)


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        ([0, 1], TypeError, "positions must be a tensor of integers, got list"),
        (torch.zeros(9), TypeError, r"positions must be a tensor of integers, got torch\.float32"),
        (torch.arange(8), ValueError, r"\(n,\) = \(9,\) or \(b, n\) = \(2, 9\), got \(8,\)"),
        (torch.arange(9) + 5, ValueError, r"xpos, 0 \.\. 7, or differ .* by multiples of it"),
        (torch.arange(9) - 1, ValueError, "positions must lie in one period of xpos"),
    ],
)
def test_bad_positions(positions: Any, error: type[Exception], message: str) -> None:
    module = MultiheadDilatedAttention(32, 4, (8, 4), (1, 1), position_encoding="xpos")
    x, q = torch.randn(2, 9, 32), torch.randn(2, 9, 4, 8)
    with pytest.raises(error, match=message):
        module(x, positions=positions)
    if "period" not in message and "multiples" not in message:
        for encoding in (RotaryEmbedding(8), XPos(8, [16])):
            with pytest.raises(error, match=message):
                encoding(q, q, positions)
    moved = module(x, positions=torch.arange(9) + 8 * 10**6)[0]
    assert_close(moved, module(x)[0], torch.float32)
    assert module(x, positions=torch.randint(8, (2, 9)))[0].isfinite().all()
    with pytest.raises(ValueError, match="positions need a position encoding, got a module without one"):
        MultiheadDilatedAttention(32, 4, (8,), (1,))(x, positions=torch.arange(9))


@pytest.mark.parametrize("encoding", [RotaryEmbedding(8), XPos(8, [16])])
def test_heads_and_narrow_positions_of_an_encoding(encoding: RotaryEmbedding) -> None:
    q, positions = torch.randn(2, 9, 4, 8), torch.arange(9)
    for pair in ((q[..., :2], q), (q, q[..., :4]), (q[0], q)):
        with pytest.raises(ValueError, match=r"[qk] must have the shape \(b, n, h, d\) with d 8, got"):
            encoding(*pair, positions)
    for narrow in (torch.uint8, torch.int8):
        found, expected = encoding(q, q, positions.to(narrow)), encoding(q, q, positions)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["rotary", "xpos"])
def test_no_state_and_copies(kind: str) -> None:
    plain = MultiheadDilatedAttention(32, 4, (8,), (1,))
    module = MultiheadDilatedAttention(32, 4, (8,), (1,), position_encoding=kind)
    assert module.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(2, 9, 32)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x)[0], module(x)[0])
    name = "RotaryEmbedding" if kind == "rotary" else "XPos"
    assert f"(positions): {name}(head_dim=8, base=10000.0" in repr(module)


@torch.no_grad()
def test_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    module = MultiheadDilatedAttention(32, 4, (8, 12), (1, 2), position_encoding="xpos")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (20, 33):
        x = torch.randn(2, n, 32)
        assert_close(compiled(x, is_causal=True)[0], module(x, is_causal=True)[0], torch.float32)


def ring_module(kind: str) -> RingMultiheadDilatedAttention:
    torch.manual_seed(3)
    return RingMultiheadDilatedAttention(32, 4, (8, 12), (1, 2), position_encoding=kind, dtype=DOUBLE)


def run_on_part(rank: int, kind: str, x: Tensor, expected: Tensor) -> bool:
    out, _ = ring_module(kind)(shard_sequence(x), is_causal=True)
    assert_close(out, shard_sequence(expected), DOUBLE)
    with pytest.raises(ValueError, match="a cache needs the sequence in one process"):
        ring_module(kind).make_cache(2)
    with pytest.raises(ValueError, match="attention_rows needs the whole sequence in one process"):
        ring_module(kind).attention_rows(shard_sequence(x), [0])
    # What only one of the processes was given wrongly is an error of all.
    wrong = torch.arange(9) if rank else None
    with pytest.raises(Exception, match="positions must have the shape" if rank else "rank 1 .* refused its"):
        ring_module(kind)(shard_sequence(x), positions=wrong)
    return True


@pytest.mark.parametrize("kind", ["rotary", "xpos"])
def test_parts_of_a_ring_have_the_positions_of_the_whole(kind: str) -> None:
    x = torch.randn(2, 41, 32, dtype=DOUBLE)
    with torch.no_grad():
        expected, _ = ring_module(kind)(x, is_causal=True)
    assert run_ranks(2, run_on_part, kind, x, expected) == [True, True]
