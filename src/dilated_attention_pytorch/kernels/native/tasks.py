"""How the backward pass is cut into tasks that threads take one at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...plan.runs import Plan, numbered
from ..rows import kept

MANY_TASKS = 8  # from so many on, each has its keys to itself
MOST_SUMS = 64 * 2**20  # bytes for sums of tasks that share keys


class Tasks(NamedTuple):
    """What threads of the backward pass take one at a time: jobs whose keys no other task has.

    Where these are few, `parts` tasks share the keys, each with sums of its own.
    """

    order: Tensor  # the jobs, those of a task next to each other
    table: Tensor  # (tasks, 5): grad_task of attend.h
    parts: int
    num_owned: int  # batches and key heads that have a job
    longest: int  # the most keys of a task


@kept
def tasks_of(plan: Plan, num_keys: int) -> Tasks:
    """Jobs of a batch and key head whose ranges of keys overlap are a task, for any number of threads."""
    owner, above = plan.column("batch") * plan.shape.h_kv + plan.column("kv"), num_keys + 1
    low, high = torch.zeros_like(owner), torch.full_like(owner, num_keys)
    if plan.is_one_stage:  # else a query is met again, maybe with other keys
        low, high = _key_ranges(plan)
    order = torch.argsort(owner * above + low, stable=True)
    owner, low, high = owner[order], low[order], high[order]
    reach = (owner * above + high).cummax(0).values  # the end of the keys so far
    begins = torch.ones(len(plan), dtype=torch.bool)
    begins[1:] = owner[1:] * above + low[1:] >= reach[:-1]
    first = begins.nonzero().squeeze(1)
    owner, opens = owner[first], torch.ones(len(first), dtype=torch.bool)
    opens[1:] = owner[1:] != owner[:-1]
    start = low[first].masked_fill_(opens, 0)  # all keys are some task's: those of none get zeros
    end = start.roll(-1).masked_fill_(opens.roll(-1), num_keys)
    longest = int((end - start).max()) if len(first) else 0
    fit = MOST_SUMS // max(1, 8 * longest * plan.shape.d * len(first))
    parts = max(1, min(fit, -(-MANY_TASKS // max(1, len(first))))) if plan.is_one_stage else 1
    last = torch.cat([first[1:], first.new_tensor([len(plan)])])[: len(first)]
    cuts = first[:, None] + (last - first)[:, None] * torch.arange(parts + 1) // parts
    jobs, keys = (cuts[:, :-1], cuts[:, 1:]), (x[:, None].expand(-1, parts) for x in (start, end))
    columns = torch.arange(len(first) * parts), *(x.flatten() for x in (*jobs, *keys))
    table = torch.stack(columns, 1)
    return Tasks(order, table, parts, int(opens.sum()), longest)


def _key_ranges(plan: Plan) -> tuple[Tensor, Tensor]:
    """(first, end) of the keys of each job."""
    job, number = numbered(plan.column("num_runs"))
    start, step, count, _ = plan.runs[plan.column("first_run")[job] + number].unbind(1)
    ends, none = start + (count - 1) * step + 1, torch.zeros(len(plan), dtype=torch.int64)
    first = none.scatter_reduce(0, job, start, "amin", include_self=False)
    return first, none.scatter_reduce(0, job, ends, "amax", include_self=False)
