"""Tokens for heads: an all-to-all after which each rank holds all tokens of some heads, and the way back."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .comm import Ring
from .schedule import RingSchedule


def to_heads(
    ring: Ring, schedule: RingSchedule, tensors: tuple[Tensor, ...], mask: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """(b, n_local, heads, d) of all heads -> (b, n, heads, d) of this rank's; and the mask of all tokens."""
    heads = tuple(x.shape[2] for x in tensors)
    moved = _Reshard.apply(ring, schedule, heads, True, *tensors)  # type: ignore[no-untyped-call]
    if mask is None:
        return moved, None
    return moved, _all_tokens(ring, schedule, mask)


def to_tokens(ring: Ring, schedule: RingSchedule, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The way back: (b, n, heads, d) of this rank's heads -> (b, n_local, heads, d) of all."""
    heads = (schedule.shape.h,) * len(tensors)
    moved: tuple[Tensor, ...] = _Reshard.apply(  # type: ignore[no-untyped-call]
        ring, schedule, heads, False, *tensors
    )
    return moved


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ring: Ring,
        schedule: RingSchedule,
        heads: tuple[int, ...],
        is_to_heads: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.way = ring, schedule, heads, is_to_heads
        return _move(ring, schedule, heads, is_to_heads, tensors, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ring, schedule, heads, is_to_heads = ctx.way
        moved = _move(ring, schedule, heads, not is_to_heads, gradients, "backward")
        return None, None, None, None, *moved


def _move(
    ring: Ring,
    schedule: RingSchedule,
    heads: tuple[int, ...],
    is_to_heads: bool,
    tensors: tuple[Tensor, ...],
    direction: str,
) -> tuple[Tensor, ...]:
    """Tensors with so many heads in all; messages are (tokens, b, heads, d), to arrive in place."""
    results, receives, sends = [], [], []
    for x, total in zip(tensors, heads, strict=True):
        b, d = x.shape[0], x.shape[3]
        shares = (share * (total // schedule.shape.h_kv) for share in schedule.head_shares)
        bounds = list(accumulate(shares, initial=0))
        mine = slice(bounds[ring.rank], bounds[ring.rank + 1])
        own = slice(*schedule.shard(ring.rank))
        if is_to_heads:
            result = x.new_empty(schedule.shape.n, b, mine.stop - mine.start, d)
            result[own].copy_(x[:, :, mine].transpose(0, 1))
        else:
            result = x.new_empty(own.stop - own.start, b, total, d)
            result[:, :, mine].copy_(x[:, own].transpose(0, 1))
        arriving = []
        for peer in range(ring.size):
            if peer == ring.rank:
                continue
            theirs, tokens = slice(bounds[peer], bounds[peer + 1]), slice(*schedule.shard(peer))
            if is_to_heads:
                leaving, target = x[:, :, theirs], result[tokens]
            else:
                leaving = x[:, tokens]
                target = x.new_empty(own.stop - own.start, b, theirs.stop - theirs.start, d)
                arriving.append((theirs, target))
            if target.numel():
                receives.append((peer, target))
            if leaving.numel():
                sends.append((peer, leaving.transpose(0, 1).contiguous()))
        results.append((result, arriving))
    what = f"{direction} pass, {'tokens to heads' if is_to_heads else 'heads to tokens'}"
    pending = ring.start(what, receives, sends)
    pending.wait_arrived()
    for result, arriving in results:
        for theirs, target in arriving:
            result[:, :, theirs].copy_(target)
    pending.wait_left()
    return tuple(result.transpose(0, 1) for result, _ in results)


def _all_tokens(ring: Ring, schedule: RingSchedule, mask: Tensor) -> Tensor:
    """(b, n) of all ranks' masks (b, n_local)."""
    everyone = torch.empty(schedule.shape.n, mask.shape[0], dtype=torch.uint8, device=mask.device)
    own = everyone[slice(*schedule.shard(ring.rank))]
    own.copy_(mask.transpose(0, 1))
    others = [peer for peer in range(ring.size) if peer != ring.rank]
    arriving = [(peer, everyone[slice(*schedule.shard(peer))]) for peer in others]
    leaving = [(peer, own) for peer in others]
    pending = ring.start(
        "forward pass, masks", *([each for each in x if each[1].numel()] for x in (arriving, leaving))
    )
    pending.wait_arrived()
    pending.wait_left()
    return everyone.bool().transpose(0, 1)
