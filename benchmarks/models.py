"""Models: decoding steps early and late in a stream, memory of a training step, memory of a slide.

python benchmarks/models.py --out benchmarks/results/models.json
python benchmarks/models.py --render --update docs/models.md
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import common
import torch
from common import Config, Say, main, run_case, show_branches
from torch import Tensor, nn

from dilated_attention_pytorch import DilatedKVCache, Execution, LongNetLM, LongNetViT
from dilated_attention_pytorch.cli.bench import gate
from dilated_attention_pytorch.cli.bench.measure import (
    Measured,
    interleave,
    measure_in_child,
    read_status,
)
from dilated_attention_pytorch.cli.bench.record import Figure, Result, Section, Table
from dilated_attention_pytorch.integrations.gigapath import GIGAPATH_RATES, gigapath_segment_lengths

GIGABYTE = 10**9
_CHUNK = 16384
_STEP = 2**31  # the seed of the tokens after the stream
_CHECKED = 96  # tokens or tiles whose results are compared with float64


@dataclass(frozen=True)
class DecodeCase:
    """Time of a decoding step late in a stream over that of an early one, and the memory of the cache.

    Segments are filled differently at `early` and `late`, and a step costs what it reads. So there is a third
    position besides, after `late`, at which they are filled as they are at `early`.
    """

    name: str
    config: Config
    early: int
    late: int
    steps: int = 32  # timed together
    target: float | None = None
    repeats: int = 9
    kind: ClassVar[str] = "decode"

    @property
    def positions(self) -> dict[str, int]:
        return decode_positions(self.early, self.late, max(self.config.segment_lengths))

    def run(self, say: Say) -> Measured:
        say(f"{self.name}: checking and measuring in a process of its own")
        return common.gather(self, {"": measure_in_child(measure_decoding, self)})

    def figures(self, found: Measured) -> list[Figure]:
        """Times of late steps over early ones, then of the cache's memory."""
        figures = []
        for name in ("late", "alike"):
            figure, _ = common.time_figures(found, name, "early", self.target)
            figures.append(replace(figure, name=f"step at {self.positions[name]} over {self.early}"))
        over = common.ratio(found.counts, "cache alike", "cache early")
        label = f"cache at {self.positions['alike']} over {self.early}"
        return [*figures, Figure(label, over, target=1.0)]


@dataclass(frozen=True)
class TrainCase:
    """Peak memory of a training step of a language model, with activation checkpointing and without."""

    name: str
    config: Config
    n: int
    layers: int
    vocab_size: int = 256
    dim_feedforward: int = 3072
    repeats: int = 1
    kind: ClassVar[str] = "train"

    def run(self, say: Say) -> Measured:
        say(f"{self.name}: checking and measuring in processes of their own")
        variants = {"plain": False, "checkpointed": True}
        found = {name: measure_in_child(measure_training, self, spare) for name, spare in variants.items()}
        return common.gather(self, found)

    def figures(self, found: Measured) -> list[Figure]:
        plain, spared = (f"peak_extra {name}" for name in ("plain", "checkpointed"))
        return [
            Figure("peak extra memory", found.counts.get(plain), "bytes"),
            Figure("peak extra memory with checkpoints", found.counts.get(spared), "bytes"),
            Figure("with checkpoints over without", common.ratio(found.counts, spared, plain)),
        ]


@dataclass(frozen=True)
class SlideCase:
    """Peak memory of a process that encodes a slide with the configuration of Prov-GigaPath's encoder."""

    name: str
    config: Config
    tiles: int
    embed_dim: int = 768
    depth: int = 12
    memory_target: int | None = None
    repeats: int = 1
    kind: ClassVar[str] = "slide"

    def run(self, say: Say) -> Measured:
        say(f"{self.name}: checking and measuring in a process of its own")
        return common.gather(self, {"": measure_in_child(measure_slide, self)})

    def figures(self, found: Measured) -> list[Figure]:
        return [Figure("peak memory", found.counts.get("peak_total"), "bytes", self.memory_target)]


def decode_positions(early: int, late: int, period: int) -> dict[str, int]:
    return {"early": early, "late": late, "alike": early + -(-(late - early) // period) * period}


def tokens(config: Config, chunk: int, count: int = _CHUNK) -> tuple[Tensor, ...]:
    """q, k and v (1, count, h, d) of a chunk of the stream; the same again for the same number."""
    generator = torch.Generator().manual_seed(chunk)
    return tuple(torch.randn(1, count, config.h, config.d, generator=generator) for _ in range(3))


def measure_decoding(case: DecodeCase) -> Measured:
    """Steps at each position, interleaved, after a prefill of the whole stream before it."""
    config = case.config
    caches = {name: filled_cache(config, n) for name, n in case.positions.items()}
    nbytes = {f"cache {name}": cache.nbytes for name, cache in caches.items()}
    error = max(step_error(config, cache) for cache in caches.values())
    step = tokens(config, _STEP, 1)

    def candidate(cache: DilatedKVCache) -> None:
        for _ in range(case.steps):
            cache.attend(*step)

    timings = interleave({name: partial(candidate, cache) for name, cache in caches.items()}, case.repeats)
    seconds = {name: tuple(t / case.steps for t in timing) for name, timing in timings.items()}
    return Measured(error, nbytes, seconds)


def filled_cache(config: Config, n: int, first: int = 0, kernel: str = "auto") -> DilatedKVCache:
    """A cache of a stream of n tokens, or of those from `first` on, where segments of all branches begin."""
    sizes = {"batch_size": 1, "num_kv_heads": config.h, "head_dim": config.d}
    cache = DilatedKVCache(*config.branches, **sizes, execution=Execution(kernel))
    cache.load_state_dict({**cache.state_dict(), "lengths": [first]})
    for chunk in range(first // _CHUNK, -(-n // _CHUNK)):
        begin, end = max(0, first - chunk * _CHUNK), min(_CHUNK, n - chunk * _CHUNK)
        cache.attend(*(x[:, begin:end] for x in tokens(config, chunk)))
    return cache


def step_error(config: Config, cache: DilatedKVCache) -> float:
    """Error of the next token against the definition, over all that its segments can hold."""
    n, reach = cache.num_tokens, max(config.segment_lengths)
    first = n // reach * reach  # no segment crosses it
    chunks = [tokens(config, chunk) for chunk in range(first // _CHUNK, n // _CHUNK + 1)]
    skipped = first % _CHUNK
    past = [torch.cat(parts, 1)[:, skipped : skipped + n - first] for parts in zip(*chunks, strict=True)]
    new = tokens(config, _STEP, 1)
    q, k, v = (torch.cat(pair, 1)[0].double() for pair in zip(past, new, strict=True))
    keys, counts = config.keys(n + 1, n)
    expected, _ = gate.attend_row(q[-1], k[keys - first], v[keys - first], counts)
    return gate.largest_error(cache.attend(*new)[0, 0], expected)


def measure_training(case: TrainCase, checkpoints: bool) -> Measured:
    """Peak memory of a forward and backward pass above that of weights and their gradients."""
    error = training_error(case, checkpoints)
    model = make_model(case, checkpoints)
    batch = torch.randint(case.vocab_size, (1, case.n + 1), generator=torch.Generator().manual_seed(0))
    _train(model, batch[:, : _CHECKED + 1])  # gradients are in place, and all that is set up once
    _, counts, seconds = common.measure_once(lambda: _train(model, batch))
    config = case.config
    weights = sum(x.nbytes for x in model.parameters())
    counts |= {"weights": weights, "layer_inputs": 4 * case.layers * case.n * config.h * config.d}
    return Measured(error, counts, {"step": (seconds,)})


def make_model(case: TrainCase, checkpoints: bool) -> LongNetLM:
    torch.manual_seed(0)
    config = case.config
    return LongNetLM(
        *(case.vocab_size, config.h * config.d, config.h, case.layers),
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


def training_error(case: TrainCase, checkpoints: bool) -> float:
    """Of the gradients over a short text, against those of the same model in float64 without checkpoints."""
    batch = torch.randint(case.vocab_size, (1, _CHECKED + 1), generator=torch.Generator().manual_seed(1))
    model, exact = make_model(case, checkpoints), make_model(case, False).double()
    _train(model, batch)
    _train(exact, batch)
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return max(scaled_error(x.grad, y.grad) for x, y in pairs if y.grad is not None)


def scaled_error(actual: Tensor | None, expected: Tensor) -> float:
    """The largest difference over the largest value, however small that is."""
    if actual is None:
        return math.inf
    largest = max(expected.abs().max().item(), 1e-12)
    return gate.largest_error(actual.double() / largest, expected / largest)


@torch.inference_mode()
def measure_slide(case: SlideCase) -> Measured:
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
    _, _, seconds = common.measure_once(lambda: model(tiles, coords))
    counts = {"peak_total": read_status("VmHWM"), "parameters": sum(x.numel() for x in model.parameters())}
    some = tiles[:, :_CHECKED], coords[:, :_CHECKED]
    actual = model(*some)[0]
    expected = model.double()(some[0].double(), some[1])[0]
    return Measured(gate.largest_error(actual, expected), counts, {"slide": (seconds,)})


_DECODE = Config(8, 64, (2048, 4096, 8192, 16384), (1, 2, 4, 8), is_causal=True)
_TRAIN = Config(4, 64, (2048, 4096, 8192), (1, 2, 4), is_causal=True)
_SLIDE = Config(16, 48, gigapath_segment_lengths(), GIGAPATH_RATES)
CASES = (
    DecodeCase("decoding step", _DECODE, 20_000, 1_000_000, target=1.15),
    TrainCase("training step, 12 layers", _TRAIN, 32768, 12),
    SlideCase("slide of 10,000 tiles", _SLIDE, 10_000, memory_target=4 * GIGABYTE),
)
_SMALL = replace(common.QUICK_CONFIG, is_causal=True)
QUICK = (
    DecodeCase("quick decoding", _SMALL, 200, 3000, steps=4, repeats=3),
    TrainCase("quick training", _SMALL, 2048, 2),
    SlideCase("quick slide", Config(4, 16, (16, 32, 64, 128, 256), (1, 2, 4, 8, 16)), 500, 64, 2),
)


def _what(case: dict[str, Any]) -> str:
    config = case["config"]
    return f"h = {config['h']}, d = {config['d']}, {show_branches(config)}"


def _positions(case: dict[str, Any]) -> dict[str, int]:
    return decode_positions(case["early"], case["late"], max(case["config"]["segment_lengths"]))


def describe_decoding(case: dict[str, Any]) -> str:
    return f"positions {', '.join(f'{p:,}' for p in _positions(case).values())}, b = 1, {_what(case)}"


def describe_training(case: dict[str, Any]) -> str:
    feed_forward = case.get("dim_feedforward", TrainCase.dim_feedforward)  # which older records leave out
    width = f"width {case['config']['h'] * case['config']['d']}, feed-forward {feed_forward}"
    return f"n = {case['n']}, {case['layers']} layers, {width}, {_what(case)}"


def describe_slide(case: dict[str, Any]) -> str:
    return f"{case['tiles']:,} tiles, {case['depth']} layers, width {case['embed_dim']}, {_what(case)}"


def decode_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        late, alike, _ = result.figures
        figures = {"early": Figure("", 1.0 if result.seconds else None), "late": late, "alike": alike}
        for name, position in _positions(result.case).items():
            cells = [result.times(name), *result.shown(figures[name])]
            rows.append([f"{result.name} at {position:,}", *cells, result.mebibytes(f"cache {name}")])
    return Table(["case", "ms", "ratio of minima", "target", "cache, MiB"], rows)


def train_table(results: Sequence[Result]) -> Table:
    counts = ("peak_extra", "weights", "layer_inputs")
    rows = [
        [
            f"{result.name}, {name}",
            *(result.mebibytes(f"{count} {name}") for count in counts),
            result.times(f"step {name}"),
        ]
        for result in results
        for name in ("plain", "checkpointed")
    ]
    return Table(["case", "peak extra, MiB", "weights, MiB", "inputs of layers, MiB", "ms"], rows)


def slide_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        seconds = f"{min(result.seconds['slide']):.1f}" if result.seconds else ""
        parameters = f"{result.counts['parameters']:,}" if result.counts else ""
        rows.append([result.name, parameters, seconds, *result.shown(result.figures[0])])
    return Table(["case", "parameters", "s", "peak memory", "target"], rows)


SECTIONS = {
    "decode": Section(
        "**Decoding**: one step late in a stream over an early one", decode_table, describe_decoding
    ),
    "train": Section(
        "**Training**: memory of a step beside weights and gradients", train_table, describe_training
    ),
    "slide": Section("**Slides**: memory of the whole process", slide_table, describe_slide),
}
run = run_case

if __name__ == "__main__":
    sys.exit(main("models"))
