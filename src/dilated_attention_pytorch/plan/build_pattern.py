"""From a config and a length to a `BlockPattern`, in time and memory that grow with the kept blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import SparsePatternConfig
from .block_pattern import BlockPattern, count_blocks

_CHUNK = 2**20  # candidates looked at together
_ALWAYS, _GLOBAL, _WINDOW, _OWN = range(4)  # ranks: lower ones are kept first; levels go on from _OWN
_FILL = 99
_ABSENT = 1000  # times the number of rows: the rank of what does not exist


class Budget(NamedTuple):
    """How many blocks a row keeps: all for the first `num_global` rows, `per_row` at most for the others."""

    per_row: int
    num_global: int


class _Source(NamedTuple):
    """Columns that a row may keep: every `step`-th within [low, high], nearest to the row first.

    `phase` (rows,) is a column of the grid; low and high (rows,) are inclusive; `limit` is the most that the
    source gives. Within a rank the nearest are kept first, whatever their source.
    """

    rank: int
    phase: Tensor
    step: int
    low: Tensor
    high: Tensor
    limit: int


def build_pattern(
    config: SparsePatternConfig,
    n: int,
    num_heads: int,
    *,
    is_causal: bool = False,
    branches: Sequence[tuple[int, int]] = (),
) -> BlockPattern:
    """The pattern of any type but "adaptive"; `branches` (segment length, rate) are for "dilated_sparse"."""
    rows = count_blocks(n, config.block_size)
    budget = make_budget(config, rows, is_causal)
    if config.pattern_type == "random":
        counts, columns = _random(config, budget, rows, num_heads, is_causal, branches)
    else:
        counts, columns = _nearest_first(config, budget, torch.arange(rows), rows, is_causal, branches)
    return BlockPattern.from_counts(n, config.block_size, counts, columns, is_causal)


def make_budget(config: SparsePatternConfig, rows: int, is_causal: bool) -> Budget:
    """Kept blocks a row, so that the whole pattern has the density that was asked, within a block a row."""
    share = config.sparsity_ratio * rows
    if config.global_tokens is not None:
        num_global = count_blocks(config.global_tokens, config.block_size)
    else:
        num_global = max(1, int(share / 4)) if config.pattern_type == "global_local" else 0
    if is_causal:
        # Rows reach back `per_row` blocks or to the start: r k - k (k - 1) / 2 blocks in all.
        asked = config.sparsity_ratio * rows * (rows + 1) / 2
        exact = rows + 0.5 - math.sqrt(max(0.0, (rows + 0.5) ** 2 - 2 * asked))
        per_row = max(1, min(rows, round(exact)))
        return Budget(per_row, min(num_global, per_row // 2))
    # Global rows and columns together take twice their number, and a row keeps its own block beside them.
    num_global = min(num_global, max(0, int((share - 1) / 2)))
    exact = (share - num_global) * rows / max(1, rows - num_global)
    return Budget(max(1, min(rows, round(exact))), num_global)


def _nearest_first(
    config: SparsePatternConfig,
    budget: Budget,
    row: Tensor,
    rows: int,
    is_causal: bool,
    branches: Sequence[tuple[int, int]],
) -> tuple[Tensor, Tensor]:
    """(counts, columns) of the given rows: of what the sources offer, the first in rank and then distance."""
    all_counts, all_columns = [], []
    size = max(1, _CHUNK // (budget.per_row * (3 + len(branches) + len(config.levels))))
    dense_rows = 0 if is_causal else budget.num_global  # under a causal mask they see all there is anyway
    if (row < dense_rows).any():
        dense = int((row < dense_rows).sum())
        all_counts.append(torch.full((dense,), rows))
        all_columns.append(torch.arange(rows).repeat(dense))
        row = row[row >= dense_rows]
    for part in torch.split(row, size):
        ranks, columns = [], []
        for source in _sources(config, budget, part, rows, is_causal, branches):
            column, is_there = _offered(source, part, min(source.limit, budget.per_row))
            distance = 2 * (column - part[:, None]).abs() + (column > part[:, None])
            columns.append(column)
            ranks.append(torch.where(is_there, source.rank * 4 * rows + distance, _ABSENT * rows))
        column, rank = torch.cat(columns, 1), torch.cat(ranks, 1)
        column, rank = _without_repeats(column, rank, rows)
        kept = rank.argsort(1)[:, : budget.per_row]
        column, is_kept = column.gather(1, kept), rank.gather(1, kept) < _ABSENT * rows
        column = column.masked_fill(~is_kept, rows).sort(1).values
        all_counts.append(is_kept.sum(1))
        all_columns.append(column[column < rows])
    return torch.cat(all_counts), torch.cat(all_columns)


def _sources(
    config: SparsePatternConfig,
    budget: Budget,
    row: Tensor,
    rows: int,
    is_causal: bool,
    branches: Sequence[tuple[int, int]],
) -> Iterator[_Source]:
    zero = torch.zeros_like(row)
    end = row if is_causal else zero + (rows - 1)
    low, high = zero, end
    if config.window_size is not None:
        before, after = _window(config, is_causal)
        low, high = (row - before).clamp_min(0), torch.minimum(row + after, end)
    yield _Source(_ALWAYS, row, 1, row, row, 1)
    if budget.num_global:
        yield _Source(_GLOBAL, zero, 1, zero, end.clamp_max(budget.num_global - 1), budget.num_global)
    if config.window_size is not None or config.pattern_type in ("local_window", "global_local"):
        yield _Source(_WINDOW, row, 1, low, high, rows)
    match config.pattern_type:
        case "local_window" | "global_local":
            return
        case "dilated_sparse":
            for length, rate in branches:
                width = max(1, length // config.block_size)
                low = row // width * width
                yield _Source(_OWN, row, rate, low, torch.minimum(low + width - 1, end), rows)
        case "strided":
            yield _Source(_OWN, row, -(-rows // budget.per_row), zero, end, rows)
        case "hierarchical":
            for level, (stride, share) in enumerate(config.levels):
                # The last block of each group: under a causal mask it has seen the group.
                grid = zero + stride - 1
                yield _Source(_OWN + level, grid, stride, zero, end, math.ceil(share * budget.per_row))
    if config.pattern_type != "random":
        yield _Source(_FILL, row, 1, zero, end, rows)


def _window(config: SparsePatternConfig, is_causal: bool) -> tuple[int, int]:
    """Blocks before and after a row's own in its window; under a causal mask all before."""
    others = 0 if config.window_size is None else config.window_size // config.block_size - 1
    before = others if is_causal else (others + 1) // 2
    return before, others - before


def _offered(source: _Source, row: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(rows, most) columns of a source, nearest first, and which of them exist."""
    step, turn = source.step, torch.arange(most)
    left = row - (row - source.phase) % step  # the nearest grid column at or before the row
    num_left = ((left - source.low) // step + 1).clamp_min(0)
    # A source may end before the row, as global columns do.
    beyond = ((left - source.high + step - 1) // step).clamp_min(0)
    right = left + step
    left, num_left = left - beyond * step, (num_left - beyond).clamp_min(0)
    num_right = ((source.high - right) // step + 1).clamp_min(0)
    is_on = left == row
    left, num_left = left - is_on * step, num_left - is_on.long()
    turn = turn - is_on[:, None].long()
    both = 2 * torch.minimum(num_left, num_right)[:, None]
    left_first = (row - left <= right - row)[:, None]
    in_turns = turn < both
    is_left = torch.where(
        in_turns, (turn % 2 == 0) == left_first, (num_left > num_right)[:, None].expand(-1, most)
    )
    index = torch.where(in_turns, turn // 2, turn - both // 2)
    column = torch.where(is_left, left[:, None] - index * step, right[:, None] + index * step)
    is_there = index < torch.where(is_left, num_left[:, None], num_right[:, None])
    own = turn < 0  # the row's own block, if the grid has it, before its turns begin
    return torch.where(own, row[:, None], column).clamp(0), is_there | own


def _without_repeats(column: Tensor, rank: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Of a column that several sources offer only the first in rank stays."""
    # Column and rank in one number, which fits an int64.
    key = (column.clamp_max(rows) * ((_ABSENT + 1) * rows) + rank).sort(1).values
    column, rank = key // ((_ABSENT + 1) * rows), key % ((_ABSENT + 1) * rows)
    repeated = torch.zeros_like(column, dtype=torch.bool)
    repeated[:, 1:] = column[:, 1:] == column[:, :-1]
    return column, rank.masked_fill(repeated, _ABSENT * rows)


def _random(
    config: SparsePatternConfig,
    budget: Budget,
    rows: int,
    num_heads: int,
    is_causal: bool,
    branches: Sequence[tuple[int, int]],
) -> tuple[Tensor, Tensor]:
    """What every row keeps in any case, filled up with columns drawn without repetition."""
    rng = torch.Generator().manual_seed(config.seed)
    counts, columns = _nearest_first(config, budget, torch.arange(rows), rows, is_causal, branches)
    held = torch.repeat_interleave(torch.arange(rows), counts) * rows + columns  # (row, column) in one number
    choices = torch.arange(1, rows + 1) if is_causal else torch.full((rows,), rows)
    wanted = torch.maximum(choices.clamp_max(budget.per_row), counts)
    is_crowded = 2 * wanted > choices  # drawing until all are different would take long there
    crowded, apart = is_crowded.nonzero().flatten(), torch.where(is_crowded, 0, wanted)
    all_counts, all_columns = [], []
    for _ in range(num_heads):  # one after the other, so that only one needs scratch
        keys = _draw_apart(held, apart, choices, rows, rng)
        keys = _draw_ordered(keys, crowded, wanted, choices, rows, rng)
        all_counts.append(torch.bincount(keys // rows, minlength=rows))
        all_columns.append((keys % rows).to(torch.int32))
    return torch.cat(all_counts), torch.cat(all_columns)


def _draw_apart(keys: Tensor, wanted: Tensor, choices: Tensor, rows: int, rng: torch.Generator) -> Tensor:
    """Draws what is missing and draws again what came out twice."""
    while True:
        missing = (wanted - torch.bincount(keys // rows, minlength=wanted.numel())).clamp_min(0)
        total = int(missing.sum())
        if not total:
            return keys
        row = torch.repeat_interleave(torch.arange(wanted.numel()), missing)
        drawn = (torch.rand(total, generator=rng, dtype=torch.float64) * choices[row]).long()
        keys = torch.unique(torch.cat([keys, row * rows + drawn]))


def _draw_ordered(
    keys: Tensor, crowded: Tensor, wanted: Tensor, choices: Tensor, rows: int, rng: torch.Generator
) -> Tensor:
    """For rows that keep more than half: all their columns in random order, what is there already first."""
    chosen = []
    for part in torch.split(crowded, max(1, _CHUNK // rows)):
        order = torch.rand(part.numel(), rows, generator=rng, dtype=torch.float32)
        first, last = torch.searchsorted(keys, torch.stack([part * rows, (part + 1) * rows]))
        held = torch.repeat_interleave(torch.arange(part.numel()), last - first)
        place = torch.arange(held.numel()) - torch.repeat_interleave((last - first).cumsum(0), last - first)
        order[held, keys[place + last[held]] % rows] = -1.0
        order[torch.arange(rows) >= choices[part, None]] = 2.0
        column = order.argsort(1)
        is_chosen = torch.arange(rows) < wanted[part, None]
        chosen.append((part[:, None] * rows + column)[is_chosen])
    return torch.unique(torch.cat([keys, *chosen])) if chosen else keys


def score_pattern(
    query: Tensor,
    key: Tensor,
    n: int,
    config: SparsePatternConfig,
    *,
    is_causal: bool,
    visible: Tensor | None = None,
    noise: float = 0.0,
) -> BlockPattern:
    """The "adaptive" pattern: of each row the blocks of the highest score, its own and global ones always.

    `query` (layouts, rows, features) and `key` (layouts, rows, features) describe the blocks; their products
    are the scores. Of blocks that are not `visible` (batches, rows) only a row's own is kept. `noise` adds
    Gumbel noise of that temperature, so that others get a try.
    """
    layouts, rows, _ = query.shape
    if not layouts:  # an empty batch: nobody will ask for more than a pattern
        ones = torch.ones(rows, dtype=torch.int64, device="cpu")
        return BlockPattern.from_counts(n, config.block_size, ones, ones.cumsum(0) - 1, is_causal)
    budget = make_budget(config, rows, is_causal)
    column = torch.arange(rows, device=query.device)
    counts, columns = [], []
    before, after = _window(config, is_causal)
    for layout in range(layouts):
        for row in torch.split(column, max(1, _CHUNK // rows)):
            score = (query[layout, row] @ key[layout].T).float()
            if noise:
                score = score - noise * torch.empty_like(score).exponential_().log()
            ahead = column - row[:, None]
            near = (ahead >= -before) & (ahead <= after)
            score = score.nan_to_num().clamp(-1e30, 1e30)
            score = score.masked_fill(near, 1e31).masked_fill(column < budget.num_global, 2e31)
            if visible is not None:
                score = score.masked_fill(~visible[layout * len(visible) // layouts], -math.inf)
            score = score.masked_fill(ahead == 0, math.inf)
            if is_causal:
                score = score.masked_fill(ahead > 0, -math.inf)
            best = score.topk(budget.per_row, dim=1)
            kept = best.indices.masked_fill(best.values == -math.inf, rows)
            if not is_causal and budget.num_global:
                everything = column.expand(row.numel(), -1)
                kept = torch.nn.functional.pad(kept, (0, rows - budget.per_row), value=rows)
                kept = torch.where(row[:, None] < budget.num_global, everything, kept)
            kept = kept.sort(1).values.cpu()
            counts.append((kept < rows).sum(1))
            columns.append(kept[kept < rows])
    return BlockPattern.from_counts(n, config.block_size, torch.cat(counts), torch.cat(columns), is_causal)
