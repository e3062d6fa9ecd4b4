"""Sets of positions as unions of arithmetic progressions: counted unlisted, and listed when needed."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

Positions = tuple[range, ...]  # a union; the ranges rise and may overlap


@lru_cache(maxsize=4096)
def count_positions(union: Positions) -> int:
    """How many different positions there are."""
    ranges = _without_repeats(union)
    if all(x.step == 1 for x in ranges):
        return sum(map(len, ranges))
    total = 0
    for i, one in enumerate(ranges):
        shared = {common for other in ranges[:i] if (common := _intersect(one, other))}
        total += len(one) - count_positions(tuple(sorted(shared, key=_key)))
    return total


def list_positions(union: Positions) -> Tensor:
    """The different positions, ascending, int64."""
    ranges = _without_repeats(union)
    lists = [torch.arange(x.start, x.stop, x.step, device="cpu") for x in ranges]
    if not lists:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    is_sorted = len(lists) == 1 or all(x.step == 1 for x in ranges)
    return torch.cat(lists) if is_sorted else torch.cat(lists).unique()


def _key(x: range) -> tuple[int, int, int]:
    return x.start, x.stop, x.step


def _without_repeats(union: Positions) -> list[range]:
    """Runs of neighbours joined, and of other progressions those that no other contains."""
    kept: list[range] = []
    for one in sorted((x for x in union if x.step == 1), key=_key):
        if kept and one.start <= kept[-1].stop:
            kept[-1] = range(kept[-1].start, max(kept[-1].stop, one.stop))
        else:
            kept.append(one)
    for one in sorted({x for x in union if x.step > 1}, key=lambda x: (-len(x), *_key(x))):
        if not any(_contains(other, one) for other in kept):
            kept.append(one)
    return kept


def _contains(outer: range, inner: range) -> bool:
    return (
        inner[0] in outer
        and inner[-1] in outer
        and (len(inner) == 1 or (inner[1] - inner[0]) % outer.step == 0)
    )


def _intersect(a: range, b: range) -> range:
    """The positions of both: a progression again, or empty (Chinese remainder theorem)."""
    common = math.gcd(a.step, b.step)
    if (b.start - a.start) % common:
        return range(0)
    step = a.step // common * b.step
    times = (b.start - a.start) // common * pow(a.step // common, -1, b.step // common) % (b.step // common)
    start, stop = a.start + times * a.step, min(a[-1], b[-1]) + 1
    start += max(0, -(-(max(a.start, b.start) - start) // step)) * step
    return range(start, max(start, stop), step)
