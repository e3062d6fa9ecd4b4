"""The gradient through lse, for fused backward ops that have none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .contract import Backward, How

# (grad_out, q, k, v, out, lse, how) -> (dq, dk, dv)
OpBackward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, How], tuple[Tensor, Tensor, Tensor]]


def with_lse_gradient(op_backward: OpBackward) -> Backward:
    """Adds the `grad_lse` argument of the kernel contract to a backward that lacks it.

    Such an op computes dS = P * (grad_out v^T - rowsum(grad_out * out)). With v = 0, out = (-1, 0, ...) and
    grad_out = (grad_lse, 0, ...) that is P * grad_lse: exactly the missing part, for one more call.
    """

    def backward(
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        how: How,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = op_backward(grad_out, q, k, v, out, lse, how)
        if grad_lse is not None:
            # Half precision cannot hold a large gradient of the float32 lse; its share of the largest it can.
            largest = grad_lse.abs().amax().clamp_min(torch.finfo(grad_lse.dtype).tiny)
            grad = F.pad((grad_lse / largest).unsqueeze(-1).to(q.dtype), (0, q.shape[-1] - 1))
            minus_one = F.pad(-torch.ones_like(grad_lse, dtype=q.dtype).unsqueeze(-1), (0, q.shape[-1] - 1))
            dq_lse, dk_lse, _ = op_backward(grad, q, k, torch.zeros_like(v), minus_one, lse, how)
            dq, dk = dq + dq_lse * largest, dk + dk_lse * largest
        return dq, dk, dv

    return backward
