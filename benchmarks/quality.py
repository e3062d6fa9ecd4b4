"""What quality costs: a small model trained with dense, dilated and block-sparse attention, side by side.

    python benchmarks/quality.py --out benchmarks/results/quality.json
    python benchmarks/quality.py --render --update docs/benchmarks.md --markers quality

All models see the same bytes in the same order, from the same initial weights. The text is the source of
Python's standard library. About half an hour on two cores.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import sparse
import torch
from common import Config, Say, main, reduced_error, run_case, show_branches

from dilated_attention_pytorch.cli.bench.gate import accept
from dilated_attention_pytorch.cli.bench.measure import Measured
from dilated_attention_pytorch.cli.bench.record import Figure, Result, Section, Table
from dilated_attention_pytorch.cli.train import TrainConfig
from dilated_attention_pytorch.cli.train.data import standard_library_files
from dilated_attention_pytorch.cli.train.loop import Run
from dilated_attention_pytorch.cli.train.ranks import Ranks

ATTENTIONS = ("dense", "dilated", "block-sparse")
SAY_EVERY = 20


@dataclass(frozen=True)
class QualityCase:
    """Bits per byte on held-out text, and training time, of models that differ in their attention alone.

    `config` is the dilated attention; the block-sparse one keeps `kept` of the causal blocks, near and
    at the start ("global_local").
    """

    name: str
    config: Config
    n: int
    kept: float
    steps: int
    layers: int = 4
    batch_tokens: int = 8192  # of a step, whatever the context
    dim_feedforward: int = 512
    learning_rate: float = 2e-3
    block_size: int = 128
    validation_tokens: int = 2**17
    quality_target: float | None = None
    time_target: float | None = None
    repeats: int = 1
    kind: ClassVar[str] = "quality"

    @property
    def dense(self) -> Config:
        """One segment of rate 1 is dense attention, in the same kernel."""
        return replace(self.config, segment_lengths=(self.n,), dilation_rates=(1,))

    def run(self, say: Say) -> Measured:
        error = accept(self.name, attention_error(self))
        say(f"{self.name}: attention right within {error:.0e}, training {', '.join(ATTENTIONS)}")
        with tempfile.TemporaryDirectory() as folder:
            return train(self, start_runs(self, Path(folder)), error, say)

    def figures(self, found: Measured) -> list[Figure]:
        """Bits per byte by attention, then of the sparse ones over dense: bits and time of all steps."""
        bits = {name: found.counts[f"bits {name}"] for name in ATTENTIONS}
        times = {name: sum(found.seconds[name]) for name in ATTENTIONS}
        total = found.counts["validation bytes"]
        figures = [Figure(f"{name}: bits per byte", bits[name] / total) for name in ATTENTIONS]
        for name in ATTENTIONS[1:]:
            targets = (self.quality_target, self.time_target) if name == "dilated" else (None, None)
            for what, values, target in zip(("bits", "time"), (bits, times), targets, strict=True):
                over = values[name] / values["dense"]
                figures.append(Figure(f"{name}: {what} over dense", over, target=target))
        return figures


def attention_error(case: QualityCase) -> float:
    config = case.config
    kept = (case.block_size, "global_local", case.kept)
    blocks = sparse.SparseConfig(config.h, config.d, *kept, is_causal=True)
    errors = [reduced_error(each, case.n, backward=True) for each in (case.dense, config)]
    return max(*errors, sparse.reduced_error(blocks, case.n, backward=True))


def train(case: QualityCase, runs: dict[str, Run], error: float, say: Say) -> Measured:
    """The models take their steps in turn, so that what else the machine does falls on all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in ATTENTIONS}
    counts: dict[str, int] = {}
    for step in range(1, case.steps + 1):
        for name in ATTENTIONS if step % 2 else reversed(ATTENTIONS):
            start = time.perf_counter()
            runs[name].take_step()
            seconds[name].append(time.perf_counter() - start)
        if step % SAY_EVERY == 0 or step == case.steps:
            losses = ", ".join(f"{name} {run.loss:.3f}" for name, run in runs.items())
            say(f"{case.name}: step {step} of {case.steps}, losses in nats a byte: {losses}")
    for name, run in runs.items():
        tokens = run.config.validation_windows * case.n
        counts |= {
            f"bits {name}": round(run.validate()["bits_per_byte"] * tokens),
            "validation bytes": tokens,
            "parameters": sum(x.numel() for x in run.model.parameters()),
        }
    return Measured(error, counts, {name: tuple(values) for name, values in seconds.items()})


def start_runs(case: QualityCase, folder: Path) -> dict[str, Run]:
    """Projections of some kinds are fused and drawn as one: all begin with the weights of the first."""
    runs = {name: Run(train_config(case, name), folder, Ranks(torch.device("cpu"))) for name in ATTENTIONS}
    first, *others = (run.model for run in runs.values())
    for model in others:
        model.load_state_dict(first.state_dict())
    return runs


def train_config(case: QualityCase, attention: str) -> TrainConfig:
    """The settings of one of the models."""
    config = case.config
    branches = case.dense if attention == "dense" else config
    sparse_config = {
        "pattern_type": "global_local",
        "sparsity_ratio": case.kept,
        "block_size": case.block_size,
    }
    is_sparse = attention == "block-sparse"
    return TrainConfig(
        data=tuple(standard_library_files()),
        d_model=config.h * config.d,
        nhead=config.h,
        num_layers=case.layers,
        dim_feedforward=case.dim_feedforward,
        segment_lengths=branches.segment_lengths,
        dilation_rates=branches.dilation_rates,
        kind="block_sparse" if is_sparse else "standard",
        attention_options={"sparse_config": sparse_config} if is_sparse else {},
        context_length=case.n,
        batch_size=max(1, case.batch_tokens // case.n),
        steps=case.steps,
        warmup_steps=min(case.steps // 10, 30),
        learning_rate=case.learning_rate,
        validation_windows=case.validation_tokens // case.n,
        device="cpu",
    )


_SHORT = Config(4, 32, (256, 1024), (1, 4), is_causal=True)
_LONG = Config(4, 32, (1024, 4096, 8192), (1, 4, 8), is_causal=True)
_SMALL = Config(2, 16, (32, 128), (1, 4), is_causal=True)
CASES = (
    QualityCase("context 1024", _SHORT, 1024, 0.3, 200),
    QualityCase("context 8192", _LONG, 8192, 0.17, 200, quality_target=1.02, time_target=1.0),
)
QUICK = (QualityCase("quick quality", _SMALL, 128, 0.5, 3, 1, 512, 32, block_size=16, validation_tokens=512),)


def describe(case: dict[str, Any]) -> str:
    """The sizes of a case in a few words."""
    config = case["config"]
    heads = f"{case['layers']} layers, h = {config['h']}, d = {config['d']}"
    steps = f"feed-forward {case['dim_feedforward']}, {case['steps']} steps of {case['batch_tokens']} bytes"
    blocks = f"{case['kept']:g} of the blocks of {case['block_size']}"
    return f"{heads}, {steps}; {show_branches(config)}; {blocks}"


def make_table(results: Sequence[Result]) -> Table:
    """Bits per byte and training time by context and attention."""
    rows = []
    for result in results:
        figures = {figure.name: figure for figure in result.figures}
        for name in ATTENTIONS:
            bits, speed = (figures.get(f"{name}: {what} over dense") for what in ("bits", "time"))
            over = [[figure.number, figure.verdict] if figure else ["", ""] for figure in (bits, speed)]
            cells = [figures[f"{name}: bits per byte"].number, *over[0], f"{sum(result.seconds[name]):.0f}"]
            rows.append([f"{result.name}, {name}", *cells, *over[1]])
    head = ["case and attention", "bits per byte", "over dense", "target", "training, s", "over dense"]
    return Table([*head, "target"], rows)


TITLE = "**Quality**: the same model and bytes, trained with each attention"
SECTIONS = {"quality": Section(TITLE, make_table, describe, has_rounds=False)}
run = run_case

if __name__ == "__main__":
    sys.exit(main("quality"))
