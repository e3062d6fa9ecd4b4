"""New tokens attend to each other and to the earlier keys that they select, with the engine's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checks import autocast_inputs, check_new_tokens, named_keywords, whole_numbers
from ..core.attention_buffer_manager import FRESH
from ..core.pattern_cache import get_global_pattern_cache
from ..core.tracing import uncompiled
from ..core.workspace import Workspace
from ..kernels import How, Inputs, Kernel, Request, choose_kernel
from ..kernels.rows import Rows
from ..ops import check_execution, without_autocast
from ..plan import DEFAULT_WORKSPACE_BYTES, Plan, Region, Shard, plan_crossing, plan_dilated
from ..plan.dilated import branch_heads
from ..plan.runs import even_parts
from ..spec import DilatedSpec, Execution, HeadMixing, HeadOffsets

_WIDE_ROWS = 4096  # key rows of half precision that are widened at a time, 1 MiB with 64 features
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class KeyRun:
    """The keys of one offset of a branch: row j of a segment is its position `offset + j * rate`.

    Each key/value head in `kv_heads` serves `len(heads) // len(kv_heads)` of the query heads, in order. A
    stream makes its runs once, and tells them apart by identity.
    """

    branch: int
    window: int
    rate: int
    offset: int
    kv_heads: tuple[int, ...]
    heads: tuple[int, ...]

    def rows_before(self, position: int) -> int:
        """How many rows the segment has before a position, counted from the segment's start."""
        return max(0, -((self.offset - position) // self.rate))

    @cached_property
    def query_index(self) -> slice | list[int]:
        """Indexes the run's query heads: a view where they are evenly spaced, else a copy."""
        return as_index(self.heads)

    @cached_property
    def key_index(self) -> slice | list[int]:
        """Indexes the run's key/value heads."""
        return as_index(self.kv_heads)


@lru_cache(maxsize=64)
def key_runs(spec: DilatedSpec, num_heads: int, num_kv_heads: int) -> tuple[KeyRun, ...]:
    """The runs of all branches, those of a branch with equally many query heads a key head together."""
    runs = []
    for branch, (window, rate) in enumerate(spec.branches):
        sharing: dict[tuple[int, int], list[int]] = {}
        for head, offset, kv in branch_heads(spec, branch, num_heads, num_kv_heads):
            sharing.setdefault((offset, kv), []).append(head)
        alike: dict[tuple[int, int], list[int]] = {}
        for (offset, kv), heads in sharing.items():
            alike.setdefault((offset, len(heads)), []).append(kv)
        for (offset, _), kv_heads in alike.items():
            if offset < window:  # or no position of a segment has this offset
                heads = [head for kv in kv_heads for head in sharing[offset, kv]]
                runs.append(KeyRun(branch, window, rate, offset, tuple(kv_heads), tuple(heads)))
    return tuple(runs)


def as_index(numbers: Sequence[int]) -> slice | list[int]:
    """The slice of evenly spaced, rising numbers, or a list of others."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if step < 1 or any(number != numbers[0] + i * step for i, number in enumerate(numbers)):
        return list(numbers)
    return slice(numbers[0], numbers[-1] + 1, step)


def alike_rows(keys: Sequence[Key]) -> Iterator[tuple[slice, Key]]:
    """Neighbouring rows of a batch with equal keys, as slices: views, where a list of rows would copy."""
    first = 0
    for key, those in groupby(keys):
        last = first + sum(1 for _ in those)
        yield slice(first, last), key
        first = last


# The keys of a stream in the segment that its newest token lies in. Of a run and (first, count) of its rows:
# k and v (b, kv heads of the run, count, d); last stride 1.
Past = Callable[[KeyRun, int, int], tuple[Tensor, Tensor]]


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

    def sizes(self, q: Tensor) -> dict[str, Any]:
        """What a planner asks of a call."""
        size = self.execution.workspace_bytes or DEFAULT_WORKSPACE_BYTES
        return {"itemsize": q.element_size(), "workspace_bytes": size}

    @cached_property
    def runs(self) -> tuple[KeyRun, ...]:
        return key_runs(self.spec, self.num_heads, self.num_kv_heads)

    def kernel(self, q: Tensor) -> tuple[Kernel, float]:
        """The kernel of a call, and the factor of its scores."""
        scale = self.spec.scale_for(q.shape[-1])
        request = Request(q.device, q.dtype, scale=scale, head_dim=q.shape[-1], streams=True)
        return choose_kernel(request, self.execution.kernel), scale

    def selected(self, position: int) -> list[KeyRun]:
        """The runs that the query at a position reads, and that its key joins."""
        return [run for run in self.runs if position % run.window % run.rate == run.offset]

    def attend_one(self, q: Tensor, position: int, past: Past) -> Tensor:
        """out (b, 1, h, d) of the query at `position`; `past` holds its own key too."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        q = q.transpose(1, 2)
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device)
        kernel, scale = self.kernel(q)
        op, how = kernel.op, How(False, scale)
        row_dtype = dtype if op.widens else q.dtype
        for run in self.selected(position):
            heads = run.query_index
            query, rows, lse_rows = q[:, heads], out[:, heads], lse[:, heads]
            count = run.rows_before(position % run.window + 1)
            if row_dtype == q.dtype:
                op.extend(query, *past(run, 0, count), how, rows, lse_rows)
            else:  # a widened copy is attended while it is in the processor's cache
                most = max(1, _WIDE_ROWS // (len(run.kv_heads) * q.shape[0]))
                for first, num in even_parts(count, most):
                    k, v = (x.to(row_dtype) for x in past(run, first, num))
                    op.extend(query.to(row_dtype), k, v, how, rows, lse_rows)
            if not isinstance(heads, slice):  # copies, not views
                out[:, heads], lse[:, heads] = rows, lse_rows
        return out.transpose(1, 2).to(q.dtype)

    def attend_many(self, q: Tensor, k: Tensor, v: Tensor, start: int, past: Past) -> Tensor:
        """out (b, m, h, d) of the m tokens from position `start`; `past` holds the keys before them."""
        # Segments begin anew after each common multiple: smaller numbers find the plan of an earlier call.
        start %= math.lcm(*self.spec.segment_lengths)
        kernel, scale = self.kernel(q)
        inputs = Inputs(q, k, v, None, scale, 0.0, 0, Workspace())
        shape, shard = inputs.shape, Shard(start + q.shape[1], start, self.num_heads, 0)
        facts = self.sizes(q) | {"shard": shard, "kv_heads": shape.h_kv}
        if q.element_size() < 4:  # so many that their float32 sums fit half of the workspace
            a_head = shape.b * shape.n * (shape.h // shape.h_kv) * shape.d * 4
            fit = facts["workspace_bytes"] // 2 // max(1, a_head)
            facts["kv_heads"] = min(shape.h_kv, max(1, fit))
        cache = get_global_pattern_cache() if self.execution.use_pattern_cache else None
        plan = plan_dilated(self.spec, shape, cache=cache, **facts)
        out, _ = kernel.forward(plan, inputs, _Earlier(self, inputs, shard, past) if start else None)
        return out


@dataclass(frozen=True)
class _Earlier:
    """The keys before the new tokens: one chunk a region, this very object with a plan."""

    stream: Stream
    inputs: Inputs
    shard: Shard
    past: Past
    plan: Plan | None = None

    def chunks(self, region: Region) -> Iterator[_Earlier]:
        window, sizes = (0, self.shard.start), self.stream.sizes(self.inputs.q)
        plan = plan_crossing(self.stream.spec, self.inputs.shape, self.shard, window, region.kv, **sizes)
        yield replace(self, plan=plan)

    def gather(self, rows: Rows, branch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, None]:
        """Keys of a job are a slice of a run: the rows of both lie as far apart."""
        q, take = self.inputs.q, self.inputs.workspace.take
        shape = (*rows.shape, q.shape[-1])
        k, v = (take(slot, shape, dtype, q.device) for slot in ("key", "value"))
        lists: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for job, (batch, time, kv) in enumerate(rows.places.tolist()):
            lists.setdefault((time, kv), []).append((job, batch))
        for (time, kv), jobs in lists.items():
            position = time + self.shard.start
            selected = self.stream.selected(position)
            run = next(each for each in selected if each.branch == branch and kv in each.kv_heads)
            which, batches = (list(each) for each in zip(*jobs, strict=True))
            head, first = run.kv_heads.index(kv), position % run.window // run.rate
            for packed, run_rows in zip((k, v), self.past(run, first, rows.shape[2]), strict=True):
                packed[which, 0] = run_rows[batches, head].to(dtype)
        return k, v, None


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
        for rows, first in alike_rows(firsts):
            new = min(m, n - first)
            if new:
                queries, keys, values = q[rows, m - new :], k[rows, first:], v[rows, first:]
                out[rows, m - new :] = _attend_alike(stream, queries, keys, values)
    return out


def _attend_alike(stream: Stream, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = q.shape[1], k.shape[1]
    if m == 1:
        return stream.attend_one(q, n - 1, partial(_kept_rows, k, v, n - 1))
    new, past = slice(n - m, n), partial(_kept_rows, k, v, n - m - 1)
    return stream.attend_many(q, k[:, new], v[:, new], n - m, past)


def _kept_rows(
    k: Tensor, v: Tensor, position: int, run: KeyRun, first: int, count: int
) -> tuple[Tensor, Tensor]:
    """Rows of the segment of a position, of all keys of a stream (b, n, h_kv, d)."""
    begin = position // run.window * run.window + run.offset + first * run.rate
    times = slice(begin, begin + (count - 1) * run.rate + 1, run.rate)
    return k[:, times, run.key_index].transpose(1, 2), v[:, times, run.key_index].transpose(1, 2)
