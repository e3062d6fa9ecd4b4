"""Fresh memory for large results: a page fault per 2 MiB instead of one per 4 KiB, where Linux allows it."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

_MIN_BYTES = 4 * 2**20  # smaller blocks mostly come from memory that the process has touched before


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty` that asks for huge pages: PyTorch caches no CPU memory, so every call pays its faults."""
    x = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and x.nbytes >= _MIN_BYTES:
        _advise_huge_pages(x.data_ptr(), x.nbytes)
    return x


def _advise_huge_pages(address: int, nbytes: int) -> None:
    if _madvise is None:
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # Advice only: a kernel without huge pages refuses it, and nothing is lost.
    _madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE") else None
