"""One cache for plans and patterns: bounded, least recently used out first, safe under threads and forks."""

from __future__ import annotations

import heapq
import logging
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch

from ..checks import check_flags, check_positive_int

_T = TypeVar("_T")
_logger = logging.getLogger("dilated_attention_pytorch")


@dataclass(slots=True, eq=False)
class _Entry:
    value: Any
    bytes: int
    seconds: float = 0.0  # spent on building it
    hits: int = 0
    copies: dict[torch.device, tuple[Any, int]] = field(default_factory=dict)  # and their bytes


class PatternCache:
    """A thread-safe cache of any values, kept as they are built, usually on the host; do not change them.

    Args:
        max_size: how many values are kept; `resize` changes it.
        max_bytes: bytes of values kept, and of device copies kept; a larger value is returned but not kept.
            The size of a value is its `nbytes`, or that of what tuples, lists, dicts and dataclasses hold.
        keep_after: the `get_or_build` call from which on a key's value is kept. 1 keeps it at once; 2 spares
            the cache what is asked for only once.
        auto_tune: doubles `max_size` on a miss of a key that `max_size` evicted not long ago.
        cache_on_gpu: keeps the copies that `get_or_build` makes for a device; otherwise each call copies.
        enable_profiling: adds build times and the most used values to `get_stats`; may be set at any time.
    """

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
        check_positive_int("max_size", max_size)
        check_positive_int("max_bytes", max_bytes)
        check_positive_int("keep_after", keep_after)
        self.max_size, self.max_bytes, self.keep_after = max_size, max_bytes, keep_after
        check_flags(auto_tune=auto_tune, cache_on_gpu=cache_on_gpu, enable_profiling=enable_profiling)
        self.auto_tune, self.cache_on_gpu, self.enable_profiling = auto_tune, cache_on_gpu, enable_profiling
        self._lock = threading.RLock()  # reentrant, because keys and values may run code of theirs under it
        self._forget()
        _caches.add(self)

    def _forget(self) -> None:
        self._cache: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._requests: OrderedDict[Hashable, int] = OrderedDict()  # of keys that are not kept yet
        self._evicted: OrderedDict[Hashable, None] = OrderedDict()  # not long ago, because of max_size
        self._hits = self._misses = self._evictions = self._bytes = 0
        self._build_seconds = self._saved_seconds = 0.0  # saved by values that are no longer held

    def get_or_build(
        self, key: Hashable, build: Callable[[], _T], device: torch.device | str | None = None
    ) -> _T:
        """The value of a key, built if it is not held, then moved by its `to(device)`, if it has one.

        `build` runs without the lock and without autograd. Threads that build the same key at once get the
        same value, unless `keep_after` keeps none. A value without `to`, such as a plan, fits every device.
        """
        with self._lock:
            entry = self._find(key)
            keep = entry is None and self._keeps(key)
        if entry is None:
            entry = self._build(key, build, keep)
        value: _T = entry.value if device is None else self._on_device(entry, device)
        return value

    def get(self, key: Hashable, default: Any = None) -> Any:
        """The value of a key, or `default`; a hit or a miss either way."""
        with self._lock:
            entry = self._find(key)
        return default if entry is None else entry.value

    def put(self, key: Hashable, value: Any) -> None:
        """Keeps a value in place of the key's old one, whatever `keep_after` says."""
        entry = _Entry(value, _nbytes(value))
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
            for key in list(self._cache):
                self._drop(key)
            self._requests.clear()
            self._evicted.clear()

    def resize(self, max_size: int) -> None:
        """Sets `max_size`, and evicts what no longer fits."""
        with self._lock:
            check_positive_int("max_size", max_size)
            self.max_size = max_size
            self._evict()

    def release_device_copies(self) -> None:
        """Drops the copies that `cache_on_gpu` keeps; the values stay."""
        with self._lock:
            for entry in self._cache.values():
                entry.copies.clear()

    def get_stats(self) -> dict[str, Any]:
        """Counts since the start, and what is held now; with `enable_profiling` also times in seconds.

        `saved_seconds` is the build time of each value times its hits; `patterns` lists the most used values.
        """
        with self._lock:
            stats: dict[str, Any] = {
                "hits": self._hits,
                "misses": self._misses,
                "hit_rate": self._hits / max(1, self._hits + self._misses),
                "size": len(self._cache),
                "max_size": self.max_size,
                "evictions": self._evictions,
                "bytes": self._bytes,
                "max_bytes": self.max_bytes,
                "device_bytes": self._device_bytes(),
            }
            if self.enable_profiling:
                saved = sum(entry.hits * entry.seconds for entry in self._cache.values())
                top = heapq.nlargest(10, self._cache.items(), key=lambda item: item[1].hits)
                stats["build_seconds"] = self._build_seconds
                stats["saved_seconds"] = self._saved_seconds + saved
                stats["patterns"] = [
                    {"key": f"{key!r:.80}", "hits": e.hits, "bytes": e.bytes, "build_seconds": e.seconds}
                    for key, e in top
                ]
        return stats

    def synchronize(self, group: torch.distributed.ProcessGroup | None = None, src: int = 0) -> None:
        """Puts the values of global rank `src` into the caches of all ranks of the group.

        A collective: every rank of the group must call it. Keys and values travel pickled, and unpickling can
        run code, so the ranks must trust each other.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "synchronize needs an initialised torch.distributed, and it is not initialised"
            )
        with self._lock:
            entries = [(key, entry.value) for key, entry in self._cache.items()]
        message = [entries if dist.get_rank() == src else []]
        dist.broadcast_object_list(message, src=src, group=group)
        for key, value in message[0] if dist.get_rank() != src else ():
            self.put(key, value)

    def __repr__(self) -> str:
        # Without the lock: its owner may log, and wait for a handler that is formatting this very cache.
        return (
            f"{type(self).__name__}({len(self)} of {self.max_size} values, {self._bytes} of {self.max_bytes} "
            f"bytes, {self._hits} hits, {self._misses} misses)"
        )

    def __copy__(self) -> PatternCache:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PatternCache:
        return self  # a module and its copies share the cache

    def __reduce__(self) -> tuple[Callable[[], PatternCache], tuple[()]]:
        if self is _global_cache:
            return get_global_pattern_cache, ()
        names = ("max_size", "max_bytes", "keep_after", "auto_tune", "cache_on_gpu", "enable_profiling")
        return partial(type(self), **{name: getattr(self, name) for name in names}), ()

    # The methods below, but for _build and _on_device, are called with the lock held.

    def _find(self, key: Hashable) -> _Entry | None:
        entry = self._cache.get(key)
        if entry is not None:
            self._cache.move_to_end(key)
            self._hits += 1
            entry.hits += 1
            return entry
        self._misses += 1
        if self.auto_tune and key in self._evicted:
            self.max_size *= 2
            self._evicted.clear()  # the other keys may fit now, and each would double the size again
            _logger.debug("pattern cache grows to %d values", self.max_size)
        return None

    def _keeps(self, key: Hashable) -> bool:
        """Counts a request of a key that is not held."""
        if self.keep_after == 1:
            return True
        self._requests[key] = count = self._requests.pop(key, 0) + 1
        _trim(self._requests, self.max_size)
        return count >= self.keep_after

    def _build(self, key: Hashable, build: Callable[[], Any], keep: bool) -> _Entry:
        start = perf_counter()
        # A value outlives the call: it must hold no graph, nor be an inference tensor that training refuses.
        with torch.inference_mode(False), torch.no_grad():
            value = build()
        seconds = perf_counter() - start
        entry = _Entry(value, _nbytes(value) if keep else 0, seconds)
        with self._lock:
            self._build_seconds += seconds
            if first := self._cache.get(key):
                return first
            if keep:
                self._store(key, entry)
        return entry

    def _on_device(self, entry: _Entry, device: torch.device | str) -> Any:
        value, target = entry.value, torch.device(device)
        if not hasattr(value, "to"):
            return value
        if target.index is None and target.type not in ("cpu", "meta"):
            target = torch.empty(0, device=target).device  # "cuda" is the current GPU, which may change
        if getattr(value, "device", None) == target:
            return value
        with self._lock:
            if target in entry.copies:
                return entry.copies[target][0]
        with torch.inference_mode(False), torch.no_grad():
            copy = value.to(target)
        size = _nbytes(copy)
        with self._lock:
            if self.cache_on_gpu and size <= self.max_bytes:
                copy, _ = entry.copies.setdefault(target, (copy, size))
                excess = self._device_bytes() - self.max_bytes
                for oldest in self._cache.values():  # in order of use
                    while excess > 0 and oldest.copies:
                        excess -= oldest.copies.pop(next(iter(oldest.copies)))[1]
        return copy

    def _device_bytes(self) -> int:
        return sum(size for entry in self._cache.values() for _, size in entry.copies.values())

    def _store(self, key: Hashable, entry: _Entry) -> None:
        self._drop(key)
        if entry.bytes <= self.max_bytes:
            self._cache[key] = entry
            self._bytes += entry.bytes
            self._requests.pop(key, None)
            self._evict()

    def _drop(self, key: Hashable) -> None:
        if entry := self._cache.pop(key, None):
            self._bytes -= entry.bytes
            self._saved_seconds += entry.hits * entry.seconds

    def _evict(self) -> None:
        while (crowded := len(self._cache) > self.max_size) or self._bytes > self.max_bytes:
            key = next(iter(self._cache))
            self._drop(key)
            self._evictions += 1
            if self.auto_tune and crowded:  # against max_bytes, a larger max_size would not help
                self._evicted[key] = None
            _logger.debug("pattern cache evicts %.80r", key)
        _trim(self._evicted, 8 * self.max_size)  # so that larger working sets are recognised, too
        _trim(self._requests, self.max_size)


_caches: weakref.WeakSet[PatternCache] = weakref.WeakSet()
_global_cache: PatternCache | None = None
_global_lock = threading.Lock()


def get_global_pattern_cache() -> PatternCache:
    """The cache that modules share, made at first use.

    The environment sets it up: PATTERN_CACHE_MAX_SIZE (1000) and PATTERN_CACHE_ENABLE_PROFILING (0).
    """
    global _global_cache
    with _global_lock:
        if _global_cache is None:
            max_size, enable_profiling = _environment()
            _global_cache = PatternCache(max_size, enable_profiling=enable_profiling)
        return _global_cache


def reset_global_pattern_cache() -> None:
    """Empties the shared cache, zeroes its statistics and reads the environment again.

    The cache stays the same object, because modules hold it.
    """
    max_size, enable_profiling = _environment()
    cache = get_global_pattern_cache()
    with cache._lock:
        cache._forget()
        cache.max_size, cache.enable_profiling = max_size, enable_profiling


def _start_child_clean() -> None:
    """Empties all caches in a forked process; new locks, as nobody there could release the held ones."""
    global _global_lock
    _global_lock = threading.Lock()
    for cache in list(_caches):
        cache._lock = threading.RLock()
        cache._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_child_clean)


def _environment() -> tuple[int, bool]:
    size = os.environ.get("PATTERN_CACHE_MAX_SIZE", "1000")
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"PATTERN_CACHE_MAX_SIZE must be a positive integer, got {size!r}")
    profiling = os.environ.get("PATTERN_CACHE_ENABLE_PROFILING", "")
    on, off = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
    if profiling.lower() not in on + off:
        raise ValueError(f"PATTERN_CACHE_ENABLE_PROFILING must be one of {on + off}, got {profiling!r}")
    return int(size), profiling.lower() in on


def _trim(recent: OrderedDict[Hashable, Any], size: int) -> None:
    while len(recent) > size:
        recent.popitem(last=False)


def _nbytes(value: Any) -> int:
    """Bytes of a value and of what it holds, shared parts once."""
    total, seen, parts = 0, set[int](), [value]
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(nbytes := getattr(part, "nbytes", None), int):
            total += nbytes
            continue
        total += sys.getsizeof(part)
        if isinstance(part, (tuple, list)):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
        elif not isinstance(part, type):
            parts += [getattr(part, name, None) for name in getattr(part, "__dataclass_fields__", ())]
    return total
