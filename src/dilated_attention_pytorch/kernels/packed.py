"""Packed rows as a plan, so that a kernel which takes whole plans serves as an op of packed rows, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ..core.workspace import Workspace
from ..plan.runs import Job, Plan, Shape
from .contract import Attended, Backward, Gradients, How, Inputs, Merged


@lru_cache(maxsize=64)
def packed_jobs(
    b: int, h: int, h_kv: int, n: int, is_causal: bool, *, opens: bool = True, parts: int = 1
) -> Tensor:
    """A job for each batch and key head, with the rows of all its query heads.

    Each of several parts of the keys has a job, a run and query heads of its own.
    """
    group, keys = h // h_kv, {"num_runs": 1, "causal": is_causal, "phantom": 0}
    rows = {"head_step": 1, "start": 0, "step": 1, "count": n, "heads": group, "region": 0, "stage": 0}
    met = {"branch": 0, "opens_branch": opens, "opens_queries": opens, "opens_keys": True}
    jobs = [
        Job(batch=batch, kv=kv, head=part * h + kv * group, first_run=part, **keys, **rows, **met)
        for batch in range(b)
        for kv in range(h_kv)
        for part in range(parts)
    ]
    return torch.tensor(jobs, dtype=torch.int64)


@lru_cache(maxsize=64)
def packed_plan(shape: Shape, num_keys: int, is_causal: bool, parts: int = 1) -> Plan:
    """All queries of a batch and head attend all keys, or each of several even parts of them."""
    jobs = packed_jobs(shape.b, shape.h, shape.h_kv, shape.n, is_causal, parts=parts)
    size = -(-num_keys // parts)
    runs = [[start, 1, max(0, min(size, num_keys - start)), 1] for start in range(0, size * parts, size)]
    return Plan(jobs, torch.tensor(runs), shape, (), covers_queries=True, covers_keys=True)


def packed_inputs(q: Tensor, k: Tensor, v: Tensor, how: How) -> Inputs:
    """The tensors of a call; its mask is (b, n, h_kv)."""
    mask = None if how.mask is None else how.mask.transpose(1, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return Inputs(q, k, v, mask, how.scale, 0.0, 0, Workspace())


def packed_backward(backward: Callable[[Plan, Inputs, Merged], Gradients]) -> Backward:
    """The backward of an op, from that of a kernel."""

    def run(x: Attended) -> Gradients:
        inputs = packed_inputs(x.q, x.k, x.v, x.how)
        merged = Merged(x.out.transpose(1, 2), x.lse, x.grad_out.transpose(1, 2), x.grad_lse)
        dq, dk, dv = backward(packed_plan(inputs.shape, x.k.shape[2], x.how.is_causal), inputs, merged)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return run
