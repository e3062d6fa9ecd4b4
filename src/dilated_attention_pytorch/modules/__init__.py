"""nn.Module skins over the functional doors; they hold options, no maths."""

from .adaptive import BlockSparseAdaptiveDilatedAttention
from .attention import DilatedAttention
from .block_sparse import BlockSparseDilatedAttention, BlockSparseRingDilatedAttention
from .dense import DenseAttention
from .feed_forward import FeedForward, magneto_gamma
from .longnet import LongNet, LongNetLM
from .longnet_config import LongNetConfig, LongNetDecoderConfig, LongNetEncoderConfig, LongNetLMConfig
from .longnet_stack import LongNetDecoder, LongNetEncoder
from .longnet_vit import LongNetViT
from .longnet_vit_config import LongNetViTConfig, gigapath_segment_lengths
from .multihead import (
    MULTIHEAD_KINDS,
    BlockSparseMultiheadDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RingMultiheadDilatedAttention,
)
from .multihead_skin import MultiheadSkin
from .positions import RotaryEmbedding, XPos
from .presets import ImprovedDilatedAttention, ImprovedDilatedAttentionV2
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
    "LongNetViT",
    "LongNetViTConfig",
    "MultiheadDilatedAttention",
    "MultiheadSkin",
    "RingAttentionConfig",
    "RingDilatedAttentionProduction",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionV3",
    "RingMultiheadDilatedAttention",
    "RotaryEmbedding",
    "XPos",
    "gigapath_segment_lengths",
    "magneto_gamma",
]
