"""The one plan format: a table of jobs and a table of runs, plain integer tensors.

A run is the rows `start, start + step, ...` (`count` of them) of one batch and head. A job is one run of
queries with the runs of keys that they attend in one softmax. Dilated, block-sparse, ring and decoding
attention are planners that fill these tables; kernels take a whole plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.pattern_cache import PatternCache
from .pattern_tables import count_seen, raw_bytes

Pass = Literal["forward", "backward"]
Range = tuple[int, int]  # [from, to)
Docs = tuple[int, ...] | None  # boundaries (0, ..., n) of packed documents
Table = tuple[Tensor, Tensor]  # of jobs and of runs, which it counts from 0
DEFAULT_WORKSPACE_BYTES = 32 * 2**20
UNBOUNDED = 2**60  # bytes of a workspace that cuts nothing, for kernels that pack no rows


class Shape(NamedTuple):
    """Sizes of a call: q is (b, n, h, d), k and v are (b, n, h_kv, d)."""

    b: int
    n: int
    h: int
    h_kv: int
    d: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> Shape:
        b, n, h, d = q.shape
        return cls(b, n, h, k.shape[2], d)


class Run(NamedTuple):
    """Rows `start + i * step`, `count` of them; the definition counts each `multiplicity` times."""

    start: int
    step: int
    count: int  # type: ignore[assignment]  # hides the method of tuples
    multiplicity: int = 1


class Job(NamedTuple):
    """One row of the table of jobs.

    `heads` query heads, `head_step` apart from `head` on, share the keys of key head `kv`. Jobs of a stage
    have no query row in common; a later stage continues the softmax of the rows that it meets again. Of a
    causal job the query at a position sees the keys up to that position. `phantom` keys of logit 0 and value
    0 are seen besides. `opens_queries` and `opens_keys`: no job of an earlier stage met these rows;
    `opens_branch`: none of the branch met these queries.
    """

    region: int
    stage: int
    branch: int
    batch: int
    head: int
    heads: int
    head_step: int
    kv: int
    start: int
    step: int
    count: int  # type: ignore[assignment]
    first_run: int
    num_runs: int
    causal: int
    phantom: int
    opens_branch: int
    opens_queries: int
    opens_keys: int


COLUMN = {name: i for i, name in enumerate(Job._fields)}


class Region(NamedTuple):
    """A block of the outputs whose sums are kept together: batches, times and key heads, (first, number)."""

    batch: Range
    time: Range
    kv: Range

    @classmethod
    def whole(cls, shape: Shape, kv: Range | None = None) -> Region:
        """All batches and times, with all key heads or those of `kv`."""
        return cls((0, shape.b), (0, shape.n), (0, shape.h_kv) if kv is None else kv)


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything a kernel needs besides the tensors: `print(plan)` shows it, equal plans hash equally."""

    jobs: Tensor  # (jobs, len(Job._fields)) int64, by region, then by stage
    runs: Tensor  # (runs, 4) int64, as in `Run`
    shape: Shape
    regions: tuple[Region, ...]
    # The first stage of a region writes every row of it, so that nothing needs initial values.
    covers_queries: bool = False
    covers_keys: bool = False
    detaches: bool = False  # mixing weights are constants in backward
    # Runs of keys are blocks of so many rows, from multiples of it on, if time 0 is the second number.
    unit: tuple[int, int] = (0, 0)
    # Of a run with a tile the queries see what is True in it: (tiles, queries, keys) bool.
    tiles: Tensor | None = None
    run_tiles: Tensor | None = None  # (runs,) the number of each run's tile, -1 for none
    budget: int = DEFAULT_WORKSPACE_BYTES  # bytes of rows that kernels pack at a time
    by_kernel: dict[Any, Any] = field(default_factory=dict, repr=False)  # what kernels derive from the tables

    def column(self, name: str) -> Tensor:
        return self.jobs[:, COLUMN[name]]

    @cached_property
    def key_counts(self) -> Tensor:
        """(jobs,) keys of each job."""
        return self.sum_runs(self.runs[:, 2])

    def sum_runs(self, values: Tensor) -> Tensor:
        """(jobs,): the sum of values (runs,) over the runs of each job."""
        ends, first = torch.cat([values.new_zeros(1), values.cumsum(0)]), self.column("first_run")
        return ends[first + self.column("num_runs")] - ends[first]

    @property
    def num_pairs(self) -> int:
        """Query-key pairs scored over all heads and batches: the true work, of causal jobs what they see.

        Runs with a tile are scored whole.
        """
        return self._pairs[0]

    @property
    def num_defined_pairs(self) -> int:
        """Pairs of the definition: those that are scored and seen, each as often as its key counts."""
        return self._pairs[1]

    @cached_property
    def _pairs(self) -> tuple[int, int]:
        jobs = dict(zip(COLUMN, self.jobs.cpu().T, strict=True))
        owner, number = numbered(jobs["num_runs"])
        run = jobs["first_run"][owner] + number
        start, step, count, times = self.runs.cpu()[run].T
        first, stride, queries = (jobs[name][owner] for name in ("start", "step", "count"))
        # The i-th query of a causal job sees `seen + i * rise` keys of a run, or none, or all of them: query
        # rows are as far apart as some number of key rows.
        step = torch.where(count > 1, step, 1)
        rise = torch.clamp(stride // step, min=1)
        seen = (first - start) // step + 1
        from_some, from_all = (torch.clamp(-(x // rise), min=0) for x in (seen, seen - count))
        from_some, from_all = (torch.minimum(x, queries) for x in (from_some, from_all))
        between = from_all - from_some
        cut = seen * between + rise * (between * (from_some + from_all - 1) // 2)
        pairs = torch.where(jobs["causal"][owner] > 0, cut + (queries - from_all) * count, queries * count)
        defined = pairs * times
        if self.tiles is not None and self.run_tiles is not None:
            tile = self.run_tiles.cpu()[run]
            defined = torch.where(tile < 0, defined, count_seen(self.tiles.cpu(), tile, queries, count))
        return int((pairs * jobs["heads"][owner]).sum()), int((defined * jobs["heads"][owner]).sum())

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())

    @property
    def _tables(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in ("jobs", "runs", "tiles", "run_tiles")}
        return {name: table for name, table in found.items() if table is not None}

    @cached_property
    def is_one_stage(self) -> bool:
        """No row is met twice: results need no sums."""
        return not bool((self.column("opens_queries") == 0).any())

    @cached_property
    def run_blocks(self) -> Tensor:
        """(runs,): the number of the block that each run of keys is, or is a part of."""
        size, shift = self.unit
        return torch.div(self.runs[:, 0] + shift, size, rounding_mode="floor")

    def to(self, device: torch.device | str) -> Plan:
        """The same plan with its tables on a device."""
        moved: dict[str, Any] = {name: table.to(device) for name, table in self._tables.items()}
        return replace(self, **moved, by_kernel={})

    @cached_property
    def digest(self) -> bytes:
        state = blake2b(repr((self.shape, self.regions)).encode(), digest_size=16)
        for table in self._tables.values():
            state.update(raw_bytes(table.cpu()))
        return state.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"by_kernel": {}}

    def __len__(self) -> int:
        return len(self.jobs)

    def __str__(self) -> str:
        pairs = f"{self.num_pairs} pairs scored, {self.num_defined_pairs} of the definition"
        lines = [f"{self.shape}: {len(self)} job(s), {len(self.runs)} run(s), {pairs}"]
        for job in map(Job._make, self.jobs[:_SHOWN].tolist()):
            numbers = range(job.first_run, job.first_run + min(job.num_runs, _SHOWN))
            keys = ", ".join(_show_run(Run(*self.runs[i].tolist())) + self._show_tile(i) for i in numbers)
            more = ", ..." if job.num_runs > _SHOWN else ""
            causal = " causal" if job.causal else ""
            phantom = f" +{job.phantom} phantom" if job.phantom else ""
            heads = f"head {job.head}" if job.heads == 1 else f"heads {job.head}+{job.heads}*{job.head_step}"
            queries = _show_run(Run(job.start, job.step, job.count))
            where = f"stage {job.stage}  batch {job.batch}  {heads}  key head {job.kv}"
            lines.append(f"{where}  queries {queries} x keys {keys}{more}{causal}{phantom}")
        if len(self) > _SHOWN:
            lines.append(f"... and {len(self) - _SHOWN} more")
        return "\n".join(lines)

    def _show_tile(self, run: int) -> str:
        tile = -1 if self.run_tiles is None else int(self.run_tiles[run])
        return "" if tile < 0 else f" tile {tile}"


_SHOWN = 20


def _show_run(run: Run) -> str:
    step = "" if run.step == 1 else f":{run.step}"
    times = "" if run.multiplicity == 1 else f" x{run.multiplicity}"
    return f"{run.start}..{run.start + (run.count - 1) * run.step}{step}{times}"


def numbered(count: Tensor) -> tuple[Tensor, Tensor]:
    """(owner, number) of each entry, if `count` says how many entries each owner has."""
    owner = torch.repeat_interleave(torch.arange(len(count)), count)
    return owner, torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]


def rows_within(start: Tensor, step: int, end: Tensor, window: Range) -> tuple[Tensor, Tensor]:
    """(first, number) of the rows start + j * step < end that lie in a window of positions."""
    stop = torch.clamp(end, max=window[1])
    first = torch.clamp(-((start - window[0]) // step), min=0)
    after = torch.clamp(-((start - stop) // step), min=0)
    return first, torch.clamp(after - first, min=0)


def bytes_a_row(d: int, itemsize: int) -> int:
    """Of a query or key row: packed inputs and results of a backward pass, half precision as float32.

    Forward, with half of them, keeps to the same jobs: they stay in cache.
    """
    return d * 4 * max(4, itemsize)


def even_size(total: int, at_most: int) -> int:
    """The size of the parts if `total` is cut into the fewest of at most `at_most`, as even as possible."""
    return -(-total // -(-total // max(1, at_most)))


def even_parts(total: int, at_most: int) -> list[tuple[int, int]]:
    """Cuts `total` into the fewest parts of at most `at_most`, as even as possible: (start, count)."""
    if total < 1:
        return []
    size = even_size(total, at_most)
    return [(start, min(size, total - start)) for start in range(0, total, size)]


def make_jobs(num: int, **columns: Tensor | int) -> Tensor:
    """(num, len(Job._fields)): a table of jobs, 0 in all columns that are not given."""
    jobs = torch.zeros(num, len(COLUMN), dtype=torch.int64)
    for name, values in columns.items():
        jobs[:, COLUMN[name]] = values
    return jobs


def every_batch(jobs: Tensor, b: int) -> Tensor:
    """The jobs of one batch, for each of b batches."""
    repeated = jobs.repeat(b, 1)
    repeated[:, COLUMN["batch"]] = torch.repeat_interleave(torch.arange(b), len(jobs))
    return repeated


def of_key_heads(jobs: Tensor, kv: Range) -> Tensor:
    """The jobs of the key heads (first, number)."""
    head = jobs[:, COLUMN["kv"]]
    return jobs[(head >= kv[0]) & (head < kv[0] + kv[1])]


def cut_regions(
    tables: Sequence[Table], batches: list[Range], kvs: list[Range], cuts: list[int]
) -> tuple[Region, ...]:
    """The regions of a grid of batches, key heads (first, number) and times between cuts.

    Writes the region of each job into the tables.
    """
    times = [(low, high - low) for low, high in pairwise(cuts)]
    regions = tuple(Region(batch, time, kv) for batch in batches for kv in kvs for time in times)
    edges = torch.tensor(cuts[1:-1])
    for jobs, _ in tables if len(regions) > 1 else ():
        time = torch.searchsorted(edges, jobs[:, COLUMN["start"]].contiguous(), right=True)
        kv, batch = jobs[:, COLUMN["kv"]] // kvs[0][1], jobs[:, COLUMN["batch"]] // batches[0][1]
        jobs[:, COLUMN["region"]] = (batch * len(kvs) + kv) * len(times) + time
    return regions


def make_plan(tables: Sequence[Table], shape: Shape, regions: tuple[Region, ...], **facts: Any) -> Plan:
    """One plan of tables, in the order of the stages."""
    if not tables:
        return Plan(torch.empty(0, len(COLUMN), dtype=torch.int64), NO_RUNS, shape, regions, **facts)
    jobs, at, shift = torch.cat([table for table, _ in tables]), 0, 0
    for table, runs in tables:
        jobs[at : at + len(table), COLUMN["first_run"]] += shift
        at, shift = at + len(table), shift + len(runs)
    num_stages = int(jobs[:, COLUMN["stage"]].max()) + 1 if len(jobs) else 1
    order = torch.argsort(jobs[:, COLUMN["region"]] * num_stages + jobs[:, COLUMN["stage"]], stable=True)
    return Plan(jobs[order], torch.cat([runs for _, runs in tables]), shape, regions, **facts)


def find_plan(
    cache: PatternCache | None, key: tuple[Any, ...], docs: Docs, build: Callable[[], Plan]
) -> Plan:
    """The plan of a key and documents; their boundaries would make a key larger than its plan."""
    packing = None if docs is None else blake2b(array("q", docs).tobytes()).digest()
    return build() if cache is None else cache.get_or_build((*key, packing), build)


NO_RUNS = torch.empty(0, 4, dtype=torch.int64)
