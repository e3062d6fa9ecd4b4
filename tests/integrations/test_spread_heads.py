"""Heads over ranks, in torchtitan's layout and under DeepSpeed Ulysses: the result is that of one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dilated_attention_pytorch import dilated_attention
from dilated_attention_pytorch.integrations.deepspeed import ulysses_attention
from dilated_attention_pytorch.integrations.torchtitan import TorchtitanAttention
from dilated_attention_pytorch.reference import dilated_attention_reference
from support.ranks import run_ranks
from support.tolerances import assert_close, assert_same_gradients

BRANCHES: dict[str, Any] = {"segment_lengths": [5, 16, 40], "dilation_rates": [1, 2, 3]}


def inputs(b: int, n: int, h: int, h_kv: int) -> list[Tensor]:
    """q, k, v (b, n, heads, d) and a gradient, the same on every rank."""
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(b, n, heads, 4, generator=rng, dtype=torch.float64) for heads in (h, h_kv, h_kv, h)]


def one_process(b: int, n: int, h: int, h_kv: int, **options: Any) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of the whole."""
    *leaves, weight = inputs(b, n, h, h_kv)
    leaves = [x.requires_grad_() for x in leaves]
    out = dilated_attention_reference(*leaves, **BRANCHES, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, weight)


def errors(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> list[float]:
    return [(x - y).abs().max().item() for x, y in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("is_causal", [True, False])
def test_torchtitan_layout(is_causal: bool) -> None:
    *leaves, _ = (x.requires_grad_() for x in inputs(2, 37, 6, 2))
    attention = TorchtitanAttention(**BRANCHES, head_offsets="blocked")
    q, k, v = (x.transpose(1, 2) for x in leaves)
    actual = attention(q, k, v, scale=0.4, enable_gqa=True, is_causal=is_causal)
    how = {"scale": 0.4, "is_causal": is_causal, "head_offsets": "blocked"}
    expected = dilated_attention_reference(*leaves, **BRANCHES, **how).transpose(1, 2)
    assert_close(actual, expected, torch.float64)
    assert_same_gradients(actual, expected, leaves, torch.float64)


def test_torchtitan_attention_is_causal_and_shows_itself() -> None:
    q, k, v, _ = (x.transpose(1, 2) for x in inputs(1, 37, 6, 6))
    attention = TorchtitanAttention(**BRANCHES)
    expected = dilated_attention(*(x.transpose(1, 2) for x in (q, k, v)), **BRANCHES, is_causal=True)
    assert torch.equal(attention(q, k, v), expected.transpose(1, 2))
    assert repr(attention) == ("TorchtitanAttention(segment_lengths=[5, 16, 40], dilation_rates=[1, 2, 3])")
    assert not list(attention.parameters())
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))


PLACEMENTS: dict[str, Any] = {"heads": Shard(1), "batches": Shard(0), "replicated": Replicate()}


def torchtitan_errors(rank: int, placed: str) -> list[float]:
    shape, how = (2, 37, 10, 2), {"is_causal": True}
    mesh = init_device_mesh("cpu", (2,))
    attention = TorchtitanAttention(**BRANCHES)
    *leaves, weight = (
        distribute_tensor(x.transpose(1, 2).contiguous(), mesh, [PLACEMENTS[placed]]).requires_grad_()
        for x in inputs(*shape)
    )
    out = attention(*leaves, enable_gqa=True)
    assert isinstance(out, DTensor)
    assert out.placements == (PLACEMENTS[placed],)
    results = out.detach(), *torch.autograd.grad(out, leaves, weight.detach())
    return errors((x.full_tensor().transpose(1, 2) for x in results), one_process(*shape, **how))


@pytest.mark.parametrize("placed", PLACEMENTS)
def test_torchtitan_with_tensor_parallelism_is_one_process(placed: str) -> None:
    found = run_ranks(2, torchtitan_errors, placed)
    assert max(max(row) for row in found) < 1e-10, found


def local_heads_error(rank: int) -> float:
    part = slice(3 * rank, 3 * rank + 3)
    attention = TorchtitanAttention(**BRANCHES, head_group=dist.group.WORLD)
    q, k, v = (x[:, :, part].transpose(1, 2) for x in inputs(2, 37, 6, 6)[:3])
    expected, *_ = one_process(2, 37, 6, 6, is_causal=True)
    alone = TorchtitanAttention(**BRANCHES)(q, k, v)
    assert (rank == 0) == torch.allclose(alone, attention(q, k, v))  # the number of a head matters
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))
    return (attention(q, k, v).transpose(1, 2) - expected[:, :, part]).abs().max().item()


def test_torchtitan_with_local_heads_is_one_process() -> None:
    assert max(run_ranks(2, local_heads_error)) < 1e-10


def torchtitan_messages(rank: int) -> list[str]:
    mesh, attention = init_device_mesh("cpu", (2,)), TorchtitanAttention(**BRANCHES)
    x = torch.randn(2, 3, 10, 4)
    heads, tokens = (distribute_tensor(x, mesh, [Shard(dim)]) for dim in (1, 2))
    partial = DTensor.from_local(x, mesh, [Partial()])
    messages = []
    for q, k, v in ((heads, x, x), (heads, heads, tokens), (tokens,) * 3, (partial,) * 3, (heads,) * 3):
        with pytest.raises((TypeError, ValueError), match="must") as error:
            attention(q, k, v)
        messages.append(str(error.value))
    return messages


def test_torchtitan_refuses_other_placements() -> None:
    for messages in run_ranks(2, torchtitan_messages):
        assert messages[0] == "q, k and v must all be DTensors if one is"
        assert "must be placed alike, got (Shard(dim=1),), (Shard(dim=1),) and (Shard(dim=2),)" in messages[1]
        assert "sharded by batch or once by heads, got (Shard(dim=2),)" in messages[2]
        assert "sharded by batch or once by heads, got (Partial(sum),)" in messages[3]
        assert messages[4] == "heads must be a multiple of the 2 ranks, got 3 and 3"


Q, FEW, FLAT = torch.randn(1, 3, 10, 4), torch.randn(1, 1, 10, 4), torch.randn(3, 10, 4)


@pytest.mark.parametrize(
    ("options", "call", "error", "message"),
    [
        ({"segment_lengths": [4, 4]}, {}, ValueError, "must have the same length, got 2 and 3"),
        ({"dropout": 0.1}, {}, ValueError, "have no 'dropout'. They must be among segment_lengths"),
        ({"kernel": "fast"}, {}, ValueError, "kernel must be"),
        ({}, {"k": FEW, "v": FEW}, ValueError, "must have the same heads unless enable_gqa, got 3 and 1"),
        ({}, {"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
        ({}, {"q": [1.0]}, ValueError, "q must have 4 dimensions, of which the second is heads, got list"),
        ({}, {"q": torch.randn(4)}, ValueError, r"q must have 4 dimensions, .* got \(4,\)"),
        ({}, {"v": FLAT}, ValueError, r"v must have 4 dimensions, .* got \(3, 10, 4\)"),
    ],
)
def test_bad_options_and_calls_of_torchtitan(
    options: dict[str, Any], call: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TorchtitanAttention(**{**BRANCHES, **options})(**{"q": Q, "k": Q, "v": Q, **call})


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
    return errors((x.transpose(0, batch_dim_idx) for x in results), expected)


@pytest.mark.parametrize("case", ULYSSES)
def test_ulysses_is_one_process(case: str) -> None:
    found = run_ranks(2, ulysses_errors, case)
    assert max(max(row) for row in found) < 1e-10, found


def ulysses_messages(rank: int) -> list[str]:
    q = torch.randn(1, 10, 3, 4)
    few, none, part = q[:, :, :1], q[:, :, :0], q[:, :, : 3 - rank]
    cases: list[tuple[Tensor, Tensor, dict[str, Any]]] = [(q, q, {"num_heads": h}) for h in (9, 8, 0, 1)]
    cases += [(q, q, {"batch_dim_idx": 2}), (part, few, {"num_heads": 5})]
    cases += [(none, none, {"num_heads": 5}), (none, none, {})]
    messages = []
    for query, key, changes in cases:
        with pytest.raises(ValueError, match="must") as error:
            ulysses_attention(query, key, key, **BRANCHES, **changes)
        messages.append(str(error.value))
    return messages


def test_ulysses_refuses_heads_that_do_not_fit() -> None:
    first, second = run_ranks(2, ulysses_messages)
    assert second[0] == "9 heads on 2 ranks must give rank 1 4 of q, k and v, got 3 of q and 3 of k and v"
    assert first[1] == "8 heads on 2 ranks must give rank 0 4 of q, k and v, got 3 of q and 3 of k and v"
    assert first[2] == "num_heads must be a positive integer, got 0"
    assert first[4] == "batch_dim_idx must be 0 or 1, got 2"
    assert first[3] == second[3] == "num_heads must be at least one for each of 2 ranks, got 1"
    assert first[5] == "5 heads on 2 ranks must give rank 0 3 of q, k and v, got 3 of q and 1 of k and v"
    assert second[6] == "5 heads on 2 ranks must give rank 1 2 of q, k and v, got 0 of q and 0 of k and v"
    assert second[7].startswith("q must have at least one position, head and feature, got shape (1, 10, 0")


def test_ulysses_refuses_what_it_cannot_do() -> None:
    x = torch.randn(1, 10, 3, 4)
    for k, v, options, error, message in (
        (x, x, {}, RuntimeError, "needs torch.distributed.init_process_group"),
        (x.flatten(2), x, {}, ValueError, r"k must have 4 dimensions, .* got \(1, 10, 12\)"),
        (x, [1], {}, ValueError, "v must have 4 dimensions, .* got list"),
        (x, x, {"return_lse": True}, ValueError, "takes one result .*, got return_lse=True"),
        (x, x, {"head_slice": (0, 3)}, TypeError, "head_slice follows from group and num_heads here"),
    ):
        with pytest.raises(error, match=message):
            ulysses_attention(x, k, v, **BRANCHES, **options)
