"""Dilated attention over a sequence that the processes of a group share: its options kept in a module.

`RingDilatedAttentionProduction` adds the switches of long runs, in one configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..checks import check_flags, check_pool_size, check_positive_int, one_of
from ..core import AttentionBufferManager, MemoryPool
from ..core.attention_buffer_manager import Settings, shared_buffer_manager
from ..core.host_memory import describe_bytes, device_memory
from ..core.tracing import constant_result, uncompiled
from ..functional import attend
from ..ops import Tensors, without_autocast
from ..plan import DEFAULT_WORKSPACE_BYTES
from ..ring import group_size, plan_ring, sharing_errors
from ..ring.attention import attend_ring
from ..ring.call import RingSettings
from ..ring.comm import Group, check_timeout, find_ring
from ..ring.schedule import STRATEGIES
from ..spec import DilatedSpec, resolve_branches
from .attention import AttentionModule, Branch, DilatedAttention, Mask

LOGGER = logging.getLogger("dilated_attention_pytorch")
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
        branches, options: those of `DilatedAttention`. With several processes a call that runs out of memory
            raises and is not tried again, whatever `enable_memory_pool` says: the others would wait for it.
    """

    def __init__(self, *branches: Any, strategy: str = "auto", **options: Any) -> None:
        super().__init__(*branches, **options)
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
        cache_on_gpu: copies of cached patterns on the device of a call are kept for the next one. By default
            whenever there is a pattern cache; False copies them anew. The cache serves all modules, and so
            does this switch: it is on as soon as one of them asks for it.
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


# The fields that the base module does not show.
_FLAGS = ("use_gradient_checkpointing", "enable_error_recovery", "log_memory_usage")
_OWN = (*_FLAGS, "memory_pool_size", "mixed_precision")


@dataclass(frozen=True)
class RingAttentionConfig:
    """Settings of `RingDilatedAttentionProduction`: branches, ring, memory, precision, recovery.

    Args:
        segment_lengths, dilation_rates, max_length, dropout: as in `DilatedAttention`.
        ring_size, timeout, strategy: as in `RingDilatedAttentionV2`.
        use_gradient_checkpointing: only the inputs are kept for the backward pass, which attends once more;
            saves the output and its log-sum-exp, the memory of one of the inputs.
        memory_pool_size: the most idle buffers that the pool keeps, as in `MemoryPool`; None sets no limit
            beside its bytes, 0 keeps nothing. Modules of one size share a pool.
        enable_error_recovery: a call that runs out of memory frees what is idle and is tried again, then in
            smaller tiles (not with dropout, whose masks depend on them); False, and any ring of several
            processes, which must stay in step, raises the first error; the others raise RingError, at the
            latest after `timeout`.
        mixed_precision: True attends in bfloat16, or give torch.float16; the output has the dtype of the
            query again. As under autocast, float64 stays.
        log_memory_usage: after each call the logger "dilated_attention_pytorch" says, at level INFO, what the
            pool holds and what the device has left.
    """

    segment_lengths: Branch = None
    dilation_rates: Branch = None
    dropout: float = 0.0
    ring_size: int | None = None
    timeout: Timeout = None
    strategy: str = "auto"
    use_gradient_checkpointing: bool = False
    memory_pool_size: int | None = 10
    enable_error_recovery: bool = True
    mixed_precision: bool | torch.dtype = False
    log_memory_usage: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        branches = resolve_branches(self.segment_lengths, self.dilation_rates, self.max_length)
        spec = DilatedSpec(*branches, dropout_p=self.dropout)
        # As tuples, so that equal configurations are equal and hashable.
        object.__setattr__(self, "segment_lengths", spec.segment_lengths)
        object.__setattr__(self, "dilation_rates", spec.dilation_rates)
        RingOptions(self.ring_size, None, self.timeout)  # checks them
        one_of("strategy", self.strategy, STRATEGIES)
        check_pool_size("memory_pool_size", self.memory_pool_size)
        check_flags(**{name: getattr(self, name) for name in _FLAGS})
        low = self.mixed_precision
        if not isinstance(low, bool) and low not in (torch.bfloat16, torch.float16):
            raise TypeError(f"mixed_precision must be a bool, torch.bfloat16 or torch.float16, got {low!r}")

    @property
    def low_precision(self) -> torch.dtype | None:
        """The dtype in which calls attend, if it is not that of their inputs."""
        return (torch.bfloat16 if self.mixed_precision is True else self.mixed_precision) or None


class RingDilatedAttentionProduction(RingDilatedAttentionV2):
    """`RingDilatedAttentionV2` as a `RingAttentionConfig` says, with its scratch and large results pooled.

    Args:
        config: all of the configuration. Without it, its fields are given by name.
        options: other options of `RingDilatedAttentionV2`, such as group, softmax_scale or lightweight_pool.
    """

    def __init__(self, config: RingAttentionConfig | None = None, **options: Any) -> None:
        names = [each.name for each in fields(RingAttentionConfig) if each.name in options]
        given = {name: options.pop(name) for name in names}
        if config is None:
            config = RingAttentionConfig(**given)
        elif not isinstance(config, RingAttentionConfig):
            raise TypeError(f"config must be a RingAttentionConfig or None, got {config!r}")
        elif given:
            raise ValueError(f"config is the whole configuration, got {', '.join(given)} beside it")
        pooled, lightweight = options.pop("enable_memory_pool", True), options.get("lightweight_pool", False)
        check_flags(enable_memory_pool=pooled, lightweight_pool=lightweight)
        if not pooled:
            rule = "the memory of this module is pooled (memory_pool_size=0 keeps nothing)"
            raise ValueError(f"{rule}, got enable_memory_pool=False")
        pool_size, retries = config.memory_pool_size, config.enable_error_recovery
        settings = Settings(lightweight=lightweight, retries=retries, pool_size=pool_size)
        # Before the other options, whose checks ask where the memory comes from.
        object.__setattr__(self, "config", config)
        object.__setattr__(self, "_manager", shared_buffer_manager(settings))
        names = ["segment_lengths", "dilation_rates", "ring_size", "timeout", "strategy"]
        options |= {name: getattr(config, name) for name in names}
        # No dropout is None, so that attention_dropout is the same option.
        super().__init__(dropout=config.dropout or None, enable_memory_pool=True, **options)

    config: RingAttentionConfig
    _manager: AttentionBufferManager

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """The keywords that the class takes, the fields of its configuration included."""
        return super().option_names() | {each.name for each in fields(RingAttentionConfig)}

    @property
    def memory_pool(self) -> MemoryPool:
        """Where scratch and large results come from; shared by the modules of one `memory_pool_size`."""
        return self._manager.pool

    def get_memory_stats(self) -> dict[str, Any]:
        """The statistics of `memory_pool` and `pattern_cache` (empty without one); idle buffers by type.

        Each of "buffers" is (number, bytes). Pool and cache serve other modules, too.
        """
        cache = self._pattern_cache
        return {
            "memory_pool": self.memory_pool.get_stats(),
            "buffers": self.memory_pool.idle_buffers(),
            "pattern_cache": {} if cache is None else cache.get_stats(),
        }

    def clear_caches(self) -> None:
        """Frees what is idle in the pool and drops all plans of the pattern cache, of other modules too."""
        self.memory_pool.clear()
        if self._pattern_cache is not None:
            self._pattern_cache.clear()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Mask) -> Tensor:
        call = (q, k, v, is_causal, mask)
        if self.config.use_gradient_checkpointing and torch.is_grad_enabled():
            drops = self._dropout_now > 0
            out: Tensor = checkpoint(self._attend_cast, *call, use_reentrant=False, preserve_rng_state=drops)
        else:
            out = self._attend_cast(*call)
        if self.config.log_memory_usage:
            self._log_memory(out)
        return out

    def _attend_cast(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Mask) -> Tensor:
        low, tensors = self.config.low_precision, (q, k, v)
        if low is None or not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors):
            return super()._attend(*tensors, is_causal, mask)  # which rejects what are not tensors
        low_q, low_k, low_v = (x if x.dtype == torch.float64 else x.to(low) for x in tensors)
        with without_autocast(q.device):  # whose dtype may be another
            return super()._attend(low_q, low_k, low_v, is_causal, mask).to(q.dtype)

    # A log record is no part of a graph.
    @uncompiled
    def _log_memory(self, out: Tensor) -> None:
        stats, memory = self.memory_pool.get_stats(), device_memory(out.device)
        sizes = [stats[name] for name in ("total_allocated", "cached_bytes", "peak_allocated")]
        sizes.append(None if memory is None else memory.available)
        text = "attention over %s %s on %s: the pool holds %s, %s of it idle, at most %s so far; %s available"
        LOGGER.info(text, tuple(out.shape), out.dtype, out.device, *map(describe_bytes, sizes))

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        config, usual = self.config, RingAttentionConfig()
        changed = {name: (getattr(config, name), getattr(usual, name)) for name in _OWN}
        return {**super()._changed(), "enable_memory_pool": (True, True), **changed}
