"""What a call will cost, before it runs, from its own plan: bytes at its peak, and time over dense attention.

    peak = inputs + results + workspace
    inputs    = q, k, v; with gradients also out's
    results   = out, lse; with gradients also dq, dk, dv
    workspace = the largest packed batch, what the kernel returns for it, and the float32 sums of a region

Before the memory of the process itself (Python and torch), and of attention alone: projections, feed-forward
and weights of a model come on top.

Time is that of a CPU. Torch's CPU flash kernel, which runs dense attention and, without the native kernel,
the jobs, takes queries in blocks and the keys that they see in blocks of `KEY_BLOCK`. So a causal job
computes whole blocks along the diagonal: up to `KEY_BLOCK` keys it costs as much as one that is not causal.
Costs are in units of a product of a score and a feature at that kernel's best rate, and only their ratios
have a meaning:

    a pair of query and key      d + SOFTMAX
    a query of a job             QUERY * d, its share of unpacking keys and of starting rows
    an element packed or merged  MOVE
    backward                     BACKWARD times the kernel's forward, twice the moves
    the native kernel            a pair of query and key / NATIVE, each key once, and nothing else

The constants were fitted on x86. `benchmarks/forecast.py` compares with what is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..kernels import Request, choose_kernel
from ..kernels.batches import batches_of
from ..kernels.native.tasks import tasks_of
from ..plan import DEFAULT_WORKSPACE_BYTES, Pass, Plan, Shape, once_pays, plan_dilated, plan_once
from ..spec import DilatedSpec

CPU = torch.device("cpu")
KEY_BLOCK = 512
SOFTMAX = 16
QUERY = 22
MOVE = 30
BACKWARD = 2.6
NATIVE = 1.2  # how much faster than torch's its best rate is
NATIVE_SCRATCH = 2**20  # bytes a thread, at most about


@dataclass(frozen=True)
class Call:
    """What is to be attended: sizes, numbers and passes."""

    shape: Shape
    dtype: torch.dtype
    spec: DilatedSpec
    train: bool = False
    layers: int = 1
    device: torch.device = CPU
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES

    @property
    def wide(self) -> int:
        """Bytes of an element of sums and lse."""
        return max(4, self.dtype.itemsize)

    @property
    def bytes_of(self) -> tuple[int, int, int]:
        """Of q, of k, and of lse."""
        b, n, h, h_kv, d = self.shape
        row = d * self.dtype.itemsize
        return b * n * h * row, b * n * h_kv * row, b * n * h * self.wide

    @property
    def layer_bytes(self) -> int:
        """What a layer keeps for its backward: q, k, v, out and lse."""
        query, key, lse = self.bytes_of
        return 2 * query + 2 * key + lse

    @property
    def is_native(self) -> bool:
        """Whether the native kernel runs it."""
        if self.device.type != "cpu":
            return False  # a GPU may not be here to be asked
        return choose_kernel(Request(self.device, self.dtype)).name == "native"

    @property
    def passes(self) -> tuple[Pass, ...]:
        return ("forward", "backward") if self.train else ("forward",)

    def plan(self, direction: Pass) -> Plan:
        """The plan that the call itself would follow."""
        detaches = self.spec.detach_mixing and direction == "backward"
        if self.is_native and once_pays(self.spec, self.shape) and not detaches:
            return plan_once(self.spec, self.shape)
        options: dict[str, Any] = {"itemsize": self.dtype.itemsize, "workspace_bytes": self.workspace_bytes}
        return plan_dilated(self.spec, self.shape, direction=direction, **options)


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
    query, key, lse = call.bytes_of
    inputs, out, forward = query + 2 * key, query + lse, workspace_peak(call, "forward")
    if not call.train:
        return Memory(inputs, out, forward)
    gradients, backward = query + 2 * key, workspace_peak(call, "backward")
    # While the first pass runs there are no gradients yet; its workspace is free when they come.
    results = out + max(gradients + backward, forward) - backward
    return Memory(inputs + query, results, backward, saved=(call.layers - 1) * call.layer_bytes)


def workspace_peak(call: Call, direction: Pass) -> int:
    """Scratch of the kernel: packed rows and results of its largest batches, sums of a region."""
    plan = call.plan(direction)
    if call.is_native and not plan.detaches and (call.dtype.itemsize == 4 or plan.is_one_stage):
        return _native_peak(call, plan, direction)
    batches = [batch for _, each in batches_of(plan, call.dtype.itemsize) for batch in each]
    if not batches:
        return 0
    # Half precision is widened by some kernels; on a GPU, which may not be here to be asked, it is not.
    widens = call.device.type == "cpu" and choose_kernel(Request(call.device, call.dtype)).op.widens
    row = call.shape.d * (call.wide if widens else call.dtype.itemsize)
    sizes = [(math.prod(x.queries.shape), max(math.prod(y.rows.shape) for y in x.keys)) for x in batches]
    queries, keys = row * max(num for num, _ in sizes), row * max(num for _, num in sizes)
    sums = 0  # in float32 beside half-precision results: out, or dq, dk and dv, of the largest region
    if call.dtype.itemsize < 4:
        of_keys = max(region.batch[1] * region.time[1] * region.kv[1] for region in plan.regions)
        of_queries = 0 if plan.is_one_stage else of_keys * (call.shape.h // call.shape.h_kv)
        sums = of_queries + (2 * of_keys if direction == "backward" else 0)
        sums *= call.shape.d * call.wide
    if direction == "forward":
        return 2 * queries + 2 * keys + sums  # q, k, v; out
    returned = row * max(query + 2 * key for query, key in sizes)
    return 3 * queries + 2 * keys + returned + sums  # q, out, gradient of out, k, v; dq, dk, dv


def _native_peak(call: Call, plan: Plan, direction: Pass) -> int:
    """Scratch of the native kernel's threads, and float32 sums: of half precision, of split key heads."""
    threads = torch.get_num_threads()
    scratch = threads * NATIVE_SCRATCH
    if direction == "forward":
        return scratch
    tasks = tasks_of(plan, call.shape.n)
    num, sums = len(tasks.table), 2 * tasks.longest * call.shape.d * 4  # of dk and dv of a task
    if tasks.parts > 1:
        return scratch + num * sums
    return scratch + (min(threads, num) * sums if call.dtype.itemsize < 4 else 0)


def relative_time(call: Call) -> float | None:
    """Time of the call over that of dense attention of the same inputs; None where nothing is known of it.

    That is other devices, and float16, in which dense attention may or may not have a fast kernel on a CPU.
    """
    if call.device.type != "cpu" or call.dtype == torch.float16:
        return None
    b, n, h, _, d = call.shape
    dense = b * h * _kernel_work(n, n, d, call.spec.is_causal)
    if call.is_native:
        return call.plan("forward").num_pairs * (d + SOFTMAX) / NATIVE / dense
    own = sum(_pass_work(call, direction) for direction in call.passes)
    return own / (dense * (1 + BACKWARD if call.train else 1))


def _pass_work(call: Call, direction: Pass) -> float:
    plan, d = call.plan(direction), call.shape.d
    jobs = torch.stack([*(plan.column(x) for x in ("count", "causal", "heads")), plan.key_counts], 1)
    kinds, times = torch.unique(jobs, dim=0, return_counts=True)
    total = 0.0
    for (queries, causal, heads, keys), num in zip(kinds.tolist(), times.tolist(), strict=True):
        kernel = heads * _kernel_work(queries, keys, d, bool(causal))
        moved = 2 * d * (heads * queries + keys)
        is_forward = direction == "forward"
        total += num * (kernel + MOVE * moved if is_forward else BACKWARD * kernel + 2 * MOVE * moved)
    return total


def _kernel_work(queries: int, keys: int, d: int, is_causal: bool) -> float:
    """Of one head."""
    return computed_pairs(queries, keys, is_causal) * (d + SOFTMAX) + QUERY * queries * d


def computed_pairs(queries: int, keys: int, is_causal: bool) -> int:
    """Pairs that the kernel computes, of which under a causal mask some are then thrown away."""
    if not is_causal:
        return queries * keys
    # Blocks of queries divide those of keys: all queries of the j-th block of keys see j + 1 blocks.
    whole, rest = divmod(queries, KEY_BLOCK)
    return KEY_BLOCK**2 * whole * (whole + 1) // 2 + rest * min(keys, (whole + 1) * KEY_BLOCK)
