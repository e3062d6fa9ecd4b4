"""Choosing tokens: the distribution that was asked for, and the same tokens for the same seed."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dilated_attention_pytorch.modules.sampling import (
    Sampler,
    Sampling,
    draw,
    likeliest,
    row_seeds,
    shape_probabilities,
)


def expected_probabilities(
    row: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> list[float]:
    """The distribution in plain Python, by token."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    largest = max(row)
    weights = [math.exp((x - largest) / temperature) for x in row]
    kept = order[: top_k or len(row)]
    total = sum(weights[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if top_p is not None and mass >= top_p:
            break
        nucleus.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(row))]


def by_token(logits: Tensor, **options: Any) -> Tensor:
    probabilities, tokens = shape_probabilities(logits, **options)
    return torch.zeros_like(probabilities).scatter(1, tokens, probabilities)


@given(
    row=st.lists(st.integers(-40, 40).map(lambda x: x / 8), min_size=1, max_size=12),
    temperature=st.sampled_from([0.25, 1.0, 3.0]),
    top_k=st.one_of(st.none(), st.integers(1, 12)),
    # Between the sums that occur: at a sum itself rounding decides.
    top_p=st.one_of(st.none(), st.floats(0.01, 0.99)),
)
def test_distribution_is_that_of_plain_python(
    row: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    top_k = None if top_k is None else min(top_k, len(row))
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    logits = torch.tensor([row, [x + 100 for x in row]], dtype=torch.float64)  # a shift changes nothing
    want = torch.tensor(expected_probabilities(row, temperature, top_k, top_p), dtype=torch.float64)
    for got in by_token(logits, **options):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7, "top_k": 4}])
def test_evenly_spaced_numbers_draw_the_distribution(options: dict[str, Any]) -> None:
    logits = torch.tensor([[0.3, 2.0, -1.0, 1.2, 2.0, -math.inf]])
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = draw(logits.expand(count, -1), uniforms, **options)
    shares = tokens.bincount(minlength=6) / count
    torch.testing.assert_close(shares.double(), by_token(logits, **options)[0], atol=1.01 / count, rtol=0)


def test_sampler_draws_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0], [3.0, 0.0, 0.0, 0.0]])
    sampler = Sampler(Sampling(do_sample=True, seed=3), 2)
    drawn = torch.stack([sampler(logits) for _ in range(4000)])
    for row, probabilities in enumerate(logits.softmax(1)):
        shares = drawn[:, row].bincount(minlength=4) / 4000
        deviation = (probabilities * (1 - probabilities) / 4000).sqrt()  # of a share of 4000 draws
        assert ((shares - probabilities).abs() < 5 * deviation).all()
    # The rows' numbers are independent: given row 1, row 0 still has its distribution.
    shares = drawn[drawn[:, 1] == 0, 0].bincount(minlength=4).double()
    assert (shares / shares.sum() - logits[0].softmax(0)).abs().max() < 0.05


def test_ends_of_the_distribution() -> None:
    logits = torch.tensor([[1.0, 0.0, -math.inf, 2.0]]).expand(3, -1)
    # The last stands for a product that rounds up.
    ends = torch.tensor([0.0, 1 - 2**-53, 1.0], dtype=torch.float64)
    assert draw(logits, ends).tolist() == [3, 1, 1]
    assert draw(logits, ends, top_k=2).tolist() == [3, 0, 0]
    assert draw(logits, ends, top_p=1e-9).tolist() == [3, 3, 3]
    assert draw(logits, ends, temperature=1e-6).tolist() == [3, 3, 3]


def test_ties_go_to_the_smaller_token() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0]])
    assert likeliest(logits).tolist() == [1]
    assert by_token(logits, top_k=2).tolist() == [[0.0, 0.5, 0.5, 0.0]]


def sampled(logits: Tensor, steps: int = 40, *, do_sample: bool = True, **how: Any) -> Tensor:
    """Tokens (b, steps)."""
    sampler = Sampler(Sampling(do_sample, **how), logits.shape[0])
    return torch.stack([sampler(logits) for _ in range(steps)], dim=1)


def test_a_row_draws_the_same_whatever_its_neighbours() -> None:
    logits = torch.randn(4, 50)
    whole = sampled(logits, seed=7)
    assert torch.equal(whole, sampled(logits, seed=7))
    # Fewer rows behind, and other neighbours.
    assert torch.equal(whole[:2], sampled(logits[:2], seed=7))
    others = torch.cat([torch.randn(2, 50), logits[2:3]])
    assert torch.equal(whole[2], sampled(others, seed=7)[2])
    # A row on its own, by the seed that it had.
    assert torch.equal(whole[3], sampled(logits[3:], seed=[row_seeds(7, 4)[3]])[0])
    assert not torch.equal(whole, sampled(logits, seed=8))


def test_seeds_of_rows() -> None:
    logits = torch.zeros(2, 50)
    one, two = sampled(logits, seed=0)
    assert not torch.equal(one, two)
    one, two = sampled(logits, seed=[5, 5])
    assert torch.equal(one, two)
    assert len({*row_seeds(0, 100), *row_seeds(1, 100)}) == 200
    # Without a seed torch decides.
    torch.manual_seed(4)
    one, two = sampled(logits), sampled(logits)
    torch.manual_seed(4)
    assert torch.equal(sampled(logits), one)
    assert not torch.equal(one, two)


def test_seeded_draws_are_those_of_python() -> None:
    logits = torch.zeros(1, 10)  # uniform, so that a token is the first digit of the number
    rng = random.Random(11)
    digits = [int(rng.random() * 10) for _ in range(20)]
    assert sampled(logits, 20, seed=[11])[0].tolist() == digits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_greedy_takes_the_likeliest(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 17).to(dtype)
    tokens = sampled(logits, 2, do_sample=False)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, logits.argmax(1)[:, None].expand(-1, 2))


BAD = torch.tensor([[0.0, 1.0], [0.0, math.nan]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sampled(torch.zeros(3, 2), seed=[1, 2]), "one integer or 3, one a row, got 2"),
        (lambda: draw(torch.zeros(1, 4), torch.zeros(1), top_k=5), "the number of tokens, got 5 and 4"),
        (lambda: draw(BAD[:, :1], torch.zeros(1)), r"uniforms must be \(b,\) = \(2,\), got \(1,\)"),
        (lambda: likeliest(BAD.long()), r"floating-point \(b, vocab\), got torch.int64 \(2, 2\)"),
        (lambda: likeliest(torch.zeros(4)), r"got torch.float32 \(4,\)"),
        (lambda: likeliest(BAD), "largest logit of each row must be finite, got nan in row 1"),
        (lambda: shape_probabilities(BAD), "largest logit of each row must be finite, got nan in row 1"),
        (lambda: likeliest(torch.full((1, 3), -math.inf)), "got -inf in row 0"),
    ],
)
def test_bad_calls(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
