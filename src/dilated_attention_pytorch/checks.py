"""What the public doors check before anything runs: errors that state the rule and the fact."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .attention_op import autocasts
from .core.blocks import check_dense, check_positive_int
from .core.sources import check_memory
from .kernels import check_kernel_name
from .spec import refuse_unknown

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MASKS = ("attention_mask", "attn_mask", "mask", "key_padding_mask")  # of other libraries and of modules
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts as autocast casts for scaled_dot_product_attention: floating point except float64."""
    tensors = (q, k, v)
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors  # for check_inputs to reject
    if not autocasts(q.device):
        return tensors
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
    return q, k, v


def named_keywords(function: _Function) -> _Function:
    """Refuses keywords that the function does not have with a hint at those that are meant."""
    known = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        for name in given:
            if name not in known:
                _refuse_keyword(function.__name__, name, known)
        return function(*args, **given)

    return call  # type: ignore[return-value]


def _refuse_keyword(function: str, name: str, known: tuple[str, ...]) -> None:
    if name in _MASKS and "key_mask" in known:
        meant = "key_mask (b, n) bool, True = may be attended, is meant"
        raise TypeError(f"{function} has no {name!r}; {meant}")
    refuse_unknown(function, [name], known)


def refuse_forward_mode(name: str, *tensors: Tensor) -> None:
    """The custom op would drop a tangent without a word."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise TypeError(f"{name} has no forward-mode derivative, got a tensor with a tangent")


def check_execution(kernel: str, workspace_bytes: int, memory: str, use_pattern_cache: bool) -> None:
    """Validates how to run, as far as that can be known without tensors."""
    check_memory(memory)
    if not isinstance(use_pattern_cache, bool):
        raise TypeError(f"use_pattern_cache must be a bool, got {use_pattern_cache!r}")
    check_kernel_name(kernel)
    check_positive_int("workspace_bytes", workspace_bytes)


def check_head_slice(head_slice: tuple[int, int], h: int, h_kv: int) -> None:
    """Validates (first, total) for h query heads that share h_kv key heads."""
    if not isinstance(head_slice, (tuple, list)) or [type(x) for x in head_slice] != [int, int]:
        raise TypeError(f"head_slice must be two integers (first, total), got {head_slice!r}")
    (first, total), group = head_slice, h // h_kv
    if total >= 2**31:
        raise ValueError(f"head_slice must have a total below 2**31, got {total}")
    if not 0 <= first <= total - h:
        raise ValueError(f"head_slice must hold first + {h} heads of q within total, got {tuple(head_slice)}")
    if first % group or total % group:
        raise ValueError(
            f"head_slice must not cut the {group} query heads that share a key head, got {tuple(head_slice)}"
        )


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    least_length: int = 1,
    same_length: bool = True,
) -> None:
    """Validates the tensors of a call, all but the values of cu_seqlens."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        check_dense(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (b, n, h, d), got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    b, n, h, d = q.shape
    if n < least_length or h < 1 or d < 1:
        raise ValueError(f"q must have at least one position, head and feature, got shape {tuple(q.shape)}")
    alike = (k.shape[0], k.shape[1] if same_length else n, k.shape[3])
    if k.shape != v.shape or alike != (b, n, d):
        sizes = "b, n and d" if same_length else "b and d"
        raise ValueError(
            f"k and v must have the shape (b, n, h_kv, d) with the {sizes} of q, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
        )
    if k.shape[2] < 1 or h % k.shape[2]:
        raise ValueError(f"the heads of q must be a multiple of those of k and v, got {h} and {k.shape[2]}")
    if key_mask is not None:
        _check_key_mask(q, key_mask)
    if cu_seqlens is not None:
        _check_cu_seqlens(q, cu_seqlens)


def check_new_tokens(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Validates the tensors of a decoding call, which has no gradient."""
    check_inputs(q, k, v, None, None, same_length=False)
    if k.shape[1] < 1:
        raise ValueError(f"k must have at least one position, got shape {tuple(k.shape)}")
    if q.is_meta:
        raise ValueError(f"{name} needs tensors with values, got the meta device")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError(
            f"{name} has no gradient: call it under torch.no_grad() or torch.inference_mode(), got tensors "
            "that require one"
        )


def _check_key_mask(q: Tensor, key_mask: Tensor) -> None:
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        raise TypeError(
            f"key_mask must be a bool tensor, got {getattr(key_mask, 'dtype', type(key_mask).__name__)}"
        )
    check_dense("key_mask", key_mask)
    if key_mask.shape != q.shape[:2]:
        raise ValueError(
            f"key_mask must have the shape (b, n) = {tuple(q.shape[:2])}, got {tuple(key_mask.shape)}"
        )
    if key_mask.device != q.device:
        raise ValueError(f"key_mask must be on the device of q, {q.device}, got {key_mask.device}")


def _check_cu_seqlens(q: Tensor, cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor, got {kind}")
    check_dense("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens must have one dimension, got shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device not in (q.device, torch.device("cpu")):
        raise ValueError(
            f"cu_seqlens must be on the cpu or on the device of q, {q.device}, got {cu_seqlens.device}"
        )
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents into a batch of 1, got a batch of {q.shape[0]}")


def whole_numbers(
    name: str, values: Sequence[int] | Tensor, num: int | None, largest: int, *, least: int = 0
) -> list[int]:
    """`num` integers (or, for None, any number but 0 of them) from `least` to `largest`, checked."""
    if isinstance(values, Tensor):
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"{name} must hold integers, got {values.dtype}")
        check_dense(name, values, needs_values=True)
        values = values.tolist()
    if not isinstance(values, (list, tuple, range)):
        raise TypeError(f"{name} must be a sequence or tensor of integers, got {values!r}")
    if num is None and not values:
        raise ValueError(f"{name} must have at least one entry, got none")
    if num is not None and len(values) != num:
        raise ValueError(f"{name} must have one entry for each of the {num} rows, got {len(values)}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must hold integers, got {value!r}")
        if not least <= value <= largest:
            raise ValueError(f"{name} must lie between {least} and {largest}, got {value}")
    return list(values)
