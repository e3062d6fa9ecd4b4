"""Runs a plan on an op of packed rows: jobs of one shape are packed, attended and merged together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.runs import Plan, Region
from .batches import Batch, Keys, batches_of
from .contract import Attended, Chunk, Dropout, Gradients, How, Inputs, Merged, Op, Outputs, RemoteKV
from .merge import add_null_keys
from .rows import WHOLE, Numbered, Origin, Rows


class _Keys:
    """The keys and values of a call, which chunks of remote ones stand in for."""

    def __init__(self, inputs: Inputs, strided: bool = False) -> None:
        self.inputs, self.strided, self.mask = inputs, strided, None
        self.numbered = Numbered()  # of the keys gathered last
        if inputs.key_mask is not None:
            self.mask = inputs.key_mask.unsqueeze(-1).expand(-1, -1, inputs.k.shape[2])

    def gather(self, rows: Rows, _branch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        mask, workspace, strided = self.mask, self.inputs.workspace, self.strided
        self.numbered = numbered = Numbered()
        k = rows.read("key", self.inputs.k, workspace, dtype, numbered, strided=strided)
        v = rows.read("value", self.inputs.v, workspace, dtype, numbered, strided=strided)
        if mask is not None:
            mask = rows.read("mask", mask, workspace, torch.bool, numbered)
        return k, v, mask


def _tile_dtype(op: Op, inputs: Inputs) -> torch.dtype:
    return inputs.accumulate_dtype if op.widens else inputs.q.dtype


def _pack(
    batch: Batch, part: Keys, dtype: torch.dtype, inputs: Inputs, keys: _Keys | Chunk
) -> tuple[Tensor, Tensor, How]:
    """k and v (jobs, 1, rows, d) of a part of the keys of a batch, and how they are attended."""
    k, v, mask = keys.gather(part.rows, batch.branch, dtype)
    if mask is not None and bool(mask.all()):
        mask = None
    if mask is not None:
        # A hidden key may hold anything, NaN included; as zeros it cannot reach a visible row.
        hidden = ~mask.unsqueeze(-1)
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    real = None if part.is_causal else part.rows.is_real(k.device)
    if real is not None:  # no causal row sees what is behind it
        mask = real if mask is None else mask & real
    dropout = None
    if inputs.dropout_p:
        _, n, h, _ = inputs.q.shape
        rows = batch.queries.numbers((n * h, h, 1), device=k.device).view(batch.queries.shape)
        times = part.rows.numbers((0, 1, 0), device=k.device).view(k.shape[:3])
        dropout = Dropout(inputs.dropout_p, mix_seed(inputs.seed + batch.branch), rows, times)
    pairs = _lay_out_tiles(part.rows, batch.queries.shape[2], k.device) if part.is_tiled else None
    return k, v, How(part.is_causal, inputs.scale, mask, dropout, pairs)


def _lay_out_tiles(rows: Rows, num_queries: int, device: torch.device) -> Tensor:
    """(jobs, queries, keys): the tiles of the blocks of each job side by side."""
    assert rows.blocks is not None
    found = rows.blocks.tiles()[:, :, :num_queries]
    return found.transpose(1, 2).flatten(2)[..., : rows.shape[2]].to(device)


class _Block(NamedTuple):
    """The part of a tensor (b, n, heads, ...) that belongs to a region, and where it begins."""

    x: Tensor
    origin: Origin
    blocks: Tensor | None = None  # (b, heads, blocks, size, d), of which `x` is a view

    @classmethod
    def of(cls, x: Tensor, region: Region, group: int) -> _Block:
        (b, num_b), (t, num_t), (kv, num_kv) = region
        head, num = kv * group, num_kv * group
        return cls(x.narrow(0, b, num_b).narrow(1, t, num_t).narrow(2, head, num), (b, t, head))

    def wide(self, slot: str, inputs: Inputs) -> _Block:
        """Scratch of the same size in accumulation precision, or the block itself if it has that."""
        dtype = inputs.accumulate_dtype
        if self.x.dtype == dtype:
            return self
        return _Block(inputs.workspace.take(slot, tuple(self.x.shape), dtype, self.x.device), self.origin)

    def in_blocks(self, slot: str, plan: Plan, inputs: Inputs) -> _Block:
        """Sums of blocks of keys that several jobs have in common, for scratch of the same size."""
        b, n, heads, d = self.x.shape
        size, before = plan.unit[0], plan.unit[1] % plan.unit[0]
        shape = (b, heads, -(-(before + n) // size), size, d)
        blocks = inputs.workspace.take(slot, shape, inputs.accumulate_dtype, self.x.device)
        view = blocks.view(b, heads, -1, d)[:, :, before : before + n].transpose(1, 2)
        return _Block(view, self.origin, blocks)


def _group(inputs: Inputs) -> int:
    return inputs.q.shape[2] // inputs.k.shape[2]


def _attend(
    op: Op, batches: list[Batch], inputs: Inputs, sums: list[_Block], keys: _Keys | Chunk, alone: bool = False
) -> None:
    """Attends the batches into blocks of out and of lse; `alone`: their branch has these to itself."""
    (out, origin, _), (lse, _, _) = sums
    dtype = _tile_dtype(op, inputs)
    for batch in batches:
        numbered, strided = Numbered(), op.reads_strides
        q = batch.queries.read("query", inputs.q, inputs.workspace, dtype, numbered, strided=strided)
        part, lse_part = op.forward(q, *_pack(batch, batch.keys[0], dtype, inputs, keys))
        for more in batch.keys[1:]:
            part = part.to(inputs.accumulate_dtype)
            op.extend(q, *_pack(batch, more, dtype, inputs, keys), part, lse_part)
        if batch.phantom:
            part, lse_part = add_null_keys(part, lse_part, batch.phantom)
        if batch.opens_queries or (alone and batch.opens_branch):
            batch.queries.write(out, part, origin, numbered)
            batch.queries.write(lse, lse_part, origin, numbered)
        else:
            batch.queries.merge(out, lse, part, lse_part, origin, numbered)
        del part, lse_part  # or the next results would need fresh memory beside these


def forward(op: Op, plan: Plan, inputs: Inputs, remote: RemoteKV | None = None) -> Outputs:
    """out (b, n, h, d) in the input's dtype and lse (b, h, n) in float32 (float64 for float64)."""
    group, keys, (out, lse) = _group(inputs), _Keys(inputs, op.reads_strides), inputs.new_outputs()
    for region, batches in batches_of(plan, inputs.q.element_size(), op.reads_strides):
        block, lse_block = (_Block.of(x, region, group) for x in (out, lse.transpose(1, 2)))
        is_final = plan.is_one_stage and remote is None  # nothing is merged into it
        sums = [block if is_final else block.wide("acc_out", inputs), lse_block]
        if not plan.covers_queries:
            sums[0].x.zero_()
            lse_block.x.fill_(-math.inf)
        _attend(op, batches, inputs, sums, keys)
        for chunk in () if remote is None else remote.chunks(region):
            for _, more in batches_of(chunk.plan, inputs.q.element_size()):
                _attend(op, more, inputs, sums, chunk)
        if sums[0].x is not block.x:
            block.x.copy_(sums[0].x)
    return out, lse


def backward(op: Op, plan: Plan, inputs: Inputs, merged: Merged, remote: RemoteKV | None = None) -> Gradients:
    """(dq, dk, dv) of the joint softmax, from the merged out and lse alone."""
    group, keys, results = _group(inputs), _Keys(inputs, op.reads_strides), inputs.new_gradients()
    for region, batches in batches_of(plan, inputs.q.element_size(), op.reads_strides):
        blocks = [_Block.of(x, region, each) for x, each in zip(results, (group, 1, 1), strict=True)]
        is_final = plan.is_one_stage and remote is None  # nothing is added to dq
        sums = [blocks[0] if is_final else blocks[0].wide("acc_dq", inputs)]
        for block, slot in zip(blocks[1:], ("acc_dk", "acc_dv"), strict=True):
            sums.append(block.in_blocks(slot, plan, inputs) if plan.unit[0] else block.wide(slot, inputs))
        for i, block in enumerate(sums):
            if not (plan.covers_keys if i else plan.covers_queries):
                (block.x if block.blocks is None else block.blocks).zero_()
        for those, out in _outputs(op, plan, region, batches, inputs, merged, keys):
            for batch in those:
                _put_gradients(op, batch, inputs, merged, out, keys, sums)
        for chunk in () if remote is None else remote.chunks_with_gradients(region, sums[1].x, sums[2].x):
            for _, more in batches_of(chunk.plan, inputs.q.element_size()):
                for batch in more:
                    _put_gradients(op, batch, inputs, merged, _Block(merged.out, WHOLE), chunk, sums[:1])
        for block, total in zip(blocks, sums, strict=True):
            if total.x is not block.x:
                block.x.copy_(total.x)
    return results


def _put(rows: Rows, block: _Block, part: Tensor, opens: bool, numbered: Numbered) -> None:
    if block.blocks is not None:
        rows.add_blocks(block.blocks, part, block.origin, numbered)
    else:
        rows.write(block.x, part, block.origin, numbered, adds=not opens)


def _put_gradients(
    op: Op, batch: Batch, inputs: Inputs, merged: Merged, out: _Block, keys: _Keys | Chunk, sums: list[_Block]
) -> None:
    """A batch's share of dq and, if they are among the sums, dk and dv; `out` is what backward subtracts."""
    rows, workspace, numbered = batch.queries, inputs.workspace, Numbered()
    dtype, wide = _tile_dtype(op, inputs), inputs.accumulate_dtype
    strided = op.reads_strides
    q = rows.read("query", inputs.q, workspace, dtype, numbered, strided=strided)
    lse = rows.read("lse", merged.lse.transpose(1, 2), workspace, wide, numbered)
    # Empty rows (lse -inf) must have probability 0 in every batch: exp(score - inf). So must padding.
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    real = rows.is_real(lse.device)
    lse = lse if real is None else lse.masked_fill_(~real, math.inf)
    packed_out = rows.read("out", out.x, workspace, dtype, numbered, out.origin, strided)
    grad_out = rows.read("grad_out", merged.grad_out, workspace, dtype, numbered, strided=strided)
    grad_lse = None
    if merged.grad_lse is not None:
        grad_lse = rows.read("grad_lse", merged.grad_lse.transpose(1, 2), workspace, wide, numbered)
    dq = None
    for part in batch.keys:
        k, v, met = _pack(batch, part, dtype, inputs, keys)
        d_q, d_k, d_v = op.backward(Attended(q, k, v, packed_out, lse, grad_out, grad_lse, met))
        dq = d_q if dq is None else dq.to(wide).add_(d_q)
        if isinstance(keys, _Keys):
            for total, gradient in zip(sums[1:], (d_k, d_v), strict=True):
                _put(part.rows, total, gradient, batch.opens_keys, keys.numbered)
        else:
            keys.add(part.rows, batch.branch, d_k, d_v)
    assert dq is not None
    _put(rows, sums[0], dq, batch.opens_queries, numbered)


def _outputs(
    op: Op, plan: Plan, region: Region, batches: list[Batch], inputs: Inputs, merged: Merged, keys: _Keys
) -> Iterator[tuple[list[Batch], _Block]]:
    """The `out` that backward subtracts: the merged one or, with detach_mixing, that of the branch."""
    if not plan.detaches:
        yield batches, _Block(merged.out, WHOLE)
        return
    block = _Block.of(merged.out, region, _group(inputs))
    dtype, shape, device = inputs.accumulate_dtype, tuple(block.x.shape), block.x.device
    sums = [
        _Block(inputs.workspace.take(slot, size, dtype, device), block.origin)
        for slot, size in (("own_out", shape), ("own_lse", shape[:3]))
    ]
    for _, group in groupby(batches, key=lambda batch: batch.branch):
        those = list(group)
        _attend(op, those, inputs, sums, keys, alone=True)
        yield those, sums[0]


def mix_seed(x: int) -> int:
    """SplitMix64: neighbouring numbers become seeds that differ in all bits."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) % 2**63
