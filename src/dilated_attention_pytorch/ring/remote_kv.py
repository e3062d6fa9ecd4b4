"""Keys and values of other ranks, received a step ahead of the computation; gradients on their way back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..kernels import Inputs
from ..kernels.rows import FlatRows, Rows
from ..plan import Pass, Plan, Range, Region
from .comm import Message, Pending, Ring
from .needs import list_positions
from .schedule import RingSchedule, Step, Transfer

_T = TypeVar("_T")


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


class _Buffer(NamedTuple):
    """Memory of one message, and where the keys and values (2, rows, d) and their mask lie in it."""

    memory: Tensor
    keys: Tensor
    mask: Tensor | None


class RingKV:
    """The steps of one pass of a rank. Step i + 1 is under way while step i is attended.

    All ranks count the same steps, also those in which they neither send nor receive, so that both ranks of a
    pair begin their transfers in the same order. Buffers serve every second step.
    """

    def __init__(self, ring: Ring, schedule: RingSchedule, inputs: Inputs, direction: Pass) -> None:
        self.ring, self.schedule, self.inputs, self.direction = ring, schedule, inputs, direction
        self.steps = {step.number: step for step in schedule.steps(ring.rank)}
        self.start, self.own = schedule.shard(ring.rank)[0], (FlatRows.of(inputs.k), FlatRows.of(inputs.v))
        self._moving: dict[int, tuple[Pending, _Buffer | None]] = {}
        self._returning: dict[int, tuple[Pending, Tensor | None]] = {}
        self._begun = -1  # the last step
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
                chunk.gradients = self._take_gradients("out", number, chunk.keys.shape[1]).zero_()
                yield chunk
            self._return(number, chunk)
            self._collect(previous, sums)
            previous = number
        self._collect(previous, sums)

    def finish(self) -> None:
        """Waits until everything has left: its memory is about to serve others."""
        for pending, _ in (*self._moving.values(), *self._returning.values()):
            pending.wait_left()

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

    def _take(self, name: str, number: int, rows: int) -> _Buffer:
        k, size = self.inputs.k, 2 * rows * self.inputs.k.shape[-1] * self.inputs.k.element_size()
        has_mask = self.inputs.key_mask is not None
        slot = f"comm_{name}_{number % 2}"
        memory = self.inputs.workspace.take(slot, (size + rows * has_mask,), torch.uint8, k.device)
        keys = memory[:size].view(k.dtype).view(2, rows, -1)
        return _Buffer(memory, keys, memory[size:] if has_mask else None)

    def _take_gradients(self, name: str, number: int, rows: int) -> Tensor:
        shape, slot = (2, rows, self.inputs.k.shape[-1]), f"comm_grad_{name}_{number % 2}"
        return self.inputs.workspace.take(slot, shape, self.inputs.accumulate_dtype, self.inputs.k.device)

    def _begin_until(self, last: int) -> None:
        for number in range(self._begun + 1, last + 1):
            if step := self.steps.get(number):
                self._begin(step)
        self._begun = max(self._begun, last)

    def _begin(self, step: Step) -> None:
        """Sends and receives keys, values and masks."""
        receives, sends = list[Message](), list[Message]()
        number, arriving = step.number, None
        _wait_for_slot(self._moving, number)
        if step.receive is not None:
            arriving = self._take("in", number, step.receive.rows)
            receives.append((step.receive.peer, arriving.memory))
        if step.send is not None:
            memory, keys, mask = self._take("out", number, step.send.rows)
            index = {x: self._index(step.send, x, step.kv) for x in {own.steps for own in self.own}}
            for x, packed in zip(self.own, keys, strict=True):
                torch.index_select(x.rows, 0, index[x.steps], out=packed)
            if mask is not None and self.inputs.key_mask is not None:
                flags = self.inputs.key_mask.contiguous().view(torch.uint8)
                of_mask = self._index(step.send, (flags.shape[1], 1, 0), step.kv)
                torch.index_select(flags.flatten(), 0, of_mask, out=mask)
            sends.append((step.send.peer, memory))
        self._moving[number] = self.ring.start(self._what(number), receives, sends), arriving

    def _receive(self, number: int) -> RemoteChunk | None:
        if number not in self._moving:
            return None
        step, (pending, buffer) = self.steps[number], self._moving[number]
        pending.wait_arrived()
        if buffer is None:
            return None
        plan = self.schedule.plan(self.ring.rank, self.direction, step)
        mask = None if buffer.mask is None else buffer.mask.bool()
        return RemoteChunk(plan, step, self.inputs, self.start, buffer.keys, mask)

    def _return(self, number: int, chunk: RemoteChunk | None) -> None:
        """Sends the gradients of a chunk, and receives those of what was sent in its step."""
        step = self.steps.get(number)
        if step is None:
            return
        receives, sends = list[Message](), list[Message]()
        arriving = None
        if step.receive is not None and chunk is not None and chunk.gradients is not None:
            sends.append((step.receive.peer, chunk.gradients))
        if step.send is not None:
            arriving = self._take_gradients("in", number, step.send.rows)
            receives.append((step.send.peer, arriving))
        what = f"{self._what(number)}, gradients"
        self._returning[number] = self.ring.start(what, receives, sends), arriving

    def _collect(self, number: int | None, sums: tuple[FlatRows, FlatRows]) -> None:
        """Adds the gradients that arrived in a step."""
        if number is None or number not in self._returning:
            return
        step, (pending, gradients) = self.steps[number], self._returning[number]
        pending.wait_arrived()
        if gradients is not None and step.send is not None:
            index = self._index(step.send, sums[0].steps, (0, step.kv[1]))
            for total, part in zip(sums, gradients, strict=True):
                total.rows.index_add_(0, index, part)

    def _index(self, transfer: Transfer, steps: tuple[int, int, int], kv: Range) -> Tensor:
        """The numbers of a transfer's keys where (batch, token, head) count `steps` rows.

        The heads of the transfer are `kv`, (first, number), there.
        """
        number, position = _listed(transfer)
        index = (position - self.start) * steps[1] + (kv[0] + number % kv[1]) * steps[2]
        index += number // kv[1] * steps[0]
        batches = torch.arange(transfer.num_alike, device="cpu") * steps[0]
        return (batches[:, None] + index).flatten().to(self.inputs.k.device)


def _listed(transfer: Transfer) -> tuple[Tensor, Tensor]:
    """The number of its list of needs, and the position, of each key of a transfer."""
    lists = [list_positions(needed) for needed in transfer.needs]
    counts = torch.tensor([len(x) for x in lists], device="cpu")
    return torch.repeat_interleave(torch.arange(len(lists), device="cpu"), counts), torch.cat(lists)


def _wait_for_slot(moving: dict[int, tuple[Pending, _T]], number: int) -> None:
    """Waits until what shares buffers with a step has left."""
    for earlier in [x for x in moving if x < number and (number - x) % 2 == 0]:
        moving.pop(earlier)[0].wait_left()
