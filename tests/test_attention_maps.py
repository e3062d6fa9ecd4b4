"""Attention maps of chosen rows equal the probabilities that `dilated_attention` uses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from dilated_attention_pytorch import attention_rows, dilated_attention
from support.configurations import Configuration, configurations
from support.tolerances import assert_close


@settings(max_examples=100)
@given(configurations(max_n=120))
def test_rows_times_values_are_the_output(config: Configuration) -> None:
    q, k, v = config.tensors(torch.float64)
    options = config.options()
    out = dilated_attention(q, k, v, config.segment_lengths, config.dilation_rates, **options)
    del options["detach_mixing"]
    rows = sorted({0, config.n // 2, config.n - 1})
    probs = attention_rows(q, k, rows, config.segment_lengths, config.dilation_rates, **options)
    assert probs.shape == (config.b, config.h, len(rows), config.n)
    values = v.repeat_interleave(config.h // config.h_kv, 2)
    assert_close(torch.einsum("bhij,bjhd->bihd", probs, values), out[:, rows], torch.float64)
    sums = probs.sum(-1)
    if config.tail == "exact":
        assert ((sums - 1).abs().lt(1e-9) | (sums == 0)).all()
    else:
        assert (sums < 1 + 1e-9).all()


def test_rows_are_differentiable_also_where_nothing_is_selected() -> None:
    q, k = (torch.randn(1, 12, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda q, k: attention_rows(q, k, [0, 5, 11], [6], [4]), (q, k))


def test_few_rows_of_a_long_sequence() -> None:
    q, k = (torch.randn(1, 200_000, 2, 8) for _ in range(2))
    probs = attention_rows(q, k, torch.tensor([0, 150_000]), [2048, 65536], [1, 16], is_causal=True)
    assert probs.shape == (1, 2, 2, 200_000)
    assert not probs[0, :, 1, 150_001:].any()
    assert_close(probs.sum(-1), torch.ones(1, 2, 2), torch.float32)


def test_rows_keep_their_precision_under_autocast() -> None:
    q, k = (torch.randn(1, 30, 2, 8) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        probs = attention_rows(q, k, [3, 29], [30], [1])
    assert torch.equal(probs, attention_rows(q, k, [3, 29], [30], [1]))


@pytest.mark.parametrize("rows", [[], [1.5], [[1]], [-1], [12], torch.tensor([True]), None, ["a"]], ids=str)
def test_bad_rows(rows: object) -> None:
    q = torch.randn(1, 12, 2, 4)
    with pytest.raises(ValueError, match="rows must"):
        attention_rows(q, q, rows, [6], [1])  # type: ignore[arg-type]
