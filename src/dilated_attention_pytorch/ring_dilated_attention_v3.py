"""The module path of `RingDilatedAttentionV3`."""

from .modules import RingDilatedAttentionV3

__all__ = ["RingDilatedAttentionV3"]
