"""Inputs that are the same on every rank, and what one process makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.reference import dilated_attention_reference

BRANCHES: dict[str, Any] = {"segment_lengths": [5, 16, 40], "dilation_rates": [1, 2, 3]}


def inputs(b: int, n: int, h: int, h_kv: int) -> list[Tensor]:
    """q, k, v (b, n, heads, d) and a gradient, the same on every rank."""
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(b, n, heads, 4, generator=rng, dtype=torch.float64) for heads in (h, h_kv, h_kv, h)]


def one_process(b: int, n: int, h: int, h_kv: int, **options: Any) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of the whole."""
    *leaves, weight = inputs(b, n, h, h_kv)
    leaves = [x.requires_grad_() for x in leaves]
    out = dilated_attention_reference(*leaves, **BRANCHES, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, weight)
