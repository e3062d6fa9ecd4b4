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
    from .attention_maps import attention_rows as attention_rows
    from .block_sparse import (
        block_sparse_attention as block_sparse_attention,
        build_block_pattern as build_block_pattern,
        create_dilated_block_mask as create_dilated_block_mask,
    )
    from .core import PersistentPatternCache as PersistentPatternCache
    from .decode import DilatedKVCache as DilatedKVCache, attend_last as attend_last
    from .factory import (
        choose_dilated_attention as choose_dilated_attention,
        create_block_sparse_attention as create_block_sparse_attention,
        create_dilated_attention as create_dilated_attention,
        create_multihead_dilated_attention as create_multihead_dilated_attention,
    )
    from .functional import dilated_attention as dilated_attention
    from .integrations.gigapath import LongNetViT as LongNetViT, LongNetViTConfig as LongNetViTConfig
    from .modules import (
        BlockSparseAdaptiveDilatedAttention as BlockSparseAdaptiveDilatedAttention,
        BlockSparseDilatedAttention as BlockSparseDilatedAttention,
        BlockSparseMultiheadDilatedAttention as BlockSparseMultiheadDilatedAttention,
        BlockSparseRingDilatedAttention as BlockSparseRingDilatedAttention,
        BlockSparseRingMultiheadDilatedAttention as BlockSparseRingMultiheadDilatedAttention,
        DilatedAttention as DilatedAttention,
        DilatedTransformerDecoderLayer as DilatedTransformerDecoderLayer,
        DilatedTransformerEncoderLayer as DilatedTransformerEncoderLayer,
        ImprovedDilatedAttention as ImprovedDilatedAttention,
        ImprovedDilatedAttentionV2 as ImprovedDilatedAttentionV2,
        ImprovedMultiheadDilatedAttention as ImprovedMultiheadDilatedAttention,
        LongNet as LongNet,
        LongNetConfig as LongNetConfig,
        LongNetDecoder as LongNetDecoder,
        LongNetDecoderConfig as LongNetDecoderConfig,
        LongNetEncoder as LongNetEncoder,
        LongNetEncoderConfig as LongNetEncoderConfig,
        LongNetLM as LongNetLM,
        LongNetLMConfig as LongNetLMConfig,
        MultiheadDilatedAttention as MultiheadDilatedAttention,
        RingAttentionConfig as RingAttentionConfig,
        RingDilatedAttentionProduction as RingDilatedAttentionProduction,
        RingDilatedAttentionV2 as RingDilatedAttentionV2,
        RingDilatedAttentionV3 as RingDilatedAttentionV3,
        RingMultiheadDilatedAttention as RingMultiheadDilatedAttention,
        magneto_gamma as magneto_gamma,
    )
    from .plan import BlockPattern as BlockPattern
    from .ring import (
        RingError as RingError,
        RingSchedule as RingSchedule,
        even_shards as even_shards,
        plan_ring as plan_ring,
        ring_block_sparse_attention as ring_block_sparse_attention,
        ring_dilated_attention as ring_dilated_attention,
        ring_traffic as ring_traffic,
        shard_bounds as shard_bounds,
        shard_positions as shard_positions,
        shard_sequence as shard_sequence,
        unshard_sequence as unshard_sequence,
    )
    from .spec import (
        DilatedSpec as DilatedSpec,
        Execution as Execution,
        SparsePatternConfig as SparsePatternConfig,
        branches_for as branches_for,
    )

__version__ = "0.1.0"


# Where the public names live, for the first use of each: the imports above, as data.
_MODULES = {
    "attention_maps": "attention_rows",
    "block_sparse": "block_sparse_attention build_block_pattern create_dilated_block_mask",
    "core": "PersistentPatternCache",
    "decode": "DilatedKVCache attend_last",
    "factory": (
        "choose_dilated_attention create_block_sparse_attention create_dilated_attention "
        "create_multihead_dilated_attention"
    ),
    "functional": "dilated_attention",
    "integrations.gigapath": "LongNetViT LongNetViTConfig",
    "modules": (
        "BlockSparseAdaptiveDilatedAttention BlockSparseDilatedAttention "
        "BlockSparseMultiheadDilatedAttention BlockSparseRingDilatedAttention "
        "BlockSparseRingMultiheadDilatedAttention DilatedAttention DilatedTransformerDecoderLayer "
        "DilatedTransformerEncoderLayer ImprovedDilatedAttention ImprovedDilatedAttentionV2 "
        "ImprovedMultiheadDilatedAttention LongNet LongNetConfig LongNetDecoder LongNetDecoderConfig "
        "LongNetEncoder LongNetEncoderConfig LongNetLM LongNetLMConfig MultiheadDilatedAttention "
        "RingAttentionConfig RingDilatedAttentionProduction RingDilatedAttentionV2 "
        "RingDilatedAttentionV3 RingMultiheadDilatedAttention magneto_gamma"
    ),
    "plan": "BlockPattern",
    "ring": (
        "RingError RingSchedule even_shards plan_ring ring_block_sparse_attention "
        "ring_dilated_attention ring_traffic shard_bounds shard_positions shard_sequence "
        "unshard_sequence"
    ),
    "spec": "DilatedSpec Execution SparsePatternConfig branches_for",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOMES)


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
