"""The module path of `ImprovedDilatedAttentionV2`."""

from .modules import ImprovedDilatedAttentionV2

__all__ = ["ImprovedDilatedAttentionV2"]
