"""Buffers of attention by type, how they are had and kept; and where a call's memory comes from, by name."""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from ..checks import check_dtype, check_flags, check_positive_int, check_shape
from . import memory_pool, process
from .host_memory import describe_bytes, normal_device
from .memory_pool import MemoryPool, get_global_memory_pool
from .workspace import (
    CAPACITY,
    DEFAULT_CONFIGS,
    FITS,
    BufferConfig,
    BufferType,
    Lifetime,
    Request,
    Workspace,
)

__all__ = ["AttentionBufferManager", "BufferConfig", "BufferType", "create_attention_buffer_manager"]

RECURS_AFTER = 3  # requests of one shape that make it a habit
MAX_SHAPES = 1024  # that the manager remembers
FRESH, POOL, LIGHTWEIGHT = "fresh", "pool", "lightweight"  # names of sources, beside those of managers
Kind = tuple[BufferType, tuple[int, ...], torch.dtype, torch.device]
_T = TypeVar("_T")


class Settings(NamedTuple):
    """Of a manager without configurations of its own."""

    enable_reuse: bool = True
    enable_preallocation: bool = False
    lightweight: bool = False
    enable_profiling: bool = False
    is_pooled: bool = False  # the memory is the global pool's
    retries: bool = True
    pool_size: int | None = None  # of a pool of its own


class AttentionBufferManager(process.PerProcess):
    """Hands out buffers by type and keeps returned ones for the next request. Thread-safe.

    A buffer is handed out again only when nothing else can see its memory, views and graphs included.

    Args:
        custom_configs: configurations that replace the default ones of their types.
        enable_reuse: keep what is returned; False makes every buffer fresh.
        enable_preallocation: shapes that recur are allocated again ahead of time after the cache was cleared.
        lightweight: the results of attention are ordinary tensors.
        enable_profiling: measures the time spent in requests, by type.
        retries: a call of attention that runs out of memory frees what is idle and tries again, then in
            smaller batches; False lets the first error through.
        pool: where the memory comes from, by default a pool of the manager's own. Modules share buffers by
            sharing a manager or a pool; what is counted is then what all of them did.
    """

    SWITCHES = ("enable_reuse", "enable_preallocation", "lightweight", "enable_profiling", "retries")
    SETTINGS = (*SWITCHES, "custom_configs", "pool")

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
        self.enable_reuse, self.enable_preallocation = enable_reuse, enable_preallocation
        self.lightweight, self.enable_profiling, self.retries = lightweight, enable_profiling, retries
        check_flags(**{name: getattr(self, name) for name in self.SWITCHES})
        if custom_configs is not None and not isinstance(custom_configs, Mapping):
            raise TypeError(f"custom_configs must be a mapping, got {custom_configs!r}")
        self.custom_configs = {BufferType(name): config for name, config in (custom_configs or {}).items()}
        for buffer_type, config in self.custom_configs.items():
            if not isinstance(config, BufferConfig):
                raise TypeError(f"the config of {buffer_type.value} must be a BufferConfig, got {config!r}")
        if pool is not None and not isinstance(pool, MemoryPool):
            raise TypeError(f"pool must be a MemoryPool, got {type(pool).__name__}")
        self.configs = {**DEFAULT_CONFIGS, **self.custom_configs}
        self.pool = MemoryPool() if pool is None else pool
        self.name = f"manager:{next(_NUMBERS)}"
        super().__init__()
        _MANAGERS[self.name] = self

    def _start_clean(self) -> None:
        self._seconds: Counter[BufferType] = Counter()
        self._shapes: Counter[Kind] = Counter()
        self._is_cold = False  # the cache was cleared, and what recurs was not yet allocated ahead

    def allocate(
        self,
        buffer_type: BufferType | str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        zero_init: bool | None = None,
    ) -> Tensor:
        """A contiguous buffer; filled with zeros as the type's configuration says, or as `zero_init` says."""
        start = time.perf_counter()
        request = BufferType(buffer_type), check_shape(shape), dtype, normal_device(device)
        self._warm_up()
        buffer = self._lend(request, zero_init)
        self._learn(request)
        with self._lock:
            self._seconds[request[0]] += time.perf_counter() - start  # type: ignore[assignment]
        return buffer

    def deallocate(self, buffer: Tensor, buffer_type: BufferType | str) -> None:
        """Returns a buffer for reuse. The tensor is empty afterwards; views of it delay the reuse."""
        tag = BufferType(buffer_type).value
        self.pool.deallocate(buffer, tag)
        self.pool.clear(tag, keep=self.capacity(tag))

    def capacity(self, buffer_type: BufferType | str) -> int:
        """Idle buffers of a type that are kept: 5 to 10 by its configuration, none while memory is scarce."""
        config = self.configs[BufferType(buffer_type)]
        return CAPACITY[config.reuse_frequency] if self.enable_reuse and not self.pool.memory_is_scarce else 0

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
        sizes = {"batch_size": batch_size, "seq_len": seq_len, "num_heads": num_heads, "head_dim": head_dim}
        given = {name: size for name, size in sizes.items() if size is not None}
        if len(given) not in (0, 4):
            raise ValueError(f"{', '.join(sizes)} are given all or none, got {tuple(sizes.values())}")
        for name, size in given.items():
            check_positive_int(name, size)
        check_dtype(dtype)
        names = [buffer_types] if isinstance(buffer_types, str) else buffer_types
        place, shape, room = normal_device(device), tuple(given.values()), math.inf
        requests: list[Kind] = [(BufferType(name), shape, dtype, place) for name in names]
        if not given:
            with self._lock:
                requests = [request for request, times in self._shapes.most_common() if times >= RECURS_AFTER]
            room = self.pool.budget / 2  # nobody asked for them yet: they must not be what exceeds the budget
        ready: list[tuple[BufferType, Tensor]] = []
        for request in requests:
            nbytes = math.prod(request[1]) * request[2].itemsize
            if nbytes <= room and [each for each, _ in ready].count(request[0]) < self.capacity(request[0]):
                ready.append((request[0], self._lend(request, zeros=False, ahead=True)))
                room -= nbytes
        return len(ready)

    def clear_cache(
        self, buffer_type: BufferType | str | None = None, *, lifetime: Lifetime | None = None
    ) -> None:
        """Frees all that is idle, or one type, or the types whose lifetime is not longer than `lifetime`."""
        lifetimes = get_args(Lifetime)
        if lifetime not in (None, *lifetimes):
            raise ValueError(f"lifetime must be one of {lifetimes}, got {lifetime!r}")
        named = list(BufferType) if buffer_type is None else [BufferType(buffer_type)]
        ended = lifetimes if lifetime is None else lifetimes[: lifetimes.index(lifetime) + 1]
        for tag in self.pool.idle_buffers():
            if (each := BufferType.of(tag)) in named and self.configs[each].lifetime in ended:
                self.pool.clear(tag)
        self._is_cold = self.enable_preallocation

    @contextmanager
    def workspace(self, device: torch.device) -> Iterator[Workspace]:
        """Scratch for one call of attention on a device, counted by type, warm from earlier calls."""
        self._warm_up()
        make_result = None if self.lightweight else self._result
        workspace = Workspace(self._scratch, make_result) if device.type == "cpu" else Workspace()
        try:
            yield workspace
        finally:
            workspace.buffers.clear()
        self.pool.trim()

    def _scratch(self, slot: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.pool.lend(Request(shape, dtype, slot, "scratch" if self.enable_reuse else "fresh"))

    def _result(self, slot: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pooled where fresh pages would cost time and the budget allows."""
        if not memory_pool.RESULT_BYTES <= math.prod(shape) * dtype.itemsize <= self.pool.budget:
            return torch.empty(shape, dtype=dtype, device="cpu")
        self._learn((BufferType.OUTPUT, tuple(shape), dtype, torch.device("cpu")))
        return self.pool.lend(Request(shape, dtype, slot, "exact"))

    def get_stats(self) -> dict[str, Any]:
        """Requests, hits and what is kept, in all and by type (`buffer_types`)."""
        types: dict[str, dict[str, Any]] = {}
        for each in BufferType:
            types[each.value] = {**dict.fromkeys(_FIGURES, 0), "capacity": self.capacity(each)}
            if self.enable_profiling:
                types[each.value]["seconds"] = self._seconds[each]
        with self.pool._lock:
            pool, idle = self.pool.get_stats(), self.pool.idle_buffers()
            for tag, counted in self.pool.figures.items():
                figures = types[BufferType.of(tag).value]
                figures["cache_hits"] += counted["reuses"]
                figures["cache_misses"] += counted["allocations"] - counted["reuses"]
                figures["deallocations"] += counted["deallocations"]
                figures["largest_bytes"] = max(figures["largest_bytes"], counted["largest_bytes"])
        for tag, (number, nbytes) in idle.items():
            types[BufferType.of(tag).value]["cached_buffers"] += number
            types[BufferType.of(tag).value]["cached_bytes"] += nbytes
        hits, requests = pool["reuse_count"], pool["allocation_count"]
        stats = {"cache_hits": hits, "cache_misses": requests - hits, "cache_hit_rate": pool["reuse_rate"]}
        stats |= {"allocations": requests, "deallocations": pool["deallocation_count"]}
        kept = ("cached_buffers", "cached_bytes", "total_allocated", "peak_allocated", "evictions")
        stats |= {name: pool[name] for name in kept}
        return {**stats, "known_shapes": len(self._shapes), "buffer_types": types}

    @property
    def settings(self) -> Settings:
        given = {name: getattr(self, name) for name in self.SWITCHES}
        return Settings(
            **given, is_pooled=self.pool is get_global_memory_pool(), pool_size=self.pool.pool_size
        )

    def _lend(self, request: Kind, zeros: bool | None, ahead: bool = False) -> Tensor:
        (buffer_type, shape, dtype, device), tag = request, request[0].value
        check_dtype(dtype)
        config = self.configs[buffer_type]
        strategy = config.strategy(math.prod(shape) * dtype.itemsize)
        fit = FITS[strategy] if self.enable_reuse else "fresh"
        # Without waste, an attention result finds it too; a request of best fit finds any.
        fit = "exact" if ahead and fit == "best" else fit
        how: dict[str, Any] = {"alignment": config.alignment, "pinned": config.prefer_pinned}
        how |= {"zero_init": config.zero_init if zeros is None else zeros, "numa": strategy == "numa"}
        buffer = self.pool.allocate(shape, dtype, device, tag=tag, fit=fit, ahead=ahead, **how)
        self.pool.clear(tag, keep=self.capacity(tag))  # what was dropped, not returned, is idle, too
        return buffer

    def _learn(self, request: Kind) -> None:
        with self._lock:
            if self.enable_preallocation and (request in self._shapes or len(self._shapes) < MAX_SHAPES):
                self._shapes[request] += 1

    def _warm_up(self) -> None:
        """Allocates what recurs ahead of the first request after the cache was cleared."""
        if self._is_cold:
            self._is_cold = False
            self.preallocate_buffers()


_FIGURES = ("cache_hits", "cache_misses", "deallocations", "cached_buffers", "cached_bytes", "largest_bytes")
_NUMBERS = count(1)
_MANAGERS: weakref.WeakValueDictionary[str, AttentionBufferManager] = weakref.WeakValueDictionary()
_SHARED: weakref.WeakValueDictionary[Settings, AttentionBufferManager] = weakref.WeakValueDictionary()
find_buffer_manager = _MANAGERS.get  # the manager of a `name`, if it still exists in this process


def create_attention_buffer_manager(
    enable_reuse: bool = True,
    enable_preallocation: bool = False,
    lightweight: bool = False,
    **options: Any,
) -> AttentionBufferManager:
    """A manager of its own; `options` are those of `AttentionBufferManager`."""
    options |= {"enable_reuse": enable_reuse, "enable_preallocation": enable_preallocation}
    return AttentionBufferManager(lightweight=lightweight, **options)


def shared_buffer_manager(settings: Settings) -> AttentionBufferManager:
    """The one manager of all modules with these settings; it lives as long as one of them does."""
    with process.LOCK:
        manager = _SHARED.get(settings)
        if manager is None:
            switches = settings._asdict()
            pool_size = switches.pop("pool_size")
            pool = get_global_memory_pool() if switches.pop("is_pooled") else MemoryPool(pool_size=pool_size)
            manager = _SHARED[settings] = AttentionBufferManager(**switches, pool=pool)
            manager._found_by = partial(shared_buffer_manager, settings)
        return manager


@lru_cache(maxsize=2)
def _of_global_pool(lightweight: bool) -> AttentionBufferManager:
    return AttentionBufferManager(pool=get_global_memory_pool(), lightweight=lightweight)


def find_source(memory: str) -> AttentionBufferManager | None:
    """What lends the workspace of a call: a buffer manager, that of the global pool, or None: fresh memory.

    The name of a manager that is gone, or of another process as in an exported program, means fresh memory:
    that changes no result.
    """
    is_global = memory in (POOL, LIGHTWEIGHT)
    return _of_global_pool(memory == LIGHTWEIGHT) if is_global else find_buffer_manager(memory)


def run_with_memory(
    memory: str, workspace_bytes: int, device: torch.device, attend: Callable[[int, Workspace], _T]
) -> _T:
    """`attend(workspace_bytes, workspace)` with a workspace of the named source.

    A call with pooled memory that runs out of it frees all that is idle and tries again, then in smaller
    batches.
    """
    source = find_source(memory)
    if source is None:
        return attend(workspace_bytes, Workspace())

    def attend_in(size: int) -> _T:
        with source.workspace(device) as workspace:
            return attend(size, workspace)

    if not source.retries:
        return attend_in(workspace_bytes)
    sizes = [max(1, workspace_bytes // part) for part in (1, 1, 8, 64)]
    tried = f" and batches cut to {describe_bytes(sizes[-1])}"
    return process.with_relief([partial(attend_in, size) for size in sizes], device, tried)


def check_memory(memory: str) -> None:
    """Validates the name of a source."""
    if memory in (FRESH, POOL, LIGHTWEIGHT):
        return
    if torch.compiler.is_compiling() and isinstance(memory, str):
        return  # the registry of managers cannot be traced
    if not isinstance(memory, str) or find_buffer_manager(memory) is None:
        raise ValueError(
            f"memory must be {FRESH!r}, {POOL!r}, {LIGHTWEIGHT!r} or a buffer manager's name, got {memory!r}"
        )
