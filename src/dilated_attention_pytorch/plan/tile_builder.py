"""Cuts segments into tiles that fit a workspace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ..spec import DilatedSpec
from .heads import Head, HeadBox, Part, even_parts, fold_heads
from .segments import Range, Segments, branch_segments, crossing_segment, rows_within
from .shape import Shape
from .tiles import Tile

MAX_GRID = 65535  # CUDA launches fail beyond this many batches or heads
MAX_ROWS = 32768  # the CUDA memory-efficient kernel is reported wrong beyond 65536 rows
MIN_ROWS = 16  # shorter pieces would be all overhead, whatever the workspace
GOOD_ROWS = 1024  # query heads that share keys are split over tiles before their rows get shorter than this


class _Rows(NamedTuple):
    """Which rows of a segment meet: (first, number) of queries and of keys, and phantom keys besides."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    phantom: int


class _Place(NamedTuple):
    """The batches and segments of a tile, as its fields of the same names."""

    batch: int
    num_batch: int
    start: int
    segments: int
    period: int


class TileBuilder:
    """Numbers the tiles of a plan as it makes them."""

    def __init__(
        self,
        spec: DilatedSpec,
        shape: Shape,
        part: Part,
        docs: Sequence[int] | None,
        row_bytes: int,
        budget: int,
    ) -> None:
        self.spec, self.row_bytes, self.budget = spec, row_bytes, budget
        self.time = (part.start, part.start + shape.n)
        bounds = (0, part.n) if docs is None else docs
        self.spans = [(lo, hi) for lo, hi in pairwise(bounds) if hi > lo]
        self.heads = [part.branch_heads(spec, i, shape) for i in range(len(spec.branches))]
        # Rate 1 first: it writes every row, which spares initial values and a merge.
        self.order = sorted(range(len(spec.branches)), key=lambda i: spec.dilation_rates[i] != 1)
        self.first_for_keys: dict[int, bool] = {}
        served: set[int] = set()
        for i in self.order:
            key_heads = {head.kv for head in self.heads[i]}
            self.first_for_keys[i] = served.isdisjoint(key_heads)
            served |= key_heads
        self.num_tiles = 0

    @property
    def covers(self) -> bool:
        """Whether the tiles that write, rather than merge or add, reach every query and key row."""
        if self.spec.head_mixing == "all":
            return self.spec.dilation_rates[self.order[0]] == 1
        serving = [i for i in self.order if self.heads[i]]
        return all(self.spec.dilation_rates[i] == 1 and self.first_for_keys[i] for i in serving)

    def panel_tiles(self, batch: Range, kv: Range, time: Range) -> Iterator[Tile]:
        """The tiles of queries in a range of time, for batches and key heads given as (first, number).

        Their keys are those of the range, and of the segments it cuts those before and after, if they are at
        hand.
        """
        before, after = (self.time[0], time[0]), (time[1], self.time[1])
        for branch in self.order:
            heads = self._heads_of(branch, kv)
            for segments in branch_segments(self.spec.segment_lengths[branch], time, self.spans):
                yield from self._segment_tiles(branch, batch, segments, heads)
            yield from self._crossing_tiles(branch, batch, heads, time, before)
            yield from self._crossing_tiles(branch, batch, heads, time, after)

    def crossing_tiles(self, batch: Range, kv: Range, keys: Range) -> Iterator[Tile]:
        """The tiles of all queries at hand with keys elsewhere."""
        for branch in self.order:
            yield from self._crossing_tiles(branch, batch, self._heads_of(branch, kv), self.time, keys)

    def _heads_of(self, branch: int, kv: Range) -> list[Head]:
        return [head for head in self.heads[branch] if kv[0] <= head.kv < kv[0] + kv[1]]

    def _crossing_tiles(
        self, branch: int, batch: Range, heads: list[Head], queries: Range, keys: Range
    ) -> Iterator[Tile]:
        if self.spec.is_causal and keys[0] >= queries[1]:
            return
        segments = crossing_segment(self.spec.segment_lengths[branch], queries, keys, self.spans)
        if segments is not None:
            yield from self._segment_tiles(branch, batch, segments, heads)

    def _segment_tiles(
        self, branch: int, batch: Range, segments: Segments, heads: list[Head]
    ) -> Iterator[Tile]:
        spec, rate = self.spec, self.spec.dilation_rates[branch]
        has_phantoms = spec.tail == "phantom" and not spec.is_causal and segments.is_own
        meeting: dict[_Rows, list[Head]] = {}
        for head in heads:
            queries, keys = (rows_within(x, head.row, rate) for x in (segments.queries, segments.keys))
            phantom = 0
            if has_phantoms:
                phantom = -(-segments.window // rate) - rows_within((0, segments.length), head.row, rate)[1]
            if queries[1] > 0 and keys[1] > 0:
                meeting.setdefault(_Rows(queries, keys, phantom), []).append(head)
        for rows, same in meeting.items():
            for box in fold_heads(tuple(same)):
                yield from self._box_tiles(branch, batch, segments, rows, box)

    def _box_tiles(
        self, branch: int, batch: Range, segments: Segments, rows: _Rows, box: HeadBox
    ) -> Iterator[Tile]:
        most = max(rows.queries[1], rows.keys[1])
        group_fit = max(1, self.budget // (self.row_bytes * min(most, GOOD_ROWS)) - 1)
        for first, group in even_parts(box.group, group_fit):
            head = box.first._replace(head=box.first.head + first * box.group_step)
            part = replace(box, first=head, group=group)
            yield from self._cut_box(branch, batch, segments, rows, part, opens_keys=first == 0)

    def _cut_box(
        self, branch: int, batch: Range, segments: Segments, rows: _Rows, box: HeadBox, opens_keys: bool
    ) -> Iterator[Tile]:
        row_bytes = self.row_bytes * (box.group + 1)  # the queries that share a key row, and that row
        rows_fit = max(MIN_ROWS, min(MAX_ROWS, self.budget // row_bytes))
        pieces = _pieces(rows.queries, rows_fit), _pieces(rows.keys, rows_fit)
        units_fit = max(1, self.budget // (row_bytes * max(pieces[0][0][1], pieces[1][0][1])))
        boxes = list(box.split(min(units_fit, max(1, MAX_GRID // box.group))))
        segments_fit = min(segments.num, MAX_GRID, max(1, units_fit // boxes[0].num_units))
        batch_fit = 1
        if segments_fit == segments.num:
            batch_fit = max(1, min(MAX_GRID, units_fit // boxes[0].num_units) // segments_fit)
        for b, num_b in even_parts(batch[1], batch_fit):
            for s, num_s in even_parts(segments.num, segments_fit):
                start = segments.start + s * segments.period - self.time[0]
                where = _Place(batch[0] + b, num_b, start, num_s, segments.period)
                for part in boxes:
                    yield from self._row_tiles(
                        branch, where, part, pieces, rows.phantom, segments.is_own, opens_keys
                    )

    def _row_tiles(
        self,
        branch: int,
        where: _Place,
        box: HeadBox,
        pieces: tuple[list[Range], list[Range]],
        phantom: int,
        is_own: bool,
        opens_keys: bool,
    ) -> Iterator[Tile]:
        """All (query piece, key piece) rectangles; of own keys under is_causal those up to the diagonal."""
        spec, is_causal = self.spec, self.spec.is_causal and is_own
        for i, queries in enumerate(pieces[0]):
            for j, keys in enumerate(pieces[1][: i + 1] if is_causal else pieces[1]):
                diagonal = is_causal and i == j
                yield Tile(
                    self.num_tiles,
                    branch,
                    *where,
                    spec.dilation_rates[branch],
                    box,
                    *queries,
                    *keys,
                    is_causal=diagonal,
                    phantom=phantom if j == 0 else 0,
                    first_for_queries=spec.head_mixing == "grouped" or branch == self.order[0],
                    first_for_keys=self.first_for_keys[branch],
                    opens_queries=is_own and j == 0,
                    opens_keys=is_own and opens_keys and (diagonal if is_causal else i == 0),
                )
                self.num_tiles += 1


def _pieces(rows: tuple[int, int], at_most: int) -> list[tuple[int, int]]:
    return [(rows[0] + first, count) for first, count in even_parts(rows[1], at_most)]
