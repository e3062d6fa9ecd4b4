"""Where values lie on an axis, and where its ticks are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_TICKS = 8
SLACK = 1e-9  # relative: a value that misses a tick by rounding is on it


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with ticks between; `is_log`: equal ratios are equally far apart."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool

    def share(self, value: float) -> float:
        """Where a value lies: 0 at `low`, 1 at `high`."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(values: Sequence[float], most: int = MOST_TICKS) -> Axis:
    """Ticks at multiples of 1, 2 or 5 times a power of ten; the ends are ticks."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) / 10 or 1.0), high + (abs(high) / 10 or 1.0)
    smallest = (high - low) / (most - 1)
    # An end may lie a step outside the values, so the steps of a range may be one too many for the first try.
    for step in _steps_above(smallest):
        first, last = math.floor(low / step + SLACK), math.ceil(high / step - SLACK)
        if last - first < most:
            break
    ticks = tuple(_clean(i * step) for i in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, is_log=False)


def log_axis(values: Sequence[float], most: int = MOST_TICKS) -> Axis:
    """Ticks at 1, 2 and 5 times powers of ten if they fit, else at powers of ten; `values` are positive."""
    low, high = min(values), max(values)
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [float(f"{digit}e{e}") for e in exponents for digit in (1, 2, 5)]
    below = [i for i, x in enumerate(steps) if x <= low * (1 + SLACK)]
    above = [i for i, x in enumerate(steps) if x >= high * (1 - SLACK)]
    first, last = below[-1], above[0]
    if first == last:
        first, last = first - 1, last + 1
    ticks = steps[first : last + 1]
    if len(ticks) > most:
        decades = [x for x in ticks if f"{x:e}".startswith("1.0")]
        ticks = decades[:: -(-len(decades) // most)]
    return Axis(steps[first], steps[last], tuple(ticks), is_log=True)


def length_axis(values: Sequence[float], most: int = MOST_TICKS) -> Axis:
    """Ticks at powers of two, as lengths of sequences are; `values` are positive."""
    first = math.floor(math.log2(min(values)) + SLACK)
    last = math.ceil(math.log2(max(values)) - SLACK)
    if first == last:
        first, last = first - 1, last + 1
    every = -(-(last - first + 1) // most)
    return Axis(2.0**first, 2.0**last, tuple(2.0**e for e in range(first, last + 1, every)), is_log=True)


def _steps_above(smallest: float) -> list[float]:
    exponent = math.floor(math.log10(smallest))
    steps = [float(f"{digit}e{e}") for e in range(exponent, exponent + 3) for digit in (1, 2, 5)]
    return [step for step in steps if step >= smallest * (1 - SLACK)]


def _clean(value: float) -> float:
    """Without the rounding errors of a product, so that it reads well: 0.3, not 0.30000000000000004."""
    return float(f"{value:.12g}")
