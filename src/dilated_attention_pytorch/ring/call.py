"""A call of several ranks: agreed on by all, then a kernel on each rank's shard, known to autograd.

Strategy "ring" sends keys to the queries that need them. Strategy "ulysses" exchanges tokens for heads before
and heads for tokens afterwards, so that each rank attends all tokens of some heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..checks import autocast_inputs, check_count, check_flags, check_inputs, one_of, refuse_forward_mode
from ..core.attention_buffer_manager import find_source
from ..core.pattern_cache import PatternCache
from ..core.workspace import Workspace
from ..kernels import Merged
from ..ops import RunOptions, Tensors, attention_inputs, check_execution, run_options, without_autocast
from ..plan import DEFAULT_WORKSPACE_BYTES, Pass, Shape
from ..spec import DilatedSpec, Execution
from .comm import Agreement, Group, Ring, digest, find_others
from .needs import BlockNeeds, DilatedNeeds
from .remote_kv import RingKV
from .schedule import STRATEGIES, RingSchedule, Strategy
from .shards import check_lengths

Result = Tensor | tuple[Tensor, Tensor]


class RingSettings(NamedTuple):
    """Who takes part in a call, and how: the options of `ring_dilated_attention` beside those of attention.

    `steps`: the keys of a rank are sent in at least so many chunks; of a rank alone, see `functional.attend`.
    """

    group: Group = None
    strategy: str = "auto"
    shard_lengths: Sequence[int] | None = None
    timeout: float | timedelta | None = None
    steps: int = 1
    execution: Execution | None = None
    return_lse: bool = False

    def ring(self, q: Tensor) -> Ring | None:
        """The ranks of a call, if there are several; else the settings are checked here."""
        ring, given = find_others(self.group, self.timeout), self.shard_lengths
        if ring is not None:
            return ring
        one_of("strategy", self.strategy, STRATEGIES)
        check_flags(return_lse=self.return_lse)
        if given is not None and isinstance(q, Tensor) and check_lengths(given, 1)[0] != q.shape[1]:
            raise ValueError(f"the only rank has all {q.shape[1]} tokens, got shard_lengths {given}")
        return None


class AgreedCall(NamedTuple):
    """A call that all ranks make alike."""

    ring: Ring
    tensors: Tensors
    spec: DilatedSpec
    execution: Execution
    settings: RingSettings
    lengths: tuple[int, ...]  # tokens of all ranks

    @property
    def shape(self) -> Shape:
        """Of the whole sequence."""
        return self.tensors.shape._replace(n=sum(self.lengths))

    def attend(
        self, needs: DilatedNeeds | BlockNeeds, default_bytes: int, cache: PatternCache, strategy: str
    ) -> Result:
        """out, or (out, lse); the schedule of an equal call before knows its steps and plans."""
        (q, _, _, key_mask, *_), execution, settings = self.tensors, self.execution, self.settings
        size = execution.workspace_bytes or DEFAULT_WORKSPACE_BYTES
        sizes = q.element_size(), key_mask is not None, size, settings.steps
        first: Strategy = "ulysses" if strategy == "ulysses" else "ring"
        schedule = RingSchedule(needs, self.lengths, *sizes, first, settings.return_lse)
        build = schedule.cheaper if strategy == "auto" else lambda: schedule
        key = ("ring", schedule, strategy)
        schedule = cache.get_or_build(key, build) if execution.use_pattern_cache else build()
        options = run_options(self.spec, self.shape.d, execution, default_bytes)
        return attend_shard(self.tensors, RankCall(self.ring, schedule, options))


def agree_on_call(
    agreement: Agreement, tensors: Tensors, spec: DilatedSpec, settings: RingSettings, pattern: int = 0
) -> AgreedCall:
    """Checks a call on this rank, and that the others make it with the same arguments."""
    one_of("strategy", settings.strategy, STRATEGIES)
    key_mask, cu_seqlens = tensors[3:5]
    q, k, v = autocast_inputs(*tensors[:3])
    check_inputs(q, k, v, key_mask, cu_seqlens, least_length=0)
    refuse_forward_mode(agreement.function, q, k, v)
    execution = check_execution(settings.execution)
    check_flags(return_lse=settings.return_lse)
    check_count("steps", settings.steps, least=1)
    (b, n, h, d), ring, given = q.shape, agreement.ring, settings.shard_lengths
    given = None if given is None else check_lengths(given, ring.size)
    if given is not None and given[ring.rank] != n:
        found = f"rank {ring.rank} {given[ring.rank]} tokens"
        raise ValueError(f"shard_lengths gives {found}, got tensors of {n}")
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
        "return_lse": settings.return_lse,
        "cu_seqlens": 0 if cu_seqlens is None else digest(cu_seqlens.tolist()),
        **{name: x if isinstance(x, bool) else digest(x) for name, x in vars(spec).items()},
        "strategy": STRATEGIES.index(settings.strategy),
        "pattern": pattern,
    }
    lengths = tuple(row[0] for row in agreement.on(shared, [n]))
    if given is not None and given != lengths:
        raise ValueError(f"shard_lengths must be the tokens of the ranks, {lengths}, got {given}")
    if not sum(lengths):
        raise ValueError("the ranks must have at least one token, got none")
    return AgreedCall(ring, Tensors(q, k, v, key_mask), spec, execution, settings, lengths)


class RankCall(NamedTuple):
    """The static part of a rank's call."""

    ring: Ring
    schedule: RingSchedule
    options: RunOptions

    def workspace(self, device: torch.device) -> AbstractContextManager[Workspace]:
        """Scratch from where `memory` says; no second try in smaller batches, which others would not make."""
        source = find_source(self.options.memory)
        return nullcontext(Workspace()) if source is None else source.workspace(device)

    def run(self, tensors: Tensors, merged: Merged | None = None) -> tuple[Tensor, ...]:
        """out and lse; or, from those of the forward pass and their gradients, dq, dk and dv."""
        (q, k, v, *_), rank = tensors, self.ring.rank
        if not (q.shape[1] and q.shape[2]):  # no tokens, or no heads
            dq, dk, dv = map(torch.zeros_like, (q, k, v))
            lse = dq.sum(-1).transpose(1, 2).to(torch.promote_types(q.dtype, torch.float32))
            return (dq, lse) if merged is None else (dq, dk, dv)
        direction: Pass = "forward" if merged is None else "backward"
        with without_autocast(q.device), self.workspace(q.device) as workspace:
            streams = self.schedule.strategy == "ring"
            kernel, inputs = attention_inputs(self.options, tensors, workspace, streams)
            plan, remote = self.schedule.plan(rank, direction), None
            if self.schedule.steps(rank):
                remote = RingKV(self.ring, self.schedule, inputs, direction)
            if merged is None:
                results: tuple[Tensor, ...] = kernel.forward(plan, inputs, remote)
            else:
                results = kernel.backward(plan, inputs, merged, remote)
            if remote is not None:
                remote.finish()
        return results

    def exchange(
        self, direction: Pass, to_heads: bool, heads: Sequence[int], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Tokens for heads: (b, n_local, h, d) of all `heads` -> (b, n, h, d) of this rank's; or back.

        In memory (tokens, b, heads, d), so that the tokens of other ranks arrive in place.
        """
        schedule, rank, results = self.schedule, self.ring.rank, []
        what = f"{direction} pass, {'tokens to heads' if to_heads else 'heads to tokens'}"
        with self.workspace(tensors[0].device) as workspace:
            for x, total in zip(tensors, heads, strict=True):
                shares = (share * total // schedule.shape.h_kv for share in schedule.head_shares)
                of_heads = [slice(*pair) for pair in pairwise(accumulate(shares, initial=0))]
                held = of_heads[rank].stop - of_heads[rank].start
                n, num = (schedule.shape.n, held) if to_heads else (schedule.shard_lengths[rank], total)
                result = workspace.result((n, len(x), num, x.shape[3]), x.dtype, x.device)
                some, every = (x.transpose(0, 1), result) if to_heads else (result, x.transpose(0, 1))
                sides = [some[:, :, each] for each in of_heads], self.shards(every)
                self.ring.trade(what, *(sides if to_heads else sides[::-1]), workspace)
                results.append(result.transpose(0, 1))
        return results

    def shards(self, x: Tensor) -> list[Tensor]:
        """The tokens of each rank, of a tensor (n, ...) of all of them."""
        return [x[slice(*self.schedule.shard(rank))] for rank in range(self.ring.size)]

    def whole_mask(self, mask: Tensor | None) -> Tensor | None:
        """(b, n) of all ranks' masks (b, n_local)."""
        if mask is None:
            return None
        own = mask.transpose(0, 1).to(torch.uint8).contiguous()
        everyone = own.new_empty(self.schedule.shape.n, len(mask))
        self.ring.trade("forward pass, masks", [own] * self.ring.size, self.shards(everyone), Workspace())
        return everyone.bool().transpose(0, 1)


def attend_shard(tensors: Tensors, call: RankCall) -> Result:
    """out, or (out, lse), of a rank's shard (b, n_local, heads, d); its masks of dropout are its own."""
    if call.options.dropout_p:  # ranks that share a seed must not share masks
        drawn = torch.randint(2**61, (1,), device="cpu")
        tensors = tensors._replace(seed=(drawn + call.ring.rank * 2**50) % 2**62)
    if call.schedule.strategy == "ring":
        out, lse = _Attention.apply(call, *tensors)  # type: ignore[no-untyped-call]
        return (out, lse) if call.schedule.return_lse else out
    h, h_kv = call.schedule.shape[2:4]
    q, k, v = _Exchange.apply(call, True, (h, h_kv, h_kv), *tensors[:3])  # type: ignore[no-untyped-call]
    tensors = tensors._replace(q=q, k=k, v=v, key_mask=call.whole_mask(tensors.key_mask))
    out, lse = _Attention.apply(call, *tensors)  # type: ignore[no-untyped-call]
    results = (out, lse.transpose(1, 2).unsqueeze(-1))[: 1 + call.schedule.return_lse]
    out, *lses = _Exchange.apply(call, False, (h, h)[: len(results)], *results)  # type: ignore[no-untyped-call]
    return (out, lses[0].squeeze(-1).transpose(1, 2)) if lses else out


class _Attention(torch.autograd.Function):
    """A rank's attention. Also a rank without tokens or gradients takes part: others wait for it."""

    @staticmethod
    def forward(ctx: Any, call: RankCall, *tensors: Any) -> tuple[Tensor, ...]:
        out, lse = call.run(Tensors(*tensors))
        ctx.save_for_backward(*tensors, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        merged = Merged(out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse)
        return None, *ctx.call.run(Tensors(*tensors), merged), *(None,) * (len(tensors) - 3)


class _Exchange(torch.autograd.Function):
    """A step of its own in the graph, so that what attention saved is freed before its gradients travel."""

    @staticmethod
    def forward(ctx: Any, call: RankCall, to_heads: bool, heads: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.way = call, to_heads, heads
        return tuple(call.exchange("forward", to_heads, heads, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        call, to_heads, heads = ctx.way
        return None, None, None, *call.exchange("backward", not to_heads, heads, gradients)
