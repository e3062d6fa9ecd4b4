"""Which heads run together: heads folded into boxes that one strided view can address.

A head `h` of a dilated branch starts at row offset `row(h)` and reads key head `kv(h)`. Both advance in a
regular way as `h` grows, so a set of heads is almost always one box: a few nested axes, each a constant step
in (head, row, kv). A whole branch, every offset included, then is a single view of the input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..spec import DilatedSpec
from .shape import Shape


class Head(NamedTuple):
    """One query head of a branch: its index, its row offset and the key/value head it reads."""

    head: int
    row: int
    kv: int


class Axis(NamedTuple):
    """`size` steps of a box, each advancing the head, the row offset and the key/value head."""

    size: int
    head: int
    row: int
    kv: int


@dataclass(frozen=True, slots=True)
class HeadBox:
    """Heads `first + sum_i x_i * axes_i`; each such unit is `group` query heads that read the same keys."""

    first: Head
    axes: tuple[Axis, ...] = ()
    group: int = 1
    group_step: int = 0

    @property
    def num_units(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def num_heads(self) -> int:
        return self.num_units * self.group

    def __iter__(self) -> Iterator[Head]:
        units = [self.first]
        for axis in self.axes:
            units = [step(unit, axis, i) for unit in units for i in range(axis.size)]
        for unit in units:
            for i in range(self.group):
                yield unit._replace(head=unit.head + i * self.group_step)

    def split(self, units_at_most: int) -> Iterator[HeadBox]:
        """Smaller boxes of at most `units_at_most` units (at least one), cut along the outer axes first."""
        if self.num_units <= units_at_most:
            yield self
            return
        outer, inner = self.axes[0], self.axes[1:]
        per_step = math.prod(axis.size for axis in inner)
        for start, count in even_parts(outer.size, max(1, units_at_most // per_step)):
            axes = inner if count == 1 else (outer._replace(size=count), *inner)
            yield from replace(self, first=step(self.first, outer, start), axes=axes).split(units_at_most)


def step(unit: Head, axis: Axis, times: int) -> Head:
    return Head(unit.head + times * axis.head, unit.row + times * axis.row, unit.kv + times * axis.kv)


def even_parts(total: int, at_most: int) -> Iterator[tuple[int, int]]:
    """Cuts `total` into the fewest parts of at most `at_most`, as even as possible: (start, count)."""
    size = -(-total // -(-total // at_most))
    for start in range(0, total, size):
        yield start, min(size, total - start)


def branch_heads(
    spec: DilatedSpec, branch: int, num_heads: int, num_kv_heads: int, among: range | None = None
) -> list[Head]:
    """The query heads that serve a branch, with their row offsets; of all heads, or of those `among`."""
    rate = spec.dilation_rates[branch]
    heads = range(num_heads) if among is None else among
    if spec.head_mixing == "grouped":
        size, extra = divmod(num_heads, len(spec.dilation_rates))
        first = branch * size + min(branch, extra)
        after = first + size + (branch < extra)
        heads = range(max(first, heads.start), min(after, heads.stop))
        offsets = dict.fromkeys(heads, branch % rate)
    elif spec.head_offsets == "blocked":
        offsets = {h: h // -(-num_heads // rate) for h in heads}
    else:
        offsets = {h: h % rate for h in heads}
    per_kv = num_heads // num_kv_heads
    return [Head(h, offsets[h], h // per_kv) for h in heads]


class Part(NamedTuple):
    """What of a whole call is at hand: positions from `start` of `n`, heads from `head` of `num_heads`."""

    n: int
    start: int
    num_heads: int
    head: int

    @classmethod
    def whole(cls, shape: Shape) -> Part:
        return cls(shape.n, 0, shape.h, 0)

    def branch_heads(self, spec: DilatedSpec, branch: int, shape: Shape) -> list[Head]:
        """The heads of a branch that are at hand, counted from the first of them."""
        per_kv = shape.h // shape.h_kv
        at_hand = range(self.head, self.head + shape.h)
        heads = branch_heads(spec, branch, self.num_heads, self.num_heads // per_kv, at_hand)
        first_kv = self.head // per_kv
        return [Head(head - self.head, row, kv - first_kv) for head, row, kv in heads]


@lru_cache(maxsize=1024)
def fold_heads(heads: tuple[Head, ...]) -> tuple[HeadBox, ...]:
    """Boxes that together hold exactly `heads`, folded greedily; regular head sets give one box."""
    sharing: dict[tuple[int, int], list[Head]] = {}
    for head in heads:
        sharing.setdefault((head.kv, head.row), []).append(head)
    boxes = [_group_box(group) for group in sharing.values()]
    while len(folded := _fold_once(boxes)) < len(boxes):
        boxes = folded
    return tuple(boxes)


def _group_box(group: list[Head]) -> HeadBox:
    group_step = group[1].head - group[0].head if len(group) > 1 else 0
    # One box a (kv, row) pair, so that no two boxes add into the same key gradients.
    assert all(h.head == group[0].head + i * group_step for i, h in enumerate(group))
    return HeadBox(group[0], (), len(group), group_step)


def _fold_once(boxes: list[HeadBox]) -> list[HeadBox]:
    folded: list[HeadBox] = []
    i = 0
    while i < len(boxes):
        run, delta = 1, (0, 0, 0)
        while i + run < len(boxes):
            last, following = boxes[i + run - 1], boxes[i + run]
            change = _difference(following, last)
            if change is None or (run > 1 and change != delta):
                break
            delta, run = change, run + 1
        axes = boxes[i].axes if run == 1 else (Axis(run, *delta), *boxes[i].axes)
        folded.append(replace(boxes[i], axes=axes))
        i += run
    return folded


def _difference(box: HeadBox, other: HeadBox) -> tuple[int, int, int] | None:
    if (box.axes, box.group, box.group_step) != (other.axes, other.group, other.group_step):
        return None
    a, b = box.first, other.first
    change = a.head - b.head, a.row - b.row, a.kv - b.kv
    return change if min(change) >= 0 else None  # tensors have no negative strides
