"""A valid call of each public function and class, and what each of its arguments must refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dilated_attention_pytorch as package
from dilated_attention_pytorch import core, modules
from dilated_attention_pytorch.integrations.gigapath import gigapath_segment_lengths
from dilated_attention_pytorch.modules.parts import DropPath
from dilated_attention_pytorch.modules.sampling import Sampling

from . import bad_values as bad

X = torch.randn(1, 16, 2, 4)
TOKENS = torch.arange(16)[None] % 7
EMBEDDED = torch.randn(1, 16, 8)
MASK = torch.ones(1, 16, dtype=torch.bool)
BRANCHES: dict[str, Any] = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
CONFIG = {"pattern_type": "local_window", "block_size": 4, "sparsity_ratio": 0.5}
ADAPTIVE = {"pattern_type": "adaptive", "block_size": 4}
PATTERN = package.build_block_pattern(CONFIG, 16, 2)
KV = {"batch_size": 1, "num_kv_heads": 2, "head_dim": 4}
MODEL: dict[str, Any] = {"d_model": 8, "nhead": 2, "dim_feedforward": 8, **BRANCHES}

# The kind of an argument, by its name; entries name the exceptions.
NAMES: dict[Callable[[Any], bad.Bad], str] = {
    bad.size: (
        "n max_length num_heads num_kv_heads first ratio head_dim block_size window_size steps "
        "embed_dim d_model nhead dim_feedforward num_layers num_encoder_layers num_decoder_layers "
        "vocab_size in_chans depth slide_ngrids tile_size max_wsi_size seq_len ring_size batch_size "
        "max_new_tokens prefill_chunk top_k num_ranks workspace_bytes size max_size max_bytes "
        "keep_after scorer_dim pixels num_processes alignment"
    ),
    bad.count: "n_local global_tokens memory_pool_size pool_size seed pad_token",
    bad.flag: (
        "is_causal allow_isolated_segments detach_mixing return_lse use_pattern_cache enable_memory_pool "
        "lightweight_pool zero_init pinned numa "
        "enable_profiling enable_buffer_manager enable_buffer_reuse enable_preallocation enable_reuse "
        "lightweight retries bias layer_norm batch_first fused_qkv sub_layer_norm normalize_output "
        "checkpoint_activations tie_embeddings global_pool need_weights do_sample masked auto_tune "
        "cache_on_gpu is_decoder return_all use_gradient_checkpointing enable_error_recovery "
        "log_memory_usage mixed_precision prefer_bucketed prefer_numa prefer_pinned all_layer_embed "
        "tgt_is_causal memory_is_causal src_is_causal aggressive"
    ),
    bad.number: "scale softmax_scale final_temperature",
    bad.positive: (
        "layer_norm_eps gamma_init rotary_base xpos_scale_base temperature typical_size_mb base timeout "
        "sparsity_ratio"
    ),
    bad.probability: (
        "dropout dropout_p attention_dropout activation_dropout drop_path drop_path_rate p top_p"
    ),
    bad.choice: (
        "head_mixing head_offsets tail kernel memory_source strategy activation kind variant preset "
        "pattern_type reuse_frequency lifetime buffer_type hierarchy position_encoding "
        "cross_attention fit"
    ),
    bad.integers: "segment_lengths dilation_rates",
    bad.lists: "starts lengths shard_lengths",
    bad.without(bad.lists, "too many"): "rows index",
    bad.bounds: "cu_seqlens",
    bad.tokens: "stop_tokens",
    bad.dims: "dim",
    bad.shapes: "shape",
    bad.device: "device",
    bad.dtype: "dtype",
    bad.anything: "pattern config execution group cache caches attention buffer_manager pool",
    bad.mapping: "sparse_config attention_options custom_configs",
    bad.tensor: "q k v x query key value src tgt coords prompt tokens memory columns layout",
    bad.without(bad.tensor, "more dimensions"): "positions",
    bad.mask: (
        "key_mask attention_mask key_padding_mask src_key_padding_mask tgt_key_padding_mask "
        "memory_key_padding_mask padding_mask attn_mask src_mask"
    ),
}
KINDS = {name: kind for kind, names in NAMES.items() for name in names.split()}
# What tensors are right that a valid call leaves out.
RIGHT = {name: MASK for name in KINDS if name.endswith("mask")}
RIGHT |= dict.fromkeys(("attn_mask", "src_mask"), torch.ones(16, 16).triu(1) > 0)
RIGHT |= {**dict.fromkeys(("key", "value", "tgt"), EMBEDDED), "positions": torch.arange(16)}


class Entry(NamedTuple):
    """A valid call by keywords; `more` are arguments that it leaves out, which have a default."""

    call: Callable[..., Any]
    valid: Mapping[str, Any]
    more: str = ""
    kinds: Mapping[str, Callable[[Any], bad.Bad]] = {}  # of this entry alone

    def cases(self) -> list[tuple[str, str, Any]]:
        found = []
        for name in (*self.valid, *self.more.split()):
            kind = self.kinds.get(name) or KINDS[name]
            values = kind(self.valid.get(name, RIGHT.get(name)))
            found += [(name, label, each) for label, each in values.items()]
        return found


class Named(NamedTuple):
    """An entry whose name in the table, up to a bracket, says what is called, or made and called."""

    valid: Mapping[str, Any]
    more: str
    kinds: Mapping[str, Callable[[Any], bad.Bad]]
    settings: Mapping[str, Any] | None = None

    def entry(self, name: str) -> Entry:
        named = name.partition("(")[0]
        found = next(getattr(room, named) for room in (package, modules, core) if hasattr(room, named))
        if self.settings is None:
            return Entry(found, self.valid, self.more, self.kinds)
        return Entry(lambda **call: found(**self.settings).eval()(**call), self.valid, self.more, self.kinds)


def of(valid: Mapping[str, Any], more: str = "", **kinds: Callable[[Any], bad.Bad]) -> Named:
    return Named(valid, more, kinds)


def made(settings: Mapping[str, Any], valid: Mapping[str, Any], more: str = "", **kinds: Any) -> Named:
    """A module that is made, then called."""
    return Named(valid, more, kinds, settings)


def a_model() -> Any:
    torch.manual_seed(0)
    return package.LongNetLM(7, num_layers=1, **MODEL).eval()


def attend_once(**call: Any) -> Tensor:
    with torch.no_grad():
        return package.DilatedKVCache(**BRANCHES, **KV).attend(**call)


QKV = {"q": X, "k": X, "v": X}
INPUTS = {"query": X, "key": X, "value": X}
HEADS = {"embed_dim": 8, "num_heads": 2}
SPEC = "scale head_mixing head_offsets"
POOLING = "enable_memory_pool enable_profiling lightweight_pool use_pattern_cache"
MODULE = (
    f"softmax_scale attention_dropout {POOLING} allow_isolated_segments kernel workspace_bytes device dtype"
)
MULTI = (
    "bias layer_norm layer_norm_eps gamma_init batch_first num_kv_heads position_encoding "
    "rotary_base device dtype"
)
LAYER = (
    "dropout activation layer_norm_eps attention_dropout activation_dropout drop_path "
    "sub_layer_norm gamma_init"
)
STACK = (
    "dropout drop_path_rate layer_norm_eps sub_layer_norm normalize_output gamma_init checkpoint_activations"
)
SETTINGS = (
    f"max_length {STACK} attention_dropout activation_dropout activation num_kv_heads kind position_encoding"
)
RINGS = "group timeout ring_size strategy"
CALL = "is_causal attention_mask"
any_dtype = bad.without(bad.dtype, "integers", "a tensor")
not_longer = bad.without(bad.tensor, "longer")

FUNCTIONS: dict[str, Entry | Named] = {
    "branches_for": of({"max_length": 64}, "num_heads first ratio"),
    "DilatedSpec": of(BRANCHES, f"is_causal dropout_p tail detach_mixing {SPEC}"),
    "Execution": of(
        {}, "kernel workspace_bytes memory use_pattern_cache", memory=bad.without(bad.choice, "a word")
    ),  # managers have names: calls look for them
    "dilated_attention": of(
        {**QKV, **BRANCHES},
        f"is_causal dropout_p tail detach_mixing return_lse execution {SPEC} key_mask cu_seqlens",
    ),
    "ring_dilated_attention": of(
        {**QKV, **BRANCHES}, "is_causal dropout_p group strategy timeout shard_lengths execution key_mask"
    ),
    "block_sparse_attention": of(
        {**QKV, "pattern": PATTERN}, "is_causal scale dropout_p return_lse execution key_mask"
    ),
    "ring_block_sparse_attention": of(
        {**QKV, "pattern": PATTERN}, "is_causal scale dropout_p return_lse group timeout execution key_mask"
    ),
    "build_block_pattern": of(
        {"config": CONFIG, "n": 16, "num_heads": 2}, "is_causal segment_lengths dilation_rates"
    ),
    "build_block_pattern(adaptive)": of(
        {"config": ADAPTIVE, "n": 16, "num_heads": 2, "query": X, "key": X}, "key_mask"
    ),
    "create_dilated_block_mask": of(
        {"n": 16, **BRANCHES}, "is_causal window_size num_heads block_size device"
    ),
    "SparsePatternConfig": of(
        {},
        "pattern_type sparsity_ratio block_size window_size global_tokens hierarchy seed",
        seed=bad.without(bad.count, "2**62"),
    ),
    "BlockPattern": of(
        {"n": 16, "block_size": 4, "starts": PATTERN.starts, "columns": PATTERN.columns},
        "is_causal",
        starts=bad.tensor,
    ),
    "BlockPattern.from_layout": Entry(
        package.BlockPattern.from_layout,
        {"layout": torch.ones(4, 4) > 0, "n": 16, "block_size": 4},
        "is_causal",
        {"layout": bad.without(bad.tensor, "more dimensions")},
    ),
    "BlockPattern.to_block_mask": Entry(PATTERN.to_block_mask, {}, "num_heads device"),
    "BlockPattern.draw": Entry(
        lambda **call: PATTERN.draw("/dev/null", **call),
        {},
        "layout pixels",
        {"layout": lambda _: {**bad.NO_NUMBER, **bad.NO_FINITE, **bad.HUGE, "negative": -1}},
    ),
    "attention_rows": of(
        {"q": X, "k": X, "rows": [1, 2], **BRANCHES}, f"is_causal tail {SPEC} key_mask cu_seqlens"
    ),
    "attend_last": of({**QKV, **BRANCHES}, f"starts {SPEC} kernel workspace_bytes"),
    "DilatedKVCache": of({**BRANCHES, **KV}, f"num_heads {SPEC} kernel workspace_bytes device dtype"),
    "DilatedKVCache.attend": Entry(attend_once, QKV, "lengths"),
    "DilatedKVCache.reorder": Entry(package.DilatedKVCache(**BRANCHES, **KV).reorder, {"index": [0]}),
    "plan_ring": of(
        {**BRANCHES, "n": 16, "num_ranks": 2, "num_heads": 2, "head_dim": 4},
        "num_kv_heads batch_size dtype is_causal head_mixing head_offsets cu_seqlens strategy masked "
        "return_lse workspace_bytes steps shard_lengths",
        cu_seqlens=bad.lists,
    ),
    "even_shards": of({"n": 10, "size": 2}, n=bad.count),
    "shard_bounds": of({"n": 16}, "group shard_lengths", n=bad.count),
    "shard_sequence": of({"x": X}, "dim group shard_lengths", x=bad.sequences),
    "unshard_sequence": of({"x": X}, "dim group timeout", x=bad.sequences),
    "shard_positions": of({"n_local": 4}, "group device timeout"),
    "ring_traffic": of({}, "group"),
    "magneto_gamma": of(
        {"num_encoder_layers": 2, "num_decoder_layers": 2},
        "is_decoder",
        **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), bad.count),
    ),
    "gigapath_segment_lengths": Entry(gigapath_segment_lengths, {"max_wsi_size": 2**18, "tile_size": 256}),
    "create_dilated_attention": of({"kind": "standard", **BRANCHES}, f"seq_len {MODULE}"),
    "create_dilated_attention(distributed)": of({"kind": "distributed", **BRANCHES}, f"ring_size {POOLING}"),
    "choose_dilated_attention": of({"kind": "auto", **BRANCHES}, "seq_len device"),
    "create_multihead_dilated_attention": of(
        {"kind": "auto", **HEADS, **BRANCHES}, f"seq_len {MULTI} {POOLING}"
    ),
    "create_block_sparse_attention": of(
        {"variant": "auto"},
        "preset sparsity_ratio block_size pattern_type sparse_config segment_lengths dilation_rates "
        f"{MODULE}",
    ),
}
MODULES: dict[str, Entry | Named] = {
    "DilatedAttention": of(BRANCHES, f"dropout tail detach_mixing head_mixing head_offsets {MODULE}"),
    "DilatedAttention()": made(BRANCHES, INPUTS, CALL),
    "ImprovedDilatedAttention": of(BRANCHES, MODULE),
    "ImprovedDilatedAttentionV2": of(
        BRANCHES, f"enable_buffer_manager enable_buffer_reuse enable_preallocation buffer_manager {POOLING}"
    ),
    "RingDilatedAttentionV2": of(BRANCHES, f"{RINGS} {MODULE}"),
    "RingDilatedAttentionV2.get_memory_estimate": Entry(
        package.RingDilatedAttentionV2(**BRANCHES).get_memory_estimate,
        {"seq_len": 64},
        "batch_size num_heads head_dim dtype num_kv_heads num_processes",
    ),
    "RingDilatedAttentionV3": of(BRANCHES, "cache_on_gpu", cache_on_gpu=bad.optional(bad.flag)),
    "RingAttentionConfig": of(
        BRANCHES,
        "dropout ring_size timeout strategy use_gradient_checkpointing memory_pool_size "
        "enable_error_recovery mixed_precision log_memory_usage",
    ),
    "RingDilatedAttentionProduction": of(
        BRANCHES, "config enable_memory_pool lightweight_pool group memory_pool_size softmax_scale"
    ),
    "BlockSparseDilatedAttention": of({"sparse_config": CONFIG, **BRANCHES}, MODULE),
    "BlockSparseDilatedAttention()": made({"sparse_config": CONFIG}, INPUTS, CALL),
    "BlockSparseDilatedAttention.attention_weights": Entry(
        package.BlockSparseDilatedAttention(sparse_config=CONFIG).attention_weights,
        {"query": X, "key": X},
        CALL,
    ),
    "BlockSparseRingDilatedAttention": of({"sparse_config": CONFIG, **BRANCHES}, "ring_size group timeout"),
    "BlockSparseAdaptiveDilatedAttention": of(
        {**BRANCHES, "sparse_config": ADAPTIVE},
        "scorer_dim temperature final_temperature num_heads head_dim",
        temperature=bad.number,
    ),
    "BlockSparseAdaptiveDilatedAttention()": made({**BRANCHES, "sparse_config": ADAPTIVE}, INPUTS, CALL),
    "MultiheadDilatedAttention": of({**HEADS, **BRANCHES}, f"dropout xpos_scale_base {MULTI} {POOLING}"),
    "MultiheadDilatedAttention()": made(
        {**HEADS, **BRANCHES, "position_encoding": "rotary"},
        {"query": EMBEDDED},
        "need_weights is_causal cache lengths key_padding_mask attn_mask positions",
    ),
    "MultiheadDilatedAttention.attention_rows": Entry(
        package.MultiheadDilatedAttention(8, 2, **BRANCHES).attention_rows,
        {"query": EMBEDDED, "rows": [1]},
        "is_causal key_padding_mask",
    ),
    "MultiheadDilatedAttention.make_cache": Entry(
        package.MultiheadDilatedAttention(8, 2, **BRANCHES).make_cache, {"batch_size": 1}, "device dtype"
    ),
    "ImprovedMultiheadDilatedAttention()": made(
        {**HEADS, **BRANCHES}, {"query": EMBEDDED}, "key value key_padding_mask"
    ),
    "RingMultiheadDilatedAttention": of({**HEADS, **BRANCHES}, RINGS),
    "BlockSparseMultiheadDilatedAttention": of({**HEADS, "sparse_config": CONFIG}, MULTI),
    "BlockSparseRingMultiheadDilatedAttention()": made(
        {**HEADS, "sparse_config": CONFIG}, {"query": EMBEDDED}, "need_weights is_causal key_padding_mask"
    ),
    "DenseAttention()": made({}, INPUTS, CALL),
    "DropPath": Entry(DropPath, {"p": 0.1}, "batch_first"),
    "FeedForward": of(
        {"d_model": 8, "dim_feedforward": 8},
        "dropout activation_dropout activation layer_norm layer_norm_eps gamma_init device dtype",
    ),
    "RotaryEmbedding": of({"head_dim": 4}, "base"),
    "XPos": of({"head_dim": 4}, "segment_lengths base"),
    "DilatedTransformerEncoderLayer": of(
        MODEL, f"{LAYER} num_kv_heads kind position_encoding batch_first device dtype {POOLING}"
    ),
    "DilatedTransformerEncoderLayer()": made(
        MODEL, {"src": EMBEDDED}, "is_causal cache src_key_padding_mask src_mask"
    ),
    "DilatedTransformerDecoderLayer": of(
        MODEL, f"{LAYER} cross_attention num_kv_heads kind batch_first device dtype"
    ),
    "DilatedTransformerDecoderLayer()": made(
        MODEL,
        {"tgt": EMBEDDED, "memory": EMBEDDED},
        "tgt_is_causal memory_is_causal cache tgt_key_padding_mask memory_key_padding_mask",
    ),
}
MODELS: dict[str, Entry | Named] = {
    "LongNetEncoder": of({**MODEL, "num_layers": 1}, f"{STACK} device dtype"),
    "LongNetEncoder()": made(
        {**MODEL, "num_layers": 1}, {"x": EMBEDDED}, "is_causal return_all caches key_padding_mask"
    ),
    "LongNetDecoder": of({**MODEL, "num_layers": 1}, f"cross_attention {POOLING} {STACK}"),
    "LongNet": of(
        {**MODEL, "num_encoder_layers": 1, "num_decoder_layers": 1},
        f"cross_attention attention_options {SETTINGS} {POOLING} device dtype",
    ),
    "LongNet()": made(
        {**MODEL, "num_encoder_layers": 1, "num_decoder_layers": 1},
        {"src": EMBEDDED},
        "src_is_causal tgt_is_causal tgt src_key_padding_mask",
    ),
    **{
        name: of(MODEL, SETTINGS)
        for name in ("LongNetConfig", "LongNetEncoderConfig", "LongNetDecoderConfig")
    },
    "LongNetLMConfig": of(
        {**MODEL, "vocab_size": 7}, f"num_layers tie_embeddings pad_token attention_options {SETTINGS}"
    ),
    "LongNetViTConfig": of(MODEL, f"num_layers in_chans slide_ngrids global_pool {SETTINGS}"),
    "LongNetLM": of(
        {**MODEL, "vocab_size": 7, "num_layers": 1},
        f"tie_embeddings pad_token attention_options {SETTINGS} {POOLING} device dtype",
    ),
    "LongNetLM()": Entry(
        lambda **call: a_model()(**call),
        {"tokens": TOKENS},
        "caches key_padding_mask",
        {"tokens": not_longer},
    ),
    "LongNetLM.generate": Entry(
        lambda **call: a_model().generate(**call),
        {"prompt": TOKENS, "max_new_tokens": 1, "do_sample": True},
        "temperature top_k top_p seed stop_tokens prefill_chunk lengths",
        {"prompt": not_longer, "seed": bad.without(bad.count, "2**62", "2**70", "a list")},
    ),
    "LongNetLM.make_caches": Entry(lambda **call: a_model().make_caches(**call), {"batch_size": 1}),
    "Sampling": Entry(Sampling, {"do_sample": True}, "temperature top_k top_p"),
    "LongNetViT": of(
        {"in_chans": 6, "embed_dim": 8, "depth": 1, "nhead": 2, **BRANCHES},
        f"dim_feedforward slide_ngrids tile_size global_pool dropout drop_path_rate dtype {POOLING}",
    ),
    "LongNetViT()": made(
        {"in_chans": 6, "embed_dim": 8, "depth": 1, "nhead": 2, **BRANCHES},
        {"x": torch.randn(1, 16, 6), "coords": torch.zeros(1, 16, 2)},
        "all_layer_embed padding_mask",
        coords=bad.without(bad.tensor, "of another kind"),
    ),
}
CORE: dict[str, Entry | Named] = {
    "PersistentPatternCache": of({}, "max_size max_bytes keep_after auto_tune cache_on_gpu enable_profiling"),
    "PatternCache.resize": Entry(core.PatternCache().resize, {"max_size": 4}),
    "MemoryPool": of({}, "max_bytes pool_size enable_profiling"),
    "MemoryPool.allocate": Entry(
        core.MemoryPool().allocate,
        {"shape": (4,)},
        "dtype device zero_init fit alignment pinned numa tag",
        {"dtype": any_dtype, "tag": lambda _: {"a number": 7, "a list": ["x"]}},
    ),
    "AttentionBufferManager": of(
        {}, "enable_reuse enable_preallocation lightweight enable_profiling retries pool custom_configs"
    ),
    "create_attention_buffer_manager": of({}, "enable_reuse enable_preallocation lightweight"),
    "AttentionBufferManager.allocate": Entry(
        core.AttentionBufferManager().allocate,
        {"buffer_type": "query", "shape": (4,)},
        "dtype device zero_init",
        {"dtype": any_dtype, "zero_init": bad.optional(bad.flag)},
    ),
    "AttentionBufferManager.preallocate_buffers": Entry(
        core.AttentionBufferManager().preallocate_buffers,
        {"batch_size": 1, "seq_len": 4, "num_heads": 2, "head_dim": 4},
        "device",
    ),
    "BufferConfig": of(
        {"typical_size_mb": 1.0, "reuse_frequency": "high", "lifetime": "forward"},
        "prefer_bucketed prefer_numa prefer_pinned zero_init alignment",
    ),
}
ENTRIES = {
    name: each if isinstance(each, Entry) else each.entry(name)
    for name, each in {**FUNCTIONS, **MODULES, **MODELS, **CORE}.items()
}
