"""The library's own CPU kernel: C behind ctypes, which takes the tables of a plan and raw pointers."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...plan.runs import COLUMN, Plan, Shape
from ..contract import Inputs, Merged, Request

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LIBRARY = Path(__file__).with_name("native.so")
MOST_THREADS = 64
MANY_TASKS = 8  # batches and key heads from which on each is one task of the backward pass
MOST_SUMS = 64 * 2**20  # bytes for sums of several tasks where they are fewer


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("time", ctypes.c_int64),
        ("head", ctypes.c_int64),
    )

    @classmethod
    def of(cls, x: Tensor) -> _Tensor:
        return cls(x.data_ptr(), *x.stride()[:3])


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, _Tensor) for name in ("q", "k", "v", "out", "lse", "mask")),
        *((name, ctypes.c_void_p) for name in ("jobs", "runs")),
        *((name, ctypes.c_int64) for name in ("num_jobs", "d", "threads", "most_rows")),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("dtype",)),
        ("scale", ctypes.c_float),
    )


class _GradCall(ctypes.Structure):
    _fields_ = (
        ("call", _Call),
        *((name, _Tensor) for name in ("grad_out", "grad_lse", "dq", "dk", "dv")),
        ("n", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("order", "sums")),
    )


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL | str:
    """The compiled library, or why there is none."""
    if not LIBRARY.exists():
        return f"it is not compiled, which `python -m {__name__}.build` does where there is a C compiler"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"its library does not load: {error}"
    library.dap_columns.restype = library.dap_isa.restype = ctypes.c_char_p
    library.dap_forward.argtypes = library.dap_forward_scratch.argtypes = [ctypes.POINTER(_Call)]
    library.dap_backward_scratch.argtypes = [ctypes.POINTER(_GradCall)]
    library.dap_forward_scratch.restype = library.dap_backward_scratch.restype = ctypes.c_int64
    library.dap_backward.argtypes = [ctypes.POINTER(_GradCall), ctypes.c_void_p, ctypes.c_int64]
    if library.dap_columns().decode().split() != list(COLUMN):
        return "its library is of another version: install the package again"
    return library


def why_not(request: Request) -> str | None:
    library = load_library()
    if isinstance(library, str):
        return library
    if request.device.type != "cpu":
        return f"it runs on cpu, and the tensors are on {request.device}"
    if request.dtype not in DTYPES:
        return f"it takes {', '.join(map(str, DTYPES))}, and the tensors are {request.dtype}"
    if request.dropout:
        return "it has no dropout"
    if request.detaches:
        return "it does not keep the outputs of single branches, which detach_mixing needs"
    if request.dtype != torch.float32 and not request.is_joint:
        return "in half precision it takes all branches of a query at once, and here they would be tiny jobs"
    if request.streams:
        return "it takes all keys at once, and some are of other ranks or of a cache"
    return None


def forward(plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n), in float32."""
    b, n, h, _ = inputs.q.shape
    out = inputs.workspace.result(inputs.q.shape, inputs.q.dtype, inputs.q.device)
    lse = inputs.workspace.result((b, h, n), torch.float32, inputs.q.device)
    if not plan.covers_queries:
        out.zero_()
        lse.fill_(-math.inf)
    q, k, v = (_dense(x) for x in (inputs.q, inputs.k, inputs.v))
    for jobs in _stages(plan):
        call = _call(plan, jobs, inputs, q, k, v, out, lse)
        _lend(call, _library().dap_forward_scratch(ctypes.byref(call)), inputs)
        _check(_library().dap_forward(ctypes.byref(call)))
    return out, lse


def _stages(plan: Plan) -> list[Tensor]:
    """The jobs of each stage, which go on with the rows of earlier ones."""
    found: list[Tensor] | None = plan.by_kernel.get("stages")
    if found is None:
        stage = plan.column("stage")
        numbers = [] if plan.is_one_stage else sorted(set(stage.tolist()))
        found = [plan.jobs[stage == number] for number in numbers] or [plan.jobs]
        plan.by_kernel["stages"] = found
    return found


def backward(plan: Plan, inputs: Inputs, merged: Merged) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the joint softmax, from the merged out and lse alone."""
    tensors = inputs.q, inputs.k, inputs.v
    dq, dk, dv = (inputs.workspace.result(x.shape, x.dtype, x.device) for x in tensors)
    tasks = _tasks(plan)
    if not plan.covers_queries:
        dq.zero_()
    if tasks.num_owned < plan.shape.b * plan.shape.h_kv:
        dk.zero_()
        dv.zero_()
    n, d = plan.shape.n, plan.shape.d
    num, sums = len(tasks.bounds) - 1, None
    if tasks.parts > 1:
        sums = inputs.workspace.take("native_sums", (num, 2, n, d), torch.float32, dq.device)
    q, k, v, out, grad_out = (_dense(x) for x in (*tensors, merged.out, merged.grad_out))
    grad_lse = None if merged.grad_lse is None else merged.grad_lse.to(torch.float32)
    call = _GradCall(
        _call(plan, plan.jobs, inputs, q, k, v, out, merged.lse),
        _Tensor.of(grad_out),
        _Tensor() if grad_lse is None else _Tensor.of(grad_lse.transpose(1, 2)),
        *(_Tensor.of(x) for x in (dq, dk, dv)),
        n,
        tasks.order.data_ptr(),
        None if sums is None else sums.data_ptr(),
    )
    call.call.threads = min(call.call.threads, num)
    _lend(call.call, _library().dap_backward_scratch(ctypes.byref(call)), inputs)
    _check(_library().dap_backward(ctypes.byref(call), tasks.bounds.data_ptr(), num))
    if sums is not None:
        for task in range(0, num, tasks.parts):
            batch, kv = plan.jobs[tasks.order[tasks.bounds[task]]][[COLUMN["batch"], COLUMN["kv"]]].tolist()
            for part in range(1, tasks.parts):
                sums[task].add_(sums[task + part])
            dk[batch, :, kv], dv[batch, :, kv] = sums[task].unbind(0)
    return dq, dk, dv


class _Tasks(NamedTuple):
    """Jobs in an order in which those of a task, of one batch and key head, are next to each other."""

    order: Tensor
    bounds: Tensor
    parts: int  # tasks of each batch and key head
    num_owned: int  # batches and key heads that have a job


def _tasks(plan: Plan) -> _Tasks:
    """A task for each batch and key head; several where these are few, the same for any number of threads."""
    found: _Tasks | None = plan.by_kernel.get("tasks")
    if found is None:
        owner = plan.column("batch") * plan.shape.h_kv + plan.column("kv")
        order = torch.argsort(owner, stable=True)
        _, counts = torch.unique_consecutive(owner[order], return_counts=True)
        parts = num_parts(plan.shape, len(counts)) if plan.is_one_stage else 1
        ends = counts.cumsum(0)
        cuts = (ends - counts)[:, None] + counts[:, None] * torch.arange(parts) // parts
        bounds = torch.cat([cuts.flatten(), ends[-1:]]) if len(counts) else torch.zeros(1, dtype=torch.int64)
        found = plan.by_kernel["tasks"] = _Tasks(order, bounds, parts, len(counts))
    return found


def num_parts(shape: Shape, num_owners: int) -> int:
    """Into how many tasks the work of a batch and key head is cut, each with sums of its own."""
    fit = MOST_SUMS // (max(1, num_owners) * 2 * shape.n * shape.d * 4)
    return max(1, min(fit, -(-MANY_TASKS // max(1, num_owners))))


def _library() -> ctypes.CDLL:
    library = load_library()
    assert not isinstance(library, str), library
    return library


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("the native kernel found no memory for its list of tasks")


def _lend(call: _Call, each: int, inputs: Inputs) -> None:
    """Scratch for the threads of a call."""
    memory = inputs.workspace.take("native", (call.threads * each + 64,), torch.uint8, inputs.q.device)
    call.scratch, call.scratch_bytes = memory.data_ptr() + -memory.data_ptr() % 64, each


def _most_rows(plan: Plan) -> int:
    if "most_rows" not in plan.by_kernel:
        rows = plan.column("heads") * plan.column("count")
        plan.by_kernel["most_rows"] = int(rows.max()) if len(rows) else 0
    found: int = plan.by_kernel["most_rows"]
    return found


def _dense(x: Tensor) -> Tensor:
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def _call(
    plan: Plan, jobs: Tensor, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> _Call:
    mask = inputs.key_mask
    return _Call(
        *(_Tensor.of(x) for x in (q, k, v, out, lse.transpose(1, 2))),
        _Tensor() if mask is None else _Tensor(mask.data_ptr(), *mask.stride(), 0),
        jobs.data_ptr(),
        plan.runs.data_ptr(),
        *(len(jobs), q.shape[-1], min(MOST_THREADS, torch.get_num_threads()), _most_rows(plan)),
        *(None, 0),
        DTYPES[q.dtype],
        inputs.scale,
    )
