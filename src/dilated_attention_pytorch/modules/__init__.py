"""nn.Modules around the public functions; they hold options, no maths."""

from .adaptive import BlockSparseAdaptiveDilatedAttention
from .attention import DilatedAttention, ImprovedDilatedAttention, ImprovedDilatedAttentionV2
from .block_sparse import BlockSparseDilatedAttention, BlockSparseRingDilatedAttention
from .longnet import LongNet, LongNetDecoder, LongNetEncoder, LongNetLM
from .longnet_config import LongNetConfig, LongNetDecoderConfig, LongNetEncoderConfig, LongNetLMConfig
from .multihead import (
    MULTIHEAD_KINDS,
    BlockSparseMultiheadDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    MultiheadModule,
    RingMultiheadDilatedAttention,
)
from .parts import DenseAttention, FeedForward, magneto_gamma
from .positions import RotaryEmbedding, XPos
from .production import RingAttentionConfig, RingDilatedAttentionProduction
from .ring import RingDilatedAttentionV2, RingDilatedAttentionV3
from .transformer import DilatedTransformerDecoderLayer, DilatedTransformerEncoderLayer

__all__ = [
    "MULTIHEAD_KINDS",
    "BlockSparseAdaptiveDilatedAttention",
    "BlockSparseDilatedAttention",
    "BlockSparseMultiheadDilatedAttention",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "DenseAttention",
    "DilatedAttention",
    "DilatedTransformerDecoderLayer",
    "DilatedTransformerEncoderLayer",
    "FeedForward",
    "ImprovedDilatedAttention",
    "ImprovedDilatedAttentionV2",
    "ImprovedMultiheadDilatedAttention",
    "LongNet",
    "LongNetConfig",
    "LongNetDecoder",
    "LongNetDecoderConfig",
    "LongNetEncoder",
    "LongNetEncoderConfig",
    "LongNetLM",
    "LongNetLMConfig",
    "MultiheadDilatedAttention",
    "MultiheadModule",
    "RingAttentionConfig",
    "RingDilatedAttentionProduction",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionV3",
    "RingMultiheadDilatedAttention",
    "RotaryEmbedding",
    "XPos",
    "magneto_gamma",
]
