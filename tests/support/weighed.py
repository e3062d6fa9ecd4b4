"""Inputs of attention modules, what comes of them, and gradients that tell every element apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SEGMENTS, RATES = (8, 14, 40), (1, 2, 5)


def qkv(n: int = 37, dtype: torch.dtype = torch.float32, seed: int = 0, b: int = 2) -> list[Tensor]:
    """Of six query and three key heads, that require gradients."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(b, n, h, 8, generator=rng).to(dtype).requires_grad_() for h in (6, 3, 3)]


def run(module: Callable[..., Tensor], tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """The result and the gradients of a loss that weighs every element differently."""
    out = module(*tensors, **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    for x in tensors:
        x.grad = None
    (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in tensors if x.grad is not None)]


def randomised(module: Any, std: float = 0.3) -> Any:
    """The module with random weights, so that no bias of zero or norm weight of one hides a mistake."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return module
