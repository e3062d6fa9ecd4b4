"""Where a call's memory comes from, by name: a custom op takes strings, not pools."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from .attention_buffer_manager import find_buffer_manager
from .memory_pool import get_global_memory_pool
from .workspace import Workspace

LendWorkspace = Callable[[torch.device], AbstractContextManager[Workspace]]
FRESH, POOL, LIGHTWEIGHT = "fresh", "pool", "lightweight"


def find_source(memory: str) -> LendWorkspace | None:
    """What lends the workspace of a call: the global pool, a buffer manager, or nothing for fresh memory.

    The name of a manager that is gone, or of another process as in an exported program, means fresh memory:
    that changes no result.
    """
    if memory == FRESH:
        return None
    if memory in (POOL, LIGHTWEIGHT):
        return partial(get_global_memory_pool().workspace, lightweight=memory == LIGHTWEIGHT)
    manager = find_buffer_manager(memory)
    return None if manager is None else manager.workspace


def retries(memory: str) -> bool:
    """Whether a call that runs out of memory of this source tries again: a buffer manager may say no."""
    manager = find_buffer_manager(memory)
    return manager is None or manager.retries


def check_memory(memory: str) -> None:
    """Validates the name of a source."""
    if memory in (FRESH, POOL, LIGHTWEIGHT):
        return
    if torch.compiler.is_compiling() and isinstance(memory, str):
        return  # the registry of managers cannot be traced
    if not isinstance(memory, str) or find_buffer_manager(memory) is None:
        raise ValueError(
            f"memory must be {FRESH!r}, {POOL!r}, {LIGHTWEIGHT!r} or a buffer manager's name, got {memory!r}"
        )
