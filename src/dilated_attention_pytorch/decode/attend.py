"""New tokens attend to each other and to earlier keys: a schedule over the engine's kernels and merge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from .. import engine
from ..core.pattern_cache import get_global_pattern_cache
from ..core.sources import FRESH
from ..core.workspace import Workspace
from ..engine import Inputs, shape_of
from ..kernels import How, Request, choose_kernel
from ..merge import merge_
from ..ops import check_execution
from ..plan import DEFAULT_WORKSPACE_BYTES, Panel, Part, Shape, Tile, plan_crossing, plan_dilated
from ..plan.heads import even_parts
from ..spec import DilatedSpec, Execution
from .lanes import Lane, as_slice, plan_lanes

_WIDE_ROWS = 4096  # key rows of half precision that are widened at a time, 1 MiB with 64 features


class Past(Protocol):
    """The keys of a stream, by lane: of the segment that the newest token lies in."""

    def rows(self, lane: Lane, first: int, count: int) -> tuple[Tensor, Tensor]:
        """k and v (b, kv heads of the lane, count, d) of rows `first` and following; last stride 1."""


def check_decoding(name: str, execution: Execution | None) -> Execution:
    """The execution of a stream, or the default one."""
    execution = check_execution(execution)
    if execution.memory != FRESH:
        raise ValueError(f"{name} takes fresh memory, got an execution with memory={execution.memory!r}")
    return execution


@dataclass(frozen=True)
class Stream:
    """How a stream of tokens attends; `spec` is causal."""

    spec: DilatedSpec
    num_heads: int
    num_kv_heads: int
    execution: Execution

    @property
    def workspace_bytes(self) -> int:
        return self.execution.workspace_bytes or DEFAULT_WORKSPACE_BYTES

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        return plan_lanes(self.spec, self.num_heads, self.num_kv_heads)

    def attend_one(self, q: Tensor, position: int, past: Past) -> Tensor:
        """out (b, 1, h, d) of the query at `position`; `past` holds its own key too."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device)
        scale = self.spec.scale_for(q.shape[-1])
        kernel = choose_kernel(Request(q.device, q.dtype, scale=scale), self.execution.kernel)
        tile_dtype = dtype if kernel.widens else q.dtype
        for lane in self.lanes:
            if not lane.selects(position):
                continue
            query = lane.of_queries(q).transpose(1, 2).to(tile_dtype).contiguous()
            rows, lse_rows = lane.of_queries(out), lane.of_queries(lse)
            count = lane.rows_before(position % lane.window + 1)
            # A widened copy is attended while it is in the processor's cache.
            most = count if tile_dtype == q.dtype else max(1, _WIDE_ROWS // (len(lane.kv_heads) * q.shape[0]))
            for first, num in even_parts(count, most):
                keys, values = (x.to(tile_dtype) for x in past.rows(lane, first, num))
                part, part_lse = kernel.forward(query, keys, values, How(False, scale))
                merge_(rows, lse_rows, part.transpose(1, 2), part_lse.transpose(1, 2))
            if as_slice(lane.heads) is None:  # copies, not views
                out[:, :, list(lane.heads)], lse[:, :, list(lane.heads)] = rows, lse_rows
        return out.to(q.dtype)

    def attend_many(self, q: Tensor, k: Tensor, v: Tensor, start: int, past: Past) -> Tensor:
        """out (b, m, h, d) of the m tokens from position `start`; `past` holds the keys before them."""
        # Segments begin anew after each common multiple: smaller numbers find the plan of an earlier call.
        start %= math.lcm(*self.spec.segment_lengths)
        scale = self.spec.scale_for(q.shape[-1])
        kernel = choose_kernel(Request(q.device, q.dtype, scale=scale), self.execution.kernel)
        inputs = Inputs(q, k, v, None, scale, 0.0, 0, kernel, Workspace())
        shape, part = shape_of(inputs), Part(start + q.shape[1], start, self.num_heads, 0)
        plan = plan_dilated(
            self.spec,
            shape,
            itemsize=q.element_size(),
            workspace_bytes=self.workspace_bytes,
            cache=get_global_pattern_cache() if self.execution.use_pattern_cache else None,
            part=part,
            lane=self._heads_at_once(shape, q.element_size()),
        )
        out, _ = engine.forward(plan, inputs, _Earlier(self, inputs, part, past) if start else None)
        return out

    def _heads_at_once(self, shape: Shape, itemsize: int) -> int:
        """Key/value heads whose float32 sums fit half of the workspace; all where none are needed."""
        if itemsize >= 4:
            return shape.h_kv
        per_head = shape.b * shape.n * (shape.h // shape.h_kv) * shape.d * 4
        return min(shape.h_kv, max(1, self.workspace_bytes // 2 // max(1, per_head)))


@dataclass(frozen=True)
class _Earlier:
    """The keys before the new tokens, for the engine: one piece a panel."""

    stream: Stream
    inputs: Inputs
    part: Part
    past: Past

    def pieces(self, panel: Panel) -> Iterator[engine.Piece]:
        tiles = plan_crossing(
            self.stream.spec,
            shape_of(self.inputs),
            self.part,
            (0, self.part.start),
            (panel.kv_first, panel.kv_heads),
            itemsize=self.inputs.q.element_size(),
            workspace_bytes=self.stream.workspace_bytes,
        )
        yield _EarlierPiece(tiles, self.stream.lanes, self.past)


@dataclass(frozen=True)
class _EarlierPiece:
    tiles: tuple[Tile, ...]
    lanes: tuple[Lane, ...]
    past: Past

    def gather(self, tile: Tile, inputs: Inputs) -> tuple[Tensor, Tensor, None]:
        """Rows of lanes are numbered as those of tiles, so each head of the tile is one slice of a lane."""
        shape = tile.k_shape(inputs.q.shape[-1])
        k, v = (
            inputs.workspace.take(slot, shape, inputs.tile_dtype, inputs.q.device)
            for slot in ("key", "value")
        )
        batches = slice(tile.batch, tile.batch + tile.num_batch)
        for unit, head in enumerate(list(tile.heads)[:: tile.heads.group]):
            lane = self._lane(tile.branch, head.row, head.kv)
            rows = self.past.rows(lane, tile.k_first, tile.k_count)
            for packed, lane_rows in zip((k, v), rows, strict=True):
                packed[:, unit].copy_(lane_rows[batches, lane.kv_heads.index(head.kv)])
        return k, v, None

    def _lane(self, branch: int, offset: int, kv: int) -> Lane:
        return next(
            lane
            for lane in self.lanes
            if (lane.branch, lane.offset) == (branch, offset) and kv in lane.kv_heads
        )
