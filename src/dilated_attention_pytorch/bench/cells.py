"""Cells and tables that are written as Markdown, or as HTML by the page."""

from __future__ import annotations

from typing import NamedTuple

from .figures import Figure, show_value
from .measure import Timing
from .record import Result


class Table(NamedTuple):
    """A head and rows of text. As a string it is Markdown, with numbers on the right of the first column."""

    head: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        rule = ["---", *["---:"] * (len(self.head) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in [self.head, rule, *self.rows])


def shown(result: Result, figure: Figure) -> list[str]:
    """The figure, or why there is none, and its target."""
    if figure.value is None and result.why_not:
        return [f"not measured: {result.why_not}", verdict(figure)]
    return [number(figure), verdict(figure)]


def verdict(figure: Figure) -> str:
    """The target and whether it is met."""
    if figure.target is None:
        return ""
    words = {None: "", True: ", met", False: ", **not met**"}[figure.met]
    bound = "at least " if figure.at_least else ""
    return f"{bound}{show_value(figure.target, figure.unit)}{words}"


def number(figure: Figure) -> str:
    return "not measured" if figure.value is None else show_value(figure.value, figure.unit)


def milliseconds(timing: Timing) -> str:
    """Minimum, then median and quartile distance; a single duration is all there is to say."""
    if len(timing.seconds) == 1:
        return f"{1e3 * timing.minimum:.1f}"
    minimum, median, spread = (1e3 * value for value in (timing.minimum, timing.median, timing.spread))
    return f"{minimum:.1f} ({median:.1f} ± {spread / 2:.1f})"


def mebibytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:.1f}"
