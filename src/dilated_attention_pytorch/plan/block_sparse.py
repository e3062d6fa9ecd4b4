"""WHICH rows meet in block-sparse attention: rows that keep equally many blocks run together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from .block_pattern import BlockPattern
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
    join: int = 1  # so many neighbours share the first `num_shared` columns and meet them together
    num_shared: int = 0

    @property
    def num_blocks(self) -> int:
        return self.columns.shape[1]


@dataclass(frozen=True)
class Tile:
    """Rows, `join` of them together, meet key blocks `columns` (rows / join, blocks) of `k_len` tokens."""

    columns: Tensor
    k_len: int
    is_causal: bool
    join: int = 1


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


def plan_blocks(pattern: BlockPattern) -> BlockPlan:
    """The schedule of a pattern, for any number of batches and heads."""
    rows, size = pattern.rows, pattern.block_size
    tail = pattern.n - (rows - 1) * size
    row = torch.arange(rows).repeat(len(pattern))
    first, counts = pattern.starts[:-1], pattern.counts
    last = torch.full_like(counts, -1)
    is_empty = counts == 0
    last[~is_empty] = pattern.columns[(pattern.starts[1:] - 1)[~is_empty]].long()
    # Columns ascend: the diagonal block of a causal row, and the last block of the sequence, stand last.
    has_diagonal = (last == row) if pattern.is_causal else torch.zeros_like(is_empty)
    num_blocks = counts - has_diagonal.long()
    keeps_tail = (last == rows - 1) & ~has_diagonal & (tail < size)
    is_tail = (row == rows - 1) & (tail < size)
    kind = (num_blocks * 2 + has_diagonal) * 4 + keeps_tail * 2 + is_tail
    groups: list[tuple[RowGroup, ...]] = []
    for layout in range(len(pattern)):
        here = slice(layout * rows, (layout + 1) * rows)
        order = torch.argsort(kind[here], stable=True)
        kinds, lengths = torch.unique_consecutive(kind[here][order], return_counts=True)
        same: list[RowGroup] = []
        for code, which in zip(kinds.tolist(), torch.split(order, lengths.tolist()), strict=True):
            blocks = code // 8
            group = RowGroup(
                rows=which,
                columns=pattern.columns[first[here][which][:, None] + torch.arange(blocks)],
                q_len=tail if code & 1 else size,
                k_len=blocks * size - (size - tail if code & 2 else 0),
                has_diagonal=bool(code & 4),
            )
            same += [group] if code & 3 else _join(group, size)
        groups.append(tuple(same))
    return BlockPlan(pattern, tuple(groups))


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
            fit = workspace_bytes // (
                self.block_bytes * max(plan.pattern.rows, self.most_blocks + self.group)
            )
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
        tiles = [Tile(rows[:, None], group.q_len, is_causal=True)] if group.has_diagonal else []
        tiles += self._tiles(columns[:: group.join, :shared], shared * self.size, group.join)
        tiles += self._tiles(columns[:, shared:], group.k_len - shared * self.size, 1)
        return Panel(
            index, batch, head, self.group, kv, num_kv, _runs(rows), rows.numel(), group.q_len, tuple(tiles)
        )

    def _tiles(self, columns: Tensor, k_len: int, join: int) -> list[Tile]:
        """All columns, in tiles of as many as the workspace holds."""
        most, total = self.most_blocks, columns.shape[1]
        return [
            Tile(
                columns[:, start : start + most],
                min(k_len, (start + most) * self.size) - start * self.size,
                is_causal=False,
                join=join,
            )
            for start in range(0, total, most)
        ]


def _runs(rows: Tensor) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as (first, number) of consecutive ones."""
    count, first = rows.numel(), int(rows[0])
    if int(rows[-1]) - first == count - 1:
        return ((first, count),)
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), count]
    return tuple((int(rows[a]), b - a) for a, b in pairwise(bounds))
