"""Processes that talk to each other: the only user of torch.distributed.

Transfers are point to point and non-blocking. Whatever goes wrong, a peer that dies, hangs or was called with
other arguments, becomes an error on every rank: before ranks compute together, they agree that all of them
hold arguments that are right, and the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.tracing import constant_result
from ..core.workspace import Workspace

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

    wait_arrived: Callable[[], None]
    wait_left: Callable[[], None]


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
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise self._failure(what, ", ".join(names), error) from error
        self.traffic.received_bytes += sum(x.nbytes for _, x in receives)
        self.traffic.sent_bytes += sum(x.nbytes for _, x in sends)
        self.traffic.messages += len(sends)
        first = len(receives)
        if len(works) != len(ops):  # a backend may join what is started together
            first, names = len(works), [", ".join(names)] * len(works)
        named = list(zip(names, works, strict=True))
        return Pending(partial(self.wait, what, named[:first]), partial(self.wait, what, named[first:]))

    def wait(self, what: str, works: list[tuple[str, dist.Work]]) -> None:
        """Waits for transfers and removes them: gloo would wait for ever the second time."""
        while works:
            name, work = works.pop(0)
            try:
                work.wait() if self.timeout is None else work.wait(self.timeout)
            except RuntimeError as error:
                raise self._failure(what, name, error) from error

    def trade(self, what: str, parts: list[Tensor], places: list[Tensor], workspace: Workspace) -> None:
        """Part i goes to rank i, and place i gets what rank i sends; nothing is sent of empty ones."""

        def pack(name: str, tensors: list[Tensor]) -> list[Message]:
            """Those of other ranks, or contiguous memory for them."""
            messages = []
            for peer, x in enumerate(tensors):
                if peer != self.rank and x.numel():
                    at = f"comm_{name}_{peer}", tuple(x.shape), x.dtype, x.device
                    messages.append((peer, x if x.is_contiguous() else workspace.take(*at)))
            return messages

        places[self.rank].copy_(parts[self.rank])
        receives, sends = pack("in", places), pack("out", parts)
        for peer, packed in sends:
            if packed is not parts[peer]:
                packed.copy_(parts[peer])
        pending = self.start(what, receives, sends)
        pending.wait_arrived()
        for peer, arrived in receives:
            if arrived is not places[peer]:
                places[peer].copy_(arrived)
        pending.wait_left()

    def gather(self, values: Sequence[int], what: str, device: torch.device | None = None) -> list[list[int]]:
        """The values of all ranks, at most CONTROL: all messages have one size, whatever a rank is doing."""
        assert len(values) <= CONTROL, f"a control message has at most {CONTROL} values, got {len(values)}"
        padded = [*values, *[0] * (CONTROL - len(values))]
        mine = torch.tensor(padded, dtype=torch.int64, device=self._control_device(device))
        table = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = dist.all_gather(table, mine, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._failure(what, "all ranks", error) from error
        self.wait(what, [("all ranks", work)])
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


def find_others(group: Group, timeout: float | timedelta | None) -> Ring | None:
    """`find_ring` if it has several ranks; else None, and the timeout, which nobody will need, is checked."""
    ring = find_ring(group)
    if ring is not None and ring.size > 1:
        return ring
    check_timeout(timeout)
    return None


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
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"timeout must be seconds, a timedelta or None, got {timeout!r}")
    if not 0 < seconds < 2**31:  # torch counts nanoseconds in 64 bits
        raise ValueError(f"timeout must be positive and below 2**31 seconds, got {timeout!r}")
    return timedelta(seconds=seconds)


class Agreement:
    """Says what this rank was called with, and learns whether the others were called alike."""

    def __init__(self, ring: Ring, function: str, device: torch.device | None) -> None:
        self.ring, self.function, self.device, self.is_made = ring, function, device, False

    def on(self, facts: Mapping[str, int], own: Sequence[int]) -> list[list[int]]:
        """Checks that all ranks state the same facts, and returns what each has of its `own`."""
        stated = {"the function": digest(self.function), **facts}
        if too_large := [name for name, value in stated.items() if abs(value) >= 2**63]:
            raise ValueError(f"{too_large[0]} must be below 2**63")
        self.is_made = True
        # The first value is 0 on a rank that refuses its arguments.
        values, what = [1, *stated.values(), *own], f"agreeing on {self.function}"
        table = self.ring.gather(values, what, self.device)
        for rank, row in enumerate(table):
            if not row[0]:
                raise ValueError(f"rank {rank} of {self.ring} refused its arguments; its own error says why")
        for i, name in enumerate(stated, start=1):
            first = table[0][i]
            other = next((rank for rank, row in enumerate(table) if row[i] != first), None)
            if other is not None:
                value, what = table[other][i], f"rank {other} differs from rank 0"
                if max(first, value) < 2**40:  # a digest says no more
                    what = f"{first} on rank 0 and {value} on rank {other}"
                raise ValueError(f"the ranks of {self.ring} must agree on {name}: {what}")
        return [row[1 + len(stated) :] for row in table]


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
    ring = find_others(group, timeout)
    with nullcontext() if ring is None else agree(ring, "a call", None, timeout):
        yield
