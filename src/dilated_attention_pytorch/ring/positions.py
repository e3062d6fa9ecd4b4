"""Sets of positions as unions of arithmetic progressions: counted unlisted, and listed when needed."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

Positions = tuple[range, ...]  # a union; the ranges rise and may overlap


@lru_cache(maxsize=4096)
def count_positions(union: Positions) -> int:
    """How many different positions there are."""
    ranges = _without_repeats(union)
    if all(x.step == 1 for x in ranges):
        return sum(map(len, ranges))
    # Between neighbouring ends all ranges run through, and most contain each other or are disjoint.
    ends = sorted({end for x in ranges for end in (x.start, x[-1] + 1)})
    return sum(_count_common(tuple(_clip(x, a, b) for x in ranges)) for a, b in pairwise(ends))


def _count_common(union: Positions) -> int:
    ranges, total = _without_repeats(tuple(x for x in union if x)), 0
    for i, one in enumerate(ranges):
        shared = {common for other in ranges[:i] if (common := _intersect(one, other))}
        total += len(one) - (_count_common(tuple(shared)) if shared else 0)
    return total


def _clip(x: range, start: int, stop: int) -> range:
    first = x.start + max(0, -(-(start - x.start) // x.step)) * x.step
    return range(first, max(first, min(stop, x.stop)), x.step)


def list_positions(union: Positions) -> Tensor:
    """The different positions, ascending, int64."""
    ranges = _without_repeats(union)
    lists = [torch.arange(x.start, x.stop, x.step, device="cpu") for x in ranges]
    if not lists:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    is_sorted = len(lists) == 1 or all(x.step == 1 for x in ranges)
    return torch.cat(lists) if is_sorted else torch.unique(torch.cat(lists))


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
