"""What the demo shows on a terminal: a table that fills, with bars, over a progress bar. Needs rich."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from .demo_checks import Check
from .demo_view import CHECKS_TITLE, HEADINGS, TIMING_TITLE, TITLE, Ladder, cells, explain_branches

if TYPE_CHECKING:
    from .demo import Row

BAR_WIDTH = 10


class RichView:
    """Draws on a terminal of 80 columns or more."""

    def __init__(self, budget: float, console: Console | None = None) -> None:
        self.budget = budget
        self.console = console or Console(highlight=False)
        self.rows: tuple[Row, ...] = ()
        self.live: Live | None = None
        # The line ends short of the terminal's edge, so that the ^C a terminal echoes does not wrap it.
        bar, spent = BarColumn(24), TextColumn("{task.fields[time]}")
        columns = (SpinnerColumn(), TextColumn("{task.description}"), bar, spent)
        self.progress = Progress(*columns, console=self.console)
        self.task = self.progress.add_task("", total=budget, time="")
        self.start = time.perf_counter()

    def show_title(self, facts: str) -> None:
        self.console.print()
        self.console.print(Text(TITLE, style="bold"))
        self.console.print(Text(facts, style="dim"))
        self.console.print()
        self.console.print(Text(CHECKS_TITLE, style="bold cyan"))
        self.console.print(Text(f"   {'':<26}{'forward':>9}{'gradients':>12}", style="dim"))

    def show_check(self, check: Check) -> None:
        errors = f"{check.forward_error:>9.1e}{check.gradient_error:>12.1e}"
        verdict = ("ok", "bold green") if check.passed else ("WRONG", "bold red")
        self.console.print(Text.assemble(f"   {check.title:<26}", errors, "  ", verdict))

    @contextmanager
    def timing(self, ladder: Ladder) -> Iterator[None]:
        self.console.print()
        self.console.print(Text(TIMING_TITLE, style="bold cyan"))
        self.console.print(Padding(Text(explain_branches(ladder), style="dim"), (0, 3, 1, 3)))
        self.start = time.perf_counter()
        with Live(self.progress, console=self.console, refresh_per_second=8) as live:
            self.live = live
            try:
                yield
            finally:
                live.update(_table(self.rows))

    def show_step(self, text: str) -> None:
        self.progress.update(self.task, description=text)
        self.tick()

    def show_rows(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        assert self.live is not None
        self.live.update(Group(_table(rows), self.progress))

    def tick(self) -> None:
        elapsed = time.perf_counter() - self.start
        shown = f"{elapsed:.0f} of {self.budget:.0f} s"
        self.progress.update(self.task, completed=min(elapsed, self.budget), time=shown)

    def show_end(self, sentence: str) -> None:
        self.console.print()
        self.console.print(Text(sentence, style="bold"))
        self.console.print()


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for heading in (*HEADINGS[:4], "", *HEADINGS[4:]):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    best = max((row.speedup or 0.0 for row in rows), default=0.0)
    for row in rows:
        tokens, dense, dilated, speedup, share, rate = cells(row)
        bar = "━" * round(BAR_WIDTH * row.speedup / best) if row.speedup else ""
        styled = [Text(tokens, "bold"), Text(dense, "red"), Text(dilated, "green"), Text(speedup, "bold")]
        table.add_row(*styled, Text(bar.ljust(BAR_WIDTH), "green"), share, rate)
    return table
