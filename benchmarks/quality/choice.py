"""Which branches to choose: language models that go on from the same one, with several settings.

    python benchmarks/quality choice --out benchmarks/results/choice.json
    python benchmarks/quality choice --render --update docs/quality.md --markers choice

All models of a seed go on from the dense model of a short context that the suite of language begins with;
times are of what follows. Beside what they learn stands what is in reach of a few layers by the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import language
import torch
from attentions import lacking
from common import run_case
from language import (
    END,
    HEAD_DIM,
    HEADS,
    LAYERS,
    Attention,
    LanguageCase,
    Runs,
    Stage,
    end_cells,
    least_seconds,
    walls_of,
)

from dilated_attention_pytorch import branches_for
from dilated_attention_pytorch.cli.bench.record import Result, Section, Table

CONTEXT = 8192  # of which four heads serve all residues, whatever the first segment is
PARTS = 2  # of the settings of a seed, so that there is work for more cores than there are seeds
# First segment, ratio and options.
SETTINGS: dict[str, tuple[int, int, tuple[tuple[str, str], ...]]] = {
    f"first {first:,}, ratio {ratio}": (first, ratio, ()) for first in (512, 1024, 2048) for ratio in (2, 4)
}
SETTINGS |= {"blocked offsets, ratio 2": (1024, 2, (("head_offsets", "blocked"),))}
# A group of heads each branch, so that there are no more branches than heads.
SETTINGS |= {"grouped heads, ratio 4": (1024, 4, (("head_mixing", "grouped"),))}


def attention_of(name: str, context: int, head_dim: int = HEAD_DIM) -> Attention:
    """A setting for a context; its first segment is the same part of each."""
    first, ratio, options = SETTINGS[name]
    branches = branches_for(context, HEADS, first=first * context // CONTEXT, ratio=ratio)
    return Attention(HEADS, head_dim, *branches, is_causal=True, options=options)


def make_case(names: Sequence[str], seed: int) -> LanguageCase:
    stages = tuple(Stage(x, CONTEXT, attention_of(x, CONTEXT), 2 * 2**20, 16384, points=4) for x in names)
    name = f"from {names[0]!r} on, seed {seed}"
    case = language.make_case("dense", seed)
    config = stages[-1].config
    return replace(case, name=name, attention="dilated", config=config, stages=stages, tests=8, kind="choice")


_NAMES = list(SETTINGS)
# Each seed begins with another setting, so that what slows a machine for a while does not meet the same ones.
CASES = tuple(
    make_case((_NAMES[seed:] + _NAMES[:seed])[part::PARTS], seed)
    for part in range(PARTS)
    for seed in language.SEEDS
)


def _quick() -> LanguageCase:
    text = language.QUICK[0]
    configs = {
        name: attention_of(name, 256, head_dim=2)
        for name in ("first 1,024, ratio 2", "grouped heads, ratio 4")
    }
    stages = tuple(replace(text.stages[-1], name=name, config=config) for name, config in configs.items())
    first = replace(text.first, config=Attention(HEADS, 2, (128,), (1,), is_causal=True))
    config = stages[-1].config
    return replace(text, name="quick", kind="choice", config=config, first=first, stages=stages)


QUICK = (_quick(),)
WORKERS = torch.get_num_threads()
run = run_case
describe = language.describe


def make_table(results: Sequence[Result]) -> Table:
    """A row each setting, means over seeds: cost, bits per byte at equal bytes and time, reach."""
    groups: dict[str, Runs] = {}
    for result in (x for x in results if not x.why_not):
        for stage in result.case["stages"]:
            groups[stage["name"]] = [*groups.get(stage["name"], []), (stage["name"], result)]
    least = least_seconds(groups.values())
    rows = []
    for name, runs in sorted(groups.items(), key=lambda item: _NAMES.index(item[0])):
        later, *reached = (
            sum(x.counts[f"{name}: {what}"] for _, x in runs)
            for what in ("later", *(f"reached {layers}" for layers in LAYERS))
        )
        cells = [*end_cells(runs, least), *(f"{100 * each / later:.0f}" for each in reached)]
        rows.append([name, *cells, f"{mean(walls_of(runs)):.0f}"])
    head = ["setting", *END, *(f"in reach of {layers}, %" for layers in LAYERS), "wall s a seed"]
    return lacking(results, Table(head, rows))


TITLE = "**Choice of branches**: mean over seeds ± half the range"
SECTIONS = {"choice": Section(TITLE, make_table, describe, has_rounds=False)}
