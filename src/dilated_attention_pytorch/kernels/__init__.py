"""HOW a tile attends: kernels that keep one contract, and the choice between them."""

from __future__ import annotations

from .contract import Dropout, How, Kernel, Request
from .cpu_flash import CPU_FLASH
from .cuda import CUDA
from .eager import EAGER

# In the order of preference; the last one can always run.
KERNELS: tuple[Kernel, ...] = (CUDA, CPU_FLASH, EAGER)
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
    "Kernel",
    "Request",
    "check_kernel_name",
    "choose_kernel",
]
