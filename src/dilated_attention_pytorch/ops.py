"""The custom ops behind dilated attention, forward and backward, known to autograd and compilers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import engine
from .core.host_memory import describe_bytes, is_out_of_memory
from .core.pattern_cache import get_global_pattern_cache
from .core.relief import out_of_memory, release_idle_memory
from .core.sources import find_source
from .core.workspace import Workspace
from .kernels import Request, choose_kernel
from .plan import Plan, Shape, plan_dilated
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

    @property
    def spec(self) -> DilatedSpec:
        segment_lengths, dilation_rates, *others = self[:-4]
        return _make_spec(tuple(segment_lengths), tuple(dilation_rates), *others)


_T = TypeVar("_T")
_O = TypeVar("_O", bound="RunOptions")
_make_spec = lru_cache(maxsize=256)(DilatedSpec)
_DROPOUT_P = Options._fields.index("dropout_p")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? cu_seqlens, Tensor? seed"
_OPTIONS = (
    "int[] segment_lengths, int[] dilation_rates, bool is_causal, float scale, float dropout_p, "
    "str head_mixing, str head_offsets, str tail, bool detach_mixing, str kernel, int workspace_bytes, "
    "str memory, bool use_pattern_cache"
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
    # Dropout masks are drawn tile by tile, so both passes must then cut the same tiles.
    direction: Pass = "backward" if raw[_DROPOUT_P] else "forward"

    def attend(options: Options, workspace: Workspace) -> tuple[Tensor, Tensor]:
        plan = _plan(options, direction, q, k, cu_seqlens)
        return engine.forward(plan, _inputs(options, q, k, v, key_mask, seed, workspace))

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
        plan = _plan(options, "backward", q, k, cu_seqlens)
        inputs = _inputs(options, q, k, v, key_mask, seed, workspace)
        return engine.backward(plan, inputs, out, lse, grad_out, grad_lse)

    with without_autocast(q.device):
        return with_memory(Options(*raw), q.device, attend)


class RunOptions(Protocol):
    """What the options of all attention ops have in common."""

    @property
    def dropout_p(self) -> float: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def memory(self) -> str: ...
    def _replace(self, *, workspace_bytes: int) -> Any: ...


def with_memory(options: _O, device: torch.device, attend: Callable[[_O, Workspace], _T]) -> _T:
    """Attends with a workspace from where the options say.

    A call with pooled memory that runs out of it frees all that is idle and tries again, then in smaller
    tiles; the latter not with dropout, whose masks depend on the tiles.
    """
    lend = find_source(options.memory)
    if lend is None:
        return attend(options, Workspace())
    smaller = () if options.dropout_p else (options.workspace_bytes // 8, options.workspace_bytes // 64)
    for workspace_bytes in (options.workspace_bytes, options.workspace_bytes, *smaller):
        try:
            with lend(device) as workspace:
                return attend(options._replace(workspace_bytes=max(1, workspace_bytes)), workspace)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)  # or its frames would keep the failed call's tensors
        release_idle_memory()
    tried = "after all idle buffers were freed"
    if smaller:
        tried += f" and tiles cut to {describe_bytes(workspace_bytes)}"
    raise out_of_memory(failure, device, tried) from failure


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Keeps autocast, which acts on what the caller passes in, from lowering the precision inside."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def autocasts(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _plan(options: Options, direction: Pass, q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> Plan:
    b, n, h, d = q.shape
    return plan_dilated(
        options.spec,
        Shape(b, n, h, k.shape[2], d),
        itemsize=q.element_size(),
        direction=direction,
        docs=None if cu_seqlens is None else document_bounds(cu_seqlens, n),
        workspace_bytes=options.workspace_bytes,
        cache=get_global_pattern_cache() if options.use_pattern_cache else None,
    )


def document_bounds(cu_seqlens: Tensor, n: int) -> tuple[int, ...]:
    bounds = tuple(cu_seqlens.tolist())
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != n:
        raise ValueError(f"cu_seqlens must run from 0 to the sequence length {n}, got {_short(bounds)}")
    if any(following < bound for bound, following in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must not decrease, got {_short(bounds)}")
    return bounds


def _short(values: tuple[int, ...]) -> str:
    return str(values) if len(values) <= 8 else f"({', '.join(map(str, values[:4]))}, ..., {values[-1]})"


def _inputs(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    seed: Tensor | None,
    workspace: Workspace,
) -> engine.Inputs:
    request = Request(q.device, q.dtype, key_mask is not None, options.dropout_p > 0, options.scale)
    kernel = choose_kernel(request, options.kernel)
    drawn = 0 if seed is None else int(seed.item())
    return engine.Inputs(q, k, v, key_mask, options.scale, options.dropout_p, drawn, kernel, workspace)


@dilated_attention_op.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, n, h, _d = q.shape
    out = q.new_empty(q.shape)
    return out, q.new_empty((b, h, n), dtype=torch.promote_types(q.dtype, torch.float32))


@dilated_attention_backward_op.register_fake
def _(
    _grad_out: Tensor,
    _grad_lse: Tensor | None,
    _out: Tensor,
    _lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, key_mask, cu_seqlens, seed, *options = inputs
    ctx.save_for_backward(q, k, v, key_mask, cu_seqlens, seed, *output)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, key_mask, cu_seqlens, seed, out, lse = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * (6 + len(ctx.options))
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    tensors = (grad_out, grad_lse, out, lse, q, k, v, key_mask, cu_seqlens, seed)
    dq, dk, dv = dilated_attention_backward_op(*tensors, *ctx.options)
    return dq, dk, dv, *(None,) * (3 + len(ctx.options))


dilated_attention_op.register_autograd(_autograd_backward, setup_context=_setup_context)


def _flops(
    matmuls: int, direction: Pass, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, raw: tuple[Any, ...]
) -> int:
    plan = _plan(Options(*raw), direction, q, k, cu_seqlens)
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
