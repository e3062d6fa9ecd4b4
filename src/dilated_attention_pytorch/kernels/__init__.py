"""HOW a plan is attended: kernels that keep one contract, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import torch

from ..checks import one_of
from ..spec import KernelName
from . import cpu_flash, cuda, native, stock, triton
from .contract import Attended, Chunk, Dropout, How, Inputs, Kernel, Merged, Op, RemoteKV, Request
from .eager import EAGER_OP


def _never(_request: Request) -> None:
    return None


def _over(name: str, op: Op, why_not: Callable[[Request], str | None]) -> Kernel:
    """A kernel that packs the rows of a plan for an op."""
    return Kernel(name, why_not, partial(stock.forward, op), partial(stock.backward, op), op)


CPU_FLASH = _over("stock", cpu_flash.CPU_FLASH, cpu_flash.why_not)
CUDA = _over("stock", cuda.CUDA, cuda.why_not)
NATIVE = Kernel(
    "native", native.why_not, native.forward, native.backward, native.NATIVE_OP, each_key_once=True
)
TRITON = Kernel("triton", triton.why_not, triton.forward, triton.backward, triton.TRITON_OP, packs=False)
EAGER = _over("eager", EAGER_OP, _never)


def kernels_for(device: torch.device) -> tuple[Kernel, ...]:
    """The kernels of a device, in the order of preference; the last one can always run."""
    return (TRITON, CUDA, EAGER) if device.type == "cuda" else (NATIVE, CPU_FLASH, EAGER)


def choose_kernel(request: Request, name: str = "auto") -> Kernel:
    """The first kernel that can run the request, or exactly the one named, or an error that says why not."""
    one_of("kernel", name, get_args(KernelName))
    kernels = kernels_for(request.device)
    if name == "auto" and request.device.type == "cuda" and cuda.is_faster(request):
        kernels = CUDA, TRITON, EAGER
    if name not in ("auto", *(kernel.name for kernel in kernels)):
        # To say why not; and the interpreter of Triton takes CPU tensors when it is named.
        kernels = NATIVE, TRITON
    for kernel in kernels:
        if name in ("auto", kernel.name):
            reason = kernel.why_not(request)
            if reason is None:
                return kernel
            if name != "auto":
                raise ValueError(f"kernel {name!r} cannot run this call: {reason}")
    raise AssertionError("the last kernel can always run")


__all__ = [
    "Attended",
    "Chunk",
    "Dropout",
    "How",
    "Inputs",
    "Kernel",
    "Merged",
    "Op",
    "RemoteKV",
    "Request",
    "choose_kernel",
    "kernels_for",
]
