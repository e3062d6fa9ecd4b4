"""WHERE kept blocks live: who needs which blocks of whom, and the jobs in which they are met."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..core.pattern_cache import PatternCache
from ..plan import BlockPattern, Pass, Plan, Range, Shape, plan_blocks
from .positions import Positions
from .rounds import Round, Schedule


@dataclass(frozen=True, kw_only=True)
class BlockSchedule(Schedule):
    """Who needs which blocks of whom."""

    pattern: BlockPattern

    @property
    def differs_by_batch(self) -> bool:
        return len(self.pattern) not in (1, self.shape.h)

    def needs(self, queries: Range, keys: Range) -> tuple[Positions, ...]:
        pattern, h, h_kv = self.pattern, self.shape.h, self.shape.h_kv
        batches = self.shape.b if self.differs_by_batch else 1
        is_future = pattern.is_causal and keys[0] >= queries[1]
        if is_future or queries[0] == queries[1] or keys[0] == keys[1]:
            return ((),) * (batches * h_kv)
        runs = [self._runs(layout, queries, keys) for layout in range(len(pattern))]
        if len(pattern) == 1:
            return (runs[0],) * h_kv
        group = h // h_kv
        return tuple(sum(runs[i : i + group], ()) for i in range(0, batches * h, group))

    def _runs(self, layout: int, queries: Range, keys: Range) -> Positions:
        """The kept positions of a range of keys."""
        pattern, size = self.pattern, self.pattern.block_size
        rows = layout * pattern.rows + queries[0] // size, layout * pattern.rows - (-queries[1] // size)
        columns = pattern.columns[int(pattern.starts[rows[0]]) : int(pattern.starts[rows[1]])]
        is_asked = (columns >= keys[0] // size) & (columns < -(-keys[1] // size))
        columns = torch.unique(columns[is_asked])
        if not columns.numel():
            return ()
        breaks = (columns.diff() != 1).nonzero().flatten()
        firsts = [int(columns[0]), *columns[breaks + 1].tolist()]
        lasts = [*columns[breaks].tolist(), int(columns[-1])]
        return tuple(
            range(max(keys[0], first * size), min(keys[1], (last + 1) * size))
            for first, last in zip(firsts, lasts, strict=True)
        )

    def own_plan(
        self, rank: int, shape: Shape, direction: Pass, workspace_bytes: int, cache: PatternCache | None
    ) -> Plan:
        key = rank, -1, direction, workspace_bytes
        if key not in self._plans:  # the schedule itself is what a cache keeps
            self._plans[key] = plan_blocks(
                self.pattern,
                shape,
                itemsize=self.itemsize,
                direction=direction,
                workspace_bytes=workspace_bytes,
                queries=self.shard(rank),
                kv_heads=self.lanes[0][1],
            )
        return self._plans[key]

    def chunk_plan(self, rank: int, shape: Shape, step: Round, direction: Pass, workspace_bytes: int) -> Plan:
        key = rank, step.number, direction, workspace_bytes
        if key not in self._plans:
            assert step.receive is not None
            self._plans[key] = plan_blocks(
                self.pattern,
                shape,
                itemsize=self.itemsize,
                direction=direction,
                workspace_bytes=workspace_bytes,
                queries=self.shard(rank),
                keys=step.receive.keys,
                kv=step.lane,
            )
        return self._plans[key]

    def _sum_bytes(self, tokens: int, direction: Pass) -> int:
        """Gradients of blocks of keys, which several jobs have in common, are summed in scratch."""
        if self.itemsize < 4 or direction == "forward":
            return super()._sum_bytes(tokens, direction)
        return 2 * self.shape.b * tokens * self.shape.d * self.itemsize

    @cached_property
    def _plans(self) -> dict[tuple[int, int, Pass, int], Plan]:
        return {}
