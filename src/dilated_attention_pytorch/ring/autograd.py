"""The engines of both kinds of attention, on a rank's part of a call, known to autograd."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..attention_op import RunOptions, attention_inputs, without_autocast
from ..engine import Inputs, Merged
from .agreement import lend_workspace


class RankCall(Protocol):
    """The static part of a rank's call, and the passes on it."""

    @property
    def options(self) -> RunOptions: ...
    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]: ...
    def backward(self, inputs: Inputs, merged: Merged) -> tuple[Tensor, Tensor, Tensor]: ...


class CallTensors(NamedTuple):
    """q, k and v, and what belongs to them."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    seed: Tensor | None


def attend(tensors: CallTensors, call: RankCall) -> tuple[Tensor, Tensor]:
    """out and lse of a rank."""
    result: tuple[Tensor, Tensor] = _Attention.apply(*tensors, call)  # type: ignore[no-untyped-call]
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, call = args
        heads = CallTensors(*tensors)
        options, device = call.options, heads.q.device
        with without_autocast(device), lend_workspace(options.memory, device) as workspace:
            out, lse = call.forward(attention_inputs(options, *heads, workspace))
        ctx.save_for_backward(*heads, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        heads, call = CallTensors(*tensors), ctx.call
        # Also without a gradient of its own: the others wait for this rank.
        merged = Merged(out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse)
        options, device = call.options, heads.q.device
        with without_autocast(device), lend_workspace(options.memory, device) as workspace:
            gradients = call.backward(attention_inputs(options, *heads, workspace), merged)
        return *gradients, None, None, None
