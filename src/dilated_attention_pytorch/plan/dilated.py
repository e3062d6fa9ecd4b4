"""WHICH rows meet: a spec and a shape become panels of tiles that fit a workspace."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from ..core.pattern_cache import PatternCache
from ..spec import DilatedSpec
from .heads import Head, HeadBox, Part, even_parts, fold_heads
from .segments import Range, Segments, branch_segments, crossing_segment, rows_within
from .shape import Pass, Shape
from .tiles import Origin, Tile

MAX_GRID = 65535  # CUDA launches fail beyond this many batches or heads
MAX_ROWS = 32768  # the CUDA memory-efficient kernel is reported wrong beyond 65536 rows
MIN_ROWS = 16  # shorter pieces would be all overhead, whatever the workspace
GOOD_ROWS = 1024  # query heads that share keys are split over tiles before their rows get shorter than this
DEFAULT_WORKSPACE_BYTES = 32 * 2**20
_TILE_BYTES, _PANEL_BYTES = 450, 300  # of the Python objects, as tracemalloc sees them


@dataclass(frozen=True, slots=True)
class Panel:
    """A block of the output that is accumulated together: [origin, origin + sizes) and its tiles."""

    origin: Origin  # batch, time, query head
    batch: int
    time: int
    heads: int
    kv_first: int
    kv_heads: int
    tiles: tuple[Tile, ...]

    @property
    def kv_origin(self) -> Origin:
        return self.origin[0], self.origin[1], self.kv_first

    def query_block(self, x: Tensor) -> Tensor:
        """The panel's part of a tensor (b, n, h, ...)."""
        b, t, h = self.origin
        return x[b : b + self.batch, t : t + self.time, h : h + self.heads]

    def key_block(self, x: Tensor) -> Tensor:
        """The panel's part of a tensor (b, n, h_kv, ...)."""
        b, t, h = self.kv_origin
        return x[b : b + self.batch, t : t + self.time, h : h + self.kv_heads]


@dataclass(frozen=True)
class Plan:
    """Everything an engine pass needs besides the tensors. Plain data; `print(plan)` shows it."""

    spec: DilatedSpec
    shape: Shape
    panels: tuple[Panel, ...]
    covered: bool  # the first tiles write every position, so nothing needs initial values

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return tuple(tile for panel in self.panels for tile in panel.tiles)

    @property
    def num_pairs(self) -> int:
        """Query-key pairs scored over all heads and batches: the true work, causal halves included."""
        return sum(tile.num_pairs for tile in self.tiles)

    @property
    def nbytes(self) -> int:
        """About the memory that the plan itself takes: ranges and strides, no tensors."""
        return sum(_PANEL_BYTES + _TILE_BYTES * len(panel.tiles) for panel in self.panels)

    def __str__(self) -> str:
        lines = [f"{self.spec}", f"{self.shape}: {len(self.panels)} panel(s), {len(self.tiles)} tile(s)"]
        for panel in self.panels:
            b, t, h = panel.origin
            lines.append(f"panel batch {b}+{panel.batch}  time {t}+{panel.time}  heads {h}+{panel.heads}")
            lines += [f"  {tile}" for tile in panel.tiles]
        return "\n".join(lines)


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


def plan_dilated(
    spec: DilatedSpec,
    shape: Shape,
    *,
    itemsize: int,
    direction: Pass = "forward",
    docs: tuple[int, ...] | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    cache: PatternCache | None = None,
    steps: int = 1,
    part: Part | None = None,
    lane: int | None = None,
) -> Plan:
    """The tiles of a call, cut so that packed copies (and accumulators) fit `workspace_bytes`.

    `docs` are the boundaries `(0, ..., n)` of packed documents. Where results need scratch of their own size
    (float32 sums of half precision, the branch outputs of detach_mixing's backward), the output is cut into
    panels, and that scratch takes half of the workspace. A panel is never smaller than one key/value head
    over the shortest span that cuts no segment, a tile never smaller than MIN_ROWS rows of one head; only
    there may the workspace be exceeded. With `steps`, the panels of a forward pass are that many equal parts
    of the time, whatever segments they cut.

    `part`: the positions and heads of `shape` are a part of a whole call; keys outside it are left out. With
    `lane`, each panel is so many key/value heads over all the time at hand.

    Passes that need the same scratch share one entry of `cache`.
    """
    part = Part.whole(shape) if part is None else part
    steps = min(steps, shape.n) if direction == "forward" else 1
    scratch_rows = _scratch_rows(spec, shape, direction, accumulates=itemsize < 4)
    build = partial(
        _build_plan, spec, shape, itemsize, scratch_rows, docs, workspace_bytes, steps, part, lane
    )
    if cache is None:
        return build()
    # The boundaries of many documents would make a key larger than its plan.
    packing = None if docs is None else blake2b(array("q", docs).tobytes()).digest()
    key = ("dilated", spec, shape, itemsize, scratch_rows, packing, workspace_bytes, steps, part, lane)
    plan: Plan = cache.get_or_build(key, build)
    return plan


def plan_crossing(
    spec: DilatedSpec,
    shape: Shape,
    part: Part,
    keys: Range,
    kv: Range,
    *,
    itemsize: int,
    docs: tuple[int, ...] | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    first_index: int = 0,
) -> tuple[Tile, ...]:
    """The tiles of the queries at hand with keys in a range [from, to) of positions that are not at hand.

    `kv` is (first, number) of the key/value heads, `first_index` the number of the first tile.
    """
    builder = _TileBuilder(spec, shape, part, docs, _row_bytes(shape, itemsize), workspace_bytes // 2)
    builder.num_tiles = first_index
    return tuple(builder.crossing_tiles((0, shape.b), kv, keys)) if shape.b else ()


def _build_plan(
    spec: DilatedSpec,
    shape: Shape,
    itemsize: int,
    scratch_rows: int,
    docs: tuple[int, ...] | None,
    workspace_bytes: int,
    steps: int,
    part: Part,
    lane: int | None,
) -> Plan:
    budget = workspace_bytes // 2 if scratch_rows else workspace_bytes
    scratch_bytes = scratch_rows * shape.d * max(4, itemsize)
    builder = _TileBuilder(spec, shape, part, docs, _row_bytes(shape, itemsize), budget)
    blocks = _panel_blocks(spec, shape, builder.spans, scratch_bytes, budget, steps, lane)
    panels = []
    for batch, num_batch, kv, num_kv, lo, hi in blocks:
        group = shape.h // shape.h_kv
        time = (part.start + lo, part.start + hi)
        tiles = tuple(builder.panel_tiles((batch, num_batch), (kv, num_kv), time))
        origin = (batch, lo, kv * group)
        panels.append(Panel(origin, num_batch, hi - lo, num_kv * group, kv, num_kv, tiles))
    return Plan(spec, shape, tuple(panels), builder.covers)


def _row_bytes(shape: Shape, itemsize: int) -> int:
    """Of a query or key row: packed inputs and kernel results of a backward pass.

    Forward, with half of them, keeps to the same tiles: they stay in cache, and dropout can draw its masks
    again. Kernels may take half precision as float32.
    """
    return shape.d * 4 * max(4, itemsize)


def _scratch_rows(spec: DilatedSpec, shape: Shape, direction: Pass, accumulates: bool) -> int:
    """Rows of scratch, beside the tiles, for each position and key/value head of a panel."""
    group = shape.h // shape.h_kv
    sums = 0 if not accumulates else group if direction == "forward" else group + 2
    own_outputs = group if spec.detach_mixing and direction == "backward" else 0
    return sums + own_outputs


def _panel_blocks(
    spec: DilatedSpec,
    shape: Shape,
    spans: list[Range],
    per_kv_row: int,
    budget: int,
    steps: int,
    lane: int | None,
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(batch, count, kv head, count, time from, time to) of each panel; one a step if it needs no scratch."""
    blocks = [(lo, lo + count) for lo, count in even_parts(shape.n, -(-shape.n // steps))]
    if lane is not None or not per_kv_row:
        for kv, num_kv in even_parts(shape.h_kv, lane or shape.h_kv) if shape.b else ():
            for lo, hi in blocks:
                yield 0, shape.b, kv, num_kv, lo, hi
        return
    if steps == 1:
        rows = max(1, budget // (per_kv_row * shape.h_kv))
        blocks = list(_time_blocks(spec, spans, rows))
    longest = max(hi - lo for lo, hi in blocks)
    kv_fit = max(1, min(shape.h_kv, budget // (per_kv_row * longest)))
    batch_fit = max(1, budget // (per_kv_row * longest * shape.h_kv))
    for batch, num_batch in even_parts(shape.b, batch_fit) if shape.b else ():
        for kv, num_kv in even_parts(shape.h_kv, kv_fit):
            for lo, hi in blocks:
                yield batch, num_batch, kv, num_kv, lo, hi


def _time_blocks(spec: DilatedSpec, spans: list[tuple[int, int]], rows: int) -> Iterator[tuple[int, int]]:
    """Spans of time that cut no segment of any branch, of about `rows` positions where that is possible."""
    start = end = spans[0][0]
    for lo, hi in spans:
        period = math.lcm(*(min(w, hi - lo) for w in spec.segment_lengths))
        length = min(hi - lo, period * max(1, rows // period))
        for cut in range(lo, hi, length):
            stop = min(cut + length, hi)
            if end > start and stop - start > rows:
                yield start, end
                start = end
            end = stop
    yield start, end


class _TileBuilder:
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
