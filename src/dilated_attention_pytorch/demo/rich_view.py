"""What the demo shows on a terminal: a table that fills over a progress bar, then losses. Needs rich."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from ..bench.exactness import Check
from .scaling import Row
from .view import (
    CHECKS_HEAD,
    CHECKS_TITLE,
    HEADINGS,
    TIMING_TITLE,
    TITLE,
    TRAINING_TITLE,
    cells,
    describe_model,
    explain_calls,
    sample_lines,
)

if TYPE_CHECKING:
    from .training import Training

STYLES = ("bold", "red", "green", "cyan", "bold", "red", "green", "cyan")  # of the columns of HEADINGS
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 60


class RichView:
    """Draws on a terminal of 80 columns or more."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.rows: tuple[Row, ...] = ()
        self.losses: list[float] = []
        self.live: Live | None = None
        # The line ends short of the terminal's edge, so that the ^C a terminal echoes does not wrap it.
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20))
        self.progress = Progress(*columns, TextColumn("{task.fields[note]}"), console=self.console)
        self.task = self.progress.add_task("", total=1.0, note="")
        self.start, self.budget = 0.0, 1.0

    def show_title(self, facts: str) -> None:
        self.console.print()
        self.console.print(Text(TITLE, style="bold"))
        self.console.print(Text(facts, style="dim"))
        self._section(CHECKS_TITLE)
        self.console.print(Text(CHECKS_HEAD, style="dim"))

    def show_check(self, check: Check) -> None:
        errors = f"{check.forward_error:>9.1e}{check.gradient_error:>12.1e}"
        verdict = ("ok", "bold green") if check.passed else ("WRONG", "bold red")
        self.console.print(Text.assemble(f"   {check.title:<26}", errors, "  ", verdict))

    @contextmanager
    def timing(self, budget: float) -> Iterator[None]:
        self._section(TIMING_TITLE)
        self.console.print(Padding(Text(explain_calls(), style="dim"), (0, 3, 1, 3)))
        self.start, self.budget = time.perf_counter(), budget
        with self._drawing():
            try:
                yield
            finally:
                self._draw(_table(self.rows))

    def show_step(self, text: str) -> None:
        self.progress.update(self.task, description=text)
        self.tick()

    def show_rows(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self._draw(Group(_table(rows), self.progress))

    def tick(self) -> None:
        elapsed = time.perf_counter() - self.start
        note = f"{elapsed:.0f} of {self.budget:.0f} s"
        self.progress.update(self.task, completed=min(1.0, elapsed / self.budget), note=note)

    @contextmanager
    def training(self) -> Iterator[None]:
        self._section(TRAINING_TITLE)
        self.progress.update(self.task, description="measuring a few steps", completed=0.0, note="")
        with self._drawing():
            yield

    def show_loss(self, step: int, steps: int, loss: float, validation: float | None) -> None:
        if validation is not None:
            self.losses.append(validation)
        validated = f", validation {self.losses[-1]:.3f}" if self.losses else ""
        note = f"{loss:.3f} bits per byte{validated}"
        self.progress.update(self.task, description=f"step {step}/{steps}", completed=step / steps, note=note)

    def show_sample(self, training: Training) -> None:
        self.console.print(Padding(Text(describe_model(training), style="dim"), (0, 3, 0, 3)))
        if training.losses:
            first, last = training.losses[0][1], training.losses[-1][1]
            curve = _sparks([loss for _, loss in training.losses])
            self.console.print(
                Text.assemble(f"   {first:.2f} ", (curve, "green"), f" {last:.2f} bits per byte")
            )
        if lines := sample_lines(training):
            shown = Text("\n".join(lines), "yellow", no_wrap=True, overflow="ellipsis")
            self.console.print(Padding(shown, (1, 3, 0, 3)))

    def show_end(self, sentence: str, report: str) -> None:
        self.console.print()
        self.console.print(Text(sentence, style="bold"))
        self.console.print()
        self.console.print(Text(report, style="bold cyan"), soft_wrap=True)
        self.console.print()

    def _section(self, title: str) -> None:
        self.console.print()
        self.console.print(Text(title, style="bold cyan"))

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        with Live(self.progress, console=self.console, refresh_per_second=8) as self.live:
            yield

    def _draw(self, shown: RenderableType) -> None:
        assert self.live is not None
        self.live.update(shown)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell, style) for cell, style in zip(cells(row), STYLES, strict=True)))
    return table


def _sparks(values: Sequence[float]) -> str:
    """A curve in a line of characters."""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / ((high - low) or 1.0)
    return "".join(SPARKS[round((value - low) * scale)] for value in values[:SPARK_WIDTH])
