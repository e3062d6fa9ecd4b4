"""Packed rows on the kernel: those that a ring receives, and the new ones of a stream of tokens."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ...plan.runs import Plan, Shape
from .. import stock, triton
from ..contract import How, Inputs, Merged, Op, RemoteKV
from ..packed import packed_backward, packed_inputs, packed_plan

LEAST_KEYS = 256  # that a program takes where few rows have their keys split over programs
PROGRAMS = 2  # of which a multiprocessor has so many at a time


def _forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
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
        out, lse = triton.forward(plan, inputs)
        return out.transpose(1, 2).reshape(shape), lse.reshape(shape[:3])
    wide = torch.empty(inputs.q.shape, device=q.device)
    lses = torch.empty(b, parts, h, n, device=q.device)
    triton.Call(plan, inputs).attend(wide, lses, "opens_queries")
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


TRITON_OP = Op(_forward, packed_backward(triton.backward))


def forward(plan: Plan, inputs: Inputs, remote: RemoteKV | None = None) -> tuple[Tensor, Tensor]:
    """A whole plan at once, or packed where some keys are not among the inputs."""
    if remote is None:
        return triton.forward(plan, inputs)
    return stock.forward(TRITON_OP, plan, inputs, remote)


def backward(
    plan: Plan, inputs: Inputs, merged: Merged, remote: RemoteKV | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if remote is None:
        return triton.backward(plan, inputs, merged)
    return stock.backward(TRITON_OP, plan, inputs, merged, remote)
