"""A program of test_triton.py: the launches of a call, as the host makes them, for a GPU that is not here.

A driver in its place names the target; each launch is specialised and compiled, and not run.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dilated_attention_pytorch import BlockPattern, DilatedSpec
from dilated_attention_pytorch.core.workspace import Workspace
from dilated_attention_pytorch.kernels import Inputs, Merged, triton
from dilated_attention_pytorch.plan import UNBOUNDED, Plan, Shape, plan_blocks, plan_dilated


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


def launch(
    plan: Plan, dtype: torch.dtype, masked: bool = False, dropout_p: float = 0.0, scale: float = 1.0
) -> None:
    b, n, h, h_kv, d = plan.shape
    q, k, v, out, g = (torch.empty(b, n, x, d, dtype=dtype) for x in (h, h_kv, h_kv, h, h))
    mask = torch.ones(b, n, dtype=torch.bool) if masked else None
    inputs = Inputs(q, k, v, mask, scale, dropout_p, 0, Workspace())
    triton.forward(plan, inputs)
    grad_lse = torch.zeros(b, h, n) if masked else None
    triton.backward(plan, inputs, Merged(out, torch.empty(b, h, n), g, grad_lse))


def dilated(shape: Shape, itemsize: int = 2, **options: Any) -> Plan:
    spec = DilatedSpec((33, 40), (1, 3), **options)
    return plan_dilated(spec, shape, itemsize=itemsize, workspace_bytes=UNBOUNDED)


# One batch, one head: numbers that are 1, and that Triton would otherwise take for constants.
launch(dilated(Shape(1, 40, 1, 1, 24)), torch.float16)
launch(dilated(Shape(2, 40, 4, 2, 40), is_causal=True), torch.bfloat16, True, 0.1, -0.5)
launch(dilated(Shape(2, 40, 2, 2, 16), 4, tail="phantom", detach_mixing=True), torch.float32)
pattern = BlockPattern.from_layout(torch.tensor([[[1, 0, 1], [1, 1, 0], [1, 0, 1]]]) > 0, 40, 16)
launch(
    plan_blocks(pattern, Shape(1, 40, 2, 2, 64), itemsize=2, workspace_bytes=UNBOUNDED, joins=False),
    torch.float16,
)
print(*compiled)
