"""What the demo shows where lines are all there is: a pipe, a log, or no rich installed."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import IO, TYPE_CHECKING, Protocol

from ..bench.exactness import TOLERANCE, Check
from .scaling import HEADS, NAMES, Row, ladder

if TYPE_CHECKING:
    from .training import Training

WIDTH = 78
TITLE = "dilated attention: exact, and its cost grows with length, not with its square"
CHECKS_TITLE = f"1. Exactness: largest difference from the definition (float64, limit {TOLERANCE:.0e})"
CHECKS_HEAD = f"   {'':<26}{'forward':>9}{'gradients':>12}"
TIMING_TITLE = "2. Time and memory: causal attention, one forward call, fastest of several"
TRAINING_TITLE = "3. A language model of bytes learns from Python's own library"
# Times in milliseconds, then the speed-up of dilated over dense attention, then peaks of memory in MiB.
HEADINGS = ("tokens", "dense ms", "dilated", "blocks", "speed-up", "dense MiB", "dilated", "blocks")
SAMPLE_LINES = 6
EXAMPLE = 2**17  # tokens whose branches are named: the most that these heads serve wholly
WIDTHS = (10, 10, 9, 9, 10, 11, 9, 9)


class View(Protocol):
    """What the demo tells as it goes."""

    def show_title(self, facts: str) -> None: ...

    def show_check(self, check: Check) -> None: ...

    def timing(self, budget: float) -> AbstractContextManager[None]: ...

    def show_step(self, text: str) -> None: ...

    def show_rows(self, rows: Sequence[Row]) -> None: ...

    def tick(self) -> None: ...

    def training(self) -> AbstractContextManager[None]: ...

    def show_loss(self, step: int, steps: int, loss: float, validation: float | None) -> None: ...

    def show_sample(self, training: Training) -> None: ...

    def show_end(self, sentence: str, report: str) -> None: ...


def explain_calls() -> str:
    """What is measured, and how the branches are chosen, by example."""
    steps = ", ".join(f"{w}/{r}" for w, r in zip(*ladder(EXAMPLE), strict=True))
    return (
        f"Branches for {EXAMPLE:,} tokens, as segment length / dilation rate: {steps}. Each reaches further "
        "than the one before, and none costs more than the first. For more tokens rates exceed the "
        f"{HEADS} heads, and some positions reach further only through several layers. Block-sparse "
        "attention keeps the nearest blocks that the branches reach, about 1,024 keys a query. Memory is the "
        "peak beyond the inputs. A dash stands for what would take too long."
    )


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a row, in the order of HEADINGS."""
    costs = [row.costs.get(name) for name in NAMES]
    times = ["-" if cost is None else milliseconds(cost.seconds) for cost in costs]
    peaks = ["-" if cost is None or cost.peak_bytes is None else mebibytes(cost.peak_bytes) for cost in costs]
    speedup = "-" if row.speedup is None else f"{row.speedup:.1f} x"
    return f"{row.n:,}", *times, speedup, *peaks


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f}" if nbytes < 100 * 2**20 else f"{nbytes / 2**20:,.0f}"


def describe_model(training: Training) -> str:
    """The model and its data in a sentence."""
    branches = zip(training.segment_lengths, training.dilation_rates, strict=True)
    return (
        f"{training.parameters:,} parameters, {training.context_length:,} bytes of context, branches "
        f"{', '.join(f'{w}/{r}' for w, r in branches)}; {training.train_bytes:,} bytes of "
        f"{training.files} files, of which it sees {training.steps:,} batches; {training.validation_bytes:,} "
        "bytes are kept for validation."
    )


def sample_lines(training: Training) -> list[str]:
    """The beginning of what the model wrote, without empty lines."""
    if training.sample is None:
        return []
    written = (training.prompt + training.sample).expandtabs(4).splitlines()
    return [line for line in written if line.strip()][:SAMPLE_LINES]


class PlainView:
    """Prints each line once, when it is known."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream

    def show_title(self, facts: str) -> None:
        self._print(TITLE, facts, "", CHECKS_TITLE, CHECKS_HEAD)

    def show_check(self, check: Check) -> None:
        errors = f"{check.forward_error:>9.1e}{check.gradient_error:>12.1e}"
        self._print(f"   {check.title:<26}{errors}  {'ok' if check.passed else 'WRONG'}")

    @contextmanager
    def timing(self, budget: float) -> Iterator[None]:
        self._print("", TIMING_TITLE, *_indented(f"About {budget:.0f} s. {explain_calls()}"))
        self._print("", self._line(HEADINGS))
        yield

    def show_step(self, text: str) -> None:
        pass

    def show_rows(self, rows: Sequence[Row]) -> None:
        self._print(self._line(cells(rows[-1])))

    def tick(self) -> None:
        pass

    @contextmanager
    def training(self) -> Iterator[None]:
        self._print("", TRAINING_TITLE, f"{'step':>12}{'training':>14}{'validation':>14}   bits per byte")
        yield

    def show_loss(self, step: int, steps: int, loss: float, validation: float | None) -> None:
        if validation is not None:
            self._print(f"{f'{step}/{steps}':>12}{loss:>14.3f}{validation:>14.3f}")

    def show_sample(self, training: Training) -> None:
        self._print(*_indented(describe_model(training)))
        if lines := sample_lines(training):
            self._print("", *(f"   | {line[: WIDTH - 5]}" for line in lines))

    def show_end(self, sentence: str, report: str) -> None:
        self._print("", *textwrap.wrap(sentence, WIDTH), "", report)

    @staticmethod
    def _line(texts: Sequence[str]) -> str:
        return "".join(f"{text:>{width}}" for text, width in zip(texts, WIDTHS, strict=True))

    def _print(self, *lines: str) -> None:
        print(*lines, sep="\n", file=self.stream, flush=True)


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="   ", subsequent_indent="   ")
