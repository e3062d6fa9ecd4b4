"""Runs a block plan: gathers each panel's key blocks, calls the kernel, merges. No autograd, no globals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .engine import Inputs, Merged, shape_of
from .flat_rows import FlatRows
from .kernels import How
from .merge import merge_
from .plan.block_sparse import BlockPlan, Lane, Panel, Tile
from .plan.shape import Pass


def forward(plan: BlockPlan, inputs: Inputs, workspace_bytes: int) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) in the input's dtype and lse (b, h, n) in float32 (float64 for float64)."""
    q, workspace = inputs.q, inputs.workspace
    out = workspace.result(q.shape, q.dtype, q.device)
    lse = workspace.result((q.shape[0], q.shape[2], q.shape[1]), inputs.accumulate_dtype, q.device)
    attend_into(plan, inputs, workspace_bytes, out, lse)
    return out, lse


def attend_into(
    plan: BlockPlan,
    inputs: Inputs,
    workspace_bytes: int,
    out: Tensor,
    lse: Tensor,
    piece: Piece | None = None,
) -> None:
    """Attends into out (b, n, h, d) and lse (b, h, n); with the keys of a piece merges into what is there."""
    keys = _OwnKeys.of(plan, inputs) if piece is None else piece
    for lane in _lanes(plan, inputs, workspace_bytes, "forward"):
        for panel in lane.panels:
            queries = _Rows(panel, plan)
            if piece is None:
                part, part_lse = _attend(panel, queries, inputs, keys)
                queries.write(out, part)
                queries.write(lse.transpose(1, 2), part_lse)
            elif panel.tiles:
                queries.merge(out, lse.transpose(1, 2), *_attend(panel, queries, inputs, keys))


def backward(
    plan: BlockPlan, inputs: Inputs, workspace_bytes: int, merged: Merged
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the joint softmax, from the merged out and lse alone."""
    tensors = (inputs.q, inputs.k, inputs.v)
    dq, dk, dv = (inputs.workspace.result(x.shape, x.dtype, x.device) for x in tensors)
    gradients_into(plan, inputs, workspace_bytes, merged, (dq, dk, dv))
    return dq, dk, dv


def gradients_into(
    plan: BlockPlan,
    inputs: Inputs,
    workspace_bytes: int,
    merged: Merged,
    gradients: tuple[Tensor, ...],
    piece: Piece | None = None,
) -> None:
    """Writes the gradients dq, dk and dv; with the keys of a piece adds to dq, and dk and dv are its own."""
    dq, dk, dv = gradients
    keys = _OwnKeys.of(plan, inputs) if piece is None else piece
    for lane in _lanes(plan, inputs, workspace_bytes, "backward"):
        sums = _KeySums(plan, lane, inputs) if piece is None else piece
        for panel in lane.panels:
            queries = _Rows(panel, plan)
            if piece is None or panel.tiles:
                part = _panel_gradients(panel, queries, inputs, keys, merged, sums)
                queries.write(dq, part, is_added=piece is not None)
        if isinstance(sums, _KeySums):
            sums.write(dk, dv)


def _lanes(plan: BlockPlan, inputs: Inputs, workspace_bytes: int, direction: Pass) -> Iterator[Lane]:
    # Dropout masks are drawn tile by tile, so both passes must then cut the same tiles.
    direction = "backward" if inputs.dropout_p else direction
    return plan.lanes(shape_of(inputs), inputs.accumulate_dtype.itemsize, workspace_bytes, direction)


class _Keys(Protocol):
    def gather(self, panel: Panel, tile: Tile, number: int, inputs: Inputs) -> tuple[Tensor, Tensor, How]:
        """k and v (key heads x rows, 1, keys, d) of a tile, and how to attend them."""


class _Sums(Protocol):
    def add(self, panel: Panel, tile: Tile, dk: Tensor, dv: Tensor) -> None:
        """Adds to the gradients of a tile's keys and values."""


class Piece(_Keys, _Sums, Protocol):
    """Keys that are not among the inputs."""


@dataclass(frozen=True)
class _Rows:
    """The query rows of a panel, packed as (key heads x rows, query heads a key head, tokens, ...)."""

    panel: Panel
    plan: BlockPlan

    def read(self, slot: str, x: Tensor, inputs: Inputs, dtype: torch.dtype) -> Tensor:
        """Packs the rows of a tensor (b, n, h, ...)."""
        panel, rest = self.panel, x.shape[3:]
        shape = (panel.num_kv, panel.num_rows, panel.group, panel.q_len, *rest)
        packed = inputs.workspace.take(slot, shape, dtype, x.device)
        for at, view in self._views(x):
            packed[:, at : at + view.shape[1]].copy_(view)
        return packed.view(panel.num_kv * panel.num_rows, panel.group, panel.q_len, *rest)

    def write(self, x: Tensor, packed: Tensor, is_added: bool = False) -> None:
        """The rows of a tensor (b, n, h, ...) take the packed values, or they are added."""
        parts = self._unpack(packed)
        for at, view in self._views(x):
            part = parts[:, at : at + view.shape[1]]
            view.add_(part) if is_added else view.copy_(part)

    def merge(self, out: Tensor, lse: Tensor, packed: Tensor, packed_lse: Tensor) -> None:
        """Merges packed results into the rows of out (b, n, h, d) and lse (b, n, h), which may be empty."""
        parts, lse_parts = self._unpack(packed), self._unpack(packed_lse)
        for (at, view), (_, lse_view) in zip(self._views(out), self._views(lse), strict=True):
            here = slice(at, at + view.shape[1])
            merge_(view, lse_view, parts[:, here], lse_parts[:, here])

    def _unpack(self, packed: Tensor) -> Tensor:
        panel = self.panel
        return packed.view(panel.num_kv, panel.num_rows, panel.group, panel.q_len, *packed.shape[3:])

    def _views(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each run's place among the rows and view (key heads, rows, query heads a key head, tokens, ...)."""
        panel, at = self.panel, 0
        heads = x[panel.batch, :, panel.head : panel.head + panel.num_kv * panel.group]
        for first, count in panel.runs:
            start = max(0, first * self.plan.pattern.block_size - self.plan.queries[0])
            view = heads[start : start + count * panel.q_len]
            view = view.unflatten(1, (panel.num_kv, panel.group))  # type: ignore[no-untyped-call]
            view = view.unflatten(0, (count, panel.q_len))
            yield at, view.movedim((2, 0, 3, 1), (0, 1, 2, 3))
            at += count


def tile_tokens(tile: Tile, block_size: int, device: torch.device) -> Tensor:
    """The positions (rows, keys) of a tile's keys."""
    within = torch.arange(block_size, device=device)
    tokens = tile.columns.to(device).mul(block_size).unsqueeze(-1) + within
    return tokens.flatten(1)[:, tile.skip : tile.skip + tile.k_len]


@dataclass(frozen=True)
class _OwnKeys:
    """Keys and values as rows of d features, to gather by number."""

    k: FlatRows
    v: FlatRows
    plan: BlockPlan

    @classmethod
    def of(cls, plan: BlockPlan, inputs: Inputs) -> _OwnKeys:
        return cls(FlatRows.of(inputs.k), FlatRows.of(inputs.v), plan)

    def gather(self, panel: Panel, tile: Tile, number: int, inputs: Inputs) -> tuple[Tensor, Tensor, How]:
        tokens = tile_tokens(tile, self.plan.pattern.block_size, inputs.k.device)
        if self.plan.keys[0]:
            tokens = tokens - self.plan.keys[0]
        index = _row_numbers(self.k, panel, tokens)
        k = self.k.gather("key", index, inputs)
        v = self.v.gather(
            "value", index if self.v.same_steps(self.k) else _row_numbers(self.v, panel, tokens), inputs
        )
        mask = None
        if inputs.key_mask is not None:
            mask = inputs.key_mask[panel.batch][tokens].repeat(panel.num_kv, 1).unsqueeze(1)
        shape = (panel.num_kv * tokens.shape[0], 1, tile.k_len, k.shape[-1])
        return inputs.how(k.view(shape), v.view(shape), mask, panel.index * 2**16 + number, tile.is_causal)


def _row_numbers(rows: FlatRows, panel: Panel, tokens: Tensor) -> Tensor:
    """The numbers of the rows of `tokens` (rows, keys) for each of the panel's key heads, in one line."""
    index = tokens * rows.time if rows.time != 1 else tokens
    start = panel.batch * rows.batch + panel.kv * rows.head
    if panel.num_kv == 1:
        return (index + start if start else index).flatten()
    heads = torch.arange(panel.num_kv, device=tokens.device) * rows.head + start
    return (index + heads[:, None, None]).flatten()


class _KeySums:
    """Sums of a lane's key and value gradients, block by block in accumulation precision."""

    def __init__(self, plan: BlockPlan, lane: Lane, inputs: Inputs) -> None:
        self.lane, self.plan, self.size = lane, plan, plan.pattern.block_size
        self.blocks = plan.columns[1] - plan.columns[0]
        d, device = inputs.k.shape[-1], inputs.k.device
        shape = (lane.num_kv * self.blocks, self.size * d)
        self.dk, self.dv = (
            inputs.workspace.take(slot, shape, inputs.accumulate_dtype, device).zero_()
            for slot in ("acc_dk", "acc_dv")
        )

    def add(self, panel: Panel, tile: Tile, dk: Tensor, dv: Tensor) -> None:
        columns = tile.columns.to(dk.device) - self.plan.columns[0]
        lane = torch.arange(self.lane.num_kv, device=dk.device)[:, None, None] * self.blocks
        index = (columns + lane).flatten()
        full = columns.shape[1] * self.size
        for total, part in ((self.dk, dk), (self.dv, dv)):
            if tile.k_len < full:
                part = torch.nn.functional.pad(part, (0, 0, tile.skip, full - tile.skip - tile.k_len))
            total.index_add_(0, index, part.to(total.dtype).reshape(index.numel(), -1))

    def write(self, dk: Tensor, dv: Tensor) -> None:
        lane, n = self.lane, dk.shape[1]
        for total, result in ((self.dk, dk), (self.dv, dv)):
            first = self.plan.keys[0] - self.plan.columns[0] * self.size
            rows = total.view(lane.num_kv, self.blocks * self.size, -1)[:, first : first + n]
            result[lane.batch, :, lane.kv : lane.kv + lane.num_kv].copy_(rows.transpose(0, 1))


def _attend(panel: Panel, queries: _Rows, inputs: Inputs, keys: _Keys) -> tuple[Tensor, Tensor]:
    """The panel's (out, lse), packed; rows without keys give 0 and -inf."""
    q = queries.read("query", inputs.q, inputs, inputs.tile_dtype)
    out, lse = None, None
    for number, tile in enumerate(panel.tiles):
        part, part_lse = inputs.kernel.forward(_meeting(q, tile), *keys.gather(panel, tile, number, inputs))
        part, part_lse = part.view(q.shape), part_lse.view(q.shape[:3])
        if out is None or lse is None:
            out, lse = part.to(inputs.accumulate_dtype) if len(panel.tiles) > 1 else part, part_lse
        else:
            merge_(out, lse, part, part_lse)
    if out is None or lse is None:
        return torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf, dtype=inputs.accumulate_dtype)
    return out, lse


def _meeting(rows: Tensor, tile: Tile) -> Tensor:
    """Packed rows as they meet a tile's keys: all that meet the same, in one line unless it is causal."""
    if tile.is_causal:
        return rows
    units, group, q_len, *rest = rows.shape
    return rows.view(units // tile.join, 1, tile.join * group * q_len, *rest)


def _panel_gradients(
    panel: Panel, queries: _Rows, inputs: Inputs, keys: _Keys, merged: Merged, sums: _Sums
) -> Tensor:
    """The panel's dq, packed; its share of dk and dv goes into the sums."""
    dtype = inputs.tile_dtype
    q = queries.read("query", inputs.q, inputs, dtype)
    if not panel.tiles:
        return torch.zeros_like(q)
    out = queries.read("out", merged.out, inputs, dtype)
    grad_out = queries.read("grad_out", merged.grad_out, inputs, dtype)
    lse = queries.read("lse", merged.lse.transpose(1, 2), inputs, inputs.accumulate_dtype)
    # Empty rows (lse -inf) must have probability 0 in every tile: exp(score - inf).
    lse.masked_fill_(lse == -math.inf, math.inf)
    grad_lse = None
    if merged.grad_lse is not None:
        grad_lse = queries.read("grad_lse", merged.grad_lse.transpose(1, 2), inputs, inputs.accumulate_dtype)
    dq = None
    for number, tile in enumerate(panel.tiles):
        k, v, how = keys.gather(panel, tile, number, inputs)
        tile_grad_lse = None if grad_lse is None else _meeting(grad_lse, tile)
        d_out, tile_q, tile_out, tile_lse = (_meeting(x, tile) for x in (grad_out, q, out, lse))
        part, dk, dv = inputs.kernel.backward(d_out, tile_grad_lse, tile_q, k, v, tile_out, tile_lse, how)
        sums.add(panel, tile, dk, dv)
        part = part.to(inputs.accumulate_dtype).view(q.shape)
        dq = part if dq is None else dq.add_(part)
    assert dq is not None
    return dq
