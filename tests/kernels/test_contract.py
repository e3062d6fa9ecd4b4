"""Every op of packed rows that runs here keeps the contract, its guards included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import Attended, Dropout, How, Op, eager
from dilated_attention_pytorch.kernels.cpu_flash import CPU_FLASH
from dilated_attention_pytorch.kernels.eager import EAGER_OP
from dilated_attention_pytorch.kernels.native import NATIVE_OP
from support.executions import FUSED
from support.tolerances import assert_close

OPS = {"native": NATIVE_OP, "stock": CPU_FLASH, "eager": EAGER_OP}
NAMES = [*FUSED, "eager"]
EACH = pytest.mark.parametrize("op", [OPS[name] for name in NAMES], ids=NAMES)


def dense(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Softmax in float64 with autograd, one key head per query head."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * how.scale
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if how.is_causal:
        hidden = hidden | torch.ones_like(hidden).triu(1)
    if how.mask is not None:
        hidden = hidden | ~how.mask.repeat_interleave(group, 1).unsqueeze(2)
    if how.pairs is not None:
        hidden = hidden | ~how.pairs[:, None]
    empty = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden, -math.inf).masked_fill(empty, 0.0)
    out = (torch.softmax(scores, -1) @ v).masked_fill(empty, 0.0)
    return out, torch.logsumexp(scores, -1).masked_fill(empty.squeeze(-1), -math.inf)


def check_op(op: Op, rows: int, keys: int, how: How) -> None:
    """Against the definition: out, lse, their gradients and, but for causal rows, a softmax that goes on."""
    dtype = torch.float32 if op is NATIVE_OP else torch.float64
    q = torch.randn(2, 4, rows, 5, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, keys, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected, expected_lse = dense(q, k, v, how)
    narrow = [x.detach().to(dtype) for x in (q, k, v)]
    out, lse = op.forward(*narrow, how)
    assert_close(out, expected, dtype, "out")
    assert_close(lse, expected_lse, dtype, "lse")
    if not how.is_causal:
        joint = torch.zeros_like(out), torch.full_like(lse, -math.inf)
        for part in (slice(0, keys // 2), slice(keys // 2, keys)):
            mask, pairs = (None if x is None else x[..., part] for x in (how.mask, how.pairs))
            some = narrow[1][:, :, part], narrow[2][:, :, part]
            op.extend(narrow[0], *some, how._replace(mask=mask, pairs=pairs), *joint)
        assert_close(joint[0], expected, dtype, "out, extended")
        assert_close(joint[1], expected_lse, dtype, "lse, extended")
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    finite = torch.where(expected_lse.isfinite(), expected_lse * grad_lse, 0.0)
    grads = torch.autograd.grad((expected * grad_out).sum() + finite.sum(), (q, k, v))
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    actual = op.backward(Attended(*narrow, out, lse, grad_out, grad_lse, how))
    for got, want in zip(actual, grads, strict=True):
        assert_close(got, want, dtype, "gradient")


@EACH
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "more"), [(1, 3), (1, 4000), (3, 2100), (7, 3), (600, 3)])
def test_forward_and_backward(op: Op, rows: int, more: int, causal: bool, masked: bool) -> None:
    keys = rows if causal else rows + more
    mask = torch.rand(2, 2, keys) > 0.5 if masked else None
    if mask is not None:
        mask[0, 0] = False  # a head without any visible key
    check_op(op, rows, keys, How(causal, 0.4, mask))


PAIRED = pytest.mark.parametrize("op", [CPU_FLASH, EAGER_OP], ids=["stock", "eager"])


@PAIRED
@pytest.mark.parametrize("masked", [False, True])
def test_masks_of_pairs(op: Op, masked: bool) -> None:
    pairs, mask = torch.rand(2, 9, 13) > 0.5, torch.rand(2, 2, 13) > 0.3 if masked else None
    pairs[0, 3] = False  # a query without a visible key
    check_op(op, 9, 13, How(False, 0.4, mask, pairs=pairs))


@PAIRED
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_hidden_pairs_may_hold_anything(op: Op, bad: float) -> None:
    """Query 2 and key 4, the bad ones, see nothing and are seen by none; a product of two 1e200 overflows."""
    q, k, v, grad = (torch.randn(1, 1, 7, 5, dtype=torch.float64) for _ in range(4))
    pairs = torch.rand(1, 7, 7) > 0.4
    pairs[:, 2], pairs[:, :, 4] = False, False
    results = []
    for value in (1.0, bad):
        q[0, 0, 2], grad[0, 0, 2] = value, value
        k[0, 0, 4], v[0, 0, 4] = value, value
        how = How(False, 0.4, pairs=pairs)
        out, lse = op.forward(q, k, v, how)
        lse_or_inf = lse.masked_fill(lse == -math.inf, math.inf)
        gradients = op.backward(Attended(q, k, v, out, lse_or_inf, grad, None, how))
        results.append([out, lse, *gradients])
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, torch.float64)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [5, 64, 1100])
def test_nonfinite_queries_and_keys_are_not_swallowed(op: Op, dtype: torch.dtype, rows: int) -> None:
    for bad in (math.nan, math.inf):
        q, k, v = (torch.randn(1, 1, rows, 8).to(dtype) for _ in range(3))
        q[0, 0, rows // 2] = bad
        out, _ = op.forward(q, k, v, How(False, 1.0))
        assert out.isnan().any(-1).flatten().tolist() == [i == rows // 2 for i in range(rows)]
        q = torch.randn(1, 1, rows, 8).to(dtype)
        k[0, 0, 0] = math.nan
        out, lse = op.forward(q, k, v, How(False, 1.0))
        assert out.isnan().all()
        assert lse.isnan().all()


@EACH
def test_later_nonfinite_values_do_not_reach_earlier_rows(op: Op) -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    clean, _ = op.forward(q, k, v, How(True, 0.3))
    for x, bad in ((v, math.nan), (k, math.nan), (v, -math.inf)):
        spoilt = x.clone()
        spoilt[0, 0, 25] = bad
        out, _ = op.forward(q, spoilt if x is k else k, spoilt if x is v else v, How(True, 0.3))
        assert torch.equal(out[0, 0, :25], clean[0, 0, :25]) or op is EAGER_OP
        assert_close(out[0, 0, :25], clean[0, 0, :25], torch.float32)
        assert_close(out[0, 1], clean[0, 1], torch.float32)
        assert not out[0, 0, 25:].isfinite().any()
        assert out[0, 0, 25:].isinf().all() == math.isinf(bad)


@EACH
def test_scores_that_overflow_leave_an_empty_row(op: Op) -> None:
    q, k = torch.full((1, 1, 3, 4), -1e25), torch.full((1, 1, 3, 4), 1e25)
    out, lse = op.forward(q, k, torch.ones(1, 1, 3, 4), How(False, 1.0))
    assert not out.any()
    assert (lse == -math.inf).all()


@EACH
def test_an_lse_of_zero_by_right(op: Op) -> None:
    q, k = torch.zeros(1, 1, 1, 4), torch.randn(1, 1, 1, 4)
    for v in (torch.randn(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)):
        out, lse = op.forward(q, k, v, How(False, 1.0))
        assert torch.equal(out, v)
        assert torch.equal(lse, torch.zeros(1, 1, 1))


def test_eager_in_small_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, 4, 33, 8, dtype=torch.float64) for _ in range(3))
    k, v = k[:, :2], v[:, :2]
    how = How(True, 0.3, torch.rand(2, 2, 33) > 0.3)
    expected = EAGER_OP.forward(q, k, v, how)
    grads = EAGER_OP.backward(Attended(q, k, v, *expected, q, None, how))
    monkeypatch.setattr(eager, "MAX_SCORES", 150)
    actual = EAGER_OP.forward(q, k, v, how)
    for got, want in zip(actual, expected, strict=True):
        assert_close(got, want, torch.float64)
    for got, want in zip(EAGER_OP.backward(Attended(q, k, v, *actual, q, None, how)), grads, strict=True):
        assert_close(got, want, torch.float64)


def test_dropout_repeats_its_mask_in_backward() -> None:
    """With v the identity, out shows each dropped probability; dv then must use the same mask."""
    q, k = (torch.randn(1, 1, 50, 50, dtype=torch.float64) for _ in range(2))
    v = torch.eye(50, dtype=torch.float64).expand(1, 1, 50, 50)
    plain, lse = EAGER_OP.forward(q, k, v, How(False, 0.1))
    numbers = torch.arange(50).view(1, 1, 50)
    how = How(False, 0.1, None, Dropout(0.25, 7, numbers + 1000, numbers))
    dropped, lse_dropped = EAGER_OP.forward(q, k, v, how)
    assert torch.equal(lse, lse_dropped)
    kept = dropped != 0
    assert_close(dropped[kept], plain[kept] / 0.75, torch.float64)
    assert 0.2 < 1 - kept.double().mean().item() < 0.3
    eye = torch.eye(50, dtype=torch.float64).expand(1, 1, 50, 50).contiguous()
    _, _, dv = EAGER_OP.backward(Attended(q, k, v, dropped, lse, eye, None, how))
    assert_close(dv, dropped.transpose(-1, -2), torch.float64)
    everything, _ = EAGER_OP.forward(q, k, v, How(False, 0.1, None, Dropout(1.0, 7, numbers, numbers)))
    assert not everything.any()


def test_dropout_draws_for_each_row_and_each_key_alone() -> None:
    """Rows, or keys, of 1,024 pairs correlate by 1/32 by chance, and no two of them by six times as much."""
    rows, keys = 5 * torch.arange(1024), 4 * torch.arange(1024)
    for p in (0.1, 0.5):
        dropout = Dropout(p, 12345, rows[None, None], keys[None, None])
        kept = eager._keep(dropout, torch.empty(1, 1, 1024, 1024), slice(0, 1), slice(0, 1024))[0, 0] > 0
        drawn = (kept.double() - (1 - p)) / (p * (1 - p)) ** 0.5
        assert abs(float(drawn.mean())) < 4 / 1024
        for each in (drawn, drawn.T):
            assert float(each.mean(1).abs().max()) < 6 / 32
            correlation = (each @ each.T / 1024).fill_diagonal_(0.0)
            assert float(correlation.abs().max()) < 6.5 / 32


def test_dropout_follows_the_numbers_of_rows_and_keys() -> None:
    """A pair draws the same wherever it stands; other rows, keys and seeds draw anew."""
    q = torch.randn(1, 1, 40, 8, dtype=torch.float64)
    v = torch.eye(40, dtype=torch.float64).expand(1, 1, 40, 40)
    numbers = torch.arange(40).view(1, 1, 40)

    def dropped(rows: Tensor, keys: Tensor, seed: int = 7) -> Tensor:
        """(rows, keys): by the numbers that rows and keys have."""
        how = How(False, 0.1, None, Dropout(0.5, seed, rows, keys))
        q_pad = torch.nn.functional.pad(q, (0, 32))
        return EAGER_OP.forward(q_pad, q_pad, v, how)[0][0, 0] == 0

    first, order = dropped(numbers, numbers), torch.randperm(40)
    assert torch.equal(dropped(numbers[..., order], numbers), first[order])
    assert torch.equal(dropped(numbers, numbers[..., order]), first[:, order])
    for other in (
        dropped(numbers + 40, numbers),
        dropped(numbers, numbers + 40),
        dropped(numbers, numbers, 8),
    ):
        assert 0.4 < (other == first).double().mean() < 0.6
    assert 0.4 < (first == first.T).double().mean() < 0.6
