"""Dilated attention over a sequence that the processes of a group share: its options kept in a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checks import check_positive_int, one_of
from ..core.tracing import constant_result, uncompiled
from ..functional import attend
from ..ops import Tensors
from ..plan import DEFAULT_WORKSPACE_BYTES
from ..ring import group_size, plan_ring, sharing_errors
from ..ring.attention import attend_ring
from ..ring.call import RingSettings
from ..ring.comm import Group, check_timeout, find_ring
from ..ring.schedule import STRATEGIES
from .attention import AttentionModule, Branch, DilatedAttention, Mask

Timeout = float | timedelta | None
_T = TypeVar("_T")


@dataclass(frozen=True)
class RingOptions:
    """The processes that share a module's sequences: `group` and `timeout` as in `ring_dilated_attention`.

    `asked_size` steps go around the whole ring, a multiple of the number of processes; None is one a process.
    """

    asked_size: int | None = None
    group: Group = None
    timeout: Timeout = None

    def __post_init__(self) -> None:
        if self.asked_size is not None:
            check_positive_int("ring_size", self.asked_size)
        find_ring(self.group)  # which checks it
        check_timeout(self.timeout)

    @property
    def num_processes(self) -> int:
        return int(self._count())

    # Compilers cannot look into a group, whose size is constant.
    @constant_result
    def _count(self) -> int:
        return group_size(self.group)

    @property
    def size(self) -> int:
        return self.num_processes if self.asked_size is None else self.asked_size

    @property
    def steps(self) -> int:
        """Chunks in which a process sends its keys or, alone, parts in which its queries are attended."""
        self.check()
        return self.size // self.num_processes

    def check(self) -> None:
        """Raises where the size does not fit the group, which may be known only when a call is made."""
        if self.size % self.num_processes:
            got = f"{self.num_processes} processes and ring_size={self.size}"
            raise ValueError(f"the processes share the ring: their number must divide ring_size, got {got}")

    def __deepcopy__(self, memo: dict[int, Any]) -> RingOptions:
        return self  # a group cannot be copied: the copies of a module belong to the same one


# Compilers cannot look into a group: they break the graph here.
@uncompiled
def check_together(ring: RingOptions, check: Callable[[], _T]) -> _T:
    """Checks a call; what is wrong with it in one process becomes an error of all."""
    with sharing_errors(ring.group, ring.timeout):
        return check()


def raise_error(error: Exception) -> None:
    raise error


class RingModule(AttentionModule):
    """What modules of a ring have beside those of one process, which the other base of a class gives."""

    def __init__(
        self,
        *branches: Any,
        ring_size: int | None = None,
        group: Group = None,
        timeout: Timeout = None,
        **options: Any,
    ) -> None:
        super().__init__(*branches, **options)
        self.ring = RingOptions(ring_size, group, timeout)
        self._check_ring()

    @property
    def ring_size(self) -> int:
        """Processes, or steps of one process."""
        return self.ring.size

    @property
    def is_sharded(self) -> bool:
        return self.ring.num_processes > 1

    def warn_isolated(self, n: int) -> None:
        # The other shards are not known here; even ones hold at least this many tokens together.
        super().warn_isolated((n - 1) * self.ring.num_processes + 1)

    def _check_ring(self) -> None:
        """Raises where a call cannot be made by the processes there are."""
        self.ring.check()

    def _check_declared(self, query: Tensor) -> None:
        def check() -> None:
            self._check_ring()
            super(RingModule, self)._check_declared(query)

        check_together(self.ring, check) if self.is_sharded else check()

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        ring = {"ring_size": self.ring.asked_size, "group": self.ring.group, "timeout": self.ring.timeout}
        return {**super()._changed(), **{name: (value, None) for name, value in ring.items()}}


class RingDilatedAttentionV2(RingModule, DilatedAttention):
    """`DilatedAttention` over a sequence of which each process of a group holds a contiguous part.

    With several processes query, key, value and attention_mask are this process's shard, (b, n_local, ...),
    in the order of the ranks; shards may differ in length. All processes must call it, with the same options.
    See `ring_dilated_attention`, and `shard_sequence` for the shards. In one process it computes what
    `DilatedAttention` does, to the last rounding.

    Args:
        ring_size: steps in which a call goes around the ring, by default one for each process; a multiple of
            their number. More steps mean smaller buffers: a process sends its keys in
            `ring_size // processes` chunks. One process alone attends its queries in so many parts, forward.
        group: a process group, a 1-D device mesh, or None for the default group; without torch.distributed
            this process alone. A copy of the module belongs to the same group; with a group it cannot be
            pickled.
        strategy: "ring", "ulysses", or "auto" for the cheaper one; nothing to choose in one process.
        timeout: seconds, or a timedelta, that a transfer may take; None leaves it to the group.
        options: those of `DilatedAttention`. With several processes a call that runs out of memory
            raises and is not tried again, whatever `enable_memory_pool` says: the others would wait for it.
    """

    def __init__(
        self,
        segment_lengths: Branch = None,
        dilation_rates: Branch = None,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        ring_size: int | None = None,
        group: Group = None,
        strategy: str = "auto",
        timeout: Timeout = None,
        **options: Any,
    ) -> None:
        ring: dict[str, Any] = {"ring_size": ring_size, "group": group, "timeout": timeout}
        super().__init__(segment_lengths, dilation_rates, softmax_scale, attention_dropout, **ring, **options)
        one_of("strategy", strategy, STRATEGIES)
        self.strategy = strategy

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Mask) -> Tensor:
        ring, how = self.ring, self._execution
        if not self.is_sharded:
            return attend(q, k, v, self._call_spec(is_causal), how, key_mask=mask, steps=ring.steps)[0]
        settings = RingSettings(ring.group, self.strategy, None, ring.timeout, ring.steps, how)
        out = attend_ring(Tensors(q, k, v, mask), partial(self._call_spec, is_causal), settings)
        assert isinstance(out, Tensor)
        return out

    def get_memory_estimate(
        self,
        seq_len: int,
        batch_size: int = 1,
        num_heads: int = 8,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        *,
        num_kv_heads: int | None = None,
        num_processes: int | None = None,
    ) -> dict[str, int]:
        """Bytes of a forward call in the process that needs most, for `seq_len` tokens over all processes.

        Args:
            num_processes: of the ring, by default those of the group; any number can be planned on paper.

        Returns:
            `inputs` (query, key and value), `outputs` (and log-sum-exp), `workspace` (at most) and
            `communication`, and their `total`. With strategy "auto", of the strategy that needs more.
        """
        processes = self.ring.num_processes if num_processes is None else num_processes
        check_positive_int("num_processes", processes)
        of_spec = ("segment_lengths", "dilation_rates", "head_mixing", "head_offsets")
        sizes: dict[str, Any] = {name: getattr(self.spec, name) for name in of_spec}
        sizes |= {"num_heads": num_heads, "head_dim": head_dim, "num_kv_heads": num_kv_heads}
        sizes |= {"batch_size": batch_size, "dtype": dtype, "num_ranks": processes, "n": seq_len}
        sizes |= {"workspace_bytes": self.workspace_bytes or DEFAULT_WORKSPACE_BYTES}
        sizes["steps"] = max(1, self.ring.size // processes)
        strategies: Any = STRATEGIES[1:] if self.strategy == "auto" else (self.strategy,)
        schedules = [plan_ring(**sizes, strategy=strategy) for strategy in strategies]
        needs = [schedule.memory(rank) for schedule in schedules for rank in range(processes)]
        most = max(needs, key=lambda memory: memory.total)
        return {**most._asdict(), "total": most.total}

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        return {**super()._changed(), "strategy": (self.strategy, "auto")}


class RingDilatedAttentionV3(RingDilatedAttentionV2):
    """`RingDilatedAttentionV2` that says where the pattern cache keeps what it copied to a device.

    Args:
        cache_on_gpu: copies that the pattern cache makes for a device are kept for the next call. By default
            whenever there is a pattern cache; False copies them anew. The cache serves all modules, and so
            does this switch: it is on as soon as one of them asks for it. What a kernel for GPUs makes of a
            plan stays with the plan either way.
        branches, options: those of `RingDilatedAttentionV2`.
    """

    cache_on_gpu = False  # until the constructor has made the rest

    def __init__(self, *branches: Any, cache_on_gpu: bool | None = None, **options: Any) -> None:
        super().__init__(*branches, **options)
        if cache_on_gpu is not None and not isinstance(cache_on_gpu, bool):
            raise TypeError(f"cache_on_gpu must be a bool or None, got {cache_on_gpu!r}")
        if cache_on_gpu and not self.use_pattern_cache:
            raise ValueError("cache_on_gpu is a way to use the pattern cache, got use_pattern_cache=False")
        self.cache_on_gpu = self.use_pattern_cache if cache_on_gpu is None else cache_on_gpu
        self._switch_on()

    def _switch_on(self) -> None:
        super()._switch_on()
        if self.cache_on_gpu and self._pattern_cache is not None:
            self._pattern_cache.cache_on_gpu = True

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        return {**super()._changed(), "cache_on_gpu": (self.cache_on_gpu, self.use_pattern_cache)}
