"""Which jobs of a plan run together: those of one shape, or nearly one, as many as fit the budget."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.runs import COLUMN, Plan, Region, bytes_a_row, even_size
from .rows import Axis, Blocks, Box, Rows, Step, fold, kept, split_box

MAX_JOBS = 65535  # CUDA launches fail beyond this many batches
SHORT = 512  # rows of a job up to which jobs of nearly one length are padded to a common one
MANY_SHAPES = 16  # from which on that is considered
LEAST_GAIN = 2  # times fewer shapes that it must leave
MOST_CALLS = 16  # of an op that reads strides, in place of one with packed rows
MOST_PAIRS = 2**21  # of queries and keys whose tiles are laid out at a time
FEW_BOXES = 8  # jobs a box from which on strided views are better than numbers


class Keys(NamedTuple):
    """Keys (jobs, 1, rows) that an op attends at a time; causal ones are at the queries' own positions."""

    rows: Rows
    is_causal: bool
    is_tiled: bool = False  # the tiles of the rows' blocks say which of them a query sees


class Batch(NamedTuple):
    """Jobs of one shape that are attended together: queries (jobs, heads, rows) with their keys."""

    queries: Rows
    keys: tuple[Keys, ...]
    branch: int
    phantom: int
    opens_branch: bool  # no earlier job of the branch met these query rows
    opens_queries: bool  # nor of any other branch
    opens_keys: bool


@kept
def batches_of(plan: Plan, itemsize: int, strided: bool = False) -> list[tuple[Region, list[Batch]]]:
    """The jobs of each region, in batches whose packed rows fit the plan's budget; kept with the plan.

    `strided`: cut and arranged so that rows need no packing, where few more batches do that.
    """
    found: list[list[Batch]] = [[] for _ in plan.regions]
    for region, batch in _batches(plan, plan.budget // bytes_a_row(plan.shape.d, itemsize)):
        found[region] += _by_heads(batch) if strided else [batch]
    return list(zip(plan.regions, found, strict=True))


def _by_heads(batch: Batch) -> list[Batch]:
    """The same jobs with many heads each, evenly spaced; what is left to count jobs is batches and times."""
    (keys, is_causal, _), *more = batch.keys
    queries, (heads, rows) = batch.queries, batch.queries.inner
    of_heads = [i for i, (_, step) in enumerate(queries.axes) if step[2]]
    fits = [i for i in of_heads if heads[0] == 1 or queries.axes[i][1] == (0, 0, heads[0] * heads[1][2])]
    if more or not fits or queries.firsts is not None or keys.firsts is not None:
        return [batch]
    best = max(fits, key=lambda i: queries.axes[i][0])
    others = [i for i in of_heads if i != best]
    if prod(queries.axes[i][0] for i in others) > MOST_CALLS:
        return [batch]
    size, step = queries.axes[best]
    inner = ((size * heads[0], step if heads[0] == 1 else heads[1]), rows)
    key_inner = keys.axes[best], keys.inner[1]
    kept = [i for i in range(len(queries.axes)) if i not in of_heads]
    found = []
    for place in itertools.product(*(range(queries.axes[i][0]) for i in others)):
        arranged = [
            Rows(_moved(x, others, place), tuple(x.axes[i] for i in kept), each)
            for x, each in ((queries, inner), (keys, key_inner))
        ]
        found.append(batch._replace(queries=arranged[0], keys=(Keys(arranged[1], is_causal),)))
    return found


def _moved(rows: Rows, axes: list[int], place: tuple[int, ...]) -> Step:
    """Where rows begin, so many jobs further along some axes."""
    steps = [(number, rows.axes[i][1]) for i, number in zip(axes, place, strict=True)]
    first = [x + sum(number * step[i] for number, step in steps) for i, x in enumerate(rows.first)]
    return first[0], first[1], first[2]


_SHAPE = (
    *("region", "stage", "branch", "heads", "head_step", "step", "count", "causal", "phantom"),
    *("opens_branch", "opens_queries", "opens_keys"),
)
_LENGTHS = [_SHAPE.index("count"), len(_SHAPE)]  # of queries and of keys


def _padded(lengths: Tensor) -> Tensor:
    """Rounded up to few different lengths, by at most a quarter from 16 on."""
    step = torch.exp2((lengths.double().log2().floor() - 2).clamp_min(2)).long()
    return -(-lengths // step) * step


def _batches(plan: Plan, budget: int) -> Iterator[tuple[int, Batch]]:
    if not len(plan):
        return
    jobs, size = plan.jobs, plan.unit[0]
    first, num = jobs[:, COLUMN["first_run"]], jobs[:, COLUMN["num_runs"]]
    # What the keys of a batch have in common: their step, or the number of their blocks and where they begin.
    common = [plan.runs[first, 1]]
    if size:
        common = [num, *((plan.runs[run, 0] + plan.unit[1]) % size for run in (first, first + num - 1))]
        tiles = torch.zeros_like(plan.runs[:, 2]) if plan.run_tiles is None else (plan.run_tiles >= 0).long()
        common += [plan.sum_runs(tiles), plan.sum_runs(tiles * plan.runs[:, 2])]
    shapes = torch.stack([*(jobs[:, COLUMN[name]] for name in _SHAPE), plan.key_counts, *common], 1)
    kinds, which, sizes = torch.unique(shapes, dim=0, return_inverse=True, return_counts=True)
    if not size and len(kinds) > MANY_SHAPES:
        lengths = shapes[:, _LENGTHS]
        is_short = (lengths <= SHORT).all(1, keepdim=True)
        shapes[:, _LENGTHS] = torch.where(is_short, _padded(lengths), lengths)
        padded = torch.unique(shapes, dim=0, return_inverse=True, return_counts=True)
        if LEAST_GAIN * len(padded[0]) < len(kinds):
            kinds, which, sizes = padded
    members = torch.split(torch.argsort(which, stable=True), sizes.tolist())
    for kind, those in zip(kinds.tolist(), members, strict=True):
        region, _, branch, heads, head_step, step, count, causal, phantom, *opens = kind[: len(_SHAPE)]
        inner = ((heads, (0, 0, head_step)), (count, (0, step, 0)))
        rows = _block_rows if size else _run_rows
        for queries, keys in rows(plan, those, budget, inner, bool(causal), *kind[len(_SHAPE) :]):
            yield region, Batch(queries, keys, branch, phantom, *map(bool, opens))


Axes = tuple[Axis, ...]
Found = Iterator[tuple[Rows, tuple[Keys, ...]]]


def _run_rows(
    plan: Plan, those: Tensor, budget: int, inner: Axes, is_causal: bool, num_keys: int, key_step: int
) -> Found:
    """Where the queries and keys of jobs with one run of keys each lie, at most `budget` rows together."""
    jobs = plan.jobs[those]
    fit = max(1, min(MAX_JOBS, budget // (inner[0][0] * inner[1][0] + num_keys)))
    key_inner = ((1, (0, 0, 0)), (num_keys, (0, key_step, 0)))
    names = ("batch", "start", "head", "kv")
    first_key = plan.runs[jobs[:, COLUMN["first_run"]], :1]
    places = torch.cat([jobs[:, [COLUMN[name] for name in names]], first_key], 1)
    counts, key_counts = jobs[:, COLUMN["count"]], plan.key_counts[those]
    is_padded = bool((counts < inner[1][0]).any() | (key_counts < num_keys).any())
    boxes = [] if is_padded else list(fold(places))
    if is_padded or (len(boxes) >= FEW_BOXES and len(boxes) * FEW_BOXES > len(places)):
        parts = (torch.split(x, even_size(len(places), fit)) for x in (places, counts, key_counts))
        for part, count, key_count in zip(*parts, strict=True):
            own = (count, key_count) if is_padded else (None, None)
            queries = Rows((0, 0, 0), (), inner, part[:, :3], counts=own[0])
            keys = Rows((0, 0, 0), (), key_inner, part[:, [0, 4, 3]], counts=own[1])
            yield queries, (Keys(keys, is_causal),)
        return
    for whole in boxes:
        for box in split_box(whole, fit):
            yield _even(box, (0, 1, 2), inner), (Keys(_even(box, (0, 4, 3), key_inner), is_causal),)


def _even(box: Box, columns: tuple[int, int, int], inner: Axes) -> Rows:
    """Of the jobs of a box; its columns of batch, time and head."""
    a, b, c = columns
    axes = tuple((size, (step[a], step[b], step[c])) for size, step in box.axes)
    return Rows((box.values[a], box.values[b], box.values[c]), axes, inner)


def _block_rows(
    plan: Plan, those: Tensor, budget: int, inner: Axes, is_causal: bool, num_keys: int, *blocks: int
) -> Found:
    """The same for jobs with blocks of keys, which are attended as many at a time as fit."""
    num, skip, last_skip, num_tiled, tiled = blocks
    size, (heads, _), (count, _) = plan.unit[0], *inner
    own = count if is_causal else 0
    full, num = num_keys - own - tiled, num - is_causal - num_tiled
    most = max(1, min(max(num, num_tiled), (budget - heads * count) // size))
    most_tiled = max(1, min(most, num_tiled, MOST_PAIRS // (count * size)))
    fit = max(1, min(MAX_JOBS, budget // (heads * count + max(own, min(max(full, tiled), most * size)))))
    fit = min(fit, max(1, MOST_PAIRS // (count * size * most_tiled))) if num_tiled else fit
    for part in torch.split(those, even_size(len(those), fit)):
        jobs = plan.jobs[part]
        firsts = jobs[:, [COLUMN[name] for name in ("batch", "start", "head")]]
        box = next(fold(firsts))
        is_even = box.size == len(part)
        queries = _even(box, (0, 1, 2), inner) if is_even else Rows((0, 0, 0), (), inner, firsts)
        places = jobs[:, [COLUMN[name] for name in ("batch", "start", "kv")]]
        places[:, 1] = 0  # blocks count time from 0
        pieces = [(num + num_tiled, 1, last_skip, own, True, False)] if is_causal else []
        for first in range(0, num, most):
            skipped, here = skip if first == 0 else 0, min(most, num - first)
            rows = min(full + skip - first * size, here * size) - skipped
            pieces.append((first, here, skipped, rows, False, False))
        for first in range(0, num_tiled, most_tiled):
            here = min(most_tiled, num_tiled - first)
            pieces.append((num + first, here, 0, min(tiled - first * size, here * size), False, True))
        keys, first_run = [], jobs[:, COLUMN["first_run"]]
        for first, here, skipped, rows, causal, has_tiles in pieces:
            kept = Blocks.of(plan, first_run + first, here, skipped)
            key_inner = ((1, (0, 0, 0)), (rows, (0, 1, 0)))
            keys.append(Keys(Rows((0, 0, 0), (), key_inner, places, kept), causal, has_tiles))
        yield queries, tuple(keys)
