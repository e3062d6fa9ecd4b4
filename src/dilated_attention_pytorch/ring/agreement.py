"""Before ranks compute together: all of them hold arguments that are right, and the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Literal, overload

import torch
from torch import Tensor

from ..core.sources import find_source
from ..core.workspace import Workspace
from .comm import Group, Ring, check_timeout, digest, find_ring
from .rounds import check_lengths

_KNOWN = "_known_to_the_ring"  # of errors that all ranks have heard of


class Agreement:
    """Says what this rank was called with, and learns whether the others were called alike."""

    def __init__(self, ring: Ring, function: str, device: torch.device | None) -> None:
        self.ring, self.function, self.device, self.is_made = ring, function, device, False

    def on(self, facts: Mapping[str, int], own: Sequence[int]) -> list[list[int]]:
        """Checks that all ranks state the same facts, and returns what each has of its `own`."""
        # The first value is 0 on a rank that refuses its arguments.
        stated = {"the function": digest(self.function), **facts}
        values = [1, *stated.values(), *own]
        if too_large := [name for name, value in stated.items() if abs(value) >= 2**63]:
            raise ValueError(f"{too_large[0]} must be below 2**63")
        self.is_made = True
        table = self.ring.gather(values, f"agreeing on {self.function}", self.device)
        if refusing := [rank for rank, row in enumerate(table) if not row[0]]:
            who = f"rank {refusing[0]} of {self.ring}"
            raise ValueError(f"{who} refused its arguments; its own error says why")
        for i, name in enumerate(stated, start=1):
            column = [row[i] for row in table]
            other = next((rank for rank, value in enumerate(column) if value != column[0]), None)
            if other is not None:
                raise ValueError(f"the ranks of {self.ring} must agree on {name}: {_differ(column, other)}")
        return [row[1 + len(stated) :] for row in table]

    def on_call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        shard_lengths: Sequence[int] | None,
        facts: Mapping[str, int],
    ) -> tuple[int, ...]:
        """The tokens of all ranks, if they agree on everything else."""
        given = None if shard_lengths is None else check_lengths(shard_lengths, self.ring.size)
        b, n, h, d = q.shape
        if given is not None and given[self.ring.rank] != n:
            rank = self.ring.rank
            raise ValueError(f"shard_lengths gives rank {rank} {given[rank]} tokens, got tensors of {n}")
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        shared = {
            "the batch size": b,
            "the number of heads": h,
            "the number of key heads": k.shape[2],
            "the head dimension": d,
            "the dtype": digest(q.dtype),
            "having a key_mask": int(key_mask is not None),
            "requiring gradients": int(needs_grad),
            "shard_lengths": 0 if given is None else digest(given),
        }
        lengths = tuple(row[0] for row in self.on({**shared, **facts}, [n]))
        if given is not None and given != lengths:
            raise ValueError(f"shard_lengths must be the tokens of the ranks, {lengths}, got {given}")
        if not sum(lengths):
            raise ValueError("the ranks must have at least one token, got none")
        return lengths


def _differ(column: list[int], other: int) -> str:
    if max(column[0], column[other]) < 2**40:
        return f"{column[0]} on rank 0 and {column[other]} on rank {other}"
    return f"rank {other} differs from rank 0"  # a digest says no more


@contextmanager
def agree(
    ring: Ring, function: str, x: Tensor | None, timeout: float | timedelta | None
) -> Iterator[Agreement]:
    """What goes wrong inside, before the agreement is made, becomes an error of all ranks."""
    agreement = Agreement(ring, function, x.device if isinstance(x, Tensor) else None)
    try:
        ring.timeout = check_timeout(timeout)
        yield agreement
    except Exception as error:
        if not agreement.is_made and not getattr(error, _KNOWN, False):
            ring.gather([0], f"refusing {function}", agreement.device)
        setattr(error, _KNOWN, True)
        raise


@contextmanager
def sharing_errors(group: Group = None, timeout: float | timedelta | None = None) -> Iterator[None]:
    """What goes wrong inside, before a call of the ring, becomes an error of all its ranks.

    For code that checks arguments before it calls: ranks that pass would wait for those that do not.
    """
    ring = find_ring(group)
    with nullcontext() if ring is None or ring.size == 1 else agree(ring, "a call", None, timeout):
        yield


def lend_workspace(memory: str, device: torch.device) -> AbstractContextManager[Workspace]:
    """Scratch from where `memory` says.

    A rank that runs out of memory does not try again in smaller tiles as it would alone: others would not.
    """
    source = find_source(memory)
    return nullcontext(Workspace()) if source is None else source.workspace(device)


def rank_seed(ring: Ring) -> Tensor:
    """What dropout draws from: ranks that share a seed must not share masks."""
    drawn = torch.randint(2**61, (1,), device="cpu")
    return (drawn + ring.rank * 2**50) % 2**62


@overload
def nothing(q: Tensor, k: Tensor, v: Tensor, return_lse: Literal[True]) -> tuple[Tensor, Tensor]: ...


@overload
def nothing(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]: ...


def nothing(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """The results of a rank without tokens, or heads, differentiable.

    A tensor is saved for backward, or activation checkpointing would not call this rank again with others.
    """
    out = (q + k.sum() + v.sum()) * q.new_ones(())
    lse = out.sum(-1).transpose(1, 2).to(torch.promote_types(q.dtype, torch.float32))
    return (out, lse) if return_lse else out


def check_alone(shard_lengths: Sequence[int] | None, q: Tensor) -> None:
    """The shard lengths of a ring of one."""
    if (
        shard_lengths is not None
        and isinstance(q, Tensor)
        and check_lengths(shard_lengths, 1)[0] != q.shape[1]
    ):
        raise ValueError(f"the only rank has all {q.shape[1]} tokens, got shard_lengths {shard_lengths}")
