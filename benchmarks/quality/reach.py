"""How far attention reaches: needles in sequences of noise, found by their distance.

    python benchmarks/quality reach --out benchmarks/results/reach.json
    python benchmarks/quality reach --render --update docs/quality.md --markers reach
    python benchmarks/quality reach --render --picture docs/images/reach.svg
    python benchmarks/quality reach --render --summary --update README.md --markers reach

A needle is a token with a slot and a value, among noise. A query names a slot, and the model has to answer
with the value: of the only needle of the sequence ("needle"), or of one of four ("copy"), of which it has to
select the right one. Models have no position encoding, so that they can be used at any length. They learn
on sequences of 128 tokens, then on longer ones up to 8,192, with the same steps for all, and are tested on
up to 65,536.
"""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import mean
from typing import Any

import torch
from attentions import (
    PATTERNS,
    WORDS,
    attend,
    attention_error,
    branches_of,
    for_length,
    lacking,
    make_model,
    reached_from,
)
from common import NO_CHARTS, Config, Say, as_file, run_case, show_branches
from torch import Tensor
from torch.nn import functional as F

from dilated_attention_pytorch.cli.bench.gate import accept
from dilated_attention_pytorch.cli.bench.measure import Measured, measure_in_child
from dilated_attention_pytorch.cli.bench.record import Figure, Record, Result, Section, Table, say as tell
from dilated_attention_pytorch.cli.train.data import mix_seed

NOISE, VALUES = 16, 16  # kinds of noise, and values of needles
SLOTS = {"needle": 1, "copy": 4}
QUERIES = 0.25  # share of the tokens that ask, if there is anything to ask for
SEEDS = (0, 1, 2)
TARGETS = {("dilated", 32768): 0.95}  # the least accuracy, of every seed
FIRST_DISTANCE = 1024  # the first class of distances; bounds double
PLACES = 16  # of which it is found what they reach
SAY_EVERY = 100


@dataclass(frozen=True)
class ReachCase:
    """Accuracy by distance of one model: a task, an attention and a seed.

    `stages` are lengths and steps of training, `lengths` those of the tests, of `test_rows` sequences each
    or as many as there are in `test_tokens`.
    """

    name: str
    task: str
    attention: str
    seed: int
    config: Config
    stages: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    layers: int = 3
    dim_feedforward: int = 128
    batch_tokens: int = 8192
    batch_rows: int = 32
    test_tokens: int = 2**20
    test_rows: int = 32
    learning_rate: float = 3e-3
    repeats: int = 1

    @property
    def kind(self) -> str:
        return self.task

    @property
    def sizes(self) -> dict[str, Any]:
        """Of the model, but for its attention."""
        slots = SLOTS[self.task]
        vocabulary = NOISE + slots + slots * VALUES
        return {
            "vocab_size": vocabulary,
            "num_layers": self.layers,
            "dim_feedforward": self.dim_feedforward,
            "position_encoding": None,
            "sub_layer_norm": False,
        }

    def run(self, say: Say) -> Measured:
        n = self.stages[-1][0]
        error = accept(self.name, attention_error(self.attention, self.config))
        say(f"{self.name}: attention right within {error:.0e}, training on {n} tokens")
        found = measure_in_child(measure, self)
        return Measured(error, found.counts, found.seconds, found.why_not)

    def figures(self, found: Measured) -> list[Figure]:
        """Accuracy over all queries at each length."""
        targets = [TARGETS.get((self.attention, n)) for n in self.lengths]
        return [
            Figure(f"accuracy at {n:,}", accuracy([found.counts], n), target=target, at_least=True)
            for n, target in zip(self.lengths, targets, strict=True)
        ]


def distance_classes(n: int) -> list[int]:
    """The upper bounds of distances that are told apart in sequences of n tokens."""
    bounds = [FIRST_DISTANCE]
    while bounds[-1] < n:
        bounds.append(2 * bounds[-1])
    return bounds


def accuracy(counts: Sequence[dict[str, int]], n: int, bound: int | None = None) -> float | None:
    """The share of queries that were answered; None where nothing was asked."""
    return _share(counts, n, bound, "found", "asked")


def reached(counts: Sequence[dict[str, int]], n: int) -> float | None:
    """The share of pairs of which the later one can be reached from the earlier."""
    return _share(counts, n, None, "reached", "pairs")


def _share(counts: Sequence[dict[str, int]], n: int, bound: int | None, what: str, of: str) -> float | None:
    bounds = distance_classes(n) if bound is None else [bound]
    some, every = (sum(x.get(f"{name} {n} {b}", 0) for x in counts for b in bounds) for name in (what, of))
    return some / every if every else None


def make_rows(task: str, rows: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, answers (-100 where nothing is asked) and distances to what is asked for, (rows, n) each."""
    slots, at = SLOTS[task], torch.arange(n)
    draw = partial(torch.randint, generator=generator)
    tokens = draw(NOISE, (rows, n))
    places = torch.rand(rows, n, generator=generator).topk(slots, 1).indices  # (rows, slots), distinct
    values, asked = draw(VALUES, (rows, slots)), draw(slots, (rows, n))
    distances = at - places.gather(1, asked)
    is_query = (torch.rand(rows, n, generator=generator) < QUERIES) & (distances > 0)
    is_query.scatter_(1, places, False)
    tokens = torch.where(is_query, NOISE + asked, tokens)
    tokens.scatter_(1, places, NOISE + slots + VALUES * torch.arange(slots) + values)
    answers = torch.where(is_query, values.gather(1, asked), -100)
    return tokens, answers, distances


def measure(case: ReachCase) -> Measured:
    """Trains and tests in this process, on one core."""
    torch.set_num_threads(1)
    begin, start = time.perf_counter(), time.process_time()
    model = train(case)
    trained = time.process_time()
    with torch.no_grad():
        counts = {name: count for n in case.lengths for name, count in test(case, model, n).items()}
    seconds = {"training": trained - start, "tests": time.process_time() - trained}
    seconds["wall"] = time.perf_counter() - begin
    return Measured(None, counts, {name: (value,) for name, value in seconds.items()})


def train(case: ReachCase) -> Any:
    """The model after all stages. The learning rate rises over 50 steps and falls over the last fifth."""
    how = (case.attention, case.stages[0][0], case.config)
    model = make_model(*how, mix_seed(case.seed, "weights"), **case.sizes)
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    total, step = sum(steps for _, steps in case.stages), 0
    for n, steps in case.stages:
        model = for_length(model, case.attention, n, case.config, **case.sizes)
        for _ in range(steps):
            step += 1
            rate = min(1.0, step / 50, (total - step + 1) / (0.2 * total))
            optimiser.param_groups[0]["lr"] = case.learning_rate * rate
            generator = torch.Generator().manual_seed(mix_seed(case.seed, "data", step))
            rows = min(case.batch_rows, max(1, case.batch_tokens // n))
            tokens, answers, _ = make_rows(case.task, rows, n, generator)
            logits = model(tokens)[..., :VALUES]
            loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            if step % SAY_EVERY == 0 or step == total:
                right = (logits.argmax(-1) == answers)[answers >= 0].float().mean()
                tell(f"{case.name}: step {step} of {total}, {n} tokens, {right:.0%} right")
    return model


def test(case: ReachCase, model: Any, n: int) -> dict[str, int]:
    """What was asked and found, and which pairs are in reach of so many layers, by length and distance."""
    model = for_length(model, case.attention, n, case.config, **case.sizes).eval()
    generator = torch.Generator().manual_seed(mix_seed("test", case.seed, n))
    counts: Counter[str] = Counter()
    for _ in range(max(1, min(case.test_rows, case.test_tokens // n))):
        tokens, answers, distances = make_rows(case.task, 1, n, generator)
        is_query = answers >= 0
        is_right = (model(tokens)[..., :VALUES].argmax(-1) == answers)[is_query]
        far = distances[is_query]
        for name, flags in (("asked", far > 0), ("found", is_right)):
            counts += _by_distance(f"{name} {n}", far[flags], n)
        counts[f"needles {n}"] += len((torch.arange(n)[is_query[0]] - far).unique())
    places = torch.randint(n, (min(n, PLACES),), generator=generator)
    see = attend(case.attention, n, case.config)
    is_reached = next(islice(reached_from(see, places, n, case.config.h), case.layers - 1, None))
    far = torch.arange(n) - places[:, None]
    for name, flags in (("pairs", far > 0), ("reached", (far > 0) & is_reached)):
        counts += _by_distance(f"{name} {n}", far[flags], n)
    return dict(counts)


def _by_distance(name: str, distances: Tensor, n: int) -> Counter[str]:
    """How many there are of each class."""
    bounds = distance_classes(n)
    found = torch.bucketize(distances, torch.tensor(bounds)).bincount(minlength=len(bounds))
    return Counter({f"{name} {bound}": count for bound, count in zip(bounds, found.tolist(), strict=True)})


def make_cases() -> tuple[ReachCase, ...]:
    stages = ((128, 400), (256, 150), (512, 100), (1024, 50), (2048, 50), (4096, 50), (8192, 150))
    lengths, cases = (8192, 16384, 32768, 65536), []
    given: dict[str, Any] = {"lengths": lengths}
    for task in SLOTS:
        for attention in WORDS:
            config = Config(8, 8, *branches_of(attention, stages[-1][0], 8), is_causal=True)
            for seed in SEEDS:
                few = {"lengths": lengths[:3], "test_tokens": 2**18} if attention == "dense" else {}
                name = f"{task}, {attention}, seed {seed}"
                cases.append(ReachCase(name, task, attention, seed, config, stages, **(given | few)))
    return tuple(cases)


CASES = make_cases()
_SMALL = {"layers": 1, "dim_feedforward": 16, "batch_tokens": 256, "test_rows": 2, "test_tokens": 2048}
QUICK = tuple(
    ReachCase(
        f"quick {task}, {attention}",
        task,
        attention,
        0,
        Config(8, 4, *branches_of(attention, 128, 8), is_causal=True),
        ((64, 2), (128, 2)),
        (1024,),
        **_SMALL,
    )
    for task, attention in (("needle", "dilated"), ("copy", "window"))
)
WORKERS = torch.get_num_threads()
run = run_case


def describe(case: dict[str, Any]) -> str:
    """The sizes of the model, what its attention sees, and how it was trained."""
    config, attention = case["config"], case["attention"]
    heads = f"{case['layers']} layers, h = {config['h']}, d = {config['d']}"
    steps = ", ".join(f"{steps} at {n:,}" for n, steps in case["stages"])
    seen = WORDS[attention]
    if attention not in PATTERNS:
        seen += f", when trained on {case['stages'][-1][0]:,} tokens {show_branches(config)}"
    tokens = f"steps of at most {case['batch_tokens']:,} tokens: {steps}"
    return f"{heads}, feed-forward {case['dim_feedforward']}; {seen}; {tokens}"


def group(results: Sequence[Result]) -> dict[str, list[Result]]:
    """By attention, what was measured of all seeds."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if not result.why_not:
            found.setdefault(result.case["attention"], []).append(result)
    return found


def share(values: Sequence[float | None]) -> str:
    """The mean over seeds in percent, with the least and the largest where they differ."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean, low, high = (f"{100 * x:.0f}" for x in (sum(known) / len(known), min(known), max(known)))
    return mean if low == high else f"{mean} ({low}-{high})"


def make_table(results: Sequence[Result]) -> Table:
    """Percent of queries answered, by attention, length and distance; means over seeds, least and largest."""
    longest = max(n for result in results for n in result.case["lengths"])
    bounds = distance_classes(longest)
    rows = []
    for attention, seeds in group(results).items():
        counts = [result.counts for result in seeds]
        times = [
            f"{mean(sum(x.seconds[name][0] for name in of) for x in seeds):.0f}" for of in _TIMES.values()
        ]
        for n in seeds[0].case["lengths"]:
            cells = [share([accuracy([each], n, bound) for each in counts]) for bound in [None, *bounds]]
            cells += [share([reached(counts, n)]), _verdict(attention, counts, n)]
            cells.append(f"{sum(each[f'needles {n}'] for each in counts):,}")
            cells += times if n == seeds[0].case["lengths"][0] else [""] * len(times)
            rows.append([f"{attention}, {n:,} tokens", *cells])
    lower = [0, *bounds]
    names = [f"{a:,} to {b:,}" if a else f"up to {b:,}" for a, b in zip(lower, bounds, strict=False)]
    head = ["percent right", "all", *names, "in reach", "target", "needles", *_TIMES]
    return lacking(results, Table(head, rows))


_TIMES = {"core s a seed": ("training", "tests"), "wall s a seed": ("wall",)}


def _verdict(attention: str, counts: Sequence[dict[str, int]], n: int) -> str:
    """The target of a row, if it has one, and whether all seeds meet it."""
    target = TARGETS.get((attention, n))
    if target is None:
        return ""
    met = sum((accuracy([each], n) or 0.0) >= target for each in counts)
    words = "met" if met == len(counts) else f"**not met** ({met} of {len(counts)} seeds do)"
    return f"every seed at least {100 * target:.0f}, {words}"


TITLES = {
    "needle": "**Needle retrieval**: one needle in each sequence, by the distance from query to needle",
    "copy": "**Selective copy**: four needles, of which the query names one",
}
SECTIONS = {kind: Section(title, make_table, describe, has_rounds=False) for kind, title in TITLES.items()}


def summary(record: Record) -> str:
    """How much is found at the length of the target, by attention, of both tasks."""
    ((_, n),) = TARGETS
    found = []
    for task in SECTIONS:
        groups = group([x for x in record.results if x.case["task"] == task])
        shares = {name: mean_accuracy(seeds, n) for name, seeds in groups.items()}
        if not shares or None in shares.values():
            raise ValueError(
                f"a summary needs all attentions of {task!r} at {n} tokens, got a record without"
            )
        found.append(", ".join(f"{name} {100 * (share or 0):.0f} %" for name, share in shares.items()))
    trained = record.results[0].case["stages"][-1][0]
    words = (
        f"Trained on {trained:,} tokens and tested on {n:,}, small models find **one needle** with {found[0]}"
    )
    return f"{words}; **the right one of {SLOTS['copy']}** with {found[1]}.\n"


def mean_accuracy(seeds: Sequence[Result], n: int, bound: int | None = None) -> float | None:
    """The mean over the seeds that were asked anything."""
    known = [share for x in seeds if (share := accuracy([x.counts], n, bound)) is not None]
    return mean(known) if known else None


def draw(record: Record) -> str:
    """Percent of queries answered as heat maps: by task and length, of attention and distance."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ValueError(NO_CHARTS) from None
    lengths = sorted({n for result in record.results for n in result.case["lengths"]})
    widths = [len(distance_classes(n)) for n in lengths]
    by_task = {task: group([x for x in record.results if x.case["task"] == task]) for task in SECTIONS}
    by_task = {task: groups for task, groups in by_task.items() if groups}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "reach", "font.size": 11}):
        canvas = Canvas((11.5, 0.4 + 2.4 * len(by_task)), layout="constrained")
        panels = canvas.subplots(len(by_task), len(lengths), width_ratios=widths, squeeze=False)
        for (task, groups), row in zip(by_task.items(), panels, strict=True):
            for n, axes in zip(lengths, row, strict=True):
                _draw_map(axes, groups, n)
                axes.set_title(f"{task}, {n // 1024}k tokens", loc="left", fontsize=11, weight="bold")
            for axes in row[1:]:
                axes.set_yticklabels([])
        canvas.supxlabel("distance from query to needle, up to", fontsize=11)
        drawn = io.StringIO()
        canvas.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    svg = drawn.getvalue()
    return as_file(svg[svg.index("<svg") :])


def _draw_map(axes: Any, groups: dict[str, list[Result]], n: int) -> None:
    """A row each attention, a column each class of distance, with the percentage in each cell."""
    bounds = distance_classes(n)
    cells = [[mean_accuracy(seeds, n, bound) for bound in bounds] for seeds in groups.values()]
    shown = [[float("nan") if cell is None else 100 * cell for cell in row] for row in cells]
    axes.imshow(shown, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for y, row in enumerate(shown):
        for x, percent in enumerate(row):
            if percent == percent:  # a number
                ink = "white" if percent < 60 else "black"
                axes.text(x, y, f"{percent:.0f}", ha="center", va="center", color=ink, fontsize=10)
    axes.set_xticks(range(len(bounds)), [f"{bound // 1024}k" for bound in bounds])
    axes.set_yticks(range(len(groups)), groups)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
