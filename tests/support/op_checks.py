"""What every attention must keep to as an op: activation checkpointing and autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Attention = Callable[..., Tensor]  # (q, k, v, dropout_p=0)


def check_checkpointing(
    attention: Attention, tensors: tuple[Tensor, ...], *, reentrant: bool, dropout: float
) -> None:
    """Activation checkpointing changes no bit of the gradients."""
    torch.manual_seed(2)
    expected = torch.autograd.grad(attention(*tensors, dropout_p=dropout).square().sum(), tensors)
    torch.manual_seed(2)
    out = checkpoint(lambda *x: attention(*x, dropout_p=dropout), *tensors, use_reentrant=reentrant)
    out.square().sum().backward()
    for x, want in zip(tensors, expected, strict=True):
        assert torch.equal(x.grad, want)


def check_autocast(attention: Attention, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Autocast casts what it casts for SDPA, and leaves float64; gradients are those of float32 inputs."""
    q, k, v = tensors
    with torch.autocast("cpu", dtype=dtype):
        out = attention(q, k.to(dtype), v)
        kept = attention(q.double(), k.double(), v.double())
    assert out.dtype == dtype
    assert kept.dtype == torch.float64
    assert torch.equal(out, attention(q.to(dtype), k.to(dtype), v.to(dtype)))
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), tensors))
