"""New tokens attend to each other and to earlier keys: a schedule over the engine's kernels and merge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..checks import autocast_inputs, check_new_tokens, named_keywords, whole_numbers
from ..core.attention_buffer_manager import FRESH
from ..core.pattern_cache import get_global_pattern_cache
from ..core.tracing import uncompiled
from ..core.workspace import Workspace
from ..kernels import How, Inputs, Request, choose_kernel
from ..kernels.rows import Rows
from ..ops import check_execution, without_autocast
from ..plan import DEFAULT_WORKSPACE_BYTES, Plan, Region, Shape, Shard, plan_crossing, plan_dilated
from ..plan.runs import even_parts
from ..spec import DilatedSpec, Execution, HeadMixing, HeadOffsets
from .runs import KeyRun, alike_rows, key_runs

_WIDE_ROWS = 4096  # key rows of half precision that are widened at a time, 1 MiB with 64 features


class Past(Protocol):
    """The keys of a stream, by run: of the segment that the newest token lies in."""

    def rows(self, run: KeyRun, first: int, count: int) -> tuple[Tensor, Tensor]:
        """k and v (b, kv heads of the run, count, d) of rows `first` and following; last stride 1."""


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
    def runs(self) -> tuple[KeyRun, ...]:
        return key_runs(self.spec, self.num_heads, self.num_kv_heads)

    def request(self, q: Tensor, scale: float) -> Request:
        return Request(q.device, q.dtype, scale=scale, head_dim=q.shape[-1], streams=True)

    def selected(self, position: int) -> list[KeyRun]:
        """The runs that the query at a position reads, and that its key joins."""
        return [run for run in self.runs if position % run.window % run.rate == run.offset]

    def attend_one(self, q: Tensor, position: int, past: Past) -> Tensor:
        """out (b, 1, h, d) of the query at `position`; `past` holds its own key too."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        q = q.transpose(1, 2)
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device)
        how = How(False, self.spec.scale_for(q.shape[-1]))
        op = choose_kernel(self.request(q, how.scale), self.execution.kernel).op
        row_dtype = dtype if op.widens else q.dtype
        for run in self.selected(position):
            heads = run.query_index
            query, rows, lse_rows = q[:, heads], out[:, heads], lse[:, heads]
            count = run.rows_before(position % run.window + 1)
            if row_dtype == q.dtype:
                op.extend(query, *past.rows(run, 0, count), how, rows, lse_rows)
            else:  # a widened copy is attended while it is in the processor's cache
                most = max(1, _WIDE_ROWS // (len(run.kv_heads) * q.shape[0]))
                for first, num in even_parts(count, most):
                    k, v = (x.to(row_dtype) for x in past.rows(run, first, num))
                    op.extend(query.to(row_dtype), k, v, how, rows, lse_rows)
            if not isinstance(heads, slice):  # copies, not views
                out[:, heads], lse[:, heads] = rows, lse_rows
        return out.transpose(1, 2).to(q.dtype)

    def attend_many(self, q: Tensor, k: Tensor, v: Tensor, start: int, past: Past) -> Tensor:
        """out (b, m, h, d) of the m tokens from position `start`; `past` holds the keys before them."""
        # Segments begin anew after each common multiple: smaller numbers find the plan of an earlier call.
        start %= math.lcm(*self.spec.segment_lengths)
        scale = self.spec.scale_for(q.shape[-1])
        kernel = choose_kernel(self.request(q, scale), self.execution.kernel)
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
        """Keys of a job are a slice of a run: the rows of both lie as far apart."""
        inputs, count = self.earlier.inputs, rows.shape[2]
        shape = (*rows.shape, inputs.q.shape[-1])
        take = inputs.workspace.take
        k, v = (take(slot, shape, dtype, inputs.q.device) for slot in ("key", "value"))
        lists: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for job, (batch, time, kv) in enumerate(rows.places.tolist()):
            lists.setdefault((time, kv), []).append((job, batch))
        for (time, kv), jobs in lists.items():
            run, first = self._run(branch, time + self.earlier.shard.start, kv)
            which, batches = (list(each) for each in zip(*jobs, strict=True))
            head = run.kv_heads.index(kv)
            for packed, run_rows in zip((k, v), self.earlier.past.rows(run, first, count), strict=True):
                packed[which, 0] = run_rows[batches, head].to(dtype)
        return k, v, None

    def _run(self, branch: int, position: int, kv: int) -> tuple[KeyRun, int]:
        """The run in which a position lies, and its row."""
        for run in self.earlier.stream.selected(position):
            if run.branch == branch and kv in run.kv_heads:
                return run, position % run.window // run.rate
        raise AssertionError("each job has a run")


@named_keywords
@uncompiled
def attend_last(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    starts: Sequence[int] | Tensor | None = None,
    scale: float | None = None,
    head_mixing: HeadMixing = "all",
    head_offsets: HeadOffsets = "interleaved",
    execution: Execution | None = None,
) -> Tensor:
    """Causal dilated attention of the last m of n positions; reads only the keys that they select.

    Equals the last m rows of `dilated_attention(..., is_causal=True)` over all n positions.

    Args:
        q: (b, m, h, d), the queries of the last m positions.
        k, v: (b, n, h_kv, d), of all positions, m <= n.
        starts: (b,) integers, the first real position of each row (left padding): the row's segments are
            counted from there. A query before it gives zeros.
        segment_lengths, dilation_rates, scale, head_mixing, head_offsets, execution: as in
            `dilated_attention`; memory is fresh.

    Returns:
        out (b, m, h, d). It has no gradient: call it under `torch.no_grad()` or `torch.inference_mode()`.
    """
    branches = segment_lengths, dilation_rates
    spec = DilatedSpec(*branches, True, scale, head_mixing=head_mixing, head_offsets=head_offsets)
    q, k, v = autocast_inputs(q, k, v)
    check_new_tokens("attend_last", q, k, v)
    execution = check_decoding("attend_last", execution)
    (b, m, h, _), (n, h_kv) = q.shape, k.shape[1:3]
    if m > n:
        raise ValueError(f"q must have at most as many positions as k and v, got {m} and {n}")
    firsts = whole_numbers("starts", [0] * b if starts is None else starts, b, n)
    stream = Stream(spec, h, h_kv, execution)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    with torch.no_grad(), without_autocast(q.device):
        for rows, (first,) in alike_rows([(first,) for first in firsts]):
            new = min(m, n - first)
            if new:
                queries, keys, values = q[rows, m - new :], k[rows, first:], v[rows, first:]
                out[rows, m - new :] = _attend_alike(stream, queries, keys, values)
    return out


def _attend_alike(stream: Stream, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = q.shape[1], k.shape[1]
    if m == 1:
        return stream.attend_one(q, n - 1, _Kept(k, v, n - 1))
    start = n - m
    return stream.attend_many(q, k[:, start:], v[:, start:], start, _Kept(k, v, start - 1))


@dataclass(frozen=True)
class _Kept:
    """All keys of a stream, (b, n, h_kv, d), of which the segments of `position` are read."""

    k: Tensor
    v: Tensor
    position: int

    def rows(self, run: KeyRun, first: int, count: int) -> tuple[Tensor, Tensor]:
        begin = self.position // run.window * run.window + run.offset + first * run.rate
        times = slice(begin, begin + (count - 1) * run.rate + 1, run.rate)
        k, v = (x[:, times, run.key_index].transpose(1, 2) for x in (self.k, self.v))
        return k, v
