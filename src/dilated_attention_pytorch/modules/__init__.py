"""nn.Modules around the public functions; they hold options, no maths."""

from .attention import DilatedAttention, ImprovedDilatedAttention, ImprovedDilatedAttentionV2
from .block_sparse import (
    BlockSparseAdaptiveDilatedAttention,
    BlockSparseDilatedAttention,
    BlockSparseRingDilatedAttention,
)
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
from .ring import (
    RingAttentionConfig,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
)
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
