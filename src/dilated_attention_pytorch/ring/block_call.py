"""The engine of block-sparse attention on a rank's part of a call, with the blocks that travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ..block_engine import attend_into, gradients_into, tile_tokens
from ..engine import Inputs, Merged, scatter
from ..kernels import How
from ..ops import RunOptions
from ..plan import BlockPattern, BlockPlan, plan_blocks
from ..plan.block_sparse import Panel, Tile
from ..plan.segments import Range
from ..plan.shape import Pass
from .comm import Ring
from .exchange import Exchange, Piece
from .positions import Positions
from .rounds import Schedule


@dataclass(frozen=True, kw_only=True)
class BlockSchedule(Schedule):
    """Who needs which blocks of whom."""

    pattern: BlockPattern

    @property
    def differs_by_batch(self) -> bool:
        return len(self.pattern) not in (1, self.shape.h)

    def needs(self, queries: Range, keys: Range) -> tuple[Positions, ...]:
        pattern, h, h_kv = self.pattern, self.shape.h, self.shape.h_kv
        batches = self.shape.b if self.differs_by_batch else 1
        is_future = pattern.is_causal and keys[0] >= queries[1]
        if is_future or queries[0] == queries[1] or keys[0] == keys[1]:
            return ((),) * (batches * h_kv)
        runs = [self._runs(layout, queries, keys) for layout in range(len(pattern))]
        if len(pattern) == 1:
            return (runs[0],) * h_kv
        group = h // h_kv
        return tuple(sum(runs[i : i + group], ()) for i in range(0, batches * h, group))

    def _runs(self, layout: int, queries: Range, keys: Range) -> Positions:
        """The kept positions of a range of keys."""
        pattern, size = self.pattern, self.pattern.block_size
        rows = layout * pattern.rows + queries[0] // size, layout * pattern.rows - (-queries[1] // size)
        columns = pattern.columns[int(pattern.starts[rows[0]]) : int(pattern.starts[rows[1]])]
        is_asked = (columns >= keys[0] // size) & (columns < -(-keys[1] // size))
        columns = torch.unique(columns[is_asked])
        if not columns.numel():
            return ()
        breaks = (columns.diff() != 1).nonzero().flatten()
        firsts = [int(columns[0]), *columns[breaks + 1].tolist()]
        lasts = [*columns[breaks].tolist(), int(columns[-1])]
        return tuple(
            range(max(keys[0], first * size), min(keys[1], (last + 1) * size))
            for first, last in zip(firsts, lasts, strict=True)
        )

    def plan(self, queries: Range, keys: Range, lane: Range) -> BlockPlan:
        """How queries meet keys, for the query heads of a lane; kept here once it was made."""
        known = self._plans.get((queries, keys, lane))
        if known is None:
            group = self.shape.h // self.shape.h_kv
            heads = range(lane[0] * group, (lane[0] + lane[1]) * group)
            layouts: Sequence[int] = (0,)
            if len(self.pattern) > 1:
                layouts = [b + h for b in range(0, len(self.pattern), self.shape.h) for h in heads]
            known = self._plans[queries, keys, lane] = plan_blocks(self.pattern, queries, keys, layouts)
        return known

    @cached_property
    def _plans(self) -> dict[tuple[Range, Range, Range], BlockPlan]:
        return {}


@dataclass(frozen=True)
class _BlockPiece:
    """A piece as block-sparse attention meets it."""

    piece: Piece
    block_size: int

    def gather(self, panel: Panel, tile: Tile, number: int, inputs: Inputs) -> tuple[Tensor, Tensor, How]:
        k, v, mask = self.piece.gather(self.piece.index_of(tile, partial(self._index, panel, tile)), inputs)
        shape = (panel.num_kv * tile.columns.shape[0], 1, tile.k_len, k.shape[-1])
        seen = None if mask is None else mask.view(shape[:3])
        return inputs.how(k.view(shape), v.view(shape), seen, panel.index * 2**16 + number, tile.is_causal)

    def add(self, panel: Panel, tile: Tile, dk: Tensor, dv: Tensor) -> None:
        self.piece.add(self.piece.index_of(tile, partial(self._index, panel, tile)), dk, dv)

    def _index(self, panel: Panel, tile: Tile) -> Tensor:
        tokens = tile_tokens(tile, self.block_size, self.piece.keys.device).flatten()
        first = self.piece.lane[0] + panel.kv
        heads = range(first, first + panel.num_kv)
        return torch.cat([self.piece.numbers(panel.batch, head, tokens) for head in heads])


@dataclass(frozen=True)
class BlockCall:
    """The static part of a rank's call, and the engine on it, lane by lane of key heads."""

    ring: Ring
    schedule: BlockSchedule
    options: RunOptions

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        q, workspace = inputs.q, inputs.workspace
        out = workspace.result(q.shape, q.dtype, q.device)
        lse = workspace.result((q.shape[0], q.shape[2], q.shape[1]), inputs.accumulate_dtype, q.device)
        exchange = self._exchange(inputs, "forward")
        for lane in self.schedule.lanes:
            part, heads = self._lane(inputs, lane)
            block = out[:, :, heads]
            total = self._total("acc_out", block, inputs)
            rows = self.options.workspace_bytes, total, lse[:, heads]
            attend_into(self._plan(lane), part, *rows)
            for piece in exchange.pieces(lane) if exchange else ():
                salted = replace(part, seed=scatter(part.seed + 1 + piece.number))
                attend_into(self._plan(lane, piece), salted, *rows, self._of(piece))
            if total is not block:
                block.copy_(total)
        if exchange:
            exchange.finish()
        return out, lse

    def backward(self, inputs: Inputs, merged: Merged) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (inputs.q, inputs.k, inputs.v)
        dq, dk, dv = (inputs.workspace.result(x.shape, x.dtype, x.device) for x in tensors)
        exchange = self._exchange(inputs, "backward")
        for lane in self.schedule.lanes:
            part, heads = self._lane(inputs, lane)
            kv = slice(lane[0], lane[0] + lane[1])
            blocks = dq[:, :, heads], dk[:, :, kv], dv[:, :, kv]
            slots = ("lane_dq", "lane_dk", "lane_dv")
            totals = tuple(self._total(slot, x, inputs) for slot, x in zip(slots, blocks, strict=True))
            of_lane = _lane_results(merged, heads)
            targets = self.options.workspace_bytes, of_lane, totals
            gradients_into(self._plan(lane), part, *targets)
            for piece in exchange.pieces_with_gradients(lane, *totals[1:]) if exchange else ():
                salted = replace(part, seed=scatter(part.seed + 1 + piece.number))
                gradients_into(self._plan(lane, piece), salted, *targets, self._of(piece))
            for block, total in zip(blocks, totals, strict=True):
                if total is not block:
                    block.copy_(total)
        if exchange:
            exchange.finish()
        return dq, dk, dv

    def _exchange(self, inputs: Inputs, direction: Pass) -> Exchange | None:
        travels = self.schedule.rounds(self.ring.rank)
        return Exchange(self.ring, self.schedule, inputs, direction) if travels else None

    def _lane(self, inputs: Inputs, lane: Range) -> tuple[Inputs, slice]:
        group = self.schedule.shape.h // self.schedule.shape.h_kv
        heads, kv = slice(lane[0] * group, (lane[0] + lane[1]) * group), slice(lane[0], lane[0] + lane[1])
        k, v = inputs.k[:, :, kv], inputs.v[:, :, kv]
        seed = scatter(inputs.seed + lane[0])
        return replace(inputs, q=inputs.q[:, :, heads], k=k, v=v, seed=seed), heads

    def _plan(self, lane: Range, piece: Piece | None = None) -> BlockPlan:
        own = self.schedule.shard(self.ring.rank)
        keys = own if piece is None else piece.transfer.keys
        return self.schedule.plan(own, keys, lane)

    def _of(self, piece: Piece) -> _BlockPiece:
        return _BlockPiece(piece, self.schedule.pattern.block_size)

    @staticmethod
    def _total(slot: str, block: Tensor, inputs: Inputs) -> Tensor:
        """Where a lane's sums stand: the result itself, or float32 of half precision."""
        if block.dtype == inputs.accumulate_dtype:
            return block
        return inputs.workspace.take(slot, tuple(block.shape), inputs.accumulate_dtype, block.device)


def _lane_results(merged: Merged, heads: slice) -> Merged:
    grad_lse = None if merged.grad_lse is None else merged.grad_lse[:, heads]
    return Merged(merged.out[:, :, heads], merged.lse[:, heads], merged.grad_out[:, :, heads], grad_lse)
