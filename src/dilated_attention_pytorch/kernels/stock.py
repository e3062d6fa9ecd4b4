"""Runs a plan on an attention op of packed rows: jobs of one shape are packed, attended and merged together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.runs import COLUMN, Plan, Region, bytes_a_row
from .contract import Chunk, Dropout, How, Inputs, Merged, Op, RemoteKV
from .merge import add_null_keys
from .rows import WHOLE, Origin, Rows, fold, split_box

MAX_JOBS = 65535  # CUDA launches fail beyond this many batches
FEW_BOXES = 8  # jobs a box from which on strided views are better than numbers


class Batch(NamedTuple):
    """Jobs of one shape that are attended together: queries (jobs, heads, rows), keys (jobs, 1, rows)."""

    queries: Rows
    keys: Rows
    branch: int
    is_causal: bool
    phantom: int
    opens_branch: bool  # no earlier job of the branch met these query rows
    opens_queries: bool  # nor of any other branch
    opens_keys: bool


def batches_of(plan: Plan, inputs: Inputs) -> list[tuple[Region, list[Batch]]]:
    """The jobs of each region, in batches whose packed rows fit the workspace; kept with the plan."""
    budget = plan.budget or inputs.workspace_bytes
    each_row = bytes_a_row(inputs.q.shape[-1], inputs.q.element_size())
    known: list[tuple[Region, list[Batch]]] | None = plan.by_kernel.get((budget, each_row))
    if known is None:
        found: list[list[Batch]] = [[] for _ in plan.regions]
        for region, batch in _batches(plan, budget, each_row):
            found[region].append(batch)
        known = plan.by_kernel[budget, each_row] = list(zip(plan.regions, found, strict=True))
    return known


_SHAPE = ("region", "stage", "branch", "heads", "head_step", "step", "count", "causal", "phantom")
_SHAPE += ("opens_branch", "opens_queries", "opens_keys")


def _batches(plan: Plan, budget: int, row_bytes: int) -> Iterator[tuple[int, Batch]]:
    if not len(plan):
        return
    jobs = plan.jobs
    first_run = plan.runs[jobs[:, COLUMN["first_run"]]]
    is_one = jobs[:, COLUMN["num_runs"]] == 1
    key_step = torch.where(is_one, first_run[:, 1], 0)
    shapes = torch.stack([*(jobs[:, COLUMN[name]] for name in _SHAPE), plan.key_counts, key_step], 1)
    kinds, which, sizes = torch.unique(shapes, dim=0, return_inverse=True, return_counts=True)
    order = torch.argsort(which, stable=True)
    names = ("batch", "head", "kv", "start")
    places = torch.cat([jobs[:, [COLUMN[name] for name in names]], first_run[:, :1]], 1)
    for kind, members in zip(kinds.tolist(), torch.split(order, sizes.tolist()), strict=True):
        region, _, branch, heads, head_step, step, count, causal, phantom, *opens, keys, key_step = kind
        fit = max(1, min(MAX_JOBS, budget // (row_bytes * (heads + 1) * max(count, keys))))
        inner = ((heads, (0, 0, head_step)), (count, (0, step, 0)))
        facts = (branch, bool(causal), phantom, *map(bool, opens))
        for queries, key_rows in _rows(plan, members, places[members], fit, inner, keys, key_step):
            yield region, Batch(queries, key_rows, *facts)


def _rows(plan, members, places, fit, inner, num_keys, key_step):  # type: ignore[no-untyped-def]
    """Where the queries and the keys of at most `fit` jobs lie, for all members."""
    key_inner = ((1, (0, 0, 0)), (num_keys, (0, key_step, 0)))
    if key_step:
        boxes = list(fold(places))
        if len(boxes) * FEW_BOXES <= len(places) or len(boxes) < FEW_BOXES:
            for whole in boxes:
                for box in split_box(whole, fit):
                    batch, head, kv, start, key = box.values
                    steps = [(size, step) for size, step in box.axes]
                    q_axes = tuple((size, (s[0], s[3], s[1])) for size, s in steps)
                    k_axes = tuple((size, (s[0], s[4], s[2])) for size, s in steps)
                    yield (
                        Rows((batch, start, head), q_axes, inner),
                        Rows((batch, key, kv), k_axes, key_inner),
                    )
            return
    even = -(-len(places) // -(-len(places) // fit))
    for part in torch.split(torch.arange(len(places)), even):
        times = None if key_step else plan.key_positions(plan.jobs[members[part]])
        batch, head, kv, start, key = places[part].unbind(1)
        if times is not None:
            key = torch.zeros_like(key)
        firsts = torch.stack([batch, start, head], 1), torch.stack([batch, key, kv], 1)
        whole = next(fold(firsts[0]))
        queries = Rows((0, 0, 0), (), inner, firsts[0])
        if whole.size == len(part):
            axes = tuple((size, (step[0], step[1], step[2])) for size, step in whole.axes)
            queries = Rows((whole.values[0], whole.values[1], whole.values[2]), axes, inner)
        yield queries, Rows((0, 0, 0), (), key_inner, firsts[1], times)


class _Keys:
    """The keys and values of a call, which chunks of remote ones stand in for."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.mask = None
        if inputs.key_mask is not None:
            self.mask = inputs.key_mask.unsqueeze(-1).expand(-1, -1, inputs.k.shape[2])

    def gather(self, rows: Rows, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        inputs = self.inputs
        k = rows.read("key", inputs.k, inputs.workspace, dtype)
        v = rows.read("value", inputs.v, inputs.workspace, dtype)
        mask = self.mask
        return k, v, None if mask is None else rows.read("mask", mask, inputs.workspace, torch.bool)


def _tile_dtype(op: Op, inputs: Inputs) -> torch.dtype:
    return inputs.accumulate_dtype if op.widens else inputs.q.dtype


def _pack(
    op: Op, batch: Batch, inputs: Inputs, keys: _Keys | Chunk
) -> tuple[Tensor, Tensor, Tensor, How]:
    """q (jobs, heads, rows, d), k and v (jobs, 1, rows, d) of a batch, and how they attend."""
    dtype = _tile_dtype(op, inputs)
    q = batch.queries.read("query", inputs.q, inputs.workspace, dtype)
    k, v, mask = keys.gather(batch.keys, dtype)
    if mask is not None and bool(mask.all()):
        mask = None
    if mask is not None and not inputs.hides_zeros:
        # A hidden key may hold anything, NaN included; as zeros it cannot reach a visible row.
        hidden = ~mask.unsqueeze(-1)
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    dropout = None
    if inputs.dropout_p:
        _, n, h, _ = inputs.q.shape
        rows = batch.queries.numbers((n * h, h, 1), device=q.device).view(q.shape[:3])
        times = batch.keys.numbers((0, 1, 0), device=q.device).view(k.shape[:3])
        dropout = Dropout(inputs.dropout_p, mix_seed(inputs.seed + batch.branch), rows, times)
    return q, k, v, How(batch.is_causal, inputs.scale, mask, dropout)


class _Block(NamedTuple):
    """The part of a tensor (b, n, heads, ...) that belongs to a region, and where it begins."""

    x: Tensor
    origin: Origin

    @classmethod
    def of(cls, x: Tensor, region: Region, group: int) -> _Block:
        (b, num_b), (t, num_t), (kv, num_kv) = region
        head, num = kv * group, num_kv * group
        return cls(x[b : b + num_b, t : t + num_t, head : head + num], (b, t, head))

    def wide(self, slot: str, inputs: Inputs) -> _Block:
        """Scratch of the same size in accumulation precision, or the block itself if it has that."""
        dtype = inputs.accumulate_dtype
        if self.x.dtype == dtype:
            return self
        return _Block(inputs.workspace.take(slot, tuple(self.x.shape), dtype, self.x.device), self.origin)


def _group(inputs: Inputs) -> int:
    return inputs.q.shape[2] // inputs.k.shape[2]


def _attend(
    op: Op,
    batches: Iterable[Batch],
    inputs: Inputs,
    sums: tuple[_Block, _Block],
    keys: _Keys | Chunk,
    *,
    alone: bool = False,
) -> None:
    """Attends the batches into blocks of out and of lse; `alone`: their branch has these to itself."""
    (out, origin), (lse, _) = sums
    for batch in batches:
        part, lse_part = op.forward(*_pack(op, batch, inputs, keys))
        if batch.phantom:
            part, lse_part = add_null_keys(part, lse_part, batch.phantom)
        if batch.opens_queries or (alone and batch.opens_branch):
            batch.queries.write(out, part, origin)
            batch.queries.write(lse, lse_part, origin)
        else:
            batch.queries.merge(out, lse, part, lse_part, origin)
        del part, lse_part  # or the next results would need fresh memory beside these


def forward(op: Op, plan: Plan, inputs: Inputs, remote: RemoteKV | None = None) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) in the input's dtype and lse (b, h, n) in float32 (float64 for float64)."""
    q, workspace, group, keys = inputs.q, inputs.workspace, _group(inputs), _Keys(inputs)
    out = workspace.result(q.shape, q.dtype, q.device)
    lse = workspace.result((q.shape[0], q.shape[2], q.shape[1]), inputs.accumulate_dtype, q.device)
    for region, batches in batches_of(plan, inputs):
        block, lse_block = (_Block.of(x, region, group) for x in (out, lse.transpose(1, 2)))
        sums = block.wide("acc_out", inputs), lse_block
        if not plan.covers_queries:
            sums[0].x.zero_()
            lse_block.x.fill_(-math.inf)
        _attend(op, batches, inputs, sums, keys)
        for chunk in () if remote is None else remote.chunks(region):
            for _, more in batches_of(chunk.plan, inputs):
                _attend(op, more, inputs, sums, chunk)
        if sums[0].x is not block.x:
            block.x.copy_(sums[0].x)
    return out, lse


def backward(
    op: Op, plan: Plan, inputs: Inputs, merged: Merged, remote: RemoteKV | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the joint softmax, from the merged out and lse alone."""
    group, keys = _group(inputs), _Keys(inputs)
    results = tuple(inputs.workspace.result(x.shape, x.dtype, x.device) for x in (inputs.q, inputs.k, inputs.v))
    for region, batches in batches_of(plan, inputs):
        blocks = [_Block.of(x, region, each) for x, each in zip(results, (group, 1, 1), strict=True)]
        slots = ("acc_dq", "acc_dk", "acc_dv")
        sums = [block.wide(slot, inputs) for slot, block in zip(slots, blocks, strict=True)]
        for block, is_covered in zip(sums, (plan.covers_queries, plan.covers_keys, plan.covers_keys), strict=True):
            if not is_covered:
                block.x.zero_()
        dq, dk, dv = sums
        for those, out in _outputs(op, plan, region, batches, inputs, merged, keys):
            for batch in those:
                parts = _gradients(op, batch, inputs, merged, out, keys)
                _put(batch.queries, dq, parts[0], batch.opens_queries)
                for block, part in ((dk, parts[1]), (dv, parts[2])):
                    _put(batch.keys, block, part, batch.opens_keys, is_shared=plan.shares_keys)
        for chunk in () if remote is None else remote.chunks_with_gradients(region, dk.x, dv.x):
            for _, more in batches_of(chunk.plan, inputs):
                for batch in more:
                    d_q, d_k, d_v = _gradients(op, batch, inputs, merged, _Block(merged.out, WHOLE), chunk)
                    _put(batch.queries, dq, d_q, False)
                    chunk.add(batch.keys, d_k, d_v)
        for block, total in zip(blocks, sums, strict=True):
            if total.x is not block.x:
                block.x.copy_(total.x)
    dq_result, dk_result, dv_result = results
    return dq_result, dk_result, dv_result


def _put(rows: Rows, block: _Block, part: Tensor, opens: bool, *, is_shared: bool = False) -> None:
    if opens:
        rows.write(block.x, part, block.origin)
    else:
        rows.add(block.x, part, block.origin, is_shared=is_shared)


def _gradients(
    op: Op, batch: Batch, inputs: Inputs, merged: Merged, out: _Block, keys: _Keys | Chunk
) -> tuple[Tensor, Tensor, Tensor]:
    """A batch's share of dq, dk and dv; `out` is what its backward subtracts."""
    q, k, v, how = _pack(op, batch, inputs, keys)
    rows, workspace, dtype = batch.queries, inputs.workspace, inputs.accumulate_dtype
    lse = rows.read("lse", merged.lse.transpose(1, 2), workspace, dtype)
    # Empty rows (lse -inf) must have probability 0 in every batch: exp(score - inf).
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    packed_out = rows.read("out", out.x, workspace, q.dtype, out.origin)
    grad_out = rows.read("grad_out", merged.grad_out, workspace, q.dtype)
    grad_lse = None
    if merged.grad_lse is not None:
        grad_lse = rows.read("grad_lse", merged.grad_lse.transpose(1, 2), workspace, dtype)
    return op.backward(grad_out, grad_lse, q, k, v, packed_out, lse, how)


def _outputs(
    op: Op, plan: Plan, region: Region, batches: list[Batch], inputs: Inputs, merged: Merged, keys: _Keys
) -> Iterator[tuple[list[Batch], _Block]]:
    """The `out` that backward subtracts: the merged one or, with detach_mixing, that of the branch."""
    if not plan.detaches:
        yield batches, _Block(merged.out, WHOLE)
        return
    block = _Block.of(merged.out, region, _group(inputs))
    dtype, shape, device = inputs.accumulate_dtype, tuple(block.x.shape), block.x.device
    own = _Block(inputs.workspace.take("own_out", shape, dtype, device), block.origin)
    own_lse = _Block(inputs.workspace.take("own_lse", shape[:3], dtype, device), block.origin)
    for _, group in groupby(batches, key=lambda batch: batch.branch):
        those = list(group)
        _attend(op, those, inputs, (own, own_lse), keys, alone=True)
        yield those, own


def mix_seed(x: int) -> int:
    """SplitMix64: neighbouring numbers become seeds that differ in all bits."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) % 2**63
