"""When memory runs out: what is idle goes first, and an error says what was asked for and what there is."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from .host_memory import asked_bytes, describe_bytes, device_memory, is_out_of_memory

if TYPE_CHECKING:
    from .memory_pool import MemoryPool

LOGGER = logging.getLogger("dilated_attention_pytorch")
_T = TypeVar("_T")
POOLS: weakref.WeakSet[MemoryPool] = weakref.WeakSet()  # of this process
POOLS_LOCK = threading.Lock()  # a set that grows cannot be iterated


def release_idle_memory() -> int:
    """The emergency cleanup: frees what is idle in all pools and torch's caches; returns the pools' bytes."""
    with POOLS_LOCK:
        pools = list(POOLS)
    gc.collect()
    freed = sum(pool.clear() for pool in pools)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    LOGGER.debug("out of memory: %d idle bytes freed", freed)
    return freed


def out_of_memory(error: BaseException, device: torch.device, tried: str) -> torch.OutOfMemoryError:
    """The error to raise when nothing helped: what was asked, what there is, what was tried."""
    memory = device_memory(device)
    available = describe_bytes(None if memory is None else memory.available)
    return torch.OutOfMemoryError(
        f"out of memory on {device}: {describe_bytes(asked_bytes(error))} were asked for, {available} "
        f"available, {tried}"
    )


def with_relief(make: Callable[[], _T], device: torch.device) -> _T:
    """Calls `make`, and after running out of memory once more when all pools gave up what they could."""
    try:
        return make()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    release_idle_memory()
    try:
        return make()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # Without its traceback, whose frames would keep the tensors of the callers.
        failure = error.with_traceback(None)
        raise out_of_memory(failure, device, "after all idle buffers were freed") from failure
