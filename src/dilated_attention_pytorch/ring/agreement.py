"""Before ranks compute together: all of them hold arguments that are right, and the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Literal, overload

import torch
from torch import Tensor

from ..core.sources import find_source
from ..core.workspace import Workspace
from .comm import Group, Ring, check_timeout, digest, find_ring

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUM_FACTS = 24  # of any call, so that ranks that call different functions still understand each other


_KNOWN = "_known_to_the_ring"  # of errors that all ranks have heard of


class Agreement:
    """Says what this rank was called with, and learns whether the others were called alike."""

    def __init__(self, ring: Ring, device: torch.device) -> None:
        self.ring, self.device, self.is_made = ring, device, False

    def of(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        shard_lengths: Sequence[int] | None,
        **facts: int,
    ) -> tuple[int, ...]:
        """The tokens of all ranks, if they agree on everything else."""
        given = _check_lengths(shard_lengths, self.ring, q)
        b, n, h, d = q.shape
        facts = {
            "the batch size": b,
            "the number of heads": h,
            "the number of key heads": k.shape[2],
            "the head dimension": d,
            "the dtype": _DTYPES.index(q.dtype),
            "having a key_mask": int(key_mask is not None),
            "requiring gradients": int(torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))),
            "shard_lengths": 0 if given is None else digest(given),
            **facts,
        }
        facts |= {f"fact {i}": 0 for i in range(len(facts), NUM_FACTS)}
        self.is_made = True
        lengths = tuple(self.ring.agree(facts, {"tokens": n}, self.device)["tokens"])
        if given is not None and given != lengths:
            raise ValueError(f"shard_lengths must be the tokens of the ranks, {lengths}, got {given}")
        if not sum(lengths):
            raise ValueError("the ranks must have at least one token, got none")
        return lengths


@contextmanager
def agree(ring: Ring, q: Tensor, timeout: float | timedelta | None) -> Iterator[Agreement]:
    """What goes wrong inside, before the agreement is made, becomes an error of all ranks."""
    agreement = Agreement(ring, q.device if isinstance(q, Tensor) else torch.device("cpu"))
    try:
        ring.timeout = check_timeout(timeout)
        yield agreement
    except (TypeError, ValueError) as error:
        if not agreement.is_made and not getattr(error, _KNOWN, False):
            ring.refuse(NUM_FACTS + 1, agreement.device)
        setattr(error, _KNOWN, True)
        raise


@contextmanager
def sharing_errors(group: Group = None, timeout: float | timedelta | None = None) -> Iterator[None]:
    """What goes wrong inside, before a call of the ring, becomes an error of all its ranks.

    For code that checks arguments before it calls: ranks that pass would wait for those that do not.
    """
    ring = find_ring(group)
    with nullcontext() if ring is None or ring.size == 1 else agree(ring, torch.empty(0), timeout):
        yield


def lend_workspace(memory: str, device: torch.device) -> AbstractContextManager[Workspace]:
    """Scratch from where `memory` says.

    A rank that runs out of memory does not try again in smaller tiles as it would alone: others would not.
    """
    lend = find_source(memory)
    return nullcontext(Workspace()) if lend is None else lend(device)


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
    if shard_lengths is not None and isinstance(q, Tensor) and tuple(shard_lengths) != tuple(q.shape[1:2]):
        raise ValueError(f"the only rank has all {q.shape[1]} tokens, got shard_lengths {shard_lengths}")


def _check_lengths(shard_lengths: Sequence[int] | None, ring: Ring, q: Tensor) -> tuple[int, ...] | None:
    if shard_lengths is None:
        return None
    lengths = tuple(shard_lengths)
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in lengths):
        raise ValueError(f"shard_lengths must be integers of 0 and more, got {shard_lengths!r}")
    if len(lengths) != ring.size:
        raise ValueError(f"shard_lengths must name the tokens of {ring.size} ranks, got {len(lengths)}")
    if lengths[ring.rank] != q.shape[1]:
        raise ValueError(
            f"shard_lengths gives rank {ring.rank} {lengths[ring.rank]} tokens, got tensors of {q.shape[1]}"
        )
    return lengths
