"""A small language model of bytes, trained on Python's own library with the trainer of this package."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from ..modules import LongNetLM
from .train.config import TrainConfig
from .train.data import standard_library_files
from .train.loop import Run, StopWish
from .train.ranks import Ranks

LEAST_BYTES = 2**18  # of text
PROMPT, SAMPLE_BYTES = "def ", 400
TEMPERATURE, TOP_P, SEED = 1.0, 0.95, 0
PROBE_STEPS = 4
VALIDATIONS = 8  # of a run, about
SMOOTHED = 20  # steps whose mean loss is shown
OVERTIME = 1.3  # a run that takes so many times what was planned is ended
STEP_SHARE = 0.9  # of the time; the rest is for validations
SETTINGS: dict[str, Any] = {"d_model": 128, "nhead": 4, "num_layers": 3, "dim_feedforward": 512}
SETTINGS |= {"context_length": 1024, "batch_size": 2, "learning_rate": 3e-3}
SETTINGS |= {"validation_share": 0.04, "validation_windows": 8}


Training = dict[
    str, Any
]  # what a run gave, as JSON has it; losses and validations are in bits per byte, by step


def describe(training: Training) -> str:
    """The model and its data in a sentence."""
    branches = zip(training["segment_lengths"], training["dilation_rates"], strict=True)
    return (
        f"{training['parameters']:,} parameters, {training['context_length']:,} bytes of context, branches "
        f"{', '.join(f'{w}/{r}' for w, r in branches)}; {training['train_bytes']:,} bytes of "
        f"{training['files']} files, of which it sees {training['steps']:,} batches; "
        f"{training['validation_bytes']:,} bytes are kept for validation."
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
    best, before = (math.inf, 1), torch.get_num_threads()
    for threads in {1, before}:
        torch.set_num_threads(threads)
        best = min(best, (step_seconds(files), threads))
    torch.set_num_threads(before)
    return max(1, int(STEP_SHARE * seconds / best[0])), best[1]


def step_seconds(files: Sequence[str]) -> float:
    run, taken = start_run(files, PROBE_STEPS), []
    for _ in range(PROBE_STEPS):
        start = time.perf_counter()
        run.take_step()
        taken.append(time.perf_counter() - start)
    return median(taken[1:])  # the first one starts what all use


def train_model(
    files: Sequence[str],
    steps: int,
    tell: Callable[[int, float, float | None], None],
    limit: float = math.inf,
) -> tuple[Training, LongNetLM]:
    """Trains until the last step, Ctrl-C, or until `limit` seconds are over.

    Tells after each step, in bits per byte, the mean loss of the last ones, and the validation if there was.
    """
    start, run = time.perf_counter(), start_run(files, steps)
    raw, losses, validations, config = [], [], [], run.config
    with StopWish() as stop:
        while run.step < steps and not stop.is_made:
            run.take_step()
            raw.append(run.loss / math.log(2))
            losses.append((run.step, fmean(raw[-SMOOTHED:])))
            bits = None
            if run.step == steps or run.step % config.validate_every == 0:
                bits = run.validate()["bits_per_byte"]
                validations.append((run.step, bits))
            tell(run.step, losses[-1][1], bits)
            if time.perf_counter() - start > limit:
                break
    facts = {name: getattr(config, name) for name in ("context_length", "segment_lengths", "dilation_rates")}
    sizes = {"train_bytes": len(run.train_data), "validation_bytes": len(run.validation_data)}
    training = {
        "files": len(files),
        "parameters": sum(x.numel() for x in run.model.parameters()),
        **facts,
        **sizes,
        "steps": run.step,
        "steps_planned": steps,
        "seconds": time.perf_counter() - start,
        "losses": losses,
        "validations": validations,
        "is_interrupted": stop.is_made and run.step < steps,
        "prompt": PROMPT,
        "sample": None,
    }
    return training, run.model


def write_sample(model: LongNetLM) -> str:
    """What the model writes after PROMPT; characters that cannot be shown are replaced."""
    prompt = list(PROMPT.encode())
    how: dict[str, Any] = {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P, "seed": SEED}
    tokens = model.generate(torch.tensor([prompt]), SAMPLE_BYTES, **how)
    text = bytes(tokens[0, len(prompt) :].tolist()).decode("utf-8", "replace")
    return "".join(x if x.isprintable() or x in "\n\t" else "\N{REPLACEMENT CHARACTER}" for x in text)
