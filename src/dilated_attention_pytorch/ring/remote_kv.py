"""Keys and values of other ranks, received a step ahead of the computation; gradients on their way back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import Inputs
from ..kernels.rows import FlatRows, Rows
from ..plan import Pass, Plan, Range, Region
from .comm import Message, Pending, Ring
from .needs import list_positions
from .schedule import RingSchedule, Step, Transfer


class RemoteChunk:
    """Keys and values (2, rows, d) of another rank: batch by batch, head by head, by position."""

    def __init__(
        self, plan: Plan, step: Step, inputs: Inputs, start: int, keys: Tensor, mask: Tensor | None
    ) -> None:
        assert step.receive is not None
        self.plan, self.inputs, self.keys, self.mask = plan, inputs, keys, mask
        self.gradients: Tensor | None = None
        transfer, (low, high) = step.receive, step.receive.keys
        self.first_head, self.span, self.shift = step.kv[0], high - low, start - low
        # From one batch to the next in the list of needs or, if batches share it, in rows.
        is_shared = transfer.num_alike > 1
        self.list_step = 0 if is_shared else step.kv[1]
        self.row_step = keys.shape[1] // transfer.num_alike if is_shared else 0
        number, position = _listed(transfer)
        self.order = (number * self.span + position - low).to(keys.device)
        self._last: tuple[Rows, Tensor] | None = None

    def gather(self, rows: Rows, _branch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        index = self._index(rows)
        k, v = (
            FlatRows(x, (0, 0, 0)).read(slot, index, self.inputs.workspace, dtype)
            for slot, x in zip(("key", "value"), self.keys, strict=True)
        )
        shape = (*rows.shape, k.shape[-1])
        return k.view(shape), v.view(shape), None if self.mask is None else self.mask[index].view(rows.shape)

    def add(self, rows: Rows, _branch: int, dk: Tensor, dv: Tensor) -> None:
        assert self.gradients is not None
        index = self._index(rows)
        for total, part in zip(self.gradients, (dk, dv), strict=True):
            total.index_add_(0, index, part.reshape(index.numel(), -1).to(total.dtype))

    def _index(self, rows: Rows) -> Tensor:
        """The numbers of rows among those of the chunk; backward asks for them twice in a row."""
        if self._last is None or self._last[0] is not rows:
            device = self.keys.device
            batch, _, head = rows.places.to(device).unbind(1)
            times = rows.numbers((0, 1, 0), device=device).view(len(batch), -1)
            number = batch * self.list_step + head - self.first_head
            index = torch.searchsorted(self.order, number[:, None] * self.span + times + self.shift)
            self._last = rows, (index + (batch * self.row_step)[:, None]).flatten()
        return self._last[1]


class _Moving(NamedTuple):
    """Transfers under way, and where what arrives will stand."""

    pending: Pending
    rows: Tensor | None
    mask: Tensor | None = None


class RingKV:
    """The steps of one pass of a rank. Step i + 1 is under way while step i is attended.

    All ranks count the same steps, also those in which they neither send nor receive, so that both ranks of a
    pair begin their transfers in the same order.
    """

    def __init__(self, ring: Ring, schedule: RingSchedule, inputs: Inputs, direction: Pass) -> None:
        self.ring, self.schedule, self.inputs, self.direction = ring, schedule, inputs, direction
        self.steps = {step.number: step for step in schedule.steps(ring.rank)}
        self.start, self.own = schedule.shard(ring.rank)[0], (FlatRows.of(inputs.k), FlatRows.of(inputs.v))
        self._moving: dict[int, _Moving] = {}
        self._returning: dict[int, _Moving] = {}
        self._next = 0
        self._begin_until(0)

    def chunks(self, region: Region) -> Iterator[RemoteChunk]:
        """What this rank's queries attend of other ranks, for the key heads of a region."""
        for number in self._numbers(region.kv):
            chunk = self._receive(number)
            if chunk is not None:
                yield chunk

    def chunks_with_gradients(self, region: Region, dk: Tensor, dv: Tensor) -> Iterator[RemoteChunk]:
        """As `chunks`; the gradients that a chunk was given are sent to its owner.

        What other ranks computed for this rank's keys is added to dk and dv (b, n, heads of the region, d).
        """
        sums = FlatRows.of(dk), FlatRows.of(dv)
        for x, (rows, _) in zip((dk, dv), sums, strict=True):
            assert rows.data_ptr() == x.data_ptr(), f"a copy would lose what is added to it: {x.stride()}"
        previous = None
        for number in self._numbers(region.kv):
            chunk = self._receive(number)
            _wait_for_slot(self._returning, number)
            if chunk is not None:
                chunk.gradients = self._take(
                    "grad_out", number, chunk.keys.shape[1], is_gradient=True
                ).zero_()
                yield chunk
            self._return(number, chunk)
            self._collect(previous, sums)
            previous = number
        self._collect(previous, sums)

    def finish(self) -> None:
        """Waits until everything has left: its memory is about to serve others."""
        for moving in (*self._moving.values(), *self._returning.values()):
            moving.pending.wait_left()

    def _numbers(self, kv: Range) -> Iterator[int]:
        """The steps of a group of key heads; the next one begins as one is taken up."""
        count = self.schedule.steps_a_group
        first = self.schedule.kv_groups.index(kv) * count
        for number in range(first, first + count):
            self._begin_until(number + 1)
            yield number

    def _what(self, number: int) -> str:
        total = len(self.schedule.kv_groups) * self.schedule.steps_a_group
        return f"{self.direction} pass, step {number + 1} of {total}"

    def _take(self, name: str, number: int, rows: int, is_gradient: bool = False) -> Tensor:
        """A buffer (2, rows, d); those of two steps are in use at a time."""
        k = self.inputs.k
        dtype = self.inputs.accumulate_dtype if is_gradient else k.dtype
        return self.inputs.workspace.take(
            f"comm_{name}_{number % 2}", (2, rows, k.shape[-1]), dtype, k.device
        )

    def _take_mask(self, name: str, number: int, rows: int) -> Tensor:
        slot = f"comm_mask_{name}_{number % 2}"
        return self.inputs.workspace.take(slot, (rows,), torch.uint8, self.inputs.k.device)

    def _begin_until(self, last: int) -> None:
        for number in range(self._next, last + 1):
            if number in self.steps:
                self._begin(number, self.steps[number])
        self._next = max(self._next, last + 1)

    def _begin(self, number: int, step: Step) -> None:
        _wait_for_slot(self._moving, number)
        receives, sends = list[Message](), list[Message]()
        keys = mask = None
        if (source := step.receive) is not None:
            keys = self._take("in", number, source.rows)
            receives.append((source.peer, keys))
            if self.inputs.key_mask is not None:
                mask = self._take_mask("in", number, source.rows)
                receives.append((source.peer, mask))
        if (target := step.send) is not None:
            packed, (k, v) = self._take("out", number, target.rows), self.own
            index = self._index(target, k, step.kv)
            torch.index_select(k.rows, 0, index, out=packed[0])
            index = index if k.steps == v.steps else self._index(target, v, step.kv)
            torch.index_select(v.rows, 0, index, out=packed[1])
            sends.append((target.peer, packed))
            if self.inputs.key_mask is not None:
                flags = self.inputs.key_mask.contiguous().view(torch.uint8)
                index = self._index(target, FlatRows(flags.view(-1, 1), (flags.shape[1], 1, 0)), step.kv)
                packed = self._take_mask("out", number, target.rows)
                sends.append((target.peer, torch.index_select(flags.flatten(), 0, index, out=packed)))
        self._moving[number] = _Moving(self.ring.start(self._what(number), receives, sends), keys, mask)

    def _receive(self, number: int) -> RemoteChunk | None:
        if number not in self._moving:
            return None
        step, (pending, keys, mask) = self.steps[number], self._moving[number]
        pending.wait_arrived()
        if keys is None:
            return None
        plan = self.schedule.plan(self.ring.rank, self.direction, step)
        mask = None if mask is None else mask.bool()
        return RemoteChunk(plan, step, self.inputs, self.start, keys, mask)

    def _return(self, number: int, chunk: RemoteChunk | None) -> None:
        """Begins to send the gradients of a chunk, and to receive those of what was sent in its step."""
        step = self.steps.get(number)
        if step is None:
            return
        receives, sends = list[Message](), list[Message]()
        sums = None
        if step.receive is not None and chunk is not None and chunk.gradients is not None:
            sends.append((step.receive.peer, chunk.gradients))
        if step.send is not None:
            sums = self._take("grad_in", number, step.send.rows, is_gradient=True)
            receives.append((step.send.peer, sums))
        what = f"{self._what(number)}, gradients"
        self._returning[number] = _Moving(self.ring.start(what, receives, sends), sums)

    def _collect(self, number: int | None, sums: tuple[FlatRows, FlatRows]) -> None:
        if number is None or number not in self._returning:
            return
        pending, parts, _ = self._returning[number]
        pending.wait_arrived()
        step = self.steps[number]
        if parts is None or step.send is None:
            return
        index = self._index(step.send, sums[0], (0, step.kv[1]))
        for total, part in zip(sums, parts, strict=True):
            total.rows.index_add_(0, index, part)

    def _index(self, transfer: Transfer, rows: FlatRows, kv: Range) -> Tensor:
        """The numbers, in `rows`, of the keys of a transfer; its heads are `kv`, (first, number), there."""
        per_batch, per_token, per_head = rows.steps
        number, position = _listed(transfer)
        index = (position - self.start) * per_token + (kv[0] + number % kv[1]) * per_head
        index += number // kv[1] * per_batch
        batches = torch.arange(transfer.num_alike, device="cpu") * per_batch
        return (batches[:, None] + index).flatten().to(rows.rows.device)


def _listed(transfer: Transfer) -> tuple[Tensor, Tensor]:
    """The number of its list of needs, and the position, of each key of a transfer."""
    lists = [list_positions(needed) for needed in transfer.needs]
    counts = torch.tensor([len(x) for x in lists], device="cpu")
    return torch.repeat_interleave(torch.arange(len(lists), device="cpu"), counts), torch.cat(lists)


def _wait_for_slot(moving: dict[int, _Moving], number: int) -> None:
    """Waits until what shares buffers with a step has left."""
    for earlier in [x for x in moving if x < number and (number - x) % 2 == 0]:
        moving.pop(earlier).pending.wait_left()
