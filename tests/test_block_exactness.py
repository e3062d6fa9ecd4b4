"""Block-sparse attention against a dense masked softmax, and what it promises besides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, get_args

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
from dilated_attention_pytorch.spec import PatternType
from support.block_configurations import BlockConfiguration, block_configurations
from support.exactness import check_call
from support.executions import packed
from support.tolerances import assert_close, assert_same_gradients


@pytest.fixture(autouse=True, scope="module")
def _short_joined_rows() -> Iterator[None]:
    """Rows are joined at the lengths that the search draws, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sparse, "JOINED_ROWS", 48)
        yield


@pytest.mark.parametrize(
    ("dtype", "kernel", "examples", "max_n"),
    [
        (torch.float64, "auto", 250, 500),
        (torch.float32, "auto", 150, 500),
        (torch.bfloat16, "auto", 60, 200),
        (torch.float16, "auto", 60, 200),
        (torch.float64, "eager", 40, 200),
    ],
)
def test_equals_the_definition(dtype: torch.dtype, kernel: str, examples: int, max_n: int) -> None:
    @settings(max_examples=examples)
    @given(block_configurations(max_n, tiles=True))
    def search(config: BlockConfiguration) -> None:
        check_call(
            config,
            dtype,
            partial(block_sparse_attention, pattern=config.pattern),
            partial(block_sparse_attention_reference, mask=config.pattern.to_dense()),
            execution=Execution(kernel, config.workspace_bytes, config.memory),
        )

    search()


def test_the_definition_by_hand() -> None:
    """The reference's layouts: batch 1, head 1 alone sees its second layout."""
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


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


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
    options: Any = {"is_causal": causal, "key_mask": torch.rand(1, n) > 0.1}
    execution = Execution(workspace_bytes=2**20, use_pattern_cache=False)
    out = block_sparse_attention(*tensors, pattern, execution=execution, **options)
    expected = block_sparse_attention_reference(*tensors, pattern.to_dense(), **options)
    assert_close(out, expected, torch.float64)
    assert_same_gradients(out, expected, tensors, torch.float64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", get_args(PatternType))
def test_ratio_one_is_dense_attention(kind: str, causal: bool) -> None:
    tensors = [x.requires_grad_() for x in qkv(131)]
    content = {"query": tensors[0], "key": tensors[1]} if kind == "adaptive" else {}
    config = {"pattern_type": kind, "sparsity_ratio": 1.0, "block_size": 16}
    pattern = build_block_pattern(config, 131, 4, is_causal=causal, **content)
    out = block_sparse_attention(*tensors, pattern, is_causal=causal)
    heads_first = (x.transpose(1, 2) for x in tensors)
    dense = F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)
    assert_close(out, dense, torch.float64)
    assert_same_gradients(out, dense, tensors, torch.float64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layouts", [1, 4, 8])
@pytest.mark.parametrize("value", [-1e4, 1e38, math.nan, math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_inputs_reach_exactly_the_outputs_that_depend_on_them(
    which: str, value: float, layouts: int, causal: bool
) -> None:
    """So the future cannot change a bit of the past, and what is not finite is not hidden."""
    tensors = dict(zip("qkv", qkv(h_kv=4, dtype=torch.float32), strict=True))
    pattern = random_pattern(layouts=layouts)
    seen = pattern.to_dense()[{1: 0, 4: 3, 8: 7}[layouts]]  # of batch 1 and head 3
    seen = seen.tril() if causal else seen
    for workspace_bytes, token in ((1, 43), *product((2**22,), (0, 1, 9, 43, 74))):
        options = packed({"is_causal": causal, "workspace_bytes": workspace_bytes})
        clean = block_sparse_attention(*tensors.values(), pattern, **options)
        changed = {name: x.clone() for name, x in tensors.items()}
        changed[which][1, token, 3] = value
        out = block_sparse_attention(*changed.values(), pattern, **options)
        reached = torch.zeros(2, 75, 4, dtype=torch.bool)
        if which == "q":
            reached[1, token, 3] = seen[token].any()
        else:
            reached[1, :, 3] = seen[:, token]
        assert torch.equal(out[~reached], clean[~reached])
        if math.isnan(value) or (value == math.inf and which != "k"):  # a score of -inf is a weight of 0
            assert not out[reached].isfinite().all(-1).any()


def test_hidden_keys_may_hold_anything() -> None:
    q, k, v = qkv()
    mask = torch.rand(2, 75) > 0.4
    pattern = random_pattern()
    expected = block_sparse_attention(q, k, v, pattern, key_mask=mask)
    k, v = (x.masked_fill(~mask[..., None, None], math.nan) for x in (k, v))
    assert torch.equal(block_sparse_attention(q, k, v, pattern, key_mask=mask), expected)


def test_what_sees_no_key_is_zero_and_takes_no_gradient() -> None:
    """Rows of blocks without a key, columns that nobody sees, and a pattern without a block."""
    layout = torch.ones(10, 10, dtype=torch.bool)
    layout[[0, 4, 9]] = False  # the last one is a partial block
    layout[:, 7] = False
    for kept, causal in ((layout, False), (layout, True), (torch.zeros_like(layout), False)):
        out, lse, *gradients = run_with_gradients(
            qkv(), BlockPattern.from_layout(kept, 75, 8), is_causal=causal
        )
        is_empty = ~kept.any(1)[torch.arange(75) // 8]
        assert torch.equal(lse == -math.inf, is_empty.expand(2, 4, 75))
        assert not out[:, is_empty].any()
        assert not gradients[0][:, is_empty].any()
        for x in gradients[1:]:
            assert x.isfinite().all()
            assert not x[:, 56:64].any()


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
        assert_equal(got, expected)


def test_patterns_that_differ_share_no_plan() -> None:
    """Same sizes, same number of blocks, other content: a cache by shape alone would mix them up."""
    tensors = qkv(64)
    eye = torch.eye(8, dtype=torch.bool)
    for layout in (eye, eye.roll(1, 1), eye.flip(0)):
        pattern = BlockPattern.from_layout(layout, 64, 8)
        expected = block_sparse_attention_reference(*tensors, pattern.to_dense())
        assert_close(block_sparse_attention(*tensors, pattern), expected, torch.float64)


def test_inputs_and_pattern_are_left_alone() -> None:
    tensors, pattern = qkv(), random_pattern()
    inputs = [*tensors, pattern.starts, pattern.columns]
    copies = [x.clone() for x in inputs]
    run_with_gradients(tensors, pattern, is_causal=True)
    assert_equal(inputs, copies)


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


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("workspace_bytes", [1, 600, 2**22])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layouts", [1, 2])
def test_gradcheck(layouts: int, causal: bool, workspace_bytes: int, dropout_p: float) -> None:
    """With dropout the gradients are those of the drawn mask."""
    pattern = random_pattern(7, 3, layouts, density=0.6)
    tensors = [torch.randn(1, 7, h, 2, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1)]
    mask = torch.tensor([[True, False, True, True, True, False, True]])
    options: Any = {"is_causal": causal, "key_mask": mask, "dropout_p": dropout_p, "return_lse": True}

    def attention(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        execution = Execution(workspace_bytes=workspace_bytes)
        out, lse = block_sparse_attention(*tensors, pattern, execution=execution, **options)
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

    def drop(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        return block_sparse_attention(q, k, v, pattern, dropout_p=p, **options)

    plain, plain_lse = block_sparse_attention(q, k, v, pattern, **options)
    dropped, lse = drop(3)
    assert torch.equal(dropped, drop(3)[0])
    assert not torch.equal(dropped, drop(4)[0])
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
    # The mean of a probability P that is 0 or 2 P, over 400 draws, deviates by P / 20.
    assert ((torch.stack(draws).mean(0) - plain).abs() <= 5 * plain / 20).all()


def test_dropout_draws_anew_for_every_block_row_and_head() -> None:
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


def test_dropout_of_everything_gives_zeros() -> None:
    tensors = [x.requires_grad_() for x in qkv()]
    out = block_sparse_attention(*tensors, random_pattern(), dropout_p=1.0)
    assert not any(x.any() for x in (out, *torch.autograd.grad(out.sum(), tensors)))


@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_autocast_does_not_lower_the_precision_inside(kernel: str) -> None:
    tensors, pattern = [x.bfloat16() for x in qkv()], random_pattern()
    expected = run_with_gradients(tensors, pattern, kernel=kernel)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run_with_gradients(tensors, pattern, kernel=kernel)
    assert_equal(actual, expected)
