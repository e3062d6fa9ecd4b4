"""What a plan becomes for the programs: which block of rows each takes, and the plan seen from the keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...plan.runs import COLUMN, Plan, numbered
from ..rows import kept


class Launch(NamedTuple):
    """Programs that run together, from `first` on in the table of their tiles."""

    first: int
    number: int
    branch: int
    carries: dict[str, bool]  # by the column that says where rows begin: whether some go on instead
    is_causal: bool
    has_phantom: bool = False
    has_one_run: bool = False  # in each job


class QueryTables(NamedTuple):
    """Tiles (job, number of the head, first row): a launch a stage."""

    launches: tuple[Launch, ...]
    tiles: Tensor
    jobs: Tensor
    runs: Tensor


class KeyTables(NamedTuple):
    """Tiles (run, first key) of runs of keys, and the jobs that visit each run: a launch a branch."""

    launches: tuple[Launch, ...]
    tiles: Tensor
    keys: Tensor  # batch, key head, start, step, count, first visit, number of visits, opens
    visits: Tensor  # job, multiplicity
    covers: bool  # every key is in a run that opens its sums


class Extent(NamedTuple):
    """Rows of the longest run of queries and of keys, and the largest step of any."""

    queries: int
    keys: int
    step: int


@kept
def extent(plan: Plan) -> Extent:
    steps = torch.cat([plan.column("step"), plan.runs[:, 1]])
    counts = plan.column("count"), _joined(plan)[1][:, 2], steps
    return Extent(*(int(x.max()) if len(x) else 1 for x in counts))


@kept
def query_tables(plan: Plan, block: int, device: torch.device) -> QueryTables:
    jobs, runs = _joined(plan)
    launches, tiles, at = list[Launch](), [torch.empty(0, 3, dtype=torch.int64)], 0
    for those in _groups(plan, "stage"):
        table = jobs[those]
        blocks = -(-table[:, COLUMN["count"]] // block)
        job, number = numbered(table[:, COLUMN["heads"]] * blocks)
        blocks, causal = blocks[job], table[job, COLUMN["causal"]] > 0
        # Of causal jobs the last rows see most keys: they begin first.
        row = torch.where(causal, blocks - 1 - number % blocks, number % blocks) * block
        tiles.append(torch.stack([those[job], number // blocks, row], 1))
        carries = {x: not bool(table[:, COLUMN[x]].all()) for x in ("opens_queries", "opens_branch")}
        is_causal, has_phantom = (bool(table[:, COLUMN[name]].any()) for name in ("causal", "phantom"))
        has_one_run = bool((table[:, COLUMN["num_runs"]] == 1).all())
        branch = int(table[0, COLUMN["branch"]])
        launches.append(Launch(at, len(job), branch, carries, is_causal, has_phantom, has_one_run))
        at += len(job)
    return QueryTables(tuple(launches), *(_moved(x, device) for x in (torch.cat(tiles), jobs, runs)))


@kept
def key_tables(plan: Plan, block: int, device: torch.device) -> KeyTables:
    """Runs of keys of one branch are the same or disjoint, so that each key has one owner in a launch."""
    launches, opened, num_tiles = list[Launch](), 0, 0
    span = int(plan.runs[:, 0].max()) + 1 if len(plan.runs) else 1
    tiles, keys, visits = ([torch.empty(0, width, dtype=torch.int64)] for width in (2, 8, 2))
    for those in _groups(plan, "branch"):
        table = plan.jobs[those]
        job, number = numbered(table[:, COLUMN["num_runs"]])
        runs = plan.runs[table[job, COLUMN["first_run"]] + number]
        batch, kv, opens = (table[job, COLUMN[name]] for name in ("batch", "kv", "opens_keys"))
        place = (batch * plan.shape.h_kv + kv) * span + runs[:, 0]
        order = torch.argsort(place, stable=True)
        _, num = torch.unique_consecutive(place[order], return_counts=True)
        first = num.cumsum(0) - num
        own = order[first]
        owner = torch.repeat_interleave(torch.arange(len(num)), num)
        opens = torch.full_like(num, not launches).scatter_reduce(0, owner, opens[order], "amax")
        tile, number = numbered(-(-runs[own, 2] // block))
        tiles.append(torch.stack([tile + sum(map(len, keys)), number * block], 1))
        columns = batch[own], kv[own], *runs[own, :3].unbind(1), first + sum(map(len, visits)), num, opens
        keys.append(torch.stack(columns, 1))
        visits.append(torch.stack([those[job[order]], runs[order, 3]], 1))
        carries = {"opens_keys": not bool(opens.all())}
        is_causal = bool(table[:, COLUMN["causal"]].any())
        launches.append(Launch(num_tiles, len(tile), int(table[0, COLUMN["branch"]]), carries, is_causal))
        num_tiles, opened = num_tiles + len(tile), opened + int((runs[own, 2] * opens).sum())
    covers = plan.covers_keys or opened == plan.shape.b * plan.shape.n * plan.shape.h_kv
    those_tiles, those_keys, those_visits = (_moved(torch.cat(x), device) for x in (tiles, keys, visits))
    return KeyTables(tuple(launches), those_tiles, those_keys, those_visits, covers)


def _groups(plan: Plan, name: str) -> list[Tensor]:
    """The numbers of the jobs of each stage, or of each branch, in the order of the stages."""
    order = torch.argsort(plan.column("stage"), stable=True)
    value = plan.column(name)[order]
    return [order[value == x] for x in dict.fromkeys(torch.unique_consecutive(value).tolist())]


@kept
def _joined(plan: Plan) -> tuple[Tensor, Tensor]:
    """Jobs and runs in which neighbouring runs of a job are one: blocks side by side fill whole tiles."""
    jobs, runs, (first, num) = plan.jobs, plan.runs, map(plan.column, ("first_run", "num_runs"))
    if not bool((num > 1).any()):
        return jobs, runs
    before, after = runs[:-1], runs[1:]
    begins = torch.ones(len(runs) + 1, dtype=torch.bool)
    differs = (before[:, 1::2] != after[:, 1::2]).any(1)
    begins[1:-1] = (before[:, 0] + before[:, 1] * before[:, 2] != after[:, 0]) | differs
    begins[first] = begins[first + num] = True
    number = begins.cumsum(0) - 1  # of the joined run that each is a part of
    joined = runs[begins[:-1]]
    joined[:, 2] = torch.zeros(len(joined), dtype=torch.int64).scatter_add(0, number[:-1], runs[:, 2])
    jobs = jobs.clone()
    jobs[:, COLUMN["first_run"]] = number[first]
    jobs[:, COLUMN["num_runs"]] = number[first + num] - number[first]
    return jobs, joined


def _moved(table: Tensor, device: torch.device) -> Tensor:
    return table.to(torch.int32).contiguous().to(device)
