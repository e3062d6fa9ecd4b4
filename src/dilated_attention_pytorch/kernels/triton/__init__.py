"""The library's own GPU kernel, in Triton: one launch a branch, or a block pattern, over the jobs of a plan.

It was interpreted and compiled ahead of time; it has not been timed. Triton is imported where it is used.
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...plan.runs import COLUMN, Plan, Shape
from .. import cuda, stock
from ..contract import Gradients, How, Inputs, Merged, Op, Outputs, RemoteKV, Request
from ..packed import packed_backward, packed_inputs, packed_plan
from .tables import KeyTables, Launch, extent, key_tables, query_tables
from .tuned import Choice, choose_blocks
from .tuning import Blocks, Pass, Target, head_parts, most_features, precision

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAPABILITY = (8, 0)
LOG2E = math.log2(math.e)
LEAST_KEYS = 256  # that a program takes where few rows have their keys split over programs
PROGRAMS = 2  # of which a multiprocessor has so many at a time


def interprets() -> bool:
    """Whether Triton runs programs on the host, on CPU tensors, as this variable asks it to."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=1)
def is_installed() -> bool:
    return find_spec("triton") is not None


def why_not(request: Request) -> str | None:
    if not is_installed():
        return "triton is not installed, which `pip install dilated-attention[triton]` does on Linux"
    where = ("cpu", "its interpreter runs on cpu") if interprets() else ("cuda", "it runs on cuda")
    if reason := request.mismatch(DTYPES, *where):
        return reason
    if request.tiled:
        return "it takes no mask of pairs, and the pattern has tiles"
    if request.streams and request.dropout:
        return "it drops by position, and keys of other ranks or of a cache have none"
    if request.device.type == "cuda" and cuda._capability(request.device) < CAPABILITY:
        found = ".".join(map(str, cuda._capability(request.device)))
        return f"triton needs compute capability 8.0, and this device has {found}"
    most = most_features(_target(request.device), request.dtype.itemsize)
    if request.head_dim > most:
        return f"it takes heads of up to {most} features in {request.dtype}, and got {request.head_dim}"
    return None


def blocks_of(device: torch.device, which: Pass, dtype: torch.dtype, d: int) -> Choice:
    """The blocks of a pass on a device, where runs are long enough to fill them."""
    return choose_blocks(device, _target(device), which, dtype, d)


def forward(plan: Plan, inputs: Inputs, remote: RemoteKV | None = None) -> Outputs:
    """out (b, n, h, d) and lse (b, h, n), in float32; rows are packed where some keys are not the inputs'."""
    if remote is not None:
        return stock.forward(TRITON_OP, plan, inputs, remote)
    call, (out, lse) = Call(plan, inputs), inputs.new_outputs()
    wide = call.widened(out)
    if not plan.covers_queries:
        wide.zero_()
        lse.fill_(-math.inf)
    call.attend(wide, lse, "opens_queries")
    return call.narrowed(out, wide), lse


def backward(plan: Plan, inputs: Inputs, merged: Merged, remote: RemoteKV | None = None) -> Gradients:
    """(dq, dk, dv) of the joint softmax, from the merged out and lse alone."""
    if remote is not None:
        return stock.backward(TRITON_OP, plan, inputs, merged, remote)
    call, results = Call(plan, inputs), inputs.new_gradients()
    dq, dk, dv = wide = [call.widened(x) for x in results]
    if not plan.covers_queries:
        dq.zero_()
    if not call.keys.covers:
        dk.zero_()
        dv.zero_()
    g, out, lse = call.dense(merged.grad_out), call.dense(merged.out).contiguous(), merged.lse.contiguous()
    dlse = lse if merged.grad_lse is None else merged.grad_lse.to(torch.float32).contiguous()
    delta = inputs.workspace.take("delta", tuple(lse.shape), torch.float32, lse.device)
    for launch in call.keys.launches:
        if plan.detaches:
            out = inputs.workspace.take("own_out", tuple(out.shape), torch.float32, lse.device)
            own_lse = inputs.workspace.take("own_lse", tuple(lse.shape), torch.float32, lse.device)
            call.attend(out, own_lse, "opens_branch", launch.branch)
        call.query_gradients((g, out, lse, dlse, delta, dq), merged.grad_lse is not None, launch.branch)
        call.key_gradients(g, lse, delta, dk, dv, launch)
    dq, dk, dv = (call.narrowed(x, y) for x, y in zip(results, wide, strict=True))
    return dq, dk, dv


class Call:
    """The tensors, tables and numbers that the launches of a call have in common."""

    def __init__(self, plan: Plan, inputs: Inputs) -> None:
        self.plan, self.inputs = plan, inputs
        # The interpreter multiplies bfloat16 as if it were integers, and cuts it off instead of rounding.
        self.widens = interprets() and inputs.q.dtype == torch.bfloat16
        self.q, k, v = (self.dense(x) for x in (inputs.q, inputs.k, inputs.v))
        mask = inputs.key_mask
        self.mask = None
        if mask is not None:
            # A hidden key may hold anything, NaN included; as zeros it cannot reach a visible row.
            hidden = ~(mask if mask.dim() == 3 else mask.unsqueeze(-1))  # (b, n, h_kv) or (b, n, 1)
            k, v = (x.masked_fill(hidden.unsqueeze(-1), 0.0) for x in (k, v))
            hidden = hidden.transpose(1, 2)
            self.mask = torch.zeros(hidden.shape, device=mask.device).masked_fill_(hidden, -math.inf)
        self.k, self.v = k, v
        self.target = _target(inputs.q.device)

    @cached_property
    def keys(self) -> KeyTables:
        return key_tables(self.plan, self._blocks("key_gradients").keys, self.q.device)

    def dense(self, x: Tensor) -> Tensor:
        x = x.float() if self.widens else x
        return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()

    def widened(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, device=x.device) if self.widens else x

    def narrowed(self, x: Tensor, wide: Tensor) -> Tensor:
        return x.copy_(wide) if self.widens else x

    def attend(self, out: Tensor, lse: Tensor, opens: str, branch: int | None = None) -> None:
        tables = query_tables(self.plan, self._blocks("attend").queries, out.device)
        for launch in tables.launches:
            if branch in (None, launch.branch):
                tensors = self.q, self.k, self.v, out, lse, self._mask, *tables[1:]
                self._launch("attend", launch, opens, tensors, PHANTOM=launch.has_phantom)

    def query_gradients(self, given: tuple[Tensor, ...], has_dlse: bool, branch: int) -> None:
        """`given`: the gradient of out, out, lse, the gradient of lse or anything, delta, dq."""
        tables = query_tables(self.plan, self._blocks("query_gradients").queries, self.q.device)
        tensors = self.q, self.k, self.v, *given, self._mask, *tables[1:]
        for launch in tables.launches:
            if launch.branch == branch:
                self._launch("query_gradients", launch, "opens_queries", tensors, HAS_DLSE=has_dlse)

    def key_gradients(
        self, g: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, launch: Launch
    ) -> None:
        tables = self.keys
        jobs = query_tables(self.plan, self._blocks("query_gradients").queries, dk.device).jobs
        tensors = self.q, self.k, self.v, g, lse, delta, dk, dv, self._mask, *tables[1:4], jobs
        self._launch("key_gradients", launch, "opens_keys", tensors)

    @property
    def _mask(self) -> Tensor:
        return self.q if self.mask is None else self.mask

    def _blocks(self, which: Pass) -> Blocks:
        """A tuned configuration, in which no block is longer than the longest run."""
        blocks = blocks_of(self.q.device, which, self.q.dtype, self.q.shape[-1]).blocks
        queries, keys = (
            max(16, min(x, 1 << (most - 1).bit_length()))
            for x, most in zip(blocks, extent(self.plan)[:2], strict=False)
        )
        return blocks._replace(queries=queries, keys=keys)

    def _launch(
        self, which: Pass, launch: Launch, opens: str, tensors: tuple[Tensor, ...], **facts: Any
    ) -> None:
        from . import attend, gradients

        _, n, h, d = self.q.shape
        strided = tensors[:3] if which == "attend" else tensors[:4]  # q, k, v and the gradient of out
        align = math.gcd(16, *(s for x in strided for s in x.stride()[:3]))
        queries, keys, warps, stages = self._blocks(which)
        longest = max(*(x.stride(1) for x in strided), h * d)
        numbers: dict[str, Any] = {"scale_log2": abs(self.inputs.scale) * LOG2E}
        if which != "attend":
            numbers["scale"] = self.inputs.scale if which == "query_gradients" else abs(self.inputs.scale)
        if which == "key_gradients":
            numbers["h_kv"] = self.k.shape[2]
        else:
            facts |= {"OPENS": COLUMN[opens], "ONE_RUN": launch.has_one_run}
        p = self.inputs.dropout_p
        parts = head_parts(d, self.q.element_size())
        if not launch.number:
            return
        with _on(self.q.device):
            getattr(attend if which == "attend" else gradients, which)[(launch.number,)](
                *tensors,
                *(s // align for x in strided for s in x.stride()[:3]),
                first_tile=launch.first,
                n=n,
                m=self.k.shape[1],
                h=h,
                mask_b=0 if self.mask is None else self.mask.stride(0),
                mask_h=0 if self.mask is None or self.mask.shape[1] == 1 else self.mask.stride(1),
                seed=stock.mix_seed(self.inputs.seed + launch.branch) if p else 0,
                threshold=int(p * 2**31),
                gain=1.0 / (1.0 - p) if p < 1.0 else 0.0,
                **numbers,
                CARRIES=launch.carries[opens],
                CAUSAL=launch.is_causal,
                MASKED=self.mask is not None,
                DROPS=p > 0,
                NEGATES=self.inputs.scale < 0,
                ALIGN=align,
                WIDE=longest * extent(self.plan).step * max(queries, keys) >= 2**31,
                D=d,
                P0=parts[0],
                P1=parts[1],
                BLOCK_M=queries,
                BLOCK_N=keys,
                PRECISION=precision(self.target),
                **facts,
                num_warps=warps,
                num_stages=stages,
            )


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _target(device: torch.device) -> Target:
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    generations: dict[int, Target] = {9: "sm_90", 10: "sm_100", 11: "sm_100"}
    return generations.get(cuda._capability(device)[0], "sm_80")  # those for desktops are like it, too


def _forward_packed(q: Tensor, k: Tensor, v: Tensor, how: How) -> Outputs:
    """Packed rows: those that a ring receives, and the new ones of a stream of tokens."""
    shape, (h_kv, m) = q.shape, k.shape[1:3]
    if q.shape[2] == 1:  # the heads of a group are rows of one
        q, how = q.reshape(len(q), h_kv, -1, q.shape[-1]), how._replace(is_causal=False)
    b, h, n, d = q.shape
    num_keys = m if how.is_causal else _rounded(m)
    parts = 1 if how.is_causal else _num_parts(b * h * -(-n // 16), num_keys, q.device)
    # Each part has copies of the queries, as further heads.
    inputs = packed_inputs(q if parts == 1 else q.repeat(1, parts, 1, 1), k, v, how)
    plan = packed_plan(Shape(b, n, h, h_kv, d), num_keys, how.is_causal, parts)
    if parts == 1:
        out, lse = forward(plan, inputs)
        return out.transpose(1, 2).reshape(shape), lse.reshape(shape[:3])
    wide = torch.empty(inputs.q.shape, device=q.device)
    lses = torch.empty(b, parts, h, n, device=q.device)
    Call(plan, inputs).attend(wide, lses, "opens_queries")
    lse = lses.logsumexp(1)
    weights = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(1))
    out = (wide.view(b, n, parts, h, d) * weights.permute(0, 3, 1, 2).unsqueeze(-1)).sum(2)
    return out.transpose(1, 2).reshape(shape).to(q.dtype), lse.reshape(shape[:3])


def _rounded(num_keys: int) -> int:
    """Up to one of eight numbers between powers of two, so that a stream of tokens finds tables again."""
    step = max(16, 1 << max(0, num_keys.bit_length() - 4))
    return -(-num_keys // step) * step


def _num_parts(num_programs: int, num_keys: int, device: torch.device) -> int:
    """Into how many parts the keys are split, so that all multiprocessors have work."""
    return max(1, min(PROGRAMS * _num_processors(device) // num_programs, num_keys // LEAST_KEYS))


@lru_cache(maxsize=16)
def _num_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 4  # the interpreter has none; enough to split keys
    return torch.cuda.get_device_properties(device).multi_processor_count


TRITON_OP = Op(_forward_packed, packed_backward(backward))
