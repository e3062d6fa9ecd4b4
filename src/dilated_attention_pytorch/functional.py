"""The functional doors: validate, then hand over to the ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .core.sources import check_memory
from .kernels import check_kernel_name
from .ops import autocasts, dilated_attention_op
from .plan import DEFAULT_WORKSPACE_BYTES
from .spec import DilatedSpec, HeadMixing, HeadOffsets, Tail

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@overload
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    key_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    head_mixing: HeadMixing = ...,
    head_offsets: HeadOffsets = ...,
    tail: Tail = ...,
    detach_mixing: bool = ...,
    return_lse: Literal[False] = ...,
    kernel: str = ...,
    workspace_bytes: int = ...,
    memory: str = ...,
    use_pattern_cache: bool = ...,
) -> Tensor: ...


@overload
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    key_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    head_mixing: HeadMixing = ...,
    head_offsets: HeadOffsets = ...,
    tail: Tail = ...,
    detach_mixing: bool = ...,
    return_lse: Literal[True],
    kernel: str = ...,
    workspace_bytes: int = ...,
    memory: str = ...,
    use_pattern_cache: bool = ...,
) -> tuple[Tensor, Tensor]: ...


def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0,  # an int: torch.compile makes a symbol of a float default, and compiles twice
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_mixing: HeadMixing = "all",
    head_offsets: HeadOffsets = "interleaved",
    tail: Tail = "exact",
    detach_mixing: bool = False,
    return_lse: bool = False,
    kernel: str = "auto",
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    memory: str = "fresh",
    use_pattern_cache: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which every branch `(w, r)` sees each r-th position of its segment of w positions.

    For head `h`, position `t` is selected by a branch when `(t % w) % r == h % r`. A selected query attends
    to the selected keys of its own segment; all branches share one softmax over the multiset of their keys:

        scores = scale * q @ k.T + log(number of branches that connect query and key)
        out    = softmax(scores) @ v

    Args:
        q: (b, n, h, d), float16, bfloat16, float32 or float64, any strides.
        k, v: (b, n, h_kv, d) of the same dtype and device; h_kv divides h (grouped-query attention).
        segment_lengths, dilation_rates: one entry a branch; any length n >= 1 is exact.
        is_causal: a query sees only keys at or before its position.
        scale: factor of the scores, 1 / sqrt(d) by default.
        dropout_p: drops attention probabilities, whenever > 0: pass 0 in evaluation. What a seed drops
            depends on the shapes and on `workspace_bytes`.
        key_mask: (b, n) bool, True where a key may be attended.
        cu_seqlens: (documents + 1,) int32 or int64 boundaries of documents packed into b == 1;
            segments restart at each document.
        head_mixing, head_offsets, tail, detach_mixing: see docs/semantics.md.
        return_lse: also return the log-sum-exp of the scores, (b, h, n), differentiable.
        kernel: "auto", "cuda", "cpu_flash" or "eager"; a named kernel runs or raises.
        workspace_bytes: what packed tiles and accumulators may take; see `plan.plan_dilated`.
        memory: where scratch and results come from: "fresh", "pool" (the global memory pool, which also frees
            and tries again when memory runs out), "lightweight" (the pool's scratch only), or the `name` of a
            buffer manager.
        use_pattern_cache: keep the plan of this shape for later calls; False plans each call anew.

    Returns:
        out (b, n, h, d), contiguous, in the dtype of q; with `return_lse` also lse, in float32 (float64 for
        float64). A query that no branch selects, or that sees no key, gives zeros, lse -inf and zero
        gradients.

    Under autocast the inputs are cast like those of `scaled_dot_product_attention`. There is no second
    and no forward-mode derivative, and `torch.func.grad` cannot differentiate it.
    """
    spec = DilatedSpec(
        segment_lengths,
        dilation_rates,
        is_causal,
        scale,
        dropout_p,
        head_mixing,
        head_offsets,
        tail,
        detach_mixing,
    )
    q, k, v = _autocast(q, k, v)
    check_inputs(q, k, v, key_mask, cu_seqlens)
    _refuse_forward_mode(q, k, v)
    check_execution(kernel, workspace_bytes, memory, use_pattern_cache)
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse must be a bool, got {return_lse!r}")
    out, lse = dilated_attention_op(
        q,
        k,
        v,
        key_mask,
        cu_seqlens,
        torch.randint(2**62, (1,), device="cpu") if spec.dropout_p else None,
        spec.segment_lengths,
        spec.dilation_rates,
        spec.is_causal,
        1.0 / math.sqrt(q.shape[-1]) if spec.scale is None else spec.scale,
        spec.dropout_p,
        spec.head_mixing,
        spec.head_offsets,
        spec.tail,
        spec.detach_mixing,
        kernel,
        workspace_bytes,
        memory,
        use_pattern_cache,
    )
    return (out, lse) if return_lse else out


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts as autocast casts for scaled_dot_product_attention: floating point except float64."""
    tensors = (q, k, v)
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors  # for check_inputs to reject
    if not autocasts(q.device):
        return tensors
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
    return q, k, v


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """The custom op would drop a tangent without a word."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise TypeError("dilated_attention has no forward-mode derivative, got a tensor with a tangent")


def check_execution(kernel: str, workspace_bytes: int, memory: str, use_pattern_cache: bool) -> None:
    """Validates how to run, as far as that can be known without tensors."""
    check_memory(memory)
    if not isinstance(use_pattern_cache, bool):
        raise TypeError(f"use_pattern_cache must be a bool, got {use_pattern_cache!r}")
    check_kernel_name(kernel)
    if isinstance(workspace_bytes, bool) or not isinstance(workspace_bytes, int) or workspace_bytes < 1:
        raise ValueError(f"workspace_bytes must be a positive integer, got {workspace_bytes!r}")
    if workspace_bytes >= 2**62:
        raise ValueError(f"workspace_bytes must be below 2**62, got {workspace_bytes}")


def check_inputs(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Validates the tensors of a call, all but the values of cu_seqlens."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.is_nested or x.layout != torch.strided:
            raise TypeError(
                f"{name} must be a dense tensor, got {'a nested one' if x.is_nested else x.layout}"
            )
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (b, n, h, d), got shape {tuple(x.shape)}")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    b, n, h, d = q.shape
    if n < 1 or h < 1 or d < 1:
        raise ValueError(f"q must have at least one position, head and feature, got shape {tuple(q.shape)}")
    if k.shape != v.shape or k.shape[0] != b or k.shape[1] != n or k.shape[3] != d:
        raise ValueError(
            "k and v must have the shape (b, n, h_kv, d) with the b, n and d of q, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
        )
    if k.shape[2] < 1 or h % k.shape[2]:
        raise ValueError(f"the heads of q must be a multiple of those of k and v, got {h} and {k.shape[2]}")
    if key_mask is not None:
        _check_key_mask(q, key_mask)
    if cu_seqlens is not None:
        _check_cu_seqlens(q, cu_seqlens)


def _check_key_mask(q: Tensor, key_mask: Tensor) -> None:
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        raise TypeError(
            f"key_mask must be a bool tensor, got {getattr(key_mask, 'dtype', type(key_mask).__name__)}"
        )
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
    if cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens must have one dimension, got shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device not in (q.device, torch.device("cpu")):
        raise ValueError(
            f"cu_seqlens must be on the cpu or on the device of q, {q.device}, got {cu_seqlens.device}"
        )
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents into a batch of 1, got a batch of {q.shape[0]}")
