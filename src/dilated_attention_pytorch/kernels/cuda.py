"""PyTorch's fused CUDA attention: the flash op for half precision on recent GPUs, else the efficient op.

Shapes and signatures are checked with fake CUDA tensors; these paths have not been timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.attention
from torch import Tensor
from torch.nn import functional as F

from .contract import Attended, Gradients, How, Op, Outputs, Request, with_lse_gradient

_FLASH_CAPABILITY = (8, 0)  # the flash op, and bfloat16 in either op, need Ampere
_FLASH_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8  # what the ops take when called without SDPA's own padding


def why_not(request: Request) -> str | None:
    if request.device.type != "cuda":
        return f"it runs on cuda, and the tensors are on {request.device}"
    if request.tiled:
        return "the flash op takes no mask of pairs"
    if request.masked:
        return "the flash op takes no mask, and the efficient op defines no lse for fully masked rows"
    if request.scale <= 0:
        rule = "it scales after taking the row maximum, which needs a positive scale"
        return f"{rule}, and got {request.scale}"
    if request.dropout:
        return "it cannot repeat a dropout mask over merged tiles"
    if request.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it takes float16, bfloat16 and float32, and the tensors are {request.dtype}"
    capability = _capability(request.device)
    if request.dtype == torch.bfloat16 and capability < _FLASH_CAPABILITY:
        return f"bfloat16 needs compute capability 8.0, and this device has {capability[0]}.{capability[1]}"
    return None


# By the first number of the compute capability: bytes a second of memory, and operations a second of the
# Triton kernel. Taken from what is public on H100 and B200, not measured here.
_GENERATIONS = {9: (3.3e12, 3.5e14), 10: (8e12, 7e14)}
_GAIN = 2  # times as fast as Triton on dense tiles: what FlashAttention 3 and 4 are said to be
_MERGED = 17  # bytes that this path moves more, for each feature of a query row: results that are merged


def is_faster(request: Request) -> bool:
    """Whether the flash op, with what it packs and merges, is estimated to be faster than the Triton kernel.

    Only where torch was told to run another FlashAttention than its own, as by
    `torch.nn.attention.activate_flash_attention_impl("FA3")`, and where rows have so many keys that their
    products cost more than merging them.
    """
    ask: Callable[[], str | None] | None = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    if ask is None or ask() not in ("FA3", "FA4") or why_not(request) is not None:
        return False
    bandwidth, speed = _GENERATIONS.get(_capability(request.device)[0], (1.0, math.inf))
    seconds = 4 * request.pairs * request.head_dim / speed
    saved = seconds - seconds / _GAIN
    return request.dtype != torch.float32 and saved > _MERGED * request.rows * request.head_dim / bandwidth


def _capability(device: torch.device) -> tuple[int, int]:
    """(0, 0) where tensors on a GPU can only be fake."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def _use_flash(q: Tensor) -> bool:
    is_small = q.dtype != torch.float32 and q.shape[-1] <= _FLASH_MAX_HEAD_DIM
    return is_small and _capability(q.device) >= _FLASH_CAPABILITY


def _forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> Outputs:
    d, rows, flash = q.shape[-1], q.shape[2], _use_flash(q)
    q, k, v = _pad_head_dim(q), _pad_head_dim(k), _pad_head_dim(v)
    if flash:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention.default(
            q, k, v, 0.0, how.is_causal, False, scale=how.scale
        )
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention.default(
            q, _expand(k, q), _expand(v, q), None, True, 0.0, how.is_causal, scale=how.scale
        )
    return out.narrow(-1, 0, d), lse.narrow(-1, 0, rows)


def _backward(x: Attended) -> Gradients:
    d, h_kv, lse, how = x.q.shape[-1], x.k.shape[1], x.lse, x.how
    q, k, v, out, grad_out = map(_pad_head_dim, (x.q, x.k, x.v, x.out, x.grad_out))
    if _use_flash(x.q):
        none = torch.empty(0, dtype=torch.int32, device=q.device)
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # philox state, unread without dropout
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
            *(grad_out, q, k, v, out, lse, none, none, q.shape[2], k.shape[2], 0.0, how.is_causal),
            *(state, torch.empty(0, dtype=torch.uint64, device=q.device)),
            scale=how.scale,
        )
        return dq.narrow(-1, 0, d), dk.narrow(-1, 0, d), dv.narrow(-1, 0, d)
    if torch.version.hip is None:
        # The CUDA op keeps lse in rows of a multiple of 32 and reads them again; +inf gives probability 0.
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    state = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        *(grad_out, q, _expand(k, q), _expand(v, q), None, out, lse, state, state, 0.0),
        *([True, True, True, False], how.is_causal),
        scale=how.scale,
    )
    dk, dv = _reduce(dk, h_kv), _reduce(dv, h_kv)
    return dq.narrow(-1, 0, d), dk.narrow(-1, 0, d), dv.narrow(-1, 0, d)


def _pad_head_dim(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % _HEAD_DIM_MULTIPLE)) if x.shape[-1] % _HEAD_DIM_MULTIPLE else x


def _expand(x: Tensor, q: Tensor) -> Tensor:
    """One key head per query head: the memory-efficient op has no grouped heads."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _reduce(x: Tensor, h_kv: int) -> Tensor:
    return x if x.shape[1] == h_kv else x.view(x.shape[0], h_kv, -1, *x.shape[2:]).sum(2)


CUDA = Op(_forward, with_lse_gradient(_backward), reads_strides=True)
