"""Which rank sends what when, and what that costs. Plain data: it needs no processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, product
from typing import Literal, NamedTuple

import torch

from ..core.host_memory import describe_bytes
from ..plan import DEFAULT_WORKSPACE_BYTES, Pass, Plan, Range, Shape, Shard
from ..plan.runs import even_parts
from .needs import BlockNeeds, DilatedNeeds, Positions, count_positions
from .shards import even_shards

Strategy = Literal["ring", "ulysses"]
_PlanKey = tuple[int, Pass, int]  # rank, pass and step
STRATEGIES = ("auto", "ring", "ulysses")
FLOPS_A_BYTE = 256  # what a device computes while a byte arrives: between a laptop's and a cluster's


class Transfer(NamedTuple):
    """A chunk of keys in a window of positions, between this rank and a peer."""

    peer: int
    keys: Range
    needs: tuple[Positions, ...]  # by key head of the step; batch after batch unless batches share them
    num_alike: int  # batches that share them

    @property
    def rows(self) -> int:
        """Keys, over all batches and heads."""
        return self.num_alike * sum(map(count_positions, self.needs))

    def of_heads(self, kv: Range, h_kv: int) -> Transfer | None:
        """What belongs to some of the key heads."""
        firsts = range(kv[0], len(self.needs), h_kv)
        needs = tuple(each for first in firsts for each in self.needs[first : first + kv[1]])
        return self._replace(needs=needs) if any(needs) else None


class Step(NamedTuple):
    """One step of a rank: the chunk that it receives and attends, and the one that it sends meanwhile."""

    number: int  # counted alike by all ranks
    kv: Range  # (first, number) of the key heads
    receive: Transfer | None
    send: Transfer | None


class Memory(NamedTuple):
    """Bytes of a rank."""

    inputs: int
    outputs: int
    workspace: int
    communication: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class RingSchedule:
    """The steps of each rank of a ring, with bytes, FLOPs and memory; `print(schedule)` shows them.

    `shard_lengths` are the tokens of each rank, in order.
    """

    needs: DilatedNeeds | BlockNeeds
    shard_lengths: tuple[int, ...]
    itemsize: int = 4
    masked: bool = False
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    min_chunks: int = 1
    strategy: Strategy = "ring"
    return_lse: bool = False
    # Kept with the schedule, which the pattern cache keeps.
    _steps: dict[int, tuple[Step, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _plans: dict[_PlanKey, Plan] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def shape(self) -> Shape:
        """That of the whole call."""
        return self.needs.shape

    @property
    def num_ranks(self) -> int:
        """How many ranks share the sequence."""
        return len(self.shard_lengths)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where the shards begin, and the length of the sequence at the end."""
        return tuple(accumulate(self.shard_lengths, initial=0))

    def shard(self, rank: int) -> Range:
        """The positions [from, to) of a rank."""
        return self.bounds[rank], self.bounds[rank + 1]

    @cached_property
    def head_shares(self) -> tuple[int, ...]:
        """Key heads of each rank under "ulysses"."""
        return even_shards(self.shape.h_kv, self.num_ranks)

    @cached_property
    def kv_groups(self) -> tuple[Range, ...]:
        """(first, number) of the key heads that are exchanged, and summed, together."""
        h_kv, fit = self.shape.h_kv, self._chunk_limit // max(1, self._head_bytes)
        if sums := self._sum_bytes(max(self.shard_lengths), "backward"):
            fit = min(fit, self.workspace_bytes // 2 // sums)
        return tuple(even_parts(h_kv, max(1, min(h_kv, fit))))

    @cached_property
    def num_chunks(self) -> int:
        """Chunks in which the keys of a rank are sent, so that each fits its buffer."""
        wanted = max(1, self.min_chunks, -(-self._head_bytes // self._chunk_limit))
        return min(wanted, max(1, *self.shard_lengths))

    @property
    def steps_a_group(self) -> int:
        """Steps in which a rank meets every chunk of every other rank."""
        return (self.num_ranks - 1) * self.num_chunks

    @property
    def _chunk_limit(self) -> int:
        # Two chunks arrive and two leave at a time, and in backward their gradients.
        return max(1, self.workspace_bytes // 8)

    @cached_property
    def _head_bytes(self) -> int:
        """Keys and values of one key head that a rank may be asked for: at most, as gradients."""
        rows = self.shape.b * math.ceil(max(self.shard_lengths) * self.needs.share(self.bounds))
        return rows * 2 * self.shape.d * max(4, self.itemsize)

    def _sum_bytes(self, tokens: int, direction: Pass) -> int:
        """Sums in scratch of one key head and its query heads: of half precision, and of blocks of keys."""
        b, _, h, h_kv, d = self.shape
        rows = 2 if direction == "backward" and (self.itemsize < 4 or self.needs.sums_blocks) else 0
        rows += h // h_kv if self.itemsize < 4 else 0
        return rows * b * tokens * d * max(4, self.itemsize)

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank in which it receives or sends, nearest ranks first; "ulysses" has none."""
        if rank not in self._steps:
            is_ring = self.strategy == "ring" and self.shape.b
            self._steps[rank] = tuple(self._find_steps(rank)) if is_ring else ()
        return self._steps[rank]

    def _find_steps(self, rank: int) -> Iterator[Step]:
        size, pairs = self.num_ranks, []
        for distance, chunk in product(range(1, size), range(self.num_chunks)):
            source, target = (rank - distance) % size, (rank + distance) % size
            receive = self._transfer(source, source, rank, chunk)
            pairs.append((receive, self._transfer(target, rank, target, chunk)))
        for number, (kv, pair) in enumerate(product(self.kv_groups, pairs)):
            received, sent = (transfer.of_heads(kv, self.shape.h_kv) for transfer in pair)
            if received or sent:
                yield Step(number, kv, received, sent)

    def _transfer(self, peer: int, owner: int, receiver: int, chunk: int) -> Transfer:
        low, high = self.shard(owner)
        size = -(-(high - low) // self.num_chunks)
        keys = min(high, low + chunk * size), min(high, low + (chunk + 1) * size)
        return Transfer(peer, keys, self.needs.between(self.shard(receiver), keys), self.needs.num_alike)

    def plan(self, rank: int, direction: Pass, step: Step | None = None) -> Plan:
        """The jobs of a rank's queries with its own keys, or with those that it receives in a step."""
        if step is not None and isinstance(self.needs, DilatedNeeds):
            direction = "forward"  # both passes meet the same jobs
        key = rank, direction, -1 if step is None else step.number
        if key not in self._plans:
            shape, shard = self._held(rank)
            keys, kv = None, self.kv_groups[0] if self.strategy == "ring" else None
            if step is not None and step.receive is not None:
                keys, kv = step.receive.keys, step.kv
            sizes = {"itemsize": self.itemsize, "workspace_bytes": self.workspace_bytes}
            with torch.inference_mode(False):  # the plan outlives the call, and training refuses such tensors
                self._plans[key] = self.needs.plan(shape, shard, keys, kv, direction=direction, **sizes)
        return self._plans[key]

    def _held(self, rank: int) -> tuple[Shape, Shard]:
        """The positions and heads that a rank attends: their shape, and their place in the whole call."""
        _, n, h, h_kv, _ = self.shape
        if self.strategy == "ring":
            return self.shape._replace(n=self.shard_lengths[rank]), Shard(n, self.bounds[rank], h, 0)
        group, share = h // h_kv, self.head_shares[rank]
        first = sum(self.head_shares[:rank]) * group
        return self.shape._replace(h=share * group, h_kv=share), Shard(n, 0, h, first)

    def _rows(self, rank: int, arrives: bool) -> int:
        """Different keys that a rank receives, or sends to each of the others, over batches and key heads."""
        own = low, high = self.shard(rank)
        windows = [(own, (0, low)), (own, (high, self.shape.n))]
        if not arrives:
            windows = [(self.shard(other), own) for other in range(self.num_ranks) if other != rank]
        needs = chain.from_iterable(self.needs.between(*pair) for pair in windows)
        return self.needs.num_alike * sum(map(count_positions, needs))

    def received_bytes(self, rank: int, direction: Pass = "forward") -> int:
        """What a rank receives in a pass: keys, values and masks; in backward also gradients of its own."""
        return self._moved_bytes(rank, direction, arrives=True)

    def sent_bytes(self, rank: int, direction: Pass = "forward") -> int:
        """What a rank sends in a pass, as `received_bytes` counts it."""
        return self._moved_bytes(rank, direction, arrives=False)

    def _moved_bytes(self, rank: int, direction: Pass, arrives: bool) -> int:
        if self.strategy == "ulysses":
            return self._ulysses_bytes(rank, direction, arrives)
        total = self._rows(rank, arrives) * (2 * self.shape.d * self.itemsize + self.masked)
        if direction == "backward":  # gradients go the other way
            total += self._rows(rank, not arrives) * 2 * self.shape.d * max(4, self.itemsize)
        return total

    def _ulysses_bytes(self, rank: int, direction: Pass, arrives: bool) -> int:
        """Tokens become heads (q, k, v, or the gradient of out) and back (out, or dq, dk and dv)."""
        (b, n, h, h_kv, d), share, tokens = self.shape, self.head_shares[rank], self.shard_lengths[rank]
        group, is_forward = h // h_kv, direction == "forward"
        first, second = share * (n - tokens), (h_kv - share) * tokens  # to heads, and back to tokens
        if arrives != is_forward:
            first, second = second, first
        total = (first * (group + 2) + second * group) * d * self.itemsize
        if self.return_lse:
            total += second * group * max(4, self.itemsize)
        if self.masked and is_forward:
            total += n - tokens if arrives else (self.num_ranks - 1) * tokens
        return b * total

    def num_pairs(self, rank: int) -> int:
        """Query-key pairs that a rank scores, of dilated attention."""
        assert isinstance(self.needs, DilatedNeeds)
        (_, n, h, _, _), shard = self._held(rank)
        return self.needs.num_pairs((shard.start, shard.start + n), range(shard.head, shard.head + h))

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
        return max(self.flops(rank) + FLOPS_A_BYTE * self.received_bytes(rank) for rank in ranks)

    def cheaper(self) -> RingSchedule:
        """This schedule, or that of "ulysses" if it costs less: what the strategy "auto" takes."""
        other = replace(self, strategy="ulysses")
        return other if other.cost < self.cost else self

    def memory(self, rank: int, direction: Pass = "forward") -> Memory:
        """What a pass holds: inputs, results, scratch (at most) and communication buffers.

        In half precision the scratch has float32 sums of at least one key head over all of a rank's tokens.
        """
        b, _, h, h_kv, d = self.shape
        tokens = b * self.shard_lengths[rank]
        inputs, out = tokens * (h + 2 * h_kv) * d * self.itemsize, tokens * h * d * self.itemsize
        results = out + tokens * h * max(4, self.itemsize)
        if direction == "backward":
            inputs, results = inputs + results + out, inputs
        if self.num_ranks == 1:  # it cuts sums to its workspace
            return Memory(inputs, results, self.workspace_bytes, 0)
        sums = self.kv_groups[0][1] * self._sum_bytes(self.shard_lengths[rank], direction)
        return Memory(inputs, results, self.workspace_bytes + sums, self._buffer_bytes(rank, direction))

    def memory_bytes(self, rank: int, direction: Pass = "forward") -> int:
        """The sum of `memory`."""
        return self.memory(rank, direction).total

    def _buffer_bytes(self, rank: int, direction: Pass) -> int:
        if self.strategy == "ring":
            each = self._head_bytes * self.itemsize // max(4, self.itemsize)
            each += self._head_bytes if direction == "backward" else 0
            return 4 * self.kv_groups[0][1] * -(-each // self.num_chunks)
        b, n, h, h_kv, d = self.shape
        rows = n * self.head_shares[rank] * (2 * h // h_kv + 2)  # q, k, v and out of all tokens
        return b * (rows + self.shard_lengths[rank] * (h + 2 * h_kv)) * d * self.itemsize

    def __str__(self) -> str:
        ranks = range(self.num_ranks)
        shown = ranks if len(ranks) <= 16 else (*ranks[:4], *ranks[-4:])
        lines = [
            f"{self.strategy} of {self.num_ranks} ranks: {self.shape}",
            str(self.needs),
            f"{'rank':>6} {'tokens':>12} {'receives':>12} {'GFLOPs':>12} {'holds':>12}",
        ]
        for rank in shown:
            received, held = (describe_bytes(x) for x in (self.received_bytes(rank), self.memory_bytes(rank)))
            gflops = f"{self.flops(rank) / 1e9:.1f}"
            lines.append(f"{rank:>6} {self.shard_lengths[rank]:>12} {received:>12} {gflops:>12} {held:>12}")
        return "\n".join([*lines, f"busiest rank over mean: {self.imbalance:.2f}"])
