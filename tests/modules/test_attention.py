"""`DilatedAttention`: the function with its options in a module."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import DilatedAttention, dilated_attention

SEGMENTS, RATES = [8, 14, 40], [1, 2, 5]


@pytest.fixture
def qkv() -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 37, heads, 8) for heads in (6, 3, 3))


def test_equals_the_function(qkv: tuple[Tensor, ...]) -> None:
    mask = torch.rand(2, 37) > 0.3
    module = DilatedAttention(SEGMENTS, RATES, softmax_scale=0.2, head_offsets="blocked", tail="phantom")
    expected = dilated_attention(
        *qkv, SEGMENTS, RATES, scale=0.2, head_offsets="blocked", tail="phantom", key_mask=mask
    )
    assert torch.equal(module(*qkv, attention_mask=mask), expected)
    causal = DilatedAttention(SEGMENTS, RATES)(*qkv, is_causal=True)
    assert torch.equal(causal, dilated_attention(*qkv, SEGMENTS, RATES, is_causal=True))


@pytest.mark.parametrize("name", ["attention_dropout", "dropout"])
def test_dropout_acts_only_in_training(qkv: tuple[Tensor, ...], name: str) -> None:
    module = DilatedAttention(SEGMENTS, RATES, **{name: 0.5})  # type: ignore[arg-type]
    plain = dilated_attention(*qkv, SEGMENTS, RATES)
    assert not torch.allclose(module(*qkv), plain)
    assert torch.equal(module.eval()(*qkv), plain)


def test_the_two_dropout_names_must_agree() -> None:
    with pytest.raises(ValueError, match=r"are one option, got the two values 0\.1 and 0\.2"):
        DilatedAttention(SEGMENTS, RATES, attention_dropout=0.2, dropout=0.1)
    assert DilatedAttention(SEGMENTS, RATES, attention_dropout=0.2, dropout=0.2).spec.dropout_p == 0.2


def test_declared_device_and_dtype_are_checked(qkv: tuple[Tensor, ...]) -> None:
    assert DilatedAttention(SEGMENTS, RATES, device="cpu", dtype=torch.float32)(*qkv).shape == (2, 37, 6, 8)
    with pytest.raises(TypeError, match=r"made for torch\.float64, got torch\.float32"):
        DilatedAttention(SEGMENTS, RATES, dtype=torch.float64)(*qkv)
    with pytest.raises(ValueError, match="made for the device cuda:1, got cpu"):
        DilatedAttention(SEGMENTS, RATES, device="cuda:1")(*qkv)
    assert DilatedAttention(SEGMENTS, RATES, device="cpu:0")(*qkv).shape == (2, 37, 6, 8)
    with pytest.raises(TypeError, match=r"dtype must be a floating-point torch\.dtype, got 'float32'"):
        DilatedAttention(SEGMENTS, RATES, dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dtype must be a floating-point torch\.dtype, got torch\.int64"):
        DilatedAttention(dtype=torch.int64)
    with pytest.raises(TypeError, match="q must be a tensor, got int"):
        DilatedAttention(SEGMENTS, RATES, dtype=torch.float32)(1, 2, 3)


def test_copies_pickles_and_prints(qkv: tuple[Tensor, ...]) -> None:
    module = DilatedAttention(SEGMENTS, RATES, tail="phantom")
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(*qkv), module(*qkv))
    assert repr(module) == (
        "DilatedAttention(segment_lengths=(8, 14, 40), dilation_rates=(1, 2, 5), tail='phantom')"
    )
    assert not list(module.parameters())
    assert not module.state_dict()
