"""WHERE rows live: who needs which keys of whom, and what that costs. Plain data; needs no processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch

from ..checks import check_bounds, check_flags, check_positive_int, one_of, whole_numbers
from ..core.host_memory import describe_bytes
from ..core.pattern_cache import PatternCache
from ..plan import (
    DEFAULT_WORKSPACE_BYTES,
    Pass,
    Plan,
    Range,
    Shape,
    Shard,
    plan_crossing,
    plan_dilated,
)
from ..plan.dilated import Head, branch_heads
from ..spec import DilatedSpec, HeadMixing, HeadOffsets
from .positions import Positions
from .rounds import Round, Schedule, check_lengths, even_shards
from .segments import Segments, branch_segments, crossing_segment, rows_within

Strategy = Literal["ring", "ulysses"]
STRATEGIES = ("auto", "ring", "ulysses")
FLOPS_A_BYTE = 256  # what a device computes while a byte arrives: between a laptop's and a cluster's


@dataclass(frozen=True, kw_only=True)
class RingSchedule(Schedule):
    """The steps of each rank of a ring, with bytes, FLOPs and memory; `print(schedule)` shows them."""

    spec: DilatedSpec
    docs: tuple[int, ...] | None = None
    strategy: Strategy = "ring"
    return_lse: bool = False

    def needs(self, queries: Range, keys: Range) -> tuple[Positions, ...]:
        found: list[set[range]] = [set() for _ in range(self.shape.h_kv)]
        for branch, rate in enumerate(self.spec.dilation_rates):
            segment = self._crossing(branch, queries, keys)
            if segment is None:
                continue
            for kv, offset in self._lattices[branch]:
                first, count = rows_within(segment.keys, offset, rate)
                if count > 0 and rows_within(segment.queries, offset, rate)[1] > 0:
                    start = segment.start + offset + first * rate
                    found[kv].add(range(start, start + (count - 1) * rate + 1, rate))
        return tuple(tuple(sorted(each, key=lambda x: (x.start, x.stop, x.step))) for each in found)

    @property
    def share(self) -> float:
        group = self.shape.h // self.shape.h_kv
        rates = (rate for window, rate in self.spec.branches if self._is_cut(window))
        return min(1.0, sum(min(1.0, group / rate) for rate in rates))

    def _is_cut(self, window: int) -> bool:
        """Whether a shard may end inside of a segment."""
        if self.docs is not None:
            return True
        return any(bound % min(window, self.shape.n) for bound in self.bounds[1:-1])

    def held(self, rank: int) -> Shard:
        """The positions and heads of the whole call that a rank attends."""
        _, n, h, h_kv, _ = self.shape
        if self.strategy == "ring":
            return Shard(n, self.shard(rank)[0], h, 0)
        return Shard(n, 0, h, sum(self.head_shares[:rank]) * (h // h_kv))

    @cached_property
    def _plans(self) -> dict[tuple[int, int, int], Plan]:
        return {}

    def own_plan(
        self, rank: int, shape: Shape, direction: Pass, workspace_bytes: int, cache: PatternCache | None
    ) -> Plan:
        return plan_dilated(
            self.spec,
            shape,
            itemsize=self.itemsize,
            direction=direction,
            docs=self.docs,
            workspace_bytes=workspace_bytes,
            cache=cache,
            shard=self.held(rank),
            kv_heads=self.lanes[0][1] if self.strategy == "ring" else None,
        )

    def chunk_plan(self, rank: int, shape: Shape, step: Round, direction: Pass, workspace_bytes: int) -> Plan:
        key = rank, step.number, workspace_bytes  # both passes meet the same jobs
        if key not in self._plans:
            assert step.receive is not None
            self._plans[key] = plan_crossing(
                self.spec,
                shape,
                self.held(rank),
                step.receive.keys,
                step.lane,
                itemsize=self.itemsize,
                docs=self.docs,
                workspace_bytes=workspace_bytes,
            )
        return self._plans[key]

    @cached_property
    def head_shares(self) -> tuple[int, ...]:
        """Key heads of each rank under "ulysses"."""
        return even_shards(self.shape.h_kv, self.num_ranks)

    def steps(self, rank: int) -> tuple[Round, ...]:
        """The steps of a rank in which it receives or sends; "ulysses" has none, all is exchanged at once."""
        return self.rounds(rank) if self.strategy == "ring" else ()

    def received_bytes(self, rank: int, direction: Pass = "forward") -> int:
        if self.strategy == "ulysses":
            return self._ulysses_bytes(rank, direction, arrives=True)
        return super().received_bytes(rank, direction)

    def sent_bytes(self, rank: int, direction: Pass = "forward") -> int:
        if self.strategy == "ulysses":
            return self._ulysses_bytes(rank, direction, arrives=False)
        return super().sent_bytes(rank, direction)

    def _ulysses_bytes(self, rank: int, direction: Pass, arrives: bool) -> int:
        """Tokens become heads (q, k, v, or the gradient of out) and back (out, or dq, dk and dv)."""
        shape, share, tokens = self.shape, self.head_shares[rank], self.shard_lengths[rank]
        group = shape.h // shape.h_kv
        to_heads, to_tokens = share * (shape.n - tokens), (shape.h_kv - share) * tokens
        if not arrives:
            to_heads, to_tokens = to_tokens, to_heads
        if direction == "forward":
            rows = to_heads * (group + 2) + to_tokens * group
        else:
            rows = to_heads * group + to_tokens * (group + 2)
        masks = 0
        if self.masked and direction == "forward":
            masks = shape.n - tokens if arrives else (self.num_ranks - 1) * tokens
        lse = to_tokens if direction == "forward" else to_heads
        lse_bytes = lse * group * max(4, self.itemsize) if self.return_lse else 0
        return shape.b * (rows * shape.d * self.itemsize + lse_bytes + masks)

    def num_pairs(self, rank: int) -> int:
        """Query-key pairs that a rank scores."""
        if self.strategy == "ulysses":
            group, before = self.shape.h // self.shape.h_kv, sum(self.head_shares[:rank])
            heads = range(before * group, (before + self.head_shares[rank]) * group)
            return self._pairs((0, self.shape.n), heads)
        return self._pairs(self.shard(rank), range(self.shape.h))

    def flops(self, rank: int, direction: Pass = "forward") -> int:
        """Operations of a rank: 2 products of matrices forward and 5 backward for each scored pair."""
        return 2 * (2 if direction == "forward" else 5) * self.shape.d * self.num_pairs(rank)

    @cached_property
    def imbalance(self) -> float:
        """FLOPs of the busiest rank over the mean."""
        pairs = [self.num_pairs(rank) for rank in range(self.num_ranks)]
        return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0

    @cached_property
    def cost(self) -> int:
        """FLOPs of the busiest rank in a forward pass, and those it could do while its bytes arrive."""
        ranks = range(self.num_ranks)
        return max(self.flops(r) + FLOPS_A_BYTE * self.received_bytes(r) for r in ranks)

    def cheaper(self) -> RingSchedule:
        """This schedule, or that of "ulysses" if it costs less: what the strategy "auto" takes."""
        other = replace(self, strategy="ulysses")
        return other if other.cost < self.cost else self

    def _travelling(self, rank: int, direction: Pass) -> int:
        if self.strategy == "ring":
            return super()._travelling(rank, direction)
        b, n, h, h_kv, d = self.shape
        heads = self.head_shares[rank] * (2 * h // h_kv + 2)  # q, k, v and out of all tokens
        leaving = self.shard_lengths[rank] * (h + 2 * h_kv)
        return b * (n * heads + leaving) * d * self.itemsize if self.num_ranks > 1 else 0

    def __str__(self) -> str:
        shown = list(range(self.num_ranks))
        if len(shown) > 16:
            shown = shown[:4] + shown[-4:]
        lines = [
            f"{self.strategy} of {self.num_ranks} ranks: {self.shape}",
            ", ".join(f"segments of {w} at rate {r}" for w, r in self.spec.branches)
            + (", causal" if self.spec.is_causal else ""),
            f"{'rank':>6} {'tokens':>12} {'receives':>12} {'GFLOPs':>12} {'holds':>12}",
        ]
        for rank in shown:
            received, held = (describe_bytes(x) for x in (self.received_bytes(rank), self.memory_bytes(rank)))
            gflops = f"{self.flops(rank) / 1e9:.1f}"
            lines.append(f"{rank:>6} {self.shard_lengths[rank]:>12} {received:>12} {gflops:>12} {held:>12}")
        return "\n".join([*lines, f"busiest rank over mean: {self.imbalance:.2f}"])

    @cached_property
    def _spans(self) -> list[Range]:
        bounds = (0, self.shape.n) if self.docs is None else self.docs
        return [(lo, hi) for lo, hi in pairwise(bounds) if hi > lo]

    @cached_property
    def _heads(self) -> list[list[Head]]:
        h, h_kv = self.shape.h, self.shape.h_kv
        return [branch_heads(self.spec, i, h, h_kv) for i in range(len(self.spec.branches))]

    @cached_property
    def _lattices(self) -> list[list[tuple[int, int]]]:
        """The different (key head, row offset) of each branch."""
        return [sorted({(head.kv, head.row) for head in heads}) for heads in self._heads]

    def _crossing(self, branch: int, queries: Range, keys: Range) -> Segments | None:
        if self.spec.is_causal and keys[0] >= queries[1]:
            return None
        return crossing_segment(self.spec.segment_lengths[branch], queries, keys, self._spans)

    def _pairs(self, time: Range, heads: range) -> int:
        if time[0] == time[1]:
            return 0
        total = 0
        for branch, (window, rate) in enumerate(self.spec.branches):
            groups = branch_segments(window, time, self._spans)
            for keys in ((0, time[0]), (time[1], self.shape.n)):
                crossing = self._crossing(branch, time, keys)
                groups += [] if crossing is None else [crossing]
            offsets = Counter(head.row for head in self._heads[branch] if head.head in heads)
            for segments in groups:
                for offset, times in offsets.items():
                    num_queries = rows_within(segments.queries, offset, rate)[1]
                    pairs = num_queries * rows_within(segments.keys, offset, rate)[1]
                    if segments.is_own and self.spec.is_causal:
                        pairs = num_queries * (num_queries + 1) // 2
                    total += segments.num * times * pairs
        return total * self.shape.b


def plan_ring(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    n: int | None = None,
    *,
    num_heads: int,
    head_dim: int,
    num_ranks: int | None = None,
    shard_lengths: Sequence[int] | None = None,
    num_kv_heads: int | None = None,
    batch_size: int = 1,
    dtype: torch.dtype = torch.float32,
    is_causal: bool = False,
    head_mixing: HeadMixing = "all",
    head_offsets: HeadOffsets = "interleaved",
    cu_seqlens: Sequence[int] | None = None,
    strategy: Strategy = "ring",
    masked: bool = False,
    return_lse: bool = False,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    steps: int = 1,
) -> RingSchedule:
    """The schedule of `ring_dilated_attention` for any number of ranks, without any of them.

    Either `n` and `num_ranks`, for shards as even as possible, or `shard_lengths`. `masked`: with a key_mask.
    `return_lse`: with lse, which "ulysses" has to exchange.
    """
    if shard_lengths is None:
        if n is None or num_ranks is None:
            raise ValueError("a schedule needs shard_lengths, or n and num_ranks")
        check_positive_int("num_ranks", num_ranks, bits=24)
        shard_lengths = even_shards(n, num_ranks)
    shard_lengths = check_lengths(shard_lengths)
    if n not in (None, sum(shard_lengths)) or num_ranks not in (None, len(shard_lengths)):
        raise ValueError(
            f"{len(shard_lengths)} shard_lengths of {sum(shard_lengths)} tokens in all contradict n={n} and "
            f"num_ranks={num_ranks}"
        )
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "num_kv_heads": num_kv_heads}
    for name, value in (sizes | {"batch_size": batch_size, "n": sum(shard_lengths), "steps": steps}).items():
        check_positive_int(name, value)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}")
    check_positive_int("workspace_bytes", workspace_bytes)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    one_of("strategy", strategy, STRATEGIES[1:])
    check_flags(masked=masked, return_lse=return_lse)
    docs = None if cu_seqlens is None else tuple(whole_numbers("cu_seqlens", cu_seqlens, None, 2**62))
    if docs is not None:
        check_bounds(docs, sum(shard_lengths))
    spec = DilatedSpec(
        segment_lengths, dilation_rates, is_causal, head_mixing=head_mixing, head_offsets=head_offsets
    )
    return RingSchedule(
        Shape(batch_size, sum(shard_lengths), num_heads, num_kv_heads, head_dim),
        tuple(shard_lengths),
        dtype.itemsize,
        masked,
        workspace_bytes,
        steps,
        spec=spec,
        docs=docs,
        strategy=strategy,
        return_lse=return_lse,
    )
