"""From a config and a length to a `BlockPattern`, in time and memory that grow with the kept blocks.

A type of pattern is a rule that offers columns to each row in order of preference. A row keeps the first
of them, each once, until its budget is used up. Columns are offered as places: twice the distance from the
row, and one more if they are behind it, so that smaller is nearer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..spec import SparsePatternConfig
from .block_pattern import BlockPattern, count_blocks

_CHUNK = 2**20  # candidates looked at together
_NONE = 2**40  # the place of no column


class Budget(NamedTuple):
    """How many blocks a row keeps: all for the first `num_global` rows, `per_row` at most for the others."""

    per_row: int
    num_global: int


class _Case(NamedTuple):
    """What the rules know."""

    config: SparsePatternConfig
    budget: Budget
    rows: int
    is_causal: bool
    branches: Sequence[tuple[int, int]]
    rng: torch.Generator


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
    rng = torch.Generator().manual_seed(config.seed)
    case = _Case(config, budget, rows, is_causal, branches, rng)
    layouts, candidates = 1, budget.per_row * (3 + len(branches) + len(config.levels))
    if config.pattern_type == "random":
        layouts, candidates = num_heads, max(rows, candidates)
    row = torch.arange(rows).repeat(layouts)
    kept = torch.cat([_keep(case, part) for part in torch.split(row, max(1, _CHUNK // candidates))])
    return _assemble(config, n, budget, kept.view(layouts, rows, -1), is_causal)


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


def _keep(case: _Case, row: Tensor) -> Tensor:
    """(given rows, per_row) columns that rows keep, ascending, in int32; `case.rows` where there is none."""
    offered = torch.cat(list(_offers(case, row)), 1)
    place, turn = offered.sort(dim=1, stable=True)
    is_repeated = torch.zeros_like(place, dtype=torch.bool)
    is_repeated[:, 1:] = place[:, 1:] == place[:, :-1]
    turn = turn.masked_fill_(is_repeated | (place == _NONE), offered.shape[1])
    turn = turn.topk(case.budget.per_row, 1, largest=False, sorted=False).values
    place = pad(offered, (0, 1), value=_NONE).gather(1, turn)
    column = row[:, None] + torch.where(place % 2 == 1, place // 2, -(place // 2))
    return column.masked_fill_(place == _NONE, case.rows).sort(1).values.int()


def _offers(case: _Case, row: Tensor) -> Iterator[Tensor]:
    """(given rows, candidates) places, the preferred ones first."""
    config, (per_row, num_global), kind = case.config, case.budget, case.config.pattern_type
    first = torch.zeros_like(row)
    last = row if case.is_causal else torch.full_like(row, case.rows - 1)
    own = first[:, None]
    yield own
    if num_global:
        yield _nearest(row, first, last.clamp_max(num_global - 1), num_global)
    if config.window_size is not None:
        before, after = _window(config, case.is_causal)
        yield _nearest(row, (row - before).clamp_min(0), torch.minimum(row + after, last), per_row)
    match kind:
        case "local_window" | "global_local" if config.window_size is not None:
            return
        case "dilated_sparse":
            reached = [own]
            for length, rate in case.branches:
                width = max(1, length // config.block_size)
                start = row // width * width
                end = torch.minimum(start + width - 1, last)
                reached.append(_nearest(row, start, end, per_row, step=rate))
            yield torch.cat(reached, 1).sort(1).values
        case "strided":
            yield _nearest(row, first, last, per_row, step=-(-case.rows // per_row))
        case "hierarchical":
            for stride, share in config.levels:
                # The last block of each group: under a causal mask it has seen the group.
                step, most = min(stride, case.rows + 1), min(per_row, math.ceil(share * per_row))
                yield _nearest(row, first, last, most, first + step - 1, step)
        case "random":
            yield _draw(case, row, last)
            return
    yield _nearest(row, first, last, per_row)


def _nearest(
    row: Tensor, low: Tensor, high: Tensor, most: int, phase: Tensor | None = None, step: int = 1
) -> Tensor:
    """(rows, most) places of every `step`-th column within [low, high], counted from `phase` or the row."""
    start = torch.clamp(row, low, high)  # the columns may end before the row, as global ones do
    start = start - (start - (row if phase is None else phase)) % step
    column = start[:, None] + step * torch.arange(-most, most + 1)
    return _places(row, column, low, high).topk(most, 1, largest=False).values


def _draw(case: _Case, row: Tensor, last: Tensor) -> Tensor:
    """(rows, candidates) places of columns up to `last` at random, enough for the budget."""
    num, choices = case.budget.per_row, last[:, None] + 1
    if 4 * num > int(choices.min()):  # all of them in random order
        size = (len(row), int(choices.max()))
        column = torch.rand(size, generator=case.rng, dtype=torch.float32).argsort(1)
    else:  # with repetition: fewer than `num` of these differ once in 10**14 rows
        size = (len(row), 2 * num + 16)
        column = (torch.rand(size, generator=case.rng, dtype=torch.float64) * choices).long()
    return _places(row, column, torch.zeros_like(row), last)


def _places(row: Tensor, column: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Those of columns (rows, candidates) within [low, high]."""
    ahead = column - row[:, None]
    is_outside = (column < low[:, None]) | (column > high[:, None])
    return (2 * ahead.abs() + (ahead > 0)).masked_fill_(is_outside, _NONE)


def _window(config: SparsePatternConfig, is_causal: bool) -> tuple[int, int]:
    """Blocks before and after a row's own in its window; under a causal mask all before."""
    others = 0 if config.window_size is None else config.window_size // config.block_size - 1
    before = others if is_causal else (others + 1) // 2
    return before, others - before


def _assemble(
    config: SparsePatternConfig, n: int, budget: Budget, kept: Tensor, is_causal: bool
) -> BlockPattern:
    """From columns (layouts, rows, per_row) as `_keep` gives them; global rows keep everything there is."""
    layouts, rows, _ = kept.shape
    num_dense = 0 if is_causal else budget.num_global
    counts = (kept < rows).sum(-1)
    counts[:, :num_dense] = rows
    dense = torch.arange(rows, dtype=torch.int32, device="cpu").repeat(layouts, num_dense)
    columns = torch.cat([dense, kept[:, num_dense:].flatten(1)], 1)
    columns = columns[columns < rows]
    return BlockPattern.from_counts(n, config.block_size, counts.flatten(), columns, is_causal)


def choose_blocks(
    row: Tensor,
    column: Tensor,
    n: int,
    config: SparsePatternConfig,
    is_causal: bool,
    key_mask: Tensor | None,
    noise: float = 0.0,
) -> BlockPattern:
    """The "adaptive" pattern: of each row the blocks of the highest score, its own and global ones always.

    Features (b, h, blocks, f) of queries and (b, h_kv, blocks, f) of keys give the scores, their products.
    Of blocks without a key that `key_mask` (b, n) shows only a row's own is kept. `noise` adds Gumbel noise
    of that temperature, so that others get a try.
    """
    b, h, rows, _ = row.shape
    if not b:  # an empty batch: nobody will ask for more than a pattern
        row, column = (x.new_zeros(1, *x.shape[1:]) for x in (row, column))
        return choose_blocks(row, column, n, config, is_causal, None)
    query, key = row.flatten(0, 1), column.repeat_interleave(h // column.shape[1], 1).flatten(0, 1)
    seen = torch.ones(b, rows, dtype=torch.bool, device=row.device)
    if key_mask is not None:
        seen = pad(key_mask, (0, rows * config.block_size - n)).view(b, rows, -1).any(-1)
    seen = seen.repeat_interleave(h, 0)[:, None]
    budget = make_budget(config, rows, is_causal)
    before, after = _window(config, is_causal)
    index = torch.arange(rows, device=row.device)
    kept = []
    with torch.no_grad():
        for part in torch.split(index, max(1, _CHUNK // (b * h * rows))):
            score = (query[:, part] @ key.transpose(1, 2)).float()
            if noise:
                score = score - noise * torch.empty_like(score).exponential_().log()
            ahead = index - part[:, None]
            score = score.nan_to_num().clamp(-1e30, 1e30)
            score = score.masked_fill((ahead >= -before) & (ahead <= after), 1e31)
            score = score.masked_fill(index < budget.num_global, 2e31)
            score = score.masked_fill(~seen, -math.inf).masked_fill(ahead == 0, math.inf)
            if is_causal:
                score = score.masked_fill(ahead > 0, -math.inf)
            best = score.topk(budget.per_row)
            chosen = best.indices.masked_fill(best.values == -math.inf, rows)
            kept.append(chosen.sort(-1).values.int().cpu())
    return _assemble(config, n, budget, torch.cat(kept, 1), is_causal)
