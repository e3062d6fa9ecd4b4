"""Before ranks compute together: all of them hold arguments that are right, and the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
from torch import Tensor

from .comm import Group, Ring, check_timeout, digest, find_ring

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
