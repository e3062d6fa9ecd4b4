"""A valid call of each public function and class, and what each of its arguments must refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dilated_attention_pytorch as package
from dilated_attention_pytorch import core, modules
from dilated_attention_pytorch.checks import keyword_names
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


def room_name(name: str) -> Any:
    """What a public name, or one of a room, stands for."""
    return next(getattr(room, name) for room in (package, modules, core) if hasattr(room, name))


def keywords(call: Callable[..., Any]) -> frozenset[str]:
    return keyword_names(call) if isinstance(call, type) else frozenset(signature(call).parameters)


class Entry(NamedTuple):
    """A valid call by keywords; all that have a kind are tried, also those that it leaves out.

    `more` names arguments that a signature does not show, or classes to which they are handed on.
    """

    call: Callable[..., Any]
    valid: Mapping[str, Any]
    more: str = ""
    kinds: Mapping[str, Callable[[Any], bad.Bad]] = {}  # of this entry alone
    shown: Callable[..., Any] | None = None  # by which signature, if not the call's own

    def cases(self) -> list[tuple[str, str, Any]]:
        known = {*KINDS, *self.kinds}
        names = set(keywords(self.shown or self.call))
        for each in self.more.split():
            names |= {each} if each in known else keywords(room_name(each))
        found = []
        for name in (*self.valid, *sorted(names & known - {*self.valid})):
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
        found = room_name(name.partition("(")[0])
        if self.settings is None:
            return Entry(found, self.valid, self.more, self.kinds)
        call = lambda **call: found(**self.settings).eval()(**call)  # noqa: E731
        return Entry(call, self.valid, self.more, self.kinds, found.forward)


def of(valid: Mapping[str, Any], more: str = "", **kinds: Callable[[Any], bad.Bad]) -> Named:
    return Named(valid, more, kinds)


def made(settings: Mapping[str, Any], valid: Mapping[str, Any], **kinds: Any) -> Named:
    """A module that is made, then called."""
    return Named(valid, "", kinds, settings)


def a_model() -> Any:
    torch.manual_seed(0)
    return package.LongNetLM(7, num_layers=1, **MODEL).eval()


def attend_once(**call: Any) -> Tensor:
    with torch.no_grad():
        return package.DilatedKVCache(**BRANCHES, **KV).attend(**call)


QKV = {"q": X, "k": X, "v": X}
INPUTS = {"query": X, "key": X, "value": X}
HEADS = {"embed_dim": 8, "num_heads": 2}
BLOCKS = {"n": 16, "block_size": 4}
VIT: dict[str, Any] = {"in_chans": 6, "embed_dim": 8, "depth": 1, "nhead": 2, **BRANCHES}
any_dtype = bad.without(bad.dtype, "integers", "a tensor")
not_longer = bad.without(bad.tensor, "longer")
any_seed = bad.without(bad.count, "2**62", "2**70", "a list")

FUNCTIONS: dict[str, Entry | Named] = {
    "branches_for": of({"max_length": 64}),
    "DilatedSpec": of(BRANCHES),
    "Execution": of({}, memory=bad.without(bad.choice, "a word")),  # managers have names: calls look for them
    "dilated_attention": of({**QKV, **BRANCHES}),
    "ring_dilated_attention": of({**QKV, **BRANCHES}),
    "block_sparse_attention": of({**QKV, "pattern": PATTERN}),
    "ring_block_sparse_attention": of({**QKV, "pattern": PATTERN}),
    "build_block_pattern": of(
        {"config": CONFIG, "n": 16, "num_heads": 2}, query=bad.nothing, key=bad.nothing
    ),
    "build_block_pattern(adaptive)": of({"config": ADAPTIVE, "n": 16, "num_heads": 2, "query": X, "key": X}),
    "create_dilated_block_mask": of({"n": 16, **BRANCHES}),
    "SparsePatternConfig": of({}, seed=bad.without(bad.count, "2**62")),
    "BlockPattern": of({**BLOCKS, "starts": PATTERN.starts, "columns": PATTERN.columns}, starts=bad.tensor),
    "BlockPattern.from_layout": Entry(
        package.BlockPattern.from_layout,
        {"layout": torch.ones(4, 4) > 0, **BLOCKS},
        kinds={"layout": bad.without(bad.tensor, "more dimensions")},
    ),
    "BlockPattern.to_block_mask": Entry(
        PATTERN.to_block_mask,
        {"key_mask": torch.ones(2, 16) > 0},
        kinds={"key_mask": bad.mask},
    ),
    "BlockPattern.draw": Entry(
        lambda **call: PATTERN.draw("/dev/null", **call),
        {},
        kinds={"layout": lambda _: {**bad.NO_NUMBER, **bad.NO_FINITE, **bad.HUGE, "negative": -1}},
        shown=PATTERN.draw,
    ),
    "attention_rows": of({"q": X, "k": X, "rows": [1, 2], **BRANCHES}),
    "attend_last": of({**QKV, **BRANCHES}),
    "DilatedKVCache": of({**BRANCHES, **KV}),
    "DilatedKVCache.attend": Entry(attend_once, QKV, shown=package.DilatedKVCache.attend),
    "DilatedKVCache.reorder": Entry(package.DilatedKVCache(**BRANCHES, **KV).reorder, {"index": [0]}),
    "plan_ring": of(
        {**BRANCHES, "n": 16, "num_ranks": 2, "num_heads": 2, "head_dim": 4}, cu_seqlens=bad.lists
    ),
    "even_shards": of({"n": 10, "size": 2}, n=bad.count),
    "shard_bounds": of({"n": 16}, n=bad.count),
    "shard_sequence": of({"x": X}, x=bad.sequences),
    "unshard_sequence": of({"x": X}, x=bad.sequences),
    "shard_positions": of({"n_local": 4}),
    "ring_traffic": of({}),
    "magneto_gamma": of(
        {"num_encoder_layers": 2, "num_decoder_layers": 2},
        num_encoder_layers=bad.count,
        num_decoder_layers=bad.count,
    ),
    "gigapath_segment_lengths": Entry(gigapath_segment_lengths, {"max_wsi_size": 2**18, "tile_size": 256}),
    "create_dilated_attention": of({"kind": "standard", **BRANCHES}, "DilatedAttention"),
    "create_dilated_attention(distributed)": of(
        {"kind": "distributed", **BRANCHES}, "RingDilatedAttentionV2"
    ),
    "choose_dilated_attention": of({"kind": "auto", **BRANCHES}, "device"),
    "create_multihead_dilated_attention": of(
        {"kind": "auto", **HEADS, **BRANCHES}, "MultiheadDilatedAttention DilatedAttention"
    ),
    "create_block_sparse_attention": of({"variant": "auto"}, "BlockSparseDilatedAttention"),
}
MODULES: dict[str, Entry | Named] = {
    "DilatedAttention": of(BRANCHES, "tail detach_mixing head_mixing head_offsets"),
    "DilatedAttention()": made(BRANCHES, INPUTS),
    "ImprovedDilatedAttention": of(BRANCHES),
    "ImprovedDilatedAttentionV2": of(BRANCHES),
    "RingDilatedAttentionV2": of(BRANCHES),
    "RingDilatedAttentionV2.get_memory_estimate": Entry(
        package.RingDilatedAttentionV2(**BRANCHES).get_memory_estimate, {"seq_len": 64}
    ),
    "RingDilatedAttentionV3": of(BRANCHES, cache_on_gpu=bad.optional(bad.flag)),
    "RingAttentionConfig": of(BRANCHES),
    "RingDilatedAttentionProduction": of(BRANCHES, "memory_pool_size"),
    "BlockSparseDilatedAttention": of({"sparse_config": CONFIG, **BRANCHES}),
    "BlockSparseDilatedAttention()": made({"sparse_config": CONFIG}, INPUTS),
    "BlockSparseDilatedAttention.attention_weights": Entry(
        package.BlockSparseDilatedAttention(sparse_config=CONFIG).attention_weights, {"query": X, "key": X}
    ),
    "BlockSparseRingDilatedAttention": of({"sparse_config": CONFIG, **BRANCHES}),
    "BlockSparseAdaptiveDilatedAttention": of(
        {**BRANCHES, "sparse_config": ADAPTIVE}, temperature=bad.number
    ),
    "BlockSparseAdaptiveDilatedAttention()": made({**BRANCHES, "sparse_config": ADAPTIVE}, INPUTS),
    "MultiheadDilatedAttention": of({**HEADS, **BRANCHES}, "DilatedAttention"),
    "MultiheadDilatedAttention()": made(
        {**HEADS, **BRANCHES, "position_encoding": "rotary"}, {"query": EMBEDDED}
    ),
    "MultiheadDilatedAttention.attention_rows": Entry(
        package.MultiheadDilatedAttention(8, 2, **BRANCHES).attention_rows, {"query": EMBEDDED, "rows": [1]}
    ),
    "MultiheadDilatedAttention.make_cache": Entry(
        package.MultiheadDilatedAttention(8, 2, **BRANCHES).make_cache, {"batch_size": 1}
    ),
    "ImprovedMultiheadDilatedAttention()": made({**HEADS, **BRANCHES}, {"query": EMBEDDED}),
    "RingMultiheadDilatedAttention": of({**HEADS, **BRANCHES}, "RingDilatedAttentionV2"),
    "BlockSparseMultiheadDilatedAttention": of({**HEADS, "sparse_config": CONFIG}),
    "BlockSparseRingMultiheadDilatedAttention()": made(
        {**HEADS, "sparse_config": CONFIG}, {"query": EMBEDDED}
    ),
    "DenseAttention()": made({}, INPUTS),
    "DropPath": Entry(DropPath, {"p": 0.1}),
    "FeedForward": of({"d_model": 8, "dim_feedforward": 8}),
    "RotaryEmbedding": of({"head_dim": 4}),
    "XPos": of({"head_dim": 4}),
    "DilatedTransformerEncoderLayer": of(MODEL, "MultiheadDilatedAttention DilatedAttention"),
    "DilatedTransformerEncoderLayer()": made(MODEL, {"src": EMBEDDED}),
    "DilatedTransformerDecoderLayer": of(MODEL, "MultiheadDilatedAttention"),
    "DilatedTransformerDecoderLayer()": made(MODEL, {"tgt": EMBEDDED, "memory": EMBEDDED}),
}
MODELS: dict[str, Entry | Named] = {
    "LongNetEncoder": of({**MODEL, "num_layers": 1}, "LongNetEncoderConfig"),
    "LongNetEncoder()": made({**MODEL, "num_layers": 1}, {"x": EMBEDDED}),
    "LongNetDecoder": of({**MODEL, "num_layers": 1}, "LongNetDecoderConfig DilatedAttention"),
    "LongNet": of(
        {**MODEL, "num_encoder_layers": 1, "num_decoder_layers": 1}, "LongNetConfig DilatedAttention"
    ),
    "LongNet()": made({**MODEL, "num_encoder_layers": 1, "num_decoder_layers": 1}, {"src": EMBEDDED}),
    **{
        name: of(MODEL)
        for name in ("LongNetConfig", "LongNetEncoderConfig", "LongNetDecoderConfig", "LongNetViTConfig")
    },
    "LongNetLMConfig": of({**MODEL, "vocab_size": 7}),
    "LongNetLM": of({**MODEL, "vocab_size": 7, "num_layers": 1}, "LongNetLMConfig DilatedAttention"),
    "LongNetLM()": Entry(
        lambda **call: a_model()(**call),
        {"tokens": TOKENS},
        kinds={"tokens": not_longer},
        shown=package.LongNetLM.forward,
    ),
    "LongNetLM.generate": Entry(
        lambda **call: a_model().generate(**call),
        {"prompt": TOKENS, "max_new_tokens": 1, "do_sample": True},
        "temperature top_k top_p seed",
        {"prompt": not_longer, "seed": any_seed},
        package.LongNetLM.generate,
    ),
    "LongNetLM.make_caches": Entry(lambda **call: a_model().make_caches(**call), {"batch_size": 1}),
    "Sampling": Entry(Sampling, {"do_sample": True}, kinds={"seed": any_seed}),
    "LongNetViT": of(VIT, "LongNetViTConfig DilatedAttention"),
    "LongNetViT()": made(
        VIT,
        {"x": torch.randn(1, 16, 6), "coords": torch.zeros(1, 16, 2)},
        coords=bad.without(bad.tensor, "of another kind"),
    ),
}
CORE: dict[str, Entry | Named] = {
    "PersistentPatternCache": of({}),
    "PatternCache.resize": Entry(core.PatternCache().resize, {"max_size": 4}),
    "MemoryPool": of({}),
    "MemoryPool.allocate": Entry(
        core.MemoryPool().allocate,
        {"shape": (4,)},
        kinds={"dtype": any_dtype, "tag": lambda _: {"a number": 7, "a list": ["x"]}},
    ),
    "AttentionBufferManager": of({}),
    "create_attention_buffer_manager": of({}, "AttentionBufferManager"),
    "AttentionBufferManager.allocate": Entry(
        core.AttentionBufferManager().allocate,
        {"buffer_type": "query", "shape": (4,)},
        kinds={"dtype": any_dtype, "zero_init": bad.optional(bad.flag)},
    ),
    "AttentionBufferManager.preallocate_buffers": Entry(
        core.AttentionBufferManager().preallocate_buffers,
        {"batch_size": 1, "seq_len": 4, "num_heads": 2, "head_dim": 4},
        kinds={"dtype": any_dtype},
    ),
    "BufferConfig": of({"typical_size_mb": 1.0, "reuse_frequency": "high", "lifetime": "forward"}),
}
ENTRIES = {
    name: each if isinstance(each, Entry) else each.entry(name)
    for name, each in {**FUNCTIONS, **MODULES, **MODELS, **CORE}.items()
}
