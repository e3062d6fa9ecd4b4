"""Ways to spoil a right answer, which a gate must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.001


def spoil_last_row(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out = out.clone()
    out[:, -1] += 1e-3
    return out, lse


WRONG = {
    "all of out": lambda out, lse: (out * 1.001, lse),
    "one row of out": spoil_last_row,
    "lse": lambda out, lse: (out, lse + 1e-3),
    "gradients": lambda out, lse: (_ScaledGradient.apply(out), lse),
    "nan": lambda out, lse: (out * float("nan"), lse),
}


def perturbed(
    right: Callable[..., Any], change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Callable[..., Any]:
    """An attention function whose out and lse are changed."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, lse = change(*right(*args, **{**kwargs, "return_lse": True}))
        return (out, lse) if kwargs.get("return_lse") else out

    return wrong
