"""Measures the cases of models, in a process of its own."""

from __future__ import annotations

import math
import time
from functools import partial

import torch
from torch import Tensor, nn

from ..decode import DilatedKVCache
from ..integrations.gigapath import LongNetViT
from ..modules.longnet import LongNetLM
from .config import Config
from .gate import attend_row, largest_error
from .measure import interleave, read_status, reset_peak_memory
from .model_cases import DecodeCase, ModelCase, SlideCase, TrainCase

Measurement = tuple[float, dict[str, int], dict[str, tuple[float, ...]]]  # error, bytes, seconds
_CHUNK = 16384
_STEP = 2**31  # the seed of the tokens after the stream
_CHECKED = 96  # tokens or tiles whose results are compared with float64


def measure_model(case: ModelCase, repeats: int, variant: str) -> Measurement:
    """The error of what was measured, bytes by name, and seconds by candidate."""
    match case:
        case DecodeCase():
            return measure_decoding(case, repeats)
        case TrainCase():
            return measure_training(case, checkpoints=variant == "checkpointed")
        case SlideCase():
            return measure_slide(case)


def tokens(config: Config, chunk: int, count: int = _CHUNK) -> tuple[Tensor, ...]:
    """q, k and v (1, count, h, d) of a chunk of the stream; the same again for the same number."""
    generator = torch.Generator().manual_seed(chunk)
    return tuple(torch.randn(1, count, config.h, config.d, generator=generator) for _ in range(3))


def measure_decoding(case: DecodeCase, repeats: int) -> Measurement:
    """Steps at each position, interleaved, after a prefill of the whole stream before it."""
    config = case.config
    caches = {name: _filled_cache(config, n) for name, n in case.positions.items()}
    nbytes = {f"cache {name}": cache.nbytes for name, cache in caches.items()}
    error = max(_step_error(config, cache) for cache in caches.values())
    step = tokens(config, _STEP, 1)

    def candidate(cache: DilatedKVCache) -> None:
        for _ in range(case.steps):
            cache.attend(*step)

    candidates = {name: partial(candidate, cache) for name, cache in caches.items()}
    timings = interleave(candidates, repeats)
    seconds = {name: tuple(t / case.steps for t in timing.seconds) for name, timing in timings.items()}
    return error, nbytes, seconds


def _filled_cache(config: Config, n: int) -> DilatedKVCache:
    cache = DilatedKVCache(
        config.segment_lengths, config.dilation_rates, batch_size=1, num_kv_heads=config.h, head_dim=config.d
    )
    for chunk in range(-(-n // _CHUNK)):
        count = min(_CHUNK, n - chunk * _CHUNK)
        cache.attend(*(x[:, :count] for x in tokens(config, chunk)))
    return cache


def _step_error(config: Config, cache: DilatedKVCache) -> float:
    """Error of the next token against the definition, over all that its segments can hold."""
    n, reach = cache.num_tokens, max(config.segment_lengths)
    first = n // reach * reach  # no segment crosses it
    chunks = [tokens(config, chunk) for chunk in range(first // _CHUNK, n // _CHUNK + 1)]
    skipped = first % _CHUNK
    past = [torch.cat(parts, 1)[:, skipped : skipped + n - first] for parts in zip(*chunks, strict=True)]
    new = tokens(config, _STEP, 1)
    q, k, v = (torch.cat(pair, 1)[0] for pair in zip(past, new, strict=True))
    expected, _ = attend_row(config, *(x.double() for x in (q[-1], k, v)), t=n, lo=first)
    return largest_error(cache.attend(*new)[0, 0], expected)


def measure_training(case: TrainCase, checkpoints: bool) -> Measurement:
    """Peak memory of a forward and backward pass above that of weights and their gradients."""
    error = _training_error(case, checkpoints)
    model = make_model(case, checkpoints)
    batch = torch.randint(case.vocab_size, (1, case.n + 1), generator=torch.Generator().manual_seed(0))
    _train(model, batch[:, : _CHECKED + 1])  # gradients are in place, and all that is set up once
    before = reset_peak_memory()
    start = time.perf_counter()
    _train(model, batch)
    seconds = time.perf_counter() - start
    config = case.config
    counts = {
        "peak_extra": read_status("VmHWM") - before,
        "weights": sum(x.nbytes for x in model.parameters()),
        "layer_inputs": 4 * case.layers * case.n * config.h * config.d,
    }
    return error, counts, {"step": (seconds,)}


def make_model(case: TrainCase, checkpoints: bool) -> LongNetLM:
    torch.manual_seed(0)
    config = case.config
    return LongNetLM(
        case.vocab_size,
        config.h * config.d,
        config.h,
        case.layers,
        dim_feedforward=case.dim_feedforward,
        segment_lengths=config.segment_lengths,
        dilation_rates=config.dilation_rates,
        dropout=0.0,
        checkpoint_activations=checkpoints,
    ).train()


def _train(model: LongNetLM, batch: Tensor) -> None:
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    torch.autograd.backward(loss)


def _training_error(case: TrainCase, checkpoints: bool) -> float:
    """Of the gradients over a short text, against those of the same model in float64 without checkpoints."""
    batch = torch.randint(case.vocab_size, (1, _CHECKED + 1), generator=torch.Generator().manual_seed(1))
    model, exact = make_model(case, checkpoints), make_model(case, False).double()
    _train(model, batch)
    _train(exact, batch)
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return max(_scaled_error(x.grad, y.grad) for x, y in pairs if y.grad is not None)


def _scaled_error(actual: Tensor | None, expected: Tensor) -> float:
    """The largest difference over the largest value, however small that is."""
    if actual is None:
        return math.inf
    largest = max(expected.abs().max().item(), 1e-12)
    return largest_error(actual.double() / largest, expected / largest)


@torch.inference_mode()
def measure_slide(case: SlideCase) -> Measurement:
    """Peak memory of the whole process: library, weights, tiles and the encoding."""
    config = case.config
    torch.manual_seed(0)
    model = LongNetViT(
        embed_dim=case.embed_dim,
        depth=case.depth,
        nhead=config.h,
        segment_lengths=config.segment_lengths,
        dilation_rates=config.dilation_rates,
    ).eval()
    generator = torch.Generator().manual_seed(0)
    tiles = torch.randn(1, case.tiles, 1536, generator=generator)
    coords = torch.randint(1000 * 256, (1, case.tiles, 2), generator=generator)
    reset_peak_memory()
    start = time.perf_counter()
    model(tiles, coords)
    seconds = time.perf_counter() - start
    peak = read_status("VmHWM")
    some = tiles[:, :_CHECKED], coords[:, :_CHECKED]
    actual = model(*some)[0]
    expected = model.double()(some[0].double(), some[1])[0]
    counts = {"peak_total": peak, "parameters": sum(x.numel() for x in model.parameters())}
    return largest_error(actual, expected), counts, {"slide": (seconds,)}
