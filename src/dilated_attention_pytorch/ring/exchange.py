"""Keys and values on their way around the ring, one piece ahead of the computation; gradients going back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine import Inputs
from ..flat_rows import FlatRows
from ..plan.segments import Range
from ..plan.shape import Pass
from .comm import Pending, Ring
from .positions import Positions, list_positions
from .rounds import Round, Schedule, Transfer


class Piece:
    """Keys and values of some positions of another rank, as rows: batch by batch, head by head of a lane."""

    def __init__(
        self, step: Round, transfer: Transfer, batch: int, keys: Tensor, mask: Tensor | None
    ) -> None:
        self.number, self.transfer, self.lane = step.number, transfer, step.lane
        self.positions = [list_positions(each).to(keys.device) for each in transfer.needs]
        self.first = list(accumulate((x.numel() for x in self.positions), initial=0))
        # From one batch to the next in rows, or in the list of heads if batches differ.
        per_batch = transfer.differs_by_batch(batch)
        self.batch_step = 0 if per_batch else keys.shape[1] // max(1, batch)
        self.heads_a_batch = step.lane[1] if per_batch else 0
        self.keys, self.mask = keys, mask
        self.gradients: Tensor | None = None
        self._last: tuple[object, Tensor] | None = None

    def numbers(self, batch: int, kv: int, positions: Tensor) -> Tensor:
        """The row numbers of positions of a batch's key head."""
        head = kv - self.lane[0] + batch * self.heads_a_batch
        first = self.first[head] + batch * self.batch_step
        return torch.searchsorted(self.positions[head], positions.contiguous()) + first

    def index_of(self, tile: object, make: Callable[[], Tensor]) -> Tensor:
        """The index of a tile: backward asks for it twice in a row."""
        if self._last is None or self._last[0] is not tile:
            self._last = tile, make()
        return self._last[1]

    def gather(self, index: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows of keys and values, and their mask, by number."""
        k, v = (
            FlatRows(x, 0, 0, 0).gather(s, index, inputs)
            for s, x in zip(("key", "value"), self.keys, strict=True)
        )
        return k, v, None if self.mask is None else self.mask[index]

    def add(self, index: Tensor, dk: Tensor, dv: Tensor) -> None:
        assert self.gradients is not None
        for total, part in zip(self.gradients, (dk, dv), strict=True):
            total.index_add_(0, index, part.reshape(index.numel(), -1).to(total.dtype))


class _Moving(NamedTuple):
    """Transfers under way, and where what arrives will stand."""

    pending: Pending
    rows: Tensor | None
    mask: Tensor | None = None


class Exchange:
    """The rounds of one pass of a rank. Round i + 1 is under way while round i is attended.

    All ranks count the same rounds, also those in which they neither send nor receive, so that they begin the
    transfers of a pair in the same order.
    """

    def __init__(self, ring: Ring, schedule: Schedule, inputs: Inputs, name: Pass) -> None:
        self.ring, self.schedule, self.inputs, self.name = ring, schedule, inputs, name
        self.rounds = {each.number: each for each in schedule.rounds(ring.rank)}
        self.own = _OwnRows(inputs, schedule.shard(ring.rank)[0])
        self._moving: dict[int, _Moving] = {}
        self._returning: dict[int, _Moving] = {}
        self._next = 0
        self._begin_until(0)

    def pieces(self, lane: Range) -> Iterator[Piece]:
        """What this rank's queries attend of other ranks, for a lane of key heads."""
        for number in self._rounds_of(lane):
            piece = self._arrived(number)
            if piece is not None:
                yield piece

    def pieces_with_gradients(self, lane: Range, dk: Tensor, dv: Tensor) -> Iterator[Piece]:
        """As `pieces`; the gradients that a piece was given leave for its owner.

        What other ranks computed of this rank's keys is added to dk and dv (b, n, heads of the lane, d).
        """
        sums = FlatRows.onto(dk), FlatRows.onto(dv)
        previous = None
        for number in self._rounds_of(lane):
            piece = self._arrived(number)
            self._free(self._returning, number)
            if piece is not None:
                slot = f"comm_grad_out_{number % 2}"
                dtype, device = self.inputs.accumulate_dtype, piece.keys.device
                shape = tuple(piece.keys.shape)
                piece.gradients = self.inputs.workspace.take(slot, shape, dtype, device).zero_()
                yield piece
            self._return(number, piece)
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
        return f"{self.name} pass, step {number + 1} of {total}"

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

    def _arrived(self, number: int) -> Piece | None:
        if number not in self._moving:
            return None
        step, (pending, keys, mask) = self.rounds[number], self._moving[number]
        pending.wait_arrived()
        if step.receive is None or keys is None:
            return None
        seen = None if mask is None else mask.bool()
        return Piece(step, step.receive, self.inputs.k.shape[0], keys, seen)

    def _return(self, number: int, piece: Piece | None) -> None:
        step = self.rounds.get(number)
        if step is None:
            return
        sends = [] if piece is None or piece.gradients is None else [(piece.transfer.peer, piece.gradients)]
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
                self._tokens(needed) * rows.time + (first_head + head) * rows.head + batch * rows.batch
            )
        index = torch.cat(lists)
        if not per_batch:
            index = (torch.arange(self.batch, device="cpu")[:, None] * rows.batch + index).flatten()
        return index.to(rows.rows.device)

    def pack(self, transfer: Transfer, lane: Range, packed: Tensor) -> Tensor:
        index = self.index(transfer, self.k, lane[0])
        torch.index_select(self.k.rows, 0, index, out=packed[0])
        if not self.v.same_steps(self.k):
            index = self.index(transfer, self.v, lane[0])
        torch.index_select(self.v.rows, 0, index, out=packed[1])
        return packed

    def pack_mask(self, transfer: Transfer, packed: Tensor) -> Tensor:
        assert self.mask is not None
        mask = self.mask.contiguous().view(torch.uint8)
        rows = FlatRows(mask.view(-1, 1), mask.shape[1], 1, 0)
        return torch.index_select(rows.rows, 0, self.index(transfer, rows, 0), out=packed.view(-1, 1)).view(
            -1
        )

    def _tokens(self, needed: Positions) -> Tensor:
        return list_positions(needed) - self.start
