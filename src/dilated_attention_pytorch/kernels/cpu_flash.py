"""PyTorch's CPU flash attention, with a guard for each input it gets wrong.

Packed rows already keep it from an empty q or k (which kills the process) and from a last stride other
than 1 (which gives wrong numbers). Here: boolean masks become additive; rows without a visible key get
out 0 and lse -inf; and the rows that a NaN or an infinity concerns, of the inputs or of scores that
overflow, which the op may swallow or let leak past the causal mask, are computed by the eager kernel, while
all others keep their bits. Half precision comes as float32 tiles: without matrix instructions for it the
op's own backward takes about ten times as long.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .contract import Attended, Gradients, How, Op, Outputs, Request, with_lse_gradient
from .eager import EAGER_OP

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def why_not(request: Request) -> str | None:
    reason = request.mismatch(_DTYPES, where="it runs on cpu and cuda")
    return reason or ("it has no dropout" if request.dropout else None)


def _forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> Outputs:
    if how.is_causal and how.scale <= 0:  # the op multiplies its causal mask, -inf, by the scale
        return EAGER_OP.forward(q, k, v, how)
    # Where every row sees every value, a non-finite one spreads as it should.
    sees_all = not how.is_causal and how.pairs is None
    if _all_finite(k) and (sees_all or _all_finite(v)):
        redo, clean_k, clean_v = None, k, v
    else:
        redo = _rows_that_see(~(k.isfinite() & v.isfinite()).all(-1), q, how)
        clean_k, clean_v = (torch.where(x.isfinite(), x, 0.0) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, clean_k, clean_v, 0.0, how.is_causal, attn_mask=_bias(q, how), scale=how.scale
    )
    if how.mask is not None or how.pairs is not None:
        blind = ~_rows_that_see(k.new_ones(k.shape[:3]).bool() if how.mask is None else how.mask, q, how)
        if bool(blind.any()):
            lse.masked_fill_(blind, -math.inf)
            out.masked_fill_(blind.unsqueeze(-1), 0.0)  # not so where the query is NaN
    # 0 by right, or because all scores of the row were NaN or -inf; inf or NaN where one was inf or NaN
    if bool((lse == 0).any()) or not math.isfinite(lse.sum().item()):
        odd = (lse == 0) & ~out.any(-1) | (lse == math.inf) | lse.isnan()
        redo = odd if redo is None else redo | odd
    if redo is not None and bool(redo.any()):
        exact, exact_lse = EAGER_OP.forward(q, k, v, how)
        # In place: what follows rounds by the layout, vectors and the rest.
        out.copy_(torch.where(redo.unsqueeze(-1), exact, out))
        lse.copy_(torch.where(redo, exact_lse, lse))
    return out, lse


def _op_backward(x: Attended) -> Gradients:
    q, k, v, out, lse, grad_out, _, how = x
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad_out, q, k, v, out, lse, 0.0, how.is_causal, attn_mask=_bias(q, how), scale=how.scale
    )
    return dq, dk, dv


def _backward(x: Attended) -> Gradients:
    how = x.how
    # The op would carry the NaN of a row to keys that the row does not see, and to the row that sees none.
    is_odd = bool(x.lse.isnan().any()) or (how.mask is not None and not _all_finite(x.q))
    if how.pairs is not None:  # it would do the same with what overflows where a pair is hidden
        is_odd = is_odd or not (_stays_finite(x.q, x.k, how.scale) and _stays_finite(x.grad_out, x.v, 1.0))
    return (EAGER_OP.backward if is_odd else _FUSED_BACKWARD)(x)


def _all_finite(x: Tensor) -> bool:
    # The sum is fast, and non-finite if any element is; only a finite overflow needs the second look.
    total = x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).item()
    return math.isfinite(total) or bool(x.isfinite().all())


def _stays_finite(a: Tensor, b: Tensor, scale: float) -> bool:
    """Whether no product of rows of a and of b can overflow."""
    bound = a.shape[-1] * abs(scale)
    for x in (a, b):
        bound *= torch.linalg.vector_norm(x, math.inf).item()
    return bound < torch.finfo(a.dtype).max


def _rows_that_see(keys: Tensor, q: Tensor, how: How) -> Tensor:
    """(B, H, N): whether a query row sees any of the given keys (B, H_kv, M)."""
    if how.pairs is not None:
        return _per_query_head((how.pairs[:, None] & keys.unsqueeze(2)).any(-1), q)
    seen = keys.cumsum(-1) > 0 if how.is_causal else keys.any(-1, keepdim=True)
    return _per_query_head(seen, q).expand(q.shape[:3])


def _bias(q: Tensor, how: How) -> Tensor | None:
    """(B, H, 1, M) additive mask, broadcast over the query rows, or (B, H, N, M) of pairs."""
    seen = None if how.mask is None else how.mask.unsqueeze(2)
    if how.pairs is not None:
        seen = how.pairs[:, None] if seen is None else how.pairs[:, None] & seen
    if seen is None:
        return None
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -math.inf)
    return bias.expand(-1, q.shape[1], -1, -1) if bias.shape[1] == 1 else _per_query_head(bias, q)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


_FUSED_BACKWARD = with_lse_gradient(_op_backward)
CPU_FLASH = Op(_forward, _backward, widens=True)
