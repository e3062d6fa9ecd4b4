"""nn.Module skins over the functional doors; they hold options, no maths."""

from .adaptive import BlockSparseAdaptiveDilatedAttention
from .attention import DilatedAttention
from .block_sparse import BlockSparseDilatedAttention, BlockSparseRingDilatedAttention
from .multihead import (
    BlockSparseMultiheadDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RingMultiheadDilatedAttention,
)
from .presets import ImprovedDilatedAttention, ImprovedDilatedAttentionV2
from .production import RingAttentionConfig, RingDilatedAttentionProduction
from .ring import RingDilatedAttentionV2, RingDilatedAttentionV3

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
    "RingAttentionConfig",
    "RingDilatedAttentionProduction",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionV3",
    "RingMultiheadDilatedAttention",
]
