"""The pattern cache of block-sparse attention: large values, so fewer of them."""

from __future__ import annotations

import threading
from typing import Any

from .pattern_cache import PatternCache

_shared: PersistentPatternCache | None = None
_lock = threading.Lock()


class PersistentPatternCache(PatternCache):
    """A `PatternCache` for block patterns, 100 by default, in memory; other options as there."""

    def __init__(self, max_size: int = 100, **options: Any) -> None:
        super().__init__(max_size, **options)


def get_block_pattern_cache() -> PersistentPatternCache:
    """The cache of block patterns and their schedules that all modules share, made at first use."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = PersistentPatternCache()
        return _shared
