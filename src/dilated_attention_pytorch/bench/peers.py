"""Attention of others: FlexAttention of torch, and packages that are measured where they are installed.

Each says why it cannot run. fkodom's `dilated-attention-pytorch` is not among them: it is imported by the
same name as this package, so the two cannot be installed together.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..plan import BlockPattern


class CannotRunError(Exception):
    """A candidate turned out not to run here; the message says why."""


class FlexAttention:
    """torch's compiled FlexAttention over the blocks of a pattern."""

    def __init__(self, pattern: BlockPattern, num_heads: int) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        self.mask = pattern.to_block_mask("cpu", num_heads=num_heads)
        self.attend: Any = torch.compile(flex_attention)

    def __call__(self, *tensors: Tensor) -> Tensor:
        try:
            out: Tensor = self.attend(*(x.transpose(1, 2) for x in tensors), block_mask=self.mask)
        except RuntimeError as error:  # what torch.compile raises, as without a C++ compiler
            first = str(error).strip().partition("\n")[0]
            raise CannotRunError(f"torch.compile of it failed: {first}") from error
        return out.transpose(1, 2)


class LocalWindows:
    """`LocalAttention` of lucidrains: each window sees itself, the one before and, not causal, the next."""

    def __init__(self, n: int, window: int, is_causal: bool) -> None:
        if over := n % window:
            raise CannotRunError(f"it takes multiples of its window of {window}, and {over} of {n} are over")
        made = import_module("local_attention").LocalAttention
        # Without `dim` it has no position embedding.
        self.attend = made(window, causal=is_causal, look_backward=1)

    def __call__(self, *tensors: Tensor) -> Tensor:
        out: Tensor = self.attend(*(x.transpose(1, 2) for x in tensors))
        return out.transpose(1, 2)


def window_mask(n: int, window: int, is_causal: bool) -> Tensor:
    """(1, n, n) bool: what `LocalWindows` lets each query see."""
    index = torch.arange(n)
    ahead = index // window - (index // window)[:, None]
    seen = ahead.abs() <= 1
    return (seen & (index <= index[:, None]) if is_causal else seen)[None]


def why_not_flex(backward: bool) -> str | None:
    return "FlexAttention has no backward pass on the CPU" if backward else None


def why_not_local(backward: bool) -> str | None:
    return None if find_spec("local_attention") else "the package local-attention is not installed"


def why_not_torchscale(backward: bool) -> str | None:
    if not find_spec("torchscale"):
        return "the package torchscale is not installed"
    return "its dilated attention calls flash-attn or xformers on CUDA, and the CPU is measured here"
