"""Which keys the queries of a shard need from other shards, and the jobs in which they attend to them.

Positions are unions of ranges, since what a window holds of a run is a range. They are counted without being
listed: the schedule of a billion tokens takes milliseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..plan import BlockPattern, Plan, Range, Shape, Shard, plan_blocks, plan_crossing, plan_dilated
from ..plan.block_sparse import blocks_of
from ..plan.dilated import Head, branch_heads
from ..spec import DilatedSpec

Positions = tuple[range, ...]  # a union: the ranges may overlap


@dataclass(frozen=True)
class DilatedNeeds:
    """Needs of dilated attention; `shape` is the whole call's, `docs` are boundaries of packed documents."""

    shape: Shape
    spec: DilatedSpec
    docs: tuple[int, ...] | None = None
    sums_blocks: ClassVar[bool] = False  # backward needs no scratch for gradients of keys

    def __str__(self) -> str:
        causal = ", causal" if self.spec.is_causal else ""
        return ", ".join(f"segments of {w} at rate {r}" for w, r in self.spec.branches) + causal

    @property
    def num_alike(self) -> int:
        """Batches that share what `between` lists."""
        return self.shape.b

    def between(self, queries: Range, keys: Range) -> tuple[Positions, ...]:
        """For each key head, the positions in `keys` that queries in a disjoint window attend."""
        found: list[set[range]] = [set() for _ in range(self.shape.h_kv)]
        is_future = self.spec.is_causal and keys[0] >= queries[1]
        if not is_future and queries[0] < queries[1] and keys[0] < keys[1]:
            # Disjoint windows can only share the segment of the last position of the earlier one.
            last = min(queries, keys)[1] - 1
            low, high = self._documents((last, last + 1))[0]
            for (window, rate), heads in zip(self.spec.branches, self._heads, strict=True):
                size = min(window, high - low)
                start = low + (last - low) // size * size
                for kv, offset in {(head.kv, head.row) for head in heads}:
                    run = range(start + offset, min(start + size, high), rate)
                    if _clip(run, queries) and (kept := _clip(run, keys)):
                        found[kv].add(kept)
        return tuple(tuple(sorted(each, key=_order)) for each in found)

    def share(self, bounds: tuple[int, ...]) -> float:
        """Of the keys of a head in a shard, the most that other shards can need."""
        n, group, total = self.shape.n, self.shape.h // self.shape.h_kv, 0.0
        for window, rate in self.spec.branches:
            if self.docs is not None or any(bound % min(window, n) for bound in bounds[1:-1]):
                total += min(1.0, group / rate)
        return min(1.0, total)

    def num_pairs(self, time: Range, heads: range) -> int:
        """Query-key pairs of the queries of a window and of some heads."""
        total = 0
        for (window, rate), serving in zip(self.spec.branches, self._heads, strict=True):
            offsets = Counter(head.row for head in serving if head.head in heads)
            for low, high in self._documents(time):
                first, end = (max(low, min(high, t)) - low for t in time)
                for offset, times in offsets.items():
                    how = high - low, window, rate, offset, self.spec.is_causal
                    total += times * (_pairs_before(end, *how) - _pairs_before(first, *how))
        return total * self.shape.b

    def plan(self, shape: Shape, shard: Shard, keys: Range | None, kv: Range | None, **options: Any) -> Plan:
        """The jobs of a shard's queries with keys in a window outside of it, of the key heads `kv`.

        Without a window, with its own keys, in regions of as many key heads as `kv` has.
        """
        if keys is None or kv is None:
            return plan_dilated(
                self.spec, shape, shard=shard, kv_heads=kv and kv[1], docs=self.docs, **options
            )
        del options["direction"]  # both passes have the same jobs
        return plan_crossing(self.spec, shape, shard, keys, kv, docs=self.docs, **options)

    @cached_property
    def _heads(self) -> list[list[Head]]:
        _, _, h, h_kv, _ = self.shape
        return [branch_heads(self.spec, branch, h, h_kv) for branch in range(len(self.spec.branches))]

    @cached_property
    def _spans(self) -> list[Range]:
        bounds = (0, self.shape.n) if self.docs is None else self.docs
        return [(low, high) for low, high in pairwise(bounds) if low < high]

    def _documents(self, time: Range) -> list[Range]:
        """The documents that have positions in a window."""
        first = bisect_right(self._spans, time[0], key=itemgetter(0)) - 1
        return self._spans[first : bisect_left(self._spans, time[1], key=itemgetter(0))]


def _pairs_before(t: int, n: int, window: int, rate: int, offset: int, is_causal: bool) -> int:
    """Pairs of the queries before position t of a document of n tokens, in one branch and head."""
    size = min(window, n)
    full, rest = divmod(t, size)
    rows, cut_rows = (len(range(offset, end, rate)) for end in (size, rest))
    if is_causal:
        return full * (rows * (rows + 1) // 2) + cut_rows * (cut_rows + 1) // 2
    return full * rows * rows + cut_rows * len(range(offset, min(size, n - full * size), rate))


@dataclass(frozen=True)
class BlockNeeds:
    """Needs of block-sparse attention. `workspace_bytes` are those of jobs on this rank."""

    shape: Shape
    key: str  # of the pattern
    pattern: BlockPattern = field(compare=False)
    workspace_bytes: int
    sums_blocks: ClassVar[bool] = True  # gradients of blocks of keys, which jobs have in common, in scratch

    @property
    def num_alike(self) -> int:
        return self.shape.b if len(self.pattern) in (1, self.shape.h) else 1

    def between(self, queries: Range, keys: Range) -> tuple[Positions, ...]:
        """As that of dilated attention; for each batch and key head if batches differ."""
        pattern, (b, _, h, h_kv, _) = self.pattern, self.shape
        is_future = pattern.is_causal and keys[0] >= queries[1]
        if is_future or queries[0] == queries[1] or keys[0] == keys[1]:
            return ((),) * (b // max(1, self.num_alike) * h_kv)
        kept = [self._kept(layout, queries, keys) for layout in range(len(pattern))]
        if len(pattern) == 1:
            return tuple(kept) * h_kv
        group = h // h_kv
        return tuple(sum(kept[i : i + group], ()) for i in range(0, len(kept), group))

    def _kept(self, layout: int, queries: Range, keys: Range) -> Positions:
        """The positions of the blocks that a window of rows keeps, neighbours as one range."""
        pattern, size = self.pattern, self.pattern.block_size
        (first, end), (left, right) = blocks_of(queries, size), blocks_of(keys, size)
        rows = (int(pattern.starts[layout * pattern.rows + row]) for row in (first, end))
        columns = pattern.columns[slice(*rows)]
        columns = torch.unique(columns[(columns >= left) & (columns < right)])
        is_first = torch.ones_like(columns, dtype=torch.bool)
        is_first[1:] = columns.diff() != 1
        firsts, lasts = columns[is_first].tolist(), columns[is_first.roll(-1)].tolist()
        return tuple(
            range(max(keys[0], first * size), min(keys[1], (last + 1) * size))
            for first, last in zip(firsts, lasts, strict=True)
        )

    def share(self, _bounds: tuple[int, ...]) -> float:
        return 1.0

    def plan(self, shape: Shape, shard: Shard, keys: Range | None, kv: Range | None, **options: Any) -> Plan:
        """As that of dilated attention."""
        options |= {"workspace_bytes": self.workspace_bytes, "queries": (shard.start, shard.start + shape.n)}
        options |= {"kv_heads": kv and kv[1]} if keys is None else {"keys": keys, "kv": kv}
        return plan_blocks(self.pattern, shape, **options)


@lru_cache(maxsize=4096)
def count_positions(union: Positions) -> int:
    """How many different positions there are."""
    ranges, total = _without_repeats(union), 0
    if all(x.step == 1 for x in ranges):
        return sum(map(len, ranges))
    for i, one in enumerate(ranges):
        shared = {common for other in ranges[:i] if (common := _intersect(one, other))}
        total += len(one) - count_positions(tuple(sorted(shared, key=_order)))
    return total


def list_positions(union: Positions) -> Tensor:
    """The different positions, ascending, int64."""
    ranges = _without_repeats(union)
    listed = [torch.arange(x.start, x.stop, x.step, device="cpu") for x in ranges or [range(0)]]
    is_sorted = len(ranges) < 2 or all(x.step == 1 for x in ranges)
    return torch.cat(listed) if is_sorted else torch.unique(torch.cat(listed))


def _order(x: range) -> tuple[int, int, int]:
    return x.start, x.stop, x.step


def _clip(x: range, window: Range) -> range:
    first, after = (max(0, -((x.start - time) // x.step)) for time in window)
    return x[first:after]


def _without_repeats(union: Positions) -> list[range]:
    """Neighbours of step 1 joined, and of other ranges those that no other contains."""
    kept: list[range] = []
    for one in sorted((x for x in union if x.step == 1), key=_order):
        if kept and one.start <= kept[-1].stop:
            kept[-1] = range(kept[-1].start, max(kept[-1].stop, one.stop))
        else:
            kept.append(one)
    for one in sorted({x for x in union if x.step > 1}, key=lambda x: (-len(x), *_order(x))):
        if not any(_intersect(one, other) == one for other in kept):
            kept.append(one)
    return kept


def _intersect(a: range, b: range) -> range:
    """The positions of both: a range again (Chinese remainder theorem)."""
    common = math.gcd(a.step, b.step)
    if (b.start - a.start) % common:
        return range(0)
    step, other = a.step // common, b.step // common
    first = a.start + (b.start - a.start) // common * pow(step, -1, other) % other * a.step
    return _clip(range(first, min(a[-1], b[-1]) + 1, a.step * other), (b.start, b[-1] + 1))
