"""A sequence in shards: which tokens are whose, cutting tensors and joining them again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..checks import check_count, check_dense, check_device, check_positive_int
from ..core.tracing import uncompiled
from ..core.workspace import Workspace
from .comm import Group, Ring, agree, digest, find_others, find_ring


def check_lengths(shard_lengths: Sequence[int], size: int | None = None) -> tuple[int, ...]:
    """The tokens of each rank, as a tuple."""
    if not isinstance(shard_lengths, Sequence):
        raise TypeError(f"shard_lengths must be a sequence of integers, got {shard_lengths!r}")
    lengths = tuple(shard_lengths)
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in lengths):
        raise ValueError(f"shard_lengths must be integers of 0 and more, got {shard_lengths!r}")
    if sum(lengths) >= 2**62:
        raise ValueError(f"shard_lengths must have fewer than 2**62 tokens in all, got {sum(lengths)}")
    if not lengths or (size is not None and len(lengths) != size):
        raise ValueError(f"shard_lengths must name the tokens of {size or 'some'} ranks, got {len(lengths)}")
    return lengths


def even_shards(n: int, size: int) -> tuple[int, ...]:
    """`n` tokens over `size` ranks: as even as possible, the longer shards first."""
    check_count("n", n)
    check_positive_int("size", size, bits=24)  # a shard is an entry of a tuple
    each, more = divmod(n, size)
    return tuple(each + (rank < more) for rank in range(size))


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
    """This rank's contiguous shard of a tensor that all ranks hold: a view along `dim`."""
    _check_dim(x, dim)
    start, stop = shard_bounds(x.shape[dim], group, shard_lengths)
    return x.narrow(dim, start, stop - start)


@uncompiled
def unshard_sequence(
    x: Tensor, dim: int = 1, group: Group = None, timeout: float | timedelta | None = None
) -> Tensor:
    """The shards of all ranks joined along `dim`, on every rank; their lengths may differ.

    The gradient of this rank's shard is its slice of the gradient of the whole: every rank is expected to
    compute the same from it. Losses that differ between ranks have to be reduced by the caller.
    """
    ring = find_others(group, timeout)
    if ring is None:
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
def shard_positions(
    n_local: int,
    group: Group = None,
    device: torch.device | str | None = None,
    timeout: float | timedelta | None = None,
) -> Tensor:
    """(n_local,) int64: where this rank's tokens stand in the whole sequence, for position encodings."""
    ring, start = find_others(group, timeout), 0
    if ring is None:
        check_count("n_local", n_local)
    else:
        with agree(ring, "shard_positions", None, timeout) as agreement:
            check_count("n_local", n_local)
            start = sum(row[0] for row in agreement.on({}, [n_local])[: ring.rank])
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
        joined = own.new_empty(sum(lengths), *own.shape[1:])
        places = list(torch.split(joined, lengths))
        ring.trade("joining a sequence", [own] * ring.size, places, Workspace())
        ctx.where = dim, sum(lengths[: ring.rank]), own.shape[0]
        return joined.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient.narrow(*ctx.where), None, None, None
