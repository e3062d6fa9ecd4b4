"""Block-sparse attention against a dense masked softmax, and what it promises besides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import functional as F

from dilated_attention_pytorch import (
    BlockPattern,
    Execution,
    SparsePatternConfig,
    block_sparse_attention,
    build_block_pattern,
)
from dilated_attention_pytorch.core.pattern_cache import get_block_pattern_cache
from dilated_attention_pytorch.plan import Shape, block_sparse, plan_blocks
from dilated_attention_pytorch.reference import block_sparse_attention_reference
from support.block_configurations import BlockConfiguration, block_configurations
from support.exactness import check_call
from support.executions import packed
from support.tolerances import assert_close, assert_same_gradients

STRUCTURED = ("local_window", "dilated_sparse", "global_local", "strided", "hierarchical")


@pytest.fixture(autouse=True, scope="module")
def _short_joined_rows() -> Iterator[None]:
    """Rows are joined at the lengths that the search draws, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sparse, "JOINED_ROWS", 48)
        yield


def check_against_reference(config: BlockConfiguration, dtype: torch.dtype, kernel: str = "auto") -> None:
    pattern = config.pattern()
    check_call(
        config,
        dtype,
        partial(block_sparse_attention, pattern=pattern),
        partial(block_sparse_attention_reference, mask=pattern.to_dense()),
        execution=Execution(kernel, config.workspace_bytes, config.memory),
    )


@settings(max_examples=250)
@given(block_configurations())
def test_float64(config: BlockConfiguration) -> None:
    check_against_reference(config, torch.float64)


@settings(max_examples=150)
@given(block_configurations())
def test_float32(config: BlockConfiguration) -> None:
    check_against_reference(config, torch.float32)


@settings(max_examples=60)
@given(block_configurations(max_n=200))
def test_bfloat16(config: BlockConfiguration) -> None:
    check_against_reference(config, torch.bfloat16)


@settings(max_examples=60)
@given(block_configurations(max_n=200))
def test_float16(config: BlockConfiguration) -> None:
    check_against_reference(config, torch.float16)


@settings(max_examples=40)
@given(block_configurations(max_n=200))
def test_eager_kernel(config: BlockConfiguration) -> None:
    check_against_reference(config, torch.float64, kernel="eager")


def qkv(n: int = 75, h: int = 4, h_kv: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, n, heads, 8, dtype=dtype) for heads in (h, h_kv, h_kv)]


def random_pattern(n: int = 75, size: int = 8, layouts: int = 1, density: float = 0.4) -> BlockPattern:
    blocks = -(-n // size)
    return BlockPattern.from_layout(torch.rand(layouts, blocks, blocks) < density, n, size)


def run_with_gradients(tensors: list[Tensor], pattern: BlockPattern, **options: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = block_sparse_attention(*leaves, pattern, return_lse=True, **packed(options))
    loss = out.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sin().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def visible(pattern: BlockPattern, is_causal: bool, h: int, b: int) -> Tensor:
    """(b, h, query, key)"""
    seen = pattern.to_dense()
    seen = seen.tril() if is_causal else seen
    n = pattern.n
    return seen.view(b, h, n, n) if len(pattern) == b * h else seen.expand(b, h, n, n)


@pytest.mark.parametrize("kind", ["local_window", "global_local", "hierarchical"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("h_kv", [1, 2])
def test_joined_neighbours(kind: Any, causal: bool, h_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks at the length at which they are joined in use."""
    monkeypatch.setattr(block_sparse, "JOINED_ROWS", 512)
    n = 2600
    pattern = build_block_pattern(SparsePatternConfig(kind, 0.8, 16), n, 2, is_causal=causal)
    plan = plan_blocks(pattern, Shape(1, n, 2, h_kv, 8), itemsize=8, workspace_bytes=2**20)
    assert int(plan.column("count").max()) == 32 * 16
    tensors = [x[:1].requires_grad_() for x in qkv(n, 2, h_kv)]
    mask = torch.rand(1, n) > 0.1
    options: Any = {"is_causal": causal, "key_mask": mask}
    execution = Execution(workspace_bytes=2**20, use_pattern_cache=False)
    out = block_sparse_attention(*tensors, pattern, execution=execution, **options)
    expected = block_sparse_attention_reference(*tensors, pattern.to_dense(), **options)
    assert isinstance(expected, Tensor)
    assert_close(out, expected, torch.float64)
    assert_same_gradients(out, expected, tensors, torch.float64)


def test_a_pattern_takes_what_its_own_mask_means_from_the_reference() -> None:
    """The reference's layouts, checked by hand: batch 1, head 1 alone sees its second layout."""
    q, k, v = (torch.randn(2, 3, 2, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.zeros(4, 3, 3, dtype=torch.bool)
    mask[3, 1, 2] = True
    out, lse = block_sparse_attention_reference(q, k, v, mask, return_lse=True)
    expected = torch.zeros_like(out)
    expected[1, 1, 1] = v[1, 2, 1]
    assert torch.equal(out, expected)
    assert lse.isfinite().nonzero().tolist() == [[1, 1, 1]]
    assert_close(lse[1, 1, 1], q[1, 1, 1] @ k[1, 2, 1] / 2, torch.float64)
    with pytest.raises(ValueError, match="1, 2 or 2 x 2 layouts, got 3"):
        block_sparse_attention_reference(q, k, v, mask[:3])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [*STRUCTURED, "random", "adaptive"])
def test_ratio_one_is_dense_attention(kind: str, causal: bool) -> None:
    tensors = [x.requires_grad_() for x in qkv(131)]
    content = {"query": tensors[0], "key": tensors[1]} if kind == "adaptive" else {}
    config = {"pattern_type": kind, "sparsity_ratio": 1.0, "block_size": 16}
    pattern = build_block_pattern(config, 131, 4, is_causal=causal, **content)
    out = block_sparse_attention(*tensors, pattern, is_causal=causal)
    dense = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    assert_close(out, dense, torch.float64)
    assert_same_gradients(out, dense, tensors, torch.float64)


@pytest.mark.parametrize("layouts", [1, 4, 8])
@pytest.mark.parametrize("value", [3.0, -1e4, 1e38, math.nan, math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_the_future_cannot_change_the_past(which: str, value: float, layouts: int) -> None:
    tensors = dict(zip("qkv", qkv(dtype=torch.float32), strict=True))
    pattern = random_pattern(layouts=layouts)
    for workspace_bytes in (1, 2**22):
        options = {"is_causal": True, "execution": Execution(workspace_bytes=workspace_bytes)}
        before = block_sparse_attention(*tensors.values(), pattern, **options)
        for token in (1, 8, 43, 74):
            changed = {name: x.clone() for name, x in tensors.items()}
            changed[which][:, token] = value
            after = block_sparse_attention(*changed.values(), pattern, **options)
            assert torch.equal(before[:, :token], after[:, :token])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layouts", [1, 4, 8])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nonfinite_inputs_reach_exactly_the_outputs_that_depend_on_them(
    which: str, bad: float, layouts: int, causal: bool
) -> None:
    tensors = dict(zip("qkv", qkv(h_kv=4, dtype=torch.float32), strict=True))
    pattern = random_pattern(layouts=layouts)
    clean = block_sparse_attention(*tensors.values(), pattern, is_causal=causal)
    seen = visible(pattern, causal, 4, 2)
    for token in (0, 9, 50, 74):
        spoilt = {name: x.clone() for name, x in tensors.items()}
        spoilt[which][1, token, 3] = bad
        out = block_sparse_attention(*spoilt.values(), pattern, is_causal=causal)
        reached = torch.zeros(2, 75, 4, dtype=torch.bool)
        if which == "q":
            reached[1, token, 3] = seen[1, 3, token].any()
        else:
            reached[1, :, 3] = seen[1, 3, :, token]
        if which == "k" and bad == math.inf:  # a score of -inf is a weight of 0: some rows stay finite
            reached &= ~out.isfinite().all(-1)
        assert torch.equal(~out.isfinite().all(-1), reached)
        assert_close(out[~reached], clean[~reached], torch.float32)


def test_hidden_keys_may_hold_anything() -> None:
    q, k, v = qkv()
    mask = torch.rand(2, 75) > 0.4
    pattern = random_pattern()
    expected = block_sparse_attention(q, k, v, pattern, key_mask=mask)
    k, v = (x.masked_fill(~mask[..., None, None], math.nan) for x in (k, v))
    assert torch.equal(block_sparse_attention(q, k, v, pattern, key_mask=mask), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_without_keys_give_zeros_and_take_no_gradient(causal: bool) -> None:
    layout = torch.ones(10, 10, dtype=torch.bool)
    layout[[0, 4, 9]] = False  # the last one is a partial block
    layout[:, 7] = False
    pattern = BlockPattern.from_layout(layout, 75, 8)
    q, k, v = (x.requires_grad_() for x in qkv())
    out, lse = block_sparse_attention(q, k, v, pattern, is_causal=causal, return_lse=True)
    is_empty = torch.isin(torch.arange(75) // 8, torch.tensor([0, 4, 9]))
    assert not out[:, is_empty].any()
    assert torch.equal(lse == -math.inf, is_empty.expand(2, 4, 75))
    (out.square().sum() + lse[..., ~is_empty].sum()).backward()
    assert not q.grad[:, is_empty].any()
    assert q.grad[:, ~is_empty].abs().sum((-1, -2)).count_nonzero() >= 2 * (~is_empty).sum() - 2
    for x in (k, v):
        assert x.grad.isfinite().all()
        assert not x.grad[:, 56:64].any()


def test_a_pattern_without_a_block() -> None:
    tensors = [x.requires_grad_() for x in qkv()]
    pattern = BlockPattern.from_layout(torch.zeros(10, 10, dtype=torch.bool), 75, 8)
    out, lse = block_sparse_attention(*tensors, pattern, return_lse=True)
    assert not out.any()
    assert (lse == -math.inf).all()
    out.sum().backward()
    assert not any(x.grad.any() for x in tensors)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layouts", [1, 4, 8])
def test_the_workspace_changes_only_the_rounding(layouts: int, causal: bool) -> None:
    tensors, pattern = qkv(), random_pattern(layouts=layouts)
    mask = torch.rand(2, 75) > 0.3
    options = {"is_causal": causal, "key_mask": mask}
    first, *others = (
        run_with_gradients(tensors, pattern, workspace_bytes=workspace_bytes, **options)
        for workspace_bytes in (1, 5_000, 40_000, 2**23)
    )
    for got in others:
        for a, b in zip(got, first, strict=True):
            assert_close(a, b, torch.float64)


def test_memory_and_cache_change_no_bit() -> None:
    tensors, pattern = qkv(), random_pattern(layouts=4)
    cache = get_block_pattern_cache()
    cache.clear()
    misses = cache.get_stats()["misses"]
    expected = run_with_gradients(tensors, pattern)
    assert cache.get_stats()["misses"] == misses + 1  # the backward finds what the forward has built
    hits = cache.get_stats()["hits"]
    again = run_with_gradients(tensors, pattern)
    assert cache.get_stats()["hits"] == hits + 2
    assert len(cache) == 1
    cache.clear()
    uncached = run_with_gradients(tensors, pattern, use_pattern_cache=False)
    assert len(cache) == 0
    pooled = [run_with_gradients(tensors, pattern, memory="pool") for _ in range(2)]
    for got in (again, uncached, *pooled):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_patterns_that_differ_share_no_schedule() -> None:
    """Same sizes, same number of blocks, other content: a cache by shape alone would mix them up."""
    tensors = qkv(64)
    eye = torch.eye(8, dtype=torch.bool)
    for layout in (eye, eye.roll(1, 1), eye.flip(0)):
        pattern = BlockPattern.from_layout(layout, 64, 8)
        expected = block_sparse_attention_reference(*tensors, pattern.to_dense())
        assert_close(block_sparse_attention(*tensors, pattern), expected, torch.float64)


def test_one_pattern_serves_any_batch_and_number_of_heads() -> None:
    pattern = random_pattern()
    for b, h, h_kv in ((1, 1, 1), (3, 6, 2), (2, 4, 4), (1, 12, 1)):
        tensors = [torch.randn(b, 75, heads, 4, dtype=torch.float64) for heads in (h, h_kv, h_kv)]
        expected = block_sparse_attention_reference(*tensors, pattern.to_dense())
        assert_close(block_sparse_attention(*tensors, pattern), expected, torch.float64)


def test_a_full_pattern_under_a_causal_mask_is_its_lower_triangle() -> None:
    tensors, pattern = qkv(), random_pattern()
    out = block_sparse_attention(*tensors, pattern, is_causal=True)
    assert torch.equal(out, block_sparse_attention(*tensors, pattern.causal(), is_causal=True))


def test_inputs_and_pattern_are_left_alone() -> None:
    tensors, pattern = qkv(), random_pattern()
    copies = [x.clone() for x in (*tensors, pattern.starts, pattern.columns)]
    run_with_gradients(tensors, pattern, is_causal=True)
    for x, copy in zip((*tensors, pattern.starts, pattern.columns), copies, strict=True):
        assert torch.equal(x, copy)


def test_an_empty_batch_is_an_empty_result() -> None:
    for pattern in (random_pattern(20, 4), random_pattern(20, 4, layouts=2)):
        x = torch.empty(0, 20, 2, 4, requires_grad=True)
        out = block_sparse_attention(x, x, x, pattern)
        out.sum().backward()
        assert out.shape == x.shape == x.grad.shape


def test_several_threads_give_the_same_results() -> None:
    tensors, pattern = qkv(400, dtype=torch.float32), random_pattern(400, 64, density=0.5)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(run_with_gradients(tensors, pattern))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert_close(a, b, torch.float32)


@pytest.mark.parametrize("workspace_bytes", [1, 2**22])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layouts", [1, 2])
def test_gradcheck(layouts: int, causal: bool, workspace_bytes: int) -> None:
    pattern = random_pattern(7, 3, layouts, density=0.6)
    tensors = [torch.randn(1, 7, h, 2, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1)]
    mask = torch.tensor([[True, False, True, True, True, False, True]])

    def attention(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = block_sparse_attention(
            *tensors,
            pattern,
            is_causal=causal,
            key_mask=mask,
            return_lse=True,
            execution=Execution(workspace_bytes=workspace_bytes),
        )
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(attention, tensors)


def identity_values(n: int, h: int) -> Tensor:
    """Values that make the outputs the probabilities themselves."""
    return torch.eye(n, dtype=torch.float64)[None, :, None].repeat(1, 1, h, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("workspace_bytes", [1, 2**22])
def test_dropout_acts_on_probabilities(workspace_bytes: int, causal: bool) -> None:
    n, p = 60, 0.3
    q, k = (torch.randn(1, n, 2, n, dtype=torch.float64) for _ in range(2))
    v, pattern = identity_values(n, 2), random_pattern(n, 8, layouts=2, density=0.6)
    options = packed({"is_causal": causal, "workspace_bytes": workspace_bytes, "return_lse": True})
    plain, plain_lse = block_sparse_attention(q, k, v, pattern, **options)
    torch.manual_seed(3)
    dropped, lse = block_sparse_attention(q, k, v, pattern, dropout_p=p, **options)
    torch.manual_seed(3)
    again, _ = block_sparse_attention(q, k, v, pattern, dropout_p=p, **options)
    assert torch.equal(dropped, again)
    assert not torch.equal(dropped, block_sparse_attention(q, k, v, pattern, dropout_p=p, **options)[0])
    assert_close(lse, plain_lse, torch.float64)
    kept = dropped != 0
    assert_close(dropped[kept], (plain / (1 - p))[kept], torch.float64)
    share = kept.sum().item() / (plain != 0).sum().item()
    assert abs(share - (1 - p)) < 0.05


def test_dropout_has_the_right_expectation() -> None:
    q, k = (torch.randn(1, 20, 2, 20, dtype=torch.float64) for _ in range(2))
    v, pattern = identity_values(20, 2), random_pattern(20, 4, density=0.7)
    plain = block_sparse_attention(q, k, v, pattern)
    draws = [block_sparse_attention(q, k, v, pattern, dropout_p=0.5) for _ in range(400)]
    mean = torch.stack(draws).mean(0)
    # The mean of a probability P that is 0 or 2 P, over 400 draws, deviates by P / 20.
    assert ((mean - plain).abs() <= 5 * plain / 20).all()


def test_dropout_draws_anew_for_every_panel_row_and_head() -> None:
    q = torch.zeros(2, 64, 4, 16, dtype=torch.float64)
    v = torch.eye(16, dtype=torch.float64).repeat(4, 1)[None, :, None].expand(2, 64, 4, 16)
    eye = torch.eye(4, dtype=torch.bool)
    for layout in (eye, eye.expand(4, 4, 4), eye.expand(8, 4, 4)):
        pattern = BlockPattern.from_layout(layout, 64, 16)
        for workspace_bytes in (1, 2**23):
            execution = Execution(workspace_bytes=workspace_bytes)
            out = block_sparse_attention(q, q, v, pattern, dropout_p=0.5, execution=execution)
            parts = [part for head in out.transpose(1, 2).flatten(0, 1) for part in head.split(16)]
            assert len({tuple((part != 0).flatten().tolist()) for part in parts}) == len(parts) == 32


@pytest.mark.parametrize(("layouts", "workspace_bytes"), [(1, 1), (1, 600), (2, 1), (2, 2**22)])
def test_dropout_gradients_are_those_of_the_drawn_mask(layouts: int, workspace_bytes: int) -> None:
    pattern = random_pattern(8, 3, layouts, density=0.8)
    tensors = [torch.randn(1, 8, h, 2, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1)]

    def attention(*tensors: Tensor) -> Tensor:
        torch.manual_seed(5)
        options = packed({"dropout_p": 0.4, "is_causal": True, "workspace_bytes": workspace_bytes})
        return block_sparse_attention(*tensors, pattern, **options)

    assert torch.autograd.gradcheck(attention, tensors)


def test_dropout_of_everything_gives_zeros() -> None:
    tensors = [x.requires_grad_() for x in qkv()]
    out = block_sparse_attention(*tensors, random_pattern(), dropout_p=1.0)
    assert not out.any()
    out.sum().backward()
    assert not any(x.grad.any() for x in tensors)


@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_autocast_does_not_lower_the_precision_inside(kernel: str) -> None:
    tensors, pattern = [x.bfloat16() for x in qkv()], random_pattern()
    expected = run_with_gradients(tensors, pattern, kernel=kernel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run_with_gradients(tensors, pattern, kernel=kernel)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
