"""Runs a plan: packs each tile, calls the kernel, merges. Forward and backward, no autograd, no globals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .core.workspace import Workspace
from .kernels import Dropout, How, Kernel
from .merge import add_null_keys, merge_
from .plan import Panel, Plan, Shape, Tile
from .plan.tiles import WHOLE, Origin


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call: q (b, n, h, d), k and v (b, n, h_kv, d), key_mask (b, n), and how to attend."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    scale: float
    dropout_p: float
    seed: int
    kernel: Kernel
    workspace: Workspace
    hides_zeros: bool = False  # keys and values that key_mask hides are zeros already

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def tile_dtype(self) -> torch.dtype:
        return self.accumulate_dtype if self.kernel.widens else self.q.dtype

    def pack(self, slot: str, view: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A contiguous tensor of `shape` with the view's elements; no copy where the view already is one."""
        dtype = self.tile_dtype
        if view.is_contiguous() and view.dtype == dtype:
            return view.view(shape)
        packed = self.workspace.take(slot, shape, dtype, view.device)
        packed.view(view.shape).copy_(view)
        return packed

    def pack_tile(self, tile: Tile, piece: Piece | None = None) -> tuple[Tensor, Tensor, Tensor, How]:
        d = self.q.shape[-1]
        q = self.pack("query", tile.query_view(self.q), tile.q_shape(d))
        if piece is not None:
            return q, *self.how(*piece.gather(tile, self), tile.index, tile.is_causal)
        k = self.pack("key", tile.key_view(self.k), tile.k_shape(d))
        v = self.pack("value", tile.key_view(self.v), tile.k_shape(d))
        mask = None
        if self.key_mask is not None:
            rows = self.key_mask.unsqueeze(-1).expand(-1, -1, self.k.shape[2])
            mask = tile.key_view(rows).reshape(tile.k_shape(d)[:3])
        return q, *self.how(k, v, mask, tile.index, tile.is_causal)

    def how(
        self, k: Tensor, v: Tensor, mask: Tensor | None, index: int, is_causal: bool
    ) -> tuple[Tensor, Tensor, How]:
        """Packed keys and values (B, H_kv, M, d) with their mask (B, H_kv, M), ready for the kernel."""
        if mask is not None and bool(mask.all()):
            mask = None
        if mask is not None and not self.hides_zeros:
            # A hidden key may hold anything, NaN included; as zeros it cannot reach a visible row.
            hidden = ~mask.unsqueeze(-1)
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        dropout = None
        if self.dropout_p:
            dropout = Dropout(self.dropout_p, scatter(self.seed + index))
        return k, v, How(is_causal, self.scale, mask, dropout)


class Piece(Protocol):
    """Keys that are not among the inputs, and the tiles in which the queries meet them."""

    @property
    def tiles(self) -> Iterable[Tile]: ...
    def gather(self, tile: Tile, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """k and v of a tile (B, H_kv, M, d) and their mask (B, H_kv, M), packed."""


class PieceWithGradients(Piece, Protocol):
    """A piece of a backward pass."""

    def add(self, tile: Tile, dk: Tensor, dv: Tensor) -> None:
        """Adds to the gradients of a tile's keys and values."""


class Elsewhere(Protocol):
    """Where keys come from that are not among the inputs, piece by piece for each panel."""

    def pieces(self, panel: Panel) -> Iterator[Piece]: ...


class ElsewhereWithGradients(Protocol):
    """The same for a backward pass."""

    def pieces_with_gradients(self, panel: Panel, sums: Gradients) -> Iterator[PieceWithGradients]:
        """After a piece was attended its gradients leave; what others computed is added to `sums`."""


def forward(plan: Plan, inputs: Inputs, elsewhere: Elsewhere | None = None) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) in the input's dtype and lse (b, h, n) in float32 (float64 for float64)."""
    q, dtype, workspace = inputs.q, inputs.accumulate_dtype, inputs.workspace
    out = workspace.result(q.shape, q.dtype, q.device)
    lse = workspace.result((q.shape[0], q.shape[2], q.shape[1]), dtype, q.device)
    if not plan.covered:
        lse.fill_(-math.inf)
    for panel in plan.panels:
        block, target, origin = panel.query_block(out), out, WHOLE
        if out.dtype != dtype:
            block = target = _accumulator("acc_out", block, inputs)
            origin = panel.origin
        if not plan.covered:
            block.zero_()
        rows = _Rows(target, origin, lse.transpose(1, 2), WHOLE)
        _attend(panel.tiles, inputs, rows)
        for piece in () if elsewhere is None else elsewhere.pieces(panel):
            _attend(piece.tiles, inputs, rows, piece)
        if target is not out:
            panel.query_block(out).copy_(target)
    return out, lse


@dataclass(frozen=True)
class Merged:
    """What the forward left, and the gradients of it."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None


def backward(
    plan: Plan, inputs: Inputs, merged: Merged, elsewhere: ElsewhereWithGradients | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the joint softmax, from the merged out and lse alone."""
    tensors = (inputs.q, inputs.k, inputs.v)
    dq, dk, dv = (inputs.workspace.result(x.shape, x.dtype, x.device) for x in tensors)
    for panel in plan.panels:
        sums = Gradients(dq, dk, dv)
        blocks = (panel.query_block(dq), panel.key_block(dk), panel.key_block(dv))
        if inputs.accumulate_dtype != inputs.q.dtype:
            slots = ("acc_dq", "acc_dk", "acc_dv")
            acc_dq, acc_dk, acc_dv = (
                _accumulator(slot, block, inputs) for slot, block in zip(slots, blocks, strict=True)
            )
            sums = Gradients(acc_dq, acc_dk, acc_dv, panel.origin, panel.kv_origin)
        if not plan.covered:
            for target in blocks if sums.dq is dq else (sums.dq, sums.dk, sums.dv):
                target.zero_()
        for tiles, tile_out, origin in _outputs(plan, panel, inputs, merged.out):
            for tile in tiles:
                sums.add(tile, _tile_gradients(tile, inputs, merged, tile_out, origin))
        for piece in () if elsewhere is None else elsewhere.pieces_with_gradients(panel, sums):
            for tile in piece.tiles:
                parts = _tile_gradients(tile, inputs, merged, merged.out, WHOLE, piece)
                sums.add_queries(tile, parts[0])
                piece.add(tile, parts[1], parts[2])
        if sums.dq is not dq:
            for block, target in zip(blocks, (sums.dq, sums.dk, sums.dv), strict=True):
                block.copy_(target)
    return dq, dk, dv


@dataclass(frozen=True)
class Gradients:
    """Sums of the tiles' gradients, in tensors that start at the given origins."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    origin: Origin = WHOLE
    kv_origin: Origin = WHOLE

    def add(self, tile: Tile, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        self.add_queries(tile, parts[0])
        is_first = tile.opens_keys and tile.first_for_keys
        _put(tile.key_view(self.dk, self.kv_origin), parts[1], is_first)
        _put(tile.key_view(self.dv, self.kv_origin), parts[2], is_first)

    def add_queries(self, tile: Tile, dq: Tensor) -> None:
        _put(tile.query_view(self.dq, self.origin), dq, tile.opens_queries and tile.first_for_queries)


def _put(view: Tensor, part: Tensor, is_first: bool) -> None:
    part = part.view(view.shape)
    view.copy_(part) if is_first else view.add_(part)


class _Rows(NamedTuple):
    """Where results of tiles go: out (b, n, h, d) and lse (b, n, h), each from its origin on."""

    out: Tensor
    out_origin: Origin
    lse: Tensor
    lse_origin: Origin


def _attend(
    tiles: Iterable[Tile], inputs: Inputs, rows: _Rows, piece: Piece | None = None, *, alone: bool = False
) -> None:
    """Attends the tiles into the rows; `alone`: the tiles' branch has them to itself."""
    for tile in tiles:
        part, lse_part = inputs.kernel.forward(*inputs.pack_tile(tile, piece))
        if tile.phantom:
            part, lse_part = add_null_keys(part, lse_part, tile.phantom)
        out_rows = tile.query_view(rows.out, rows.out_origin)
        lse_rows = tile.query_view(rows.lse, rows.lse_origin)
        part, lse_part = part.view(out_rows.shape), lse_part.view(lse_rows.shape)
        if tile.opens_queries and (alone or tile.first_for_queries):
            out_rows.copy_(part)
            lse_rows.copy_(lse_part)
        else:
            merge_(out_rows, lse_rows, part, lse_part)
        del part, lse_part  # or the next tile's results would need fresh memory beside these


def _tile_gradients(
    tile: Tile, inputs: Inputs, merged: Merged, out: Tensor, out_origin: Origin, piece: Piece | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's share of dq, dk and dv; `out` is what its backward subtracts."""
    q, k, v, how = inputs.pack_tile(tile, piece)
    rows, shape = tuple(q.shape[:3]), tuple(q.shape)
    tile_lse = tile.query_view(merged.lse.transpose(1, 2)).reshape(rows)
    # Empty rows (lse -inf) must have probability 0 in every tile: exp(score - inf).
    tile_lse = tile_lse.masked_fill(tile_lse == -math.inf, math.inf)
    tile_out = inputs.pack("out", tile.query_view(out, out_origin), shape)
    tile_grad = inputs.pack("grad_out", tile.query_view(merged.grad_out), shape)
    tile_grad_lse = None
    if merged.grad_lse is not None:
        tile_grad_lse = tile.query_view(merged.grad_lse.transpose(1, 2)).reshape(rows)
    return inputs.kernel.backward(tile_grad, tile_grad_lse, q, k, v, tile_out, tile_lse, how)


def _outputs(
    plan: Plan, panel: Panel, inputs: Inputs, out: Tensor
) -> Iterator[tuple[Iterable[Tile], Tensor, Origin]]:
    """The `out` that a tile's backward subtracts: the merged one or, with detach_mixing, its branch's."""
    if not plan.spec.detach_mixing:
        yield panel.tiles, out, WHOLE
        return
    own_out = _accumulator("own_out", panel.query_block(out), inputs)
    own_lse = inputs.workspace.take("own_lse", own_out.shape[:3], own_out.dtype, own_out.device)
    for _, group in groupby(panel.tiles, key=lambda tile: tile.branch):
        tiles = list(group)
        _attend(tiles, inputs, _Rows(own_out, panel.origin, own_lse, panel.origin), alone=True)
        yield tiles, own_out, panel.origin


def shape_of(inputs: Inputs) -> Shape:
    b, n, h, d = inputs.q.shape
    return Shape(b, n, h, inputs.k.shape[2], d)


def _accumulator(slot: str, block: Tensor, inputs: Inputs) -> Tensor:
    """Scratch in accumulation precision for a panel's block of an output."""
    return inputs.workspace.take(slot, tuple(block.shape), inputs.accumulate_dtype, block.device)


def scatter(x: int) -> int:
    """SplitMix64: neighbouring numbers become seeds that differ in all bits, of which CPUs use the low 32."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) % 2**63
