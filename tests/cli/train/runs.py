"""Small runs for the tests of the trainer."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.cli.train import TrainConfig
from dilated_attention_pytorch.cli.train.folder import Metrics, find_checkpoint, read_metrics
from dilated_attention_pytorch.cli.train.loop import Run, StopWish, Summary
from dilated_attention_pytorch.cli.train.ranks import Ranks

SMALL: dict[str, Any] = {
    "d_model": 32,
    "nhead": 2,
    "num_layers": 2,
    "dim_feedforward": 48,
    "segment_lengths": (16, 64),
    "dilation_rates": (1, 2),
    "context_length": 61,
    "batch_size": 4,
    "steps": 7,
    "warmup_steps": 2,
    "learning_rate": 3e-3,
    "validate_every": 3,
    "validation_windows": 3,
    "checkpoint_every": 2,
}
ALONE = Ranks(torch.device("cpu"))
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
}


class StopAfter(StopWish):
    """A wish that is made in the course of the given number of steps."""

    def __init__(self, steps: int | None) -> None:
        self.left = steps

    @property
    def is_made(self) -> bool:  # asked once a step
        if self.left is not None:
            self.left -= 1
        return self.left is not None and self.left <= 0


def write_text(folder: Path) -> str:
    """A file of text to train on."""
    path = folder / "text.txt"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards"]
    lines = [" ".join(words[(i * j) % len(words)] for j in range(1, 9)) for i in range(1, 120)]
    path.write_text("\n".join(lines))
    return str(path)


def small(folder: Path, **settings: Any) -> TrainConfig:
    return TrainConfig(**{**SMALL, "data": (write_text(folder),), **settings})


def train(config: TrainConfig, out: Path, *, resume: bool = False, stop_after: int | None = None) -> Summary:
    """A run in this process, or its continuation."""
    out.mkdir(exist_ok=True)
    run = Run(config, out, ALONE)
    if resume:
        run.resume()
    run.metrics = Metrics(out, config, run.step, io.StringIO())
    try:
        return run.train(StopAfter(stop_after))
    finally:
        run.metrics.close()


def losses(out: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(out) if "loss" in line]


def validations(out: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(line["step"], line["validation"]) for line in read_metrics(out) if "validation" in line]


def final_tensors(out: Path, config: TrainConfig) -> dict[str, Tensor]:
    """Weights and averages of the newest checkpoint."""
    run = Run(config, out, ALONE)
    checkpoint, problems = find_checkpoint(out)
    assert not problems
    run.load(checkpoint)
    return run.tensors()
