"""The search against a reference: forward, lse and all gradients of one random call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from support.tolerances import assert_close

Attention = Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, return_lse=True, **options)


class Call(Protocol):
    """What the configurations of all kinds of attention have in common."""

    b: int
    n: int
    h: int
    d: int
    seed: int

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]: ...
    def options(self) -> dict[str, Any]: ...


def check_call(
    config: Call,
    dtype: torch.dtype,
    attention: Attention,
    reference: Attention,
    *,
    saves_output: bool = True,
    **execution: Any,
) -> None:
    """Compares out, lse, dq, dk and dv with the float64 reference of the same inputs.

    `saves_output`: backward starts from the output as it was saved, in the dtype of q.
    """
    rng = torch.Generator().manual_seed(config.seed + 2)
    shape = (config.b, config.n, config.h, config.d)
    grad_out = torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)
    grad_lse = torch.randn(config.b, config.h, config.n, generator=rng, dtype=torch.float64)
    if config.seed % 2:  # most callers never touch lse: its gradient then is absent, not zero
        grad_lse.zero_()

    def run(
        attend: Attention, tensors: tuple[Tensor, ...], weight_lse: Callable[[Tensor], Tensor], **options: Any
    ) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = attend(*leaves, return_lse=True, **config.options(), **options)
        loss, weight = (out * grad_out.to(out.dtype)).sum(), weight_lse(out.detach())
        if weight.any():
            loss = loss + torch.where(lse.isfinite(), lse, 0.0).mul(weight.to(lse.dtype)).sum()
        return [out, lse, *torch.autograd.grad(loss, leaves)]

    def after_rounding(out: Tensor) -> Tensor:
        """The weight of lse that makes an exact backward one that starts from the output as it was saved.

        Backward has dS = P * (dP - rowsum(grad_out * out) + grad_lse) of `out` in the dtype of q. That
        rounding is the dtype's, not the engine's, and dominates where a head has few features.
        """
        if dtype.itemsize > 2 or not saves_output:
            return grad_lse
        lost = out - actual[0].detach().to(out.dtype)
        return grad_lse + (lost * grad_out.to(out.dtype)).sum(-1).transpose(1, 2)

    tensors = config.tensors(dtype)
    actual = run(attention, tensors, lambda _: grad_lse, **execution)
    expected = run(reference, tuple(x.to(torch.float64) for x in tensors), after_rounding)
    assert actual[0].dtype == dtype
    assert actual[0].is_contiguous()
    assert actual[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        assert_close(got, want, dtype, name)
