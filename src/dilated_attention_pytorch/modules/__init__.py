"""nn.Module skins over the functional doors; they hold options, no maths."""

from .attention import DilatedAttention

__all__ = ["DilatedAttention"]
