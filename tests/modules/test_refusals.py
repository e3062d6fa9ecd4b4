"""Settings that no module takes, with the sentence that says why.

`test_bad_calls.py` gives every argument alone each kind of bad value; here is mostly what depends on several.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import (
    BlockPattern,
    BlockSparseAdaptiveDilatedAttention as Adaptive,
    BlockSparseDilatedAttention as Blocks,
    DilatedAttention,
    DilatedTransformerDecoderLayer,
    ImprovedDilatedAttention,
    ImprovedDilatedAttentionV2 as ImprovedV2,
    LongNetConfig,
    LongNetDecoder,
    LongNetEncoder,
    LongNetLMConfig,
    MultiheadDilatedAttention as Multihead,
    RingAttentionConfig,
    RingDilatedAttentionProduction as Production,
    RingDilatedAttentionV2 as RingV2,
    RingDilatedAttentionV3 as RingV3,
)
from dilated_attention_pytorch.core import AttentionBufferManager
from dilated_attention_pytorch.modules import DenseAttention, LongNet, MultiheadModule, XPos
from dilated_attention_pytorch.modules.sampling import Sampling

BRANCHES = {"segment_lengths": (8, 14), "dilation_rates": (1, 2)}
STACK = {"d_model": 24, "nhead": 4, **BRANCHES}
VALID: dict[Any, dict[str, Any]] = {
    **dict.fromkeys((DilatedAttention, ImprovedDilatedAttention, ImprovedV2, RingV2, RingV3), BRANCHES),
    MultiheadModule: {"embed_dim": 12, "num_heads": 3, "attention": DilatedAttention()},
    Multihead: {"embed_dim": 32, "num_heads": 4},
    DilatedTransformerDecoderLayer: {"d_model": 12, "nhead": 3},
    **dict.fromkeys((LongNetEncoder, LongNetDecoder), STACK),
    XPos: {"head_dim": 4},
    Sampling: {"do_sample": True},
    LongNetLMConfig: {"vocab_size": 5},
}
NO_MANAGER = {"enable_buffer_manager": False}
NO_CACHE = {"enable_profiling": True, "use_pattern_cache": False}
TWO = {"dropout": 0.1, "attention_dropout": 0.2}
HEADS = {"num_heads": 4, "head_dim": 8}
GIVEN, OWN = {"buffer_manager": AttentionBufferManager()}, "the settings of a buffer_manager are its own, got"
MANAGED = "are for a buffer manager, got enable_buffer_manager"
NOT_OF_ATTENTION = "must be those of the attention modules, got"
GREEDY = {"do_sample": False}
ONE_EYE = BlockPattern.from_layout(torch.eye(2) > 0, 4, 2)

SETTINGS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (DilatedAttention, {"lightweight_pool": True}, ValueError, "got enable_memory_pool=False"),
    (DilatedAttention, NO_CACHE, ValueError, "enable_profiling needs a pattern cache or .* got neither"),
    (DilatedAttention, TWO, ValueError, r"are one option, got the two values 0\.1 and 0\.2"),
    (ImprovedDilatedAttention, {"buffer_manager": None}, TypeError, "buffer_manager"),
    (ImprovedV2, {"buffer_manager": 3}, TypeError, "AttentionBufferManager, got int"),
    (ImprovedV2, {**NO_MANAGER, "lightweight_pool": True}, ValueError, "got enable_memory_pool=False"),
    (ImprovedV2, {**NO_MANAGER, **NO_CACHE}, ValueError, "got neither"),
    (ImprovedV2, {**NO_MANAGER, "enable_buffer_reuse": False}, ValueError, MANAGED),
    (ImprovedV2, {**NO_MANAGER, "enable_preallocation": True}, ValueError, MANAGED),
    (ImprovedV2, {**NO_MANAGER, **GIVEN}, ValueError, MANAGED),
    (ImprovedV2, {**GIVEN, "enable_buffer_reuse": False}, ValueError, OWN),
    (ImprovedV2, {**GIVEN, "enable_preallocation": True}, ValueError, OWN),
    (ImprovedV2, {**GIVEN, "lightweight_pool": True}, ValueError, OWN),
    (ImprovedV2, {**GIVEN, "enable_memory_pool": True}, ValueError, OWN),
    (DenseAttention, {"softmax_scale": "a"}, TypeError, "softmax_scale must be a number, got 'a'"),
    (DenseAttention, {"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite, got nan"),
    (DenseAttention, {"dropout": 1.5}, ValueError, r"dropout must lie between 0 and 1, got 1\.5"),
    (DenseAttention, TWO, ValueError, "are one option"),
    (RingV2, {"ring_size": 0}, ValueError, "ring_size must be a positive integer, got 0"),
    (RingV2, {"timeout": -1.0}, ValueError, r"timeout must be positive and below 2.*, got -1\.0"),
    (RingV2, {"timeout": "5s"}, TypeError, "timeout must be seconds, a timedelta or None, got '5s'"),
    (RingV2, {"group": object()}, ValueError, "a group needs torch.distributed to be initialised"),
    (RingV2, {"strategy": "star"}, ValueError, "must be one of 'auto', 'ring', 'ulysses', got 'star'"),
    (RingV2, {"speed": 11}, TypeError, "RingDilatedAttentionV2 has no 'speed'"),
    (RingV3, {"use_pattern_cache": False, "cache_on_gpu": True}, ValueError, "the pattern cache, got use_p"),
    (Production, {"mixed_precision": torch.float32}, TypeError, "must be a bool, torch.bfloat16"),
    (Production, {"enable_memory_pool": False}, ValueError, "memory of this module is pooled .* got"),
    (Production, {"config": [8, 14]}, TypeError, "config must be a RingAttentionConfig or None, got .8, 14."),
    (Production, {"config": RingAttentionConfig(), "ring_size": 2}, ValueError, "got ring_size beside it"),
    (Production, TWO, ValueError, "dropout and attention_dropout are one option"),
    (Blocks, {"segment_lengths": [64], "dilation_rates": [1]}, ValueError, "block_size of 128 and a segment"),
    (Blocks, {"sparse_config": "random"}, TypeError, "must be a SparsePatternConfig or a dict, got str"),
    (Blocks, {"head_mixing": "all"}, TypeError, "head_mixing"),
    (Blocks, TWO, ValueError, "attention_dropout are one option"),
    (Adaptive, {"num_kv_heads": 2}, ValueError, "given together, num_kv_heads only with them"),
    (Adaptive, {"num_heads": 4}, ValueError, "num_heads and head_dim are given together"),
    (Adaptive, {**HEADS, "num_kv_heads": 3}, ValueError, "must divide num_heads, got 3 and 4"),
    (Adaptive, {"sparse_config": {"pattern_type": "random"}}, ValueError, "\"adaptive\", got 'random'"),
    (Adaptive, {"sparse_config": ONE_EYE}, TypeError, "makes its patterns itself, got a BlockPattern"),
    (Adaptive, {"temperature": -1}, ValueError, r"temperature must not be negative, got -1\.0"),
    (MultiheadModule, {"embed_dim": 10}, ValueError, "must be a multiple of num_heads, got 10 and 3"),
    (MultiheadModule, {"num_kv_heads": 2}, ValueError, "num_kv_heads must divide num_heads, got 2 and 3"),
    (MultiheadModule, {"attention": len}, TypeError, "attention must be an nn.Module, got <built-in fun"),
    (MultiheadModule, {"positions": "rotary"}, TypeError, "must be an nn.Module or None, got 'rotary'"),
    (Multihead, {"colour": 1}, TypeError, "has no 'colour'"),
    (Multihead, {"fused_qkv": True}, TypeError, "has no 'fused_qkv'"),
    (Multihead, TWO, ValueError, r"are one option, got the two values 0\.1 and 0\.2"),
    (Multihead, {"position_encoding": "sine"}, ValueError, "must be one of 'rotary', 'xpos', got 'sine'"),
    (Multihead, {"rotary_base": 5.0}, ValueError, r"is for a position encoding, got 5\.0 and none"),
    (Multihead, {"position_encoding": "rotary", "xpos_scale_base": 64}, ValueError, "got 64 and 'rotary'"),
    (Multihead, {"embed_dim": 12, "position_encoding": "xpos"}, ValueError, "head_dim must be even, got 3"),
    (XPos, {"segment_lengths": [0]}, ValueError, "segment_lengths must lie between 1 and .* got 0"),
    (XPos, {"segment_lengths": []}, ValueError, "segment_lengths must have at least one entry, got none"),
    (DilatedTransformerDecoderLayer, {"cross_attention": "sparse"}, ValueError, "'dense', 'dilated', got 's"),
    *(
        (stack, *row)
        for stack in (LongNetEncoder, LongNetDecoder)
        for row in (
            ({"batch_first": False}, TypeError, "batch_first is no option of a stack"),
            ({"colour": 1}, TypeError, "has no 'colour'"),
        )
    ),
    *(
        (model, *row)
        for model in (LongNetConfig, LongNet)
        for row in (
            ({"d_model": 10, "nhead": 3}, ValueError, "d_model must be a multiple of nhead, got 10 and 3"),
            ({"num_kv_heads": 5}, ValueError, "num_kv_heads must divide nhead, got 5 and 12"),
            ({"num_encoder_layers": 1.0}, ValueError, "num_encoder_layers must be a positive integer, got"),
            ({"dilation_rates": (1,)}, ValueError, "are given together, got dilation_rates alone"),
            ({"drop_path_rate": "a"}, TypeError, "drop_path_rate must be a number, got 'a'"),
            ({"checkpoint_activations": 1}, TypeError, "checkpoint_activations must be a bool, got 1"),
            ({"kind": "quick"}, ValueError, "kind must be one of 'standard', .* got 'quick'"),
            ({"cross_attention": None}, ValueError, "must be one of 'dense', 'dilated', got None"),
            ({"attention_options": 3}, TypeError, "attention_options must be a mapping, got 3"),
            ({"attention_options": {1: 2}}, TypeError, r"must have strings as keys, got \[1\]"),
            ({"attention_options": {"a": {"b": len}}}, TypeError, r"\['a'\]\['b'\] must be plain data"),
            ({"attention_options": {"a": [math.nan]}}, ValueError, r"options\['a'\] must be finite"),
            ({"attention_options": {"dropout": 0.1}}, ValueError, rf"{NOT_OF_ATTENTION} \['dropout'\]"),
            ({"attention_options": {"device": 0}}, ValueError, rf"{NOT_OF_ATTENTION} \['device'\]"),
            ({"kind": "ring", "attention_options": {"group": len}}, TypeError, "must be plain data"),
        )
    ),
    (LongNetLMConfig, {"pad_token": 5}, ValueError, "pad_token must be a token below vocab_size 5, got 5"),
    (LongNetLMConfig, {"pad_token": True}, ValueError, "below vocab_size 5, got True"),
    (Sampling, {**GREEDY, "top_k": 5}, ValueError, "likeliest token is taken, got top_k as well"),
    (Sampling, {**GREEDY, "temperature": 0.5, "seed": 1}, ValueError, "got seed, temperature as well"),
    (Sampling, {"temperature": 0.0}, ValueError, r"temperature must be positive, got 0\.0"),
    (Sampling, {"top_p": 1.5}, ValueError, r"top_p must be above 0 and at most 1, got 1\.5"),
    (Sampling, {"seed": [True]}, TypeError, r"seed must be an integer or one for each row, got \[True\]"),
    (Sampling, {"seed": [3, -1]}, ValueError, r"seed must not be negative, got \[3, -1\]"),
    (Sampling, {"seed": "ab"}, TypeError, "seed must be an integer"),
]


@pytest.mark.parametrize(("cls", "options", "error", "message"), SETTINGS)
def test_settings(cls: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cls(**{**VALID.get(cls, {}), **options})
