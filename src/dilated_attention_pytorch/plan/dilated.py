"""WHICH rows meet: a spec and a shape become panels of tiles that fit a workspace."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import pairwise

from torch import Tensor

from ..core.pattern_cache import PatternCache
from ..spec import DilatedSpec
from .heads import Part, even_parts
from .segments import Range
from .shape import Pass, Shape
from .tile_builder import TileBuilder
from .tiles import Origin, Tile

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
    of the time, whatever segments they cut. With dropout, whose masks are drawn tile by tile, both passes
    have the same tiles: those of a backward pass, cut by the steps.

    `part`: the positions and heads of `shape` are a part of a whole call; keys outside it are left out. With
    `lane`, each panel is so many key/value heads over all the time at hand.

    Passes that need the same scratch share one entry of `cache`.
    """
    part = Part.whole(shape) if part is None else part
    drops = spec.dropout_p > 0
    steps = min(steps, shape.n) if drops or direction == "forward" else 1
    joins = direction == "backward" and steps > 1
    scratch_rows = _scratch_rows(spec, shape, "backward" if drops else direction, accumulates=itemsize < 4)
    build = partial(
        _build_plan, spec, shape, itemsize, scratch_rows, docs, workspace_bytes, steps, joins, part, lane
    )
    if cache is None:
        return build()
    packing = None if docs is None else digest(docs)
    key = ("dilated", spec, shape, itemsize, scratch_rows, packing, workspace_bytes, steps, joins, part, lane)
    plan: Plan = cache.get_or_build(key, build)
    return plan


def digest(docs: tuple[int, ...]) -> bytes:
    """For cache keys: the boundaries of many documents would make a key larger than its plan."""
    return blake2b(array("q", docs).tobytes()).digest()


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
    builder = TileBuilder(spec, shape, part, docs, _row_bytes(shape, itemsize), workspace_bytes // 2)
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
    joins: bool,
    part: Part,
    lane: int | None,
) -> Plan:
    budget = workspace_bytes // 2 if scratch_rows else workspace_bytes
    scratch_bytes = scratch_rows * shape.d * max(4, itemsize)
    builder = TileBuilder(spec, shape, part, docs, _row_bytes(shape, itemsize), budget)
    cuts = range(0, shape.n, -(-shape.n // steps)) if spec.dropout_p else range(0)
    blocks = _panel_blocks(spec, shape, builder.spans, scratch_bytes, budget, 1 if cuts else steps, lane)
    panels, group = [], shape.h // shape.h_kv
    for batch, num_batch, kv, num_kv, lo, hi in blocks:
        bounds = [lo, *(cut for cut in cuts if lo < cut < hi), hi]
        parts = []
        for a, b in pairwise(bounds):
            time = (part.start + a, part.start + b)
            parts.append((a, b, tuple(builder.panel_tiles((batch, num_batch), (kv, num_kv), time))))
        for a, b, tiles in [(lo, hi, _joined(parts, builder.order))] if joins else parts:
            origin = (batch, a, kv * group)
            panels.append(Panel(origin, num_batch, b - a, num_kv * group, kv, num_kv, tiles))
    return Plan(spec, shape, tuple(panels), builder.covers)


def _joined(parts: list[tuple[int, int, tuple[Tile, ...]]], order: list[int]) -> tuple[Tile, ...]:
    """The tiles of parts of a panel as one: of each branch those with keys of their own part first.

    They write the gradients of the keys to which the tiles of other parts add.
    """
    keyed = [
        ((order.index(tile.branch), not a <= tile.first_key < b), tile)
        for a, b, each in parts
        for tile in each
    ]
    return tuple(tile for _, tile in sorted(keyed, key=lambda pair: pair[0]))


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
