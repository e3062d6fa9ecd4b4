"""Trains the models of a quality case side by side, step by step, and validates them on the same bytes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ..train.config import TrainConfig
from ..train.data import standard_library_files
from ..train.loop import Run
from ..train.ranks import Ranks
from .config import Config
from .gate import accept, reduced_error
from .quality_cases import ATTENTIONS, QualityCase
from .record import Result, make_result
from .sparse_cases import SparseConfig
from .sparse_gate import reduced_sparse_error

SAY_EVERY = 20


def run_quality(case: QualityCase, say: Callable[[str], None]) -> Result:
    """All models see the same bytes in the same order, from the same initial weights.

    They take their steps in turn, so that what else the machine does falls on all of them alike.
    """
    error = accept(case.name, max(_errors(case)))
    say(f"{case.name}: attention right within {error:.0e}, training {', '.join(ATTENTIONS)}")
    seconds: dict[str, list[float]] = {name: [] for name in ATTENTIONS}
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = start_runs(case, Path(folder))
        for step in range(1, case.steps + 1):
            for name in ATTENTIONS if step % 2 else reversed(ATTENTIONS):
                start = time.perf_counter()
                runs[name].take_step()
                seconds[name].append(time.perf_counter() - start)
            if step % SAY_EVERY == 0 or step == case.steps:
                losses = ", ".join(f"{name} {run.loss:.3f}" for name, run in runs.items())
                say(f"{case.name}: step {step} of {case.steps}, losses in nats a byte: {losses}")
        for name, run in runs.items():
            found = run.validate()
            tokens = run.config.validation_windows * case.n
            counts |= {
                f"bits {name}": round(found["bits_per_byte"] * tokens),
                "validation bytes": tokens,
                "parameters": sum(x.numel() for x in run.model.parameters()),
            }
    return make_result(case, case.repeats, error, {k: tuple(v) for k, v in seconds.items()}, counts)


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
    branches = _dense(case) if attention == "dense" else config
    sparse = {"pattern_type": "global_local", "sparsity_ratio": case.kept, "block_size": case.block_size}
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
        attention_options={"sparse_config": sparse} if is_sparse else {},
        context_length=case.n,
        batch_size=max(1, case.batch_tokens // case.n),
        steps=case.steps,
        warmup_steps=min(case.steps // 10, 30),
        learning_rate=case.learning_rate,
        validation_windows=case.validation_tokens // case.n,
        device="cpu",
    )


def _dense(case: QualityCase) -> Config:
    """One segment of rate 1 is dense attention, in the same kernel."""
    return replace(case.config, segment_lengths=(case.n,), dilation_rates=(1,))


def _errors(case: QualityCase) -> list[float]:
    config = case.config
    sparse = SparseConfig(config.h, config.d, case.block_size, "global_local", case.kept, is_causal=True)
    return [
        reduced_error(_dense(case), case.n, backward=True),
        reduced_error(config, case.n, backward=True),
        reduced_sparse_error(sparse, case.n, backward=True),
    ]
