"""The functional doors: validate, then hand over to the ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from .attention_op import check_execution
from .checks import (
    autocast_inputs,
    check_flags,
    check_head_slice,
    check_inputs,
    check_positive_int,
    named_keywords,
    refuse_forward_mode,
)
from .ops import dilated_attention_op
from .plan import DEFAULT_WORKSPACE_BYTES
from .spec import DilatedSpec, HeadMixing, HeadOffsets, Tail


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
    steps: int = ...,
    head_slice: tuple[int, int] | None = ...,
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
    steps: int = ...,
    head_slice: tuple[int, int] | None = ...,
) -> tuple[Tensor, Tensor]: ...


@named_keywords
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
    steps: int = 1,
    head_slice: tuple[int, int] | None = None,
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
            depends on the shapes, on `workspace_bytes` and on `steps`.
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
        steps: the forward pass attends so many equal parts of the queries one after the other. Where segments
            are as long as the sequence that bounds the float32 sums of half precision; it changes no result.
        head_slice: (first, total): the heads of q are `first` and following of `total` heads, on which their
            offsets depend; for heads that are spread over devices.

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
    q, k, v = autocast_inputs(q, k, v)
    check_inputs(q, k, v, key_mask, cu_seqlens)
    refuse_forward_mode("dilated_attention", q, k, v)
    check_execution(kernel, workspace_bytes, memory, use_pattern_cache)
    check_flags(return_lse=return_lse)
    check_positive_int("steps", steps)
    if head_slice is not None:
        check_head_slice(head_slice, q.shape[2], k.shape[2])
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
        spec.scale_for(q.shape[-1]),
        spec.dropout_p,
        spec.head_mixing,
        spec.head_offsets,
        spec.tail,
        spec.detach_mixing,
        kernel,
        workspace_bytes,
        memory,
        use_pattern_cache,
        steps,
        head_slice or (),
    )
    return (out, lse) if return_lse else out
