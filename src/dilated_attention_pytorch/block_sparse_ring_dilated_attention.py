"""The block-sparse ring attention module, its pattern config and its pattern cache."""

from .core import PersistentPatternCache
from .modules import BlockSparseRingDilatedAttention
from .spec import SparsePatternConfig

__all__ = ["BlockSparseRingDilatedAttention", "PersistentPatternCache", "SparsePatternConfig"]
