"""The steps of ranks that exchange keys: who receives what of whom, and when. Needs no processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..checks import check_count, check_positive_int
from ..core.pattern_cache import PatternCache
from ..plan import DEFAULT_WORKSPACE_BYTES, Pass, Plan, Range, Shape
from ..plan.runs import even_parts
from .positions import Positions, count_positions


class Transfer(NamedTuple):
    """Keys of a range of positions that travel between this rank and a peer, by key head of the lane."""

    peer: int
    keys: Range
    needs: tuple[Positions, ...]  # for all batches, or batch after batch if `times` is 1
    times: int

    def differs_by_batch(self, batch: int) -> bool:
        """Whether `needs` has entries of its own for each of so many batches."""
        return self.times == 1 and batch > 1

    @property
    def rows(self) -> int:
        """Keys, over all batches and heads of the lane."""
        return self.times * sum(map(count_positions, self.needs))


class Round(NamedTuple):
    """One step of a rank: what it receives and attends, and what it sends meanwhile."""

    number: int  # counted alike by all ranks
    lane: Range  # (first, number) of the key heads
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
class Schedule:
    """The steps of each rank: what it receives of whom, in pieces that stay small; a subclass says what.

    `shape` is that of the whole call, `shard_lengths` the tokens of each rank, in order.
    """

    shape: Shape
    shard_lengths: tuple[int, ...]
    itemsize: int = 4
    masked: bool = False
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    min_chunks: int = 1

    def needs(self, queries: Range, keys: Range) -> tuple[Positions, ...]:
        """For each key head, the positions in `keys` that queries of another range attend.

        For each batch and key head if batches differ.
        """
        raise NotImplementedError

    def own_plan(
        self, rank: int, shape: Shape, direction: Pass, workspace_bytes: int, cache: PatternCache | None
    ) -> Plan:
        """The jobs of a rank's queries, of `shape`, with its own keys: a region for each lane."""
        raise NotImplementedError

    def chunk_plan(self, rank: int, shape: Shape, step: Round, direction: Pass, workspace_bytes: int) -> Plan:
        """The jobs of a rank's queries with the keys that it receives in a step; kept once it was made."""
        raise NotImplementedError

    def steps(self, rank: int) -> tuple[Round, ...]:
        """The steps of a rank in which it receives or sends."""
        return self.rounds(rank)

    @property
    def differs_by_batch(self) -> bool:
        """Whether the rows of a batch attend to different keys, so that `needs` lists each."""
        return False

    @property
    def _times(self) -> int:
        """How many batches share what `needs` lists."""
        return 1 if self.differs_by_batch else self.shape.b

    @property
    def share(self) -> float:
        """Of the keys of a rank and head, the most that can be asked for."""
        return 1.0

    @property
    def num_ranks(self) -> int:
        """Ranks, which are as many as shards."""
        return len(self.shard_lengths)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where the shards begin, and the length of the sequence at the end."""
        return tuple(accumulate(self.shard_lengths, initial=0))

    def shard(self, rank: int) -> Range:
        """The positions [from, to) of a rank."""
        return self.bounds[rank], self.bounds[rank + 1]

    @cached_property
    def lanes(self) -> tuple[Range, ...]:
        """(first, number) of the key heads that travel together."""
        fit = self._piece_limit // max(1, self._piece_bytes)
        if sums := self._sum_bytes(max(self.shard_lengths), "backward"):
            fit = min(fit, self.workspace_bytes // 2 // sums)
        return tuple(even_parts(self.shape.h_kv, max(1, min(self.shape.h_kv, fit))))

    def _sum_bytes(self, tokens: int, direction: Pass) -> int:
        """Of one key head and its query heads: the float32 sums that half precision needs."""
        if self.itemsize >= 4:
            return 0
        rows = self.shape.h // self.shape.h_kv + (0 if direction == "forward" else 2)
        return rows * self.shape.b * tokens * self.shape.d * 4

    @cached_property
    def num_chunks(self) -> int:
        """Parts in which the keys of a rank travel, so that a piece stays small."""
        wanted = max(1, self.min_chunks, -(-self._piece_bytes // self._piece_limit))
        return min(wanted, max(1, *self.shard_lengths))

    @property
    def rounds_a_lane(self) -> int:
        """Steps in which a rank meets every piece of every other rank."""
        return (self.num_ranks - 1) * self.num_chunks

    @property
    def _piece_limit(self) -> int:
        # Two pieces arrive and two leave at a time, and in backward their gradients.
        return max(1, self.workspace_bytes // 8)

    @property
    def _piece_bytes(self) -> int:
        """Of what a rank may be asked for, for one key head: at most, with gradients."""
        rows = self.shape.b * math.ceil(max(self.shard_lengths) * self.share)
        return rows * 2 * self.shape.d * max(4, self.itemsize)

    def rounds(self, rank: int) -> tuple[Round, ...]:
        """The steps of a rank in which it receives or sends, lane after lane, nearest ranks first."""
        known = self._rounds.get(rank)
        if known is not None:
            return known
        found, number = [], 0
        for lane in self.lanes if self.shape.b else ():
            for distance in range(1, self.num_ranks):
                source, target = (rank - distance) % self.num_ranks, (rank + distance) % self.num_ranks
                for chunk in range(self.num_chunks):
                    arrives = self._transfer(source, rank, self._chunk(source, chunk), lane)
                    leaves = self._transfer(target, target, self._chunk(rank, chunk), lane)
                    if arrives or leaves:
                        found.append(Round(number, lane, arrives, leaves))
                    number += 1
        self._rounds[rank] = tuple(found)
        return self._rounds[rank]

    def _chunk(self, owner: int, chunk: int) -> Range:
        lo, hi = self.shard(owner)
        size = -(-(hi - lo) // self.num_chunks)
        return min(hi, lo + chunk * size), min(hi, lo + (chunk + 1) * size)

    def _transfer(self, peer: int, receiver: int, keys: Range, lane: Range) -> Transfer | None:
        known = self._needs.get((receiver, keys))
        if known is None:
            known = self._needs[receiver, keys] = self.needs(self.shard(receiver), keys)
        batches = range(0, len(known), self.shape.h_kv)
        needs = tuple(each for b in batches for each in known[b + lane[0] : b + lane[0] + lane[1]])
        return Transfer(peer, keys, needs, self._times) if any(needs) else None

    @cached_property
    def _rounds(self) -> dict[int, tuple[Round, ...]]:
        return {}

    @cached_property
    def _needs(self) -> dict[tuple[int, Range], tuple[Positions, ...]]:
        return {}

    def received_rows(self, rank: int) -> int:
        """Different keys that a rank receives, over all batches and key heads."""
        lo, hi = self.shard(rank)
        outside = ((0, lo), (hi, self.shape.n))
        return self._times * sum(sum(map(count_positions, self.needs((lo, hi), keys))) for keys in outside)

    def sent_rows(self, rank: int) -> int:
        """Keys that a rank sends, counted once for each receiver."""
        others = (self.shard(r) for r in range(self.num_ranks) if r != rank)
        keys = self.shard(rank)
        return self._times * sum(sum(map(count_positions, self.needs(queries, keys))) for queries in others)

    def received_bytes(self, rank: int, direction: Pass = "forward") -> int:
        """What a rank receives in a pass: keys, values and masks; in backward also gradients of its own."""
        return self._bytes(self.received_rows, self.sent_rows, rank, direction)

    def sent_bytes(self, rank: int, direction: Pass = "forward") -> int:
        """What a rank sends in a pass, as `received_bytes` counts it."""
        return self._bytes(self.sent_rows, self.received_rows, rank, direction)

    def _bytes(
        self, there: Callable[[int], int], back: Callable[[int], int], rank: int, direction: Pass
    ) -> int:
        total = there(rank) * (2 * self.shape.d * self.itemsize + self.masked)
        if direction == "backward":
            total += back(rank) * 2 * self.shape.d * max(4, self.itemsize)
        return total

    def memory(self, rank: int, direction: Pass = "forward") -> Memory:
        """What a pass holds: inputs, results, scratch (at most), and what is travelling.

        In half precision the scratch has float32 sums of at least one key head over all of a rank's tokens.
        """
        b, _, h, h_kv, d = self.shape
        tokens, wide = b * self.shard_lengths[rank], max(4, self.itemsize)
        inputs, out = tokens * (h + 2 * h_kv) * d * self.itemsize, tokens * h * d * self.itemsize
        sums = 0
        if self.num_ranks > 1:  # one process cuts them to its workspace
            sums = self.lanes[0][1] * self._sum_bytes(self.shard_lengths[rank], direction)
        results = out + tokens * h * wide
        if direction == "backward":
            inputs, results = inputs + results + out, inputs
        return Memory(inputs, results, self.workspace_bytes + sums, self._travelling(rank, direction))

    def _travelling(self, rank: int, direction: Pass) -> int:
        if self.num_ranks == 1:
            return 0
        wide = max(4, self.itemsize)
        each = self._piece_bytes * self.itemsize // wide
        each += self._piece_bytes if direction == "backward" else 0
        return 4 * self.lanes[0][1] * -(-each // self.num_chunks)

    def memory_bytes(self, rank: int, direction: Pass = "forward") -> int:
        """The sum of `memory`."""
        return self.memory(rank, direction).total


def check_lengths(shard_lengths: Sequence[int], size: int | None = None) -> tuple[int, ...]:
    """The tokens of each rank, as a tuple."""
    if not isinstance(shard_lengths, Sequence):
        raise TypeError(f"shard_lengths must be a sequence of integers, got {shard_lengths!r}")
    lengths = tuple(shard_lengths)
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in lengths):
        raise ValueError(f"shard_lengths must be integers of 0 and more, got {shard_lengths!r}")
    if sum(lengths) >= 2**62:
        raise ValueError(f"shard_lengths must have fewer than 2**62 tokens in all, got {sum(lengths)}")
    if not lengths or (size is not None and len(lengths) != size):
        raise ValueError(f"shard_lengths must name the tokens of {size or 'some'} ranks, got {len(lengths)}")
    return lengths


def even_shards(n: int, size: int) -> tuple[int, ...]:
    """`n` tokens over `size` ranks: as even as possible, the longer shards first."""
    check_count("n", n)
    check_positive_int("size", size, bits=24)  # a shard is an entry of a tuple
    each, more = divmod(n, size)
    return tuple(each + (rank < more) for rank in range(size))
