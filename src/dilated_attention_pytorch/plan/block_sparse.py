"""WHICH rows meet in block-sparse attention: a pattern becomes jobs of row blocks and those they keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .block_pattern import BlockPattern
from .runs import (
    COLUMN,
    Pass,
    Plan,
    Range,
    Shape,
    Table,
    cut_regions,
    even_parts,
    every_batch,
    make_jobs,
    make_plan,
    of_key_heads,
)

JOINED_BELOW = 64  # tokens a block: a kernel is slower with so few query rows
JOINED_ROWS = 512  # tokens of the rows that are joined
LEAST_SHARE = 0.5  # of its blocks that a row must share with its neighbours for that
BYTES_A_THREAD = 4 * 2**20  # gathered keys and values of about this size stay in a core's share of the cache


class Meeting(NamedTuple):
    """Row blocks, `join` neighbours of a layout together, with equally many key blocks."""

    layout: Tensor  # (rows,)
    row: Tensor  # (rows,) the first of the joined ones
    columns: Tensor  # (rows, blocks) int32, those with a tile last
    tiles: Tensor | None  # (rows, blocks) int32
    has_diagonal: bool  # the rows also meet their own block, up to the diagonal
    stage: int = 0
    join: int = 1


def plan_blocks(
    pattern: BlockPattern,
    shape: Shape,
    *,
    itemsize: int,
    direction: Pass = "forward",
    workspace_bytes: int,
    queries: Range | None = None,
    keys: Range | None = None,
    kv: Range | None = None,
    kv_heads: int | None = None,
    joins: bool = True,
) -> Plan:
    """The jobs of a pattern: a block of rows with the blocks that it keeps, its own one last if causal.

    Of a part of it: queries and keys in windows [from, to) of positions, the same or disjoint ones, which may
    cut blocks. Times count from the first query. Where sums need scratch of their own size (those of key and
    value gradients; float32 sums of half precision) the output is cut into regions, for which they fit
    `workspace_bytes`, but at least one key head. With `kv_heads`, each region is so many key heads; with
    `kv`, (first, number) of the key heads, there is one. `joins`: small blocks of neighbouring rows meet what
    they have in common together, for kernels that are slow with few query rows.
    """
    queries = (0, pattern.n) if queries is None else queries
    keys = queries if keys is None else keys
    assert pattern.tile_of is None or queries == keys == (0, pattern.n)
    met = torch.zeros(len(pattern), max(1, pattern.rows), dtype=torch.bool)
    tables, tiles, stages = [], [], 1
    for meeting in _meetings(pattern, queries, keys, joins):
        rows = (meeting.row[:, None] + torch.arange(meeting.join)).flatten()
        met[meeting.layout.repeat_interleave(meeting.join), rows] = True
        stages = max(stages, meeting.stage + 1)
        jobs, runs = _jobs(pattern, shape, meeting, queries, keys)
        if meeting.tiles is not None:
            numbers = torch.nn.functional.pad(meeting.tiles, (0, int(meeting.has_diagonal)), value=-1)
            tiles.append(numbers.flatten().long())
        tables.append((jobs if kv is None else of_key_heads(jobs, kv), runs))
    first, end = blocks_of(queries, pattern.block_size)
    # Blocks, or joined ones, begin at multiples of their size only if the window does.
    can_cut = queries[0] == 0 and direction == "forward" and stages > 1
    grid = [(0, shape.b)], [kv or (0, shape.h_kv)], [0, shape.n]
    if kv_heads is not None and kv is None:
        grid = grid[0], even_parts(shape.h_kv, kv_heads), grid[2]
    elif kv is None and (direction == "backward" or (itemsize < 4 and can_cut)):
        grid = _grid(pattern.block_size, shape, itemsize, direction, workspace_bytes, can_cut)
    regions = cut_regions(tables, *grid)
    budget = workspace_bytes * (2 if direction == "forward" else 1)  # the other half is for gradients
    covers = bool(met[:, first:end].all())
    unit = (pattern.block_size, queries[0])
    facts: dict[str, Any] = {"unit": unit, "covers_queries": covers, "budget": budget}
    if tiles:
        facts |= {"tiles": pattern.tiles, "run_tiles": torch.cat(tiles)}
    return make_plan(tables, shape, regions, **facts)


def blocks_of(window: Range, size: int) -> Range:
    """The blocks [from, to) that a window touches."""
    return (window[0] // size, -(-window[1] // size)) if window[1] > window[0] else (0, 0)


def _meetings(pattern: BlockPattern, queries: Range, keys: Range, joins: bool) -> Iterator[Meeting]:
    """Rows of all layouts that keep equally many blocks; those with a block that a window cuts apart."""
    size = pattern.block_size
    (first_row, end_row), (first_column, end_column) = blocks_of(queries, size), blocks_of(keys, size)
    ids = torch.repeat_interleave(torch.arange(len(pattern) * pattern.rows), pattern.starts.diff())
    row, columns, tile_of = ids % pattern.rows, pattern.columns, pattern.tile_of
    if (first_row, end_row, first_column, end_column) != (0, pattern.rows, 0, pattern.rows):
        inside = (row >= first_row) & (row < end_row) & (columns >= first_column) & (columns < end_column)
        ids, columns = ids[inside], columns[inside]
    if not ids.numel():
        return
    ids, counts = torch.unique_consecutive(ids, return_counts=True)
    starts, rows = counts.cumsum(0) - counts, ids % pattern.rows
    first, last = columns[starts].long(), columns[starts + counts - 1].long()
    # Columns rise: the block of a causal row itself is the last one.
    has_diagonal = (last == rows) & (pattern.is_causal and queries == keys)
    num_tiled = torch.zeros_like(counts)
    if tile_of is not None:
        has_diagonal &= tile_of[starts + counts - 1] < 0
        # Blocks with a tile behind the others, but before the diagonal.
        owner = torch.arange(len(ids)).repeat_interleave(counts)
        num_tiled.index_add_(0, owner, (tile_of >= 0).long())
        place = owner * 3 + (tile_of >= 0)
        place[(starts + counts - 1)[has_diagonal]] += 2
        order = torch.argsort(place, stable=True)
        columns, tile_of = columns[order], tile_of[order]
    is_cut = _length(rows, queries, size) < size
    is_cut |= (_length(first, keys, size) < size) | (_length(last, keys, size) < size)
    kind = ((num_tiled * (pattern.rows + 1) + counts) * 2 + has_diagonal) * 2 + is_cut
    order = torch.argsort(kind, stable=True)
    kinds, lengths = torch.unique_consecutive(kind[order], return_counts=True)
    for code, which in zip(kinds.tolist(), torch.split(order, lengths.tolist()), strict=True):
        diagonal, count = code // 2 % 2, code // 4 % (pattern.rows + 1)
        kept = starts[which][:, None] + torch.arange(count - diagonal)
        tiles = None if tile_of is None else tile_of[kept]
        meeting = Meeting(ids[which] // pattern.rows, rows[which], columns[kept], tiles, bool(diagonal))
        yield from _join(meeting, size) if joins and tiles is None and not code % 2 else [meeting]


def _length(rows: Tensor, window: Range, size: int) -> Tensor:
    return ((rows + 1) * size).clamp(max=window[1]) - (rows * size).clamp(min=window[0])


def _join(meeting: Meeting, size: int) -> list[Meeting]:
    """Neighbours whose blocks are small and mostly the same meet what they share as one larger block."""
    join, num = JOINED_ROWS // size, meeting.columns.shape[1]
    if size >= JOINED_BELOW or join < 2 or num < 2:
        return [meeting]
    # Candidates are aligned: rows [i * join, (i + 1) * join) that are all of this kind.
    _, count = torch.unique_consecutive(meeting.layout * 2**40 + meeting.row // join, return_counts=True)
    is_whole = torch.repeat_interleave(count == join, count)
    columns = meeting.columns[is_whole].view(-1, join * num)
    if not columns.numel():
        return [meeting]
    # Columns of a row differ, so that one that all rows share stands `join` times in the sorted line.
    line = columns.sort(1).values.contiguous()
    last, before = (torch.searchsorted(line, columns, right=right) for right in (True, False))
    is_shared = (last - before == join).view(-1, num)
    num_shared = is_shared[::join].sum(1)
    pays = num_shared >= LEAST_SHARE * num
    shared_first = torch.argsort((~is_shared).to(torch.int8), dim=1, stable=True)
    ordered = meeting.columns[is_whole].gather(1, shared_first).view(-1, join, num)
    rows, layouts = (x[is_whole].view(-1, join) for x in (meeting.row, meeting.layout))
    alone = torch.ones_like(meeting.row, dtype=torch.bool)
    alone[is_whole.nonzero().flatten().view(-1, join)[pays].flatten()] = False
    found = []
    if bool(alone.any()):
        kept = meeting.layout[alone], meeting.row[alone], meeting.columns[alone]
        found.append(Meeting(*kept, None, meeting.has_diagonal))
    for shared in torch.unique(num_shared[pays]).tolist():
        these = pays & (num_shared == shared)
        own = ordered[these]
        found.append(Meeting(layouts[these, 0], rows[these, 0], own[:, 0, :shared], None, False, 0, join))
        if shared < num or meeting.has_diagonal:
            rest = layouts[these].flatten(), rows[these].flatten(), own.flatten(0, 1)[:, shared:]
            found.append(Meeting(*rest, None, meeting.has_diagonal, 1))
    return found


def _jobs(pattern: BlockPattern, shape: Shape, meeting: Meeting, queries: Range, keys: Range) -> Table:
    """A table of jobs and one of runs, for all heads and batches that the layouts serve."""
    size, columns = pattern.block_size, meeting.columns.long()
    first, last = meeting.row * size, (meeting.row + meeting.join) * size
    begin = first.clamp(min=queries[0])
    if meeting.has_diagonal:
        columns = torch.cat([columns, meeting.row[:, None]], 1)
    num, columns = columns.shape[1], columns.flatten()
    low = (columns * size).clamp(min=keys[0])
    count = ((columns + 1) * size).clamp(max=keys[1]) - low
    runs = torch.stack([low - queries[0], torch.ones_like(low), count, torch.ones_like(low)], 1)
    opens = int(meeting.stage == 0 and queries == keys)
    group, head = shape.h // shape.h_kv, meeting.layout % shape.h
    jobs = make_jobs(
        len(meeting.row),
        stage=meeting.stage,
        batch=meeting.layout // shape.h,
        head=head,
        heads=1,
        head_step=1,
        kv=head // group,
        start=begin - queries[0],
        step=1,
        count=last.clamp(max=queries[1]) - begin,
        first_run=torch.arange(len(meeting.row)) * num,
        num_runs=num,
        causal=int(meeting.has_diagonal),
        opens_branch=opens,
        opens_queries=opens,
    )
    if len(pattern) == 1:  # for all heads
        kv = torch.arange(shape.h_kv).repeat_interleave(len(jobs))
        jobs = jobs.repeat(shape.h_kv, 1)
        jobs[:, COLUMN["kv"]], jobs[:, COLUMN["head"]], jobs[:, COLUMN["heads"]] = kv, kv * group, group
    return (every_batch(jobs, shape.b) if len(pattern) in (1, shape.h) else jobs), runs


def _grid(
    size: int, shape: Shape, itemsize: int, direction: Pass, workspace_bytes: int, can_cut: bool
) -> tuple[list[Range], list[Range], list[int]]:
    """Batches, key heads and times of regions: what float32 sums leave room for, backward by key heads."""
    b, n, h, h_kv, d = shape
    a_head, rows = (2 if direction == "backward" else h // h_kv) * d * max(4, itemsize), n
    if can_cut:
        aligned = max(1, JOINED_ROWS // size) * size
        rows = min(n, max(1, workspace_bytes // (2 * a_head * aligned)) * aligned)
    kv_fit = max(1, min(h_kv, workspace_bytes // (a_head * max(1, rows))))
    return even_parts(b, 1), even_parts(h_kv, kv_fit), [*range(0, n, rows), n]
