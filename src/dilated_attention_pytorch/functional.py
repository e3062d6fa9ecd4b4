"""The public function of dilated attention: validate, then call the op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .checks import (
    autocast_inputs,
    check_flags,
    check_head_slice,
    check_inputs,
    check_positive_int,
    refuse_forward_mode,
)
from .core.tracing import remembered
from .ops import NO_TABLES, attention, check_execution, write_execution, write_spec
from .spec import DilatedSpec, Execution, HeadMixing, HeadOffsets, Tail, takes_spec

Lengths = Sequence[int] | DilatedSpec
Rates = Sequence[int] | None


@overload
def dilated_attention(
    q: Tensor, k: Tensor, v: Tensor, *branches: Any, return_lse: Literal[False] = ..., **options: Any
) -> Tensor: ...


@overload
def dilated_attention(
    q: Tensor, k: Tensor, v: Tensor, *branches: Any, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...


@takes_spec  # type: ignore[misc]  # the overloads leave the options open
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Lengths,
    dilation_rates: Rates = None,
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
    execution: Execution | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which every branch `(w, r)` sees each r-th position of its segment of w positions.

    For head `h`, position `t` is selected by a branch when `(t % w) % r == h % r`. A selected query attends
    to the selected keys of its own segment; all branches share one softmax over the multiset of their keys:

        scores = scale * q @ k.T + log(number of branches that connect query and key)
        out    = softmax(scores) @ v

    Args:
        q: (b, n, h, d), float16, bfloat16, float32 or float64, any strides.
        k, v: (b, n, h_kv, d) of the same dtype and device; h_kv divides h (grouped-query attention).
        segment_lengths, dilation_rates: one entry a branch; any length n >= 1 is exact. Or a `DilatedSpec`,
            which holds all options but key_mask, cu_seqlens, return_lse and execution.
        is_causal: a query sees only keys at or before its position.
        scale: factor of the scores, 1 / sqrt(d) by default.
        dropout_p: drops attention probabilities, whenever > 0: pass 0 in evaluation. What a seed drops
            depends on the shapes and on the workspace of `execution`.
        key_mask: (b, n) bool, True where a key may be attended.
        cu_seqlens: (documents + 1,) int32 or int64 boundaries of documents packed into b == 1;
            segments restart at each document.
        head_mixing, head_offsets, tail, detach_mixing: see docs/semantics.md.
        return_lse: also return the log-sum-exp of the scores, (b, h, n), differentiable.
        execution: kernel, workspace, source of memory and use of the plan cache; see `Execution`.

    Returns:
        out (b, n, h, d), contiguous, in the dtype of q; with `return_lse` also lse, in float32 (float64 for
        float64). A query that no branch selects, or that sees no key, gives zeros, lse -inf and zero
        gradients.

    Under autocast the inputs are cast like those of `scaled_dot_product_attention`. There is no second
    and no forward-mode derivative, and `torch.func.grad` cannot differentiate it.
    """
    mixing = head_mixing, head_offsets, tail, detach_mixing
    spec = spec_of(segment_lengths, dilation_rates, is_causal, scale, dropout_p, *mixing)
    check_flags(return_lse=return_lse)
    out, lse = attend(q, k, v, spec, execution, key_mask=key_mask, cu_seqlens=cu_seqlens)
    return (out, lse) if return_lse else out


def spec_of(segment_lengths: Any, dilation_rates: Any, *options: Any) -> DilatedSpec:
    """`DilatedSpec` of these values; where they are plain the one of before, which is found much faster."""
    lists = segment_lengths, dilation_rates
    if all(type(x) in (list, tuple) and all(type(y) is int for y in x) for x in lists):
        try:
            return _known_spec(tuple(segment_lengths), tuple(dilation_rates), *options)
        except TypeError:  # an option is of a wrong type, or not even hashable
            pass
    return DilatedSpec(segment_lengths, dilation_rates, *options)


_known_spec = remembered(DilatedSpec)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: DilatedSpec,
    execution: Execution | None = None,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    steps: int = 1,
    head_slice: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of `dilated_attention`, with what only other parts of this package ask for.

    Args:
        steps: the forward pass attends so many equal parts of the queries one after the other. Where segments
            are as long as the sequence that bounds the float32 sums of half precision; it changes no result.
        head_slice: (first, total): the heads of q are `first` and following of `total` heads, on which their
            offsets depend; for heads that are spread over devices.
    """
    q, k, v = autocast_inputs(q, k, v)
    check_inputs(q, k, v, key_mask, cu_seqlens)
    refuse_forward_mode("dilated_attention", q, k, v)
    execution = check_execution(execution)
    check_positive_int("steps", steps)
    if head_slice is not None:
        check_head_slice(head_slice, q.shape[2], k.shape[2])
    seed = torch.randint(2**62, (1,), device="cpu") if spec.dropout_p else None
    text = write_spec("dilated", spec, steps, head_slice or ())
    return attention(q, k, v, key_mask, cu_seqlens, seed, *NO_TABLES, text, write_execution(execution))
