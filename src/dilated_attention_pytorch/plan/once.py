"""WHICH rows meet, each key once: all branches of a query in one job, for kernels with an online softmax.

Queries that the same branches select in the same segments see the same keys: those of the shortest segment,
then those of each longer one outside of it. Where branches nest, a key that several of them reach is in one
run, with their number as its multiplicity.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.pattern_cache import PatternCache
from ..spec import DilatedSpec
from .dilated import Shard, branch_segments, serving_heads
from .runs import NO_RUNS, Docs, Plan, Region, Shape, every_batch, find_plan, make_jobs, make_plan

MOST_CLASSES = 64  # residues of positions modulo all rates
LEAST_ROWS = 8  # of a job, on average: shorter ones would waste most of a kernel's vectors


class Cells(NamedTuple):
    """Stretches of positions that no segment cuts, and the segment of each branch around them."""

    start: Tensor  # (cells,)
    length: Tensor
    first: Tensor  # (cells, branches), of the segment
    end: Tensor
    clamped: Tensor  # its length if it were whole


class Units(NamedTuple):
    """The query heads that share a key head and all offsets; -1 where a branch does not serve them."""

    head: Tensor  # (units,)
    heads: Tensor
    head_step: Tensor
    kv: Tensor
    offsets: Tensor  # (units, branches)


def once_pays(spec: DilatedSpec, shape: Shape, docs: Docs = None) -> bool:
    """Whether the jobs of `plan_once` are large enough for it."""
    lengths = {min(w, shape.n) for w in spec.segment_lengths}
    cuts = [w for w in lengths if not any(w % other == 0 for other in lengths - {w})]
    cells = sum(-(-shape.n // w) for w in cuts) + (0 if docs is None else len(docs))
    period = lcm(*spec.dilation_rates)
    return period <= MOST_CLASSES and (cells == 1 or shape.n >= LEAST_ROWS * period * cells)


def plan_once(
    spec: DilatedSpec,
    shape: Shape,
    docs: Docs = None,
    shard: Shard | None = None,
    cache: PatternCache | None = None,
) -> Plan:
    """The jobs of a call, each query in one of them."""
    shard = Shard.whole(shape) if shard is None else shard
    return find_plan(cache, ("once", spec, shape, shard), docs, partial(_build, spec, shape, docs, shard))


def _build(spec: DilatedSpec, shape: Shape, docs: Docs, shard: Shard) -> Plan:
    order = sorted(range(len(spec.branches)), key=lambda i: spec.branches[i])
    rates = [spec.dilation_rates[i] for i in order]
    period = lcm(*rates)
    cells = _cells(spec, order, torch.tensor((0, shape.n) if docs is None else docs))
    units = _units(spec, order, shape, shard)
    residues = torch.arange(period)
    # (cells, units, residues): the branches that select the positions of a residue, as bits
    code = torch.zeros(len(cells.start), len(units.head), period, dtype=torch.int64)
    for i, rate in enumerate(rates):
        place = (cells.start - cells.first[:, i])[:, None, None] + residues
        code += (place % rate == units.offsets[:, i, None]).long() << i
    exists = residues < cells.length[:, None, None]
    covers = bool(((code > 0) | ~exists).all())
    cell, unit, residue = torch.nonzero((code > 0) & exists, as_tuple=True)
    if not len(cell):
        return make_plan([], shape, (Region.whole(shape),))
    classes = torch.stack([cell, unit, code[cell, unit, residue]], 1)
    classes, member = torch.unique(classes, dim=0, return_inverse=True)
    member, residue, step = _joined(member, residue, period, len(classes))
    runs, first_run, num_runs, phantom = _key_runs(spec, cells, units, rates, classes)
    cell, unit = classes[member, 0], classes[member, 1]
    jobs = make_jobs(
        len(cell),
        **{name: getattr(units, name)[unit] for name in ("head", "heads", "head_step", "kv")},
        start=cells.start[cell] + residue,
        step=step,
        count=-((residue - cells.length[cell]) // step),
        first_run=first_run[member],
        num_runs=num_runs[member],
        causal=int(spec.is_causal),
        phantom=phantom[member],
        opens_branch=1,
        opens_queries=1,
    )
    placed = [(every_batch(jobs, shape.b), runs)]
    return make_plan(placed, shape, (Region.whole(shape),), covers_queries=covers)


def _cells(spec: DilatedSpec, order: list[int], bounds: Tensor) -> Cells:
    segments = [branch_segments(spec.segment_lengths[i], bounds) for i in order]
    start = torch.unique(torch.cat([first for first, _, _ in segments]))
    length = torch.cat([start[1:], bounds[-1:]]) - start
    found = []
    for first, size, clamped in segments:
        at = torch.searchsorted(first, start, right=True) - 1
        found.append((first[at], first[at] + size[at], clamped[at]))
    return Cells(start, length, *(torch.stack(each, 1) for each in zip(*found, strict=True)))


def _units(spec: DilatedSpec, order: list[int], shape: Shape, shard: Shard) -> Units:
    offsets = torch.full((shape.h, len(order)), -1)
    for i, branch in enumerate(order):
        head, offset = serving_heads(spec, branch, shard.num_heads, shard.head, shape.h)
        offsets[head - shard.head, i] = offset
    head = torch.arange(shape.h)
    kv = head // (shape.h // shape.h_kv)
    table = torch.cat([kv[:, None], offsets], 1)
    alike, unit, heads = torch.unique(table, dim=0, return_inverse=True, return_counts=True)
    lowest, highest = (
        torch.zeros(len(alike), dtype=torch.int64).scatter_reduce(0, unit, head, how, include_self=False)
        for how in ("amin", "amax")
    )
    step = (highest - lowest) // (heads - 1).clamp(min=1)
    if bool((lowest[unit] + (head - lowest[unit]) // step[unit].clamp(min=1) * step[unit] != head).any()):
        return Units(head, torch.ones_like(head), torch.ones_like(head), kv, offsets)
    return Units(lowest, heads, step.clamp(min=1), alike[:, 0], alike[:, 1:])


def _joined(member: Tensor, residue: Tensor, period: int, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """(class, first residue, step) of each run of queries: one a class if its residues are evenly spaced."""
    count = torch.bincount(member, minlength=num)
    least = torch.full((num,), period).scatter_reduce(0, member, residue, "amin")
    step = torch.where(period % count == 0, period // count, period)
    fits = ((residue - least[member]) % step[member] == 0) & (period % count == 0)[member]
    is_even = torch.ones(num, dtype=torch.int64).scatter_reduce(0, member, fits.long(), "amin") > 0
    kept = ~is_even[member] | (residue == least[member])
    member, residue = member[kept], residue[kept]
    return member, residue, torch.where(is_even[member], step[member], period)


class Piece(NamedTuple):
    """Runs of keys of some classes: those of a range of positions in a residue modulo `step`."""

    classes: Tensor
    low: Tensor
    high: Tensor
    phase: Tensor
    step: int
    multiplicity: int


def _key_runs(
    spec: DilatedSpec, cells: Cells, units: Units, rates: list[int], classes: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All runs; the first run, number of runs and phantom keys of each class (cell, unit, code)."""
    phantom = torch.zeros(len(classes), dtype=torch.int64)
    owners, tables = [], []
    for code in torch.unique(classes[:, 2]).tolist():
        those = (classes[:, 2] == code).nonzero()[:, 0]
        members = [i for i in range(len(rates)) if code >> i & 1]
        cell, unit = classes[those, 0], classes[those, 1]
        phase = cells.first[cell] + units.offsets[unit]
        for piece in _pieces(cells, those, cell, phase, rates, members):
            start = piece.low + (piece.phase - piece.low) % piece.step
            count = -((start - piece.high) // piece.step)
            table = torch.stack([start, torch.full_like(start, piece.step), count], 1)
            table = torch.cat([table, torch.full_like(table[:, :1], piece.multiplicity)], 1)
            here = classes[piece.classes, 0]
            # A causal query sees none of what lies behind its cell.
            seen = (count > 0) & ~((start >= (cells.start + cells.length)[here]) & spec.is_causal)
            owners.append(piece.classes[seen])
            tables.append(table[seen])
        if spec.tail == "phantom" and not spec.is_causal:
            for i in members:
                size, rate = cells.end[cell, i] - cells.first[cell, i], rates[i]
                lattice = -(-cells.clamped[cell, i] // rate)
                phantom[those] += lattice + (units.offsets[unit, i] - size) // rate
    runs, owner = (torch.cat(x) for x in (tables or [NO_RUNS], owners))
    ordered = torch.argsort(owner, stable=True)
    num = torch.bincount(owner, minlength=len(classes))
    return runs[ordered], num.cumsum(0) - num, num, phantom


def _pieces(
    cells: Cells, those: Tensor, cell: Tensor, phase: Tensor, rates: list[int], members: list[int]
) -> Iterator[Piece]:
    """The keys of classes that the branches `members` select, in order of their segments."""
    if not _nest(cells, rates, members):
        for i in members:
            yield Piece(those, cells.first[cell, i], cells.end[cell, i], phase[:, i], rates[i], 1)
        return
    for rank, i in enumerate(members):
        sides: list[tuple[Tensor, Tensor]] = [(cells.first[cell, i], cells.end[cell, i])]
        if rank:
            inner = members[rank - 1]
            sides = [
                (cells.first[cell, i], cells.first[cell, inner]),
                (cells.end[cell, inner], cells.end[cell, i]),
            ]
        for low, high in sides:
            for level, (j, after) in enumerate(pairwise(members[rank:])):
                for k in range(rates[after] // rates[j]):
                    residue = phase[:, j] + k * rates[j]
                    kept = (residue - phase[:, after]) % rates[after] != 0
                    where = those[kept], low[kept], high[kept], residue[kept]
                    yield Piece(*where, rates[after], level + 1)
            last = members[-1]
            yield Piece(those, low, high, phase[:, last], rates[last], len(members) - rank)


def _nest(cells: Cells, rates: list[int], members: list[int]) -> bool:
    """Whether each segment lies within that of the next branch, whose rate is a multiple."""
    return all(
        rates[j] % rates[i] == 0
        and bool((cells.first[:, j] <= cells.first[:, i]).all())
        and bool((cells.end[:, i] <= cells.end[:, j]).all())
        for i, j in pairwise(members)
    )
