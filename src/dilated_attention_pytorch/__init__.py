"""Attention over sequences too long for dense attention: exact dilated attention for PyTorch."""

import warnings

with warnings.catch_warnings():
    # torch warns when it is imported without NumPy, which nothing here needs.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    from .attention_maps import attention_rows
    from .block_factory import create_block_sparse_attention
    from .block_sparse import block_sparse_attention, build_block_pattern
    from .core import PersistentPatternCache
    from .decode import DilatedKVCache, attend_last
    from .factory import (
        choose_dilated_attention,
        create_dilated_attention,
        create_multihead_dilated_attention,
    )
    from .functional import dilated_attention
    from .modules import (
        BlockSparseAdaptiveDilatedAttention,
        BlockSparseDilatedAttention,
        BlockSparseMultiheadDilatedAttention,
        BlockSparseRingDilatedAttention,
        BlockSparseRingMultiheadDilatedAttention,
        DilatedAttention,
        DilatedTransformerDecoderLayer,
        DilatedTransformerEncoderLayer,
        ImprovedDilatedAttention,
        ImprovedDilatedAttentionV2,
        ImprovedMultiheadDilatedAttention,
        LongNet,
        LongNetConfig,
        LongNetDecoder,
        LongNetEncoder,
        LongNetLM,
        LongNetLMConfig,
        LongNetViT,
        LongNetViTConfig,
        MultiheadDilatedAttention,
        RingAttentionConfig,
        RingDilatedAttentionProduction,
        RingDilatedAttentionV2,
        RingDilatedAttentionV3,
        RingMultiheadDilatedAttention,
        magneto_gamma,
    )
    from .plan import BlockPattern
    from .ring import (
        RingError,
        RingSchedule,
        even_shards,
        plan_ring,
        ring_block_sparse_attention,
        ring_dilated_attention,
        ring_traffic,
        shard_bounds,
        shard_positions,
        shard_sequence,
        unshard_sequence,
    )
    from .sparse_spec import SparsePatternConfig
    from .spec import DilatedSpec

__all__ = [
    "BlockPattern",
    "BlockSparseAdaptiveDilatedAttention",
    "BlockSparseDilatedAttention",
    "BlockSparseMultiheadDilatedAttention",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "DilatedAttention",
    "DilatedKVCache",
    "DilatedSpec",
    "DilatedTransformerDecoderLayer",
    "DilatedTransformerEncoderLayer",
    "ImprovedDilatedAttention",
    "ImprovedDilatedAttentionV2",
    "ImprovedMultiheadDilatedAttention",
    "LongNet",
    "LongNetConfig",
    "LongNetDecoder",
    "LongNetEncoder",
    "LongNetLM",
    "LongNetLMConfig",
    "LongNetViT",
    "LongNetViTConfig",
    "MultiheadDilatedAttention",
    "PersistentPatternCache",
    "RingAttentionConfig",
    "RingDilatedAttentionProduction",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionV3",
    "RingError",
    "RingMultiheadDilatedAttention",
    "RingSchedule",
    "SparsePatternConfig",
    "attend_last",
    "attention_rows",
    "block_sparse_attention",
    "build_block_pattern",
    "choose_dilated_attention",
    "create_block_sparse_attention",
    "create_dilated_attention",
    "create_multihead_dilated_attention",
    "dilated_attention",
    "even_shards",
    "magneto_gamma",
    "plan_ring",
    "ring_block_sparse_attention",
    "ring_dilated_attention",
    "ring_traffic",
    "shard_bounds",
    "shard_positions",
    "shard_sequence",
    "unshard_sequence",
]
__version__ = "0.1.0"
