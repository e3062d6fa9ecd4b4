"""The engine of dilated attention on a rank's part of a call, with the keys that travel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import engine
from ..core.pattern_cache import get_global_pattern_cache
from ..engine import Gradients, Inputs, Merged, shape_of
from ..ops import RunOptions
from ..plan import Panel, Part, Plan, Tile, plan_crossing, plan_dilated
from ..plan.shape import Pass
from .comm import Ring
from .exchange import Exchange, Piece
from .schedule import RingSchedule

_TILES_A_ROUND = 2**24  # so that the numbers of tiles, from which dropout draws, differ


@dataclass(frozen=True)
class DilatedCall:
    """The static part of a rank's call."""

    ring: Ring
    schedule: RingSchedule
    options: RunOptions

    @property
    def part(self) -> Part:
        return self.schedule.part(self.ring.rank)

    def plan(self, inputs: Inputs, direction: Pass) -> Plan:
        return plan_dilated(
            self.schedule.spec,
            shape_of(inputs),
            itemsize=inputs.q.element_size(),
            direction=direction,
            docs=self.schedule.docs,
            workspace_bytes=self.options.workspace_bytes,
            cache=get_global_pattern_cache() if self.options.use_pattern_cache else None,
            part=self.part,
            lane=self.schedule.lanes[0][1] if self.schedule.strategy == "ring" else None,
        )

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        # With dropout both passes must cut the same tiles.
        plan = self.plan(inputs, "backward" if self.options.dropout_p else "forward")
        elsewhere = self._elsewhere(inputs, "forward")
        results = engine.forward(plan, inputs, elsewhere)
        if elsewhere is not None:
            elsewhere.exchange.finish()
        return results

    def backward(self, inputs: Inputs, merged: Merged) -> tuple[Tensor, Tensor, Tensor]:
        elsewhere = self._elsewhere(inputs, "backward")
        gradients = engine.backward(self.plan(inputs, "backward"), inputs, merged, elsewhere)
        if elsewhere is not None:
            elsewhere.exchange.finish()
        return gradients

    def _elsewhere(self, inputs: Inputs, direction: Pass) -> _Elsewhere | None:
        travels = self.schedule.steps(self.ring.rank)
        return _Elsewhere(self, inputs, direction) if travels else None


class _Elsewhere:
    """The keys of other ranks, for the engine."""

    def __init__(self, call: DilatedCall, inputs: Inputs, direction: Pass) -> None:
        self.call, self.inputs = call, inputs
        self.exchange = Exchange(call.ring, call.schedule, inputs, direction)

    def pieces(self, panel: Panel) -> Iterator[engine.Piece]:
        for piece in self.exchange.pieces((panel.kv_first, panel.kv_heads)):
            yield self._with_tiles(piece)

    def pieces_with_gradients(self, panel: Panel, sums: Gradients) -> Iterator[engine.PieceWithGradients]:
        first = panel.kv_first - sums.kv_origin[2]
        dk, dv = (x[:, :, first : first + panel.kv_heads] for x in (sums.dk, sums.dv))
        for piece in self.exchange.pieces_with_gradients((panel.kv_first, panel.kv_heads), dk, dv):
            yield self._with_tiles(piece)

    def _with_tiles(self, piece: Piece) -> _TiledPiece:
        call, known = self.call, self.call.schedule.tiles
        tiles = known.get((call.part, piece.number))
        if tiles is None:
            tiles = known[call.part, piece.number] = plan_crossing(
                call.schedule.spec,
                shape_of(self.inputs),
                call.part,
                piece.transfer.keys,
                piece.lane,
                itemsize=self.inputs.q.element_size(),
                docs=call.schedule.docs,
                workspace_bytes=call.options.workspace_bytes,
                first_index=(piece.number + 1) * _TILES_A_ROUND,
            )
        return _TiledPiece(tiles, piece, call.part.start)


@dataclass(frozen=True)
class _TiledPiece:
    """A piece, and the tiles in which dilated attention meets it."""

    tiles: tuple[Tile, ...]
    piece: Piece
    start: int

    def gather(self, tile: Tile, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        k, v, mask = self.piece.gather(self.piece.index_of(tile, partial(self._index, tile)), inputs)
        shape = tile.k_shape(k.shape[-1])
        return k.view(shape), v.view(shape), None if mask is None else mask.view(shape[:3])

    def add(self, tile: Tile, dk: Tensor, dv: Tensor) -> None:
        self.piece.add(self.piece.index_of(tile, partial(self._index, tile)), dk, dv)

    def _index(self, tile: Tile) -> Tensor:
        """The numbers of a tile's keys among the rows of the piece, in the order of its packed keys."""
        device = self.piece.keys.device
        rows = torch.arange(tile.k_first, tile.k_first + tile.k_count, device=device) * tile.rate
        first = self.start + tile.start
        heads = list(tile.heads)[:: tile.heads.group]
        numbers = [self.piece.numbers(tile.batch, head.kv, rows + (first + head.row)) for head in heads]
        batches = torch.arange(tile.num_batch, device=device)
        return (batches[:, None] * self.piece.batch_step + torch.cat(numbers)).flatten()
