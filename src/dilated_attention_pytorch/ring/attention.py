"""Dilated attention over a sequence whose parts lie on several ranks: exact, whatever the shards cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, overload

from torch import Tensor

from ..checks import (
    autocast_inputs,
    check_flags,
    check_inputs,
    check_positive_int,
    document_bounds,
    one_of,
    refuse_forward_mode,
)
from ..core.pattern_cache import get_global_pattern_cache
from ..core.tracing import uncompiled
from ..functional import Lengths, Rates, spec_of
from ..functional import attend as attend_alone
from ..ops import Tensors, check_execution, run_options
from ..plan import DEFAULT_WORKSPACE_BYTES, Shape
from ..spec import DilatedSpec, Execution, HeadMixing, HeadOffsets, Tail, takes_spec
from .agreement import agree, check_alone, nothing, rank_seed
from .call import RankCall, attend
from .comm import Group, check_timeout, digest, find_ring
from .schedule import STRATEGIES, RingSchedule
from .ulysses import Ulysses


def _attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, call: RankCall, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    ring, schedule = call.ring, call.schedule
    assert isinstance(schedule, RingSchedule)
    seed = rank_seed(ring) if call.options.dropout_p else None
    if schedule.strategy == "ring":
        if not q.shape[1]:
            return nothing(q, k, v, return_lse)
        out, lse = attend(Tensors(q, k, v, key_mask, seed=seed), call)
        return (out, lse) if return_lse else out
    ulysses = Ulysses(ring, schedule, call.options.memory)
    q, k, v = ulysses.to_heads(q, k, v)
    mask = None if key_mask is None else ulysses.all_tokens(key_mask)
    if q.shape[2]:
        out, lse = attend(Tensors(q, k, v, mask, seed=seed), call)
    else:  # more ranks than key heads: nothing to attend, but gradients to pass on
        out, lse = nothing(q, k, v, return_lse=True)
    if not return_lse:
        return ulysses.to_tokens(out)[0]
    out, lse = ulysses.to_tokens(out, lse.transpose(1, 2).unsqueeze(-1))
    return out, lse.squeeze(-1).transpose(1, 2)


class RingSettings(NamedTuple):
    """Who takes part in a call, and how: the options of `ring_dilated_attention` beside those of attention.

    `steps`: the keys of a rank travel in at least so many parts; of a rank alone, see `functional.attend`.
    """

    group: Group = None
    strategy: str = "auto"
    shard_lengths: Sequence[int] | None = None
    timeout: float | timedelta | None = None
    steps: int = 1


@overload
def ring_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Lengths,
    dilation_rates: Rates = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...


@overload
def ring_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Lengths,
    dilation_rates: Rates = ...,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...


@takes_spec  # type: ignore[misc]  # the overloads leave the options open
# Transfers cannot be traced: compilers break the graph here.
@uncompiled
def ring_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Lengths,
    dilation_rates: Rates = None,
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
    execution: Execution | None = None,
    timeout: float | timedelta | None = None,
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
        execution: as in `dilated_attention`; communication buffers take at most another `workspace_bytes`,
            but for single keys of one head.
        timeout: seconds, or a timedelta, that a transfer may take; by default what the group was made with.
        Others: as in `dilated_attention`. `detach_mixing` needs "ulysses". With `dropout_p` each rank
            draws its own masks.

    Returns:
        out (b, n_local, h, d); with `return_lse` also lse (b, h, n_local).

    Raises RingError if a rank dies or a transfer takes too long, and ValueError, on all ranks, if they were
    called with different arguments.
    """
    branches, mixing = (segment_lengths, dilation_rates), (head_mixing, head_offsets, tail, detach_mixing)
    make_spec = partial(spec_of, *branches, is_causal, scale, dropout_p, *mixing)
    options = RingSettings(group, strategy, shard_lengths, timeout)
    given = {"key_mask": key_mask, "cu_seqlens": cu_seqlens, "return_lse": return_lse}
    return attend_ring(q, k, v, make_spec, execution, options, **given)  # type: ignore[arg-type]


@uncompiled
def attend_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    make_spec: Callable[[], DilatedSpec],
    execution: Execution | None,
    options: RingSettings,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`ring_dilated_attention`. The spec is made here, so that all ranks learn of one that cannot be made."""
    ring, strategy, steps = find_ring(options.group), options.strategy, options.steps
    if ring is None or ring.size == 1:
        check_timeout(options.timeout)
        one_of("strategy", strategy, STRATEGIES)
        check_alone(options.shard_lengths, q)
        spec = make_spec()
        check_flags(return_lse=return_lse)
        out, lse = attend_alone(
            q, k, v, spec, execution, key_mask=key_mask, cu_seqlens=cu_seqlens, steps=steps
        )
        return (out, lse) if return_lse else out
    with agree(ring, "ring_dilated_attention", q, options.timeout) as agreement:
        spec = make_spec()
        q, k, v = autocast_inputs(q, k, v)
        check_inputs(q, k, v, key_mask, cu_seqlens, least_length=0)
        refuse_forward_mode("ring_dilated_attention", q, k, v)
        execution = check_execution(execution)
        check_flags(return_lse=return_lse)
        check_positive_int("steps", steps)
        one_of("strategy", strategy, STRATEGIES)
        if spec.detach_mixing and strategy == "ring":
            raise ValueError(
                "detach_mixing needs the output of each branch in backward, which a ring does not keep: "
                'strategy must be "ulysses" or "auto", got "ring"'
            )
        run = run_options(spec, q.shape[-1], execution, DEFAULT_WORKSPACE_BYTES)
        facts = {
            "strategy": STRATEGIES.index(strategy),
            "workspace_bytes": run.workspace_bytes,
            "steps": steps,
            "return_lse": int(return_lse),
            "cu_seqlens": 0 if cu_seqlens is None else digest(cu_seqlens.tolist()),
        }
        lengths = agreement.on_call(q, k, v, key_mask, options.shard_lengths, facts | _facts(spec))
    b, _, h, d = q.shape
    schedule = RingSchedule(
        Shape(b, sum(lengths), h, k.shape[2], d),
        lengths,
        q.element_size(),
        key_mask is not None,
        run.workspace_bytes,
        steps,
        spec=spec,
        docs=None if cu_seqlens is None else document_bounds(cu_seqlens, sum(lengths)),
        strategy="ulysses" if strategy == "ulysses" or spec.detach_mixing else "ring",
        return_lse=return_lse,
    )
    schedule = _settle(schedule, strategy == "auto" and not spec.detach_mixing, run.use_pattern_cache)
    return _attend(q, k, v, key_mask, RankCall(ring, schedule, run), return_lse)


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
