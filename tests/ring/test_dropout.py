"""Dropout across ranks: the backward pass draws the masks of the forward pass, and ranks draw their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import BlockPattern, ring_block_sparse_attention, ring_dilated_attention
from support.executions import packed
from support.ranks import run_ranks

LENGTHS = (13, 9, 11)
LAYOUT = torch.rand(9, 9, generator=torch.Generator().manual_seed(5)) < 0.7
KINDS: dict[str, Callable[..., Tensor]] = {
    "ring": partial(ring_dilated_attention, segment_lengths=[8, 33], dilation_rates=[1, 2], strategy="ring"),
    "ulysses": partial(ring_dilated_attention, segment_lengths=[33], dilation_rates=[1], strategy="ulysses"),
    "blocks": partial(ring_block_sparse_attention, pattern=BlockPattern.from_layout(LAYOUT, 33, 4)),
}


def check(rank: int, kind: str, workspace_bytes: int) -> list[float]:
    rng = torch.Generator().manual_seed(rank)
    q, k, v, change, weight = (
        torch.randn(2, LENGTHS[rank], 3, 4, generator=rng, dtype=torch.float64) for _ in range(5)
    )

    def attend(v: Tensor) -> Tensor:
        torch.manual_seed(7)  # the same on all ranks
        options = packed({"dropout_p": 0.4, "workspace_bytes": workspace_bytes, "timeout": 30.0})
        return KINDS[kind](q, k, v, **options)

    values = v.clone().requires_grad_()
    out = attend(values)
    assert torch.equal(out, attend(v))
    gradient = torch.autograd.grad(out, values, weight)[0]
    # Linear in v: the sum over all ranks of what a change of all values does is known from the gradients.
    moved = ((attend(v + change) - out.detach()) * weight).sum()
    plain = KINDS[kind](q, k, torch.ones_like(v), timeout=30.0)
    dropped = attend(torch.ones_like(v)) * (plain.abs() > 0)
    return [float(moved), float((gradient * change).sum()), *dropped[0, :4, 0, 0].tolist()]


def alike(rank: int, kind: str) -> Tensor:
    """What is kept of the same inputs on every rank."""
    x = torch.ones(1, 11, 3, 4, dtype=torch.float64)
    torch.manual_seed(7)
    return KINDS[kind](x, x, x, dropout_p=0.4, timeout=30.0)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_backward_has_the_masks_of_forward(kind: str) -> None:
    for workspace_bytes in (2**25, 2000):
        results = run_ranks(3, check, kind, workspace_bytes)
        moved, predicted = (sum(row[i] for row in results) for i in (0, 1))
        assert abs(moved - predicted) < 1e-9 * max(1.0, abs(moved))
        assert any(abs(value - 1.0) > 1e-3 for row in results for value in row[2:])  # something was dropped


@pytest.mark.parametrize("kind", ["ring", "blocks"])
def test_ranks_draw_their_own_masks(kind: str) -> None:
    first, second, third = run_ranks(3, alike, kind)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
