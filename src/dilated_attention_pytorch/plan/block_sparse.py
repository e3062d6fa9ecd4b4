"""WHICH rows meet in block-sparse attention: rows that keep equally many blocks run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from .block_pattern import BlockPattern
from .segments import Range
from .shape import Pass, Shape

JOINED_BELOW = 64  # tokens a block: a kernel is slower with so few query rows
JOINED_ROWS = 512  # tokens of the rows that are joined
LEAST_SHARE = 0.5  # of its blocks that a row must share with its neighbours for that
BYTES_A_THREAD = 4 * 2**20  # gathered keys and values of about this size stay in a core's share of the cache


@dataclass(frozen=True)
class RowGroup:
    """Row blocks of one layout that keep `num_blocks` full blocks, and under a causal mask maybe their own.

    `rows` ascend. All have `q_len` tokens, all their kept blocks together `k_len`: only the last block of a
    sequence may be shorter, and rows that keep it, or are it, form groups of their own.
    """

    rows: Tensor  # (rows,) int64
    columns: Tensor  # (rows, blocks) int32, the diagonal left out
    q_len: int
    k_len: int
    has_diagonal: bool
    skip: int = 0  # keys of the first block that are not there
    join: int = 1  # so many neighbours share the first `num_shared` columns and meet them together
    num_shared: int = 0

    @property
    def num_blocks(self) -> int:
        return self.columns.shape[1]


@dataclass(frozen=True)
class Tile:
    """Rows, `join` of them together, meet `k_len` tokens of key blocks `columns` (rows / join, blocks).

    They are those after the first `skip` tokens of the blocks.
    """

    columns: Tensor
    k_len: int
    is_causal: bool
    join: int = 1
    skip: int = 0


@dataclass(frozen=True)
class Panel:
    """Rows whose output is accumulated together, for `num_kv` key heads and the query heads they serve."""

    index: int
    batch: int
    head: int  # the first query head
    group: int  # query heads a key head
    kv: int
    num_kv: int
    runs: tuple[tuple[int, int], ...]  # (first row block, number): neighbours of time
    num_rows: int
    q_len: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Lane:
    """Key heads [kv, kv + num_kv) of one batch, and the panels of all queries that meet them."""

    batch: int
    kv: int
    num_kv: int
    panels: Iterator[Panel]


@dataclass(frozen=True)
class BlockPlan:
    """The row groups of each layout. Panels are cut as they are needed: nothing here grows with the heads."""

    pattern: BlockPattern
    groups: tuple[tuple[RowGroup, ...], ...]  # a layout
    queries: Range  # the positions [from, to) that ask, and those that are asked
    keys: Range

    @property
    def num_rows(self) -> int:
        return len(range(*_blocks_of(self.queries, self.pattern.block_size)))

    @property
    def columns(self) -> Range:
        """The key blocks [from, to)."""
        return _blocks_of(self.keys, self.pattern.block_size)

    @property
    def nbytes(self) -> int:
        tensors = (x for layout in self.groups for group in layout for x in (group.rows, group.columns))
        return self.pattern.nbytes + sum(x.nbytes for x in tensors)

    def lanes(self, shape: Shape, itemsize: int, workspace_bytes: int, direction: Pass) -> Iterator[Lane]:
        """The work of a call, cut so that what is gathered for a panel fits `workspace_bytes`.

        A panel is never less than one block of rows against one block of keys, for one key head. The sums of
        a lane's key and value gradients, of the size of its keys and values, stand beside it.
        """
        cutter = _Cutter(self, shape, itemsize, workspace_bytes, direction)
        for batch in range(shape.b):
            for kv in range(0, shape.h_kv, cutter.num_kv):
                num_kv = min(cutter.num_kv, shape.h_kv - kv)
                yield Lane(batch, kv, num_kv, cutter.panels(batch, kv, num_kv))


def plan_blocks(
    pattern: BlockPattern,
    queries: Range | None = None,
    keys: Range | None = None,
    layouts: Sequence[int] | None = None,
) -> BlockPlan:
    """The schedule of a pattern, for any number of batches and heads.

    Of a part of it: queries and keys in ranges [from, to) of positions, the same or disjoint ones, which may
    cut blocks; and some of the layouts.
    """
    whole = (0, pattern.n)
    queries, keys = whole if queries is None else queries, whole if keys is None else keys
    chosen = range(len(pattern)) if layouts is None else layouts
    side = _Sides(pattern, queries, keys)
    return BlockPlan(pattern, tuple(_layout_groups(side, layout) for layout in chosen), queries, keys)


@dataclass(frozen=True)
class _Sides:
    """Ranges of queries and keys, in blocks: which there are, and what of the outer ones is missing."""

    pattern: BlockPattern
    queries: Range
    keys: Range

    @property
    def rows(self) -> Range:
        return _blocks_of(self.queries, self.pattern.block_size)

    @property
    def columns(self) -> Range:
        return _blocks_of(self.keys, self.pattern.block_size)

    @property
    def has_diagonal(self) -> bool:
        return self.pattern.is_causal and self.queries == self.keys

    def row_length(self, row: int) -> int:
        size = self.pattern.block_size
        return min(self.queries[1], (row + 1) * size) - max(self.queries[0], row * size)

    @property
    def skip(self) -> int:
        """Keys of the first block that are not in the range."""
        return self.keys[0] % self.pattern.block_size

    @property
    def cut(self) -> int:
        """Keys of the last block that are not in the range."""
        return -self.keys[1] % self.pattern.block_size


def _blocks_of(time: Range, size: int) -> Range:
    return (time[0] // size, -(-time[1] // size)) if time[1] > time[0] else (0, 0)


def _layout_groups(side: _Sides, layout: int) -> tuple[RowGroup, ...]:
    pattern, size = side.pattern, side.pattern.block_size
    (first_row, end_row), (first_column, end_column) = side.rows, side.columns
    starts = pattern.starts[layout * pattern.rows + first_row : layout * pattern.rows + end_row + 1]
    columns = pattern.columns[int(starts[0]) : int(starts[-1])]
    row = torch.repeat_interleave(torch.arange(first_row, end_row), starts.diff())
    if (first_column, end_column) != (0, pattern.rows):
        is_here = (columns >= first_column) & (columns < end_column)
        columns, row = columns[is_here], row[is_here]
    counts = torch.bincount(row - first_row, minlength=end_row - first_row)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rows = torch.arange(first_row, end_row)
    is_empty = counts == 0
    outermost = torch.full((2, rows.numel()), -1)
    outermost[0, ~is_empty] = columns[starts[:-1][~is_empty]].long()
    outermost[1, ~is_empty] = columns[starts[1:][~is_empty] - 1].long()
    # Columns ascend: the diagonal block of a causal row, and the last block of the range, stand last.
    has_diagonal = (outermost[1] == rows) & side.has_diagonal
    blocks = counts - has_diagonal.long()
    skips = (outermost[0] == first_column) & (blocks > 0) & (side.skip > 0)
    cuts = (outermost[1] == end_column - 1) & ~has_diagonal & (side.cut > 0)
    is_short = torch.zeros_like(blocks)  # a row of its own kind: 1 the first, 2 the last
    if rows.numel() and side.row_length(end_row - 1) < size:
        is_short[-1] = 2
    if rows.numel() and side.row_length(first_row) < size:
        is_short[0] = 1
    kind = (((blocks * 2 + has_diagonal) * 2 + skips) * 2 + cuts) * 3 + is_short
    order = torch.argsort(kind, stable=True)
    kinds, lengths = torch.unique_consecutive(kind[order], return_counts=True)
    groups: list[RowGroup] = []
    for code, which in zip(kinds.tolist(), torch.split(order, lengths.tolist()), strict=True):
        num, rest = divmod(code, 24)
        skip, cut = side.skip * (rest // 6 % 2), side.cut * (rest // 3 % 2)
        group = RowGroup(
            rows=rows[which],
            columns=columns[starts[which][:, None] + torch.arange(num)],
            q_len=side.row_length(int(rows[which[0]])),
            k_len=num * size - skip - cut,
            has_diagonal=rest >= 12,
            skip=skip,
        )
        groups += [group] if rest % 12 else _join(group, size)
    return tuple(groups)


def _join(group: RowGroup, size: int) -> list[RowGroup]:
    """Neighbours whose blocks are small and mostly the same meet what they share as one larger block."""
    join = JOINED_ROWS // size
    if size >= JOINED_BELOW or join < 2 or group.num_blocks < 2:
        return [group]
    # Candidates are aligned: rows [i * join, (i + 1) * join) that are all in this group.
    _, count = torch.unique_consecutive(group.rows // join, return_counts=True)
    is_whole = torch.repeat_interleave(count == join, count)
    columns = group.columns[is_whole].view(-1, join * group.num_blocks)
    if not columns.numel():
        return [group]
    # Columns of a row differ, so that one that all rows share stands `join` times in the sorted line.
    line = columns.sort(1).values.contiguous()
    last, before = (torch.searchsorted(line, columns, right=right) for right in (True, False))
    is_shared = (last - before == join).view(-1, group.num_blocks)
    num_shared = is_shared[::join].sum(1)
    pays = num_shared >= LEAST_SHARE * group.num_blocks
    shared_first = torch.argsort((~is_shared).to(torch.int8), dim=1, stable=True)
    ordered = group.columns[is_whole].gather(1, shared_first)
    rows = group.rows[is_whole].view(-1, join)
    alone = torch.ones_like(group.rows, dtype=torch.bool)
    alone[is_whole.nonzero().flatten().view(-1, join)[pays].flatten()] = False
    groups = [replace(group, rows=group.rows[alone], columns=group.columns[alone])] if alone.any() else []
    for shared in torch.unique(num_shared[pays]).tolist():
        these = pays & (num_shared == shared)
        members = ordered.view(-1, join, group.num_blocks)[these].flatten(0, 1)
        groups.append(
            replace(group, rows=rows[these].flatten(), columns=members, join=join, num_shared=shared)
        )
    return groups


class _Cutter:
    """Cuts the row groups of a plan into panels."""

    def __init__(
        self, plan: BlockPlan, shape: Shape, itemsize: int, workspace_bytes: int, direction: Pass
    ) -> None:
        self.plan, self.shape, self.size = plan, shape, plan.pattern.block_size
        self.budget = workspace_bytes
        # Of a block of keys: they and their values; of queries: they and their outputs; twice with gradients.
        tensors = 2 if direction == "forward" else 4
        self.block_bytes = tensors * self.size * shape.d * itemsize
        self.group = shape.h // shape.h_kv if len(plan.groups) == 1 else 1
        widest = max((group.num_blocks for layout in plan.groups for group in layout), default=1)
        self.most_blocks = max(1, min(widest, workspace_bytes // self.block_bytes - self.group))
        self.num_kv = 1
        if len(plan.groups) == 1:  # one layout: short sequences of several heads fill a panel together
            fit = workspace_bytes // (self.block_bytes * max(plan.num_rows, self.most_blocks + self.group))
            self.num_kv = max(1, min(shape.h_kv, fit))

    def panels(self, batch: int, kv: int, num_kv: int) -> Iterator[Panel]:
        shape, per_kv = self.shape, self.shape.h // self.shape.h_kv
        index = (batch * shape.h_kv + kv) * 2**32  # distinct over the lanes of a call
        heads = range(kv * per_kv, (kv + num_kv) * per_kv, num_kv * per_kv if self.group == per_kv else 1)
        for head in heads:
            for group in self._groups(batch, head):
                for part in self._parts(group, num_kv):
                    yield self._panel(group, part, (index, batch, head, kv, num_kv))
                    index += 1

    def _groups(self, batch: int, head: int) -> tuple[RowGroup, ...]:
        layouts = self.plan.groups
        if len(layouts) == 1:
            return layouts[0]
        return layouts[head if len(layouts) == self.shape.h else batch * self.shape.h + head]

    def _parts(self, group: RowGroup, num_kv: int) -> Iterator[slice]:
        blocks = max(group.has_diagonal, min(group.num_blocks, self.most_blocks)) + self.group
        fit = max(1, self.budget // (self.block_bytes * blocks * num_kv))
        total = group.rows.numel()
        fit = -(-total // -(-total // fit))  # even parts
        fit = -(-fit // group.join) * group.join
        yield from (slice(i, min(i + fit, total)) for i in range(0, total, fit))

    def _panel(self, group: RowGroup, part: slice, place: tuple[int, int, int, int, int]) -> Panel:
        index, batch, head, kv, num_kv = place
        rows, columns, shared = group.rows[part], group.columns[part].long(), group.num_shared
        tiles = []
        if group.has_diagonal:
            # A row that is cut at its beginning stands alone in its group.
            skip = max(0, self.plan.queries[0] - int(rows[0]) * self.size)
            tiles = [Tile(rows[:, None], group.q_len, is_causal=True, skip=skip)]
        tiles += self._tiles(columns[:: group.join, :shared], shared * self.size, group.join)
        tiles += self._tiles(columns[:, shared:], group.k_len - shared * self.size, 1, group.skip)
        return Panel(
            index, batch, head, self.group, kv, num_kv, _runs(rows), rows.numel(), group.q_len, tuple(tiles)
        )

    def _tiles(self, columns: Tensor, k_len: int, join: int, skip: int = 0) -> list[Tile]:
        """All columns, in tiles of as many as the workspace holds."""
        most, tiles = self.most_blocks, []
        for start in range(0, columns.shape[1], most):
            first = start * self.size
            skipped = max(0, skip - first)
            length = min(skip + k_len - first, most * self.size) - skipped
            tiles.append(Tile(columns[:, start : start + most], length, False, join, skipped))
        return tiles


def _runs(rows: Tensor) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as (first, number) of consecutive ones."""
    count, first = rows.numel(), int(rows[0])
    if int(rows[-1]) - first == count - 1:
        return ((first, count),)
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), count]
    return tuple((int(rows[a]), b - a) for a, b in pairwise(bounds))
