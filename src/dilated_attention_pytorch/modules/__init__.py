"""nn.Module skins over the functional doors; they hold options, no maths."""

from .adaptive import BlockSparseAdaptiveDilatedAttention
from .attention import DilatedAttention
from .block_sparse import BlockSparseDilatedAttention, BlockSparseRingDilatedAttention
from .multihead import (
    BlockSparseMultiheadDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
)
from .presets import ImprovedDilatedAttention, ImprovedDilatedAttentionV2

__all__ = [
    "BlockSparseAdaptiveDilatedAttention",
    "BlockSparseDilatedAttention",
    "BlockSparseMultiheadDilatedAttention",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "DilatedAttention",
    "ImprovedDilatedAttention",
    "ImprovedDilatedAttentionV2",
    "ImprovedMultiheadDilatedAttention",
    "MultiheadDilatedAttention",
]
