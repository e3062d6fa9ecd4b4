"""WHICH rows meet in block-sparse attention: rows that keep equally many blocks run together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .block_pattern import BlockPattern
from .shape import Pass, Shape

BYTES_A_THREAD = 4 * 2**20  # gathered keys and values of about this size stay in a core's share of the cache


@dataclass(frozen=True)
class RowGroup:
    """Row blocks of one layout that keep `num_blocks` full blocks, and under a causal mask maybe their own.

    `rows` ascend. All have `q_len` tokens, all their kept blocks together `k_len`: only the last block of a
    sequence may be shorter, and rows that keep it, or are it, form groups of their own.
    """

    rows: Tensor  # (rows,) int64
    first: Tensor  # (rows,) int64: where the columns of the row begin
    num_blocks: int
    q_len: int
    k_len: int
    has_diagonal: bool


@dataclass(frozen=True)
class Tile:
    """`rows` of one layout meet key blocks `columns` (rows, blocks); `k_len` tokens of a row's are there."""

    columns: Tensor
    k_len: int
    is_causal: bool


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
        tensors = (x for layout in self.groups for group in layout for x in (group.rows, group.first))
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
    groups = []
    for layout in range(len(pattern)):
        here = slice(layout * rows, (layout + 1) * rows)
        order = torch.argsort(kind[here], stable=True)
        kinds, lengths = torch.unique_consecutive(kind[here][order], return_counts=True)
        members = torch.split(order, lengths.tolist())
        groups.append(
            tuple(
                RowGroup(
                    rows=which,
                    first=first[here][which],
                    num_blocks=code // 8,
                    q_len=tail if code & 1 else size,
                    k_len=code // 8 * size - (size - tail if code & 2 else 0),
                    has_diagonal=bool(code & 4),
                )
                for code, which in zip(kinds.tolist(), members, strict=True)
            )
        )
    return BlockPlan(pattern, tuple(groups))


class _Cutter:
    """Cuts the row groups of a plan into panels."""

    def __init__(
        self, plan: BlockPlan, shape: Shape, itemsize: int, workspace_bytes: int, direction: Pass
    ) -> None:
        self.plan, self.shape = plan, shape
        self.budget = workspace_bytes
        # Of a block of keys: they and their values; of queries: they and their outputs; twice with gradients.
        tensors = 2 if direction == "forward" else 4
        self.block_bytes = tensors * plan.pattern.block_size * shape.d * itemsize
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
        blocks = min(group.num_blocks, self.most_blocks) + self.group
        fit = max(1, self.budget // (self.block_bytes * blocks * num_kv))
        total = group.rows.numel()
        fit = -(-total // -(-total // fit))  # even parts
        yield from (slice(i, min(i + fit, total)) for i in range(0, total, fit))

    def _panel(self, group: RowGroup, part: slice, place: tuple[int, int, int, int, int]) -> Panel:
        index, batch, head, kv, num_kv = place
        rows, first = group.rows[part], group.first[part]
        size = self.plan.pattern.block_size
        tiles = []
        if group.has_diagonal:
            tiles.append(Tile(rows[:, None], group.q_len, is_causal=True))
        for start in range(0, group.num_blocks, self.most_blocks):
            end = min(start + self.most_blocks, group.num_blocks)
            columns = self.plan.pattern.columns[first[:, None] + torch.arange(start, end)].long()
            tiles.append(Tile(columns, min(group.k_len, end * size) - start * size, is_causal=False))
        return Panel(
            index, batch, head, self.group, kv, num_kv, _runs(rows), rows.numel(), group.q_len, tuple(tiles)
        )


def _runs(rows: Tensor) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as (first, number) of consecutive ones."""
    count, first = rows.numel(), int(rows[0])
    if int(rows[-1]) - first == count - 1:
        return ((first, count),)
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), count]
    return tuple((int(rows[a]), b - a) for a, b in pairwise(bounds))
