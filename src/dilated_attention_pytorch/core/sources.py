"""Where a call's memory comes from, by name: a custom op takes strings, not pools."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import torch

from .attention_buffer_manager import find_buffer_manager
from .host_memory import describe_bytes, is_out_of_memory, out_of_memory
from .memory_pool import get_global_memory_pool
from .process import release_idle_memory
from .workspace import Workspace

LendWorkspace = Callable[[torch.device], AbstractContextManager[Workspace]]
_T = TypeVar("_T")
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


def run_with_memory(
    memory: str,
    workspace_bytes: int,
    device: torch.device,
    attend: Callable[[int, Workspace], _T],
) -> _T:
    """`attend(workspace_bytes, workspace)` with a workspace of the named source.

    A call with pooled memory that runs out of it frees all that is idle and tries again, then in smaller
    batches.
    """
    lend = find_source(memory)
    if lend is None:
        return attend(workspace_bytes, Workspace())
    if not retries(memory):
        with lend(device) as workspace:
            return attend(workspace_bytes, workspace)
    for size in (workspace_bytes, workspace_bytes, workspace_bytes // 8, workspace_bytes // 64):
        try:
            with lend(device) as workspace:
                return attend(max(1, size), workspace)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)  # or its frames would keep the failed call's tensors
        release_idle_memory()
    tried = f"after all idle buffers were freed and batches cut to {describe_bytes(size)}"
    raise out_of_memory(failure, device, tried) from failure


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
