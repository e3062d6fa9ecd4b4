"""The library's own CPU kernel: C behind ctypes, which takes the tables of a plan and raw pointers."""

from __future__ import annotations

import ctypes
import math
import struct
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.workspace import Workspace
from ...plan.runs import COLUMN, Job, Plan, Shape
from .. import stock
from ..contract import How, Inputs, Merged, Op, RemoteKV, Request

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LIBRARY = Path(__file__).with_name("native.so")
MOST_THREADS = 64
CPU = torch.device("cpu")
MANY_TASKS = 8  # batches and key heads from which on each is one task of the backward pass
MOST_SUMS = 64 * 2**20  # bytes for sums of several tasks where they are fewer


# The structs of attend.h, whose fields all have 8 bytes. A tensor is its address and three strides.
_CALL, _GRAD_CALL = struct.Struct("34qd"), struct.Struct("23q")
_NOTHING = (0, 0, 0, 0)


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
    library.dap_forward.argtypes = [ctypes.c_char_p]
    library.dap_backward.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]
    library.dap_forward_scratch.argtypes = [ctypes.c_int64] * 2
    library.dap_backward_scratch.argtypes = [ctypes.c_int64] * 3
    library.dap_forward_scratch.restype = library.dap_backward_scratch.restype = ctypes.c_int64
    if library.dap_columns().decode().split() != list(COLUMN):
        return "its library is of another version: install the package again"
    for pool in Path(torch.__file__).with_name("lib").glob("libgomp*"):
        library.dap_use_pool(ctypes.cast(ctypes.CDLL(str(pool)).GOMP_parallel, ctypes.c_void_p))
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
    return None


def _packs(plan: Plan, inputs: Inputs, remote: RemoteKV | None) -> bool:
    """Whether rows are packed and summed up by the stock engine: those of other ranks or of a cache, and half
    precision whose rows are met more than once."""
    return remote is not None or (inputs.q.dtype != torch.float32 and not plan.is_one_stage)


def forward(plan: Plan, inputs: Inputs, remote: RemoteKV | None = None) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n), in float32."""
    if _packs(plan, inputs, remote):
        return stock.forward(NATIVE_OP, plan, inputs, remote)
    b, n, h, _ = inputs.q.shape
    out = inputs.workspace.result(inputs.q.shape, inputs.q.dtype, inputs.q.device)
    lse = inputs.workspace.result((b, h, n), torch.float32, inputs.q.device)
    if not plan.covers_queries:
        out.zero_()
        lse.fill_(-math.inf)
    _attend(plan, inputs, out, lse)
    return out, lse


def _attend(plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    q, k, v = (_dense(x) for x in (inputs.q, inputs.k, inputs.v))
    places, dtypes = _places(inputs, (q, k, v, out, lse)), (DTYPES[q.dtype], DTYPES[out.dtype])
    memory = _lend(inputs.workspace, _forward_scratch(plan.shape.d, _most_rows(plan)))
    for jobs in _stages(plan):
        _check(_library().dap_forward(_call(plan, jobs, places, dtypes, inputs.scale, memory)))


@lru_cache(maxsize=256)
def _forward_scratch(d: int, most_rows: int) -> int:
    size: int = _library().dap_forward_scratch(d, most_rows)
    return size


def _stages(plan: Plan) -> list[Tensor]:
    """The jobs of each stage, which go on with the rows of earlier ones."""
    found: list[Tensor] | None = plan.by_kernel.get("stages")
    if found is None:
        stage = plan.column("stage")
        numbers = [] if plan.is_one_stage else sorted(set(stage.tolist()))
        found = [plan.jobs[stage == number] for number in numbers] or [plan.jobs]
        plan.by_kernel["stages"] = found
    return found


def backward(
    plan: Plan, inputs: Inputs, merged: Merged, remote: RemoteKV | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the joint softmax, from the merged out and lse alone."""
    if plan.detaches or _packs(plan, inputs, remote):
        return stock.backward(NATIVE_OP, plan, inputs, merged, remote)
    tensors = inputs.q, inputs.k, inputs.v
    dq, dk, dv = (inputs.workspace.result(x.shape, x.dtype, x.device) for x in tensors)
    tasks = _tasks(plan)
    if not plan.covers_queries:
        dq.zero_()
    if tasks.num_owned < plan.shape.b * plan.shape.h_kv:
        dk.zero_()
        dv.zero_()
    n, d = inputs.k.shape[1], plan.shape.d
    num, sums = len(tasks.bounds) - 1, None
    if tasks.parts > 1:
        sums = inputs.workspace.take("native_sums", (num, 2, n, d), torch.float32, dq.device)
    q, k, v, out, grad_out = (_dense(x) for x in (*tensors, merged.out, merged.grad_out))
    grad_lse = None if merged.grad_lse is None else merged.grad_lse.to(torch.float32)
    summed = n if sums is None and q.dtype != torch.float32 else 0
    memory = _lend(inputs.workspace, _library().dap_backward_scratch(d, _most_rows(plan), summed), num)
    places, dtypes = _places(inputs, (q, k, v, out, merged.lse)), (DTYPES[q.dtype], DTYPES[out.dtype])
    call = _call(plan, plan.jobs, places, dtypes, inputs.scale, memory) + _GRAD_CALL.pack(
        *_place(grad_out),
        *(_NOTHING if grad_lse is None else _place_packed(grad_lse)),
        *(number for x in (dq, dk, dv) for number in _place(x)),
        *(n, tasks.order.data_ptr(), 0 if sums is None else sums.data_ptr()),
    )
    _check(_library().dap_backward(call, tasks.bounds.data_ptr(), num))
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


class _Memory(NamedTuple):
    """Scratch for the threads of a call, `each` bytes for one; `owner` keeps it."""

    address: int
    each: int
    owner: Tensor


def _num_threads() -> int:
    return min(MOST_THREADS, torch.get_num_threads())


def _lend(workspace: Workspace, each: int, most: int = MOST_THREADS) -> _Memory:
    """Scratch for a call in which `most` threads find work."""
    size = min(_num_threads(), most) * each + 64
    memory = workspace.take("native", (size,), torch.uint8, CPU)
    address = memory.data_ptr()
    return _Memory(address + -address % 64, each, memory)


def _most_rows(plan: Plan) -> int:
    if "most_rows" not in plan.by_kernel:
        rows = plan.column("heads") * plan.column("count")
        plan.by_kernel["most_rows"] = int(rows.max()) if len(rows) else 0
    found: int = plan.by_kernel["most_rows"]
    return found


def _dense(x: Tensor) -> Tensor:
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


Place = tuple[int, int, int, int]


def _place(x: Tensor) -> Place:
    """Of a tensor (b, n, heads, ...)."""
    batch, time, head, *_ = x.stride()
    return x.data_ptr(), batch, time, head


def _place_packed(x: Tensor) -> Place:
    """Of a tensor (b, heads, n, ...)."""
    batch, head, time, *_ = x.stride()
    return x.data_ptr(), batch, time, head


def _call(
    plan: Plan,
    jobs: Tensor,
    places: tuple[Place, ...],
    dtypes: tuple[int, int],
    scale: float,
    memory: _Memory,
) -> bytes:
    """The struct of a call; places of q, k, v, out, lse and mask."""
    q, k, v, out, lse, mask = places
    facts = len(jobs), plan.shape.d, _num_threads(), _most_rows(plan), memory.address, memory.each
    tables = jobs.data_ptr(), plan.runs.data_ptr()
    return _CALL.pack(*q, *k, *v, *out, *lse, *mask, *tables, *facts, *dtypes, scale)


def _places(inputs: Inputs, tensors: tuple[Tensor, ...]) -> tuple[Place, ...]:
    """Of q, k, v, out, lse and the mask of a call."""
    *rows, lse = tensors
    mask = inputs.key_mask
    if mask is not None and mask.dim() == 2:
        mask = mask.unsqueeze(-1).expand(-1, -1, inputs.k.shape[2])
    return *map(_place, rows), _place_packed(lse), _NOTHING if mask is None else _place(mask)


@lru_cache(maxsize=64)
def _packed_jobs(b: int, h: int, h_kv: int, n: int, is_causal: bool, opens: bool) -> Tensor:
    """A job for each batch and key head, with the rows of all its query heads."""
    group, keys = h // h_kv, {"first_run": 0, "num_runs": 1, "causal": is_causal, "phantom": 0}
    rows = {"head_step": 1, "start": 0, "step": 1, "count": n, "heads": group, "region": 0, "stage": 0}
    met = {"branch": 0, "opens_branch": opens, "opens_queries": opens, "opens_keys": True}
    pairs = [(batch, kv) for batch in range(b) for kv in range(h_kv)]
    jobs = [Job(batch=i, kv=kv, head=kv * group, **keys, **rows, **met) for i, kv in pairs]
    return torch.tensor(jobs, dtype=torch.int64)


@lru_cache(maxsize=64)
def _packed_plan(shape: Shape, num_keys: int, is_causal: bool, opens: bool = True) -> Plan:
    jobs = _packed_jobs(shape.b, shape.h, shape.h_kv, shape.n, is_causal, opens)
    known = {"stages": [jobs], "most_rows": shape.h // shape.h_kv * shape.n}
    runs = torch.tensor([[0, 1, num_keys, 1]])
    return Plan(jobs, runs, shape, (), covers_queries=True, covers_keys=True, by_kernel=known)


def _packed_inputs(q: Tensor, k: Tensor, v: Tensor, how: How) -> Inputs:
    mask = None if how.mask is None else how.mask.transpose(1, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return Inputs(q, k, v, mask, how.scale, 0.0, 0, Workspace())


def _forward_packed(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    inputs = _packed_inputs(q, k, v, how)
    out, lse = forward(_packed_plan(inputs.shape, k.shape[2], how.is_causal), inputs)
    return out.transpose(1, 2), lse


def _join_packed(q: Tensor, k: Tensor, v: Tensor, how: How, out: Tensor, lse: Tensor) -> None:
    """Goes straight to the library: a decoding step is many small calls."""
    (b, h, n, d), (h_kv, m) = q.shape, k.shape[1:3]
    plan = _packed_plan(Shape(b, n, h, h_kv, d), m, how.is_causal, False)
    rows, dtypes = tuple(map(_dense, (q, k, v))), (DTYPES[q.dtype], DTYPES[out.dtype])
    mask = _NOTHING if how.mask is None else _place_packed(how.mask)
    places = *map(_place_packed, (*rows, out, lse)), mask
    memory = _lend(Workspace(), _forward_scratch(d, _most_rows(plan)))
    _check(_library().dap_forward(_call(plan, plan.jobs, places, dtypes, how.scale, memory)))


def _backward_packed(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    how: How,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _packed_inputs(q, k, v, how)
    merged = Merged(out.transpose(1, 2), lse, grad_out.transpose(1, 2), grad_lse)
    dq, dk, dv = backward(_packed_plan(inputs.shape, k.shape[2], how.is_causal), inputs, merged)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


NATIVE_OP = Op(_forward_packed, _backward_packed, join=_join_packed)
