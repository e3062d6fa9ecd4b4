"""Tokens for heads: an all-to-all after which each rank holds all tokens of some heads, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.workspace import Workspace
from .agreement import lend_workspace
from .comm import Message, Ring
from .schedule import RingSchedule


@dataclass(frozen=True)
class Ulysses:
    """The exchange of one call; `memory` is where its buffers come from."""

    ring: Ring
    schedule: RingSchedule
    memory: str

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(b, n_local, heads, d) of all heads -> (b, n, heads, d) of this rank's; differentiable."""
        heads = tuple(x.shape[2] for x in tensors)
        moved: tuple[Tensor, ...] = _Move.apply(self, heads, True, *tensors)  # type: ignore[no-untyped-call]
        return moved

    def to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The way back: (b, n, heads, d) of this rank's query heads -> (b, n_local, heads, d) of all."""
        heads = (self.schedule.shape.h,) * len(tensors)
        moved: tuple[Tensor, ...] = _Move.apply(self, heads, False, *tensors)  # type: ignore[no-untyped-call]
        return moved

    def all_tokens(self, mask: Tensor) -> Tensor:
        """(b, n) of all ranks' masks (b, n_local)."""
        everyone = torch.empty(self.schedule.shape.n, mask.shape[0], dtype=torch.uint8, device=mask.device)
        own = everyone[self._tokens(self.ring.rank)]
        own.copy_(mask.transpose(0, 1))
        arriving = [(peer, everyone[self._tokens(peer)]) for peer in self._others]
        leaving = [(peer, own) for peer in self._others]
        self.ring.exchange("forward pass, masks", arriving, leaving)
        return everyone.bool().transpose(0, 1)

    def move(
        self, tensors: tuple[Tensor, ...], heads: tuple[int, ...], to_heads: bool, direction: str
    ) -> tuple[Tensor, ...]:
        """Tensors with so many heads in all. Messages are (tokens, b, heads, d), to arrive in place."""
        results, what = [], f"{direction} pass, {'tokens to heads' if to_heads else 'heads to tokens'}"
        with lend_workspace(self.memory, tensors[0].device) as workspace:
            for x, total in zip(tensors, heads, strict=True):
                shares = (share * (total // self.schedule.shape.h_kv) for share in self.schedule.head_shares)
                ends = list(accumulate(shares, initial=0))
                parts = [slice(*pair) for pair in pairwise(ends)]
                move = self._tokens_to_heads if to_heads else self._heads_to_tokens
                results.append(move(x, parts, what, workspace))
        return tuple(result.transpose(0, 1) for result in results)

    def _tokens_to_heads(self, x: Tensor, parts: list[slice], what: str, workspace: Workspace) -> Tensor:
        mine = parts[self.ring.rank]
        shape = (self.schedule.shape.n, x.shape[0], mine.stop - mine.start, x.shape[3])
        result = workspace.result(shape, x.dtype, x.device)
        result[self._tokens(self.ring.rank)].copy_(x[:, :, mine].transpose(0, 1))
        arriving = [(peer, result[self._tokens(peer)]) for peer in self._others]
        leaving = [(peer, x[:, :, parts[peer]].transpose(0, 1)) for peer in self._others]
        self.ring.exchange(what, arriving, list(_pack(leaving, workspace, "comm_out", is_full=True)))
        return result

    def _heads_to_tokens(self, x: Tensor, parts: list[slice], what: str, workspace: Workspace) -> Tensor:
        own = self._tokens(self.ring.rank)
        shape = (own.stop - own.start, x.shape[0], parts[-1].stop, x.shape[3])
        result = workspace.result(shape, x.dtype, x.device)
        result[:, :, parts[self.ring.rank]].copy_(x[:, own].transpose(0, 1))
        places = [(peer, result[:, :, parts[peer]]) for peer in self._others]
        arriving = list(_pack(places, workspace, "comm_in", is_full=False))
        leaving = [(peer, x[:, self._tokens(peer)].transpose(0, 1)) for peer in self._others]
        self.ring.exchange(what, arriving, list(_pack(leaving, workspace, "comm_out", is_full=True)))
        for (_, place), (_, arrived) in zip(places, arriving, strict=True):
            place.copy_(arrived)
        return result

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(self.ring.size) if peer != self.ring.rank]

    def _tokens(self, rank: int) -> slice:
        return slice(*self.schedule.shard(rank))


def _pack(messages: list[Message], workspace: Workspace, slot: str, is_full: bool) -> Iterator[Message]:
    """Contiguous memory for each message, side by side; with its content, or for what will arrive."""
    if not messages:
        return
    like, at = messages[0][1], 0
    packed = workspace.take(slot, (sum(x.numel() for _, x in messages),), like.dtype, like.device)
    for peer, x in messages:
        part = packed[at : at + x.numel()].view(x.shape)
        yield peer, part.copy_(x) if is_full else part
        at += x.numel()


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ulysses: Ulysses, heads: tuple[int, ...], to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.way = ulysses, heads, to_heads
        return ulysses.move(tensors, heads, to_heads, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ulysses, heads, to_heads = ctx.way
        return None, None, None, *ulysses.move(gradients, heads, not to_heads, "backward")
