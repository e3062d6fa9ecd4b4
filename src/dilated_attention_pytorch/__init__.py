"""Attention over sequences too long for dense attention: exact dilated attention for PyTorch.

The names below are imported when they are first used, so that `import dilated_attention_pytorch` and the
command line's help come without the seconds that torch takes. Where torch is imported first, the operators
that programs of `torch.export` call are registered at once; else with the first name that attends.
"""

import importlib
import importlib.util
import sys
import types
import typing
import warnings

if typing.TYPE_CHECKING:
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
        LongNetDecoderConfig,
        LongNetEncoder,
        LongNetEncoderConfig,
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
    from .spec import DilatedSpec, Execution, SparsePatternConfig, branches_for

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
    "Execution",
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
    "branches_for",
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

# Where the public names live, for the first use of each: the imports above, as data.
_MODULES: dict[str, tuple[str, ...]] = {
    "attention_maps": ("attention_rows",),
    "block_factory": ("create_block_sparse_attention",),
    "block_sparse": ("block_sparse_attention", "build_block_pattern"),
    "core": ("PersistentPatternCache",),
    "decode": ("DilatedKVCache", "attend_last"),
    "factory": ("choose_dilated_attention", "create_dilated_attention", "create_multihead_dilated_attention"),
    "functional": ("dilated_attention",),
    "modules": (
        "BlockSparseAdaptiveDilatedAttention",
        "BlockSparseDilatedAttention",
        "BlockSparseMultiheadDilatedAttention",
        "BlockSparseRingDilatedAttention",
        "BlockSparseRingMultiheadDilatedAttention",
        "DilatedAttention",
        "DilatedTransformerDecoderLayer",
        "DilatedTransformerEncoderLayer",
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
        "RingAttentionConfig",
        "RingDilatedAttentionProduction",
        "RingDilatedAttentionV2",
        "RingDilatedAttentionV3",
        "RingMultiheadDilatedAttention",
        "magneto_gamma",
    ),
    "plan": ("BlockPattern",),
    "ring": (
        "RingError",
        "RingSchedule",
        "even_shards",
        "plan_ring",
        "ring_block_sparse_attention",
        "ring_dilated_attention",
        "ring_traffic",
        "shard_bounds",
        "shard_positions",
        "shard_sequence",
        "unshard_sequence",
    ),
    "spec": ("DilatedSpec", "Execution", "SparsePatternConfig", "branches_for"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


# Hidden from type checkers, for which any name would exist otherwise.
if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            value = getattr(_import(_HOMES[name]), name)
            globals()[name] = value  # the next use comes straight here
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return _import(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def _import(module: str) -> types.ModuleType:
        with warnings.catch_warnings():
            # torch warns when it is imported without NumPy, which nothing here needs.
            warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
            return importlib.import_module(f".{module}", __name__)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


if sys.modules.get("torch") is not None:
    importlib.import_module(".ops", __name__)
