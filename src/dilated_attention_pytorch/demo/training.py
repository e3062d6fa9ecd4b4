"""A small language model of bytes, trained on Python's own library with the trainer of this package."""

from __future__ import annotations

import io
import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..modules import LongNetLM
from ..train.config import TrainConfig
from ..train.data import standard_library_files
from ..train.loop import Run
from ..train.metrics import Metrics, read_metrics
from ..train.ranks import Ranks
from ..train.signals import StopWish

LEAST_BYTES = 2**18  # of text
PROMPT = "def "
SAMPLE_BYTES = 400
TEMPERATURE, TOP_P, SEED = 1.0, 0.95, 0
PROBE_STEPS = 4
VALIDATIONS = 8  # of a run, about
CURVE_POINTS = 40
OVERTIME = 1.3  # a run that takes so many times what was planned is ended
STEP_SHARE = 0.9  # of the time; the rest is for validations
SETTINGS: dict[str, Any] = {
    "validation_share": 0.04,
    "d_model": 128,
    "nhead": 4,
    "num_layers": 3,
    "dim_feedforward": 512,
    "context_length": 1024,
    "batch_size": 2,
    "learning_rate": 3e-3,
    "validation_windows": 8,
    "checkpoint_every": 0,
}

# Step, of steps, and bits per byte: of the last training steps, and of a validation where there was one.
Told = Callable[[int, int, float, float | None], None]
_Heard = Callable[[int, float, float | None], None]  # without the number of steps


@dataclass(frozen=True)
class Training:
    """What a run gave, in bits per byte by step: means of the training loss over spans of steps that end
    there, and validations. `sample` follows `prompt`; it is None if the run was interrupted."""

    files: int
    parameters: int
    context_length: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    train_bytes: int
    validation_bytes: int
    steps: int
    steps_planned: int
    seconds: float
    losses: tuple[tuple[int, float], ...]
    validations: tuple[tuple[int, float], ...]
    is_interrupted: bool
    prompt: str
    sample: str | None = None


def source_files() -> list[str]:
    """Python's own source; none where there is little of it, as with distributions that ship bytecode."""
    files = standard_library_files()
    return files if sum(Path(file).stat().st_size for file in files) >= LEAST_BYTES else []


def make_config(files: Sequence[str], steps: int) -> TrainConfig:
    """The settings of a run of so many steps."""
    every = max(10, -(-steps // VALIDATIONS))
    return TrainConfig(
        data=tuple(files), steps=steps, warmup_steps=min(20, steps // 5), validate_every=every, **SETTINGS
    )


def plan_steps(seconds: float, files: Sequence[str]) -> tuple[int, int]:
    """How many steps take so many seconds, and with how many threads they do: torch's, or one.

    For a small model on a busy machine threads may wait for each other longer than they compute.
    """
    choices = {threads: step_seconds(files, threads) for threads in {1, torch.get_num_threads()}}
    threads = min(choices, key=choices.__getitem__)
    return max(1, int(STEP_SHARE * seconds / choices[threads])), threads


def step_seconds(files: Sequence[str], threads: int) -> float:
    """What a step takes, judged by a few of them."""
    config = replace(make_config(files, PROBE_STEPS), validation_windows=1, validate_every=0)
    with tempfile.TemporaryDirectory() as folder, use_threads(threads):
        _run(config, Path(folder), StopWish(), lambda *_: None)
        taken: list[float] = [line["seconds"] for line in read_metrics(Path(folder)) if "loss" in line]
    return median(taken[1:])  # the first one starts what all use


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """So many threads of torch, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_model(
    files: Sequence[str], steps: int, tell: Told, *, limit: float = math.inf
) -> tuple[Training, LongNetLM]:
    """Trains until the last step, Ctrl-C, or until `limit` seconds are over; tells of each step."""
    config = make_config(files, steps)
    start, is_late = time.perf_counter(), False
    with tempfile.TemporaryDirectory() as folder, StopWish() as stop:

        def told(step: int, loss: float, validation: float | None) -> None:
            nonlocal is_late
            tell(step, steps, loss, validation)
            if time.perf_counter() - start > limit and not stop.is_made:
                is_late = stop.is_made = True

        run = _run(config, Path(folder), stop, told)
        lines = read_metrics(Path(folder))
    losses = [(line["step"], line["loss"] / math.log(2)) for line in lines if "loss" in line]
    validations = [(x["step"], x["validation"]["bits_per_byte"]) for x in lines if "validation" in x]
    model = run.state.model
    training = Training(
        files=len(files),
        parameters=sum(x.numel() for x in model.parameters()),
        context_length=config.context_length,
        segment_lengths=config.segment_lengths,
        dilation_rates=config.dilation_rates,
        train_bytes=len(run.train_data),
        validation_bytes=len(run.validation_data),
        steps=run.step,
        steps_planned=steps,
        seconds=time.perf_counter() - start,
        losses=_means(losses),
        validations=tuple(validations),
        is_interrupted=stop.is_made and not is_late,
        prompt=PROMPT,
    )
    return training, model


def write_sample(model: LongNetLM) -> str:
    """What the model writes after PROMPT; characters that cannot be shown are replaced."""
    prompt = list(PROMPT.encode())
    tokens = model.generate(
        torch.tensor([prompt]), SAMPLE_BYTES, do_sample=True, temperature=TEMPERATURE, top_p=TOP_P, seed=SEED
    )
    text = bytes(tokens[0, len(prompt) :].tolist()).decode("utf-8", "replace")
    return "".join(x if x.isprintable() or x in "\n\t" else "\N{REPLACEMENT CHARACTER}" for x in text)


class _Listener(Metrics):
    """Metrics that are told on, in bits per byte, instead of printed; the loss is the mean of late ones."""

    def __init__(self, folder: Path, config: TrainConfig, told: _Heard) -> None:
        super().__init__(folder, config, 0, io.StringIO())
        self.told = told
        self.late: deque[float] = deque(maxlen=20)

    @property
    def loss(self) -> float:
        return sum(self.late) / len(self.late)

    def tell_step(self, step: int, loss: float, rate: float, norm: float, seconds: float) -> None:
        super().tell_step(step, loss, rate, norm, seconds)
        self.late.append(loss / math.log(2))
        self.told(step, self.loss, None)

    def tell_validation(self, step: int, result: dict[str, Any]) -> None:
        super().tell_validation(step, result)
        self.told(step, self.loss, result["bits_per_byte"])


def _run(config: TrainConfig, folder: Path, stop: StopWish, told: _Heard) -> Run:
    run, metrics = Run(config, folder, Ranks(torch.device("cpu"))), _Listener(folder, config, told)
    try:
        run.train(stop, metrics)
    finally:
        metrics.close()
    return run


def _means(losses: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Of spans of steps that are about equal, CURVE_POINTS at most, at their last steps."""
    count = min(CURVE_POINTS, len(losses))
    edges = [len(losses) * i // max(1, count) for i in range(count + 1)]
    parts = [losses[start:stop] for start, stop in pairwise(edges)]
    return tuple((part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts)
