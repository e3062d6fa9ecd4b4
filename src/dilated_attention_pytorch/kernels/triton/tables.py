"""What a plan becomes for the programs: which block of rows each takes, and the plan seen from the keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...plan.runs import COLUMN, Plan, numbered


class Launch(NamedTuple):
    """Programs that run together, from `first` on in the table of their tiles."""

    first: int
    number: int
    branch: int
    carries: dict[str, bool]  # by the column that says where rows begin: whether some go on instead
    is_causal: bool
    has_phantom: bool = False
    has_one_run: bool = False  # a job


class QueryTables(NamedTuple):
    """Tiles (job, number of the head, first row): a launch a stage."""

    launches: list[Launch]
    tiles: Tensor
    jobs: Tensor
    runs: Tensor


class KeyTables(NamedTuple):
    """Tiles (run, first key) of runs of keys, and the jobs that visit each: a launch a branch."""

    launches: list[Launch]
    tiles: Tensor
    keys: Tensor
    visits: Tensor
    covers: bool  # every key is in a run that begins its sums


def most_rows(plan: Plan) -> tuple[int, int]:
    """Rows of the longest run of queries and of keys: larger blocks would be all padding."""
    found: tuple[int, int] | None = plan.by_kernel.get("triton_rows")
    if found is None:
        runs = _joined(plan)[1]
        found = tuple(int(x.max()) if len(x) else 1 for x in (plan.column("count"), runs[:, 2]))  # type: ignore[assignment]
        plan.by_kernel["triton_rows"] = found
    assert found is not None
    return found


def most_step(plan: Plan) -> int:
    """The largest distance of neighbours in a run."""
    found: int | None = plan.by_kernel.get("triton_step")
    if found is None:
        found = max(int(x.max()) if len(x) else 1 for x in (plan.column("step"), plan.runs[:, 1]))
        plan.by_kernel["triton_step"] = found
    return found


def query_tables(plan: Plan, block: int, device: torch.device) -> QueryTables:
    found: QueryTables | None = plan.by_kernel.get(("triton", block, device))
    if found is None:
        launches, tiles, at = [], [], 0
        joined, runs = _joined(plan)
        for jobs in _groups(plan, "stage"):
            table = plan.jobs[jobs]
            blocks = -(-table[:, COLUMN["count"]] // block)
            job, number = numbered(table[:, COLUMN["heads"]] * blocks)
            blocks, causal = blocks[job], table[job, COLUMN["causal"]] > 0
            # Of causal jobs the last rows see most keys: they begin first.
            row = torch.where(causal, blocks - 1 - number % blocks, number % blocks) * block
            tiles.append(torch.stack([jobs[job], number // blocks, row], 1))
            carries = {x: not bool(table[:, COLUMN[x]].all()) for x in ("opens_queries", "opens_branch")}
            facts = [bool(table[:, COLUMN[name]].any()) for name in ("causal", "phantom")]
            facts.append(bool((joined[jobs, COLUMN["num_runs"]] == 1).all()))
            launches.append(Launch(at, len(job), int(table[0, COLUMN["branch"]]), carries, *facts))
            at += len(job)
        moved = _moved(device, _cat(tiles, 3), joined, runs)
        found = plan.by_kernel["triton", block, device] = QueryTables(launches, *moved)
    return found


def key_tables(plan: Plan, block: int, device: torch.device) -> KeyTables:
    """Runs of keys of one branch are the same or disjoint, so that each key has one owner in a launch."""
    found: KeyTables | None = plan.by_kernel.get(("triton keys", block, device))
    if found is None:
        launches, tiles, owners, visits, tiles_at, visits_at, owners_at = [], [], [], [], 0, 0, 0
        met = 0
        for jobs in _groups(plan, "branch"):
            table = plan.jobs[jobs]
            job, number = numbered(table[:, COLUMN["num_runs"]])
            runs = plan.runs[table[job, COLUMN["first_run"]] + number]
            batch, kv = table[job, COLUMN["batch"]], table[job, COLUMN["kv"]]
            place = (batch * plan.shape.h_kv + kv) * plan.shape.n + runs[:, 0]
            order = torch.argsort(place, stable=True)
            _, num = torch.unique_consecutive(place[order], return_counts=True)
            first = num.cumsum(0) - num
            those = order[first]
            opens = torch.zeros_like(num)
            if launches:
                owner = torch.repeat_interleave(torch.arange(len(num)), num)
                opens = opens.scatter_reduce(0, owner, table[job[order], COLUMN["opens_keys"]], "amax")
            else:
                opens += 1
            met += int((runs[those, 2] * opens).sum())
            columns = batch[those], kv[those], *runs[those, :3].unbind(1), first + visits_at, num, opens
            owners.append(torch.stack(columns, 1))
            visits.append(torch.stack([jobs[job[order]], runs[order, 3]], 1))
            owner, number = numbered(-(-runs[those, 2] // block))
            tiles.append(torch.stack([owner + owners_at, number * block], 1))
            carries = {"opens_keys": not bool(opens.all())}
            is_causal = bool(table[:, COLUMN["causal"]].any())
            launches.append(Launch(tiles_at, len(owner), int(table[0, COLUMN["branch"]]), carries, is_causal))
            tiles_at, visits_at, owners_at = tiles_at + len(owner), visits_at + len(job), owners_at + len(num)
        covers = met == plan.shape.b * plan.shape.n * plan.shape.h_kv
        moved = _moved(device, _cat(tiles, 2), _cat(owners, 8), _cat(visits, 2))
        found = plan.by_kernel["triton keys", block, device] = KeyTables(launches, *moved, covers)
    return found


def _groups(plan: Plan, name: str) -> list[Tensor]:
    """The numbers of the jobs of each stage, or of each branch, in the order of the stages."""
    order = torch.argsort(plan.column("stage"), stable=True)
    value = plan.column(name)[order]
    return [order[value == x] for x in dict.fromkeys(value.tolist())]


def _joined(plan: Plan) -> tuple[Tensor, Tensor]:
    """Jobs and runs in which neighbouring runs of keys are one: blocks side by side fill whole tiles."""
    found: tuple[Tensor, Tensor] | None = plan.by_kernel.get("triton runs")
    if found is not None:
        return found
    jobs, runs = plan.jobs, plan.runs
    if len(runs) > 1 and bool((plan.column("num_runs") > 1).any()):
        begins = torch.ones(len(runs), dtype=torch.bool)
        before, after = runs[:-1], runs[1:]
        follows = (before[:, 0] + before[:, 1] * before[:, 2] == after[:, 0]) & (before[:, 1] == after[:, 1])
        begins[1:] = ~follows | (before[:, 3] != after[:, 3])
        begins[plan.column("first_run")[plan.column("num_runs") > 0]] = True
        number = begins.cumsum(0)
        num = number[-1]
        counts = torch.zeros(int(num), dtype=torch.int64).scatter_add(0, number - 1, runs[:, 2])
        joined = runs[begins].clone()
        joined[:, 2] = counts
        # The number of a job's first run, and of the last one.
        first, last = plan.column("first_run"), plan.column("first_run") + plan.column("num_runs") - 1
        has_run = plan.column("num_runs") > 0
        jobs = jobs.clone()
        jobs[:, COLUMN["first_run"]] = torch.where(has_run, number[first.clamp(max=len(runs) - 1)] - 1, 0)
        length = number[last.clamp(min=0)] - number[first.clamp(max=len(runs) - 1)] + 1
        jobs[:, COLUMN["num_runs"]] = torch.where(has_run, length, 0)
        runs = joined
    found = plan.by_kernel["triton runs"] = (jobs, runs)
    return found


def _cat(tables: list[Tensor], width: int) -> Tensor:
    return torch.cat(tables) if tables else torch.empty(0, width, dtype=torch.int64)


def _moved(device: torch.device, *tables: Tensor) -> Any:
    return [x.to(torch.int32).contiguous().to(device) for x in tables]
