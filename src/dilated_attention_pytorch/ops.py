"""The custom ops behind dilated attention, forward and backward, known to autograd and compilers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import engine, packed
from .attention_op import attention_inputs, register_attention, with_memory, without_autocast
from .core.pattern_cache import get_global_pattern_cache
from .core.workspace import Workspace
from .engine import Inputs, Merged
from .packed import Documents, group_documents
from .plan import Part, Plan, Shape, plan_dilated
from .plan.dilated import digest
from .plan.shape import Pass
from .spec import DilatedSpec


class Options(NamedTuple):
    """The static part of a call, in the order of the ops' schema."""

    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    is_causal: bool
    scale: float
    dropout_p: float
    head_mixing: str
    head_offsets: str
    tail: str
    detach_mixing: bool
    kernel: str
    workspace_bytes: int
    memory: str
    use_pattern_cache: bool
    steps: int
    head_slice: Sequence[int]  # (first, total), or empty

    @property
    def spec(self) -> DilatedSpec:
        segment_lengths, dilation_rates, *others = self[:9]
        return _make_spec(tuple(segment_lengths), tuple(dilation_rates), *others)


_make_spec = lru_cache(maxsize=256)(DilatedSpec)
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? cu_seqlens, Tensor? seed"
_OPTIONS = (
    "int[] segment_lengths, int[] dilation_rates, bool is_causal, float scale, float dropout_p, "
    "str head_mixing, str head_offsets, str tail, bool detach_mixing, str kernel, int workspace_bytes, "
    "str memory, bool use_pattern_cache, int steps, int[] head_slice"
)


@torch.library.custom_op(
    "dilated_attention_pytorch::dilated_attention",
    mutates_args=(),
    schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor out, Tensor lse)",
)
def dilated_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    *raw: Any,
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n); the arguments are those of `functional.dilated_attention`."""

    def attend(options: Options, workspace: Workspace) -> tuple[Tensor, Tensor]:
        inputs = attention_inputs(options, q, k, v, key_mask, seed, workspace)
        documents = _documents(options, inputs, cu_seqlens)
        if documents.batches:
            return packed.forward(documents, partial(_plan, options, "forward", q.element_size()), inputs)
        return engine.forward(_whole_plan(options, "forward", q, k, cu_seqlens), inputs)

    with without_autocast(q.device):
        return with_memory(Options(*raw), q.device, attend)


@torch.library.custom_op(
    "dilated_attention_pytorch::dilated_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
)
def dilated_attention_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    *raw: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the forward's results and the gradients of its outputs."""

    def attend(options: Options, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
        inputs = attention_inputs(options, q, k, v, key_mask, seed, workspace)
        merged = Merged(out, lse, grad_out, grad_lse)
        documents = _documents(options, inputs, cu_seqlens)
        if documents.batches:
            make_plan = partial(_plan, options, "backward", q.element_size())
            return packed.backward(documents, make_plan, inputs, merged)
        return engine.backward(_whole_plan(options, "backward", q, k, cu_seqlens), inputs, merged)

    with without_autocast(q.device):
        return with_memory(Options(*raw), q.device, attend)


def _whole_plan(options: Options, direction: Pass, q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> Plan:
    b, n, h, d = q.shape
    docs = None if cu_seqlens is None else document_bounds(cu_seqlens, n)
    return _plan(options, direction, q.element_size(), Shape(b, n, h, k.shape[2], d), docs)


def _plan(
    options: Options, direction: Pass, itemsize: int, shape: Shape, docs: tuple[int, ...] | None = None
) -> Plan:
    first, total = options.head_slice or (0, shape.h)
    return plan_dilated(
        options.spec,
        shape,
        itemsize=itemsize,
        direction=direction,
        docs=docs,
        workspace_bytes=options.workspace_bytes,
        cache=get_global_pattern_cache() if options.use_pattern_cache else None,
        steps=options.steps,
        part=Part(shape.n, 0, total, first),
    )


def _documents(options: Options, inputs: Inputs, cu_seqlens: Tensor | None) -> Documents:
    if cu_seqlens is None:
        return Documents(())
    _, n, h, d = inputs.q.shape
    bounds = document_bounds(cu_seqlens, n)
    row_bytes = 2 * (h + inputs.k.shape[2]) * d * inputs.q.element_size()
    rows_fit = options.workspace_bytes // (4 * row_bytes)  # beside the tiles, and measured as fastest
    if not options.use_pattern_cache:
        return group_documents(bounds, options.spec, rows_fit)
    key = ("documents", digest(bounds), options.is_causal, options.tail, rows_fit)
    build = partial(group_documents, bounds, options.spec, rows_fit)
    documents: Documents = get_global_pattern_cache().get_or_build(key, build)
    return documents


def document_bounds(cu_seqlens: Tensor, n: int) -> tuple[int, ...]:
    """The boundaries of packed documents as numbers, checked."""
    bounds = tuple(cu_seqlens.tolist())
    check_bounds(bounds, n)
    return bounds


def check_bounds(bounds: tuple[int, ...], n: int) -> None:
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != n:
        raise ValueError(f"cu_seqlens must run from 0 to the sequence length {n}, got {_short(bounds)}")
    if any(following < bound for bound, following in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must not decrease, got {_short(bounds)}")


def _short(values: tuple[int, ...]) -> str:
    return str(values) if len(values) <= 8 else f"({', '.join(map(str, values[:4]))}, ..., {values[-1]})"


register_attention(dilated_attention_op, dilated_attention_backward_op, num_tensors=6)


def _flops(
    matmuls: int, direction: Pass, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, raw: tuple[Any, ...]
) -> int:
    plan = _whole_plan(Options(*raw), direction, q, k, cu_seqlens)
    return 2 * matmuls * q.shape[-1] * plan.num_pairs


@register_flop_formula(torch.ops.dilated_attention_pytorch.dilated_attention, get_raw=True)
def _(
    q: Tensor, k: Tensor, _v: Tensor, _mask: Any, cu_seqlens: Tensor | None, _seed: Any, *raw: Any, **_: Any
) -> int:
    return _flops(2, "forward", q, k, cu_seqlens, raw)


@register_flop_formula(torch.ops.dilated_attention_pytorch.dilated_attention_backward, get_raw=True)
def _(*args: Any, **_: Any) -> int:
    q, k, _v, _mask, cu_seqlens, _seed, *raw = args[4:]  # after the gradients, out and lse
    attends_again = 2 if Options(*raw).detach_mixing else 0
    return _flops(5 + attends_again, "backward", q, k, cu_seqlens, tuple(raw))
