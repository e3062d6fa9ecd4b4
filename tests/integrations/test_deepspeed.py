"""The local attention of DeepSpeed Ulysses: over ranks, the result is that of one process."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.integrations.deepspeed import ulysses_attention
from integrations.spread_heads import BRANCHES, inputs, one_process
from support.ranks import run_ranks


class Exchange(torch.autograd.Function):
    """Parts of dimension `scatter` for parts of dimension `gather`, as DeepSpeed's `_SeqAllToAll`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter: int, gather: int) -> Tensor:
        ctx.way = gather, scatter
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = x.tensor_split(size, scatter)
        lengths: list[Any] = [None] * size
        dist.all_gather_object(lengths, x.shape[gather])
        shapes = [list(parts[rank].shape) for _ in range(size)]
        for shape, length in zip(shapes, lengths, strict=True):
            shape[gather] = length
        counts = [math.prod(shape) for shape in shapes]
        arrived = x.new_empty(sum(counts))
        leaving = torch.cat([part.flatten() for part in parts])
        dist.all_to_all_single(arrived, leaving, counts, [part.numel() for part in parts])
        pieces = zip(arrived.split(counts), shapes, strict=True)
        return torch.cat([piece.view(shape) for piece, shape in pieces], gather)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Exchange.apply(gradient, *ctx.way), None, None


def exchanged(local_attention: Any, q: Tensor, k: Tensor, v: Tensor, batch_dim_idx: int) -> Tensor:
    """What DeepSpeed's `DistributedAttention` does around its local attention."""
    heads, tokens = 2, 1 - batch_dim_idx
    local = local_attention(*(Exchange.apply(x, heads, tokens) for x in (q, k, v)))
    return Exchange.apply(local, tokens, heads)


ULYSSES: dict[str, tuple[tuple[int, int, int, int], dict[str, Any], dict[str, Any]]] = {
    "even": ((2, 36, 6, 6), {}, {"is_causal": True}),
    "grouped queries": ((1, 44, 12, 4), {}, {"is_causal": True, "scale": 0.3}),
    "tokens first": ((2, 36, 6, 6), {"batch_dim_idx": 1}, {}),
    "blocked": ((1, 44, 10, 10), {}, {"head_offsets": "blocked"}),
    "groups of heads": ((1, 44, 8, 8), {}, {"head_mixing": "grouped", "is_causal": True}),
    "uneven heads": ((1, 44, 5, 5), {"num_heads": 5}, {"is_causal": True}),
}


def ulysses_errors(rank: int, case: str) -> list[float]:
    shape, how, options = ULYSSES[case]
    local = functools.partial(ulysses_attention, **BRANCHES, **how, **options)
    batch_dim_idx = how.get("batch_dim_idx", 0)
    part = slice(rank * shape[1] // 2, (rank + 1) * shape[1] // 2)
    shards = [x[:, part].transpose(0, batch_dim_idx).contiguous() for x in inputs(*shape)]
    leaves = [x.requires_grad_() for x in shards[:3]]
    out = exchanged(local, *leaves, batch_dim_idx)
    results = out.detach(), *torch.autograd.grad(out, leaves, shards[3])
    expected = (x[:, part] for x in one_process(*shape, **options))
    return [
        (x.transpose(0, batch_dim_idx) - y).abs().max().item() for x, y in zip(results, expected, strict=True)
    ]


@pytest.mark.parametrize("case", ULYSSES)
def test_ulysses_is_one_process(case: str) -> None:
    errors = run_ranks(2, ulysses_errors, case)
    assert max(max(row) for row in errors) < 1e-10, errors


def ulysses_messages(rank: int) -> list[str]:
    q = torch.randn(1, 10, 3, 4)
    messages = []
    for changes in (
        {"num_heads": 9},
        {"num_heads": 8},
        {"num_heads": 0},
        {"batch_dim_idx": 2},
        {"num_heads": 1},
    ):
        with pytest.raises(ValueError, match="must") as error:
            ulysses_attention(q, q, q, **BRANCHES, **changes)
        messages.append(str(error.value))
    k = torch.randn(1, 10, 1, 4)
    with pytest.raises(ValueError, match="must") as error:
        ulysses_attention(q[:, :, : 3 - rank], k, k, **BRANCHES, num_heads=5)
    messages.append(str(error.value))
    none = q[:, :, :0]
    for changes in ({"num_heads": 5}, {}):
        with pytest.raises(ValueError, match="must") as error:
            ulysses_attention(none, none, none, **BRANCHES, **changes)
        messages.append(str(error.value))
    return messages


def test_ulysses_refuses_heads_that_do_not_fit() -> None:
    first, second = run_ranks(2, ulysses_messages)
    assert second[0] == "9 heads on 2 ranks must give rank 1 4 of q, k and v, got 3 of q and 3 of k and v"
    assert first[1] == "8 heads on 2 ranks must give rank 0 4 of q, k and v, got 3 of q and 3 of k and v"
    assert first[2] == "num_heads must be a positive integer, got 0"
    assert first[3] == "batch_dim_idx must be 0 or 1, got 2"
    assert first[4] == second[4] == "num_heads must be at least one for each of 2 ranks, got 1"
    assert first[5] == "5 heads on 2 ranks must give rank 0 3 of q, k and v, got 3 of q and 1 of k and v"
    assert second[6] == "5 heads on 2 ranks must give rank 1 2 of q, k and v, got 0 of q and 0 of k and v"
    assert second[7].startswith("q must have at least one position, head and feature, got shape (1, 10, 0")


def test_ulysses_needs_a_group_and_four_dimensions() -> None:
    x = torch.randn(1, 10, 3, 4)
    with pytest.raises(RuntimeError, match=r"needs torch.distributed.init_process_group"):
        ulysses_attention(x, x, x, **BRANCHES)
    with pytest.raises(ValueError, match=r"k must have 4 dimensions, .* got \(1, 10, 12\)"):
        ulysses_attention(x, x.flatten(2), x, **BRANCHES)
    with pytest.raises(ValueError, match=r"v must have 4 dimensions, .* got list"):
        ulysses_attention(x, x, [1], **BRANCHES)


def test_ulysses_refuses_what_it_cannot_return_or_finds_out_itself() -> None:
    x = torch.randn(1, 10, 3, 4)
    with pytest.raises(ValueError, match="takes one result of its local attention, got return_lse=True"):
        ulysses_attention(x, x, x, **BRANCHES, return_lse=True)
    with pytest.raises(TypeError, match="head_slice follows from group and num_heads here, got one"):
        ulysses_attention(x, x, x, **BRANCHES, head_slice=(0, 3))
