"""Does longer context help? A byte-level model of source code, with dense and with dilated attention.

    python benchmarks/quality language --out benchmarks/results/language.json
    python benchmarks/quality language --render --update docs/quality.md --markers language
    python benchmarks/quality language --render --picture docs/images/language.svg
    python benchmarks/quality language --render --summary --update README.md --markers language

A model is trained with a short context first, in small steps. From there it goes on three times, with the
short context and with longer ones, in steps of the same bytes. It has no position encoding and so knows no
longest context; each byte is embedded with those before it. Dense and dilated models of a seed begin with the
same weights and see the same bytes in the same order; with a longer context a step has fewer and longer
sequences. The learning rate is constant after its warmup, and tests are of the average of the last weights,
so that every point of a curve is the end of a shorter run. The packages to train on are downloaded once; one
that no model has seen is predicted.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import corpus
import torch
from attentions import lacking, reached_from
from common import Config, Say, picture, reduced_error, run_case, show_branches
from corpus import Sources
from torch import Tensor
from torch.nn import Module, Parameter, functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dilated_attention_pytorch import LongNetLM, branches_for, dilated_attention
from dilated_attention_pytorch.cli.bench.gate import accept
from dilated_attention_pytorch.cli.bench.measure import (
    PACKAGE,
    Measured,
    kernel_facts,
    machine_facts,
    measure_in_child,
    project_facts,
)
from dilated_attention_pytorch.cli.bench.record import Figure, Record, Result, Section, Table, say as tell
from dilated_attention_pytorch.cli.report import Series
from dilated_attention_pytorch.cli.train import TrainConfig
from dilated_attention_pytorch.cli.train.data import mix_seed, windows_of
from dilated_attention_pytorch.cli.train.folder import CheckpointError, newest_whole, save_checkpoint
from dilated_attention_pytorch.cli.train.loop import Run, context_classes, make_optimiser
from dilated_attention_pytorch.cli.train.ranks import Ranks
from dilated_attention_pytorch.plan.dilated import plan_dilated
from dilated_attention_pytorch.plan.runs import Shape
from dilated_attention_pytorch.spec import DilatedSpec

CONTEXTS = (1024, 4096, 16384)
LAST = 1024  # bytes at the end of each test, which all contexts have to predict
BATCH = 16384  # bytes that are predicted at once
SEEDS = (0, 1, 2)
# Of the averages that are tested, at each step. At a constant learning rate weights move about; their average
# does not, as if the learning rate had fallen.
KEPT = 0.98
LAYERS = (1, 2, 3)  # through which the reach is told
KEYS = 64  # of which it is found what they reach
LAST_BYTES = 4  # that are embedded together
FLAT = 0.01  # of the bits: what the last quarter of a stage may still change on a plateau


@dataclass(frozen=True)
class Attention(Config):
    """Dilated attention with options of its definition, by name."""

    options: tuple[tuple[str, str], ...] = ()

    @property
    def spec(self) -> DilatedSpec:
        return DilatedSpec(*self.branches, is_causal=self.is_causal, **dict(self.options))


@dataclass(frozen=True)
class Stage:
    """Training with one attention and context: its bytes in all and of a step, and points of its curve."""

    name: str
    context: int
    config: Attention
    total_bytes: int
    batch_bytes: int
    points: int

    @property
    def steps(self) -> int:
        return self.total_bytes // self.batch_bytes


@dataclass(frozen=True)
class LanguageCase:
    """Bits per byte of the models of a seed over their training, by position, and of the same last bytes.

    All go on from the model of the stage `first`, a model each stage of `stages`; `config` is the attention
    of the last. Tests are of sequences of `window` bytes: some that are cut into contexts, and `tests` of
    which the last bytes are predicted with each context up to the model's own. Of `packages` the last is
    predicted; without any it is the standard library.
    """

    name: str
    attention: str
    seed: int
    config: Attention
    first: Stage
    stages: tuple[Stage, ...]
    layers: int = 2
    dim_feedforward: int = 256
    learning_rate: float = 5e-3
    window: int = max(CONTEXTS)
    validation_bytes: int = 2**17
    tests: int = 64
    packages: tuple[str, ...] = tuple(corpus.PACKAGES)
    repeats: int = 1
    kind: str = "language"

    def run(self, say: Say) -> Measured:
        errors = [reduced_error(x.config, x.context, backward=True) for x in (self.first, *self.stages)]
        error = accept(self.name, max(errors))
        say(f"{self.name}: attention right within {error:.0e}")
        found = measure_in_child(measure, self, corpus.open_sources(self.packages))
        return Measured(error, found.counts, found.seconds, found.why_not)

    def figures(self, found: Measured) -> list[Figure]:
        """Of each stage bits per byte in the end, and of the last bytes of the tests with all context."""
        figures = []
        for stage in self.stages:
            name, counts = stage.name, found.counts
            bits = None if found.why_not else curve(counts, name)[-1][1]
            last = None if found.why_not else per_byte(counts, f"{name}: last {stage.context}")
            figures += [Figure(f"{name}: bits per byte", bits), Figure(f"{name}: last bytes", last)]
        return figures


def per_byte(counts: dict[str, int], name: str) -> float:
    """Bits per byte of what was predicted under a name."""
    return counts[f"bits {name}"] / counts[f"bytes {name}"]


def curve(counts: dict[str, int], stage: str) -> list[tuple[int, float]]:
    """Bytes seen, from the beginning of the first stage on, and bits per byte in a stage."""
    names = [name.removeprefix("bits ") for name in counts if name.startswith(f"bits {stage}: after ")]
    return [(int(name.split()[-1]), per_byte(counts, name)) for name in names]


def train_config(case: LanguageCase, stage: Stage, sources: Sources) -> TrainConfig:
    """The settings of the trainer in a stage, whose steps count on from those of the first."""
    config, before = stage.config, 0 if stage == case.first else case.first.steps
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
        attention_options=dict(config.options),
        context_length=stage.context,
        batch_size=max(1, stage.batch_bytes // stage.context),
        steps=before + stage.steps,
        warmup_steps=min(50, case.first.steps // 4),
        final_share=1.0,
        learning_rate=case.learning_rate,
        seed=case.seed,
        device="cpu",
    )


def measure(case: LanguageCase, sources: Sources) -> Measured:
    """Trains and tests in this process, on one core. Validations do not count as time of training."""
    torch.set_num_threads(1)
    first = start_run(case, case.first, sources)
    windows = windows_of(first.validation_data, case.validation_bytes // case.window, case.window)
    ends = windows_of(first.validation_data, case.tests, case.window)
    counts: dict[str, int] = {"parameters": sum(x.numel() for x in first.model.parameters())}
    counts |= {"packages": sources.packages, "bytes to train on": len(first.train_data)}
    known = first_stage(case, first, windows)
    counts |= known.counts
    seconds, between = {FIRST: known.seconds}, [known.wall]  # the latter of each stage, its tests included
    contexts = sorted({stage.context for stage in case.stages})
    for stage in case.stages:
        begin, name = time.perf_counter(), stage.name
        run = start_run(case, stage, sources)
        model = go_on(run, first, known.average)
        seconds[name] = train(case, stage, run, model, windows, counts)
        for context in [x for x in contexts if x <= stage.context]:
            bits = bits_of(model, ends[:, -context - 1 :])
            counts |= count(f"{name}: last {context}", bits[:, -LAST:])
        for start, stop in context_classes(stage.context):  # of the last test, which has all context
            counts |= count(f"{name}: at {start}", bits[:, start:stop])
        counts |= {f"{name}: {what}": each for what, each in count_pairs(stage, case.seed).items()}
        between.append(time.perf_counter() - begin)
    return Measured(None, counts, {**seconds, "wall": tuple(between)})


class Known(NamedTuple):
    """The average of a first stage, what was counted on the way, and the time that it took."""

    average: AveragedModel
    counts: dict[str, int]
    seconds: tuple[float, ...]
    wall: float


def first_stage(case: LanguageCase, run: Run, windows: Tensor) -> Known:
    """Trains what all stages go on from, once for all cases and suites that begin alike.

    It is kept in a checkpoint that only the same code, settings, data and kind of machine know, so that its
    seconds are theirs.
    """
    folder, average = kept_folder(case, run), average_of(run)
    tensors = {**run.tensors(), **{f"average {name}": x for name, x in average.state_dict().items()}}
    kept, problems = newest_whole(folder) if folder else (None, {})
    if kept:
        tell(f"{case.name}, {FIRST}: trained before")
        kept.load(tensors)
        run.step, facts = kept.step, kept.facts
        return Known(average, facts["counts"], tuple(facts["seconds"]), facts["wall"])
    for problem in problems.values():
        tell(f"{case.name}, {FIRST}: cannot be read ({problem}): training anew")
    begin, counts = time.perf_counter(), dict[str, int]()
    seconds = train(case, case.first, run, average, windows, counts)
    found = Known(average, counts, seconds, time.perf_counter() - begin)
    if folder:
        facts = {"counts": counts, "seconds": seconds, "wall": found.wall}
        try:
            save_checkpoint(folder, run.ranks, run.step, tensors, facts, keep=1)
        except CheckpointError as error:  # of a full disk: nothing else is lost
            tell(f"{case.name}, {FIRST}: not kept ({error})")
    return found


def kept_folder(case: LanguageCase, run: Run) -> Path | None:
    """Where a first stage is kept. None are of changed code or of no packages, which are small."""
    project, machine, config = project_facts(), machine_facts(), case.first.config
    is_other = not Path(__file__).resolve().is_relative_to(PACKAGE.parents[1])  # than the commit is of
    if not case.packages or not project["commit"] or project["changed"] or is_other:
        return None
    tests = (case.first.points, case.validation_bytes, case.window)
    facts = [project["commit"], *(machine[x] for x in ("cpu", "cpu_capability", "torch"))]
    facts += [kernel_facts(torch.device("cpu"), getattr(torch, config.dtype), config.d)]
    data = [run.train_data.digest(), run.validation_data.digest()]
    known = json.dumps([facts, data, asdict(run.config), case.layers, tests])
    return corpus.DATA / f"first-{hashlib.sha256(known.encode()).hexdigest()[:16]}"


def count_pairs(stage: Stage, seed: int) -> dict[str, int]:
    """Query-key pairs by definition, and those of some keys that are in reach through so many layers."""
    config, n = stage.config, stage.context
    shape = Shape(1, n, config.h, config.h, config.d)
    counts = {"pairs": plan_dilated(config.spec, shape, itemsize=4).num_defined_pairs}
    keys = torch.randint(n, (min(n, KEYS),), generator=torch.Generator().manual_seed(seed))
    counts["later"] = int((n - keys).sum())
    see = partial(dilated_attention, segment_lengths=config.spec)
    for layers, reached in zip(LAYERS, reached_from(see, keys, n, config.h), strict=False):
        counts[f"reached {layers}"] = int(reached.sum())
    return counts


class LastBytes(Module):
    """Embeds each byte with those before it, one after the other in the features.

    So one layer can find what followed the same bytes before, which models otherwise learn late: arXiv
    2209.11895 shows it by keys that hold the token before them.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.randn(256, features // LAST_BYTES) * features**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        shifted = [F.pad(tokens, (before, 0))[:, :n] for before in range(LAST_BYTES)]
        return F.embedding(torch.stack(shifted, -1), self.weight).flatten(-2)


def start_run(case: LanguageCase, stage: Stage, sources: Sources) -> Run:
    """With a model whose initial weights depend on the seed alone."""
    run = Run(train_config(case, stage, sources), Path(), Ranks(torch.device("cpu")))
    torch.manual_seed(mix_seed(case.seed, "weights"))
    settings = run.config.model_settings()
    run.model = LongNetLM(**settings, position_encoding=None, tie_embeddings=False)
    run.model.embed_tokens = LastBytes(settings["d_model"])
    run.optimiser = make_optimiser(run.model, run.config)
    return run


def average_of(run: Run) -> AveragedModel:
    """What is tested: an average of the weights, which begins with those after the next step."""
    return AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(KEPT))


def go_on(run: Run, before: Run, average: AveragedModel) -> AveragedModel:
    """A run takes over weights, the optimiser's averages and the step of another; the average goes on too."""
    known = before.tensors()
    for name, tensor in run.tensors().items():
        tensor.copy_(known[name])
    for x in run.model.parameters():
        run.optimiser.state[x]["step"].fill_(before.step)
    run.step = before.step
    model = average_of(run)
    model.load_state_dict(average.state_dict())
    return model


def train(
    case: LanguageCase,
    stage: Stage,
    run: Run,
    model: AveragedModel,
    windows: Tensor,
    counts: dict[str, int],
) -> tuple[float, ...]:
    """Seconds up to each point of the curve, at which the bits of the average are counted."""
    first, seconds, start = run.step, [], time.process_time()
    before = 0 if stage == case.first else case.first.total_bytes
    for point in range(1, stage.points + 1):
        while run.step - first < stage.steps * point // stage.points:
            run.take_step()
            model.update_parameters(run.model)
        seconds.append(time.process_time() - start)
        seen = before + (run.step - first) * stage.batch_bytes
        bits = bits_of(model, in_contexts(windows, stage.context))
        counts |= count(f"{stage.name}: after {seen}", bits)
        total, found = before + stage.total_bytes, f"{bits.mean():.3f} bits per byte"
        tell(f"{case.name}, {stage.name}: {seen:,} of {total:,} bytes, {found}")
        start = time.process_time()
    return tuple(seconds)


def in_contexts(windows: Tensor, context: int) -> Tensor:
    """Windows (rows, n + 1) cut into those of a context: the same bytes are predicted, whatever it is."""
    return windows.unfold(1, context + 1, context).flatten(0, 1)


@torch.no_grad()
def bits_of(model: Module, windows: Tensor) -> Tensor:
    """(rows, n) bits of all bytes but the first of each of the windows (rows, n + 1)."""
    model.eval()
    rows = max(1, BATCH // (windows.shape[1] - 1))
    losses = [F.cross_entropy(model(x[:, :-1]).mT, x[:, 1:], reduction="none") for x in windows.split(rows)]
    return torch.cat(losses).double() / math.log(2)


def count(name: str, bits: Tensor) -> dict[str, int]:
    """Bits and bytes of what was predicted, under a name."""
    return {f"bits {name}": round(bits.sum().item()), f"bytes {name}": bits.numel()}


def branches_at(attention: str, context: int) -> Attention:
    """Dense, or the branches of `branches_for`, whose first segment is a quarter of a short context."""
    first = min(FIRST_SEGMENT, context // 4)
    branches = ((context,), (1,)) if attention == "dense" else branches_for(context, HEADS, first=first)
    return Attention(HEADS, HEAD_DIM, *branches, is_causal=True)


def make_case(attention: str, seed: int) -> LanguageCase:
    short = branches_at(attention, CONTEXTS[0])
    first = Stage(FIRST, CONTEXTS[0], short, 12 * 2**20, 4096, points=12)
    stages = tuple(
        Stage(f"context {n:,}", n, branches_at(attention, n), 4 * 2**20, 16384, points=8) for n in CONTEXTS
    )
    return LanguageCase(f"{attention}, seed {seed}", attention, seed, stages[-1].config, first, stages)


FIRST = "first"  # the stage that all others go on from
HEADS, HEAD_DIM, FIRST_SEGMENT = 4, 16, 1024
ATTENTIONS = ("dense", "dilated")
# The longest first: at the end no core waits for another.
CASES = tuple(make_case(attention, seed) for attention in ATTENTIONS for seed in SEEDS)


def _quick(attention: str) -> LanguageCase:
    branches = {n: ((n // 4, n), (1, 2)) if attention == "dilated" else ((n,), (1,)) for n in (128, 256)}
    configs = {n: Attention(2, 8, *of, is_causal=True) for n, of in branches.items()}
    names = {FIRST: 128, "context 128": 128, "context 256": 256}
    first, *stages = (Stage(name, n, configs[n], 2048, 512, points=2) for name, n in names.items())
    small: dict[str, Any] = {"layers": 1, "dim_feedforward": 16, "tests": 2}
    small |= {"window": 256, "validation_bytes": 512}
    name = f"quick {attention}"
    return LanguageCase(name, attention, 0, configs[256], first, tuple(stages), packages=(), **small)


QUICK = tuple(map(_quick, ATTENTIONS))
WORKERS = torch.get_num_threads()
run = run_case


def describe(case: dict[str, Any]) -> str:
    """The sizes of a case in a few words."""
    config, first, stages = case["config"], case["first"], case["stages"]
    model = f"{case['layers']} layers, h = {config['h']}, d = {config['d']}"
    model += f", feed-forward {case['dim_feedforward']}, learning rate {case['learning_rate']:g}"
    steps = [f"{x['total_bytes']:,} bytes in steps of {x['batch_bytes']:,}" for x in (first, stages[-1])]
    seen = ", ".join(f"{x['name']} {_shown(x['config'])}" for x in stages)
    before = f"with a context of {first['context']:,} and {_shown(first['config'])} {steps[0]}"
    return f"{model}; {before}, then {steps[1]} each: {seen}"


def _shown(config: dict[str, Any]) -> str:
    options = "".join(f", {name} {value!r}" for name, value in config["options"])
    return f"{show_branches(config)}{options}"


def group(results: Sequence[Result]) -> dict[tuple[int, str], list[tuple[str, Result]]]:
    """Stages and results of all seeds by context and attention, short contexts first."""
    found: dict[tuple[int, str], list[tuple[str, Result]]] = {}
    for result in (x for x in results if not x.why_not):
        for stage in result.case["stages"]:
            key = (stage["context"], result.case["attention"])
            found.setdefault(key, []).append((stage["name"], result))
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def spread(values: Sequence[float | None], digits: int = 3) -> str:
    """The mean over seeds, and half the distance between the least and the largest; of all or of none."""
    values = [value for value in values if value is not None]
    if not values:
        return ""
    around = f" ± {(max(values) - min(values)) / 2:.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{around}"


def bits_at(result: Result, seconds: float, stage: str) -> float | None:
    """Bits per byte after so many seconds of a stage, between points; None before the first."""
    bits = [each for _, each in curve(result.counts, stage)]
    points = list(zip(accumulate(result.seconds[stage]), bits, strict=True))
    if seconds < points[0][0]:
        return None
    for (start, before), (stop, after) in pairwise(points):
        if seconds <= stop:
            part = (seconds - start) / (stop - start)
            return before + part * (after - before)
    return points[-1][1]


def last_quarter(result: Result, stage: str) -> float:
    """The share of the bits that the last quarter of a stage has gained."""
    points = curve(result.counts, stage)
    (total,) = {x["total_bytes"] for x in result.case["stages"] if x["name"] == stage}
    before = next(bits for seen, bits in points if seen >= points[-1][0] - total / 4)
    return before / points[-1][1] - 1.0


Runs = Sequence[tuple[str, Result]]  # a stage and the result that holds it, of each seed


def walls_of(runs: Runs) -> list[float]:
    """All seconds of a stage, its tests included, of each seed."""
    places = [[x["name"] for x in result.case["stages"]].index(stage) for stage, result in runs]
    return [result.seconds["wall"][1 + place] for place, (_, result) in zip(places, runs, strict=True)]


def least_seconds(rivals: Iterable[Runs]) -> dict[int, float]:
    """By seed the seconds of the stage that has ended first, of those that are compared."""
    least: dict[int, float] = {}
    for stage, result in (run for runs in rivals for run in runs):
        seed, seconds = result.case["seed"], sum(result.seconds[stage])
        least[seed] = min(seconds, least.get(seed, math.inf))
    return least


def end_cells(runs: Runs, least: Mapping[int, float]) -> list[str]:
    """Pairs over dense, bits at equal bytes and after the `least` seconds of the seed, seconds, last gain.

    Seconds are those of the stage alone.
    """
    gains = [100 * last_quarter(result, stage) for stage, result in runs]
    return [
        f"{100 * share_of_pairs(*runs[0]):.1f}",
        spread([curve(result.counts, stage)[-1][1] for stage, result in runs]),
        spread([bits_at(result, least[result.case["seed"]], stage) for stage, result in runs]),
        spread([sum(result.seconds[stage]) for stage, result in runs], 0),
        spread(gains, 1) + (", flat" if max(map(abs, gains)) <= 100 * FLAT else ""),
    ]


def share_of_pairs(stage: str, result: Result) -> float:
    """Pairs of query and key over those of dense attention."""
    (n,) = {x["context"] for x in result.case["stages"] if x["name"] == stage}
    return result.counts[f"{stage}: pairs"] / (result.case["config"]["h"] * n * (n + 1) // 2)


END = ["pairs, % of dense", "bits per byte, equal bytes", "equal time", "training, core s"]
END += ["gained by the last quarter, %"]


def make_table(results: Sequence[Result]) -> Table:
    """Bits per byte at equal bytes and at equal time, and of the same last bytes by context."""
    groups = group(results)
    contexts = sorted({context for context, _ in groups})
    rows = []
    for (context, attention), runs in groups.items():
        if context == contexts[0]:
            rows.append(first_row(f"first stage, {attention}", runs, len(contexts)))
    for (context, attention), runs in groups.items():
        cells = end_cells(runs, least_seconds(of for (n, _), of in groups.items() if n == context))
        lasts = [last_bits(runs, n) for n in contexts if n <= context]
        cells += [*map(spread, lasts), *[""] * (len(contexts) - len(lasts))]
        library = "" if all(x.counts["packages"] for _, x in runs) else " (standard library)"
        rows.append([f"{context:,}, {attention}{library}", *cells, f"{mean(walls_of(runs)):.0f}"])
    head = ["context and attention", *END, *(f"last {LAST:,} bytes with {n:,}" for n in contexts)]
    return lacking(results, Table([*head, "wall s a seed"], rows))


def first_row(name: str, runs: Runs, num_contexts: int) -> list[str]:
    """Bits per byte and seconds of the first stage, which all contexts have in common."""
    results = [result for _, result in runs]
    bits = spread([curve(result.counts, FIRST)[-1][1] for result in results])
    seconds = spread([sum(result.seconds[FIRST]) for result in results], 0)
    wall = mean(result.seconds["wall"][0] for result in results)
    return [name, "", bits, "", seconds, "", *[""] * num_contexts, f"{wall:.0f}"]


def last_bits(runs: Runs, context: int) -> list[float]:
    return [per_byte(result.counts, f"{stage}: last {context}") for stage, result in runs]


def position_table(results: Sequence[Result]) -> Table:
    """Bits per byte by position in the context."""
    groups = group(results)
    starts = [start for start, _ in context_classes(max((context for context, _ in groups), default=1))]
    rows = []
    for (context, attention), runs in groups.items():
        known = {start for start, _ in context_classes(context)}
        cells = [
            spread([per_byte(x.counts, f"{stage}: at {start}") for stage, x in runs])
            if start in known
            else ""
            for start in starts
        ]
        rows.append([f"{context:,}, {attention}", *cells])
    return Table(["context and attention", *(f"from {start:,}" for start in starts)], rows)


TITLE = "**Language**: bits per byte of source code that no model has seen; mean over seeds ± half the range"
BY_POSITION = "**By position in the context**: bits per byte, of the same bytes with both attentions"
SECTIONS = {
    "language": Section(TITLE, make_table, describe, has_rounds=False, more={BY_POSITION: position_table})
}


def summary(record: Record) -> str:
    """Bits and training time of both attentions at the longest context, and what its far end is good for."""
    groups = group(record.results)
    contexts = sorted({context for context, _ in groups})
    if len(contexts) < 2:
        raise ValueError(f"a summary compares two contexts at least, got a record of {contexts}")
    near, longest = contexts[-2:]
    rivals = {attention: runs for (context, attention), runs in groups.items() if context == longest}
    least, found = least_seconds(rivals.values()), []
    for attention, runs in rivals.items():
        _, bits, same_time, seconds, _ = end_cells(runs, least)
        lasts = [f"{mean(last_bits(runs, n)):.3f} with {n:,}" for n in (near, longest)]
        times = f"after {seconds} core seconds ({same_time} at equal time)"
        found.append(f"{attention} {bits} {times}, and the last {LAST:,} bytes {' and '.join(lasts)}")
    return f"Bits per byte of source code at a context of {longest:,} bytes: {'; '.join(found)}.\n"


def draw(record: Record) -> str:
    """Bits per byte over the time of training after the first stage, a line each context and attention."""
    series = []
    for (context, attention), runs in group(record.results).items():
        times = [accumulate(result.seconds[stage]) for stage, result in runs]
        bits = [[each for _, each in curve(result.counts, stage)] for stage, result in runs]
        points = zip(*(map(mean, zip(*of, strict=True)) for of in (times, bits)), strict=True)
        series.append(Series(f"{attention}, {context:,}", tuple(points)))
    how = {
        "x_label": "core seconds of training, after the first stage",
        "y_label": "bits per byte",
        "chart_id": "language",
    }
    return picture(series, title="Bits per byte over the time of training", log_y=False, **how)
