"""Which branches to choose: dilated attention of several settings, by what it learns and how far it reaches.

    python benchmarks/quality choice --out benchmarks/results/choice.json
    python benchmarks/quality choice --render --update docs/quality.md --markers choice

Each setting trains a language model, as `language` does, and one that finds needles, as `reach` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, ClassVar

import corpus
import language
import reach
import torch
from attentions import VARIANTS, attend, attention_error, branches_of, lacking, reached_from
from common import Config, Say, run_case
from corpus import Sources
from language import END, LanguageCase, Stage, end_cells
from reach import ReachCase, accuracy, share

from dilated_attention_pytorch.cli.bench.gate import accept
from dilated_attention_pytorch.cli.bench.measure import Measured, measure_in_child
from dilated_attention_pytorch.cli.bench.record import Figure, Result, Section, Table
from dilated_attention_pytorch.plan.dilated import plan_dilated
from dilated_attention_pytorch.plan.runs import Shape
from dilated_attention_pytorch.spec import DilatedSpec

HEADS, HEAD_DIM, SHORT, CONTEXT = 8, 8, 1024, 16384
LAYERS = (1, 2, 3)  # through which the reach is told
KEYS = 64  # of which it is found what they reach


@dataclass(frozen=True)
class ChoiceCase:
    """One setting and seed: a language model, and a model that finds needles."""

    name: str
    variant: str
    config: Config
    language: LanguageCase
    reach: ReachCase
    repeats: int = 1
    kind: ClassVar[str] = "choice"

    def run(self, say: Say) -> Measured:
        error = accept(self.name, attention_error(self.variant, self.config))
        say(f"{self.name}: attention right within {error:.0e}")
        found = measure_in_child(measure, self, corpus.open_sources(self.language.packages))
        return Measured(error, found.counts, found.seconds, found.why_not)

    def figures(self, found: Measured) -> list[Figure]:
        """Bits per byte, and needles found in sequences of each length."""
        return [*self.language.figures(found), *self.reach.figures(found)]


def measure(case: ChoiceCase, sources: Sources) -> Measured:
    """Trains and tests both models in this process, on one core."""
    texts, needles = language.measure(case.language, sources), reach.measure(case.reach)
    counts = {**texts.counts, **needles.counts, **count_reach(case)}
    wall = texts.seconds["wall"][0] + needles.seconds["wall"][0]
    return Measured(None, counts, {**texts.seconds, "wall": (wall,)})


def count_reach(case: ChoiceCase) -> dict[str, int]:
    """Query-key pairs, and those in reach through so many layers, of some keys of the longest sequence."""
    n, h = case.reach.lengths[-1], case.config.h
    spec = DilatedSpec(*case.config.branches, is_causal=True, **dict(case.language.options))
    context = case.language.stages[-1].context
    scored = plan_dilated(spec, Shape(1, context, h, h, case.config.d), itemsize=4).num_defined_pairs
    counts = {"pairs": scored, "pairs dense": h * context * (context + 1) // 2}
    keys = torch.randint(n, (min(n, KEYS),), generator=torch.Generator().manual_seed(case.reach.seed))
    counts["later"] = int((n - keys).sum())
    see = attend(case.variant, n, case.config)
    for layers, reached in zip(LAYERS, reached_from(see, keys, n, h), strict=False):
        counts[f"reached {layers}"] = int(reached.sum())
    return counts


def make_case(variant: str, seed: int) -> ChoiceCase:
    options = VARIANTS[variant].options
    short, config = (
        Config(HEADS, HEAD_DIM, *branches_of(variant, n, HEADS), is_causal=True) for n in (SHORT, CONTEXT)
    )
    name = f"{variant}, seed {seed}"
    first, then = Stage(SHORT, short, 8 * 2**20, 4096, 8), Stage(CONTEXT, config, 2 * 2**20, 16384, 8)
    text = LanguageCase(name, variant, seed, config, first, (then,), options)
    like = next(x for x in reach.CASES if (x.task, x.attention, x.seed) == ("copy", "dilated", seed))
    needles = replace(like, name=name, attention=variant, config=config, lengths=(8192, 32768))
    needles = replace(needles, test_tokens=2**18)
    return ChoiceCase(name, variant, config, text, needles)


CASES = tuple(make_case(variant, seed) for variant in VARIANTS for seed in language.SEEDS)


def _quick(variant: str) -> ChoiceCase:
    text, options = language.QUICK[0], VARIANTS[variant].options
    config = Config(8, 4, *branches_of(variant, 256, 8), is_causal=True)
    first, then = (replace(stage, config=config) for stage in (text.first, text.stages[-1]))
    given = {"name": variant, "attention": variant, "config": config}
    text = replace(text, first=first, stages=(then,), options=options, **given)
    return ChoiceCase(f"quick {variant}", variant, config, text, replace(reach.QUICK[1], **given))


QUICK = tuple(_quick(variant) for variant in ("first 1,024, ratio 2", "grouped heads"))
WORKERS = torch.get_num_threads()
run = run_case


def describe(case: dict[str, Any]) -> str:
    """The language model and its branches."""
    return language.describe(case["language"])


def make_table(results: Sequence[Result]) -> Table:
    """A row each setting, means over seeds: cost, bits per byte at equal bytes and time, needles, reach."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if not result.why_not:
            groups.setdefault(result.case["variant"], []).append(result)
    lengths = results[0].case["reach"]["lengths"]
    context = results[0].case["language"]["stages"][-1]["context"]
    rows = []
    for name, seeds in groups.items():
        counts = seeds[0].counts
        cells = [f"{100 * counts['pairs'] / counts['pairs dense']:.1f}", *end_cells(groups, name, context)]
        cells += [share([accuracy([x.counts], n) for x in seeds]) for n in lengths]
        later = sum(x.counts["later"] for x in seeds)
        reached = [sum(x.counts[f"reached {layers}"] for x in seeds) for layers in LAYERS]
        cells += [f"{100 * each / later:.0f}" for each in reached]
        rows.append([name, *cells, f"{mean(x.seconds['wall'][0] for x in seeds):.0f}"])
    head = ["setting", "pairs, % of dense", *END, *(f"copy at {n:,}, %" for n in lengths)]
    head += [*(f"in reach of {layers}, %" for layers in LAYERS), "wall s a seed"]
    return lacking(results, Table(head, rows))


TITLE = "**Choice of branches**: mean over seeds ± half the range, or with the least and the largest"
SECTIONS = {"choice": Section(TITLE, make_table, describe, has_rounds=False)}
