"""Dilated attention over a sequence whose parts lie on several ranks: exact, whatever the shards cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any, Literal, overload

from torch import Tensor

from ..attention_op import check_execution
from ..checks import (
    autocast_inputs,
    check_flags,
    check_inputs,
    check_positive_int,
    named_keywords,
    one_of,
    refuse_forward_mode,
)
from ..core.pattern_cache import get_global_pattern_cache
from ..core.tracing import uncompiled
from ..functional import dilated_attention
from ..ops import Options, document_bounds
from ..plan import DEFAULT_WORKSPACE_BYTES, Shape
from ..spec import DilatedSpec, HeadMixing, HeadOffsets, Tail
from .agreement import agree, check_alone, nothing, rank_seed
from .autograd import CallTensors, attend
from .comm import Group, check_timeout, digest, find_ring
from .dilated_call import DilatedCall
from .schedule import STRATEGIES, RingSchedule
from .ulysses import Ulysses


def _attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, call: DilatedCall, return_lse: bool
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


@named_keywords  # type: ignore[misc]  # the overloads leave the options open
# Transfers cannot be traced: compilers break the graph here.
@uncompiled
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
        facts = {
            "strategy": STRATEGIES.index(strategy),
            "workspace_bytes": workspace_bytes,
            "steps": steps,
            "return_lse": int(return_lse),
            "cu_seqlens": 0 if cu_seqlens is None else digest(cu_seqlens.tolist()),
        }
        lengths = agreement.on_call(q, k, v, key_mask, shard_lengths, facts | _facts(spec))
    b, _, h, d = q.shape
    schedule = RingSchedule(
        Shape(b, sum(lengths), h, k.shape[2], d),
        lengths,
        q.element_size(),
        key_mask is not None,
        workspace_bytes,
        steps,
        spec=spec,
        docs=None if cu_seqlens is None else document_bounds(cu_seqlens, sum(lengths)),
        strategy="ulysses" if strategy == "ulysses" or detach_mixing else "ring",
        return_lse=return_lse,
    )
    schedule = _settle(schedule, strategy == "auto" and not detach_mixing, use_pattern_cache)
    call = DilatedCall(ring, schedule, _op_options(spec, d, **execution))
    return _attend(q, k, v, key_mask, call, return_lse)


def _facts(spec: DilatedSpec) -> dict[str, int]:
    """What ranks must agree on: flags as numbers, the rest as digests."""
    facts = {each.name: getattr(spec, each.name) for each in fields(spec)}
    return {name: int(x) if isinstance(x, bool) else digest(x) for name, x in facts.items()}


def _settle(schedule: RingSchedule, is_open: bool, use_pattern_cache: bool) -> RingSchedule:
    """The schedule to follow: an equal one of before, which knows its rounds; the cheaper if it is open."""

    def choose() -> RingSchedule:
        return schedule.cheaper() if is_open else schedule

    if not use_pattern_cache:
        return choose()
    settled: RingSchedule = get_global_pattern_cache().get_or_build(("ring", schedule, is_open), choose)
    return settled


def _op_options(spec: DilatedSpec, d: int, **execution: Any) -> Options:
    of_spec = {each.name: getattr(spec, each.name) for each in fields(spec)}
    return Options(**of_spec | {"scale": spec.scale_for(d)}, **execution, steps=1, head_slice=())
