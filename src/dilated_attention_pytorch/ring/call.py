"""A call of several ranks: agreed on by all, then a kernel on each rank's shard, known to autograd.

Strategy "ring" sends keys to the queries that need them. Strategy "ulysses" exchanges tokens for heads before
and heads for tokens afterwards, so that each rank attends all tokens of some heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..checks import (
    autocast_inputs,
    check_flags,
    check_inputs,
    check_positive_int,
    one_of,
    refuse_forward_mode,
)
from ..core.attention_buffer_manager import find_source
from ..core.pattern_cache import PatternCache
from ..core.workspace import Workspace
from ..kernels import Merged
from ..ops import RunOptions, Tensors, attention_inputs, check_execution, without_autocast
from ..plan import DEFAULT_WORKSPACE_BYTES, Pass, Shape
from ..spec import DilatedSpec, Execution
from .comm import Agreement, Group, Message, Ring, check_timeout, digest
from .needs import BlockNeeds, DilatedNeeds
from .remote_kv import RingKV
from .schedule import STRATEGIES, RingSchedule, Strategy
from .shards import check_lengths


class RingSettings(NamedTuple):
    """Who takes part in a call, and how: the options of `ring_dilated_attention` beside those of attention.

    `steps`: the keys of a rank are sent in at least so many chunks; of a rank alone, see `functional.attend`.
    """

    group: Group = None
    strategy: str = "auto"
    shard_lengths: Sequence[int] | None = None
    timeout: float | timedelta | None = None
    steps: int = 1


class AgreedCall(NamedTuple):
    """A call that all ranks make alike."""

    ring: Ring
    tensors: Tensors
    execution: Execution
    settings: RingSettings
    return_lse: bool
    lengths: tuple[int, ...]  # tokens of all ranks

    @property
    def shape(self) -> Shape:
        """Of the whole sequence."""
        b, _, h, d = self.tensors.q.shape
        return Shape(b, sum(self.lengths), h, self.tensors.k.shape[2], d)

    def attend(
        self, needs: DilatedNeeds | BlockNeeds, options: RunOptions, cache: PatternCache, strategy: str
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out, or (out, lse); the schedule of an equal call before knows its steps and plans."""
        size = self.execution.workspace_bytes or DEFAULT_WORKSPACE_BYTES
        q, key_mask = self.tensors.q, self.tensors.key_mask
        sizes = q.element_size(), key_mask is not None, size, self.settings.steps
        first: Strategy = "ulysses" if strategy == "ulysses" else "ring"
        schedule = RingSchedule(needs, self.lengths, *sizes, first, self.return_lse)
        build = schedule.cheaper if strategy == "auto" else lambda: schedule
        if self.execution.use_pattern_cache:
            schedule = cache.get_or_build(("ring", schedule, strategy), build)
        else:
            schedule = build()
        return attend_shard(self.tensors, RankCall(self.ring, schedule, options), self.return_lse)


def agree_on_call(
    agreement: Agreement,
    tensors: Tensors,
    spec: DilatedSpec,
    execution: Execution | None,
    settings: RingSettings,
    return_lse: bool,
    facts: dict[str, int],
) -> AgreedCall:
    """Checks a call on this rank, and that the others make it with the same arguments."""
    _, _, _, key_mask, cu_seqlens, *_ = tensors
    q, k, v = autocast_inputs(*tensors[:3])
    check_inputs(q, k, v, key_mask, cu_seqlens, least_length=0)
    refuse_forward_mode(agreement.function, q, k, v)
    execution = check_execution(execution)
    check_flags(return_lse=return_lse)
    check_positive_int("steps", settings.steps)
    ring, given = agreement.ring, settings.shard_lengths
    b, n, h, d = q.shape
    given = None if given is None else check_lengths(given, ring.size)
    if given is not None and given[ring.rank] != n:
        rank = ring.rank
        raise ValueError(f"shard_lengths gives rank {rank} {given[rank]} tokens, got tensors of {n}")
    of_spec = {each.name: getattr(spec, each.name) for each in fields(spec)}
    shared = {
        "the batch size": b,
        "the number of heads": h,
        "the number of key heads": k.shape[2],
        "the head dimension": d,
        "the dtype": digest(q.dtype),
        "having a key_mask": key_mask is not None,
        "requiring gradients": torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
        "shard_lengths": 0 if given is None else digest(given),
        "workspace_bytes": execution.workspace_bytes or DEFAULT_WORKSPACE_BYTES,
        "steps": settings.steps,
        "return_lse": return_lse,
        "cu_seqlens": 0 if cu_seqlens is None else digest(cu_seqlens.tolist()),
        **{name: x if isinstance(x, bool) else digest(x) for name, x in of_spec.items()},
        **facts,
    }
    lengths = tuple(row[0] for row in agreement.on(shared, [n]))
    if given is not None and given != lengths:
        raise ValueError(f"shard_lengths must be the tokens of the ranks, {lengths}, got {given}")
    if not sum(lengths):
        raise ValueError("the ranks must have at least one token, got none")
    return AgreedCall(ring, Tensors(q, k, v, key_mask), execution, settings, return_lse, lengths)


def check_alone(q: Tensor, settings: RingSettings, return_lse: bool) -> None:
    """The settings of a call in one process."""
    check_timeout(settings.timeout)
    one_of("strategy", settings.strategy, STRATEGIES)
    check_flags(return_lse=return_lse)
    given = settings.shard_lengths
    if given is not None and isinstance(q, Tensor) and check_lengths(given, 1)[0] != q.shape[1]:
        raise ValueError(f"the only rank has all {q.shape[1]} tokens, got shard_lengths {given}")


@dataclass(frozen=True)
class RankCall:
    """The static part of a rank's call."""

    ring: Ring
    schedule: RingSchedule
    options: RunOptions

    def workspace(self, device: torch.device) -> AbstractContextManager[Workspace]:
        """Scratch from where `memory` says.

        A rank that runs out of memory does not try again in smaller batches as it would alone: others would
        not.
        """
        source = find_source(self.options.memory)
        return nullcontext(Workspace()) if source is None else source.workspace(device)

    def run(self, tensors: Tensors, merged: Merged | None = None) -> Any:
        """out and lse; or, from those of the forward pass and their gradients, dq, dk and dv."""
        direction: Pass = "forward" if merged is None else "backward"
        device, rank = tensors.q.device, self.ring.rank
        with without_autocast(device), self.workspace(device) as workspace:
            streams = self.schedule.strategy == "ring"
            kernel, inputs = attention_inputs(self.options, tensors, workspace, streams)
            plan, remote = self.schedule.plan(rank, direction), []
            if self.schedule.steps(rank):
                remote = [RingKV(self.ring, self.schedule, inputs, direction)]
            if merged is None:
                results: tuple[Tensor, ...] = kernel.forward(plan, inputs, *remote)
            else:
                results = kernel.backward(plan, inputs, merged, *remote)
            for each in remote:
                each.finish()
        return results


def attend_shard(tensors: Tensors, call: RankCall, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """out, or (out, lse), of a rank's shard (b, n_local, heads, d); its masks of dropout are its own."""
    if call.options.dropout_p:  # ranks that share a seed must not share masks
        drawn = torch.randint(2**61, (1,), device="cpu")
        tensors = tensors._replace(seed=(drawn + call.ring.rank * 2**50) % 2**62)
    if call.schedule.strategy == "ring":
        out, lse = _attend(tensors, call)
        return (out, lse) if return_lse else out
    h, h_kv = call.schedule.shape[2:4]
    q, k, v = _Exchange.apply(call, (h, h_kv, h_kv), True, *tensors[:3])  # type: ignore[no-untyped-call]
    mask = None if tensors.key_mask is None else _all_tokens(tensors.key_mask, call)
    out, lse = _attend(tensors._replace(q=q, k=k, v=v, key_mask=mask), call)
    results = (out, lse.transpose(1, 2).unsqueeze(-1)) if return_lse else (out,)
    out, *lses = _Exchange.apply(call, (h,) * len(results), False, *results)  # type: ignore[no-untyped-call]
    return (out, lses[0].squeeze(-1).transpose(1, 2)) if return_lse else out


def _attend(tensors: Tensors, call: RankCall) -> tuple[Tensor, Tensor]:
    q, k, v = tensors[:3]
    if q.shape[1] and q.shape[2]:
        result: tuple[Tensor, Tensor] = _Attention.apply(*tensors, call)  # type: ignore[no-untyped-call]
        return result
    # No tokens, or no heads: nothing to attend, but gradients to pass on. The product saves a tensor for
    # backward, or activation checkpointing would not call this rank again with the others.
    out = (q + k.sum() + v.sum()) * q.new_ones(())
    return out, out.sum(-1).transpose(1, 2).to(torch.promote_types(q.dtype, torch.float32))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, call = args
        out, lse = call.run(Tensors(*tensors))
        ctx.save_for_backward(*tensors, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        # Also without a gradient of its own: the others wait for this rank.
        merged = Merged(out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse)
        gradients = ctx.call.run(Tensors(*tensors), merged)
        return *gradients, *(None,) * (len(tensors) - 2)


class _Exchange(torch.autograd.Function):
    """Tokens for heads: (b, n_local, heads, d) of all `heads` -> (b, n, heads, d) of this rank's; or back."""

    @staticmethod
    def forward(
        ctx: Any, call: RankCall, heads: tuple[int, ...], to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.way = call, heads, to_heads
        return _exchange(call, heads, to_heads, tensors, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        call, heads, to_heads = ctx.way
        return None, None, None, *_exchange(call, heads, not to_heads, gradients, "backward")


def _exchange(
    call: RankCall, heads: tuple[int, ...], to_heads: bool, tensors: tuple[Tensor, ...], direction: Pass
) -> tuple[Tensor, ...]:
    """Messages are (tokens, b, heads, d), so that the tokens of other ranks arrive in place."""
    ring, schedule, results = call.ring, call.schedule, []
    ranks, what = range(ring.size), "tokens to heads" if to_heads else "heads to tokens"
    others = [peer for peer in ranks if peer != ring.rank]
    with call.workspace(tensors[0].device) as workspace:
        for x, total in zip(tensors, heads, strict=True):
            source, like = x.transpose(0, 1), (x.dtype, x.device)
            bounds = accumulate(
                (share * total // schedule.shape.h_kv for share in schedule.head_shares), initial=0
            )
            of_heads, of_tokens = (
                [slice(*pair) for pair in pairwise(bounds)],
                [slice(*schedule.shard(rank)) for rank in ranks],
            )
            if to_heads:
                parts = [source[:, :, each] for each in of_heads]
                result = workspace.result((schedule.shape.n, *parts[ring.rank].shape[1:]), *like)
                places = [result[each] for each in of_tokens]
            else:
                parts = [source[each] for each in of_tokens]
                tokens, b, _, d = parts[ring.rank].shape
                result = workspace.result((tokens, b, total, d), *like)
                places = [result[:, :, each] for each in of_heads]
            places[ring.rank].copy_(parts[ring.rank])
            leaving, arriving = list[Message](), list[Message]()
            for peer in others:
                packed = workspace.take(f"comm_out_{peer}", tuple(parts[peer].shape), *like)
                leaving.append((peer, packed.copy_(parts[peer])))
                if to_heads:
                    arriving.append((peer, places[peer]))
                else:
                    arriving.append(
                        (peer, workspace.take(f"comm_in_{peer}", tuple(places[peer].shape), *like))
                    )
            ring.exchange(f"{direction} pass, {what}", arriving, leaving)
            for peer, arrived in () if to_heads else arriving:
                places[peer].copy_(arrived)
            results.append(result.transpose(0, 1))
    return tuple(results)


def _all_tokens(mask: Tensor, call: RankCall) -> Tensor:
    """(b, n) of all ranks' masks (b, n_local)."""
    ring, schedule = call.ring, call.schedule
    everyone = torch.empty(schedule.shape.n, mask.shape[0], dtype=torch.uint8, device=mask.device)
    shards = [everyone[slice(*schedule.shard(rank))] for rank in range(ring.size)]
    own = shards[ring.rank].copy_(mask.transpose(0, 1))
    arriving = [(peer, shard) for peer, shard in enumerate(shards) if peer != ring.rank]
    ring.exchange("forward pass, masks", arriving, [(peer, own) for peer, _ in arriving])
    return everyone.bool().transpose(0, 1)
