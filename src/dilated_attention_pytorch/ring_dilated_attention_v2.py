"""The module path of `RingDilatedAttentionV2`."""

from .modules import RingDilatedAttentionV2

__all__ = ["RingDilatedAttentionV2"]
