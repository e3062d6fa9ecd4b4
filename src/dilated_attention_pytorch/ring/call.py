"""A kernel on a rank's shard of a call, with the keys of other ranks; known to autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.pattern_cache import get_global_pattern_cache
from ..kernels import Merged
from ..ops import RunOptions, Tensors, attention_inputs, without_autocast
from ..plan import Pass
from .agreement import lend_workspace
from .comm import Ring
from .remote_kv import RingKV
from .rounds import Schedule


@dataclass(frozen=True)
class RankCall:
    """The static part of a rank's call, and the passes on it."""

    ring: Ring
    schedule: Schedule
    options: RunOptions

    def run(self, tensors: Tensors, merged: Merged | None = None) -> Any:
        """out and lse; or, from those of the forward pass and their gradients, dq, dk and dv."""
        direction: Pass = "forward" if merged is None else "backward"
        device, options = tensors.q.device, self.options
        with without_autocast(device), lend_workspace(options.memory, device) as workspace:
            kernel, inputs = attention_inputs(options, tensors, workspace)
            cache = get_global_pattern_cache() if options.use_pattern_cache else None
            rank, size = self.ring.rank, options.workspace_bytes
            plan = self.schedule.own_plan(rank, inputs.shape, direction, size, cache)
            remote = None
            if self.schedule.steps(rank):
                remote = RingKV(self.ring, self.schedule, inputs, direction, size)
            results: tuple[Tensor, ...]
            if merged is None:
                results = kernel.forward(plan, inputs, remote)
            else:
                results = kernel.backward(plan, inputs, merged, remote)
            if remote is not None:
                remote.finish()
        return results


def attend(tensors: Tensors, call: RankCall) -> tuple[Tensor, Tensor]:
    """out and lse of a rank."""
    result: tuple[Tensor, Tensor] = _Attention.apply(*tensors, call)  # type: ignore[no-untyped-call]
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, call = args
        out, lse = call.run(Tensors(*tensors))
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
        gradients = ctx.call.run(Tensors(*tensors), merged)
        return *gradients, *(None,) * (len(tensors) - 2)
