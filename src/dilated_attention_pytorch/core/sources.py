"""Where a call's memory comes from, by name: a custom op takes strings, not pools."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TypeVar

import torch

from .attention_buffer_manager import AttentionBufferManager, find_buffer_manager
from .host_memory import describe_bytes
from .memory_pool import get_global_memory_pool
from .process import with_relief
from .workspace import Workspace

_T = TypeVar("_T")
FRESH, POOL, LIGHTWEIGHT = "fresh", "pool", "lightweight"


@lru_cache(maxsize=2)
def _of_global_pool(lightweight: bool) -> AttentionBufferManager:
    return AttentionBufferManager(pool=get_global_memory_pool(), lightweight=lightweight)


def find_source(memory: str) -> AttentionBufferManager | None:
    """What lends the workspace of a call: a buffer manager, that of the global pool, or None: fresh memory.

    The name of a manager that is gone, or of another process as in an exported program, means fresh memory:
    that changes no result.
    """
    if memory in (POOL, LIGHTWEIGHT):
        return _of_global_pool(memory == LIGHTWEIGHT)
    return find_buffer_manager(memory)


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
    source = find_source(memory)
    if source is None:
        return attend(workspace_bytes, Workspace())

    def attend_in(size: int) -> _T:
        with source.workspace(device) as workspace:
            return attend(size, workspace)

    if not source.retries:
        return attend_in(workspace_bytes)
    sizes = [max(1, workspace_bytes // part) for part in (1, 1, 8, 64)]
    tried = f" and batches cut to {describe_bytes(sizes[-1])}"
    return with_relief([partial(attend_in, size) for size in sizes], device, tried)


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
