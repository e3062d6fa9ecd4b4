"""HOW a tile attends: kernels that keep one contract, and the choice between them."""

from __future__ import annotations

from typing import get_args

import torch

from ..checks import one_of
from ..spec import KernelName
from .contract import Dropout, How, Kernel, Request
from .cpu_flash import CPU_FLASH
from .cuda import CUDA
from .eager import EAGER


def kernels_for(device: torch.device) -> tuple[Kernel, ...]:
    """The kernels of a device, in the order of preference; the last one can always run."""
    return (CUDA if device.type == "cuda" else CPU_FLASH), EAGER


def choose_kernel(request: Request, name: str = "auto") -> Kernel:
    """The first kernel that can run the request, or exactly the one named, or an error that says why not."""
    one_of("kernel", name, get_args(KernelName))
    for kernel in kernels_for(request.device):
        if name in ("auto", kernel.name):
            reason = kernel.why_not(request)
            if reason is None:
                return kernel
            if name != "auto":
                raise ValueError(f"kernel {name!r} cannot run this call: {reason}")
    raise AssertionError("the last kernel can always run")


__all__ = [
    "Dropout",
    "How",
    "Kernel",
    "Request",
    "choose_kernel",
    "kernels_for",
]
