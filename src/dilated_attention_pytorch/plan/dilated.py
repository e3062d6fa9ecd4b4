"""WHICH rows meet in dilated attention: a spec and a shape become jobs, branch by branch."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.pattern_cache import PatternCache
from ..spec import DilatedSpec
from .runs import (
    COLUMN,
    DEFAULT_WORKSPACE_BYTES,
    UNBOUNDED,
    Docs,
    Pass,
    Plan,
    Range,
    Region,
    Shape,
    Table,
    bytes_a_row,
    cut_regions,
    even_parts,
    every_batch,
    find_plan,
    make_jobs,
    make_plan,
    numbered,
    of_key_heads,
    rows_within,
)

MAX_ROWS = 32768  # the CUDA memory-efficient kernel is reported wrong beyond 65536 rows
MIN_ROWS = 16  # shorter runs would be all overhead, whatever the workspace
MAX_HEADS = 65535  # CUDA launches fail beyond
GOOD_ROWS = 1024  # query heads that share keys are split over jobs before their runs get shorter than this


class Shard(NamedTuple):
    """What of a whole call is here: positions from `start` of `n`, heads from `head` of `num_heads`."""

    n: int
    start: int
    num_heads: int
    head: int

    @classmethod
    def whole(cls, shape: Shape) -> Shard:
        return cls(shape.n, 0, shape.h, 0)


class Units(NamedTuple):
    """The query heads of a branch that share keys, by key head and offset; each (units,)."""

    head: Tensor
    heads: Tensor
    kv: Tensor
    offset: Tensor
    head_step: int
    is_tail: Tensor  # of the last heads, which do not serve all offsets: they lie apart from the others


class Head(NamedTuple):
    """One query head of a branch: its index, its row offset and the key/value head it reads."""

    head: int
    row: int
    kv: int


def branch_heads(spec: DilatedSpec, branch: int, num_heads: int, num_kv_heads: int) -> list[Head]:
    """The query heads that serve a branch, with their row offsets."""
    heads = zip(*(x.tolist() for x in serving_heads(spec, branch, num_heads, 0, num_heads)), strict=True)
    return [Head(head, offset, head * num_kv_heads // num_heads) for head, offset in heads]


def serving_heads(spec: DilatedSpec, branch: int, total: int, first: int, num: int) -> tuple[Tensor, Tensor]:
    """Which of `num` heads from `first` on, of `total`, serve a branch, from which offset on."""
    rate, head = spec.dilation_rates[branch], torch.arange(first, first + num)
    if spec.head_mixing == "grouped":
        size, extra = divmod(total, len(spec.dilation_rates))
        low = branch * size + min(branch, extra)
        head = head[(head >= low) & (head < low + size + (branch < extra))]
        return head, torch.full_like(head, branch % rate)
    if spec.head_offsets == "blocked":
        return head, head // -(-total // rate)
    return head, head % rate


def branch_units(spec: DilatedSpec, branch: int, shape: Shape, shard: Shard) -> Units:
    """The heads that serve a branch; heads and key heads are counted within the shard."""
    rate, total = spec.dilation_rates[branch], shard.num_heads
    head, offset = serving_heads(spec, branch, total, shard.head, shape.h)
    step = period = 1
    if spec.head_mixing == "all" and spec.head_offsets == "blocked":
        period = -(-total // rate)
    elif spec.head_mixing == "all":
        step = period = rate
    is_tail = head >= total // period * period
    kv = (head - shard.head) // (shape.h // shape.h_kv)
    keys, inverse, heads = torch.unique(kv * rate + offset, return_inverse=True, return_counts=True)
    count = len(keys)
    first_head = torch.full((count,), shape.h).scatter_reduce(0, inverse, head - shard.head, "amin")
    tail = torch.zeros(count, dtype=torch.int64).scatter_reduce(0, inverse, is_tail.long(), "amax") > 0
    return Units(first_head, heads, keys // rate, keys % rate, step, tail)


def branch_segments(window: int, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Start, length and clamped segment length of each segment of the documents between `bounds`."""
    low, length = _documents(bounds)
    clamped = length.clamp(max=window)
    document, number = numbered(-(-length // clamped))
    start = low[document] + number * clamped[document]
    ends = low + length
    return start, torch.minimum(clamped[document], ends[document] - start), clamped[document]


def _documents(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Start and length of each document that has a position."""
    length = bounds.diff()
    return bounds[:-1][length > 0], length[length > 0]


class JobBuilder:
    """Jobs of queries and keys in windows of positions, cut so that a job fits the budget."""

    def __init__(
        self, spec: DilatedSpec, shape: Shape, shard: Shard, docs: Docs, itemsize: int, budget: int
    ) -> None:
        self.spec, self.shape, self.shard, self.budget = spec, shape, shard, budget
        self.row_bytes = bytes_a_row(shape.d, itemsize)
        self.bounds = torch.tensor((0, shard.n) if docs is None else docs)
        self.units = [branch_units(spec, i, shape, shard) for i in range(len(spec.branches))]
        # Rate 1 first: it writes every row, which spares initial values and a merge.
        self.order = sorted(range(len(spec.branches)), key=lambda i: spec.dilation_rates[i] != 1)
        self.opens_keys: dict[int, bool] = {}
        served = torch.zeros(shape.h_kv, dtype=torch.bool)
        for i in self.order:
            self.opens_keys[i] = not bool(served[self.units[i].kv].any())
            served[self.units[i].kv] = True

    @property
    def covers(self) -> bool:
        """Whether the jobs that open rows, rather than go on with them, reach every query and key row."""
        if self.spec.head_mixing == "all":
            return self.spec.dilation_rates[self.order[0]] == 1
        serving = [i for i in self.order if len(self.units[i].head)]
        return all(self.spec.dilation_rates[i] == 1 and self.opens_keys[i] for i in serving)

    def jobs(self, queries: Range, keys: Range, first_stage: int = 0) -> list[Table]:
        """Tables (jobs, runs) of queries in a window with keys in the same window, or in a disjoint one."""
        if self.spec.is_causal and keys[0] >= queries[1]:
            return []
        tables = []
        for branch in self.order:
            table = self._branch_jobs(branch, queries, keys, first_stage)
            if len(table[0]):
                first_stage = int(table[0][:, COLUMN["stage"]].max()) + 1
                tables.append(table)
        return tables

    def _branch_jobs(self, branch: int, queries: Range, keys: Range, first_stage: int) -> Table:
        spec, units, rate = self.spec, self.units[branch], self.spec.dilation_rates[branch]
        is_own = queries == keys
        start, length, clamped = branch_segments(spec.segment_lengths[branch], self.bounds)
        near = (start < min(queries[1], keys[1])) & (start + length > max(queries[0], keys[0]))
        start, length, clamped = start[near], length[near], clamped[near]
        first = start[:, None] + units.offset
        end = (start + length)[:, None].expand_as(first)
        (q_first, q_count), (k_first, k_count) = (rows_within(first, rate, end, x) for x in (queries, keys))
        meets = (q_count > 0) & (k_count > 0)
        # The heads that lie apart come after all others, so that those are evenly spaced.
        _tail, segment, unit = torch.nonzero(
            torch.stack([meets & ~units.is_tail, meets & units.is_tail]), as_tuple=True
        )
        phantom = torch.zeros_like(segment)
        if spec.tail == "phantom" and not spec.is_causal and is_own:
            everyone = rows_within(first, rate, end, (0, self.shard.n))[1]
            phantom = (-(-clamped // rate)[:, None] - everyone)[segment, unit]
        at = segment, unit
        cut = self._cut(units.heads[unit], q_count[at], k_count[at], spec.is_causal and is_own)
        job, part, i, j, q_size, k_size, parts = cut
        segment, unit = segment[job], unit[job]
        at = segment, unit
        num_i, num_j = (int(x.max()) + 1 if len(x) else 1 for x in (i, j))
        size = -(-units.heads[unit] // parts)
        is_diagonal = (i == j) & (spec.is_causal and is_own)
        opens = is_own and (spec.head_mixing == "grouped" or branch == self.order[0])
        opener = is_diagonal if spec.is_causal else i == 0
        jobs = make_jobs(
            len(job),
            stage=first_stage + (part * num_i + i) * num_j + j,
            branch=branch,
            head=units.head[unit] + part * size * units.head_step,
            heads=torch.minimum(size, units.heads[unit] - part * size),
            head_step=units.head_step,
            kv=units.kv[unit],
            start=first[at] + (q_first[at] + i * q_size) * rate - self.shard.start,
            step=rate,
            count=torch.minimum(q_size, q_count[at] - i * q_size),
            first_run=torch.arange(len(job)),
            num_runs=1,
            causal=is_diagonal,
            phantom=phantom[job] * (j == 0),
            opens_branch=(j == 0) & is_own,
            opens_queries=(j == 0) & opens,
            opens_keys=opener & (part == 0) & (is_own and self.opens_keys[branch]),
        )
        runs = torch.ones(len(job), 4, dtype=torch.int64)
        runs[:, 0] = first[at] + (k_first[at] + j * k_size) * rate - self.shard.start
        runs[:, 1] = rate
        runs[:, 2] = torch.minimum(k_size, k_count[at] - j * k_size)
        return jobs, runs

    def _cut(
        self, heads: Tensor, queries: Tensor, keys: Tensor, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Which (meeting, part of its heads, piece of its queries, piece of its keys) become a job each."""
        longest = torch.maximum(queries, keys)
        heads_fit = (self.budget // (self.row_bytes * longest.clamp(max=GOOD_ROWS)) - 1).clamp(1, MAX_HEADS)
        parts = -(-heads // heads_fit)
        parts = -(-heads // -(-heads // parts))
        fit = self.budget // (self.row_bytes * (-(-heads // parts) + 1))
        fit = fit.clamp(MIN_ROWS, MAX_ROWS if self.budget < UNBOUNDED // 2 else None)
        q_size, k_size = (-(-x // -(-x // fit)) for x in (queries, keys))
        q_num, k_num = -(-queries // q_size), -(-keys // k_size)
        job, number = numbered(parts * q_num * k_num)
        j = number % k_num[job]
        i = number // k_num[job] % q_num[job]
        part = number // (k_num * q_num)[job]
        if is_causal:
            seen = j <= i
            job, part, i, j = job[seen], part[seen], i[seen], j[seen]
        return job, part, i, j, q_size[job], k_size[job], parts[job]


def plan_dilated(
    spec: DilatedSpec,
    shape: Shape,
    *,
    itemsize: int,
    direction: Pass = "forward",
    docs: Docs = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    cache: PatternCache | None = None,
    steps: int = 1,
    shard: Shard | None = None,
    kv_heads: int | None = None,
) -> Plan:
    """The jobs of a call, cut so that the rows that a kernel packs (and sums) fit `workspace_bytes`.

    `docs` are the boundaries `(0, ..., n)` of packed documents. Where results need scratch of their own size
    (float32 sums of half precision, the branch outputs of detach_mixing's backward), the output is cut into
    regions, and that scratch takes half of the workspace. A region is never smaller than one key/value head
    over the shortest span that cuts no segment, a job never smaller than MIN_ROWS rows of one head; only
    there may the workspace be exceeded. With `steps`, the regions of a forward pass are that many equal parts
    of the time, whatever segments they cut.

    `shard`: the positions and heads of `shape` are a part of a whole call; keys outside it are left out. With
    `kv_heads`, each region is so many key/value heads over all the time of the shard.

    Passes that need the same scratch share one entry of `cache`.
    """
    shard = Shard.whole(shape) if shard is None else shard
    steps = min(steps, shape.n) if direction == "forward" else 1
    scratch = _scratch_rows(spec, shape, direction, accumulates=itemsize < 4)
    call = spec, shape, shard, itemsize, scratch, workspace_bytes, steps, kv_heads
    return find_plan(cache, ("dilated", *call), docs, partial(_build, *call, docs))


def plan_crossing(
    spec: DilatedSpec,
    shape: Shape,
    shard: Shard,
    keys: Range,
    kv: Range,
    *,
    itemsize: int,
    docs: Docs = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> Plan:
    """The jobs of a shard's queries with keys in a window [from, to) of positions outside of it.

    `kv` is (first, number) of the key/value heads. Key positions count from the start of the shard.
    """
    builder = JobBuilder(spec, shape, shard, docs, itemsize, workspace_bytes // 2)
    tables = builder.jobs((shard.start, shard.start + shape.n), keys)
    placed = [(every_batch(of_key_heads(jobs, kv), shape.b), runs) for jobs, runs in tables]
    return make_plan(placed, shape, (Region.whole(shape, kv),), budget=builder.budget)


def _build(
    spec: DilatedSpec,
    shape: Shape,
    shard: Shard,
    itemsize: int,
    scratch_rows: int,
    workspace_bytes: int,
    steps: int,
    kv_heads: int | None,
    docs: Docs,
) -> Plan:
    budget = workspace_bytes // 2 if scratch_rows else workspace_bytes
    builder = JobBuilder(spec, shape, shard, docs, itemsize, budget)
    scratch_bytes = 0 if kv_heads else scratch_rows * shape.d * max(4, itemsize)
    here = (shard.start, shard.start + shape.n)
    cuts, tables = [0, shape.n], list[Table]()
    if steps > 1:
        cuts = [*range(0, shape.n, -(-shape.n // steps)), shape.n]
        for low, high in pairwise(cuts):
            window = (here[0] + low, here[0] + high)
            for keys in (window, (here[0], window[0]), (window[1], here[1])):
                if keys[0] < keys[1]:
                    stage = int(tables[-1][0][:, COLUMN["stage"]].max()) + 1 if tables else 0
                    tables += builder.jobs(window, keys, stage)
    else:
        tables = builder.jobs(here, here)
        if scratch_bytes:
            rows = max(1, budget // (scratch_bytes * shape.h_kv))
            cuts = _time_cuts(spec, builder.bounds, here, rows)
    longest = max(high - low for low, high in pairwise(cuts))
    kv_fit, b_fit = kv_heads or shape.h_kv, max(1, shape.b)
    if scratch_bytes:
        kv_fit = max(1, min(shape.h_kv, budget // (scratch_bytes * longest)))
        b_fit = max(1, budget // (scratch_bytes * longest * shape.h_kv))
    placed = [(every_batch(jobs, shape.b), runs) for jobs, runs in tables]
    regions = cut_regions(placed, even_parts(shape.b, b_fit), even_parts(shape.h_kv, kv_fit), cuts)
    facts = {"covers_queries": builder.covers, "covers_keys": builder.covers, "budget": budget}
    return make_plan(placed, shape, regions, detaches=spec.detach_mixing, **facts)


def _scratch_rows(spec: DilatedSpec, shape: Shape, direction: Pass, accumulates: bool) -> int:
    """Rows of scratch, beside the packed ones, for each position and key/value head of a region."""
    group = shape.h // shape.h_kv
    sums = 0 if not accumulates else group if direction == "forward" else group + 2
    own_outputs = group if spec.detach_mixing and direction == "backward" else 0
    return sums + own_outputs


def _time_cuts(spec: DilatedSpec, bounds: Tensor, here: Range, rows: int) -> list[int]:
    """Times, from 0 to the length of the shard, that cut no segment; about `rows` apart where possible."""
    low, length = _documents(bounds)
    period = torch.ones_like(length)
    for window in spec.segment_lengths:
        clamped = length.clamp(max=window)
        period = torch.minimum(torch.lcm(period, clamped), length)
    period = period * (rows // period).clamp(min=1)
    span, number = numbered(-(-length // period))
    cuts = low[span] + number * period[span]
    if len(low) > 1:  # several short documents make a region; each bucket begins at the first cut in it
        bucket = cuts // max(1, rows // 2)
        cuts = cuts[torch.cat([torch.ones(1, dtype=torch.bool), bucket.diff() > 0])]
    inside = cuts[(cuts > here[0]) & (cuts < here[1])] - here[0]
    return [0, *inside.tolist(), here[1] - here[0]]
