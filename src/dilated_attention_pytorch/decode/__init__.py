"""Causal attention of the newest tokens of a stream: a cache of bounded size, or keys kept whole."""

from .cache import DilatedKVCache
from .last import attend_last

__all__ = ["DilatedKVCache", "attend_last"]
