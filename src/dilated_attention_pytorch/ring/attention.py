"""Dilated attention over a sequence whose parts lie on several ranks: exact, whatever the shards cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .. import engine
from ..checks import autocast_inputs, check_execution, check_inputs, check_positive_int, refuse_forward_mode
from ..core.blocks import check_flags
from ..core.pattern_cache import get_global_pattern_cache
from ..engine import Gradients, Inputs, Merged, shape_of
from ..functional import dilated_attention
from ..ops import Options, document_bounds
from ..plan import DEFAULT_WORKSPACE_BYTES, Panel, Part, Plan, Shape, Tile, plan_crossing, plan_dilated
from ..plan.shape import Pass
from ..spec import DilatedSpec, HeadMixing, HeadOffsets, Tail, one_of
from .agreement import agree, check_alone, nothing, rank_seed
from .autograd import CallTensors, attend
from .comm import Group, Ring, check_timeout, digest, find_ring
from .exchange import Exchange, Piece
from .schedule import STRATEGIES, RingSchedule
from .ulysses import Ulysses

_TILES_A_ROUND = 2**24  # so that the numbers of tiles, from which dropout draws, differ


@dataclass(frozen=True)
class _Call:
    """The static part of a rank's call."""

    ring: Ring
    schedule: RingSchedule
    options: Options
    part: Part
    travels: bool  # whether keys do

    def plan(self, inputs: Inputs, direction: Pass) -> Plan:
        return plan_dilated(
            self.schedule.spec,
            shape_of(inputs),
            itemsize=inputs.q.element_size(),
            direction=direction,
            docs=self.schedule.docs,
            workspace_bytes=self.options.workspace_bytes,
            cache=get_global_pattern_cache() if self.options.use_pattern_cache else None,
            part=self.part,
            lane=self.schedule.lanes[0][1] if self.schedule.strategy == "ring" else None,
        )

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        # With dropout both passes must cut the same tiles.
        plan = self.plan(inputs, "backward" if self.options.dropout_p else "forward")
        elsewhere = _Elsewhere(self, inputs, "forward") if self.travels else None
        results = engine.forward(plan, inputs, elsewhere)
        if elsewhere is not None:
            elsewhere.exchange.finish()
        return results

    def backward(self, inputs: Inputs, merged: Merged) -> tuple[Tensor, Tensor, Tensor]:
        elsewhere = _Elsewhere(self, inputs, "backward") if self.travels else None
        gradients = engine.backward(self.plan(inputs, "backward"), inputs, merged, elsewhere)
        if elsewhere is not None:
            elsewhere.exchange.finish()
        return gradients


class _Elsewhere:
    """The keys of other ranks, for the engine."""

    def __init__(self, call: _Call, inputs: Inputs, direction: Pass) -> None:
        self.call, self.inputs = call, inputs
        self.exchange = Exchange(call.ring, call.schedule, inputs, direction)

    def pieces(self, panel: Panel) -> Iterator[engine.Piece]:
        for piece in self.exchange.pieces((panel.kv_first, panel.kv_heads)):
            yield self._with_tiles(piece)

    def pieces_with_gradients(self, panel: Panel, sums: Gradients) -> Iterator[engine.Piece]:
        first = panel.kv_first - sums.kv_origin[2]
        dk, dv = (x[:, :, first : first + panel.kv_heads] for x in (sums.dk, sums.dv))
        for piece in self.exchange.pieces_with_gradients((panel.kv_first, panel.kv_heads), dk, dv):
            yield self._with_tiles(piece)

    def _with_tiles(self, piece: Piece) -> _TiledPiece:
        call, known = self.call, self.call.schedule.tiles
        tiles = known.get((call.part, piece.number))
        if tiles is None:
            tiles = known[call.part, piece.number] = plan_crossing(
                call.schedule.spec,
                shape_of(self.inputs),
                call.part,
                piece.transfer.keys,
                piece.lane,
                itemsize=self.inputs.q.element_size(),
                docs=call.schedule.docs,
                workspace_bytes=call.options.workspace_bytes,
                first_index=(piece.number + 1) * _TILES_A_ROUND,
            )
        return _TiledPiece(tiles, piece, call.part.start)


@dataclass(frozen=True)
class _TiledPiece:
    """A piece, and the tiles in which dilated attention meets it."""

    tiles: tuple[Tile, ...]
    piece: Piece
    start: int

    def gather(self, tile: Tile, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        k, v, mask = self.piece.gather(self.piece.index_of(tile, partial(self._index, tile)), inputs)
        shape = tile.k_shape(k.shape[-1])
        return k.view(shape), v.view(shape), None if mask is None else mask.view(shape[:3])

    def add(self, tile: Tile, dk: Tensor, dv: Tensor) -> None:
        self.piece.add(self.piece.index_of(tile, partial(self._index, tile)), dk, dv)

    def _index(self, tile: Tile) -> Tensor:
        """The numbers of a tile's keys among the rows of the piece, in the order of its packed keys."""
        device = self.piece.keys.device
        rows = torch.arange(tile.k_first, tile.k_first + tile.k_count, device=device) * tile.rate
        first = self.start + tile.start
        heads = list(tile.heads)[:: tile.heads.group]
        numbers = [self.piece.numbers(tile.batch, head.kv, rows + (first + head.row)) for head in heads]
        batches = torch.arange(tile.num_batch, device=device)
        return (batches[:, None] * self.piece.batch_step + torch.cat(numbers)).flatten()


def _as_it_is(schedule: RingSchedule) -> RingSchedule:
    return schedule


def _cheaper(schedule: RingSchedule) -> RingSchedule:
    """Of the two strategies."""
    other = replace(schedule, strategy="ulysses")
    return other if other.cost < schedule.cost else schedule


def _attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, call: _Call, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    ring, schedule = call.ring, call.schedule
    seed = rank_seed(ring) if call.options.dropout_p else None
    if schedule.strategy == "ring":
        if not q.shape[1]:
            return nothing(q, k, v, return_lse)
        out, lse = attend(CallTensors(q, k, v, key_mask, seed), call)
        return (out, lse) if return_lse else out
    ulysses = Ulysses(ring, schedule, call.options.memory)
    q, k, v = ulysses.to_heads(q, k, v)
    mask = None if key_mask is None else ulysses.all_tokens(key_mask)
    if q.shape[2]:
        out, lse = attend(CallTensors(q, k, v, mask, seed), call)
    else:  # more ranks than key heads: nothing to attend, but gradients to pass on
        out, lse = nothing(q, k, v, return_lse=True)
    if not return_lse:
        return ulysses.to_tokens(out)[0]
    out, lse = ulysses.to_tokens(out, lse.transpose(1, 2).unsqueeze(-1))
    return out, lse.squeeze(-1).transpose(1, 2)


@overload
def ring_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    return_lse: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...


@overload
def ring_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...


# Transfers cannot be traced: compilers break the graph here.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    group: Group = None,
    strategy: str = "auto",
    shard_lengths: Sequence[int] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_mixing: HeadMixing = "all",
    head_offsets: HeadOffsets = "interleaved",
    tail: Tail = "exact",
    detach_mixing: bool = False,
    return_lse: bool = False,
    kernel: str = "auto",
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    memory: str = "fresh",
    use_pattern_cache: bool = True,
    timeout: float | timedelta | None = None,
    steps: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """`dilated_attention` over a sequence of which each rank of a group holds a contiguous part.

    Equals `dilated_attention` of the whole sequence, forward and gradients, for shards of any lengths.
    Segments within a shard need no communication. Of segments that several ranks share, each rank receives
    the keys and values that its own queries select, each once, while it computes with those it has.

    All ranks of the group call it, with the same options, and all of them run backward if one does.

    Args:
        q: (b, n_local, h, d), this rank's tokens; n_local may differ between ranks and be 0 on some.
        k, v: (b, n_local, h_kv, d).
        segment_lengths, dilation_rates: of the whole sequence, as in `dilated_attention`.
        group: a process group or one-dimensional DeviceMesh, by default all ranks; positions follow the order
            of its ranks. Without torch.distributed the call is `dilated_attention`.
        strategy: "ring" moves the keys that are needed; "ulysses" exchanges tokens for heads, so that each
            rank attends all tokens of some heads; "auto" takes what the schedule finds cheaper.
        shard_lengths: tokens of every rank; if given, they are checked against what the ranks hold.
        key_mask: (b, n_local) bool of the local keys, on all ranks or on none.
        cu_seqlens: boundaries of documents in the whole sequence, the same on every rank.
        workspace_bytes: as in `dilated_attention`; what travels at a time takes as much again at most, but
            for single keys of one head.
        timeout: seconds, or a timedelta, that a transfer may take; by default what the group was made with.
        steps: the keys of a rank travel in at least so many parts.
        Others: as in `dilated_attention`. `detach_mixing` needs "ulysses". With `dropout_p` each rank
            draws its own masks.

    Returns:
        out (b, n_local, h, d); with `return_lse` also lse (b, h, n_local).

    Raises RingError if a rank dies or a transfer takes too long, and ValueError, on all ranks, if they were
    called with different arguments.
    """
    ring = find_ring(group)
    options = {
        "is_causal": is_causal,
        "scale": scale,
        "dropout_p": dropout_p,
        "head_mixing": head_mixing,
        "head_offsets": head_offsets,
        "tail": tail,
        "detach_mixing": detach_mixing,
    }
    execution = {
        "kernel": kernel,
        "workspace_bytes": workspace_bytes,
        "memory": memory,
        "use_pattern_cache": use_pattern_cache,
    }
    if ring is None or ring.size == 1:
        check_timeout(timeout)
        one_of("strategy", strategy, STRATEGIES)
        check_alone(shard_lengths, q)
        return dilated_attention(  # type: ignore[no-any-return, call-overload]
            *(q, k, v, segment_lengths, dilation_rates),
            **options,
            **execution,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            return_lse=return_lse,
            steps=steps,
        )
    with agree(ring, "ring_dilated_attention", q, timeout) as agreement:
        spec = DilatedSpec(segment_lengths, dilation_rates, **options)  # type: ignore[arg-type]
        q, k, v = autocast_inputs(q, k, v)
        check_inputs(q, k, v, key_mask, cu_seqlens, least_length=0)
        refuse_forward_mode("ring_dilated_attention", q, k, v)
        check_execution(**execution)  # type: ignore[arg-type]
        check_flags(return_lse=return_lse)
        check_positive_int("steps", steps)
        one_of("strategy", strategy, STRATEGIES)
        if detach_mixing and strategy == "ring":
            raise ValueError(
                "detach_mixing needs the output of each branch in backward, which a ring does not keep: "
                'strategy must be "ulysses" or "auto", got "ring"'
            )
        lengths = agreement.on_call(
            q,
            k,
            v,
            key_mask,
            shard_lengths,
            is_causal=int(is_causal),
            strategy=STRATEGIES.index(strategy),
            workspace_bytes=workspace_bytes,
            steps=steps,
            return_lse=int(return_lse),
            segment_lengths=digest(spec.segment_lengths),
            dilation_rates=digest(spec.dilation_rates),
            scale=digest(spec.scale),
            dropout_p=digest(spec.dropout_p),
            head_mixing=digest(spec.head_mixing),
            head_offsets=digest(spec.head_offsets),
            tail=digest(spec.tail),
            detach_mixing=int(spec.detach_mixing),
            cu_seqlens=0 if cu_seqlens is None else digest(cu_seqlens.tolist()),
        )
    b, _, h, d = q.shape
    n = sum(lengths)
    schedule = RingSchedule(
        Shape(b, n, h, k.shape[2], d),
        lengths,
        q.element_size(),
        key_mask is not None,
        workspace_bytes,
        steps,
        spec=spec,
        docs=None if cu_seqlens is None else document_bounds(cu_seqlens, n),
        strategy="ulysses" if strategy == "ulysses" or detach_mixing else "ring",
        return_lse=return_lse,
    )
    is_open = strategy == "auto" and not detach_mixing
    choose = partial(_cheaper if is_open else _as_it_is, schedule)
    if use_pattern_cache:  # an earlier one knows its rounds
        schedule = get_global_pattern_cache().get_or_build(("ring", schedule, is_open), choose)
    else:
        schedule = choose()
    start = schedule.shard(ring.rank)[0]
    part = Part(n, start, h, 0)
    if schedule.strategy == "ulysses":
        part = Part(n, 0, h, sum(schedule.head_shares[: ring.rank]) * (h // k.shape[2]))
    call = _Call(
        ring,
        schedule,
        Options(
            spec.segment_lengths,
            spec.dilation_rates,
            spec.is_causal,
            1.0 / math.sqrt(d) if spec.scale is None else spec.scale,
            spec.dropout_p,
            spec.head_mixing,
            spec.head_offsets,
            spec.tail,
            spec.detach_mixing,
            **execution,  # type: ignore[arg-type]
            steps=1,
        ),
        part,
        travels=schedule.strategy == "ring" and bool(schedule.rounds(ring.rank)),
    )
    return _attend(q, k, v, key_mask, call, return_lse)
