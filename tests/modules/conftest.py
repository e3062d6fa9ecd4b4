"""Caches and pools of the process, which tests of memory options must have to themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dilated_attention_pytorch.core import (
    get_global_memory_pool,
    memory_pool,
    reset_global_memory_pool,
    reset_global_pattern_cache,
)
from dilated_attention_pytorch.core.host_memory import Memory


@pytest.fixture
def alone_on_a_large_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty caches and pools before and after, and memory enough for all that they keep."""
    monkeypatch.setattr(memory_pool, "host_memory", lambda: Memory(8 * 2**30, 16 * 2**30))
    reset_global_pattern_cache()
    reset_global_memory_pool()
    yield
    reset_global_pattern_cache()
    reset_global_memory_pool()
    get_global_memory_pool().enable_profiling = False
