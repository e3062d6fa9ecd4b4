"""PyTorch's CPU flash attention, with a guard for each input it gets wrong.

Packed tiles already keep it from an empty q or k (which kills the process) and from a last stride other
than 1 (which gives wrong numbers). Here: NaN and infinity, which it may swallow or leak past the causal mask,
go to the eager kernel; boolean masks become additive; rows without a visible key get lse -inf, not 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .contract import How, Kernel, Request
from .eager import EAGER
from .lse_gradient import with_lse_gradient

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _why_not(request: Request) -> str | None:
    if request.device.type != "cpu":
        return f"it runs on cpu, and the tensors are on {request.device}"
    if request.dtype not in _DTYPES:
        return f"it takes {', '.join(map(str, _DTYPES))}, and the tensors are {request.dtype}"
    if request.dropout:
        return "it has no dropout"
    return None


def _forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    # Without a causal mask every row sees every value, and a non-finite one spreads as it should.
    if not _finite(k) or (how.is_causal and not _finite(v)):
        return EAGER.forward(q, k, v, how)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, how.is_causal, attn_mask=_bias(q, k, how.mask), scale=how.scale
    )
    if bool((lse == 0).any()) and not _finite(q):  # a swallowed query row leaves lse 0
        return EAGER.forward(q, k, v, how)
    if how.mask is not None:
        seen = how.mask.cumsum(-1) > 0 if how.is_causal else how.mask.any(-1, keepdim=True)
        lse.masked_fill_(~_per_query_head(seen, q), -math.inf)
    return out, lse


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        *(grad_out, q, k, v, out, lse, 0.0, how.is_causal),
        attn_mask=_bias(q, k, how.mask),
        scale=how.scale,
    )
    return dq, dk, dv


def _finite(x: Tensor) -> bool:
    # A sum is non-finite if any element is; a finite overflow only costs the slower kernel.
    return math.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).item())


def _bias(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """(B, H, 1, M) additive mask, broadcast over the query rows."""
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=k.device).masked_fill_(~mask, -math.inf)
    return _per_query_head(bias, q).unsqueeze(2)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


CPU_FLASH = Kernel("cpu_flash", _why_not, _forward, with_lse_gradient(_backward))
