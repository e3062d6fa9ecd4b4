"""What the functions of attention, dilated and block-sparse, promise besides equality with the reference."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention_pytorch import (
    BlockPattern,
    Execution,
    SparsePatternConfig,
    block_sparse_attention,
    build_block_pattern,
    dilated_attention,
)
from dilated_attention_pytorch.core.pattern_cache import get_block_pattern_cache
from dilated_attention_pytorch.plan import Shape, plan_blocks
from dilated_attention_pytorch.reference import block_sparse_attention_reference, dilated_attention_reference
from dilated_attention_pytorch.spec import PatternType
from support.attentions import (
    BRANCHES,
    CAUSAL,
    EACH,
    EVERY,
    Kind,
    N,
    assert_all_close,
    qkv,
    random_pattern,
    with_gradients,
)
from support.executions import dilated
from support.tolerances import assert_close, assert_same_gradients


def assert_dense(out: Tensor, tensors: list[Tensor], causal: bool) -> None:
    """Equals scaled_dot_product_attention, and so do the gradients."""
    heads_first, dtype = (x.transpose(1, 2) for x in tensors), out.dtype
    dense = F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)
    assert_close(out, dense, dtype)
    assert_same_gradients(out, dense, tensors, dtype)


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("h", "h_kv"), [(6, 6), (6, 2)])
@pytest.mark.parametrize("n", [1, 63, 700])
def test_one_branch_of_rate_one_is_dense(n: int, h: int, h_kv: int, dtype: torch.dtype, causal: bool) -> None:
    tensors = [x.requires_grad_() for x in qkv(n, h, h_kv, dtype)]
    assert_dense(dilated_attention(*tensors, [n], [1], is_causal=causal), tensors, causal)


@CAUSAL
@pytest.mark.parametrize("kind", get_args(PatternType))
def test_a_pattern_of_ratio_one_is_dense(kind: str, causal: bool) -> None:
    tensors = [x.requires_grad_() for x in qkv(131)]
    content = {"query": tensors[0], "key": tensors[1]} if kind == "adaptive" else {}
    config = {"pattern_type": kind, "sparsity_ratio": 1.0, "block_size": 16}
    pattern = build_block_pattern(config, 131, 4, is_causal=causal, **content)
    assert_dense(block_sparse_attention(*tensors, pattern, is_causal=causal), tensors, causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [3.0, -1e4, 1e38, math.nan, math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_the_future_cannot_change_the_past(which: str, value: float, dtype: torch.dtype) -> None:
    tensors = dict(zip("qkv", qkv(600, 6, 6, dtype), strict=True))
    branches: dict[str, Any] = {"segment_lengths": (64, 250, 600), "dilation_rates": (1, 2, 5)}
    before = dilated_attention(*tensors.values(), **branches, is_causal=True)
    for token in (1, 300, 513, 599):
        changed = {name: x.clone() for name, x in tensors.items()}
        changed[which][:, token] = value
        after = dilated_attention(*changed.values(), **branches, is_causal=True)
        assert torch.equal(before[:, :token], after[:, :token])


@EVERY
@CAUSAL
@pytest.mark.parametrize("value", [-1e4, 1e38, math.nan, math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_inputs_reach_exactly_the_outputs_that_depend_on_them(
    which: str, value: float, causal: bool, attend: Kind
) -> None:
    """So the future cannot change a bit of the past, and what is not finite is not hidden."""
    tensors = dict(zip("qkv", qkv(h_kv=4, dtype=torch.float32), strict=True))
    seen = attend.seen(causal)
    for size, token in ((1, 43), *((2**22, token) for token in (0, 1, 9, 43, 74))):
        options = {"is_causal": causal, "workspace_bytes": size if attend.layouts else 2**22}
        clean = attend(*tensors.values(), **options)
        changed = {name: x.clone() for name, x in tensors.items()}
        changed[which][1, token, 3] = value
        out = attend(*changed.values(), **options)
        reached = torch.zeros(2, N, 4, dtype=torch.bool)
        if which == "q":
            reached[1, token, 3] = seen[token].any()
        else:
            reached[1, :, 3] = seen[:, token]
        assert torch.equal(out[~reached], clean[~reached])
        if math.isnan(value) or (value == math.inf and which != "k"):  # a score of -inf is a weight of 0
            assert not out[reached].isfinite().all(-1).any()


@EACH
def test_hidden_keys_may_hold_anything(attend: Kind) -> None:
    q, k, v = qkv()
    mask = torch.rand(2, N) > 0.4
    expected = attend(q, k, v, key_mask=mask)
    k, v = (x.masked_fill(~mask[..., None, None], math.nan) for x in (k, v))
    assert torch.equal(attend(q, k, v, key_mask=mask), expected)


@EACH
def test_a_sequence_whose_keys_are_all_hidden(attend: Kind) -> None:
    tensors, mask = qkv(), torch.tensor([False, True])[:, None].expand(2, N)
    out, lse, *gradients = with_gradients(attend, tensors, key_mask=mask)
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()
    assert_close(out[1:], attend(*(x[1:] for x in tensors)), torch.float64)
    for x in gradients:
        assert not x[0].any()
        assert x.isfinite().all()


def test_positions_that_no_branch_selects() -> None:
    attend = partial(dilated_attention, segment_lengths=[10], dilation_rates=[4])
    out, lse, *gradients = with_gradients(attend, qkv(20, 1, 1, torch.float32))
    selected = torch.tensor([t % 10 % 4 == 0 for t in range(20)])
    assert not out[:, ~selected].any()
    assert (lse[..., ~selected] == -math.inf).all()
    assert lse[..., selected].isfinite().all()
    for x in gradients:
        assert not x[:, ~selected].any()
        assert x[:, selected].abs().amin() > 0


def test_blocks_that_no_query_or_no_key_has() -> None:
    """Rows of blocks without a key, columns that nobody sees, and a pattern without a block."""
    layout = torch.ones(10, 10, dtype=torch.bool)
    layout[[0, 4, 9]] = False  # the last one is a partial block
    layout[:, 7] = False
    for kept, causal in ((layout, False), (layout, True), (torch.zeros_like(layout), False)):
        attend = partial(block_sparse_attention, pattern=BlockPattern.from_layout(kept, N, 8))
        out, lse, *gradients = with_gradients(attend, qkv(), is_causal=causal)
        is_empty = ~kept.any(1)[torch.arange(N) // 8]
        assert torch.equal(lse == -math.inf, is_empty.expand(2, 4, N))
        assert not out[:, is_empty].any()
        assert not gradients[0][:, is_empty].any()
        for x in gradients[1:]:
            assert x.isfinite().all()
            assert not x[:, 56:64].any()


def test_offsets_beyond_a_short_tail_select_nothing() -> None:
    tensors = qkv(18, 8, 8)  # a tail of 2 positions, offsets up to 7
    found = dilated_attention(*tensors, [16], [8], return_lse=True)
    assert_all_close(
        [dilated_attention_reference(*tensors, [16], [8], return_lse=True), found], torch.float64
    )
    assert not found[0][:, 16:, 2:].any()


def test_packed_documents_equal_separate_calls() -> None:
    tensors, bounds = [x[:1] for x in qkv(60)], [0, 1, 30, 30, 52, 60]
    out = dilated_attention(*tensors, **BRANCHES, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for lo, hi in pairwise(bounds):
        if hi > lo:
            alone = dilated_attention(*(x[:, lo:hi] for x in tensors), **BRANCHES)
            assert_close(out[:, lo:hi], alone, torch.float64)


@EACH
def test_the_workspace_changes_only_the_rounding(attend: Kind) -> None:
    tensors, sizes = qkv(300), (20_000, 200_000, 2**25)
    results = [with_gradients(attend, tensors, is_causal=True, workspace_bytes=size) for size in sizes]
    assert_all_close(results, torch.float64)


def test_many_query_heads_on_one_key_head_are_split_over_tiles() -> None:
    tensors = [torch.randn(1, 40, heads, 8, dtype=torch.float64) for heads in (12, 1, 1)]
    for causal in (False, True):
        given = {"segment_lengths": (20, 40), "dilation_rates": (1, 3), "is_causal": causal}
        split = partial(dilated_attention, execution=Execution(workspace_bytes=2**15))
        found = [with_gradients(each, tensors, **given) for each in (dilated_attention_reference, split)]
        assert_all_close(found, torch.float64)


@EACH
def test_several_threads_give_the_same_results(attend: Kind) -> None:
    tensors, before, results = qkv(1500, dtype=torch.float32), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(with_gradients(attend, tensors, is_causal=True))
    finally:
        torch.set_num_threads(before)
    assert_all_close(results, torch.float32)


@EACH
def test_inputs_are_left_alone(attend: Kind) -> None:
    inputs = [*qkv(), torch.rand(2, N) > 0.5]
    copies = [x.clone() for x in inputs]
    with_gradients(attend, inputs[:3], key_mask=inputs[3], is_causal=True)
    assert all(torch.equal(x, y) for x, y in zip(inputs, copies, strict=True))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_batch_is_an_empty_result(attend: Kind, dtype: torch.dtype) -> None:
    x = torch.empty(0, 20, 4, 4, dtype=dtype, requires_grad=True)
    out = attend(x, x, x)
    out.sum().backward()
    assert out.shape == x.shape == x.grad.shape


def test_memory_and_cache_change_no_bit() -> None:
    tensors, cache = qkv(), get_block_pattern_cache()
    attend = partial(block_sparse_attention, pattern=random_pattern(layouts=4))

    def run(**how: Any) -> list[Tensor]:
        return with_gradients(attend, tensors, execution=Execution(**how))

    cache.clear()
    misses = cache.get_stats()["misses"]
    expected = run()
    assert cache.get_stats()["misses"] == misses + 1  # the backward finds what the forward has built
    hits = cache.get_stats()["hits"]
    again = run()
    assert cache.get_stats()["hits"] == hits + 2
    assert len(cache) == 1
    cache.clear()
    uncached = run(use_pattern_cache=False)
    assert len(cache) == 0
    for got in (again, uncached, run(memory="pool"), run(memory="pool")):
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_patterns_that_differ_share_no_plan() -> None:
    """Same sizes, same number of blocks, other content: a cache by shape alone would mix them up."""
    tensors, eye = qkv(64), torch.eye(8, dtype=torch.bool)
    for layout in (eye, eye.roll(1, 1), eye.flip(0)):
        pattern = BlockPattern.from_layout(layout, 64, 8)
        expected = block_sparse_attention_reference(*tensors, pattern.to_dense())
        assert_close(block_sparse_attention(*tensors, pattern), expected, torch.float64)


@pytest.mark.parametrize("kind", ["local_window", "global_local", "hierarchical"])
@CAUSAL
@pytest.mark.parametrize("h_kv", [1, 2])
def test_joined_neighbours(kind: Any, causal: bool, h_kv: int) -> None:
    """Small blocks at the length at which they are joined in use."""
    n = 2600
    pattern = build_block_pattern(SparsePatternConfig(kind, 0.8, 16), n, 2, is_causal=causal)
    plan = plan_blocks(pattern, Shape(1, n, 2, h_kv, 8), itemsize=8, workspace_bytes=2**20)
    assert int(plan.column("count").max()) == 32 * 16
    tensors = [x[:1].requires_grad_() for x in qkv(n, 2, h_kv)]
    options: Any = {"is_causal": causal, "key_mask": torch.rand(1, n) > 0.1}
    execution = Execution(workspace_bytes=2**20, use_pattern_cache=False)
    out = block_sparse_attention(*tensors, pattern, execution=execution, **options)
    expected = block_sparse_attention_reference(*tensors, pattern.to_dense(), **options)
    assert_close(out, expected, torch.float64)
    assert_same_gradients(out, expected, tensors, torch.float64)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_detached_mixing_of_uncovered_rows_over_several_panels(p: float) -> None:
    attend = partial(dilated, segment_lengths=[16, 24], dilation_rates=[4, 5], detach_mixing=True)
    tensors, results = qkv(96, 6, 6), []
    for size in (2**14, 2**25):
        torch.manual_seed(0)
        results.append(with_gradients(attend, tensors, dropout_p=p, workspace_bytes=size))
    assert_all_close(results, torch.float64)


def test_large_gradients_of_lse_in_half_precision() -> None:
    q, k, v = (torch.randn(1, 16, 1, 16).half() for _ in range(3))
    k, found = k * 1e-3, []
    for dtype in (torch.float64, torch.float16):
        leaf = q.to(dtype).requires_grad_()
        _, lse = dilated_attention(leaf, k.to(dtype), v.to(dtype), [16], [1], return_lse=True)
        found.append([*torch.autograd.grad(lse, leaf, torch.full_like(lse, 1e5))])
    assert_all_close(found, torch.float16)


def test_a_branch_whose_scores_overflow_leaves_the_others_alone() -> None:
    q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 1, 2)
    q[0, :, 0] = torch.tensor([1e20, 1.0])
    k[0, :, 0] = torch.tensor([0.0, -50.0])
    k[0, 1::2, 0, 0] = -1e20
    out = dilated_attention(q, k, torch.ones_like(q), [1, 4], [1, 1], scale=1.0)
    assert_close(out, torch.ones_like(q), torch.float32)


@pytest.mark.parametrize("options", [{}, {"head_offsets": "blocked"}, {"head_mixing": "grouped"}])
@pytest.mark.parametrize("h_kv", [6, 2])
def test_slices_of_the_heads_join_to_the_whole(h_kv: int, options: dict[str, Any]) -> None:
    tensors = [x.requires_grad_() for x in qkv(37, 6, h_kv)]
    whole = dilated_attention(*tensors, **BRANCHES, **options)
    parts = []
    for first in (0, 3):
        keys = slice(first * h_kv // 6, (first + 3) * h_kv // 6)
        slices = (slice(first, first + 3), keys, keys)
        part = [x[:, :, heads] for x, heads in zip(tensors, slices, strict=True)]
        parts.append(dilated(*part, **BRANCHES, **options, head_slice=(first, 6)))
    assert_close(torch.cat(parts, 2), whole, torch.float64)
    assert_same_gradients(torch.cat(parts, 2), whole, tensors, torch.float64)
