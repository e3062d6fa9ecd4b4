"""A sequence in parts: which tokens are whose, cutting tensors and joining them again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .comm import Group, Ring, find_ring
from .rounds import even_shards


@torch.compiler.disable  # type: ignore[untyped-decorator]
def shard_bounds(n: int, group: Group = None, shard_lengths: Sequence[int] | None = None) -> tuple[int, int]:
    """The positions [start, stop) of this rank in a sequence of n tokens; by default as even as possible."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ValueError(f"n must be an integer of 0 or more, got {n!r}")
    ring = find_ring(group)
    rank, size = (0, 1) if ring is None else (ring.rank, ring.size)
    lengths = even_shards(n, size) if shard_lengths is None else tuple(shard_lengths)
    if len(lengths) != size or sum(lengths) != n or min(lengths) < 0:
        raise ValueError(f"shard_lengths must be {size} lengths of {n} tokens in all, got {lengths}")
    start = sum(lengths[:rank])
    return start, start + lengths[rank]


def shard_sequence(
    x: Tensor, dim: int = 1, group: Group = None, shard_lengths: Sequence[int] | None = None
) -> Tensor:
    """This rank's contiguous part of a tensor that all ranks hold: a view along `dim`."""
    start, stop = shard_bounds(x.shape[dim], group, shard_lengths)
    return x.narrow(dim, start, stop - start)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def unshard_sequence(x: Tensor, dim: int = 1, group: Group = None) -> Tensor:
    """The parts of all ranks joined along `dim`, on every rank; their lengths may differ.

    The gradient of this rank's part is its slice of the gradient of the whole: every rank is expected to
    compute the same from it. Losses that differ between ranks have to be reduced by the caller.
    """
    ring = find_ring(group)
    if ring is None or ring.size == 1:
        return x
    joined: Tensor = _Join.apply(x, dim % x.dim(), ring)  # type: ignore[no-untyped-call]
    return joined


@torch.compiler.disable  # type: ignore[untyped-decorator]
def shard_lengths_of(
    n_local: int, group: Group = None, timeout: float | timedelta | None = None
) -> tuple[int, ...]:
    """The tokens of every rank, in order."""
    ring = find_ring(group, timeout)
    if ring is None:
        return (n_local,)
    table = ring.gather([n_local], torch.device("cpu"), "asking for shard lengths")
    return tuple(row[0] for row in table)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def shard_positions(n_local: int, group: Group = None, device: torch.device | str | None = None) -> Tensor:
    """(n_local,) int64: where this rank's tokens stand in the whole sequence, for position encodings."""
    ring = find_ring(group)
    start = 0 if ring is None else sum(shard_lengths_of(n_local, group)[: ring.rank])
    return torch.arange(start, start + n_local, device=device)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ring: Ring) -> Tensor:
        own = x.detach().movedim(dim, 0).contiguous()
        table = ring.gather([own.shape[0], x.dim(), *own.shape[1:]], x.device, "joining a sequence")
        if any(row[1:] != table[0][1:] for row in table):
            raise ValueError(f"parts must have one shape but for dimension {dim}, got {table}")
        bounds = list(accumulate((row[0] for row in table), initial=0))
        joined = own.new_empty(bounds[-1], *own.shape[1:])
        parts = [joined[a:b] for a, b in pairwise(bounds)]
        parts[ring.rank].copy_(own)
        others = [peer for peer in range(ring.size) if peer != ring.rank]
        receives = [(peer, parts[peer]) for peer in others if parts[peer].numel()]
        pending = ring.start("joining a sequence", receives, [(peer, own) for peer in others if own.numel()])
        pending.wait_arrived()
        pending.wait_left()
        ctx.where = dim, bounds[ring.rank], own.shape[0]
        return joined.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient.narrow(*ctx.where), None, None
