"""The learned scorer: what it computes, that it learns, and that it is saved."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dilated_attention_pytorch import (
    BlockSparseAdaptiveDilatedAttention,
    BlockSparseDilatedAttention,
    SparsePatternConfig,
)
from support.threads import in_threads
from support.tolerances import assert_close, assert_same_gradients

Adaptive = BlockSparseAdaptiveDilatedAttention
SIZES: dict[str, Any] = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "scorer_dim": 3}
CONFIG = SparsePatternConfig("adaptive", 0.4, 16)


def make(ratio: float = 0.4, **options: Any) -> Adaptive:
    torch.manual_seed(5)
    return Adaptive(sparse_config=SparsePatternConfig("adaptive", ratio, 16), **{**SIZES, **options}).double()


def lazy(**options: Any) -> Adaptive:
    """Whose sizes the first call sets."""
    return Adaptive(sparse_config=CONFIG, **options)


def tensors(n: int = 90, b: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n)
    q, k, v = (torch.randn(b, n, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    return q, k, v


def means(q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(b, h, n, d): what each position's gate knows of queries and keys, position by position."""
    n, size = q.shape[1], 16
    k = k.repeat_interleave(2, 2)
    rows, columns = [], []
    for t in range(n):
        first = t // size * size
        last = min(first + size, n)
        rows.append(q[:, max(0, first - size + 1) : first + 1] if causal else q[:, first:last])
        columns.append(k[:, first : t + 1] if causal else k[:, first:last])
    return tuple(torch.stack([x.mean(1) for x in parts], 2) for parts in (rows, columns))


def dense(module: Adaptive, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The docstring's formula with an n x n mask and n x n scores."""
    b, n, h, d = q.shape
    rows, columns = means(q, k, causal)
    row = rows @ module.query_scorer / math.sqrt(module.scorer_dim)
    column = columns @ module.key_scorer.repeat_interleave(2, 0)
    pattern = module.choose(*module.features(q, k, causal), causal)
    gate = row @ column.transpose(-1, -2)
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(d) + gate
    scores = scores.masked_fill(~pattern.to_dense().view(b, h, n, n), -math.inf)
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v)


@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_a_gated_dense_softmax(is_causal: bool) -> None:
    module, (q, k, v) = make().eval(), tensors()
    out, expected = module(q, k, v, is_causal), dense(module, q, k, v, is_causal)
    assert_close(out, expected, torch.float64)
    leaves = (q, k, v, module.query_scorer, module.key_scorer)
    assert_same_gradients(out, expected, leaves, torch.float64)
    assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(module(q, k, v).square().sum(), leaves))


def test_learns_to_keep_the_far_block_that_matters() -> None:
    """One block of the past carries the answer and a mark in its keys; the scorer learns to keep it."""
    torch.manual_seed(0)
    b, n, h, d, size = 4, 512, 2, 16, 16
    blocks = n // size
    config = SparsePatternConfig("adaptive", 3 / blocks, size)
    module = Adaptive(sparse_config=config, num_heads=h, head_dim=d, scorer_dim=8)
    mark, asks = (torch.nn.functional.normalize(torch.randn(h, d), dim=-1) for _ in range(2))

    def batch() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k, v = (torch.randn(b, n, h, d) for _ in range(3))
        where, answer = torch.randint(blocks, (b,)), torch.randn(b, h, d)
        for i, j in enumerate(where.tolist()):
            k[i, j * size : (j + 1) * size] += 1.5 * mark
            v[i, j * size : (j + 1) * size] = answer[i]
        return q + 2 * asks, k, v, where, answer

    def share_of_rows() -> float:
        module.eval()
        shares = []
        for _ in range(8):
            q, k, _, where, _ = batch()
            layout = module.choose(*module.features(q, k)).to_layout().view(b, h, blocks, blocks)
            shares += [layout[i, :, :, j].float().mean().item() for i, j in enumerate(where.tolist())]
        module.train()
        return sum(shares) / len(shares)

    before = share_of_rows()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    for step in range(80):
        module.anneal(step / 80)
        q, k, v, _, answer = batch()
        loss = (module(q, k, v) - answer[:, None]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before < 0.6
    assert share_of_rows() >= 0.95


def modules() -> list[BlockSparseDilatedAttention]:
    """Without and with a scorer of their own."""
    return [BlockSparseDilatedAttention(sparse_config=CONFIG).eval(), make().eval()]


of_each = pytest.mark.parametrize("module", modules(), ids=lambda module: type(module).__name__)


@of_each
@pytest.mark.parametrize("position", [1, 15, 16, 17, 40, 89])
def test_the_future_cannot_change_the_past(module: BlockSparseDilatedAttention, position: int) -> None:
    tensors_ = [x.detach() for x in tensors()]
    out = module(*tensors_, True)
    for i in range(3):
        for value in (50.0, math.nan):
            changed = [x.clone() for x in tensors_]
            changed[i][:, position:] = value
            assert torch.equal(module(*changed, True)[:, :position], out[:, :position])


@of_each
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_a_mask_hides_does_not_matter(module: BlockSparseDilatedAttention, is_causal: bool) -> None:
    q, k, v = (x.detach() for x in tensors())
    mask = torch.ones(2, 90, dtype=torch.bool)
    mask[0, 50:], mask[1, 60:] = False, False
    out = module(q, k, v, is_causal, mask)
    other = [torch.where(mask[:, :, None, None], x, math.nan) for x in (k, v)]
    other_q = torch.where(mask[:, :, None, None], q, 7.0)
    assert torch.equal(module(other_q, *other, is_causal, mask)[mask], out[mask])
    short = module(*(x[:1, :50] for x in (q, k, v)), is_causal)
    if is_causal:  # a shorter sequence has another budget; under a causal mask the first rows keep all
        assert_close(out[:1, :16], short[:, :16], torch.float64)


def test_weights_are_of_one_pattern_and_without_dropout() -> None:
    q, k, _ = (x.detach() for x in tensors())
    module = make(0.5, dropout=0.5).train()
    weights = module.attention_weights(q, k)
    assert (weights.sum(-1) - 1).abs().max() < 1e-12


def test_noise_only_in_training_and_annealed_away() -> None:
    module, (q, k, _) = make(0.5), tensors()
    features = module.features(q, k)

    def chosen() -> set[str]:
        return {module.choose(*features).key for _ in range(5)}

    assert len(chosen()) > 1
    assert len({module.eval().choose(*features).key for _ in range(3)}) == 1
    module.train()
    assert (module.temperature, module.progress.item()) == (1.0, 0.0)
    module.anneal(0.5)
    assert module.temperature == pytest.approx(0.05**0.5)
    module.anneal(1.0)
    assert module.temperature == pytest.approx(0.05)
    cold = make(0.2, final_temperature=0.0)
    cold.anneal(1.0)
    assert cold.temperature == 0.0
    for bad in (-0.1, 1.1):
        with pytest.raises(ValueError, match="progress must lie between 0 and 1"):
            module.anneal(bad)


def test_sizes_from_the_first_call_and_saved_state() -> None:
    first = lazy(scorer_dim=3)
    q, k, v = (x.detach().float() for x in tensors())
    first(q, k, v)
    assert (first.query_scorer.shape, first.key_scorer.shape) == ((4, 8, 3), (2, 8, 3))
    first.anneal(0.25)
    twins = [lazy(scorer_dim=3), lazy(**SIZES)]
    for twin in twins:
        twin.load_state_dict(first.state_dict())
    for twin in (*twins, copy.deepcopy(first)):
        assert torch.equal(twin.eval()(q, k, v), first.eval()(q, k, v))
        assert twin.progress.item() == 0.25
    with pytest.raises(ValueError, match=r"made for \(4, 8\) heads and features, got \(3, 8\)"):
        first(q[:, :, :3], k[:, :, :1], v[:, :, :1])


def test_autocast() -> None:
    q, k, v = (x.detach().float() for x in tensors())
    for module in (modules()[0], make().float().eval()):
        expected = module(q, k, v)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(q, k, v)
            assert module(q.bfloat16(), k, v).dtype == out.dtype == torch.bfloat16
        assert (out.float() - expected).abs().max() < 0.1


@pytest.mark.parametrize("scale", [3.0, 0.3, None, 1e-4, 0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_that_of_plain_attention(dtype: torch.dtype, scale: float | None) -> None:
    """The gate must not cost the scores their precision."""
    config = SparsePatternConfig("adaptive", 1.0, 16)
    low = [x.detach().mul(2).to(dtype) for x in tensors()]
    gated = make(1.0, softmax_scale=scale).eval()
    plain = BlockSparseDilatedAttention(sparse_config=config, softmax_scale=scale)
    gated_error, plain_error = (
        (module(*low).double() - module(*(x.double() for x in low))).abs().max() for module in (gated, plain)
    )
    assert gated_error < 4 * plain_error + torch.finfo(dtype).eps


def test_first_call_in_inference_mode_or_in_error_spoils_nothing() -> None:
    (q, k, v), module = (x.detach().float() for x in tensors()), lazy()
    with pytest.raises(ValueError, match="heads of q must be a multiple of those of k and v, got 3 and 2"):
        module(q[:, :, :3], k, v)
    with torch.inference_mode():
        module(q, k, v)
    module(q, k, v).sum().backward()
    assert module.query_scorer.grad is not None


def test_the_first_call_makes_weights_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread makes them, another waits, or else sees none."""
    (q, k, v), module = tensors(), lazy().eval()
    is_making, second = threading.Event(), []
    orthogonal = nn.init.orthogonal_

    def slow(weights: Tensor, gain: float) -> Tensor:
        is_making.set()
        second[0].join(0.1)  # time for the other thread to go on, were it let
        return orthogonal(weights, gain)

    def call() -> None:
        is_making.wait()
        outs.append(module(q, k, v))

    outs: list[Tensor] = []
    second.append(threading.Thread(target=call))
    monkeypatch.setattr(nn.init, "orthogonal_", slow)
    second[0].start()
    first = module(q, k, v)
    second[0].join()
    assert torch.equal(first, outs[0])


def test_made_in_half_precision_on_meta_or_as_declared() -> None:
    q, k, v = (x.detach().half() for x in tensors())
    half = lazy(dtype=torch.float16)
    assert half(q, k, v).dtype == half.query_scorer.dtype == torch.float16
    with torch.device("meta"):
        module = lazy(**SIZES)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert module.progress.item() == 0.0
    assert module(q.float(), k.float(), v.float()).isfinite().all()


def test_empty_batch() -> None:
    q, k, v = (x.detach()[:0] for x in tensors())
    for module in modules():
        assert module(q, k, v).shape == (0, 90, 4, 8)


def test_first_call_from_several_threads() -> None:
    q, k, v = tensors()
    for _ in range(5):
        module = lazy().eval()

        def call(number: int, module: Adaptive = module) -> Tensor:
            if number % 2:
                module.features(q, k)
            return module(q, k, v)

        for out in in_threads(call, 6):
            assert torch.equal(out, module(q, k, v))
        assert module.query_scorer.data_ptr() != module.key_scorer.data_ptr()
