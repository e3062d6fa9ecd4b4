"""A valid call of each public function and class, and what each of its arguments must refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dilated_attention_pytorch as package
from dilated_attention_pytorch import core, modules
from dilated_attention_pytorch.integrations.gigapath import gigapath_segment_lengths
from dilated_attention_pytorch.modules.sampling import Sampling
from dilated_attention_pytorch.modules.transformer import DropPath

from . import bad_values as bad

X = torch.randn(1, 16, 2, 4)
TOKENS = torch.arange(16)[None] % 7
EMBEDDED = torch.randn(1, 16, 8)
MASK = torch.ones(1, 16, dtype=torch.bool)
BRANCHES: dict[str, Any] = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
CONFIG = {"pattern_type": "local_window", "block_size": 4, "sparsity_ratio": 0.5}
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
        "keep_after scorer_dim pixels num_processes"
    ),
    bad.count: "n_local global_tokens memory_pool_size pool_size seed pad_token",
    bad.flag: (
        "is_causal allow_isolated_segments detach_mixing return_lse use_pattern_cache enable_memory_pool "
        "lightweight_pool "
        "enable_profiling enable_buffer_manager enable_buffer_reuse enable_preallocation enable_reuse "
        "lightweight retries bias layer_norm batch_first fused_qkv sub_layer_norm normalize_output "
        "checkpoint_activations tie_embeddings global_pool need_weights do_sample masked auto_tune "
        "cache_on_gpu is_decoder return_all use_gradient_checkpointing enable_error_recovery "
        "log_memory_usage mixed_precision prefer_bucketed prefer_numa prefer_pinned all_layer_embed "
        "tgt_is_causal memory_is_causal src_is_causal aggressive"
    ),
    bad.number: "scale softmax_scale",
    bad.positive: (
        "layer_norm_eps gamma_init rotary_base xpos_scale_base temperature typical_size_mb base timeout"
    ),
    bad.probability: "dropout dropout_p attention_dropout activation_dropout drop_path drop_path_rate p",
    bad.choice: (
        "head_mixing head_offsets tail kernel memory_source strategy activation kind variant preset "
        "pattern_type reuse_frequency lifetime buffer_type hierarchy position_encoding "
        "cross_attention"
    ),
    bad.integers: "segment_lengths dilation_rates",
    bad.device: "device",
    bad.dtype: "dtype",
    bad.anything: "pattern config execution group cache caches attention buffer_manager pool",
    bad.mapping: "sparse_config attention_options",
    bad.tensor: "q k v x query key value src tgt coords prompt tokens",
    bad.mask: (
        "key_mask attention_mask key_padding_mask src_key_padding_mask tgt_key_padding_mask "
        "memory_key_padding_mask padding_mask attn_mask src_mask"
    ),
}
KINDS = {name: kind for kind, names in NAMES.items() for name in names.split()}


class Entry(NamedTuple):
    """A valid call by keywords; `more` are arguments whose default is right, as the values to begin with."""

    call: Callable[..., Any]
    valid: Mapping[str, Any]
    more: Mapping[str, Any] = MappingProxyType({})
    kinds: Mapping[str, Callable[[Any], bad.Bad]] = MappingProxyType({})

    def cases(self) -> list[tuple[str, str, Any]]:
        found = []
        for name, value in {**self.valid, **self.more}.items():
            kind = self.kinds.get(name) or KINDS[name]
            found += [(name, label, each) for label, each in kind(value).items()]
        return found


def made(cls: Any, *args: Any, **settings: Any) -> Callable[..., Any]:
    """Makes a module and calls it."""
    return lambda **call: cls(*args, **settings).eval()(**call)


def defaults(names: str, **values: Any) -> dict[str, Any]:
    """Arguments that are left out of the valid call."""
    return {**dict.fromkeys(names.split()), **values}


def without(kind: Callable[[Any], bad.Bad], *labels: str) -> Callable[[Any], bad.Bad]:
    """A kind whose values of these labels are right."""
    return lambda x: {label: value for label, value in kind(x).items() if label not in labels}


def lists(_: Any) -> bad.Bad:
    """Of integers from 0 on, one for each row: what is wrong with `bad.integers`, but for its zeros."""
    wrong = without(bad.integers, "zeros")(_)
    return {**wrong, "too large": [99], "too many": [1, 1]}


def bounds(_: Any) -> bad.Bad:
    """Of cu_seqlens, a tensor."""
    good = torch.tensor([0, 8, 16], dtype=torch.int32)
    return {**bad.tensor(good.long()), "falling": torch.tensor([0, 9, 8, 16]), "short": torch.tensor([0, 8])}


def dims(_: Any) -> bad.Bad:
    return {"outside": 7, "a fraction": 1.5, "a bool": True, "a string": "1", "2**70": 2**70}


def sequences(x: Tensor) -> bad.Bad:
    return {"none": None, "a list": [1], "a scalar": x[0, 0, 0, 0], "sparse": x.to_sparse()}


def token_sets(_: Any) -> bad.Bad:
    return {
        "a number": 7,
        "a word": "nope",
        "negative": [-1],
        "large": [99],
        "fractions": [1.5],
        "bools": [True],
    }


def a_model() -> Any:
    torch.manual_seed(0)
    return package.LongNetLM(7, num_layers=1, **MODEL).eval()


def attend_once(**call: Any) -> Tensor:
    with torch.no_grad():
        return package.DilatedKVCache(**BRANCHES, **KV).attend(**call)


def make_layout(**call: Any) -> Any:
    return package.BlockPattern.from_layout(**call)


def allocate(**call: Any) -> Any:
    return core.AttentionBufferManager().allocate(**call)


def sizes_without_zero(_: Any) -> bad.Bad:
    return {
        "negative": [-1],
        "fractions": [1.5],
        "strings": ["4"],
        "bools": [True],
        "huge": [2**40, 2**40],
        **bad.HUGE,
    }


QKV = {"q": X, "k": X, "v": X}
INPUTS = {"query": X, "key": X, "value": X}
SPEC = "scale head_mixing head_offsets"
POOLING = "enable_memory_pool enable_profiling lightweight_pool use_pattern_cache"
SKIN = (
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
CHOICES = "do_sample temperature top_k top_p seed stop_tokens prefill_chunk lengths"
RINGS = "group timeout ring_size strategy"

ENTRIES: dict[str, Entry] = {
    "branches_for": Entry(package.branches_for, {"max_length": 64}, defaults("num_heads first ratio")),
    "DilatedSpec": Entry(
        package.DilatedSpec, BRANCHES, defaults(f"is_causal dropout_p tail detach_mixing {SPEC}")
    ),
    "Execution": Entry(
        package.Execution,
        {},
        defaults("kernel workspace_bytes memory use_pattern_cache"),
        {"memory": without(bad.choice, "a word")},  # managers have names: calls look for them
    ),
    "dilated_attention": Entry(
        package.dilated_attention,
        {**QKV, **BRANCHES},
        defaults(
            f"is_causal dropout_p tail detach_mixing return_lse execution {SPEC}",
            key_mask=MASK,
            cu_seqlens=None,
        ),
        {"cu_seqlens": bounds},
    ),
    "ring_dilated_attention": Entry(
        package.ring_dilated_attention,
        {**QKV, **BRANCHES},
        defaults("is_causal dropout_p group strategy timeout shard_lengths execution", key_mask=MASK),
        {"shard_lengths": lists},
    ),
    "block_sparse_attention": Entry(
        package.block_sparse_attention,
        {**QKV, "pattern": PATTERN},
        defaults("is_causal scale dropout_p return_lse execution", key_mask=MASK),
    ),
    "ring_block_sparse_attention": Entry(
        package.ring_block_sparse_attention,
        {**QKV, "pattern": PATTERN},
        defaults("is_causal scale dropout_p return_lse group timeout execution", key_mask=MASK),
    ),
    "build_block_pattern": Entry(
        package.build_block_pattern,
        {"config": CONFIG, "n": 16, "num_heads": 2},
        defaults("is_causal segment_lengths dilation_rates"),
    ),
    "an adaptive pattern": Entry(
        package.build_block_pattern,
        {
            "config": {"pattern_type": "adaptive", "block_size": 4},
            "n": 16,
            "num_heads": 2,
            "query": X,
            "key": X,
        },
        {"key_mask": MASK},
        {"n": bad.size},
    ),
    "SparsePatternConfig": Entry(
        package.SparsePatternConfig,
        {},
        defaults("pattern_type sparsity_ratio block_size window_size global_tokens hierarchy seed"),
        {"sparsity_ratio": bad.positive, "seed": without(bad.count, "2**62")},
    ),
    "BlockPattern": Entry(
        package.BlockPattern,
        {"n": 16, "block_size": 4, "starts": PATTERN.starts, "columns": PATTERN.columns},
        defaults("is_causal"),
        {"starts": bad.tensor, "columns": bad.tensor},
    ),
    "BlockPattern.from_layout": Entry(
        make_layout,
        {"layout": torch.ones(4, 4) > 0, "n": 16, "block_size": 4},
        defaults("is_causal"),
        {"layout": without(bad.tensor, "more dimensions")},
    ),
    "BlockPattern.to_block_mask": Entry(PATTERN.to_block_mask, {}, defaults("num_heads device")),
    "BlockPattern.draw": Entry(
        lambda **call: PATTERN.draw("/dev/null", **call),
        {},
        defaults("layout pixels"),
        {"layout": lambda _: {**bad.NO_NUMBER, **bad.NO_FINITE, **bad.HUGE, "negative": -1}},
    ),
    "attention_rows": Entry(
        package.attention_rows,
        {"q": X, "k": X, "rows": [1, 2], **BRANCHES},
        defaults(f"is_causal tail {SPEC}", key_mask=MASK, cu_seqlens=None),
        {"rows": without(lists, "too many"), "cu_seqlens": bounds},
    ),
    "attend_last": Entry(
        package.attend_last,
        {**QKV, **BRANCHES},
        defaults(f"starts {SPEC} kernel workspace_bytes"),
        {"starts": lists},
    ),
    "DilatedKVCache": Entry(
        package.DilatedKVCache,
        {**BRANCHES, **KV},
        defaults(f"num_heads {SPEC} kernel workspace_bytes device dtype"),
    ),
    "DilatedKVCache.attend": Entry(attend_once, QKV, defaults("lengths"), {"lengths": lists}),
    "DilatedKVCache.reorder": Entry(
        package.DilatedKVCache(**BRANCHES, **KV).reorder,
        {"index": [0]},
        kinds={"index": without(lists, "too many")},
    ),
    "plan_ring": Entry(
        package.plan_ring,
        {**BRANCHES, "n": 16, "num_ranks": 2, "num_heads": 2, "head_dim": 4},
        defaults(
            "num_kv_heads batch_size dtype is_causal head_mixing head_offsets cu_seqlens strategy masked "
            "return_lse workspace_bytes steps shard_lengths"
        ),
        {"cu_seqlens": lists, "shard_lengths": lists},
    ),
    "even_shards": Entry(package.even_shards, {"n": 10, "size": 2}, kinds={"n": bad.count}),
    "shard_bounds": Entry(
        package.shard_bounds,
        {"n": 16},
        defaults("group shard_lengths"),
        {"n": bad.count, "shard_lengths": lists},
    ),
    "shard_sequence": Entry(
        package.shard_sequence,
        {"x": X},
        defaults("dim group shard_lengths"),
        {
            "x": sequences,
            "dim": lambda _: {
                "outside": 7,
                "a fraction": 1.5,
                "a bool": True,
                "a string": "1",
                "2**70": 2**70,
            },
            "shard_lengths": lists,
        },
    ),
    "unshard_sequence": Entry(
        package.unshard_sequence,
        {"x": X},
        defaults("dim group timeout"),
        {
            "x": sequences,
            "dim": lambda _: {
                "outside": 7,
                "a fraction": 1.5,
                "a bool": True,
                "a string": "1",
                "2**70": 2**70,
            },
        },
    ),
    "shard_positions": Entry(package.shard_positions, {"n_local": 4}, defaults("group device timeout")),
    "ring_traffic": Entry(package.ring_traffic, {}, defaults("group")),
    "magneto_gamma": Entry(
        package.magneto_gamma,
        {"num_encoder_layers": 2, "num_decoder_layers": 2},
        defaults("is_decoder"),
        {"num_encoder_layers": bad.count, "num_decoder_layers": bad.count},
    ),
    "DilatedAttention": Entry(
        package.DilatedAttention,
        BRANCHES,
        defaults(f"dropout tail detach_mixing head_mixing head_offsets {SKIN}"),
    ),
    "DilatedAttention()": Entry(
        made(package.DilatedAttention, **BRANCHES), INPUTS, defaults("is_causal", attention_mask=MASK)
    ),
    "ImprovedDilatedAttention": Entry(package.ImprovedDilatedAttention, BRANCHES, defaults(SKIN)),
    "ImprovedDilatedAttentionV2": Entry(
        package.ImprovedDilatedAttentionV2,
        BRANCHES,
        defaults(f"enable_buffer_manager enable_buffer_reuse enable_preallocation buffer_manager {POOLING}"),
    ),
    "RingDilatedAttentionV2": Entry(package.RingDilatedAttentionV2, BRANCHES, defaults(f"{RINGS} {SKIN}")),
    "RingDilatedAttentionV2.get_memory_estimate": Entry(
        package.RingDilatedAttentionV2(**BRANCHES).get_memory_estimate,
        {"seq_len": 64},
        defaults("batch_size num_heads head_dim dtype num_kv_heads num_processes"),
    ),
    "RingDilatedAttentionV3": Entry(
        package.RingDilatedAttentionV3,
        BRANCHES,
        defaults("cache_on_gpu"),
        {"cache_on_gpu": bad.optional(bad.flag)},
    ),
    "RingAttentionConfig": Entry(
        package.RingAttentionConfig,
        BRANCHES,
        defaults(
            "dropout ring_size timeout strategy use_gradient_checkpointing memory_pool_size "
            "enable_error_recovery mixed_precision log_memory_usage"
        ),
    ),
    "RingDilatedAttentionProduction": Entry(
        package.RingDilatedAttentionProduction,
        BRANCHES,
        defaults("config enable_memory_pool lightweight_pool group memory_pool_size softmax_scale"),
    ),
    "BlockSparseDilatedAttention": Entry(
        package.BlockSparseDilatedAttention, {"sparse_config": CONFIG, **BRANCHES}, defaults(SKIN)
    ),
    "BlockSparseDilatedAttention()": Entry(
        made(package.BlockSparseDilatedAttention, sparse_config=CONFIG),
        INPUTS,
        defaults("is_causal", attention_mask=MASK),
    ),
    "BlockSparseDilatedAttention.attention_weights": Entry(
        package.BlockSparseDilatedAttention(sparse_config=CONFIG).attention_weights,
        {"query": X, "key": X},
        defaults("is_causal", attention_mask=MASK),
    ),
    "BlockSparseRingDilatedAttention": Entry(
        package.BlockSparseRingDilatedAttention,
        {"sparse_config": CONFIG, **BRANCHES},
        defaults("ring_size group timeout"),
    ),
    "BlockSparseAdaptiveDilatedAttention": Entry(
        package.BlockSparseAdaptiveDilatedAttention,
        {**BRANCHES, "sparse_config": {"pattern_type": "adaptive", "block_size": 4}},
        defaults("scorer_dim temperature final_temperature", num_heads=2, head_dim=4),
        {"temperature": bad.number, "final_temperature": bad.number},
    ),
    "BlockSparseAdaptiveDilatedAttention()": Entry(
        made(
            package.BlockSparseAdaptiveDilatedAttention,
            [16],
            [1],
            {"pattern_type": "adaptive", "block_size": 4},
        ),
        INPUTS,
        defaults("is_causal", attention_mask=MASK),
    ),
    "MultiheadDilatedAttention": Entry(
        package.MultiheadDilatedAttention,
        {"embed_dim": 8, "num_heads": 2, **BRANCHES},
        defaults(f"dropout xpos_scale_base {MULTI} {POOLING}"),
    ),
    "MultiheadDilatedAttention()": Entry(
        made(package.MultiheadDilatedAttention, 8, 2, **BRANCHES, position_encoding="rotary"),
        {"query": EMBEDDED},
        defaults(
            "need_weights is_causal cache lengths",
            key_padding_mask=MASK,
            attn_mask=torch.ones(16, 16).triu(1) > 0,
            positions=torch.arange(16),
        ),
        {"lengths": lists, "positions": without(bad.tensor, "more dimensions")},
    ),
    "MultiheadDilatedAttention.attention_rows": Entry(
        package.MultiheadDilatedAttention(8, 2, **BRANCHES).attention_rows,
        {"query": EMBEDDED, "rows": [1]},
        defaults("is_causal", key_padding_mask=MASK),
        {"rows": without(lists, "too many")},
    ),
    "MultiheadDilatedAttention.make_cache": Entry(
        package.MultiheadDilatedAttention(8, 2, **BRANCHES).make_cache,
        {"batch_size": 1},
        defaults("device dtype"),
    ),
    "ImprovedMultiheadDilatedAttention()": Entry(
        made(package.ImprovedMultiheadDilatedAttention, 8, 2, **BRANCHES),
        {"query": EMBEDDED},
        {"key": EMBEDDED, "value": EMBEDDED, "key_padding_mask": MASK},
    ),
    "RingMultiheadDilatedAttention": Entry(
        package.RingMultiheadDilatedAttention, {"embed_dim": 8, "num_heads": 2, **BRANCHES}, defaults(RINGS)
    ),
    "BlockSparseMultiheadDilatedAttention": Entry(
        package.BlockSparseMultiheadDilatedAttention,
        {"embed_dim": 8, "num_heads": 2, "sparse_config": CONFIG},
        defaults(MULTI),
    ),
    "BlockSparseRingMultiheadDilatedAttention()": Entry(
        made(package.BlockSparseRingMultiheadDilatedAttention, 8, 2, sparse_config=CONFIG),
        {"query": EMBEDDED},
        defaults("need_weights is_causal", key_padding_mask=MASK),
    ),
    "DenseAttention()": Entry(
        made(modules.DenseAttention), INPUTS, defaults("is_causal", attention_mask=MASK)
    ),
    "DropPath": Entry(DropPath, {"p": 0.1}, defaults("batch_first")),
    "FeedForward": Entry(
        modules.FeedForward,
        {"d_model": 8, "dim_feedforward": 8},
        defaults("dropout activation_dropout activation layer_norm layer_norm_eps gamma_init device dtype"),
    ),
    "RotaryEmbedding": Entry(modules.RotaryEmbedding, {"head_dim": 4}, defaults("base")),
    "XPos": Entry(modules.XPos, {"head_dim": 4}, defaults("segment_lengths base")),
    "DilatedTransformerEncoderLayer": Entry(
        package.DilatedTransformerEncoderLayer,
        MODEL,
        defaults(f"{LAYER} num_kv_heads kind position_encoding batch_first device dtype {POOLING}"),
    ),
    "DilatedTransformerEncoderLayer()": Entry(
        made(package.DilatedTransformerEncoderLayer, **MODEL),
        {"src": EMBEDDED},
        defaults("is_causal cache", src_key_padding_mask=MASK, src_mask=torch.ones(16, 16).triu(1) > 0),
    ),
    "DilatedTransformerDecoderLayer": Entry(
        package.DilatedTransformerDecoderLayer,
        MODEL,
        defaults(f"{LAYER} cross_attention num_kv_heads kind batch_first device dtype"),
    ),
    "DilatedTransformerDecoderLayer()": Entry(
        made(package.DilatedTransformerDecoderLayer, **MODEL),
        {"tgt": EMBEDDED, "memory": EMBEDDED},
        defaults(
            "tgt_is_causal memory_is_causal cache", tgt_key_padding_mask=MASK, memory_key_padding_mask=MASK
        ),
        {"memory": bad.tensor},
    ),
    "LongNetEncoder": Entry(
        package.LongNetEncoder, {**MODEL, "num_layers": 1}, defaults(f"{STACK} device dtype")
    ),
    "LongNetEncoder()": Entry(
        made(package.LongNetEncoder, **MODEL, num_layers=1),
        {"x": EMBEDDED},
        defaults("is_causal return_all caches", key_padding_mask=MASK),
    ),
    "LongNetDecoder": Entry(
        package.LongNetDecoder, {**MODEL, "num_layers": 1}, defaults(f"cross_attention {POOLING} {STACK}")
    ),
    "LongNet": Entry(
        package.LongNet,
        {**MODEL, "num_encoder_layers": 1, "num_decoder_layers": 1},
        defaults(f"cross_attention attention_options {SETTINGS} {POOLING} device dtype"),
    ),
    "LongNet()": Entry(
        made(package.LongNet, **MODEL, num_encoder_layers=1, num_decoder_layers=1),
        {"src": EMBEDDED},
        defaults("src_is_causal tgt_is_causal", tgt=EMBEDDED, src_key_padding_mask=MASK),
    ),
    **{
        name: Entry(getattr(package, name), MODEL, defaults(SETTINGS))
        for name in ("LongNetConfig", "LongNetEncoderConfig", "LongNetDecoderConfig")
    },
    "LongNetLMConfig": Entry(
        package.LongNetLMConfig,
        {**MODEL, "vocab_size": 7},
        defaults(f"num_layers tie_embeddings pad_token attention_options {SETTINGS}"),
    ),
    "LongNetViTConfig": Entry(
        package.LongNetViTConfig, MODEL, defaults(f"num_layers in_chans slide_ngrids global_pool {SETTINGS}")
    ),
    "LongNetLM": Entry(
        package.LongNetLM,
        {**MODEL, "vocab_size": 7, "num_layers": 1},
        defaults(f"tie_embeddings pad_token attention_options {SETTINGS} {POOLING} device dtype"),
    ),
    "LongNetLM()": Entry(
        lambda **call: a_model()(**call),
        {"tokens": TOKENS},
        defaults("caches", key_padding_mask=MASK),
        {"tokens": without(bad.tensor, "longer")},
    ),
    "LongNetLM.generate": Entry(
        lambda **call: a_model().generate(**call),
        {"prompt": TOKENS, "max_new_tokens": 1, "do_sample": True},
        defaults(CHOICES),
        {
            "top_p": bad.probability,
            "lengths": lists,
            "stop_tokens": token_sets,
            "prompt": without(bad.tensor, "longer"),
            "seed": without(bad.count, "2**62", "2**70", "a list"),
        },
    ),
    "LongNetLM.make_caches": Entry(lambda **call: a_model().make_caches(**call), {"batch_size": 1}),
    "Sampling": Entry(
        Sampling,
        {"do_sample": True},
        defaults("temperature top_k top_p"),
        {"top_p": bad.probability},
    ),
    "LongNetViT": Entry(
        package.LongNetViT,
        {"in_chans": 6, "embed_dim": 8, "depth": 1, "nhead": 2, **BRANCHES},
        defaults(
            f"dim_feedforward slide_ngrids tile_size global_pool dropout drop_path_rate dtype {POOLING}"
        ),
    ),
    "LongNetViT()": Entry(
        made(package.LongNetViT, 6, 8, 1, 2, **BRANCHES),
        {"x": torch.randn(1, 16, 6), "coords": torch.zeros(1, 16, 2)},
        defaults("all_layer_embed", padding_mask=~MASK),
        {"coords": without(bad.tensor, "of another kind")},
    ),
    "gigapath_segment_lengths": Entry(gigapath_segment_lengths, {"max_wsi_size": 2**18, "tile_size": 256}),
    "create_dilated_attention": Entry(
        package.create_dilated_attention,
        {"kind": "standard", **BRANCHES},
        defaults(f"seq_len {SKIN}"),
    ),
    "create_dilated_attention('distributed')": Entry(
        package.create_dilated_attention,
        {"kind": "distributed", **BRANCHES},
        defaults(f"ring_size {POOLING}"),
    ),
    "choose_dilated_attention": Entry(
        package.choose_dilated_attention, {"kind": "auto", **BRANCHES}, defaults("seq_len device")
    ),
    "create_multihead_dilated_attention": Entry(
        package.create_multihead_dilated_attention,
        {"kind": "auto", "embed_dim": 8, "num_heads": 2, **BRANCHES},
        defaults(f"seq_len {MULTI} {POOLING}"),
    ),
    "create_block_sparse_attention": Entry(
        package.create_block_sparse_attention,
        {"variant": "auto"},
        defaults(
            "preset sparsity_ratio block_size pattern_type sparse_config segment_lengths dilation_rates "
            f"{SKIN}"
        ),
        {"sparsity_ratio": bad.positive},
    ),
    "PersistentPatternCache": Entry(
        package.PersistentPatternCache,
        {},
        defaults("max_size max_bytes keep_after auto_tune cache_on_gpu enable_profiling"),
    ),
    "PatternCache.resize": Entry(core.PatternCache().resize, {"max_size": 4}),
    "MemoryPool": Entry(core.MemoryPool, {}, defaults("max_bytes pool_size enable_profiling")),
    "MemoryPool.allocate": Entry(
        core.MemoryPool().allocate,
        {"shape": (4,)},
        defaults("dtype device zero_init fit alignment pinned numa tag"),
        {
            "shape": sizes_without_zero,
            "dtype": lambda _: {"a string": "float32", "a number": 7},
            "zero_init": bad.flag,
            "pinned": bad.flag,
            "numa": bad.flag,
            "fit": bad.choice,
            "tag": lambda _: {"a number": 7, "a list": ["x"]},
            "alignment": bad.size,
        },
    ),
    "AttentionBufferManager": Entry(
        core.AttentionBufferManager,
        {},
        defaults(
            "enable_reuse enable_preallocation lightweight enable_profiling retries pool custom_configs"
        ),
        {"custom_configs": bad.mapping},
    ),
    "create_attention_buffer_manager": Entry(
        core.create_attention_buffer_manager, {}, defaults("enable_reuse enable_preallocation lightweight")
    ),
    "AttentionBufferManager.allocate": Entry(
        allocate,
        {"buffer_type": "query", "shape": (4,)},
        defaults("dtype device zero_init"),
        {
            "shape": sizes_without_zero,
            "dtype": lambda _: {"a string": "float32", "a number": 7},
            "zero_init": bad.optional(bad.flag),
        },
    ),
    "AttentionBufferManager.preallocate_buffers": Entry(
        core.AttentionBufferManager().preallocate_buffers,
        {"batch_size": 1, "seq_len": 4, "num_heads": 2, "head_dim": 4},
        defaults("device"),
    ),
    "BufferConfig": Entry(
        core.BufferConfig,
        {"typical_size_mb": 1.0, "reuse_frequency": "high", "lifetime": "forward"},
        defaults("prefer_bucketed prefer_numa prefer_pinned zero_init alignment"),
        {"zero_init": bad.flag, "alignment": bad.size},
    ),
}
