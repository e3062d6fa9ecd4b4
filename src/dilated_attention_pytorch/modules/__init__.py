"""nn.Module skins over the functional doors; they hold options, no maths."""

from .attention import DilatedAttention
from .presets import ImprovedDilatedAttention, ImprovedDilatedAttentionV2

__all__ = ["DilatedAttention", "ImprovedDilatedAttention", "ImprovedDilatedAttentionV2"]
