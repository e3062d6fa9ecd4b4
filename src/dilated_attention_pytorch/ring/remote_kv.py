"""Keys and values on their way around the ring, a chunk ahead of the computation; gradients going back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import Inputs
from ..kernels.rows import FlatRows, Rows
from ..plan import Pass, Plan, Range, Region
from .comm import Pending, Ring
from .positions import Positions, list_positions
from .rounds import Round, Schedule, Transfer


class ReceivedChunk:
    """Keys and values of some positions of another rank, as rows: batch by batch, head by head of a lane."""

    def __init__(
        self, plan: Plan, step: Round, transfer: Transfer, inputs: Inputs, start: int, keys: Tensor
    ) -> None:
        self.plan, self.transfer, self.inputs, self.keys = plan, transfer, inputs, keys
        self.mask: Tensor | None = None
        self.gradients: Tensor | None = None
        batch = inputs.k.shape[0]
        # From one batch to the next in rows, or in the list of heads if batches differ.
        per_batch = transfer.differs_by_batch(batch)
        self.steps = torch.tensor([step.lane[1] if per_batch else 0, 0, 1]), step.lane[0]
        self.batch_step = 0 if per_batch else keys.shape[1] // max(1, batch)
        low, high = transfer.keys
        self.span, self.shift = high - low, start - low
        lists = [list_positions(each) + (i * self.span - low) for i, each in enumerate(transfer.needs)]
        self.positions = torch.cat(lists).to(keys.device)
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
            device, places = self.keys.device, rows.places
            steps, first = self.steps
            lists = (places @ steps - first).to(device)
            times = rows.numbers((0, 1, 0), device=device).view(len(places), -1)
            wanted = lists[:, None] * self.span + times + self.shift
            index = torch.searchsorted(self.positions, wanted)
            index += (places[:, :1] * self.batch_step).to(device)
            self._last = rows, index.flatten()
        return self._last[1]


class _Moving(NamedTuple):
    """Transfers under way, and where what arrives will stand."""

    pending: Pending
    rows: Tensor | None
    mask: Tensor | None = None


class RingKV:
    """The rounds of one pass of a rank. Round i + 1 is under way while round i is attended.

    All ranks count the same rounds, also those in which they neither send nor receive, so that they begin the
    transfers of a pair in the same order.
    """

    def __init__(
        self, ring: Ring, schedule: Schedule, inputs: Inputs, direction: Pass, workspace_bytes: int
    ) -> None:
        self.ring, self.schedule, self.inputs, self.direction = ring, schedule, inputs, direction
        self.workspace_bytes = workspace_bytes
        self.rounds = {each.number: each for each in schedule.rounds(ring.rank)}
        self.own = _OwnRows(inputs, schedule.shard(ring.rank)[0])
        self._moving: dict[int, _Moving] = {}
        self._returning: dict[int, _Moving] = {}
        self._next = 0
        self._begin_until(0)

    def chunks(self, region: Region) -> Iterator[ReceivedChunk]:
        """What this rank's queries attend of other ranks, for the key heads of a region: a lane."""
        for number in self._rounds_of(region.kv):
            chunk = self._arrived(number)
            if chunk is not None:
                yield chunk

    def chunks_with_gradients(self, region: Region, dk: Tensor, dv: Tensor) -> Iterator[ReceivedChunk]:
        """As `chunks`; the gradients that a chunk was given leave for its owner.

        What other ranks computed of this rank's keys is added to dk and dv (b, n, heads of the region, d).
        """
        sums = FlatRows.of(dk), FlatRows.of(dv)
        for x, (rows, _) in zip((dk, dv), sums, strict=True):
            assert rows.data_ptr() == x.data_ptr(), f"a copy would lose what is added to it: {x.stride()}"
        previous = None
        for number in self._rounds_of(region.kv):
            chunk = self._arrived(number)
            self._free(self._returning, number)
            if chunk is not None:
                slot = f"comm_grad_out_{number % 2}"
                dtype, device = self.inputs.accumulate_dtype, chunk.keys.device
                shape = tuple(chunk.keys.shape)
                chunk.gradients = self.inputs.workspace.take(slot, shape, dtype, device).zero_()
                yield chunk
            self._return(number, chunk)
            self._collect(previous, sums)
            previous = number
        self._collect(previous, sums)

    def finish(self) -> None:
        """Waits for all that is still leaving: its memory is about to serve others."""
        for moving in (*self._moving.values(), *self._returning.values()):
            moving.pending.wait_left()

    def _rounds_of(self, lane: Range) -> Iterator[int]:
        """The numbers of a lane's rounds; the next round begins as one is taken up."""
        first = self.schedule.lanes.index(lane) * self.schedule.rounds_a_lane
        for number in range(first, first + self.schedule.rounds_a_lane):
            self._begin_until(number + 1)
            yield number

    def _what(self, number: int) -> str:
        total = len(self.schedule.lanes) * self.schedule.rounds_a_lane
        return f"{self.direction} pass, step {number + 1} of {total}"

    def _begin_until(self, last: int) -> None:
        while self._next <= last:
            self._begin(self._next)
            self._next += 1

    def _begin(self, number: int) -> None:
        step = self.rounds.get(number)
        if step is None:
            return
        inputs, slot = self.inputs, number % 2
        self._free(self._moving, number)
        receives, sends = [], []
        keys = mask = None
        d, device = inputs.k.shape[-1], inputs.k.device
        if step.receive is not None:
            rows = step.receive.rows
            keys = inputs.workspace.take(f"comm_in_{slot}", (2, rows, d), inputs.k.dtype, device)
            receives.append((step.receive.peer, keys))
            if inputs.key_mask is not None:
                mask = inputs.workspace.take(f"comm_mask_in_{slot}", (rows,), torch.uint8, device)
                receives.append((step.receive.peer, mask))
        if step.send is not None:
            packed = inputs.workspace.take(f"comm_out_{slot}", (2, step.send.rows, d), inputs.k.dtype, device)
            sends.append((step.send.peer, self.own.pack(step.send, step.lane, packed)))
            if inputs.key_mask is not None:
                packed = inputs.workspace.take(
                    f"comm_mask_out_{slot}", (step.send.rows,), torch.uint8, device
                )
                sends.append((step.send.peer, self.own.pack_mask(step.send, packed)))
        self._moving[number] = _Moving(self.ring.start(self._what(number), receives, sends), keys, mask)

    def _arrived(self, number: int) -> ReceivedChunk | None:
        if number not in self._moving:
            return None
        step, (pending, keys, mask) = self.rounds[number], self._moving[number]
        pending.wait_arrived()
        if step.receive is None or keys is None:
            return None
        rank, shape, how = self.ring.rank, self.inputs.shape, (self.direction, self.workspace_bytes)
        plan = self.schedule.chunk_plan(rank, shape, step, *how)
        chunk = ReceivedChunk(plan, step, step.receive, self.inputs, self.schedule.shard(rank)[0], keys)
        chunk.mask = None if mask is None else mask.bool()
        return chunk

    def _return(self, number: int, chunk: ReceivedChunk | None) -> None:
        step = self.rounds.get(number)
        if step is None:
            return
        sends = [] if chunk is None or chunk.gradients is None else [(chunk.transfer.peer, chunk.gradients)]
        receives, sums = [], None
        if step.send is not None:
            k = self.inputs.k
            shape = (2, step.send.rows, k.shape[-1])
            slot, dtype = f"comm_grad_in_{number % 2}", self.inputs.accumulate_dtype
            sums = self.inputs.workspace.take(slot, shape, dtype, k.device)
            receives.append((step.send.peer, sums))
        what = f"{self._what(number)}, gradients"
        self._returning[number] = _Moving(self.ring.start(what, receives, sends), sums)

    def _collect(self, number: int | None, sums: tuple[FlatRows, FlatRows]) -> None:
        if number is None or number not in self._returning:
            return
        pending, parts, _ = self._returning[number]
        pending.wait_arrived()
        step = self.rounds[number]
        if parts is None or step.send is None:
            return
        index = self.own.index(step.send, sums[0], first_head=0)
        for total, part in zip(sums, parts, strict=True):
            total.rows.index_add_(0, index, part)

    @staticmethod
    def _free(moving: dict[int, _Moving], number: int) -> None:
        """Waits until what shares a slot with a round has left."""
        for earlier in [x for x in moving if x < number and (number - x) % 2 == 0]:
            moving.pop(earlier).pending.wait_left()


class _OwnRows:
    """The rows of this rank's keys and values that others ask for."""

    def __init__(self, inputs: Inputs, start: int) -> None:
        self.k, self.v, self.mask = FlatRows.of(inputs.k), FlatRows.of(inputs.v), inputs.key_mask
        self.batch, self.start = inputs.k.shape[0], start

    def index(self, transfer: Transfer, rows: FlatRows, first_head: int) -> Tensor:
        """The numbers, in `rows`, of a transfer's keys; its first head is number `first_head` there."""
        per_batch = transfer.differs_by_batch(self.batch)
        num_heads = len(transfer.needs) // (self.batch if per_batch else 1)
        lists = []
        for i, needed in enumerate(transfer.needs):
            batch, head = divmod(i, num_heads)
            lists.append(
                self._tokens(needed) * rows.steps[1]
                + (first_head + head) * rows.steps[2]
                + batch * rows.steps[0]
            )
        index = torch.cat(lists)
        if not per_batch:
            index = (torch.arange(self.batch, device="cpu")[:, None] * rows.steps[0] + index).flatten()
        return index.to(rows.rows.device)

    def pack(self, transfer: Transfer, lane: Range, packed: Tensor) -> Tensor:
        index = self.index(transfer, self.k, lane[0])
        torch.index_select(self.k.rows, 0, index, out=packed[0])
        if self.v.steps != self.k.steps:
            index = self.index(transfer, self.v, lane[0])
        torch.index_select(self.v.rows, 0, index, out=packed[1])
        return packed

    def pack_mask(self, transfer: Transfer, packed: Tensor) -> Tensor:
        assert self.mask is not None
        mask = self.mask.contiguous().view(torch.uint8)
        rows = FlatRows(mask.view(-1, 1), (mask.shape[1], 1, 0))
        return torch.index_select(rows.rows, 0, self.index(transfer, rows, 0), out=packed.view(-1, 1)).view(
            -1
        )

    def _tokens(self, needed: Positions) -> Tensor:
        return list_positions(needed) - self.start
