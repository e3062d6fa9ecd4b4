"""The module path of `RingDilatedAttentionProduction`, with its configuration."""

from .modules import RingAttentionConfig, RingDilatedAttentionProduction

__all__ = ["RingAttentionConfig", "RingDilatedAttentionProduction"]
