"""One cache for plans and patterns: bounded, least recently used out first, safe under threads and forks."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from time import perf_counter
from typing import Any, TypeVar

import torch

from ..checks import check_flags, check_positive_int
from .host_memory import normal_device
from .process import LOGGER, PerProcess, once

_T = TypeVar("_T")


class _Entry:
    def __init__(self, value: Any, seconds: float = 0.0) -> None:
        self.value, self.seconds, self.bytes = value, seconds, _nbytes(value)  # seconds of building it
        self.copies: dict[torch.device, Any] = {}


class PatternCache(PerProcess):
    """A thread-safe cache of any values, kept as they are built, usually on the host; do not change them.

    Args:
        max_size: how many values are kept; `resize` changes it.
        max_bytes: bytes of values kept, and of device copies kept; a larger value is returned but not kept.
            The size of a value is its `nbytes`, or that of what tuples, lists, dicts and dataclasses hold.
        keep_after: the `get_or_build` call from which on a key's value is kept. 1 keeps it at once; 2 spares
            the cache what is asked for only once.
        auto_tune: doubles `max_size` on a miss of a key that `max_size` evicted not long ago.
        cache_on_gpu: keeps the copies that `get_or_build` makes for a device; otherwise each call copies.
        enable_profiling: adds build times to `get_stats`; may be set at any time.
    """

    SETTINGS = ("max_size", "max_bytes", "keep_after", "auto_tune", "cache_on_gpu", "enable_profiling")

    def __init__(
        self,
        max_size: int = 1000,
        *,
        max_bytes: int = 64 * 2**20,
        keep_after: int = 1,
        auto_tune: bool = False,
        cache_on_gpu: bool = False,
        enable_profiling: bool = False,
    ) -> None:
        self.max_size, self.max_bytes, self.keep_after = max_size, max_bytes, keep_after
        self.auto_tune, self.cache_on_gpu, self.enable_profiling = auto_tune, cache_on_gpu, enable_profiling
        for name in self.SETTINGS[:3]:
            check_positive_int(name, getattr(self, name))
        check_flags(**{name: getattr(self, name) for name in self.SETTINGS[3:]})
        super().__init__()

    def _start_clean(self) -> None:
        self._cache: OrderedDict[Hashable, _Entry] = OrderedDict()
        # Keys that are not held: how often they were asked for, `keep_after` if `max_size` evicted them.
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._hits = self._misses = self._evictions = 0
        self._build_seconds = self._saved_seconds = 0.0

    def get_or_build(
        self, key: Hashable, build: Callable[[], _T], device: torch.device | str | None = None
    ) -> _T:
        """The value of a key, built if it is not held, then moved by its `to(device)`, if it has one.

        `build` runs without the lock and without autograd. Threads that build the same key at once get the
        same value, unless `keep_after` keeps none. A copy for a device is made once with `cache_on_gpu`, and
        dropped with its value.
        """
        entry = self._find(key)
        if entry is None:
            start = perf_counter()
            # A value outlives the call: no graph, and no inference tensor, which training would refuse.
            with torch.inference_mode(False), torch.no_grad():
                built = build()
            entry = self._keep(key, _Entry(built, perf_counter() - start))
        value: _T = (
            entry.value if device is None else self._on_device(entry, normal_device(torch.device(device)))
        )
        return value

    def get(self, key: Hashable, default: Any = None) -> Any:
        """The value of a key, or `default`; a hit or a miss either way."""
        entry = self._find(key)
        return default if entry is None else entry.value

    def put(self, key: Hashable, value: Any) -> None:
        """Keeps a value in place of the key's old one, whatever `keep_after` says."""
        entry = _Entry(value)
        with self._lock:
            self._store(key, entry)

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._cache

    def __len__(self) -> int:
        return len(self._cache)

    def clear(self) -> None:
        """Drops all values and copies; the statistics go on."""
        with self._lock:
            self._cache.clear()
            self._seen.clear()

    def resize(self, max_size: int) -> None:
        """Sets `max_size`, and evicts what no longer fits."""
        check_positive_int("max_size", max_size)
        with self._lock:
            self.max_size = max_size
            self._evict()

    def release_idle(self) -> int:
        """Drops the copies on devices; the values stay. Called when memory runs out."""
        with self._lock:
            for entry in self._cache.values():
                entry.copies.clear()
        return 0

    def get_stats(self) -> dict[str, Any]:
        """Counts since the start, and what is held now; with `enable_profiling` also times in seconds.

        `saved_seconds` is the build time of each value times its hits.
        """
        with self._lock:
            stats: dict[str, Any] = {"hits": self._hits, "misses": self._misses}
            stats["hit_rate"] = self._hits / max(1, self._hits + self._misses)
            stats |= {"size": len(self._cache), "max_size": self.max_size, "evictions": self._evictions}
            stats |= {"bytes": self._bytes(), "max_bytes": self.max_bytes}
            stats["device_bytes"] = self._device_bytes()
            if self.enable_profiling:
                stats |= {"build_seconds": self._build_seconds, "saved_seconds": self._saved_seconds}
        return stats

    def synchronize(self, group: torch.distributed.ProcessGroup | None = None, src: int = 0) -> None:
        """Puts the values of global rank `src` into the caches of all ranks of the group.

        A collective: every rank of the group must call it. Keys and values are sent pickled, and unpickling
        can run code, so the ranks must trust each other.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("synchronize needs an initialised torch.distributed, got none")
        with self._lock:
            message = [[(key, entry.value) for key, entry in self._cache.items()]]
        dist.broadcast_object_list(message, src=src, group=group)
        for key, value in message[0] if dist.get_rank() != src else ():
            self.put(key, value)

    def _find(self, key: Hashable) -> _Entry | None:
        """The entry of a key, counted as a hit or a miss."""
        with self._lock:
            entry = self._cache.get(key)
            if entry is not None:
                self._cache.move_to_end(key)
                self._hits += 1
                self._saved_seconds += entry.seconds
                return entry
            self._misses += 1
            if self.auto_tune and self._seen.get(key, 0) >= self.keep_after:
                self.max_size *= 2
                self._seen.clear()  # the other keys may fit now, and each would double the size again
        return None

    def _keep(self, key: Hashable, entry: _Entry) -> _Entry:
        """The entry that another thread may have kept first, or this one, kept from `keep_after` on."""
        with self._lock:
            self._build_seconds += entry.seconds
            if first := self._cache.get(key):
                return first
            requests = self._seen.pop(key, 0) + 1
            if requests >= self.keep_after:
                self._store(key, entry)
            else:
                self._seen[key] = requests
                self._evict()
        return entry

    def _on_device(self, entry: _Entry, device: torch.device) -> Any:
        value = entry.value
        if not hasattr(value, "to") or getattr(value, "device", None) == device:
            return value
        copy = entry.copies.get(device)
        if copy is None:
            with torch.inference_mode(False), torch.no_grad():
                copy = value.to(device)
            if self.cache_on_gpu and _nbytes(copy) <= self.max_bytes:
                with self._lock:
                    copy = entry.copies.setdefault(device, copy)
                    for oldest in self._cache.values():  # in order of use
                        while oldest.copies and self._device_bytes() > self.max_bytes:
                            del oldest.copies[next(iter(oldest.copies))]
        return copy

    def _bytes(self) -> int:
        return sum(entry.bytes for entry in self._cache.values())

    def _device_bytes(self) -> int:
        return sum(_nbytes(copy) for entry in self._cache.values() for copy in entry.copies.values())

    def _store(self, key: Hashable, entry: _Entry) -> None:
        self._cache.pop(key, None)
        if entry.bytes <= self.max_bytes:
            self._cache[key] = entry
            self._seen.pop(key, None)
            self._evict()

    def _evict(self) -> None:
        nbytes = self._bytes()
        while (crowded := len(self._cache) > self.max_size) or nbytes > self.max_bytes:
            key, entry = self._cache.popitem(last=False)
            nbytes -= entry.bytes
            self._evictions += 1
            if crowded:  # against max_bytes, a larger max_size would not help
                self._seen[key] = self.keep_after
            LOGGER.debug("pattern cache evicts %.80r", key)
        while len(self._seen) > 8 * self.max_size:  # so that larger working sets are recognised, too
            self._seen.popitem(last=False)


class PersistentPatternCache(PatternCache):
    """A `PatternCache` for block patterns, 100 by default, in memory; other options as there."""

    def __init__(self, max_size: int = 100, **options: Any) -> None:
        super().__init__(max_size, **options)


@once
def get_block_pattern_cache() -> PersistentPatternCache:
    """The cache of block patterns and their schedules that all modules share, made at first use."""
    return PersistentPatternCache()


@once
def get_global_pattern_cache() -> PatternCache:
    """The cache that modules share, made at first use.

    The environment sets it up: PATTERN_CACHE_MAX_SIZE (1000) and PATTERN_CACHE_ENABLE_PROFILING (0).
    """
    return PatternCache(**_environment())


def reset_global_pattern_cache() -> None:
    """Empties the shared cache, zeroes its statistics and reads the environment again.

    The cache stays the same object, because modules hold it.
    """
    settings, cache = _environment(), get_global_pattern_cache()
    with cache._lock:
        cache._start_clean()
        vars(cache).update(settings)


def _environment() -> dict[str, Any]:
    size = os.environ.get("PATTERN_CACHE_MAX_SIZE", "1000")
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"PATTERN_CACHE_MAX_SIZE must be a positive integer, got {size!r}")
    profiling = os.environ.get("PATTERN_CACHE_ENABLE_PROFILING", "")
    on, off = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
    if profiling.lower() not in on + off:
        raise ValueError(f"PATTERN_CACHE_ENABLE_PROFILING must be one of {on + off}, got {profiling!r}")
    return {"max_size": int(size), "enable_profiling": profiling.lower() in on}


def _nbytes(value: Any) -> int:
    """Bytes of a value and of what it holds."""
    if isinstance(nbytes := getattr(value, "nbytes", None), int):
        return nbytes
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, each.name) for each in fields(value)]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return sys.getsizeof(value) + sum(map(_nbytes, parts))
