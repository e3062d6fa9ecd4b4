"""What arguments of modules over (b, n, embed_dim) must be: numbers, inputs, masks, positions."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from ..checks import autocasts, check_dense, finite_float

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_embedded(name: str, x: Tensor, embed_dim: int, layout: str = "(b, n, embed_dim)") -> None:
    """x is a dense floating-point tensor of the layout."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided or not x.is_floating_point():
        kind = "a nested one" if x.is_nested else f"{x.layout} of {x.dtype}"
        raise TypeError(f"{name} must be a dense floating-point tensor, got {kind}")
    if x.dim() != 3 or x.shape[2] != embed_dim:
        width = layout.strip("()").split(", ")[-1]
        rule = f"{name} must have the shape {layout} with {width} {embed_dim}"
        raise ValueError(f"{rule}, got {tuple(x.shape)}")


def explain_mismatch(other: object, whose: str, **inputs: Tensor) -> None:
    """Raises if an input has another device than `other`, or another dtype that autocast does not cast.

    Weights are compared only after torch has failed, to say why: wrappers that shard or quantise them hold
    them otherwise than they use them.
    """
    if not isinstance(other, Tensor):
        return
    for name, x in inputs.items():
        if x.device != other.device:
            raise ValueError(f"{name} must be on the device of {whose}, {other.device}, got {x.device}")
        casts = autocasts(x.device) and torch.float64 not in (x.dtype, other.dtype)
        if x.dtype != other.dtype and not casts:
            raise TypeError(f"{name} must have the dtype of {whose}, {other.dtype}, got {x.dtype}")


def attended_keys(ignored: Tensor, b: int, n: int, device: torch.device) -> Tensor:
    """The attention mask, True = attend, of a key_padding_mask."""
    if not isinstance(ignored, Tensor) or not (ignored.dtype == torch.bool or ignored.is_floating_point()):
        kind = getattr(ignored, "dtype", type(ignored).__name__)
        raise TypeError(f"key_padding_mask must be a bool or float tensor, got {kind}")
    check_dense("key_padding_mask", ignored)
    if ignored.shape != (b, n):
        raise ValueError(f"key_padding_mask must be (b, n) = {(b, n)}, got {tuple(ignored.shape)}")
    if ignored.device != device:
        raise ValueError(f"key_padding_mask must be on the device of query, {device}, got {ignored.device}")
    if ignored.dtype == torch.bool:
        return ~ignored
    attended = ignored == 0
    message = "a float key_padding_mask must hold only 0 (attend) and -inf (ignore), got other values"
    require((attended | (ignored == -math.inf)).all(), message)
    return attended


def check_causal_mask(mask: Tensor, n: int, device: torch.device) -> None:
    rule = "attn_mask must be None or the square causal mask: the pattern decides what is attended"
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"{rule}, got {getattr(mask, 'dtype', type(mask).__name__)}")
    if mask.shape != (n, n):
        raise ValueError(f"{rule}, got the shape {tuple(mask.shape)} for n = {n}")
    check_dense("attn_mask", mask)
    if mask.device != device:
        raise ValueError(f"attn_mask must be on the device of query, {device}, got {mask.device}")
    future = torch.ones_like(mask, dtype=torch.bool).triu(1)
    expected = future if mask.dtype == torch.bool else torch.where(future, -math.inf, 0.0)
    require((mask == expected).all(), f"{rule}, got another mask")


def check_positions(positions: Tensor, b: int, n: int) -> None:
    if not isinstance(positions, Tensor) or positions.dtype not in _INTEGERS:
        kind = getattr(positions, "dtype", type(positions).__name__)
        raise TypeError(f"positions must be a tensor of integers, got {kind}")
    check_dense("positions", positions)
    if positions.shape not in ((n,), (b, n)):
        shapes = f"(n,) = {(n,)} or (b, n) = {(b, n)}"
        raise ValueError(f"positions must have the shape {shapes}, got {tuple(positions.shape)}")


def require(fact: Tensor, message: str) -> None:
    """Raises unless `fact`; a traced graph, which cannot branch on values, asserts when it runs."""
    if fact.is_meta:
        return  # nothing to look at
    if torch.compiler.is_compiling():
        torch._assert_async(fact, message)
    elif not fact:
        raise ValueError(message)


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0 < value <= sys.float_info.max:
            raise ValueError(f"{name} must be positive and finite, got {value}")


def check_probabilities(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= finite_float(name, value) <= 1.0:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}")
