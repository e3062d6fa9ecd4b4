"""What `dilated_attention` promises besides equality with the reference."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention_pytorch import Execution, dilated_attention
from dilated_attention_pytorch.reference import dilated_attention_reference, multiplicity
from support.executions import dilated
from support.tolerances import assert_close, assert_same_gradients

BRANCHES: dict[str, Any] = {"segment_lengths": (8, 14, 40), "dilation_rates": (1, 2, 5)}


def qkv(n: int = 37, h: int = 6, h_kv: int = 6, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, n, heads, 8, dtype=dtype) for heads in (h, h_kv, h_kv))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("h", "h_kv"), [(6, 6), (6, 2)])
@pytest.mark.parametrize("n", [1, 63, 700])
def test_one_branch_of_rate_one_is_dense_attention(
    n: int, h: int, h_kv: int, dtype: torch.dtype, causal: bool
) -> None:
    tensors = [x.requires_grad_() for x in qkv(n, h, h_kv, dtype)]
    out = dilated_attention(*tensors, [n], [1], is_causal=causal)
    dense = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors), is_causal=causal, enable_gqa=h != h_kv
    ).transpose(1, 2)
    assert_close(out, dense, dtype)
    assert_same_gradients(out, dense, tensors, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [3.0, -1e4, 1e38, math.nan, math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_the_future_cannot_change_the_past(which: str, value: float, dtype: torch.dtype) -> None:
    q, k, v = qkv(600, dtype=dtype)
    branches: dict[str, Any] = {"segment_lengths": (64, 250, 600), "dilation_rates": (1, 2, 5)}
    before = dilated_attention(q, k, v, **branches, is_causal=True)
    for token in (1, 300, 513, 599):
        changed = {name: x.clone() for name, x in (("q", q), ("k", k), ("v", v))}
        changed[which][:, token] = value
        after = dilated_attention(*changed.values(), **branches, is_causal=True)
        assert torch.equal(before[:, :token], after[:, :token])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nonfinite_inputs_reach_exactly_the_outputs_that_depend_on_them(
    which: str, bad: float, causal: bool
) -> None:
    tensors = dict(zip("qkv", qkv(37), strict=True))
    clean = dilated_attention(*tensors.values(), **BRANCHES, is_causal=causal)
    connected = multiplicity(37, 6, **BRANCHES, is_causal=causal) > 0  # (h, query, key)
    for token in (0, 5, 20, 36):
        spoilt = {name: x.clone() for name, x in tensors.items()}
        spoilt[which][1, token, 3] = bad
        out = dilated_attention(*spoilt.values(), **BRANCHES, is_causal=causal)
        reached = torch.zeros(2, 37, 6, dtype=torch.bool)
        reached[1, :, 3] = connected[3, :, token] if which != "q" else torch.arange(37) == token
        if (
            which == "k" and bad == math.inf
        ):  # a score of -inf is a weight of 0: only some rows turn non-finite
            reached &= ~out.isfinite().all(-1)
        assert torch.equal(~out.isfinite().all(-1), reached)
        assert_close(out[~reached], clean[~reached], torch.float32)


def test_positions_that_no_branch_selects() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(20, 1, 1))
    out, lse = dilated_attention(q, k, v, [10], [4], return_lse=True)
    selected = torch.tensor([t % 10 % 4 == 0 for t in range(20)])
    assert not out[:, ~selected].any()
    assert (lse[..., ~selected] == -math.inf).all()
    assert lse[..., selected].isfinite().all()
    (out.square().sum() + lse[..., selected].sum()).backward()
    for x in (q, k, v):
        assert not x.grad[:, ~selected].any()
        assert x.grad[:, selected].abs().amin() > 0 or x is v


def test_offsets_beyond_a_short_tail_select_nothing() -> None:
    q, k, v = qkv(18, 8, 8)  # a tail of 2 positions, offsets up to 7
    out, lse = dilated_attention(q, k, v, [16], [8], return_lse=True)
    expected, expected_lse = dilated_attention_reference(q, k, v, [16], [8], return_lse=True)
    assert_close(out, expected, torch.float32)
    assert_close(lse, expected_lse, torch.float32)
    assert not out[:, 16:, 2:].any()


def test_hidden_keys_may_hold_anything() -> None:
    q, k, v = qkv()
    mask = torch.rand(2, 37) > 0.4
    expected = dilated_attention(q, k, v, **BRANCHES, key_mask=mask)
    k, v = (x.masked_fill(~mask[..., None, None], math.nan) for x in (k, v))
    assert torch.equal(dilated_attention(q, k, v, **BRANCHES, key_mask=mask), expected)


def test_a_sequence_whose_keys_are_all_hidden() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = torch.tensor([False, True])[:, None].expand(2, 37)
    out, lse = dilated_attention(q, k, v, **BRANCHES, key_mask=mask, return_lse=True)
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()
    assert_close(out[1:], dilated_attention(q[1:], k[1:], v[1:], **BRANCHES), torch.float32)
    out.sum().backward()
    for x in (q, k, v):
        assert not x.grad[0].any()
        assert x.grad.isfinite().all()


def test_packed_documents_equal_separate_calls() -> None:
    q, k, v = (x[:1] for x in qkv(60))
    bounds = [0, 1, 30, 30, 52, 60]
    out = dilated_attention(q, k, v, **BRANCHES, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for lo, hi in pairwise(bounds):
        if hi > lo:
            alone = dilated_attention(q[:, lo:hi], k[:, lo:hi], v[:, lo:hi], **BRANCHES)
            assert_close(out[:, lo:hi], alone, torch.float32)


def test_the_workspace_changes_only_the_rounding() -> None:
    tensors = [x.requires_grad_() for x in qkv(300, dtype=torch.float64)]
    results = []
    for workspace_bytes in (20_000, 200_000, 2**25):
        execution = Execution(workspace_bytes=workspace_bytes)
        out = dilated_attention(*tensors, **BRANCHES, is_causal=True, execution=execution)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            assert_close(a, b, torch.float64)


def test_dropout_acts_on_probabilities_and_repeats_in_backward() -> None:
    n, p = 48, 0.3
    q, k = (torch.randn(1, n, 2, n, dtype=torch.float64, requires_grad=True) for _ in range(2))
    v = torch.eye(n, dtype=torch.float64)[None, :, None].repeat(1, 1, 2, 1).requires_grad_()
    one = {"segment_lengths": [24], "dilation_rates": [1]}
    plain = dilated_attention(q, k, v, **one)
    torch.manual_seed(3)
    dropped = dilated_attention(q, k, v, **one, dropout_p=p)
    torch.manual_seed(3)
    again = dilated_attention(q, k, v, **one, dropout_p=p)
    assert torch.equal(dropped, again)
    assert not torch.equal(dropped, dilated_attention(q, k, v, **one, dropout_p=p))
    kept = dropped != 0
    assert_close(dropped[kept], (plain / (1 - p))[kept], torch.float64)
    share = kept.sum().item() / (plain != 0).sum().item()
    assert abs(share - (1 - p)) < 0.05
    assert not dilated_attention(q, k, v, **one, dropout_p=1.0).any()


def test_dropout_draws_anew_for_every_tile_segment_and_head() -> None:
    n = 64
    q = torch.zeros(1, n, 2, 16, dtype=torch.float64)
    v = torch.eye(16, dtype=torch.float64).repeat(4, 1)[None, :, None].expand(1, n, 2, 16)
    for workspace_bytes in (2**15, 2**25):  # several tiles, and one
        execution = Execution(workspace_bytes=workspace_bytes)
        out = dilated_attention(q, q, v, [16], [1], dropout_p=0.5, execution=execution)
        masks = [
            tuple((part != 0).flatten().tolist()) for head in out[0].unbind(1) for part in head.split(16)
        ]
        assert len(set(masks)) == 8


def test_dropout_ignores_the_default_device() -> None:
    tensors = qkv()
    torch.manual_seed(9)
    expected = dilated_attention(*tensors, **BRANCHES, dropout_p=0.2)
    torch.manual_seed(9)
    with torch.device("meta"):
        assert torch.equal(dilated_attention(*tensors, **BRANCHES, dropout_p=0.2), expected)


def test_detached_mixing_of_uncovered_rows_over_several_panels() -> None:
    for p in (0.0, 0.3):
        tensors = [x.requires_grad_() for x in qkv(96, dtype=torch.float64)]
        results = []
        for workspace_bytes in (2**14, 2**25):
            torch.manual_seed(0)
            how = {"dropout_p": p, "execution": Execution(workspace_bytes=workspace_bytes)}
            out = dilated_attention(*tensors, [16, 24], [4, 5], detach_mixing=True, **how)
            results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
        assert all(torch.isfinite(x).all() for x in (*results[0], *results[1]))
        if not p:
            for got, want in zip(*results, strict=True):
                assert_close(got, want, torch.float64)


@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_autocast_does_not_lower_the_precision_inside(kernel: str) -> None:
    tensors = [x.bfloat16().requires_grad_() for x in qkv(200)]
    weight = torch.randn(2, 200, 6, 8).bfloat16()

    def run() -> list[Tensor]:
        out, lse = dilated_attention(*tensors, **BRANCHES, execution=Execution(kernel), return_lse=True)
        return [out, lse, *torch.autograd.grad((out * weight).sum(), tensors)]

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run()
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_dropout_under_autocast_keeps_its_rate() -> None:
    x = torch.randn(1, 256, 2, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = dilated_attention(x, x, x, [256], [1], dropout_p=1e-30)
    assert_close(out, dilated_attention(x, x, x, [256], [1]), torch.bfloat16)


def test_large_gradients_of_lse_in_half_precision() -> None:
    q, k, v = (torch.randn(1, 16, 1, 16).half() for _ in range(3))
    k = k * 1e-3
    _, lse = dilated_attention(q.requires_grad_(), k, v, [16], [1], return_lse=True)
    (grad,) = torch.autograd.grad(lse, q, torch.full_like(lse, 1e5))
    exact = q.detach().double().requires_grad_()
    _, lse = dilated_attention(exact, k.double(), v.double(), [16], [1], return_lse=True)
    (expected,) = torch.autograd.grad(lse, exact, torch.full_like(lse, 1e5))
    assert_close(grad, expected, torch.float16)


def test_a_branch_whose_scores_overflow_leaves_the_others_alone() -> None:
    q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 1, 2)
    q[0, :, 0] = torch.tensor([1e20, 1.0])
    k[0, :, 0] = torch.tensor([0.0, -50.0])
    k[0, 1::2, 0, 0] = -1e20
    assert_close(
        dilated_attention(q, k, torch.ones_like(q), [1, 4], [1, 1], scale=1.0),
        torch.ones_like(q),
        torch.float32,
    )


def test_forward_mode_is_refused_not_dropped() -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: dilated_attention(x, k, v, **BRANCHES), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(TypeError, match="no forward-mode derivative"):
            dilated_attention(q, k, dual, **BRANCHES)
        assert dilated_attention(q, k, v, **BRANCHES).shape == q.shape


def test_many_query_heads_on_one_key_head_are_split_over_tiles() -> None:
    tensors = [torch.randn(1, 40, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (12, 1, 1)]
    branches: dict[str, Any] = {"segment_lengths": (20, 40), "dilation_rates": (1, 3)}
    for causal in (False, True):
        results = []
        for attention in (dilated_attention, dilated_attention_reference):
            how = {"execution": Execution(workspace_bytes=2**15)}
            options = how if attention is dilated_attention else {}
            out = attention(*tensors, **branches, is_causal=causal, **options)  # type: ignore[operator]
            results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
        for got, want in zip(*results, strict=True):
            assert_close(got, want, torch.float64)


def test_several_threads_give_the_same_results() -> None:
    tensors = [x.requires_grad_() for x in qkv(1500)]
    branches: dict[str, Any] = {"segment_lengths": (256, 700), "dilation_rates": (1, 3), "is_causal": True}
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = dilated_attention(*tensors, **branches)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    torch.set_num_threads(before)
    for got, want in zip(*results, strict=True):
        assert_close(got, want, torch.float32)


def test_dropout_gradients_are_those_of_the_drawn_mask() -> None:
    q, k, v = (torch.randn(1, 12, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        return dilated_attention(
            q, k, v, [4, 12], [1, 2], dropout_p=0.4, execution=Execution(workspace_bytes=3000)
        )

    assert torch.autograd.gradcheck(attention, (q, k, v))


@pytest.mark.parametrize("workspace_bytes", [3000, 2**20])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"tail": "phantom", "head_mixing": "grouped"},
        {"cu_seqlens": torch.tensor([0, 5, 12])},
    ],
    ids=lambda options: ",".join(options),
)
def test_dropout_in_steps_has_the_gradients_of_its_masks(
    options: dict[str, Any], workspace_bytes: int
) -> None:
    q, k, v = (torch.randn(1, 12, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    execution = {"steps": 5, "workspace_bytes": workspace_bytes}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        return dilated(q, k, v, [4, 12], [1, 2], dropout_p=0.4, **execution, **options)

    assert torch.autograd.gradcheck(attention, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"detach_mixing": True}, {"is_causal": True}], ids=str)
def test_steps_with_a_dropout_that_drops_nothing(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Tiles are cut as dropout needs them, in both passes, and every probability stays."""
    tensors = [x.to(dtype).requires_grad_() for x in qkv(96)]
    results = []
    for execution in ({}, {"dropout_p": 1e-30, "steps": 5, "workspace_bytes": 2**14}):
        out = dilated(*tensors, **BRANCHES, **options, **execution)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for got, want in zip(*results, strict=True):
        assert_close(got, want, dtype)


@pytest.mark.parametrize("steps", [1, 4])
def test_dropout_does_not_depend_on_how_the_work_is_cut(steps: int) -> None:
    x = torch.randn(2, 64, 4, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for size in (1, 2**10, 2**14, None):
        torch.manual_seed(3)
        out = dilated(x, x, x, [16, 64], [1, 2], dropout_p=0.4, workspace_bytes=size, steps=steps)
        results.append([out, *torch.autograd.grad(out.square().sum(), x)])
    for got in results[1:]:
        for one, other in zip(got, results[0], strict=True):
            assert_close(one, other, torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "head_offsets": "blocked"},
        {"tail": "phantom"},
        {"head_mixing": "grouped"},
        {"key_mask": torch.tensor([[True, False, True, True, True, False, True]])},
        {"cu_seqlens": torch.tensor([0, 2, 7])},
    ],
    ids=str,
)
def test_gradcheck(options: dict[str, Any]) -> None:
    q = torch.randn(1, 7, 4, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 7, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = dilated_attention(q, k, v, [3, 7], [1, 2], return_lse=True, **options)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(attention, (q, k, v))


def test_an_empty_batch_is_an_empty_result() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.empty(0, 5, 2, 4, dtype=dtype, requires_grad=True)
        out = dilated_attention(x, x, x, [4], [1])
        out.sum().backward()
        assert out.shape == x.shape == x.grad.shape


def test_inputs_are_left_alone() -> None:
    tensors = qkv()
    copies = [x.clone() for x in tensors]
    mask = torch.rand(2, 37) > 0.5
    dilated_attention(*tensors, **BRANCHES, key_mask=mask)
    assert all(torch.equal(x, y) for x, y in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("options", [{}, {"head_offsets": "blocked"}, {"head_mixing": "grouped"}])
@pytest.mark.parametrize("h_kv", [6, 2])
def test_slices_of_the_heads_join_to_the_whole(h_kv: int, options: dict[str, Any]) -> None:
    tensors = [x.requires_grad_() for x in qkv(h_kv=h_kv, dtype=torch.float64)]
    whole = dilated_attention(*tensors, **BRANCHES, **options)
    parts = []
    for first in (0, 3):
        keys = slice(first * h_kv // 6, (first + 3) * h_kv // 6)
        slices = (slice(first, first + 3), keys, keys)
        part = [x[:, :, heads] for x, heads in zip(tensors, slices, strict=True)]
        parts.append(dilated(*part, **BRANCHES, **options, head_slice=(first, 6)))
    assert_close(torch.cat(parts, 2), whole, torch.float64)
    assert_same_gradients(torch.cat(parts, 2), whole, tensors, torch.float64)
