"""What the custom ops of all kinds of attention share: memory, inputs, fake tensors and autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from .checks import autocasts, check_positive_int
from .core.host_memory import describe_bytes, is_out_of_memory
from .core.relief import out_of_memory, release_idle_memory
from .core.sources import check_memory, find_source, retries
from .core.workspace import Workspace
from .engine import Inputs
from .kernels import Request, check_kernel_name, choose_kernel

_T = TypeVar("_T")
_O = TypeVar("_O", bound="RunOptions")


class RunOptions(Protocol):
    """What the options of all attention ops have in common."""

    @property
    def scale(self) -> float: ...
    @property
    def dropout_p(self) -> float: ...
    @property
    def kernel(self) -> str: ...
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
    if not retries(options.memory):
        with lend(device) as workspace:
            return attend(options, workspace)
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


def check_execution(kernel: str, workspace_bytes: int, memory: str, use_pattern_cache: bool) -> None:
    """Validates how to run, as far as that can be known without tensors."""
    check_memory(memory)
    if not isinstance(use_pattern_cache, bool):
        raise TypeError(f"use_pattern_cache must be a bool, got {use_pattern_cache!r}")
    check_kernel_name(kernel)
    check_positive_int("workspace_bytes", workspace_bytes)


def attention_inputs(
    options: RunOptions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    seed: Tensor | None,
    workspace: Workspace,
) -> Inputs:
    """The tensors of a call and the kernel that runs it."""
    request = Request(q.device, q.dtype, key_mask is not None, options.dropout_p > 0, options.scale)
    kernel = choose_kernel(request, options.kernel)
    drawn = 0 if seed is None else int(seed.item())
    return Inputs(q, k, v, key_mask, options.scale, options.dropout_p, drawn, kernel, workspace)


def register_attention(op: CustomOpDef, backward_op: CustomOpDef, num_tensors: int) -> None:
    """Makes an op known to fake tensors and autograd.

    `op(q, k, v, ..., *options) -> (out, lse)`, where `num_tensors` arguments may be tensors, and
    `backward_op(grad_out, grad_lse, out, lse, q, k, v, ..., *options) -> (dq, dk, dv)`.
    """

    def fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        b, n, h, _d = q.shape
        lse = q.new_empty((b, h, n), dtype=torch.promote_types(q.dtype, torch.float32))
        return q.new_empty(q.shape), lse

    def fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = args[4:7]
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:num_tensors], *output)
        ctx.options = inputs[num_tensors:]
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        others = (None,) * (num_tensors - 3 + len(ctx.options))
        if grad_out is None and grad_lse is None:
            return None, None, None, *others
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        return *backward_op(grad_out, grad_lse, out, lse, *tensors, *ctx.options), *others

    op.register_fake(fake)
    backward_op.register_fake(fake_backward)
    op.register_autograd(backward, setup_context=setup_context)
