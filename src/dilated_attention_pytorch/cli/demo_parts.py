"""What takes long in the demo: attention of doubling lengths, and a language model of bytes that learns."""

from __future__ import annotations

import ctypes
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F

from .. import functional
from ..block_sparse import block_sparse_attention, build_block_pattern
from ..core.host_memory import host_memory
from ..spec import Branches, SparsePatternConfig, branches_for
from .bench.measure import NotMeasurableError, interleave, read_status, reset_peak_memory
from .train import TrainConfig
from .train.data import standard_library_files
from .train.loop import Run
from .train.ranks import Ranks

HEADS, HEAD_DIM = 8, 64
FIRST_LENGTH, LAST_LENGTH = 1024, 2**20
BLOCK, KEPT = 128, 1024  # tokens of a block, and keys that a query keeps
MEMORY_SHARE = 0.4  # of the available memory, that inputs and output may take
ROUND_SECONDS = 0.8  # short calls are repeated about this long, and the fastest counts
# Time at twice the length over time at the length, from above, and the share of the time left it may take.
GROWTH = {"dense": (4.0, 0.25), "dilated": (3.0, 0.5), "block-sparse": (2.5, 0.25)}

LEAST_BYTES = 2**18  # of text
PROMPT, SAMPLE_BYTES = "def ", 400
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "seed": 0}
PROBE_STEPS = 4
VALIDATIONS = 8  # of a run, about
SMOOTHED = 20  # steps whose mean loss is shown
STEP_SHARE, OVERTIME = 0.9, 1.3  # of the time: for steps, the rest for validations; at which a run is ended
SETTINGS: dict[str, Any] = {"d_model": 128, "nhead": 4, "num_layers": 3, "dim_feedforward": 512}
SETTINGS |= {"context_length": 1024, "batch_size": 2, "learning_rate": 3e-3}
SETTINGS |= {"validation_share": 0.04, "validation_windows": 8}


@dataclass(frozen=True)
class Row:
    """What calls took at a length, by name; what would have taken too long is not there.

    `peaks` are bytes at the peak beyond the inputs, and None where they cannot be measured.
    """

    n: int
    seconds: dict[str, float]
    peaks: dict[str, int | None]

    @property
    def speedup(self) -> float | None:
        """Of dilated over dense attention, where both were measured."""
        both = {"dense", "dilated"} <= self.seconds.keys()
        return self.seconds["dense"] / self.seconds["dilated"] if both else None


def branches_at(n: int) -> Branches:
    """Segment lengths and rates as the library chooses them; the report tells of rates above the heads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return branches_for(n, HEADS)


def measure_row(n: int, *, names: Collection[str], rounds: int) -> Row:
    """One causal forward call after the other on the same numbers; the fastest round counts.

    The first call of each gives its memory; it is timed only if it is to be the only one.
    """
    calls = {name: call for name, call in _calls(n).items() if name in names}
    seconds, peaks = {}, {}
    with torch.no_grad():
        if n == FIRST_LENGTH:  # what is loaded and started once is no cost of a call
            for call in calls.values():
                call()
        for name, call in calls.items():
            start = time.perf_counter()
            peaks[name] = peak_of(call)
            seconds[name] = time.perf_counter() - start
        if rounds > 1:
            timings = interleave(calls, rounds, warmup=0)
            seconds = {name: timing.minimum for name, timing in timings.items()}
    return Row(n, seconds, peaks)


def _calls(n: int) -> dict[str, Callable[[], object]]:
    segment_lengths, dilation_rates = branches = branches_at(n)
    config = SparsePatternConfig("dilated_sparse", min(1.0, 2 * KEPT / n), BLOCK)
    named: dict[str, Any] = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    pattern = build_block_pattern(config, n, HEADS, is_causal=True, **named)
    period = min(n, 16384)  # beyond this length random rows repeat, which spares their drawing
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, period, HEADS, HEAD_DIM, generator=generator) for _ in range(3)]
    q, k, v = (x.repeat(1, n // period, 1, 1) for x in rows)
    # Dense attention gets the layout it likes best. The numbers do not matter here, so the memory is shared.
    q_bhnd, k_bhnd, v_bhnd = (x.view(1, HEADS, n, HEAD_DIM) for x in (q, k, v))
    return {
        "dense": lambda: F.scaled_dot_product_attention(q_bhnd, k_bhnd, v_bhnd, is_causal=True),
        "dilated": lambda: functional.dilated_attention(q, k, v, *branches, is_causal=True),
        "block-sparse": lambda: block_sparse_attention(q, k, v, pattern, is_causal=True),
    }


def peak_of(call: Callable[[], object]) -> int | None:
    """Runs a call; the bytes that it held at most, beyond what was there before. None: not measurable."""
    # Freed memory that the C library keeps would count as there before, and hide what is taken from it.
    with suppress(AttributeError, OSError, TypeError):  # of glibc alone; other libraries keep little
        ctypes.CDLL(None).malloc_trim(0)
    try:
        before = reset_peak_memory()
    except NotMeasurableError:
        call()
        return None
    call()
    return max(0, read_status("VmHWM") - before)


def measure_costs(
    budget: float,
    tell: Callable[[str], None],
    measure: Callable[..., Row] = measure_row,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row]:
    """Rows for doubling lengths while time and memory last; tells before each what comes.

    Nothing but the first row is begun that is expected to end after the budget. What was left out once is
    left out at all greater lengths.
    """
    begin, n, expected = clock(), FIRST_LENGTH, dict.fromkeys(GROWTH, 0.0)
    while n <= LAST_LENGTH and _fits_memory(n):
        left = budget - (clock() - begin)
        if n > FIRST_LENGTH:
            expected = {name: x for name, x in expected.items() if x <= GROWTH[name][1] * left}
        if not expected:
            return
        total = sum(expected.values())  # of a round; one round more than these is run first
        rounds = min(9, int(min(ROUND_SECONDS, left) / total) - 1) if total else 3
        tell(f"{', '.join(expected)}: {n:,} tokens")
        row = measure(n, names=[*expected], rounds=max(1, rounds))
        yield row
        expected = {name: GROWTH[name][0] * seconds for name, seconds in row.seconds.items()}
        n *= 2


def _fits_memory(n: int) -> bool:
    memory = host_memory()
    needed = 4 * 4 * n * HEADS * HEAD_DIM
    return needed < (MEMORY_SHARE * memory.available if memory is not None else 2**31)


@dataclass
class Training:
    """The model and its data in words, and what the run has given so far, by step and in bits per byte."""

    model: str
    parameters: int
    steps_planned: int
    steps: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)
    sample: str | None = None


def source_files() -> list[str]:
    """Python's own source; none where there is little of it, as with distributions that ship bytecode."""
    files = standard_library_files()
    return files if sum(Path(file).stat().st_size for file in files) >= LEAST_BYTES else []


def start_run(files: Sequence[str], steps: int) -> Run:
    """A run of so many steps, of which nothing is written."""
    every = max(10, -(-steps // VALIDATIONS))
    settings = {**SETTINGS, "steps": steps, "warmup_steps": min(20, steps // 5), "validate_every": every}
    return Run(TrainConfig(data=tuple(files), **settings), Path(), Ranks(torch.device("cpu")))


def plan_steps(files: Sequence[str], seconds: float) -> int:
    """How many steps take so many seconds, by the fastest of a few."""
    run, taken = start_run(files, PROBE_STEPS), []
    for _ in range(PROBE_STEPS):
        start = time.perf_counter()
        run.take_step()
        taken.append(time.perf_counter() - start)
    return max(1, int(STEP_SHARE * seconds / min(taken)))


def train_model(files: Sequence[str], steps: int, limit: float = math.inf) -> Iterator[Training]:
    """Trains until the last step or until `limit` seconds are over, and lets the model write.

    Yields the same object after each step, with the mean loss of the last ones, and after the sample.
    """
    start, run, raw = time.perf_counter(), start_run(files, steps), []
    config, parameters = run.config, sum(x.numel() for x in run.model.parameters())
    branches = zip(config.segment_lengths, config.dilation_rates, strict=True)
    model = (
        f"{parameters:,} parameters, {config.context_length:,} bytes of context, branches "
        f"{', '.join(f'{w}/{r}' for w, r in branches)}; {len(run.train_data):,} bytes of {len(files)} files "
        f"to learn from, {len(run.validation_data):,} bytes kept for validation."
    )
    training = Training(model, parameters, steps)
    while run.step < steps and training.seconds <= limit:
        run.take_step()
        raw.append(run.loss / math.log(2))
        training.steps = run.step
        training.losses.append((run.step, fmean(raw[-SMOOTHED:])))
        if run.step == steps or run.step % config.validate_every == 0:
            training.validations.append((run.step, run.validate()["bits_per_byte"]))
        training.seconds = time.perf_counter() - start
        yield training
    prompt = list(PROMPT.encode())
    tokens = run.model.generate(torch.tensor([prompt]), SAMPLE_BYTES, **SAMPLING)
    text = bytes(tokens[0].tolist()).decode("utf-8", "replace")
    training.sample = "".join(
        x if x.isprintable() or x in "\n\t" else "\N{REPLACEMENT CHARACTER}" for x in text
    )
    yield training
