"""Processes that talk to each other: the only user of torch.distributed.

Transfers are point to point and non-blocking. Whatever goes wrong, a peer that dies, hangs or was called with
other arguments, becomes an error on every rank: before ranks compute together, they agree that all of them
hold arguments that are right, and the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.tracing import constant_result

Group = Any  # a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group
Message = tuple[int, Tensor]  # (peer, what it sends or gets)


CONTROL = 40  # values of a control message
_KNOWN = "_known_to_the_ring"  # of errors that all ranks have heard of


class RingError(RuntimeError):
    """A transfer between the ranks of a group failed or took longer than the timeout."""


@dataclass
class Traffic:
    """What went over a group since the last `reset`: keys, values, masks and gradients, no agreements."""

    received_bytes: int = 0
    sent_bytes: int = 0
    messages: int = 0  # sent

    def reset(self) -> None:
        """Counts from zero again."""
        self.received_bytes = self.sent_bytes = self.messages = 0


_TRAFFIC: dict[str, Traffic] = {}  # by the name of the group


class Pending(NamedTuple):
    """Transfers that are under way."""

    ring: Ring
    what: str
    arriving: list[tuple[str, dist.Work]]
    leaving: list[tuple[str, dist.Work]]

    def wait_arrived(self) -> None:
        self._wait(self.arriving)

    def wait_left(self) -> None:
        self._wait(self.leaving)

    def _wait(self, works: list[tuple[str, dist.Work]]) -> None:
        self.ring.wait(works, self.what)
        works.clear()  # gloo would wait for ever the second time


class Ring:
    """This process as a member of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.timeout: timedelta | None = None  # of a transfer; None is the group's own
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = _TRAFFIC.setdefault(str(group.group_name), Traffic())

    def __str__(self) -> str:
        ranks = dist.get_process_group_ranks(self.group)
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        return f"group {self.group.group_name!r} of {self.size} ranks ({shown})"

    def start(self, what: str, receives: Sequence[Message], sends: Sequence[Message]) -> Pending:
        """Begins transfers of contiguous tensors; peers must begin theirs in the same order."""
        ops = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in receives]
        ops += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
        names = [f"from rank {peer}" for peer, _ in receives] + [f"to rank {peer}" for peer, _ in sends]
        if not ops:
            return Pending(self, what, [], [])
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._failure(what, ", ".join(names), error) from error
        self.traffic.received_bytes += sum(x.nbytes for _, x in receives)
        self.traffic.sent_bytes += sum(x.nbytes for _, x in sends)
        self.traffic.messages += len(sends)
        if len(works) != len(ops):  # a backend may join what is started together
            return Pending(self, what, [(", ".join(names), work) for work in works], [])
        named = list(zip(names, works, strict=True))
        return Pending(self, what, named[: len(receives)], named[len(receives) :])

    def exchange(self, what: str, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Transfers from begin to end; empty tensors are left out."""
        some = ([message for message in x if message[1].numel()] for x in (receives, sends))
        pending = self.start(what, *some)
        pending.wait_arrived()
        pending.wait_left()

    def wait(self, works: Iterable[tuple[str, dist.Work]], what: str) -> None:
        for name, work in works:
            try:
                work.wait() if self.timeout is None else work.wait(self.timeout)
            except RuntimeError as error:
                raise self._failure(what, name, error) from error

    def gather(self, values: Sequence[int], what: str, device: torch.device | None = None) -> list[list[int]]:
        """The values of all ranks, at most CONTROL: all messages have one size, whatever a rank is doing."""
        if len(values) > CONTROL:
            raise AssertionError(f"a control message has at most {CONTROL} values, got {len(values)}")
        padded = [*values, *[0] * (CONTROL - len(values))]
        mine = torch.tensor(padded, dtype=torch.int64, device=self._control_device(device))
        table = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = dist.all_gather(table, mine, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._failure(what, "all ranks", error) from error
        self.wait([("all ranks", work)], what)
        return [x.tolist()[: len(values)] for x in table]

    def _control_device(self, device: torch.device | None) -> torch.device:
        """That of the call's tensors, so that the first use of a backend is by all ranks together."""
        served = {each.type for each in self.group._device_types}
        if device is not None and device.type in served:
            return device
        return torch.device("cpu" if "cpu" in served else next(iter(served)))

    def _failure(self, what: str, name: str, error: Exception) -> RingError:
        within = "" if self.timeout is None else f" within {self.timeout.total_seconds():g} s"
        return RingError(f"{self}, {what}: the transfer {name} failed{within}: {error}")


def find_ring(group: Group = None) -> Ring | None:
    """This process as a member of the group; None if it stands alone (torch.distributed is not in use)."""
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise ValueError("a group needs torch.distributed to be initialised, and it is not")
        return None
    group = dist.group.WORLD if group is None else group
    if hasattr(group, "get_group") and hasattr(group, "ndim"):  # a DeviceMesh
        if group.ndim != 1:
            raise ValueError(f"a ring is a one-dimensional mesh, got one of {group.ndim} dimensions: {group}")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER or (
        isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0
    ):
        raise ValueError(f"this process, rank {dist.get_rank()}, is not a member of the group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    return Ring(group)


def group_size(group: Group = None) -> int:
    """Processes of a group; 1 if torch.distributed is not in use."""
    ring = find_ring(group)
    return 1 if ring is None else ring.size


# Compilers cannot look into a group, whose members are constant.
@constant_result
def group_place(group: Group = None) -> tuple[int, int]:
    """This process's rank in a group, and the group's size; an error if torch.distributed is not in use."""
    ring = find_ring(group)
    if ring is None:
        raise RuntimeError("a rank in a group needs torch.distributed.init_process_group, it was not called")
    return ring.rank, ring.size


def ring_traffic(group: Group = None) -> Traffic:
    """The counter of what this process exchanged with a group."""
    ring = find_ring(group)
    return _TRAFFIC.setdefault("", Traffic()) if ring is None else ring.traffic


def digest(*facts: Any) -> int:
    """A number that tells different facts apart."""
    return int.from_bytes(blake2b(repr(facts).encode(), digest_size=8).digest(), "little") >> 1 | 2**62


def check_timeout(timeout: float | timedelta | None) -> timedelta | None:
    """Seconds as a timedelta."""
    if timeout is None or isinstance(timeout, timedelta):
        seconds = 1.0 if timeout is None else timeout.total_seconds()
    elif isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be seconds, a timedelta or None, got {timeout!r}")
    else:
        seconds = timeout
    if not 0 < seconds < 2**31:  # torch counts nanoseconds in 64 bits
        raise ValueError(f"timeout must be positive and below 2**31 seconds, got {timeout!r}")
    return None if timeout is None else timedelta(seconds=seconds)


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
