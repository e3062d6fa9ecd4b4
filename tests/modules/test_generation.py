"""Generation: the tokens of full forwards, whatever the rows' lengths, chunks and neighbours; and sampling:
the distribution that was asked for, and the same tokens for the same seed."""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention_pytorch.modules.longnet import LongNetLM
from dilated_attention_pytorch.modules.sampling import (
    Sampler,
    Sampling,
    draw,
    likeliest,
    row_seeds,
    shape_probabilities,
)
from support.weighed import randomised

VOCAB = 13


SMALL: dict[str, Any] = {"d_model": 16, "nhead": 4, "num_layers": 2, "dim_feedforward": 24}
SMALL |= {"segment_lengths": (4, 12), "dilation_rates": (1, 3)}


def make(**options: Any) -> LongNetLM:
    # Far from even logits, so that rounding does not decide.
    return randomised(LongNetLM(VOCAB, **{**SMALL, **options}), 0.5)


def random_prompt(rows: int = 1, n: int = 9) -> Tensor:
    return torch.randint(VOCAB, (rows, n))


@torch.no_grad()
def by_full_forwards(
    model: LongNetLM, prompt: list[int], count: int, stops: tuple[int, ...] = ()
) -> list[int]:
    """Greedy decoding of one row, each token by a forward over all before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] in stops:
            break
    return tokens


@pytest.mark.parametrize("n", [1, 24])
@pytest.mark.parametrize(
    "options",
    [
        *({"dtype": dtype} for dtype in (torch.float32, torch.float64)),
        *({"position_encoding": kind, "dtype": torch.float32} for kind in (None, "xpos")),
        {"position_encoding": None},
        {"num_kv_heads": 2},
        {"kind": "improved"},
        {"kind": "ring"},
        {"head_mixing": "grouped", "head_offsets": "blocked", "tail": "phantom"},
        {"tie_embeddings": False, "sub_layer_norm": False, "normalize_output": False},
        {"softmax_scale": 0.5, "activation": "relu", "rotary_base": 100.0},
        {"position_encoding": "xpos", "xpos_scale_base": 64},
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_full_forwards(options: dict[str, Any], n: int) -> None:
    model, prompt = make(**{"dtype": torch.float64, **options}), random_prompt(2, n)
    out = model.generate(prompt, 20)
    assert out.tolist() == [by_full_forwards(model, row, 20) for row in prompt.tolist()]


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    slack=st.integers(0, 3),
    chunk=st.one_of(st.none(), st.integers(1, 31)),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=3),
    count=st.integers(1, 12),
    seed=st.integers(0, 5),
)
def test_ragged_rows_chunks_and_stops(
    lengths: list[int], slack: int, chunk: int | None, stops: set[int], count: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = make(dtype=torch.float64, pad_token=12)
    n = max(lengths) + slack
    prompt = torch.randint(VOCAB, (len(lengths), n))
    given = prompt.clone()
    out = model.generate(given, count, lengths=lengths, stop_tokens=stops, prefill_chunk=chunk)
    assert torch.equal(given, prompt)
    rows = [prompt[row, :length].tolist() for row, length in enumerate(lengths)]
    expected = [by_full_forwards(model, row, count, tuple(stops)) for row in rows]
    new = max(len(whole) - length for whole, length in zip(expected, lengths, strict=True))
    assert out.shape == (len(lengths), n + new)
    for row, whole in zip(out.tolist(), expected, strict=True):
        assert row == whole + [12] * (n + new - len(whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generation_under_autocast(dtype: torch.dtype) -> None:
    model, prompt = make(dtype=dtype), random_prompt()
    with torch.autocast("cpu", torch.bfloat16):
        out = model.generate(prompt, 12)
        logits = model(out)
    # Rounding may decide between near equals: a chosen token is at least nearly the likeliest.
    chosen = logits[0, 8:-1].gather(1, out[0, 9:, None])[:, 0]
    assert (chosen > logits[0, 8:-1].amax(1) - 0.2).all()


def test_stream_gives_the_new_tokens_of_generate() -> None:
    model = make(pad_token=3)
    prompt, how = random_prompt(3), {"lengths": [4, 9, 1], "stop_tokens": [5, 6]}
    out = model.generate(prompt, 15, **how)
    seen: list[Tensor] = []
    assert torch.equal(model.generate(prompt, 15, **how, on_token=seen.append), out)
    stream = model.stream(prompt, 15, **how)
    assert isinstance(stream, Iterator)
    copies = [(token.clone(), token.fill_(8))[0] for token in stream]  # they are the caller's to change
    new = torch.stack(copies, 1)
    assert torch.equal(new, torch.stack(seen, 1))
    for row, length in enumerate(how["lengths"]):
        assert torch.equal(out[row, length : length + new.shape[1]], new[row])


def test_stream_computes_no_token_before_it_is_asked_for() -> None:
    model, prompt = make(), random_prompt()
    calls: list[int] = []
    model.decoder.register_forward_hook(lambda *_: calls.append(1))
    stream = model.stream(prompt, 5)
    for runs in (0, 1, 2):
        assert len(calls) == runs
        next(stream)
    assert len(list(stream)) == 2
    assert len(calls) == 5  # what follows the last token is not computed
    with pytest.raises(ValueError, match="max_new_tokens must be a positive integer, got 0"):
        model.stream(prompt, 0)


def test_sampling_follows_the_logits_of_full_forwards() -> None:
    model = make(dtype=torch.float64)
    prompt = torch.randint(VOCAB, (3, 9))
    how: dict[str, Any] = {"temperature": 2.0, "top_k": 6, "top_p": 0.95, "seed": 17}
    sampler, expected = Sampler(Sampling(do_sample=True, **how), 3), prompt
    with torch.no_grad():
        for _ in range(20):
            expected = torch.cat([expected, sampler(model(expected)[:, -1])[:, None]], 1)
    assert torch.equal(model.generate(prompt, 20, do_sample=True, **how), expected)
    assert not torch.equal(model.generate(prompt, 20), expected)


def test_a_seeded_row_does_not_depend_on_its_neighbours() -> None:
    model = make(dtype=torch.float64)
    prompt, lengths = torch.randint(VOCAB, (4, 9)), [9, 2, 5, 9]
    whole = model.generate(prompt, 20, lengths=lengths, do_sample=True, seed=3)
    for row, length in enumerate(lengths):
        seed = [row_seeds(3, 4)[row]]
        alone = model.generate(prompt[row : row + 1, :length], 20, do_sample=True, seed=seed)
        assert torch.equal(whole[row, : length + 20], alone[0])


def test_modes_are_as_before_and_dropout_is_off() -> None:
    model = make(dropout=0.5, attention_dropout=0.5, drop_path_rate=0.5, dtype=torch.float64).train()
    model.decoder.layers[0].ffn.eval()  # a part that is frozen
    prompt, modes = random_prompt(), [module.training for module in model.modules()]
    expected = by_full_forwards(copy.deepcopy(model).eval(), prompt[0].tolist(), 10)

    def watch(module: nn.Module, *_: Any) -> None:
        assert not module.training
        assert [each.training for each in model.modules()] == modes  # what other threads see

    for layer in model.decoder.layers:
        layer.register_forward_hook(watch)
    tokens = []
    for token in model.stream(prompt, 10):
        tokens.append(int(token))
        assert [module.training for module in model.modules()] == modes
        assert torch.is_grad_enabled()
    assert prompt[0].tolist() + tokens == expected


def test_several_threads_generate_while_one_trains() -> None:
    model = make(dropout=0.9, dtype=torch.float64).train()
    prompts = torch.randint(VOCAB, (4, 1, 9))
    expected = [by_full_forwards(copy.deepcopy(model).eval(), each[0].tolist(), 12) for each in prompts]
    is_done = threading.Event()

    def losses() -> list[float]:
        found = []
        while not is_done.is_set() or len(found) < 2:
            found.append(model(prompts[:, 0]).square().mean().item())
        return found

    with ThreadPoolExecutor(5) as pool:
        training = pool.submit(losses)
        tokens = [pool.submit(model.generate, each, 12) for each in prompts for _ in range(3)]
        got = [each.result()[0].tolist() for each in tokens]
        is_done.set()
    assert got == [each for each in expected for _ in range(3)]
    assert len(set(training.result())) == len(training.result())  # its dropout was never off


def test_generation_reads_the_weights_of_the_model() -> None:
    model, prompt = make(), random_prompt()
    stream = model.stream(prompt, 2)
    next(stream)
    with torch.no_grad():
        model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="must be finite, got nan"):
        next(stream)


def test_a_compiled_layer_generates_in_evaluation_mode() -> None:
    model, prompt = make(dropout=0.9, dtype=torch.float64).train(), random_prompt()
    expected = by_full_forwards(copy.deepcopy(model).eval(), prompt[0].tolist(), 5)
    for layer in model.decoder.layers:
        layer.compile(backend="eager")
    assert model.generate(prompt, 5)[0].tolist() == expected


@pytest.mark.parametrize("kind", [list, set, dict.fromkeys, iter, range])
def test_stop_tokens_may_be_any_iterable(kind: Any) -> None:
    model, prompt = make(), random_prompt()
    stop = int(model.generate(prompt, 5)[0, 12])
    out = model.generate(prompt, 5, stop_tokens=range(stop, stop + 1) if kind is range else kind([stop]))
    assert out[0, -1] == stop
    assert out.shape[1] <= 13


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"lengths": [3]}, ValueError, "lengths must have one entry for each of the 2 rows, got 1"),
        ({"lengths": [1, 4]}, ValueError, "lengths must lie between 1 and 3, got 4"),
        ({"stop_tokens": 5}, TypeError, "stop_tokens must be a collection of integers, got 5"),
        ({"stop_tokens": ["a"]}, TypeError, r"stop_tokens must be a collection of integers, got \['a'\]"),
        ({"stop_tokens": [3, 13, -1]}, ValueError, r"stop_tokens must be from 0 to .* = 12, got \[-1, 13\]"),
        ({"do_sample": True, "top_k": 14}, ValueError, "top_k must be at most vocab_size, got 14 and 13"),
        ({"do_sample": True, "seed": [1]}, ValueError, "seed must be one integer or 2, one a row, got 1"),
    ],
)
def test_bad_arguments(how: dict[str, Any], error: type[Exception], message: str) -> None:
    model, prompt = make(), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(error, match=message):
        model.generate(prompt, **{"max_new_tokens": 2, **how})


def test_block_sparse_attention_has_no_cache_and_says_so() -> None:
    model = make(kind="block_sparse", sparse_config={"block_size": 4, "sparsity_ratio": 0.5})
    assert model(random_prompt()).shape == (1, 9, VOCAB)
    with pytest.raises(ValueError, match="cache"):
        model.generate(random_prompt(), 5)


TEXT = b"The rows that are far apart meet in long segments; those that are near, in short ones. " * 2


def test_a_model_learns_a_text_and_says_it_again() -> None:
    torch.manual_seed(0)
    text = torch.tensor([list(TEXT)])
    model = LongNetLM(
        128, 32, 4, 2, dim_feedforward=64, segment_lengths=(16, 64), dilation_rates=(1, 4), dropout=0.05
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = None
    for _ in range(120):
        loss = F.cross_entropy(model(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten())
        first = loss.item() if first is None else first
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert first > 4
    assert loss < 0.1
    out = model.generate(text[:, :8], len(TEXT) - 8)
    assert bytes(out[0].tolist()).decode() == TEXT.decode()


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
