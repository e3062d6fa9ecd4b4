"""Does longer context help? A byte-level model of source code, with dense and with dilated attention.

    python benchmarks/quality language --out benchmarks/results/language.json
    python benchmarks/quality language --render --update docs/quality.md --markers language
    python benchmarks/quality language --render --picture docs/images/language.svg

Models of a context and a seed begin with the same weights and see the same bytes in the same order. The
learning rate is constant after its warmup, so that every point of a curve is the end of a shorter run. The
packages to train on are downloaded once; one that no model has seen is predicted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import corpus
import torch
from attentions import lacking
from common import Config, Say, picture, reduced_error, run_case, show_branches
from corpus import Sources
from torch import Tensor
from torch.nn import functional as F

from dilated_attention_pytorch import LongNetLM, branches_for
from dilated_attention_pytorch.cli.bench.gate import accept
from dilated_attention_pytorch.cli.bench.measure import Measured, measure_in_child
from dilated_attention_pytorch.cli.bench.record import Figure, Record, Result, Section, Table, say as tell
from dilated_attention_pytorch.cli.report import Series
from dilated_attention_pytorch.cli.train import TrainConfig
from dilated_attention_pytorch.cli.train.data import windows_of
from dilated_attention_pytorch.cli.train.loop import Run, context_classes
from dilated_attention_pytorch.cli.train.ranks import Ranks

LAST = 1024  # bytes at the end of each test, which all contexts have to predict
BATCH = 16384  # bytes that are predicted at once
SEEDS = (0, 1, 2)
FLAT = 0.01  # of the bits: what the last quarter of the bytes may still gain on a plateau


@dataclass(frozen=True)
class LanguageCase:
    """Bits per byte of one model over its training, by position, and of the same last bytes by context.

    `config` is its attention, `options` are of its attention modules; of a run of `total_bytes` there are
    `points` points. `tests` sequences end with the bytes that are predicted with each of `contexts`, of which
    the last is that of training; `longest` is the longest of all cases. Of `packages` the last is predicted;
    without any it is the standard library.
    """

    name: str
    attention: str
    context: int
    seed: int
    config: Config
    contexts: tuple[int, ...]
    longest: int
    total_bytes: int
    options: tuple[tuple[str, str], ...] = ()
    layers: int = 2
    dim_feedforward: int = 256
    batch_bytes: int = 16384
    learning_rate: float = 8e-3
    points: int = 16
    validation_bytes: int = 2**17
    tests: int = 64
    packages: tuple[str, ...] = tuple(corpus.PACKAGES)
    repeats: int = 1
    kind: ClassVar[str] = "language"

    def run(self, say: Say) -> Measured:
        error = accept(self.name, reduced_error(self.config, self.context, backward=True))
        say(f"{self.name}: attention right within {error:.0e}, training on {self.total_bytes:,} bytes")
        found = measure_in_child(measure, self, corpus.open_sources(self.packages))
        return Measured(error, found.counts, found.seconds, found.why_not)

    def figures(self, found: Measured) -> list[Figure]:
        """Bits per byte in the end, and of the last bytes of the tests with all context."""
        if found.why_not:
            return [Figure("bits per byte", None), Figure("bits of the last bytes", None)]
        last = per_byte(found.counts, f"last {self.context}")
        return [Figure("bits per byte", curve(found.counts)[-1][1]), Figure("bits of the last bytes", last)]


def per_byte(counts: dict[str, int], name: str) -> float:
    """Bits per byte of what was predicted under a name."""
    return counts[f"bits {name}"] / counts[f"bytes {name}"]


def curve(counts: dict[str, int]) -> list[tuple[int, float]]:
    """Bytes seen in training, and bits per byte then."""
    names = [name.removeprefix("bits ") for name in counts if name.startswith("bits after ")]
    return [(int(name.split()[1]), per_byte(counts, name)) for name in names]


def train_config(case: LanguageCase, sources: Sources) -> TrainConfig:
    """The settings of the trainer."""
    config = case.config
    return TrainConfig(
        data=sources.training,
        validation=sources.validation,
        suffixes=(".py",),
        d_model=config.h * config.d,
        nhead=config.h,
        num_layers=case.layers,
        dim_feedforward=case.dim_feedforward,
        segment_lengths=config.segment_lengths,
        dilation_rates=config.dilation_rates,
        kind="standard",
        attention_options=dict(case.options),
        context_length=case.context,
        batch_size=max(1, case.batch_bytes // case.context),
        steps=case.total_bytes // case.batch_bytes,
        warmup_steps=min(50, case.total_bytes // case.batch_bytes // 4),
        final_share=1.0,
        learning_rate=case.learning_rate,
        seed=case.seed,
        device="cpu",
    )


def measure(case: LanguageCase, sources: Sources) -> Measured:
    """Trains and tests in this process, on one core. Validations do not count as time of training."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    run = Run(train_config(case, sources), Path(), Ranks(torch.device("cpu")))
    counts: dict[str, int] = {"parameters": sum(x.numel() for x in run.model.parameters())}
    counts |= {"packages": sources.packages, "bytes to train on": len(run.train_data)}
    windows = windows_of(run.validation_data, case.validation_bytes // case.longest, case.longest)
    seconds, start = [], time.process_time()
    steps = run.config.steps
    for point in range(1, case.points + 1):
        while run.step < steps * point // case.points:
            run.take_step()
        seconds.append(time.process_time() - start)
        seen, bits = run.step * case.batch_bytes, bits_of(run.model, in_contexts(windows, case.context))
        counts |= count(f"after {seen}", bits)
        tell(f"{case.name}: {seen:,} of {case.total_bytes:,} bytes, {bits.mean():.3f} bits per byte")
        start = time.process_time()
    ends = windows_of(run.validation_data, case.tests, case.longest)
    for context in case.contexts:
        bits = bits_of(run.model, ends[:, -context - 1 :])
        counts |= count(f"last {context}", bits[:, -LAST:])
    for first, stop in context_classes(case.context):  # those of the last test, which has all context
        counts |= count(f"at {first}", bits[:, first:stop])
    return Measured(None, counts, {"training": tuple(seconds), "wall": (time.perf_counter() - begin,)})


def in_contexts(windows: Tensor, context: int) -> Tensor:
    """Windows (rows, n + 1) cut into those of a context: the same bytes are predicted, whatever it is."""
    return windows.unfold(1, context + 1, context).flatten(0, 1)


@torch.no_grad()
def bits_of(model: LongNetLM, windows: Tensor) -> Tensor:
    """(rows, n) bits of all bytes but the first of each of the windows (rows, n + 1)."""
    model.eval()
    rows = max(1, BATCH // (windows.shape[1] - 1))
    losses = [F.cross_entropy(model(x[:, :-1]).mT, x[:, 1:], reduction="none") for x in windows.split(rows)]
    return torch.cat(losses).double() / math.log(2)


def count(name: str, bits: Tensor) -> dict[str, int]:
    """Bits and bytes of what was predicted, under a name."""
    return {f"bits {name}": round(bits.sum().item()), f"bytes {name}": bits.numel()}


def make_case(attention: str, context: int, seed: int, contexts: tuple[int, ...]) -> LanguageCase:
    """Dense, or the branches of `branches_for` from a first segment of a quarter of the context, or FIRST."""
    first = min(FIRST, context // 4)
    branches = ((context,), (1,)) if attention == "dense" else branches_for(context, HEADS, first=first)
    config = Config(HEADS, HEAD_DIM, *branches, is_causal=True)
    name, known = f"{attention}, context {context:,}, seed {seed}", contexts[: contexts.index(context) + 1]
    return LanguageCase(name, attention, context, seed, config, known, contexts[-1], TOTAL)


HEADS, HEAD_DIM, FIRST, TOTAL = 4, 16, 1024, 12 * 2**20
ATTENTIONS, CONTEXTS = ("dense", "dilated"), (1024, 4096, 16384)
# The longest first: at the end no core waits for another.
CASES = tuple(
    make_case(attention, context, seed, CONTEXTS)
    for context in reversed(CONTEXTS)
    for attention in ATTENTIONS
    for seed in SEEDS
)
_SMALL = Config(2, 8, (64, 256), (1, 2), is_causal=True)
QUICK = tuple(
    LanguageCase(
        f"quick {attention}",
        attention,
        256,
        0,
        _SMALL if attention == "dilated" else Config(2, 8, (256,), (1,), is_causal=True),
        (128, 256),
        256,
        4 * 1024,
        layers=1,
        dim_feedforward=16,
        batch_bytes=512,
        points=4,
        validation_bytes=512,
        tests=2,
        packages=(),
    )
    for attention in ATTENTIONS
)
WORKERS = torch.get_num_threads()
run = run_case


def describe(case: dict[str, Any]) -> str:
    """The sizes of a case in a few words."""
    config = case["config"]
    model = f"{case['layers']} layers, h = {config['h']}, d = {config['d']}"
    steps = f"feed-forward {case['dim_feedforward']}, {case['total_bytes']:,} bytes in steps of"
    rate = f"{case['batch_bytes']:,}, learning rate {case['learning_rate']:g}"
    return f"{model}, {steps} {rate}; {show_branches(config)}"


def group(results: Sequence[Result]) -> dict[tuple[int, str], list[Result]]:
    """Results of all seeds by context and attention, short contexts first."""
    found: dict[tuple[int, str], list[Result]] = {}
    for result in sorted((x for x in results if not x.why_not), key=lambda x: x.case["context"]):
        found.setdefault((result.case["context"], result.case["attention"]), []).append(result)
    return found


def spread(values: Sequence[float | None], digits: int = 3) -> str:
    """The mean over seeds, and half the distance between the least and the largest; of all or of none."""
    values = [value for value in values if value is not None]
    if not values:
        return ""
    around = f" ± {(max(values) - min(values)) / 2:.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{around}"


def timed_curve(result: Result) -> list[tuple[float, float]]:
    """Seconds of training so far, and bits per byte then."""
    bits = [each for _, each in curve(result.counts)]
    return list(zip(accumulate(result.seconds["training"]), bits, strict=True))


def bits_at(result: Result, seconds: float) -> float | None:
    """Bits per byte after so many seconds of training, between points; None before the first."""
    points = timed_curve(result)
    if seconds < points[0][0]:
        return None
    for (start, before), (stop, after) in pairwise(points):
        if seconds <= stop:
            part = (seconds - start) / (stop - start)
            return before + part * (after - before)
    return points[-1][1]


def last_quarter(result: Result) -> float:
    """The share of the bits that the last quarter of the bytes has gained."""
    points = curve(result.counts)
    before = next(bits for seen, bits in points if seen >= 0.75 * points[-1][0])
    return before / points[-1][1] - 1.0


def make_table(results: Sequence[Result]) -> Table:
    """Bits per byte at equal bytes and at equal time, and of the same last bytes by context."""
    groups = group(results)
    contexts = sorted({x for result in results for x in result.case["contexts"]})
    rows = []
    for (context, attention), seeds in groups.items():
        totals = {
            each: mean(sum(x.seconds["training"]) for x in of)
            for (length, each), of in groups.items()
            if length == context
        }
        least = min(totals.values())
        cells = [spread([curve(x.counts)[-1][1] for x in seeds]), spread([bits_at(x, least) for x in seeds])]
        cells += [f"{totals[attention]:.0f}", f"{mean(x.seconds['wall'][0] for x in seeds):.0f}"]
        gains = [100 * last_quarter(x) for x in seeds]
        cells.append(spread(gains, 1) + (", flat" if mean(gains) <= 100 * FLAT else ""))
        cells += [spread(last_bits(seeds, each)) if each <= context else "" for each in contexts]
        library = "" if all(x.counts["packages"] for x in seeds) else " (standard library)"
        rows.append([f"{context:,}, {attention}{library}", *cells])
    head = [
        "context and attention",
        "bits per byte, equal bytes",
        "equal time",
        "training, core s",
        "wall, s",
    ]
    head += ["gained by the last quarter, %", *(f"last {LAST:,} bytes with {each:,}" for each in contexts)]
    return lacking(results, Table(head, rows))


def last_bits(results: Sequence[Result], context: int) -> list[float]:
    return [per_byte(result.counts, f"last {context}") for result in results]


def position_table(results: Sequence[Result]) -> Table:
    """Bits per byte by position in the context, means over seeds."""
    groups = group(results)
    starts = sorted({first for _, seeds in groups.items() for first in _positions(seeds[0])})
    rows = []
    for (context, attention), seeds in groups.items():
        cells = [
            f"{mean(per_byte(x.counts, f'at {first}') for x in seeds):.3f}"
            if f"bits at {first}" in seeds[0].counts
            else ""
            for first in starts
        ]
        rows.append([f"{context:,}, {attention}", *cells])
    return Table(["context and attention", *(f"from {first:,}" for first in starts)], rows)


def _positions(result: Result) -> Iterator[int]:
    return (int(name.split()[-1]) for name in result.counts if name.startswith("bits at "))


TITLE = "**Language**: bits per byte of source code that no model has seen; mean over seeds ± half the range"
BY_POSITION = "**By position in the context**: bits per byte, mean over seeds"
SECTIONS = {
    "language": Section(TITLE, make_table, describe, has_rounds=False, more={BY_POSITION: position_table})
}


def draw(record: Record) -> str:
    """Bits per byte over the time of training, a line each context and attention."""
    series = []
    for (context, attention), seeds in group(record.results).items():
        curves = [timed_curve(result) for result in seeds]
        points = tuple((mean(x for x, _ in at), mean(y for _, y in at)) for at in zip(*curves, strict=True))
        series.append(Series(f"{attention}, {context:,}", points))
    how = {"x_label": "core seconds of training", "y_label": "bits per byte", "chart_id": "language"}
    return picture(series, title="Bits per byte over the time of training", log_y=False, **how)
