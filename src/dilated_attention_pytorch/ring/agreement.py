"""Before ranks compute together: all of them hold arguments that are right, and the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from ..core.sources import find_source
from ..core.workspace import Workspace
from .comm import Ring

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUM_FACTS = 16  # of any call, so that ranks that call different functions still understand each other


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
            "giving shard_lengths": int(given is not None),
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
def agree(ring: Ring, q: Tensor) -> Iterator[Agreement]:
    """What goes wrong inside, before the agreement is made, becomes an error of all ranks."""
    agreement = Agreement(ring, q.device if isinstance(q, Tensor) else torch.device("cpu"))
    try:
        yield agreement
    except (TypeError, ValueError):
        if not agreement.is_made:
            ring.refuse(NUM_FACTS + 1, agreement.device)
        raise


def lend_workspace(memory: str, device: torch.device) -> AbstractContextManager[Workspace]:
    """Scratch from where `memory` says.

    A rank that runs out of memory does not try again in smaller tiles as it would alone: others would not.
    """
    lend = find_source(memory)
    return nullcontext(Workspace()) if lend is None else lend(device)


def check_alone(shard_lengths: Sequence[int] | None, q: Tensor) -> None:
    """The shard lengths of a ring of one."""
    if shard_lengths is not None and isinstance(q, Tensor) and tuple(shard_lengths) != tuple(q.shape[1:2]):
        raise ValueError(f"the only rank has all {q.shape[1]} tokens, got shard_lengths {shard_lengths}")


def _check_lengths(shard_lengths: Sequence[int] | None, ring: Ring, q: Tensor) -> tuple[int, ...] | None:
    if shard_lengths is None:
        return None
    lengths = tuple(shard_lengths)
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in lengths):
        raise TypeError(f"shard_lengths must be integers of 0 and more, got {shard_lengths!r}")
    if len(lengths) != ring.size:
        raise ValueError(f"shard_lengths must name the tokens of {ring.size} ranks, got {len(lengths)}")
    if lengths[ring.rank] != q.shape[1]:
        raise ValueError(
            f"shard_lengths gives rank {ring.rank} {lengths[ring.rank]} tokens, got tensors of {q.shape[1]}"
        )
    return lengths
