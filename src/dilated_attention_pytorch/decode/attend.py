"""New tokens attend to each other and to earlier keys: a schedule over the engine's kernels and merge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..core.pattern_cache import get_global_pattern_cache
from ..core.sources import FRESH
from ..core.workspace import Workspace
from ..kernels import How, Inputs, Request, choose_kernel
from ..kernels.merge import merge_
from ..kernels.rows import Rows
from ..ops import check_execution
from ..plan import DEFAULT_WORKSPACE_BYTES, Plan, Region, Shape, Shard, plan_crossing, plan_dilated
from ..plan.runs import even_parts
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
        row_dtype = dtype if kernel.op.widens else q.dtype
        for lane in self.lanes:
            if not lane.selects(position):
                continue
            query = lane.of_queries(q).transpose(1, 2).to(row_dtype).contiguous()
            rows, lse_rows = lane.of_queries(out), lane.of_queries(lse)
            count = lane.rows_before(position % lane.window + 1)
            # A widened copy is attended while it is in the processor's cache.
            most = count if row_dtype == q.dtype else max(1, _WIDE_ROWS // (len(lane.kv_heads) * q.shape[0]))
            for first, num in even_parts(count, most):
                keys, values = (x.to(row_dtype) for x in past.rows(lane, first, num))
                part, part_lse = kernel.op.forward(query, keys, values, How(False, scale))
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
        inputs = Inputs(q, k, v, None, scale, 0.0, 0, Workspace())
        shape, shard = inputs.shape, Shard(start + q.shape[1], start, self.num_heads, 0)
        plan = plan_dilated(
            self.spec,
            shape,
            itemsize=q.element_size(),
            workspace_bytes=self.workspace_bytes,
            cache=get_global_pattern_cache() if self.execution.use_pattern_cache else None,
            shard=shard,
            kv_heads=self._heads_at_once(shape, q.element_size()),
        )
        out, _ = kernel.forward(plan, inputs, _Earlier(self, inputs, shard, past) if start else None)
        return out

    def _heads_at_once(self, shape: Shape, itemsize: int) -> int:
        """Key/value heads whose float32 sums fit half of the workspace; all where none are needed."""
        if itemsize >= 4:
            return shape.h_kv
        per_head = shape.b * shape.n * (shape.h // shape.h_kv) * shape.d * 4
        return min(shape.h_kv, max(1, self.workspace_bytes // 2 // max(1, per_head)))


@dataclass(frozen=True)
class _Earlier:
    """The keys before the new tokens: one chunk a region."""

    stream: Stream
    inputs: Inputs
    shard: Shard
    past: Past

    def chunks(self, region: Region) -> Iterator[_EarlierChunk]:
        plan = plan_crossing(
            self.stream.spec,
            self.inputs.shape,
            self.shard,
            (0, self.shard.start),
            region.kv,
            itemsize=self.inputs.q.element_size(),
            workspace_bytes=self.stream.workspace_bytes,
        )
        yield _EarlierChunk(plan, self)


@dataclass(frozen=True)
class _EarlierChunk:
    plan: Plan
    earlier: _Earlier

    def gather(self, rows: Rows, branch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, None]:
        """Keys of a job are a slice of a lane: the rows of both lie as far apart."""
        inputs, count = self.earlier.inputs, rows.shape[2]
        shape = (*rows.shape, inputs.q.shape[-1])
        take = inputs.workspace.take
        k, v = (take(slot, shape, dtype, inputs.q.device) for slot in ("key", "value"))
        lists: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for job, (batch, time, kv) in enumerate(rows.places.tolist()):
            lists.setdefault((time, kv), []).append((job, batch))
        for (time, kv), jobs in lists.items():
            lane, first = self._lane(branch, time + self.earlier.shard.start, kv)
            which, batches = (list(each) for each in zip(*jobs, strict=True))
            head = lane.kv_heads.index(kv)
            for packed, lane_rows in zip((k, v), self.earlier.past.rows(lane, first, count), strict=True):
                packed[which, 0] = lane_rows[batches, head].to(dtype)
        return k, v, None

    def _lane(self, branch: int, position: int, kv: int) -> tuple[Lane, int]:
        """The lane in which a position lies, and its row."""
        for lane in self.earlier.stream.lanes:
            if lane.branch == branch and lane.selects(position) and kv in lane.kv_heads:
                return lane, position % lane.window // lane.rate
        raise AssertionError("each job has a lane")
