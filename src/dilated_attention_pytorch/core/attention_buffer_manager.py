"""Buffers of attention by type: what a type is used for decides how its memory is had and kept."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ..checks import check_device, check_flags, check_positive_int, check_shape
from .buffer_config import (
    CAPACITY,
    DEFAULT_CONFIGS,
    FITS,
    MIB,
    BufferConfig,
    BufferType,
    Lifetime,
    check_buffer_type,
)
from .memory_pool import MemoryPool, get_global_memory_pool
from .workspace import Workspace

__all__ = ["AttentionBufferManager", "BufferConfig", "BufferType", "create_attention_buffer_manager"]

RECURS_AFTER = 3  # requests of one shape that make it a habit
MAX_SHAPES = 1024  # that the manager remembers


class Settings(NamedTuple):
    """Of a manager without configurations of its own."""

    enable_reuse: bool = True
    enable_preallocation: bool = False
    lightweight: bool = False
    enable_profiling: bool = False
    is_pooled: bool = False  # the memory is the global pool's
    retries: bool = True
    pool_size: int | None = None  # of a pool of its own


Request = tuple[BufferType, tuple[int, ...], torch.dtype, torch.device]


@dataclass
class _Figures:
    """Of one buffer type."""

    hits: int = 0
    misses: int = 0
    deallocations: int = 0
    largest_bytes: int = 0
    seconds: float = 0.0
    strategies: Counter[str] = field(default_factory=Counter)


class AttentionBufferManager:
    """Hands out buffers by type and keeps returned ones for the next request. Thread-safe.

    A buffer is handed out again only when nothing else can see its memory, views and graphs included.

    Args:
        custom_configs: configurations that replace the default ones of their types.
        enable_reuse: keep what is returned; False makes every buffer fresh.
        enable_preallocation: shapes that recur are allocated again ahead of time after the cache was cleared.
        lightweight: the results of attention are ordinary tensors, and free memory is not looked at after
            each of its calls.
        enable_profiling: measures the time spent in requests, by type; see `profile_table`.
        retries: a call of attention that runs out of memory frees what is idle and tries again, then in
            smaller tiles; False lets the first error through.
        pool: where the memory comes from, by default a pool of the manager's own. Modules share buffers by
            sharing a manager or a pool.
    """

    def __init__(
        self,
        custom_configs: Mapping[BufferType, BufferConfig] | None = None,
        *,
        enable_reuse: bool = True,
        enable_preallocation: bool = False,
        lightweight: bool = False,
        enable_profiling: bool = False,
        retries: bool = True,
        pool: MemoryPool | None = None,
    ) -> None:
        check_flags(
            enable_reuse=enable_reuse,
            enable_preallocation=enable_preallocation,
            lightweight=lightweight,
            enable_profiling=enable_profiling,
            retries=retries,
        )
        if custom_configs is not None and not isinstance(custom_configs, Mapping):
            raise TypeError(f"custom_configs must be a mapping, got {custom_configs!r}")
        custom = {check_buffer_type(name): config for name, config in (custom_configs or {}).items()}
        for buffer_type, config in custom.items():
            if not isinstance(config, BufferConfig):
                raise TypeError(f"the config of {buffer_type.value} must be a BufferConfig, got {config!r}")
        if pool is not None and not isinstance(pool, MemoryPool):
            raise TypeError(f"pool must be a MemoryPool, got {type(pool).__name__}")
        self.configs: dict[BufferType, BufferConfig] = {**DEFAULT_CONFIGS, **custom}
        self.enable_reuse, self.enable_preallocation = enable_reuse, enable_preallocation
        self.lightweight, self.enable_profiling = lightweight, enable_profiling
        self.retries = retries
        self.pool = MemoryPool() if pool is None else pool
        self.name = f"manager:{next(_NUMBERS)}"
        self._start_clean()
        _MANAGERS[self.name] = self

    def _start_clean(self) -> None:
        self._lock = threading.RLock()  # reentrant: the garbage collector may return buffers at any time
        self._figures = {buffer_type: _Figures() for buffer_type in BufferType}
        self._shapes: Counter[Request] = Counter()
        self._is_cold = False

    def allocate(
        self,
        buffer_type: BufferType | str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        zero_init: bool | None = None,
    ) -> Tensor:
        """A contiguous buffer; filled with zeros as the type's configuration says, or as `zero_init` says."""
        start = time.perf_counter() if self.enable_profiling else 0.0
        buffer_type = check_buffer_type(buffer_type)
        config, device = self.configs[buffer_type], normal_device(device)
        self._warm_up()
        zeros = config.zero_init if zero_init is None else zero_init
        buffer = self._lend(buffer_type, shape, dtype, device, zeros)
        self._learn((buffer_type, tuple(buffer.shape), dtype, device))
        if start:
            with self._lock:
                self._figures[buffer_type].seconds += time.perf_counter() - start
        return buffer

    def _warm_up(self) -> None:
        """Allocates what recurs ahead of the first request after the cache was cleared."""
        if self._is_cold:
            self._is_cold = False
            self.preallocate_buffers()

    def deallocate(self, buffer: Tensor, buffer_type: BufferType | str) -> None:
        """Returns a buffer for reuse. The tensor is empty afterwards; views of it delay the reuse."""
        buffer_type = check_buffer_type(buffer_type)
        if isinstance(buffer, Tensor):
            tag = self.pool.tag_of(buffer)
            if tag not in (None, buffer_type.value):
                raise ValueError(f"a buffer allocated as {tag} cannot be returned as {buffer_type.value}")
        self.pool.deallocate(buffer)
        with self._lock:
            self._figures[buffer_type].deallocations += 1
        self.pool.trim(buffer_type.value, self.capacity(buffer_type))

    def capacity(self, buffer_type: BufferType | str) -> int:
        """Idle buffers of a type that are kept: 5 to 10 by its configuration, none while memory is scarce."""
        if not self.enable_reuse or self.pool.memory_is_scarce:
            return 0
        return CAPACITY[self.configs[check_buffer_type(buffer_type)].reuse_frequency]

    def preallocate_buffers(
        self,
        batch_size: int | None = None,
        seq_len: int | None = None,
        num_heads: int | None = None,
        head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        buffer_types: BufferType | str | Sequence[BufferType | str] = ("query", "key", "value", "output"),
    ) -> int:
        """Allocates ahead, so that the first requests find a buffer; returns how many are ready.

        With sizes: one (batch_size, seq_len, num_heads, head_dim) buffer of each type. Without: one for every
        shape that was requested at least three times (learnt with `enable_preallocation`), the most frequent
        first, within half of the pool's budget. No more than the type's capacity either way.
        """
        sizes = (batch_size, seq_len, num_heads, head_dim)
        names = [buffer_types] if isinstance(buffer_types, str) else buffer_types
        types = [check_buffer_type(name) for name in names]
        if all(size is None for size in sizes):
            requests = self._habits()
        elif any(size is None for size in sizes):
            raise ValueError(
                f"batch_size, seq_len, num_heads and head_dim are given all or none, got {sizes}"
            )
        else:
            shape = tuple(size for size in sizes if size is not None)
            for name, size in zip(("batch_size", "seq_len", "num_heads", "head_dim"), shape, strict=True):
                check_positive_int(name, size)
            place = normal_device(device)
            requests = [(buffer_type, shape, dtype, place) for buffer_type in types]
        buffers: list[Tensor] = []
        ready: Counter[BufferType] = Counter()
        for request in requests:
            if ready[request[0]] < self.capacity(request[0]):
                buffers.append(self._lend(*request, zeros=False, ahead=True))
                ready[request[0]] += 1
        for buffer in buffers:
            self.pool.deallocate(buffer)
        for buffer_type in ready:
            self.pool.trim(buffer_type.value, self.capacity(buffer_type))
        return len(buffers)

    def clear_cache(
        self, buffer_type: BufferType | str | None = None, *, lifetime: Lifetime | None = None
    ) -> None:
        """Frees all that is idle, or one type, or the types whose lifetime is not longer than `lifetime`."""
        lifetimes = get_args(Lifetime)
        if lifetime not in (None, *lifetimes):
            raise ValueError(f"lifetime must be one of {lifetimes}, got {lifetime!r}")
        if buffer_type is None and lifetime is None:
            self.pool.clear()
        else:
            named = list(BufferType) if buffer_type is None else [check_buffer_type(buffer_type)]
            ended = lifetimes if lifetime is None else lifetimes[: lifetimes.index(lifetime) + 1]
            for tag in self.pool.idle_buffers():
                each = _slot_type(tag)
                if each in named and self.configs[each].lifetime in ended:
                    self.pool.clear(tag)
        self._is_cold = self.enable_preallocation

    @contextmanager
    def workspace(self, device: torch.device) -> Iterator[Workspace]:
        """Scratch for one call of the engine, counted by type: packed queries, keys and values, and TEMP."""
        if not self.enable_reuse:
            workspace = Workspace()
            yield workspace
            self._count_workspace(workspace)
            return
        self._warm_up()
        with self.pool.workspace(device, lightweight=self.lightweight, make_result=self._result) as workspace:
            yield workspace
            self._count_workspace(workspace)  # before another call may have it

    def _count_workspace(self, workspace: Workspace) -> None:
        fresh = set(workspace.fresh)
        with self._lock:
            for slot in workspace.taken:
                figures = self._figures[_slot_type(slot[0])]
                figures.hits += slot not in fresh
                figures.misses += slot in fresh
                figures.largest_bytes = max(figures.largest_bytes, workspace.buffers[slot].nbytes)

    def _result(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer, reused = self.pool.lend_result(shape, dtype, device)
        if reused is not None:
            self._learn((BufferType.OUTPUT, tuple(shape), dtype, device))
            self._count(BufferType.OUTPUT, buffer, "direct", reused)
        return buffer

    def get_stats(self) -> dict[str, Any]:
        """Requests, hits and what is kept, in all and by type (`buffer_types`)."""
        idle = {buffer_type: [0, 0] for buffer_type in BufferType}
        for tag, figures_of_tag in self.pool.idle_buffers().items():
            for i, figure in enumerate(figures_of_tag):
                idle[_slot_type(tag)][i] += figure
        with self._lock:
            types: dict[str, dict[str, Any]] = {
                buffer_type.value: {
                    "cache_hits": figures.hits,
                    "cache_misses": figures.misses,
                    "deallocations": figures.deallocations,
                    "cached_buffers": idle[buffer_type][0],
                    "cached_bytes": idle[buffer_type][1],
                    "capacity": self.capacity(buffer_type),
                    "largest_bytes": figures.largest_bytes,
                    "strategies": dict(figures.strategies),
                    **({"seconds": figures.seconds} if self.enable_profiling else {}),
                }
                for buffer_type, figures in self._figures.items()
            }
            known_shapes = len(self._shapes)
        pool = self.pool.get_stats()
        hits = sum(figures["cache_hits"] for figures in types.values())
        misses = sum(figures["cache_misses"] for figures in types.values())
        return {
            "cache_hits": hits,
            "cache_misses": misses,
            "cache_hit_rate": hits / (hits + misses) if hits + misses else 0.0,
            "allocations": hits + misses,
            "deallocations": sum(figures["deallocations"] for figures in types.values()),
            "cached_buffers": pool["cached_buffers"],
            "cached_bytes": pool["cached_bytes"],
            "total_allocated": pool["total_allocated"],
            "peak_allocated": pool["peak_allocated"],
            "evictions": pool["evictions"],
            "known_shapes": known_shapes,
            "buffer_types": types,
        }

    def profile_table(self) -> str:
        """The figures by type as a table for people."""
        head = ("type", "hits", "misses", "hit rate", "idle", "idle MiB", "largest MiB", "us a request")
        rows = [head]
        for name, figures in self.get_stats()["buffer_types"].items():
            requests = figures["cache_hits"] + figures["cache_misses"]
            if not requests and not figures["cached_buffers"]:
                continue
            rate = f"{figures['cache_hits'] / requests:.1%}" if requests else "-"
            timed = "seconds" in figures and requests
            sizes = (f"{figures[key] / MIB:.2f}" for key in ("cached_bytes", "largest_bytes"))
            micros = f"{1e6 * figures['seconds'] / requests:.1f}" if timed else "-"
            counts = (figures["cache_hits"], figures["cache_misses"], rate, figures["cached_buffers"])
            rows.append((name, *map(str, counts), *sizes, micros))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return "\n".join(lines)

    def __repr__(self) -> str:
        hits, misses = (sum(getattr(f, name) for f in self._figures.values()) for name in ("hits", "misses"))
        return f"AttentionBufferManager({self.name}, {hits} hits, {misses} misses, {self.pool!r})"

    def __copy__(self) -> AttentionBufferManager:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionBufferManager:
        return self  # copies of a module share its buffers

    def __reduce__(self) -> tuple[Callable[..., AttentionBufferManager], tuple[Any, ...]]:
        if _SHARED.get(self.settings) is self:
            return shared_buffer_manager, (self.settings,)
        switches = self.settings._asdict()
        del switches["is_pooled"], switches["pool_size"]
        return partial(AttentionBufferManager, dict(self.configs), **switches, pool=self.pool), ()

    @property
    def settings(self) -> Settings:
        is_pooled = self.pool is get_global_memory_pool()
        switches = (self.enable_reuse, self.enable_preallocation, self.lightweight, self.enable_profiling)
        return Settings(*switches, is_pooled, self.retries, self.pool.pool_size)

    def _lend(
        self,
        buffer_type: BufferType,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        zeros: bool,
        ahead: bool = False,
    ) -> Tensor:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        config, shape = self.configs[buffer_type], check_shape(shape)
        strategy = config.strategy(math.prod(shape) * dtype.itemsize)
        if not self.enable_reuse:
            self.pool.trim(buffer_type.value, 0)
        buffer, reused = self.pool.lend(
            shape,
            dtype,
            device,
            tag=buffer_type.value,
            # Without waste, an attention result finds it too; a request of best fit finds any.
            fit="exact" if ahead and strategy != "bucketed" else FITS[strategy],
            zero_init=zeros,
            pinned=config.prefer_pinned,
            alignment=config.alignment,
            numa=strategy == "numa",
        )
        if not ahead:
            self._count(buffer_type, buffer, strategy, reused)
        if not reused:  # what was dropped instead of returned counts as idle, too
            self.pool.trim(buffer_type.value, self.capacity(buffer_type))
        return buffer

    def _count(self, buffer_type: BufferType, buffer: Tensor, strategy: str, reused: bool) -> None:
        with self._lock:
            figures = self._figures[buffer_type]
            figures.hits += reused
            figures.misses += not reused
            figures.largest_bytes = max(figures.largest_bytes, buffer.nbytes)
            figures.strategies[strategy] += 1

    def _habits(self) -> list[Request]:
        """The shapes that recur, the most frequent first, as many as half of the pool's budget has room for.

        Nobody asked for them yet, so they must not be what exceeds the budget.
        """
        with self._lock:
            known = self._shapes.most_common()
        room, habits = self.pool.budget // 2, []
        for request, times in known:
            nbytes = math.prod(request[1]) * request[2].itemsize
            if times >= RECURS_AFTER and nbytes <= room:
                habits.append(request)
                room -= nbytes
        return habits

    def _learn(self, request: Request) -> None:
        if not self.enable_preallocation:
            return
        with self._lock:
            if request in self._shapes or len(self._shapes) < MAX_SHAPES:
                self._shapes[request] += 1


_TYPE_NAMES = frozenset(buffer_type.value for buffer_type in BufferType)
_NUMBERS = count(1)
_MANAGERS: weakref.WeakValueDictionary[str, AttentionBufferManager] = weakref.WeakValueDictionary()
_SHARED: weakref.WeakValueDictionary[Settings, AttentionBufferManager] = weakref.WeakValueDictionary()


def create_attention_buffer_manager(
    enable_reuse: bool = True,
    enable_preallocation: bool = False,
    lightweight: bool = False,
    **options: Any,
) -> AttentionBufferManager:
    """A manager of its own; `options` are those of `AttentionBufferManager`."""
    return AttentionBufferManager(
        enable_reuse=enable_reuse,
        enable_preallocation=enable_preallocation,
        lightweight=lightweight,
        **options,
    )


def shared_buffer_manager(settings: Settings) -> AttentionBufferManager:
    """The one manager of all modules with these settings; it lives as long as one of them does."""
    with _SHARED_LOCK:
        manager = _SHARED.get(settings)
        if manager is None:
            switches = settings._asdict()
            pool_size = switches.pop("pool_size")
            pool = get_global_memory_pool() if switches.pop("is_pooled") else MemoryPool(pool_size=pool_size)
            manager = _SHARED[settings] = AttentionBufferManager(**switches, pool=pool)
        return manager


def find_buffer_manager(name: str) -> AttentionBufferManager | None:
    """The manager of that `name`, if it still exists in this process."""
    return _MANAGERS.get(name)


def _slot_type(slot: str) -> BufferType:
    """The type of a slot of scratch: "key", or "comm_in"; those of no type are temporary."""
    name = slot.partition("_")[0]
    return BufferType(name) if name in _TYPE_NAMES else BufferType.TEMP


def normal_device(device: torch.device | str | None) -> torch.device:
    """One name for a device, however it was written: "cuda" is the current CUDA device."""
    device = check_device(device) or torch.get_default_device()
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


_SHARED_LOCK = threading.Lock()


def _start_clean_after_fork() -> None:
    global _SHARED_LOCK
    _SHARED_LOCK = threading.Lock()
    for manager in list(_MANAGERS.values()):
        manager._start_clean()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_clean_after_fork)
