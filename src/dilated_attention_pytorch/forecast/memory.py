"""The peak memory of an attention call, predicted from its own plan, without running it.

    peak = inputs + results + workspace
    inputs    = q, k, v; with gradients also out's
    results   = out, lse; with gradients also dq, dk, dv
    workspace = the largest packed tile, what the kernel returns for it, and the float32 sums of a panel

Before the memory of the process itself (Python and torch), and of attention alone: projections, feed-forward
and weights of a model come on top.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..kernels import Request, choose_kernel
from ..kernels.batches import batches_of
from ..plan import Pass, Plan
from .call import Call


class Memory(NamedTuple):
    """Bytes that a call holds at its peak; `saved` is what earlier layers keep for their backward."""

    inputs: int
    results: int
    workspace: int
    communication: int = 0
    saved: int = 0

    @property
    def peak(self) -> int:
        return sum(self)


def predict_memory(call: Call) -> Memory:
    """The peak of a forward pass or, to train, of a backward pass of the last layer, in one process."""
    inputs, out = call.query_bytes + 2 * call.key_bytes, call.query_bytes + call.lse_bytes
    forward = workspace_peak(call, "forward")
    if not call.train:
        return Memory(inputs, out, forward)
    gradients, backward = call.query_bytes + 2 * call.key_bytes, workspace_peak(call, "backward")
    # While the first pass runs there are no gradients yet; its workspace is free when they come.
    results = out + max(gradients + backward, forward) - backward
    saved = (call.layers - 1) * call.layer_bytes
    return Memory(inputs + call.query_bytes, results, backward, saved=saved)


def workspace_peak(call: Call, direction: Pass) -> int:
    """Scratch of the kernel: packed rows and results of its largest batches, sums of a region."""
    plan = call.plan(direction)
    batches = [batch for _, each in batches_of(plan, call.dtype.itemsize) for batch in each]
    if not batches:
        return 0
    size = call.shape.d * (call.wide if _widens(call) else call.dtype.itemsize)
    sizes = [(math.prod(x.queries.shape), max(math.prod(y.rows.shape) for y in x.keys)) for x in batches]
    queries, keys = max(x for x, _ in sizes) * size, max(x for _, x in sizes) * size
    sums = _sum_bytes(call, plan, direction)
    if direction == "forward":
        return 2 * queries + 2 * keys + sums  # q, k, v; out
    returned = max(num_queries + 2 * num_keys for num_queries, num_keys in sizes) * size
    return 3 * queries + 2 * keys + returned + sums  # q, out, gradient of out, k, v; dq, dk, dv


def _sum_bytes(call: Call, plan: Plan, direction: Pass) -> int:
    """Float32 sums beside half-precision results: out, or dq, dk and dv, of the largest region."""
    if call.dtype.itemsize >= 4:
        return 0
    row = call.shape.d * call.wide
    keys = max(region.batch[1] * region.time[1] * region.kv[1] for region in plan.regions)
    queries = keys * (call.shape.h // call.shape.h_kv)
    queries = 0 if plan.is_one_stage else queries  # what is met once is written as it is
    return row * (queries if direction == "forward" else queries + 2 * keys)


def _widens(call: Call) -> bool:
    """Whether rows are packed as float32; on a GPU, which may not be here to be asked, they are not."""
    return call.device.type == "cpu" and choose_kernel(Request(call.device, call.dtype)).op.widens
