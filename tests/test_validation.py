"""Bad input: a ValueError or TypeError that states the rule and the fact, before any kernel runs."""

from __future__ import annotations

import math
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
    attend_last,
    block_sparse_attention,
    dilated_attention,
    ring_block_sparse_attention,
    ring_dilated_attention,
)
from dilated_attention_pytorch.ops import attention_op, write_execution, write_spec
from dilated_attention_pytorch.reference import dilated_attention_reference
from support.executions import dilated, packed
from support.tolerances import assert_close


def call(**changes: Any) -> Any:
    x = torch.randn(1, 16, 4, 8)
    arguments: dict[str, Any] = {"q": x, "k": x, "v": x, "segment_lengths": [4, 8], "dilation_rates": [1, 2]}
    attention = dilated if "head_slice" in changes else dilated_attention
    return attention(**packed(arguments | changes))


X = torch.randn(1, 16, 4, 8)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"segment_lengths": [4]}, ValueError, "same length, got 1 and 2"),
        (
            {"segment_lengths": [], "dilation_rates": []},
            ValueError,
            "segment_lengths must name at least one branch",
        ),
        ({"segment_lengths": [4, 0]}, ValueError, r"segment_lengths must be positive, got \(4, 0\)"),
        ({"dilation_rates": [1, -2]}, ValueError, r"dilation_rates must be positive, got \(1, -2\)"),
        ({"dilation_rates": [1, 2.0]}, TypeError, "dilation_rates must hold integers, got 2.0 of type float"),
        ({"dilation_rates": [1, math.nan]}, TypeError, "dilation_rates must hold integers, got nan"),
        ({"dilation_rates": [1, True]}, TypeError, "dilation_rates must hold integers, got True"),
        ({"segment_lengths": 4}, TypeError, "segment_lengths must be a sequence of integers, got 4"),
        ({"segment_lengths": "48"}, TypeError, "segment_lengths must be a sequence of integers, got '48'"),
        ({"segment_lengths": [4, 2**63]}, ValueError, r"segment_lengths must be below 2\*\*62"),
        ({"dilation_rates": [1, 2**40]}, ValueError, r"dilation_rates must be below 2\*\*31"),
        ({"segment_lengths": {4, 8}}, TypeError, "segment_lengths must be a sequence of integers"),
        ({"workspace_bytes": 10**30}, ValueError, r"workspace_bytes must be below 2\*\*62"),
        ({"scale": 10**400}, ValueError, "scale must be finite, got inf"),
        ({"return_lse": "no"}, TypeError, "return_lse must be a bool, got 'no'"),
        ({"cu_seqlens": torch.empty(2, dtype=torch.int32, device="meta")}, ValueError, "of q, cpu, got meta"),
        (
            {"q": torch.nested.nested_tensor([X[0], X[0]], layout=torch.jagged)},
            TypeError,
            "q must be a dense",
        ),
        ({"scale": math.inf}, ValueError, "scale must be finite, got inf"),
        ({"scale": "1"}, TypeError, "scale must be a number, got '1' of type str"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p must lie between 0 and 1, got 1.5"),
        ({"dropout_p": math.nan}, ValueError, "dropout_p must be finite"),
        ({"head_mixing": "some"}, ValueError, "head_mixing must be one of 'all', 'grouped', got 'some'"),
        (
            {"head_offsets": None},
            ValueError,
            "head_offsets must be one of 'interleaved', 'blocked', got None",
        ),
        ({"tail": "pad"}, ValueError, "tail must be one of 'exact', 'phantom', got 'pad'"),
        ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
        ({"detach_mixing": "no"}, TypeError, "detach_mixing must be a bool, got 'no'"),
        ({"memory": "swap"}, ValueError, "memory must be 'fresh', 'pool', 'lightweight' or a buffer manager"),
        ({"memory": "manager:0"}, ValueError, "or a buffer manager's name, got 'manager:0'"),
        ({"memory": None}, TypeError, "memory must be .* got None"),
        ({"use_pattern_cache": 1}, TypeError, "use_pattern_cache must be a bool, got 1"),
        ({"workspace_bytes": 0}, ValueError, "workspace_bytes must be a positive integer, got 0"),
        (
            {"head_slice": (0, 4.0)},
            TypeError,
            r"head_slice must be two integers \(first, total\), got \(0, 4.0\)",
        ),
        ({"head_slice": 3}, TypeError, "head_slice must be two integers"),
        ({"head_slice": (0, 2**31)}, ValueError, r"a total below 2\*\*31, got 2147483648"),
        ({"head_slice": (2, 5)}, ValueError, r"first \+ 4 heads of q within total, got \(2, 5\)"),
        (
            {"head_slice": (1, 8), "k": X[:, :, :2], "v": X[:, :, :2]},
            ValueError,
            r"must not cut the 2 query heads that share a key head, got \(1, 8\)",
        ),
        ({"workspace_bytes": 2.5}, ValueError, "workspace_bytes must be a positive integer, got 2.5"),
        ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
        ({"v": None}, TypeError, "v must be a tensor, got NoneType"),
        ({"k": X.to_sparse()}, TypeError, "k must be a dense tensor, got torch.sparse_coo"),
        ({"q": X[0]}, ValueError, r"q must have 4 dimensions \(b, n, h, d\), got shape \(16, 4, 8\)"),
        ({"k": X.long()}, TypeError, "k must be float16, bfloat16, float32 or float64, got torch.int64"),
        ({"q": X.to(torch.complex64)}, TypeError, "q must be float16, .* got torch.complex64"),
        ({"k": X.double()}, TypeError, "one dtype, got torch.float32, torch.float64 and torch.float32"),
        ({"k": X.to("meta")}, ValueError, "one device, got cpu, meta and cpu"),
        (
            {"q": X[:, :0], "k": X[:, :0], "v": X[:, :0]},
            ValueError,
            r"at least one position.*got shape \(1, 0",
        ),
        ({"q": X[:, :, :0], "k": X[:, :, :0], "v": X[:, :, :0]}, ValueError, "at least one position, head"),
        ({"q": X[..., :0], "k": X[..., :0], "v": X[..., :0]}, ValueError, "at least one position, head"),
        (
            {"k": X[:, :8], "v": X[:, :8]},
            ValueError,
            r"with the b, n and d of q, got q \(1, 16, 4, 8\), k \(1, 8",
        ),
        ({"v": X[..., :4]}, ValueError, "with the b, n and d of q"),
        ({"k": X[:, :, :3], "v": X[:, :, :3]}, ValueError, "multiple of those of k and v, got 4 and 3"),
        ({"k": X[:, :, :0], "v": X[:, :, :0]}, ValueError, "multiple of those of k and v, got 4 and 0"),
        ({"key_mask": torch.ones(1, 16)}, TypeError, "key_mask must be a bool tensor, got torch.float32"),
        ({"key_mask": [True] * 16}, TypeError, "key_mask must be a bool tensor, got list"),
        (
            {"key_mask": torch.ones(16, dtype=torch.bool)},
            ValueError,
            r"shape \(b, n\) = \(1, 16\), got \(16,\)",
        ),
        (
            {"key_mask": torch.ones(1, 16, dtype=torch.bool, device="meta")},
            ValueError,
            "on the device of q, cpu",
        ),
        ({"cu_seqlens": torch.tensor([0.0, 16.0])}, TypeError, "cu_seqlens must be an int32 or int64 tensor"),
        ({"cu_seqlens": [0, 16]}, TypeError, "cu_seqlens must be an int32 or int64 tensor, got list"),
        ({"cu_seqlens": torch.tensor([[0, 16]])}, ValueError, "cu_seqlens must have one dimension"),
        ({"cu_seqlens": torch.tensor([0, 8])}, ValueError, r"from 0 to the sequence length 16, got \(0, 8\)"),
        ({"cu_seqlens": torch.tensor([1, 16])}, ValueError, "from 0 to the sequence length 16"),
        ({"cu_seqlens": torch.tensor([0])}, ValueError, "from 0 to the sequence length 16"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, ValueError, "from 0 to the sequence length 16"),
        ({"cu_seqlens": torch.tensor([0, 9, 4, 16])}, ValueError, r"must not decrease, got \(0, 9, 4, 16\)"),
        (
            {"q": X.expand(2, -1, -1, -1), "k": X.expand(2, -1, -1, -1), "v": X.expand(2, -1, -1, -1)}
            | {"cu_seqlens": torch.tensor([0, 16])},
            ValueError,
            "batch of 1, got a batch of 2",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_rule_and_fact(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


def test_the_same_call_without_the_mistake_runs() -> None:
    assert call().shape == X.shape


def test_the_largest_segments_and_rates_run() -> None:
    assert call(segment_lengths=[4, 2**62 - 1], dilation_rates=[1, 2**31 - 1]).isfinite().all()


def test_the_spec_normalises_and_is_hashable() -> None:
    spec = DilatedSpec([4, 8], torch.tensor([1, 2]), scale=1)  # type: ignore[arg-type]
    assert spec == DilatedSpec((4, 8), (1, 2), scale=1.0)
    assert hash(spec) == hash(DilatedSpec((4, 8), (1, 2), scale=1.0))
    assert spec.branches == ((4, 1), (8, 2))
    with pytest.raises(AttributeError):
        spec.tail = "phantom"  # type: ignore[misc]


def test_calling_the_op_directly_is_validated_too() -> None:
    spec = write_spec("dilated", DilatedSpec([9], [1], True, 0.3)).replace("(9,)", "(0,)")
    with pytest.raises(ValueError, match="segment_lengths must be positive"):
        attention_op(X, X, X, None, None, None, None, None, spec, write_execution(Execution()))


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
        (name,) = twice
        with pytest.raises(TypeError, match=f"takes {name} from the DilatedSpec .* got it again"):
            dilated_attention(X, X, X, spec, **twice)
    with pytest.raises(TypeError, match="takes dilation_rates from the DilatedSpec"):
        dilated_attention(X, X, X, spec, [1, 2])
    with pytest.raises(TypeError, match="dilation_rates must be a sequence of integers, got None"):
        dilated_attention(X, X, X, [4, 8])


@pytest.mark.parametrize("name", ["kernel", "workspace_bytes", "memory", "use_pattern_cache"])
def test_how_to_run_is_an_execution(name: str) -> None:
    pattern = BlockPattern.from_layout(torch.ones(4, 4, dtype=torch.bool), 16, 4)
    cache = {"batch_size": 1, "num_kv_heads": 4, "head_dim": 8}
    for call in (
        partial(dilated_attention, X, X, X, [4], [1]),
        partial(ring_dilated_attention, X, X, X, [4], [1]),
        partial(block_sparse_attention, X, X, X, pattern),
        partial(ring_block_sparse_attention, X, X, X, pattern),
        partial(attend_last, X, X, X, [4], [1]),
        partial(DilatedKVCache, [4], [1], **cache),
    ):
        with pytest.raises(TypeError, match=rf"has no '{name}'; execution=Execution\({name}=...\) is meant"):
            call(**{name: None})
        with pytest.raises(TypeError, match="execution must be an Execution or None, got dict"):
            call(execution={})


def test_steps_and_slices_of_heads_are_not_public() -> None:
    parameters = signature(dilated_attention).parameters
    assert len(parameters) == 16
    for name in ("steps", "head_slice"):
        with pytest.raises(TypeError, match=f"dilated_attention has no '{name}'"):
            dilated_attention(X, X, X, [4], [1], **{name: 1})
