"""The engines of both kinds of attention, on a rank's part of a call, known to autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..engine import Inputs, Merged
from ..ops import RunOptions, Tensors, attention_inputs, without_autocast
from .agreement import lend_workspace


class RankCall(Protocol):
    """The static part of a rank's call, and the passes on it."""

    @property
    def options(self) -> RunOptions: ...
    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]: ...
    def backward(self, inputs: Inputs, merged: Merged) -> tuple[Tensor, Tensor, Tensor]: ...


def attend(tensors: Tensors, call: RankCall) -> tuple[Tensor, Tensor]:
    """out and lse of a rank."""
    result: tuple[Tensor, Tensor] = _Attention.apply(*tensors, call)  # type: ignore[no-untyped-call]
    return result


@contextmanager
def _inputs(tensors: Tensors, options: RunOptions) -> Iterator[Inputs]:
    device = tensors.q.device
    with without_autocast(device), lend_workspace(options.memory, device) as workspace:
        yield attention_inputs(options, tensors, workspace)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, call = args
        with _inputs(Tensors(*tensors), call.options) as inputs:
            out, lse = call.forward(inputs)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        # Also without a gradient of its own: the others wait for this rank.
        merged = Merged(out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse)
        with _inputs(Tensors(*tensors), ctx.call.options) as inputs:
            gradients = ctx.call.backward(inputs, merged)
        return *gradients, *(None,) * (len(tensors) - 2)
