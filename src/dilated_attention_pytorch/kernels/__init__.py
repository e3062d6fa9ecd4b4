"""HOW a plan is attended: kernels that keep one contract, and the choice between them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from . import cpu_flash, cuda, stock
from .contract import Dropout, How, Inputs, Kernel, Merged, Op, Request
from .eager import EAGER as _EAGER_OP

_FUSED = {"cpu": (cpu_flash.CPU_FLASH, cpu_flash.why_not), "cuda": (cuda.CUDA, cuda.why_not)}


def _why_not_stock(request: Request) -> str | None:
    if request.device.type not in _FUSED:
        return f"torch has no fused attention op that it can use on {request.device}"
    return _FUSED[request.device.type][1](request)


def _stock_forward(plan: Any, inputs: Inputs, *others: Any) -> tuple[Tensor, Tensor]:
    return stock.forward(_FUSED[inputs.q.device.type][0], plan, inputs, *others)


def _stock_backward(plan: Any, inputs: Inputs, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return stock.backward(_FUSED[inputs.q.device.type][0], plan, inputs, *others)


STOCK = Kernel("stock", _why_not_stock, _stock_forward, _stock_backward)
EAGER = Kernel(
    "eager", lambda _request: None, partial(stock.forward, _EAGER_OP), partial(stock.backward, _EAGER_OP)
)
# In the order of preference; the last one can always run.
KERNELS: tuple[Kernel, ...] = (STOCK, EAGER)
KERNEL_NAMES = ("auto", *(kernel.name for kernel in KERNELS))


def check_kernel_name(name: str) -> None:
    if name not in KERNEL_NAMES:
        raise ValueError(f"kernel must be one of {', '.join(map(repr, KERNEL_NAMES))}, got {name!r}")


def choose_kernel(request: Request, name: str = "auto") -> Kernel:
    """The first kernel that can run the request, or exactly the one named, or an error that says why not."""
    check_kernel_name(name)
    if name == "auto":
        return next(kernel for kernel in KERNELS if kernel.why_not(request) is None)
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    reason = kernel.why_not(request)
    if reason is not None:
        raise ValueError(f"kernel {name!r} cannot run this call: {reason}")
    return kernel


__all__ = [
    "KERNELS",
    "KERNEL_NAMES",
    "Dropout",
    "How",
    "Inputs",
    "Kernel",
    "Merged",
    "Op",
    "Request",
    "check_kernel_name",
    "choose_kernel",
]
