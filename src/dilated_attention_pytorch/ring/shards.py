"""A sequence in parts: which tokens are whose, cutting tensors and joining them again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..checks import check_count, check_dense, check_device
from ..core.tracing import uncompiled
from .agreement import agree
from .comm import Group, Ring, check_timeout, digest, find_ring
from .schedule import check_lengths, even_shards


@uncompiled
def shard_bounds(n: int, group: Group = None, shard_lengths: Sequence[int] | None = None) -> tuple[int, int]:
    """The positions [start, stop) of this rank in a sequence of n tokens; by default as even as possible."""
    check_count("n", n)
    ring = find_ring(group)
    rank, size = (0, 1) if ring is None else (ring.rank, ring.size)
    lengths = even_shards(n, size) if shard_lengths is None else check_lengths(shard_lengths, size)
    if sum(lengths) != n:
        raise ValueError(f"shard_lengths must have {n} tokens in all, got {lengths}")
    start = sum(lengths[:rank])
    return start, start + lengths[rank]


def shard_sequence(
    x: Tensor, dim: int = 1, group: Group = None, shard_lengths: Sequence[int] | None = None
) -> Tensor:
    """This rank's contiguous part of a tensor that all ranks hold: a view along `dim`."""
    _check_dim(x, dim)
    start, stop = shard_bounds(x.shape[dim], group, shard_lengths)
    return x.narrow(dim, start, stop - start)


@uncompiled
def unshard_sequence(
    x: Tensor, dim: int = 1, group: Group = None, timeout: float | timedelta | None = None
) -> Tensor:
    """The parts of all ranks joined along `dim`, on every rank; their lengths may differ.

    The gradient of this rank's part is its slice of the gradient of the whole: every rank is expected to
    compute the same from it. Losses that differ between ranks have to be reduced by the caller.
    """
    ring = find_ring(group)
    if ring is None or ring.size == 1:
        check_timeout(timeout)
        _check_dim(x, dim)
        return x
    with agree(ring, "unshard_sequence", x, timeout) as agreement:
        _check_dim(x, dim)
        dim %= x.dim()
        others = [size for i, size in enumerate(x.shape) if i != dim]
        facts = {"dim": dim, "the other dimensions": digest(others), "the dtype": digest(x.dtype)}
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        lengths = agreement.on({**facts, "requiring gradients": int(needs_grad)}, [x.shape[dim]])
    joined: Tensor = _Join.apply(x, dim, ring, [row[0] for row in lengths])  # type: ignore[no-untyped-call]
    return joined


@uncompiled
def shard_lengths_of(
    n_local: int, group: Group = None, timeout: float | timedelta | None = None
) -> tuple[int, ...]:
    """The tokens of every rank, in order."""
    ring = find_ring(group)
    if ring is None or ring.size == 1:
        check_timeout(timeout)
        check_count("n_local", n_local)
        return (n_local,)
    with agree(ring, "shard_lengths_of", None, timeout) as agreement:
        check_count("n_local", n_local)
        table = agreement.on({}, [n_local])
    return tuple(row[0] for row in table)


@uncompiled
def shard_positions(
    n_local: int,
    group: Group = None,
    device: torch.device | str | None = None,
    timeout: float | timedelta | None = None,
) -> Tensor:
    """(n_local,) int64: where this rank's tokens stand in the whole sequence, for position encodings."""
    ring = find_ring(group)
    lengths = shard_lengths_of(n_local, group, timeout)
    start = 0 if ring is None else sum(lengths[: ring.rank])
    return torch.arange(start, start + n_local, device=check_device(device))


def _check_dim(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    check_dense("x", x)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be a dimension of a tensor, got {dim!r} of one with {x.dim()}")


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ring: Ring, lengths: list[int]) -> Tensor:
        own = x.detach().movedim(dim, 0).contiguous()
        bounds = list(accumulate(lengths, initial=0))
        joined = own.new_empty(bounds[-1], *own.shape[1:])
        parts = [joined[a:b] for a, b in pairwise(bounds)]
        parts[ring.rank].copy_(own)
        others = [peer for peer in range(ring.size) if peer != ring.rank]
        arriving = [(peer, parts[peer]) for peer in others]
        ring.exchange("joining a sequence", arriving, [(peer, own) for peer in others])
        ctx.where = dim, bounds[ring.rank], own.shape[0]
        return joined.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient.narrow(*ctx.where), None, None, None
