"""Causal attention of the newest tokens of a stream: a cache of bounded size, or keys kept whole."""

from .attend import attend_last
from .cache import DilatedKVCache

__all__ = ["DilatedKVCache", "attend_last"]
