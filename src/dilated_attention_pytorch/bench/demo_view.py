"""What the demo shows where lines are all there is: a pipe, a log, or no rich installed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from .demo_checks import TOLERANCE, Check

if TYPE_CHECKING:
    from .demo import Row

WIDTH = 78
TITLE = "dilated attention: exact, and its cost grows with length, not with its square"
CHECKS_TITLE = f"1. Exactness: largest difference from the definition (float64, limit {TOLERANCE:.0e})"
TIMING_TITLE = "2. Time: causal attention, one forward call, fastest of several"
HEADINGS = ("tokens", "dense ms", "dilated ms", "speed-up", "pairs", "dilated tok/s")

Ladder = Callable[[int], tuple[tuple[int, ...], tuple[int, ...]]]


class View(Protocol):
    """What the demo tells as it goes."""

    def show_title(self, facts: str) -> None: ...

    def show_check(self, check: Check) -> None: ...

    def timing(self, ladder: Ladder) -> AbstractContextManager[None]: ...

    def show_step(self, text: str) -> None: ...

    def show_rows(self, rows: Sequence[Row]) -> None: ...

    def tick(self) -> None: ...

    def show_end(self, sentence: str) -> None: ...


def explain_branches(ladder: Ladder) -> str:
    """How the branches are chosen, by example."""
    segment_lengths, dilation_rates = ladder(2**17)
    steps = ", ".join(f"{w}/{r}" for w, r in zip(segment_lengths, dilation_rates, strict=True))
    return (
        f"Branches, as segment length / dilation rate: {steps} and so on until one spans the sequence. "
        "Each reaches four times as far as the one before, at four times the spacing and a quarter of "
        "the cost. A dash stands for dense attention that would take too long."
    )


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a row, in the order of HEADINGS."""
    dense = "-" if row.dense is None else _milliseconds(row.dense)
    speedup = "-" if row.speedup is None else f"{row.speedup:.1f} x"
    share = f"{row.pair_share:.1%}"
    return f"{row.n:,}", dense, _milliseconds(row.dilated), speedup, share, f"{row.tokens_per_second:,.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


class PlainView:
    """Prints each line once, when it is known."""

    def __init__(self, budget: float) -> None:
        self.budget = budget

    def show_title(self, facts: str) -> None:
        self._print(TITLE, facts, "", CHECKS_TITLE, f"   {'':<26}{'forward':>9}{'gradients':>12}")

    def show_check(self, check: Check) -> None:
        errors = f"{check.forward_error:>9.1e}{check.gradient_error:>12.1e}"
        self._print(f"   {check.title:<26}{errors}  {'ok' if check.passed else 'WRONG'}")

    @contextmanager
    def timing(self, ladder: Ladder) -> Iterator[None]:
        explanation = textwrap.wrap(
            explain_branches(ladder), WIDTH, initial_indent="   ", subsequent_indent="   "
        )
        self._print("", f"{TIMING_TITLE}, about {self.budget:.0f} s", *explanation, "", self._line(HEADINGS))
        yield

    def show_step(self, text: str) -> None:
        pass

    def show_rows(self, rows: Sequence[Row]) -> None:
        self._print(self._line(cells(rows[-1])))

    def tick(self) -> None:
        pass

    def show_end(self, sentence: str) -> None:
        self._print("", *textwrap.wrap(sentence, WIDTH))

    @staticmethod
    def _line(texts: Sequence[str]) -> str:
        return "".join(f"{text:>{width}}" for text, width in zip(texts, (12, 12, 12, 11, 9, 16), strict=True))

    @staticmethod
    def _print(*lines: str) -> None:
        print(*lines, sep="\n", flush=True)
