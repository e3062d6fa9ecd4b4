"""Bad input of the block-sparse doors: a ValueError or TypeError that states the rule and the fact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import (
    BlockPattern,
    SparsePatternConfig,
    block_sparse_attention,
    build_block_pattern,
)
from support.executions import packed

X = torch.randn(1, 16, 4, 8)
PATTERN = BlockPattern.from_layout(torch.ones(4, 4, dtype=torch.bool), 16, 4)


def of_layouts(count: int) -> BlockPattern:
    return BlockPattern.from_layout(torch.ones(count, 4, 4, dtype=torch.bool), 16, 4)


def call(**changes: Any) -> Any:
    return block_sparse_attention(**packed({"q": X, "k": X, "v": X, "pattern": PATTERN} | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pattern": PATTERN.to_layout()}, TypeError, "pattern must be a BlockPattern, got Tensor"),
        ({"pattern": None}, TypeError, "pattern must be a BlockPattern, got NoneType"),
        ({"pattern": "local_window"}, TypeError, "pattern must be a BlockPattern, got str"),
        ({"pattern": SparsePatternConfig()}, TypeError, "must be a BlockPattern, got SparsePatternConfig"),
        (
            {"pattern": BlockPattern.from_layout(torch.ones(4, 4, dtype=torch.bool), 15, 4)},
            ValueError,
            "the pattern is for a length of 15, got tensors of length 16",
        ),
        ({"pattern": of_layouts(3)}, ValueError, "one for each of the 4 heads or .* 1 x 4 .* got 3"),
        ({"pattern": of_layouts(8)}, ValueError, "one for each of the 4 heads or .* 1 x 4 .* got 8"),
        (
            {"pattern": PATTERN.causal()},
            ValueError,
            "a causal pattern is for causal attention, got is_causal=False",
        ),
        ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
        ({"is_causal": None}, TypeError, "is_causal must be a bool, got None"),
        ({"return_lse": "no"}, TypeError, "return_lse must be a bool, got 'no'"),
        ({"use_pattern_cache": 1}, TypeError, "use_pattern_cache must be a bool, got 1"),
        ({"scale": math.inf}, ValueError, "scale must be finite, got inf"),
        ({"scale": "1"}, TypeError, "scale must be a number, got '1' of type str"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p must lie between 0 and 1, got 1.5"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p must lie between 0 and 1, got -0.1"),
        ({"dropout_p": math.nan}, ValueError, "dropout_p must be finite"),
        ({"kernel": "fast"}, ValueError, "kernel must be one of 'auto', .* got 'fast'"),
        (
            {"kernel": "stock", "dropout_p": 0.1},
            ValueError,
            "kernel 'stock' cannot run this call: it has no dropout",
        ),
        ({"memory": "swap"}, ValueError, "memory must be 'fresh', 'pool', .* got 'swap'"),
        ({"workspace_bytes": 0}, ValueError, "workspace_bytes must be a positive integer, got 0"),
        ({"workspace_bytes": -1}, ValueError, "workspace_bytes must be a positive integer, got -1"),
        ({"workspace_bytes": 2.5}, ValueError, "workspace_bytes must be a positive integer, got 2.5"),
        ({"workspace_bytes": False}, ValueError, "workspace_bytes must be a positive integer, got False"),
        ({"workspace_bytes": 10**30}, ValueError, r"workspace_bytes must be below 2\*\*62"),
        ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
        ({"v": None}, TypeError, "v must be a tensor, got NoneType"),
        ({"k": X.to_sparse()}, TypeError, "k must be a dense tensor, got torch.sparse_coo"),
        ({"q": X[0]}, ValueError, r"q must have 4 dimensions \(b, n, h, d\), got shape \(16, 4, 8\)"),
        ({"k": X.long()}, TypeError, "k must be float16, bfloat16, float32 or float64, got torch.int64"),
        ({"k": X.double()}, TypeError, "one dtype, got torch.float32, torch.float64 and torch.float32"),
        ({"k": X.to("meta")}, ValueError, "one device, got cpu, meta and cpu"),
        ({"q": X[:, :0], "k": X[:, :0], "v": X[:, :0]}, ValueError, "at least one position, head"),
        ({"k": X[:, :8], "v": X[:, :8]}, ValueError, "with the b, n and d of q"),
        ({"v": X[..., :4]}, ValueError, "with the b, n and d of q"),
        ({"k": X[:, :, :3], "v": X[:, :, :3]}, ValueError, "multiple of those of k and v, got 4 and 3"),
        ({"key_mask": torch.ones(1, 16)}, TypeError, "key_mask must be a bool tensor, got torch.float32"),
        (
            {"key_mask": torch.ones(16, dtype=torch.bool)},
            ValueError,
            r"shape \(b, n\) = \(1, 16\), got \(16,\)",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_attention_states_rule_and_fact(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize("layouts", [1, 4])
def test_the_same_calls_without_the_mistake_run(layouts: int) -> None:
    assert call(pattern=of_layouts(layouts)).shape == X.shape
    assert call(pattern=of_layouts(layouts).causal(), is_causal=True).shape == X.shape


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"pattern_type": "window"},
            ValueError,
            "pattern_type must be one of 'dilated_sparse', .*'adaptive', got 'window'",
        ),
        ({"pattern_type": None}, ValueError, "pattern_type must be one of .* got None"),
        ({"pattern_type": ["random"]}, ValueError, "pattern_type must be one of .* got"),
        ({"sparsity_ratio": 0.0}, ValueError, "fraction kept, above 0 and at most 1, got 0.0"),
        ({"sparsity_ratio": -0.1}, ValueError, "above 0 and at most 1, got -0.1"),
        ({"sparsity_ratio": 1.0001}, ValueError, "above 0 and at most 1, got 1.0001"),
        ({"sparsity_ratio": 90}, ValueError, "above 0 and at most 1, got 90"),
        ({"sparsity_ratio": math.nan}, ValueError, "sparsity_ratio must be finite, got nan"),
        ({"sparsity_ratio": math.inf}, ValueError, "sparsity_ratio must be finite, got inf"),
        ({"sparsity_ratio": "0.1"}, TypeError, "sparsity_ratio must be a number, got '0.1' of type str"),
        ({"sparsity_ratio": None}, TypeError, "sparsity_ratio must be a number, got None"),
        ({"sparsity_ratio": True}, TypeError, "sparsity_ratio must be a number, got True"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"block_size": -128}, ValueError, "block_size must be at least 1, got -128"),
        ({"block_size": 2**16 + 1}, ValueError, "block_size must be at most 65536, got 65537"),
        ({"block_size": True}, TypeError, "block_size must be an integer, got True of type bool"),
        ({"block_size": 64.0}, TypeError, "block_size must be an integer, got 64.0 of type float"),
        ({"block_size": "64"}, TypeError, "block_size must be an integer, got '64' of type str"),
        ({"block_size": None}, TypeError, "block_size must be an integer, got None"),
        ({"window_size": 127}, ValueError, "hold at least one block of 128 tokens, got 127"),
        ({"window_size": 0}, ValueError, "window_size must be at least 1, got 0"),
        ({"window_size": 256.0}, TypeError, "window_size must be an integer, got 256.0"),
        ({"window_size": True}, TypeError, "window_size must be an integer, got True"),
        ({"global_tokens": -1}, ValueError, "global_tokens must be at least 0, got -1"),
        ({"global_tokens": 1.5}, TypeError, "global_tokens must be an integer, got 1.5"),
        ({"global_tokens": False}, TypeError, "global_tokens must be an integer, got False"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": 2**63}, ValueError, r"seed must be below 2\*\*63"),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        ({"hierarchy": "coarse"}, ValueError, "levels or one of 'standard', .*'long_range', got 'coarse'"),
        ({"hierarchy": ()}, ValueError, "hierarchy must have 1 to 32 levels, got 0"),
        ({"hierarchy": ((1, 0.01),) * 33}, ValueError, "hierarchy must have 1 to 32 levels, got 33"),
        ({"hierarchy": 3}, TypeError, r"hierarchy must hold pairs \(stride, share\), got 3"),
        ({"hierarchy": None}, TypeError, r"hierarchy must hold pairs \(stride, share\), got None"),
        ({"hierarchy": (1, 2)}, TypeError, r"hierarchy must hold pairs \(stride, share\)"),
        ({"hierarchy": ((1, 0.5, 3),)}, TypeError, r"hierarchy must hold pairs \(stride, share\)"),
        ({"hierarchy": ((0, 0.5),)}, ValueError, "a stride of hierarchy must be at least 1, got 0"),
        ({"hierarchy": ((1.0, 0.5),)}, TypeError, "a stride of hierarchy must be an integer, got 1.0"),
        ({"hierarchy": ((1, 0.0),)}, ValueError, "a share of hierarchy must lie above 0 .* got 0.0"),
        ({"hierarchy": ((1, 1.5),)}, ValueError, "a share of hierarchy must lie above 0 .* got 1.5"),
        ({"hierarchy": ((1, math.nan),)}, ValueError, "a share of hierarchy must be finite, got nan"),
        ({"hierarchy": ((1, "1"),)}, TypeError, "a share of hierarchy must be a number, got '1'"),
        ({"hierarchy": ((1, 0.7), (2, 0.7))}, ValueError, "shares of hierarchy must add up to at most 1"),
    ],
    ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else None,
)
def test_configs_state_rule_and_fact(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SparsePatternConfig(**fields)
    with pytest.raises(error, match=message):  # the same fields at the door
        build_block_pattern(fields, 1024, 2)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"ratio": 0.1}, ValueError, r"sparse_config has the fields pattern_type, .*, got \['ratio'\]"),
        ({"block_size": 64, 5: 1}, ValueError, r"sparse_config has the fields .*, got \[5\]"),
        ("local_window", TypeError, "sparse_config must be a SparsePatternConfig or a dict, got str"),
        (0.1, TypeError, "sparse_config must be a SparsePatternConfig or a dict, got float"),
        ([("block_size", 64)], TypeError, "sparse_config must be a SparsePatternConfig or a dict, got list"),
    ],
)
def test_configs_that_are_none(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_block_pattern(config, 1024, 2)


def build(pattern_type: str = "dilated_sparse", **changes: Any) -> BlockPattern:
    config = {"pattern_type": pattern_type, "block_size": 4, "sparsity_ratio": 0.5}
    arguments = {"config": config, "n": 16, "num_heads": 4} | changes
    return build_block_pattern(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"n": 0}, ValueError, "n must be a positive integer, got 0"),
        ({"n": 16.0}, ValueError, "n must be a positive integer, got 16.0"),
        ({"n": True}, ValueError, "n must be a positive integer, got True"),
        ({"num_heads": 0}, ValueError, "num_heads must be a positive integer, got 0"),
        ({"num_heads": "4"}, ValueError, "num_heads must be a positive integer, got '4'"),
        ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
        ({"segment_lengths": (8,)}, ValueError, "are given together, got one of them"),
        ({"dilation_rates": (1,)}, ValueError, "are given together, got one of them"),
        ({"segment_lengths": (8, 16), "dilation_rates": (1,)}, ValueError, "same length, got 2 and 1"),
        ({"segment_lengths": (0,), "dilation_rates": (1,)}, ValueError, r"must be positive, got \(0,\)"),
        ({"segment_lengths": (8,), "dilation_rates": (0,)}, ValueError, r"must be positive, got \(0,\)"),
        ({"segment_lengths": (8,), "dilation_rates": (1.5,)}, TypeError, "must hold integers, got 1.5"),
        (
            {"segment_lengths": (16, 3), "dilation_rates": (1, 2)},
            ValueError,
            "a block must fit a segment, got a block_size of 4 and a segment of 3",
        ),
        ({"query": X, "key": X}, ValueError, "are for \"adaptive\" patterns, got one of 'dilated_sparse'"),
        ({"key": X}, ValueError, "are for \"adaptive\" patterns, got one of 'dilated_sparse'"),
        ({"pattern_type": "adaptive"}, ValueError, "depends on query and key, and they are not given"),
        ({"pattern_type": "adaptive", "query": X}, ValueError, "depends on query and key"),
        (
            {"pattern_type": "adaptive", "query": X[:, :8], "key": X[:, :8]},
            ValueError,
            r"query must have the length 16 and 4 heads, got shape \(1, 8, 4, 8\)",
        ),
        (
            {"pattern_type": "adaptive", "query": X[:, :, :2], "key": X[:, :, :2]},
            ValueError,
            r"query must have the length 16 and 4 heads, got shape \(1, 16, 2, 8\)",
        ),
        ({"pattern_type": "adaptive", "query": X, "key": X[:, :8]}, ValueError, "with the b, n and d of q"),
        (
            {"pattern_type": "adaptive", "query": X, "key": X[:, :, :3]},
            ValueError,
            "multiple of those of k and v, got 4 and 3",
        ),
        ({"pattern_type": "adaptive", "query": [1.0], "key": X}, TypeError, "q must be a tensor, got list"),
        ({"pattern_type": "adaptive", "query": X, "key": X.long()}, TypeError, "got torch.int64"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_building_states_rule_and_fact(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(**changes)


def test_segments_bind_blocks_of_dilated_patterns_alone() -> None:
    branches = {"segment_lengths": (3,), "dilation_rates": (1,)}
    assert build("local_window", **branches).rows == 4
    assert build(segment_lengths=(4,), dilation_rates=(1,)).rows == 4
    with pytest.raises(ValueError, match="same length, got 1 and 2"):  # checked all the same
        build("local_window", segment_lengths=(3,), dilation_rates=(1, 2))


def test_configs_normalise_and_are_hashable() -> None:
    config = SparsePatternConfig(sparsity_ratio=1, hierarchy=[[1, 1]])  # type: ignore[list-item]
    assert config.sparsity_ratio == 1.0
    assert config.hierarchy == config.levels == ((1, 1.0),)
    assert hash(config) == hash(SparsePatternConfig(sparsity_ratio=1.0, hierarchy=((1, 1.0),)))
    assert SparsePatternConfig.of(config) is config
    assert SparsePatternConfig.of(None) == SparsePatternConfig.of({}) == SparsePatternConfig()
    assert SparsePatternConfig.of({"block_size": 64}).block_size == 64
    assert SparsePatternConfig().levels == ((1, 0.5), (4, 0.25), (16, 0.25))
    with pytest.raises(AttributeError):
        config.seed = 3  # type: ignore[misc]


def test_the_limits_themselves_are_allowed() -> None:
    SparsePatternConfig(block_size=2**16)
    SparsePatternConfig(window_size=128, global_tokens=0, seed=2**63 - 1)
    assert build_block_pattern({"sparsity_ratio": 1e-300, "block_size": 1}, 5, 1, **DILATED).density == 0.2
    random = {"pattern_type": "random", "seed": 2**63 - 1, "block_size": 1}
    assert build_block_pattern(random, 5, 1).rows == 5


DILATED = {"segment_lengths": (5,), "dilation_rates": (1,)}
