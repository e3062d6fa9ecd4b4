"""Bad input states the rule and the fact, before any kernel runs: each rule once, in which words.

What else breaks the same rules, in any public function or class, is in test_bad_calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import (
    BlockPattern,
    DilatedKVCache,
    DilatedSpec,
    Execution,
    SparsePatternConfig,
    attend_last,
    block_sparse_attention,
    branches_for,
    build_block_pattern,
    dilated_attention,
    ring_block_sparse_attention,
    ring_dilated_attention,
)
from dilated_attention_pytorch.reference import dilated_attention_reference
from support.executions import dilated, packed
from support.tolerances import assert_close

X = torch.randn(1, 16, 4, 8)
BRANCHES: dict[str, Any] = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
Case = tuple[dict[str, Any], type[Exception], str]


def layouts(count: int, n: int = 16) -> BlockPattern:
    return BlockPattern.from_layout(torch.ones(count, 4, 4, dtype=torch.bool), n, 4)


PATTERN = layouts(1)


def call_dilated(**changes: Any) -> Any:
    attention = dilated if "head_slice" in changes else dilated_attention
    return attention(**packed({"q": X, "k": X, "v": X, **BRANCHES, **changes}))


def call_blocks(**changes: Any) -> Any:
    return block_sparse_attention(**packed({"q": X, "k": X, "v": X, "pattern": PATTERN, **changes}))


def build(pattern_type: str = "dilated_sparse", **changes: Any) -> BlockPattern:
    config = {"pattern_type": pattern_type, "block_size": 4, "sparsity_ratio": 0.5}
    return build_block_pattern(**{"config": config, "n": 16, "num_heads": 4, **changes})


def same(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"q": x, "k": x, "v": x}


def kv(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"k": x, "v": x}


NESTED = torch.nested.nested_tensor([X[0], X[0]], layout=torch.jagged)
ONES = torch.ones(1, 16, dtype=torch.bool)
POSITIVE = "must be a positive integer, got"
ATTENTION: list[Case] = [  # of all public functions of attention
    ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
    ({"return_lse": "no"}, TypeError, "return_lse must be a bool, got 'no'"),
    ({"scale": 10**400}, ValueError, "scale must be finite, got inf"),
    ({"scale": "1"}, TypeError, "scale must be a number, got '1' of type str"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must lie between 0 and 1, got 1.5"),
    ({"kernel": "fast"}, ValueError, "kernel must be one of 'auto', .* got 'fast'"),
    ({"kernel": "stock", "dropout_p": 0.1}, ValueError, "'stock' cannot run this call: it has no dropout"),
    ({"memory": "swap"}, ValueError, "memory must be 'fresh', 'pool', 'lightweight' or a buffer manager"),
    ({"memory": None}, TypeError, "memory must be .* got None"),
    ({"use_pattern_cache": 1}, TypeError, "use_pattern_cache must be a bool, got 1"),
    ({"workspace_bytes": 0}, ValueError, f"workspace_bytes {POSITIVE} 0"),
    ({"workspace_bytes": 10**30}, ValueError, r"workspace_bytes must be below 2\*\*62"),
    ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    ({"q": NESTED}, TypeError, "q must be a dense"),
    ({"k": X.to_sparse()}, TypeError, "k must be a dense tensor, got torch.sparse_coo"),
    ({"q": X[0]}, ValueError, r"q must have 4 dimensions \(b, n, h, d\), got shape \(16, 4, 8\)"),
    ({"k": X.long()}, TypeError, "k must be float16, bfloat16, float32 or float64, got torch.int64"),
    ({"k": X.double()}, TypeError, "one dtype, got torch.float32, torch.float64 and torch.float32"),
    ({"k": X.to("meta")}, ValueError, "one device, got cpu, meta and cpu"),
    (same(X[:, :0]), ValueError, r"at least one position.*got shape \(1, 0"),
    (same(X[:, :, :0]), ValueError, "at least one position, head"),
    (same(X[..., :0]), ValueError, "at least one position, head"),
    (kv(X[:, :8]), ValueError, r"with the b, n and d of q, got q \(1, 16, 4, 8\), k \(1, 8"),
    ({"v": X[..., :4]}, ValueError, "with the b, n and d of q"),
    (kv(X[:, :, :3]), ValueError, "multiple of those of k and v, got 4 and 3"),
    (kv(X[:, :, :0]), ValueError, "multiple of those of k and v, got 4 and 0"),
    ({"key_mask": torch.ones(1, 16)}, TypeError, "key_mask must be a bool tensor, got torch.float32"),
    ({"key_mask": ONES[0]}, ValueError, r"shape \(b, n\) = \(1, 16\), got \(16,\)"),
    ({"key_mask": ONES.to("meta")}, ValueError, "on the device of q, cpu"),
]
DILATED: list[Case] = [
    ({"segment_lengths": [4]}, ValueError, "same length, got 1 and 2"),
    ({"segment_lengths": [], "dilation_rates": []}, ValueError, "must name at least one branch"),
    ({"segment_lengths": [4, 0]}, ValueError, r"segment_lengths must be positive, got \(4, 0\)"),
    ({"dilation_rates": [1, 2.0]}, TypeError, "dilation_rates must hold integers, got 2.0 of type float"),
    ({"segment_lengths": 4}, TypeError, "segment_lengths must be a sequence of integers, got 4"),
    ({"segment_lengths": [4, 2**63]}, ValueError, r"segment_lengths must be below 2\*\*62"),
    ({"dilation_rates": [1, 2**40]}, ValueError, r"dilation_rates must be below 2\*\*31"),
    ({"segment_lengths": [8, 16], "dilation_rates": [9, 1]}, ValueError, "got rate 9 for a segment of 8$"),
    ({"segment_lengths": [1, 2], "dilation_rates": [8, 9]}, ValueError, r"of 1; were .* exchanged\?"),
    ({"head_mixing": "some"}, ValueError, "head_mixing must be one of 'all', 'grouped', got 'some'"),
    ({"head_offsets": None}, ValueError, "must be one of 'interleaved', 'blocked', got None"),
    ({"tail": "pad"}, ValueError, "tail must be one of 'exact', 'phantom', got 'pad'"),
    ({"detach_mixing": "no"}, TypeError, "detach_mixing must be a bool, got 'no'"),
    ({"head_slice": (0, 4.0)}, TypeError, r"must be two integers \(first, total\), got \(0, 4.0\)"),
    ({"head_slice": (0, 2**31)}, ValueError, r"a total below 2\*\*31, got 2147483648"),
    ({"head_slice": (2, 5)}, ValueError, r"first \+ 4 heads of q within total, got \(2, 5\)"),
    ({"head_slice": (1, 8), **kv(X[:, :, :2])}, ValueError, r"not cut the 2 query heads .*, got \(1, 8\)"),
    ({"cu_seqlens": [0, 16]}, TypeError, "cu_seqlens must be an int32 or int64 tensor, got list"),
    ({"cu_seqlens": torch.tensor([0, 16], device="meta")}, ValueError, "of q, cpu, got meta"),
    ({"cu_seqlens": torch.tensor([[0, 16]])}, ValueError, "cu_seqlens must have one dimension"),
    ({"cu_seqlens": torch.tensor([0, 8])}, ValueError, r"from 0 to the sequence length 16, got \(0, 8\)"),
    ({"cu_seqlens": torch.tensor([1, 16])}, ValueError, "from 0 to the sequence length 16"),
    ({"cu_seqlens": torch.tensor([0])}, ValueError, "from 0 to the sequence length 16"),
    ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, ValueError, "from 0 to the sequence length 16"),
    ({"cu_seqlens": torch.tensor([0, 9, 4, 16])}, ValueError, r"must not decrease, got \(0, 9, 4, 16\)"),
    ({**same(X.expand(2, -1, -1, -1)), "cu_seqlens": torch.tensor([0, 16])}, ValueError, "batch of 1, got"),
]
BLOCKS: list[Case] = [
    ({"pattern": PATTERN.to_layout()}, TypeError, "pattern must be a BlockPattern, got Tensor"),
    ({"pattern": SparsePatternConfig()}, TypeError, "must be a BlockPattern, got SparsePatternConfig"),
    ({"pattern": layouts(1, 15)}, ValueError, "is for a length of 15, got tensors of length 16"),
    ({"pattern": layouts(3)}, ValueError, "one for each of the 4 heads or .* 1 x 4 .* got 3"),
    ({"pattern": PATTERN.causal()}, ValueError, "is for causal attention, got is_causal=False"),
]
CONFIG: list[Case] = [
    ({"pattern_type": "window"}, ValueError, "one of 'dilated_sparse', .*'adaptive', got 'window'"),
    ({"sparsity_ratio": 0.0}, ValueError, "fraction kept, above 0 and at most 1, got 0.0"),
    ({"sparsity_ratio": 1.0001}, ValueError, "above 0 and at most 1, got 1.0001"),
    ({"sparsity_ratio": math.nan}, ValueError, "sparsity_ratio must be finite, got nan"),
    ({"sparsity_ratio": "0.1"}, TypeError, "sparsity_ratio must be a number, got '0.1' of type str"),
    ({"block_size": 0}, ValueError, f"block_size {POSITIVE} 0"),
    ({"block_size": 2**16 + 1}, ValueError, "block_size must be at most 65536, got 65537"),
    ({"window_size": 127}, ValueError, "hold at least one block of 128 tokens, got 127"),
    ({"window_size": 0}, ValueError, f"window_size {POSITIVE} 0"),
    ({"global_tokens": -1}, ValueError, "integer of 0 or more, got -1"),
    ({"seed": 0.5}, ValueError, "seed must be an integer of 0 or more, got 0.5"),
    ({"seed": 2**63}, ValueError, r"seed must be below 2\*\*63"),
    ({"hierarchy": "coarse"}, ValueError, "levels or one of 'standard', .*'long_range', got 'coarse'"),
    ({"hierarchy": ()}, ValueError, "hierarchy must have 1 to 32 levels, got 0"),
    ({"hierarchy": ((1, 0.01),) * 33}, ValueError, "hierarchy must have 1 to 32 levels, got 33"),
    ({"hierarchy": 3}, TypeError, r"hierarchy must hold pairs \(stride, share\), got 3"),
    ({"hierarchy": (1, 2)}, TypeError, r"hierarchy must hold pairs \(stride, share\)"),
    ({"hierarchy": ((1, 0.5, 3),)}, TypeError, r"hierarchy must hold pairs \(stride, share\)"),
    ({"hierarchy": ((0, 0.5),)}, ValueError, f"a stride of hierarchy {POSITIVE} 0"),
    ({"hierarchy": ((1, 0.0),)}, ValueError, "a share of hierarchy must lie above 0 .* got 0.0"),
    ({"hierarchy": ((1, math.nan),)}, ValueError, "a share of hierarchy must be finite, got nan"),
    ({"hierarchy": ((1, 0.7), (2, 0.7))}, ValueError, "shares of hierarchy must add up to at most 1"),
]
ADAPTIVE = {"pattern_type": "adaptive", "query": X}
BUILD: list[Case] = [
    ({"config": {"ratio": 0.1}}, ValueError, r"has the fields pattern_type, .*, got \['ratio'\]"),
    ({"config": {"block_size": 64, 5: 1}}, ValueError, r"sparse_config has the fields .*, got \[5\]"),
    ({"config": "local_window"}, TypeError, "must be a SparsePatternConfig or a dict, got str"),
    ({"n": 16.0}, ValueError, f"n {POSITIVE} 16.0"),
    ({"num_heads": "4"}, ValueError, f"num_heads {POSITIVE} '4'"),
    ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
    ({"segment_lengths": (8,)}, ValueError, "are given together, got segment_lengths alone"),
    ({"segment_lengths": (8, 16), "dilation_rates": (1,)}, ValueError, "same length, got 2 and 1"),
    (
        {"segment_lengths": (16, 3), "dilation_rates": (1, 2)},
        ValueError,
        "block_size of 4 and a segment of 3",
    ),
    ({"query": X, "key": X}, ValueError, "are for \"adaptive\" patterns, got one of 'dilated_sparse'"),
    (ADAPTIVE, ValueError, "depends on query and key"),
    ({**ADAPTIVE, "key": X, "segment_lengths": (0,), "dilation_rates": (1,)}, ValueError, "must be positive"),
    ({**ADAPTIVE, "query": X[:, :8], "key": X[:, :8]}, ValueError, r"length 16 and 4 heads, got .*\(1, 8, 4"),
    ({**ADAPTIVE, "query": X[:, :, :2], "key": X[:, :, :2]}, ValueError, r"4 heads, got shape \(1, 16, 2"),
    ({**ADAPTIVE, "key": X[:, :8]}, ValueError, "with the b, n and d of q"),
]
LENGTHS: list[Case] = [
    ({"max_length": None}, ValueError, f"max_length {POSITIVE} None"),
    ({"max_length": 2**62}, ValueError, r"below 2\*\*62"),
    ({"max_length": 5, "num_heads": 0}, ValueError, f"num_heads {POSITIVE} 0"),
    ({"max_length": 5, "first": -1}, ValueError, f"first {POSITIVE} -1"),
    ({"max_length": 5, "ratio": 1}, ValueError, "ratio must be at least 2"),
]
TABLES: dict[str, tuple[Callable[..., Any], list[Case]]] = {
    "dilated": (call_dilated, ATTENTION + DILATED),
    "block-sparse": (call_blocks, ATTENTION + BLOCKS),
    "SparsePatternConfig": (SparsePatternConfig, CONFIG),
    "a config as a dict": (lambda **fields: build_block_pattern(fields, 1024, 2), CONFIG),
    "build_block_pattern": (build, BUILD),
    "branches_for": (branches_for, LENGTHS),
}


@pytest.mark.parametrize(
    ("call", "changes", "error", "message"),
    [
        pytest.param(call, *case, id=f"{name}: {', '.join(case[0])}: {case[2]}")
        for name, (call, cases) in TABLES.items()
        for case in cases
    ],
)
def test_rule_and_fact(call: Callable[..., Any], changes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


def test_the_same_calls_without_the_mistake_run() -> None:
    assert call_dilated().shape == X.shape
    assert call_dilated(segment_lengths=[4, 2**62 - 1], dilation_rates=[1, 2**31 - 1]).isfinite().all()
    for count in (1, 4):
        assert call_blocks(pattern=layouts(count)).shape == X.shape
        assert call_blocks(pattern=layouts(count).causal(), is_causal=True).shape == X.shape
    assert SparsePatternConfig(block_size=2**16).block_size == 2**16
    assert SparsePatternConfig(window_size=128, global_tokens=0, seed=2**63 - 1).global_tokens == 0
    sparse = {"sparsity_ratio": 1e-300, "block_size": 1}
    assert build_block_pattern(sparse, 5, 1, segment_lengths=(5,), dilation_rates=(1,)).density == 0.2
    random = {"pattern_type": "random", "seed": 2**63 - 1, "block_size": 1}
    assert build_block_pattern(random, 5, 1).rows == 5


def test_specs_and_configs_normalise_and_are_hashable() -> None:
    spec = DilatedSpec([4, 8], torch.tensor([1, 2]), scale=1)  # type: ignore[arg-type]
    assert spec == DilatedSpec((4, 8), (1, 2), scale=1.0)
    assert hash(spec) == hash(DilatedSpec((4, 8), (1, 2), scale=1.0))
    assert spec.branches == ((4, 1), (8, 2))
    config = SparsePatternConfig(sparsity_ratio=1, hierarchy=[[1, 1]])  # type: ignore[list-item]
    assert config.sparsity_ratio == 1.0
    assert config.hierarchy == config.levels == ((1, 1.0),)
    assert hash(config) == hash(SparsePatternConfig(sparsity_ratio=1.0, hierarchy=((1, 1.0),)))
    assert SparsePatternConfig.of(config) is config
    assert SparsePatternConfig.of(None) == SparsePatternConfig.of({}) == SparsePatternConfig()
    assert SparsePatternConfig.of({"block_size": 64}).block_size == 64
    assert SparsePatternConfig().levels == ((1, 0.5), (4, 0.25), (16, 0.25))
    for frozen, name in ((spec, "tail"), (config, "seed")):
        with pytest.raises(AttributeError):
            setattr(frozen, name, getattr(frozen, name))


def test_segments_bind_blocks_of_dilated_patterns_alone() -> None:
    assert build("local_window", segment_lengths=(3,), dilation_rates=(1,)).rows == 4
    assert build(segment_lengths=(4,), dilation_rates=(1,)).rows == 4
    with pytest.raises(ValueError, match="same length, got 1 and 2"):  # checked all the same
        build("local_window", segment_lengths=(3,), dilation_rates=(1, 2))


def test_a_spec_stands_for_its_options() -> None:
    spec = DilatedSpec([4, 8], [1, 2], is_causal=True, scale=0.3, tail="phantom", head_mixing="grouped")
    mask = torch.rand(1, 16) > 0.3
    of_call = {"key_mask": mask, "return_lse": True, "execution": Execution("eager")}
    expected = dilated_attention(X, X, X, **vars(spec), **of_call)
    for got in (
        dilated_attention(X, X, X, spec, **of_call),
        dilated_attention(X, X, X, segment_lengths=spec, **of_call),
        ring_dilated_attention(X, X, X, spec, **of_call),
        dilated_attention_reference(X, X, X, spec, key_mask=mask, return_lse=True),
    ):
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, torch.float32)
    for twice in ({"is_causal": True}, {"scale": None}, {"dilation_rates": [1, 2]}):
        with pytest.raises(
            TypeError, match=f"takes {next(iter(twice))} from the DilatedSpec .* got it again"
        ):
            dilated_attention(X, X, X, spec, **twice)
    with pytest.raises(TypeError, match="takes dilation_rates from the DilatedSpec"):
        dilated_attention(X, X, X, spec, [1, 2])
    with pytest.raises(TypeError, match="dilation_rates must be a sequence of integers, got None"):
        dilated_attention(X, X, X, [4, 8])


@pytest.mark.parametrize("name", ["kernel", "workspace_bytes", "memory", "use_pattern_cache"])
def test_how_to_run_is_an_execution(name: str) -> None:
    for call in (
        partial(dilated_attention, X, X, X, [4], [1]),
        partial(ring_dilated_attention, X, X, X, [4], [1]),
        partial(block_sparse_attention, X, X, X, PATTERN),
        partial(ring_block_sparse_attention, X, X, X, PATTERN),
        partial(attend_last, X, X, X, [4], [1]),
        partial(DilatedKVCache, [4], [1], batch_size=1, num_kv_heads=4, head_dim=8),
    ):
        with pytest.raises(TypeError, match=rf"has no '{name}'; execution=Execution\({name}=...\) is meant"):
            call(**{name: None})
        with pytest.raises(TypeError, match="execution must be an Execution or None, got dict"):
            call(execution={})


def test_steps_and_slices_of_heads_are_not_public() -> None:
    assert len(signature(dilated_attention).parameters) == 16
    for name in ("steps", "head_slice"):
        with pytest.raises(TypeError, match=f"dilated_attention has no '{name}'"):
            dilated_attention(X, X, X, [4], [1], **{name: 1})
