"""The library's own CPU kernel: C behind ctypes, which takes the tables of a plan and raw pointers."""

from __future__ import annotations

import ctypes
import math
import os
import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.workspace import Workspace
from ...plan.runs import COLUMN, Plan
from .. import stock
from ..contract import Gradients, How, Inputs, Merged, Op, Outputs, RemoteKV, Request
from ..packed import packed_backward, packed_inputs, packed_jobs, packed_plan
from .tasks import tasks_of

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LIBRARY = Path(__file__).with_name("native.so")
MOST_THREADS = 64
CPU = torch.device("cpu")


# The structs of attend.h, whose fields all have 8 bytes. A tensor is its address and three strides.
_CALL, _GRAD_CALL = struct.Struct("37qd"), struct.Struct("23q")
_NOTHING = (0, 0, 0, 0)


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL | str:
    """The compiled library, or why there is none."""
    if os.environ.get("DILATED_ATTENTION_ISA") == "none":
        return "DILATED_ATTENTION_ISA=none switches it off"
    if not LIBRARY.exists():
        if not Path(__file__).with_name("kernel.c").exists():
            return "this copy of the package comes without it; the installed package has it"
        return f"it is not compiled, which `python -m {__name__}.build` does where there is a C compiler"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"its library does not load: {error}"
    library.dap_columns.restype = library.dap_isa.restype = ctypes.c_char_p
    library.dap_forward.argtypes = [ctypes.c_char_p]
    library.dap_backward.restype = None
    library.dap_backward.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]
    library.dap_forward_scratch.argtypes = [ctypes.c_int64] * 2
    library.dap_backward_scratch.argtypes = [ctypes.c_int64] * 3
    library.dap_forward_scratch.restype = library.dap_backward_scratch.restype = ctypes.c_int64
    if library.dap_columns().decode().split() != [*COLUMN, "tiles"]:
        return "its library is of another version: install the package again"
    for pool in Path(torch.__file__).with_name("lib").glob("libgomp*"):
        library.dap_use_pool(ctypes.cast(ctypes.CDLL(str(pool)).GOMP_parallel, ctypes.c_void_p))
    return library


def why_not(request: Request) -> str | None:
    library = load_library()
    if isinstance(library, str):
        return library
    return request.mismatch(DTYPES) or ("it has no dropout" if request.dropout else None)


def _packs(plan: Plan, inputs: Inputs, remote: RemoteKV | None) -> bool:
    """Whether rows are packed and summed up by the stock engine: those of other ranks or of a cache, and half
    precision whose rows are met more than once."""
    return remote is not None or (inputs.q.dtype != torch.float32 and not plan.is_one_stage)


def forward(plan: Plan, inputs: Inputs, remote: RemoteKV | None = None) -> Outputs:
    """out (b, n, h, d) and lse (b, h, n), in float32."""
    if _packs(plan, inputs, remote):
        return stock.forward(NATIVE_OP, plan, inputs, remote)
    out, lse = inputs.new_outputs()
    if not plan.covers_queries:
        out.zero_()
        lse.fill_(-math.inf)
    q, k, v = _dense(inputs.q), _dense(inputs.k), _dense(inputs.v)
    places, tables = _places(inputs, q, k, v, out, lse), _tables(plan)
    memory = _lend(inputs.workspace, _forward_scratch(q.shape[-1], tables.most_rows))
    for stage in tables.stages:
        at = stage.data_ptr(), plan.runs.data_ptr(), *tables.tiles, len(stage)
        _check(_library().dap_forward(_call(places, at, q, out, tables.most_rows, memory, inputs.scale)))
    return out, lse


@lru_cache(maxsize=256)
def _forward_scratch(d: int, most_rows: int) -> int:
    size: int = _library().dap_forward_scratch(d, most_rows)
    return size


class _Tables(NamedTuple):
    """The jobs of each stage, which go on with the rows of earlier ones, and what a call says about them."""

    stages: list[Tensor]
    most_rows: int  # of a job
    tiles: tuple[int, int, int] = (0, 0, 0)  # addresses of the runs' numbers and of the tiles, and their size
    owner: Tensor | None = None  # of the tiles


def _tables(plan: Plan) -> _Tables:
    found: _Tables | None = plan.by_kernel.get("native")
    if found is None:
        stage, rows = plan.column("stage"), plan.column("heads") * plan.column("count")
        numbers = [] if plan.is_one_stage else sorted(set(stage.tolist()))
        stages = [plan.jobs[stage == number] for number in numbers] or [plan.jobs]
        found = _Tables(stages, int(rows.max()) if len(rows) else 0)
        if plan.tiles is not None and plan.run_tiles is not None:
            tiles = plan.tiles.contiguous()
            at = plan.run_tiles.data_ptr(), tiles.data_ptr(), tiles.shape[-1]
            found = found._replace(tiles=at, owner=tiles)
        plan.by_kernel["native"] = found
    return found


def backward(plan: Plan, inputs: Inputs, merged: Merged, remote: RemoteKV | None = None) -> Gradients:
    """(dq, dk, dv) of the joint softmax, from the merged out and lse alone."""
    if plan.detaches or _packs(plan, inputs, remote):
        return stock.backward(NATIVE_OP, plan, inputs, merged, remote)
    (dq, dk, dv), tasks, tables = inputs.new_gradients(), tasks_of(plan, inputs.k.shape[1]), _tables(plan)
    if not plan.covers_queries:
        dq.zero_()
    if tasks.num_owned < plan.shape.b * plan.shape.h_kv:
        dk.zero_()
        dv.zero_()
    (num, _), d, sums = tasks.table.shape, plan.shape.d, None
    if tasks.parts > 1:
        sums = inputs.workspace.take("native_sums", (num, 2, tasks.longest, d), torch.float32, dq.device)
    q, k, v, out, grad_out = map(_dense, (*inputs[:3], merged.out, merged.grad_out))
    grad_lse = None if merged.grad_lse is None else merged.grad_lse.to(torch.float32)
    summed = tasks.longest if sums is None and q.dtype != torch.float32 else 0
    memory = _lend(inputs.workspace, _library().dap_backward_scratch(d, tables.most_rows, summed), num)
    places = _places(inputs, q, k, v, out, merged.lse)
    at = plan.jobs.data_ptr(), plan.runs.data_ptr(), *tables.tiles, len(plan)
    call = _call(places, at, q, out, tables.most_rows, memory, inputs.scale) + _GRAD_CALL.pack(
        *_place(grad_out),
        *(_NOTHING if grad_lse is None else _place_packed(grad_lse)),
        *(number for x in (dq, dk, dv) for number in _place(x)),
        *(tasks.longest, tasks.order.data_ptr(), 0 if sums is None else sums.data_ptr()),
    )
    _library().dap_backward(call, tasks.table.data_ptr(), num)
    if sums is not None:
        for task, first, _, start, end in tasks.table[:: tasks.parts].tolist():
            batch, kv = plan.jobs[tasks.order[first]][[COLUMN["batch"], COLUMN["kv"]]].tolist()
            for part in range(1, tasks.parts):
                sums[task].add_(sums[task + part])
            dk[batch, start:end, kv], dv[batch, start:end, kv] = sums[task, :, : end - start].unbind(0)
    return dq, dk, dv


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
    places: Sequence[int], at: Sequence[int], q: Tensor, out: Tensor, rows: int, memory: _Memory, scale: float
) -> bytes:
    """The struct of a call: places of q, k, v, out, lse, mask; jobs, runs, tiles and the number of jobs."""
    facts = q.shape[-1], _num_threads(), rows, memory.address, memory.each
    return _CALL.pack(*places, *at, *facts, DTYPES[q.dtype], DTYPES[out.dtype], scale)


def _places(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Sequence[int]:
    """Of q, k, v, out, lse and the mask of a call."""
    mask = inputs.key_mask
    if mask is not None and mask.dim() == 2:
        mask = mask.unsqueeze(-1).expand(-1, -1, inputs.k.shape[2])
    rows = *_place(q), *_place(k), *_place(v), *_place(out), *_place_packed(lse)
    return *rows, *(_NOTHING if mask is None else _place(mask))


def _forward_packed(q: Tensor, k: Tensor, v: Tensor, how: How) -> Outputs:
    inputs = packed_inputs(q, k, v, how)
    out, lse = forward(packed_plan(inputs.shape, k.shape[2], how.is_causal), inputs)
    return out.transpose(1, 2), lse


def _join_packed(q: Tensor, k: Tensor, v: Tensor, how: How, out: Tensor, lse: Tensor) -> None:
    """Goes straight to the library: a decoding step is many small calls, each with one key more."""
    (b, h, n, d), (h_kv, m) = q.shape, k.shape[1:3]
    jobs, runs = packed_jobs(b, h, h_kv, n, how.is_causal, opens=False), array("q", (0, 1, m, 1))
    q, k, v = _dense(q), _dense(k), _dense(v)
    rows = *_place_packed(q), *_place_packed(k), *_place_packed(v), *_place_packed(out), *_place_packed(lse)
    mask = _NOTHING if how.mask is None else _place_packed(how.mask)
    memory, most_rows = _lend(Workspace(), _forward_scratch(d, h // h_kv * n)), h // h_kv * n
    at = jobs.data_ptr(), runs.buffer_info()[0], 0, 0, 0, len(jobs)
    _check(_library().dap_forward(_call((*rows, *mask), at, q, out, most_rows, memory, how.scale)))


NATIVE_OP = Op(_forward_packed, packed_backward(backward), join=_join_packed)
