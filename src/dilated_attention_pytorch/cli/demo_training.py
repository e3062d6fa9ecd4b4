"""A small language model of bytes, trained on Python's own library with the trainer of this package."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from ..modules import LongNetLM
from ..train.config import TrainConfig
from ..train.data import standard_library_files
from ..train.loop import Run, StopWish
from ..train.ranks import Ranks

LEAST_BYTES = 2**18  # of text
PROMPT = "def "
SAMPLE_BYTES = 400
TEMPERATURE, TOP_P, SEED = 1.0, 0.95, 0
PROBE_STEPS = 4
VALIDATIONS = 8  # of a run, about
CURVE_POINTS = 40
OVERTIME = 1.3  # a run that takes so many times what was planned is ended
STEP_SHARE = 0.9  # of the time; the rest is for validations
SETTINGS: dict[str, Any] = {"d_model": 128, "nhead": 4, "num_layers": 3, "dim_feedforward": 512}
SETTINGS |= {"context_length": 1024, "batch_size": 2, "learning_rate": 3e-3}
SETTINGS |= {"validation_share": 0.04, "validation_windows": 8}


@dataclass
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
    losses: list[tuple[int, float]]
    validations: list[tuple[int, float]]
    is_interrupted: bool
    prompt: str
    sample: str | None = None

    def describe(self) -> str:
        """The model and its data in a sentence."""
        branches = zip(self.segment_lengths, self.dilation_rates, strict=True)
        return (
            f"{self.parameters:,} parameters, {self.context_length:,} bytes of context, branches "
            f"{', '.join(f'{w}/{r}' for w, r in branches)}; {self.train_bytes:,} bytes of {self.files} "
            f"files, of which it sees {self.steps:,} batches; {self.validation_bytes:,} bytes are kept for "
            "validation."
        )


def source_files() -> list[str]:
    """Python's own source; none where there is little of it, as with distributions that ship bytecode."""
    files = standard_library_files()
    return files if sum(Path(file).stat().st_size for file in files) >= LEAST_BYTES else []


def start_run(files: Sequence[str], steps: int) -> Run:
    """A run of so many steps, of which nothing is written."""
    every = max(10, -(-steps // VALIDATIONS))
    settings = {**SETTINGS, "steps": steps, "warmup_steps": min(20, steps // 5), "validate_every": every}
    return Run(TrainConfig(data=tuple(files), **settings), Path(), Ranks(torch.device("cpu")))


def plan_steps(seconds: float, files: Sequence[str]) -> tuple[int, int]:
    """How many steps take so many seconds, and with how many threads they do: torch's, or one.

    For a small model on a busy machine threads may wait for each other longer than they compute.
    """
    choices = {threads: step_seconds(files, threads) for threads in {1, torch.get_num_threads()}}
    threads = min(choices, key=choices.__getitem__)
    return max(1, int(STEP_SHARE * seconds / choices[threads])), threads


def step_seconds(files: Sequence[str], threads: int) -> float:
    """What a step takes, judged by a few of them."""
    run, ends = start_run(files, PROBE_STEPS), [time.perf_counter()]
    with use_threads(threads):
        for _ in range(PROBE_STEPS):
            run.take_step()
            ends.append(time.perf_counter())
    return median(after - before for before, after in pairwise(ends[1:]))  # the first one starts what all use


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
    files: Sequence[str],
    steps: int,
    tell: Callable[[int, float, float | None], None],
    *,
    limit: float = math.inf,
) -> tuple[Training, LongNetLM]:
    """Trains until the last step, Ctrl-C, or until `limit` seconds are over.

    Tells after each step, in bits per byte, the mean loss of the last ones, and the validation if there was.
    """
    start, run = time.perf_counter(), start_run(files, steps)
    losses, validations, config = [], [], run.config
    with StopWish() as stop:
        while run.step < steps and not stop.is_made:
            run.take_step()
            losses.append((run.step, run.loss / math.log(2)))
            bits = None
            if run.step == steps or run.step % config.validate_every == 0:
                bits = run.validate()["bits_per_byte"]
                validations.append((run.step, bits))
            tell(run.step, fmean(loss for _, loss in losses[-20:]), bits)
            if time.perf_counter() - start > limit:
                break
    training = Training(
        files=len(files),
        parameters=sum(x.numel() for x in run.model.parameters()),
        context_length=config.context_length,
        segment_lengths=config.segment_lengths,
        dilation_rates=config.dilation_rates,
        train_bytes=len(run.train_data),
        validation_bytes=len(run.validation_data),
        steps=run.step,
        steps_planned=steps,
        seconds=time.perf_counter() - start,
        losses=span_means(losses),
        validations=validations,
        is_interrupted=stop.is_made and run.step < steps,
        prompt=PROMPT,
    )
    return training, run.model


def write_sample(model: LongNetLM) -> str:
    """What the model writes after PROMPT; characters that cannot be shown are replaced."""
    prompt = list(PROMPT.encode())
    how: dict[str, Any] = {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P, "seed": SEED}
    tokens = model.generate(torch.tensor([prompt]), SAMPLE_BYTES, **how)
    text = bytes(tokens[0, len(prompt) :].tolist()).decode("utf-8", "replace")
    return "".join(x if x.isprintable() or x in "\n\t" else "\N{REPLACEMENT CHARACTER}" for x in text)


def span_means(losses: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of spans of steps that are about equal, CURVE_POINTS at most, at their last steps."""
    count = min(CURVE_POINTS, len(losses))
    edges = [len(losses) * i // max(1, count) for i in range(count + 1)]
    parts = [losses[start:stop] for start, stop in pairwise(edges)]
    return [(part[-1][0], fmean(loss for _, loss in part)) for part in parts]
