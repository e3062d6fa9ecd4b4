"""Merging partial softmaxes: any split of the keys, in any order, gives the softmax over all of them."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dilated_attention_pytorch.kernels.merge import add_null_keys, merge_
from support.tolerances import assert_close


def partial(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


@settings(max_examples=60)
@given(
    st.permutations(range(4)),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
    st.sampled_from([1.0, 100.0, 3000.0]),
    st.integers(0, 99),
)
def test_order_and_split_do_not_matter(order: list[int], sizes: list[int], spread: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(7, sum(sizes), generator=rng, dtype=torch.float64) * spread
    v = torch.randn(sum(sizes), 3, generator=rng, dtype=torch.float64)
    parts = list(zip(scores.split(sizes, -1), v.split(sizes), strict=True))
    out, lse = torch.zeros(7, 3, dtype=torch.float64), torch.full((7,), -math.inf, dtype=torch.float64)
    for i in order:
        merge_(out, lse, *partial(*parts[i]))
    expected, expected_lse = partial(scores, v)
    assert_close(out, expected, torch.float64)
    assert_close(lse, expected_lse, torch.float64)


def test_empty_rows_stay_empty_and_add_nothing() -> None:
    out, lse = torch.zeros(2, 3), torch.tensor([-math.inf, 1.0])
    merge_(out, lse, torch.zeros(2, 3), torch.full((2,), -math.inf))
    assert torch.equal(out, torch.zeros(2, 3))
    assert torch.equal(lse, torch.tensor([-math.inf, 1.0]))


def test_nan_reaches_the_merged_row_only() -> None:
    out, lse = torch.zeros(2, 3), torch.zeros(2)
    merge_(out, lse, torch.ones(2, 3), torch.tensor([math.nan, 0.0]))
    assert out[0].isnan().all()
    assert torch.equal(out[1], torch.full((3,), 0.5))


def test_null_keys_equal_zero_keys() -> None:
    scores, v = torch.randn(5, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    padded = torch.cat((scores, torch.zeros(5, 2, dtype=torch.float64)), -1)
    expected, expected_lse = partial(padded, torch.cat((v, torch.zeros(2, 3, dtype=torch.float64))))
    out, lse = add_null_keys(*partial(scores, v), 2)
    assert_close(out, expected, torch.float64)
    assert_close(lse, expected_lse, torch.float64)
