"""A program of test_triton.py: the launches of a call, as the host makes them, for a GPU that is not here.

A driver in its place names the target; each launch is specialised and compiled, and not run.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dilated_attention_pytorch import DilatedSpec
from dilated_attention_pytorch.core.workspace import Workspace
from dilated_attention_pytorch.kernels import Inputs, Merged, triton
from dilated_attention_pytorch.plan import UNBOUNDED, Shape, plan_dilated


class Driver:
    """What Triton asks of one before a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0


driver.set_active(Driver())
triton._target = lambda _: "sm_80"
compiled = dict[str, None]()
run = JITFunction.run


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
    result = run(self, *args, grid=grid, warmup=True, **given)
    assert result is not None
    compiled[self.__name__] = None
    return result


JITFunction.run = compile_only
# One batch, one head: numbers that are 1, and that Triton would otherwise take for constants.
shape = Shape(1, 70, 1, 1, 24)
plan = plan_dilated(DilatedSpec((64,), (1,)), shape, itemsize=2, workspace_bytes=UNBOUNDED)
q, k, v, out, g = (torch.empty(1, 70, 1, 24, dtype=torch.float16) for _ in range(5))
inputs = Inputs(q, k, v, None, 1.0, 0.0, 0, Workspace())
triton.forward(plan, inputs)
triton.backward(plan, inputs, Merged(out, torch.empty(1, 1, 70), g, None))
print(*compiled)
