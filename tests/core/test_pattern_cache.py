"""The pattern cache: its bounds against a model, its statistics, devices, threads and processes."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dilated_attention_pytorch.core import pattern_cache
from dilated_attention_pytorch.core.pattern_cache import (
    PatternCache,
    get_global_pattern_cache,
    reset_global_pattern_cache,
)
from dilated_attention_pytorch.plan import Shape, plan_dilated
from dilated_attention_pytorch.spec import DilatedSpec


def never() -> Any:
    raise AssertionError("built although it should be held")


def ones(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


@pytest.fixture
def global_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[PatternCache]:
    for name in ("PATTERN_CACHE_MAX_SIZE", "PATTERN_CACHE_ENABLE_PROFILING"):
        monkeypatch.delenv(name, raising=False)
    reset_global_pattern_cache()
    yield get_global_pattern_cache()
    monkeypatch.undo()
    reset_global_pattern_cache()


@dataclass
class Sized:
    nbytes: int


class AgainstModel(RuleBasedStateMachine):
    """Held values as a list, oldest first, and plain counters."""

    keys = st.integers(0, 6)
    sizes = st.integers(0, 12)

    @initialize(
        max_size=st.integers(1, 4),
        max_bytes=st.integers(1, 20),
        keep_after=st.integers(1, 3),
        tune=st.booleans(),
    )
    def start(self, max_size: int, max_bytes: int, keep_after: int, tune: bool) -> None:
        self.cache = PatternCache(max_size, max_bytes=max_bytes, keep_after=keep_after, auto_tune=tune)
        self.max_size, self.max_bytes, self.keep_after, self.tune = max_size, max_bytes, keep_after, tune
        self.held: list[tuple[int, Sized]] = []
        self.asked: list[tuple[int, int]] = []
        self.evicted: list[int] = []
        self.hits = self.misses = self.evictions = 0

    def find(self, key: int) -> Sized | None:
        for item in self.held:
            if item[0] == key:
                self.held.remove(item)
                self.held.append(item)
                self.hits += 1
                return item[1]
        self.misses += 1
        if key in self.evicted:
            self.max_size *= 2
            self.evicted = []
        return None

    def store(self, key: int, value: Sized) -> None:
        self.held = [item for item in self.held if item[0] != key]
        if value.nbytes <= self.max_bytes:
            self.held.append((key, value))
            self.asked = [item for item in self.asked if item[0] != key]
        self.shrink()

    def shrink(self) -> None:
        while len(self.held) > self.max_size or sum(v.nbytes for _, v in self.held) > self.max_bytes:
            crowded = len(self.held) > self.max_size
            key, _ = self.held.pop(0)
            self.evictions += 1
            if crowded and self.tune and key not in self.evicted:
                self.evicted.append(key)
        self.evicted = self.evicted[-8 * self.max_size :]
        self.asked = self.asked[-self.max_size :]

    @rule(key=keys, size=sizes)
    def get_or_build(self, key: int, size: int) -> None:
        built = Sized(size)
        expected = self.find(key)
        if expected is None:
            expected = built
            count = dict(self.asked).get(key, 0) + 1
            self.asked = [item for item in self.asked if item[0] != key]
            self.asked = [*self.asked, (key, count)][-self.max_size :]
            if count >= self.keep_after:
                self.store(key, built)
        assert self.cache.get_or_build(key, lambda: built) is expected

    @rule(key=keys)
    def get(self, key: int) -> None:
        assert self.cache.get(key) is self.find(key)

    @rule(key=keys, size=sizes)
    def put(self, key: int, size: int) -> None:
        value = Sized(size)
        self.store(key, value)
        self.cache.put(key, value)

    @rule(max_size=st.integers(1, 6))
    def resize(self, max_size: int) -> None:
        self.max_size = max_size
        self.shrink()
        self.cache.resize(max_size)

    @rule()
    def clear(self) -> None:
        self.held, self.asked, self.evicted = [], [], []
        self.cache.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert [(key, entry.value) for key, entry in self.cache._cache.items()] == self.held
        stats = self.cache.get_stats()
        assert stats == {
            "hits": self.hits,
            "misses": self.misses,
            "hit_rate": self.hits / max(1, self.hits + self.misses),
            "size": len(self.held),
            "max_size": self.max_size,
            "evictions": self.evictions,
            "bytes": sum(value.nbytes for _, value in self.held),
            "max_bytes": self.max_bytes,
            "device_bytes": 0,
        }
        assert len(self.cache) == len(self.held)
        assert all((key in self.cache) == (key in dict(self.held)) for key in range(7))
        assert len(self.cache._requests) <= self.max_size
        assert len(self.cache._evicted) <= 8 * self.max_size


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=150, stateful_step_count=40)


def test_least_recently_used_goes_first() -> None:
    cache = PatternCache(2)
    cache.get_or_build("a", lambda: 1)
    cache.get_or_build("b", lambda: 2)
    assert cache.get_or_build("a", never) == 1
    cache.get_or_build("c", lambda: 3)
    assert "a" in cache
    assert "b" not in cache
    assert list(cache._cache) == ["a", "c"]


def test_none_is_a_value() -> None:
    cache = PatternCache()
    assert cache.get_or_build("a", lambda: None) is None
    assert cache.get_or_build("a", never) is None
    assert cache.get("a", "default") is None
    assert cache.get("b", "default") == "default"


def test_failing_build_keeps_nothing_and_blocks_nothing() -> None:
    cache = PatternCache()
    with pytest.raises(ZeroDivisionError):
        cache.get_or_build("a", lambda: 1 // 0)
    assert "a" not in cache
    assert cache.get_or_build("a", lambda: 1) == 1


def test_build_may_use_the_cache() -> None:
    cache = PatternCache()
    assert cache.get_or_build("a", lambda: cache.get_or_build("b", lambda: 1) + 1) == 2
    assert len(cache) == 2


@dataclass(frozen=True)
class Holder:
    parts: tuple[torch.Tensor, ...]


@pytest.mark.parametrize(
    ("value", "least"),
    [
        (ones(1000), 1000),
        ((ones(600), ones(400)), 1000),
        ([ones(600), {"x": ones(400)}], 1000),
        (Holder((ones(600), ones(400))), 1000),
        (b"x" * 1000, 1000),
    ],
)
def test_bytes_count_what_a_value_holds(value: Any, least: int) -> None:
    cache = PatternCache()
    cache.put("a", value)
    assert least <= cache.get_stats()["bytes"] < least + 600
    cache.put("a", ones(7))
    assert cache.get_stats()["bytes"] == 7
    cache.clear()
    assert cache.get_stats()["bytes"] == 0


def test_shared_and_circular_parts_count_once() -> None:
    cache, part = PatternCache(), ones(1000)
    ring: list[Any] = [part, part]
    ring.append(ring)
    cache.put("a", ring)
    assert 1000 <= cache.get_stats()["bytes"] < 1200


def test_too_large_is_returned_not_kept() -> None:
    cache = PatternCache(max_bytes=100)
    cache.put("small", ones(90))
    large = ones(101)
    assert cache.get_or_build("large", lambda: large) is large
    assert list(cache._cache) == ["small"]
    cache.put("small", large)  # the old value would be wrong now
    assert not cache._cache
    assert cache.get_stats()["evictions"] == 0


def test_lazy_cache_keeps_from_the_kth_request_on() -> None:
    cache, builds = PatternCache(keep_after=3), []
    for _ in range(5):
        cache.get_or_build("a", lambda: builds.append(1))
    assert len(builds) == 3
    assert (cache.get_stats()["hits"], cache.get_stats()["misses"]) == (2, 3)
    for i in range(5000):
        cache.get_or_build(i, lambda: None)
    assert list(cache._cache) == ["a"]
    assert len(cache._requests) == 1000


def test_auto_tune_grows_to_the_working_set_and_no_further() -> None:
    cache = PatternCache(4, auto_tune=True)
    for _ in range(5):
        for key in range(13):
            cache.get_or_build(key, lambda: 1)
    stats = cache.get_stats()
    assert stats["max_size"] == 16
    assert stats["size"] == 13
    once = PatternCache(4, auto_tune=True)
    for key in range(100):
        once.get_or_build(key, lambda: 1)
    assert once.get_stats()["max_size"] == 4
    assert len(once._evicted) == 32  # a memory that does not grow with the keys


def test_auto_tune_does_not_grow_against_max_bytes() -> None:
    cache = PatternCache(8, max_bytes=40, auto_tune=True)
    for _ in range(5):
        for key in range(8):
            cache.get_or_build(key, lambda: Sized(10))
    assert cache.get_stats()["max_size"] == 8
    assert cache.get_stats()["size"] == 4


def test_device_none_is_as_built_and_plans_fit_every_device() -> None:
    cache, plan = PatternCache(cache_on_gpu=True), (range(4), range(0, 8, 2))
    assert cache.get_or_build("plan", lambda: plan, device="meta") is plan
    value = ones(8)
    assert cache.get_or_build("host", lambda: value) is value
    assert cache.get_or_build("host", never, device="cpu") is value
    assert cache.get_stats()["device_bytes"] == 0
    with pytest.raises(RuntimeError, match="nowhere"):
        cache.get_or_build("plan", never, device="nowhere")


@pytest.mark.parametrize("keeps", [True, False])
def test_device_copies(keeps: bool) -> None:
    cache, value = PatternCache(cache_on_gpu=keeps), ones(8)
    first = cache.get_or_build("a", lambda: value, device="meta")
    second = cache.get_or_build("a", never, device=torch.device("meta"))
    assert first.device == second.device == torch.device("meta")
    assert (first is second) == keeps
    assert cache.get("a") is value
    assert cache.get_stats()["device_bytes"] == 8 * keeps
    cache.release_device_copies()
    assert cache.get_stats()["device_bytes"] == 0
    assert cache.get_or_build("a", never) is value


def test_device_copies_go_with_their_values() -> None:
    cache = PatternCache(max_bytes=100, cache_on_gpu=True)
    for key in "ab":
        cache.get_or_build(key, lambda: ones(40), device="meta")
    assert cache.get_stats()["device_bytes"] == cache.get_stats()["bytes"] == 80
    cache.put("b", ones(40))  # a new value, without copies
    assert cache.get_stats()["device_bytes"] == 40
    cache.resize(1)
    assert cache.get_stats()["device_bytes"] == 0


class Growing:
    """A value whose copies are larger than itself, so that they alone meet the bound."""

    nbytes = 1

    def to(self, device: torch.device) -> torch.Tensor:
        return ones(40).to(device)


def test_tiers_drop_the_oldest_copy_and_keep_host_values() -> None:
    cache = PatternCache(max_bytes=100, cache_on_gpu=True)
    copies = {key: cache.get_or_build(key, lambda: Growing(), device="meta") for key in "ab"}
    assert cache.get_or_build("a", never, device="meta") is copies["a"]
    cache.get_or_build("c", lambda: Growing(), device="meta")
    stats = cache.get_stats()
    assert (stats["size"], stats["evictions"], stats["bytes"], stats["device_bytes"]) == (3, 0, 3, 80)
    assert cache.get_or_build("a", never, device="meta") is copies["a"]
    assert cache.get_or_build("b", never, device="meta") is not copies["b"]


def test_values_that_are_not_kept_leave_no_copies() -> None:
    cache = PatternCache(max_bytes=4, cache_on_gpu=True)
    assert cache.get_or_build("a", lambda: ones(8), device="meta").device.type == "meta"
    assert cache.get_stats()["bytes"] == cache.get_stats()["device_bytes"] == 0


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_values_of_inference_serve_training(device: str | None) -> None:
    cache, weight = PatternCache(cache_on_gpu=True), torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        index = cache.get_or_build("a", lambda: torch.tensor([2, 0]), device=device)
        assert torch.is_inference_mode_enabled()
    assert not index.is_inference()
    doubled = cache.get_or_build("b", lambda: weight * 2)
    assert not doubled.requires_grad
    if device != "meta":
        weight[index].sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [1, 0, 1]


def test_profiling_tells_build_times_and_what_they_saved() -> None:
    cache = PatternCache(2)
    cache.get_or_build("slow", lambda: time.sleep(0.02))
    for _ in range(3):
        cache.get_or_build("slow", never)
    assert "patterns" not in cache.get_stats()
    cache.enable_profiling = True  # also late
    cache.get_or_build("x" * 500, lambda: ones(10))
    stats = cache.get_stats()
    assert 0.02 <= stats["build_seconds"] < 2
    slow, other = stats["patterns"]
    assert slow["key"] == "'slow'"
    assert slow["hits"] == 3
    assert stats["saved_seconds"] == pytest.approx(3 * slow["build_seconds"])
    assert other["bytes"] == 10
    assert len(other["key"]) == 80
    cache.resize(1)
    assert cache.get_stats()["saved_seconds"] == stats["saved_seconds"]
    for key in range(20):
        cache.resize(100)
        cache.put(key, key)
    assert len(cache.get_stats()["patterns"]) == 10


def test_eviction_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    cache = PatternCache(1)
    with caplog.at_level("DEBUG", logger="dilated_attention_pytorch"):
        cache.put("a", 1)
        cache.put("b", 2)
    assert [record.getMessage() for record in caplog.records] == ["pattern cache evicts 'a'"]


def test_repr() -> None:
    cache = PatternCache(5, max_bytes=100)
    cache.get_or_build("a", lambda: ones(8))
    assert repr(cache) == "PatternCache(1 of 5 values, 8 of 100 bytes, 0 hits, 1 misses)"


@pytest.mark.parametrize("name", ["max_size", "max_bytes", "keep_after"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "3", None])
def test_sizes_must_be_positive_integers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got"):
        PatternCache(**{name: value})
    with pytest.raises(ValueError, match="max_size must be a positive integer, got"):
        PatternCache().resize(value)


@pytest.mark.parametrize("name", ["auto_tune", "cache_on_gpu", "enable_profiling"])
def test_flags_must_be_bools(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a bool, got 1"):
        PatternCache(**{name: 1})  # type: ignore[arg-type]


def test_unhashable_key_raises() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        PatternCache().get_or_build([], never)  # type: ignore[arg-type]


def test_global_cache_is_one_and_stays_through_reset(global_cache: PatternCache) -> None:
    assert get_global_pattern_cache() is global_cache
    global_cache.get_or_build("a", lambda: 1)
    reset_global_pattern_cache()
    assert get_global_pattern_cache() is global_cache
    assert not global_cache._cache
    stats = global_cache.get_stats()
    assert (stats["hits"], stats["misses"], stats["hit_rate"]) == (0, 0, 0.0)
    assert (stats["max_size"], stats["max_bytes"]) == (1000, 64 * 2**20)


def test_environment_sets_the_global_cache(
    global_cache: PatternCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATTERN_CACHE_MAX_SIZE", "2000")
    for text, profiles in {"1": True, "TRUE": True, "yes": True, "on": True, "0": False, "": False}.items():
        monkeypatch.setenv("PATTERN_CACHE_ENABLE_PROFILING", text)
        reset_global_pattern_cache()
        assert global_cache.get_stats()["max_size"] == 2000
        assert global_cache.enable_profiling is profiles
        assert ("patterns" in global_cache.get_stats()) == profiles


@pytest.mark.parametrize(
    ("name", "value"),
    [("MAX_SIZE", text) for text in ("0", "-1", "many", "", "1.5")] + [("ENABLE_PROFILING", "maybe")],
)
def test_bad_environment_raises_and_changes_nothing(
    global_cache: PatternCache, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    global_cache.put("a", 1)
    monkeypatch.setenv(f"PATTERN_CACHE_{name}", value)
    with pytest.raises(ValueError, match=f"PATTERN_CACHE_{name} must be .* got '{value}'"):
        reset_global_pattern_cache()
    assert "a" in global_cache


def in_threads(work: Callable[[int], Any], num: int = 8) -> list[Any]:
    """Runs `work(i)` in threads that start together."""
    barrier = threading.Barrier(num)

    def start(i: int) -> Any:
        barrier.wait(30)
        return work(i)

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(start, range(num)))


def test_threads_leave_consistent_statistics() -> None:
    cache = PatternCache(16, max_bytes=300, cache_on_gpu=True)

    def work(seed: int) -> int:
        requests = 0
        for i in range(20_000):
            key = (i // 10 + i % 3 + seed) % 24
            if i % 500 == 0:
                cache.put(key, ones(key))
            elif i % 500 == 1:
                stats = cache.get_stats()
                assert stats["size"] <= 16
                assert max(stats["bytes"], stats["device_bytes"]) <= 300
            elif i % 5000 == 2:
                cache.clear()
            else:
                device = "meta" if i % 20 == 0 else None
                assert cache.get_or_build(key, lambda key=key: ones(key), device=device).nbytes == key
                requests += 1
        return requests

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # more switches, so that a race would show
    try:
        requests = sum(in_threads(work))
    finally:
        sys.setswitchinterval(interval)
    stats = cache.get_stats()
    assert stats["hits"] + stats["misses"] == requests
    assert stats["bytes"] == sum(entry.value.nbytes for entry in cache._cache.values()) <= 300
    assert stats["size"] == len(cache._cache) <= 16
    assert stats["hits"] > 0
    assert stats["evictions"] > 0


class Meeting:
    """A value whose making and copying wait for all threads, which shows that none holds the lock."""

    nbytes = 4

    def __init__(self, threads: threading.Barrier) -> None:
        self.threads = threads
        threads.wait(30)

    def to(self, device: torch.device) -> torch.Tensor:
        self.threads.wait(30)
        return ones(4).to(device)


def test_racing_builds_and_copies_return_one_object() -> None:
    cache, threads = PatternCache(cache_on_gpu=True), threading.Barrier(8)
    for device in (None, "meta"):
        values = in_threads(lambda _, d=device: cache.get_or_build("a", lambda: Meeting(threads), device=d))
        assert len({id(value) for value in values}) == 1
    stats = cache.get_stats()
    assert (stats["hits"], stats["misses"], stats["bytes"], stats["device_bytes"]) == (8, 8, 4, 4)


def test_global_cache_is_made_once_under_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_environment() -> tuple[int, bool]:
        time.sleep(0.02)
        return 5, False

    monkeypatch.setattr(pattern_cache, "_global_cache", None)
    monkeypatch.setattr(pattern_cache, "_environment", slow_environment)
    assert len({id(cache) for cache in in_threads(lambda _: get_global_pattern_cache())}) == 1


def test_copies_of_a_module_share_the_cache(global_cache: PatternCache) -> None:
    other = PatternCache()
    other.put("a", 1)
    for cache in (global_cache, other):
        assert copy.copy(cache) is cache
        assert copy.deepcopy({"cache": cache})["cache"] is cache


def test_pickles_as_the_global_cache_or_as_settings(global_cache: PatternCache) -> None:
    global_cache.put("a", 1)
    assert pickle.loads(pickle.dumps(global_cache)) is global_cache
    wanted = {"max_size": 3, "max_bytes": 50, "keep_after": 2, "auto_tune": True, "cache_on_gpu": True}
    other = PatternCache(**wanted, enable_profiling=True)  # type: ignore[arg-type]
    other.put("a", 1)
    loaded = pickle.loads(pickle.dumps(other))
    assert type(loaded) is PatternCache
    assert {name: getattr(loaded, name) for name in wanted} == wanted
    assert loaded.enable_profiling
    assert not loaded._cache


def test_plans_are_their_own_compression() -> None:
    n, h = 2**20, 8
    spec = DilatedSpec((2048, 4096, 8192), (1, 2, 4))
    plan = plan_dilated(spec, Shape(1, n, h, h, 64), itemsize=4)
    index_bytes = sum(h * n // rate * 4 for rate in spec.dilation_rates)
    assert len(pickle.dumps(plan)) < index_bytes / 40
    cache = PatternCache()
    cache.put("plan", plan)
    assert plan.nbytes <= cache.get_stats()["bytes"] < index_bytes / 40


def run_script(path: Path, text: str) -> None:
    """Runs a script of its own: worker processes can import it, and a deadlock ends with it."""
    script = path / "script.py"
    names = "PatternCache, get_global_pattern_cache"
    script.write_text(f"from dilated_attention_pytorch.core.pattern_cache import {names}\n{text}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PATTERN_CACHE_")}
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["done"], result.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_forked_child_starts_clean_while_the_locks_are_held(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        """
import os, signal, threading
from dilated_attention_pytorch.core import pattern_cache

caches = [get_global_pattern_cache(), PatternCache(7)]
for cache in caches:
    cache.get_or_build("a", lambda: 1)
    cache.get_or_build("a", lambda: 1)

held, finish = threading.Event(), threading.Event()

def hold():
    with pattern_cache._global_lock, caches[0]._lock, caches[1]._lock:
        held.set()
        finish.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)  # ends a child that waits for a lock
    code = 1
    try:
        assert get_global_pattern_cache() is caches[0]
        for cache in caches:
            assert not cache._cache and not cache.get_stats()["hits"] + cache.get_stats()["misses"]
            assert cache.get_or_build("a", lambda: 2) == 2
        assert caches[1].max_size == 7
        code = 0
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
finish.set()
holder.join()
assert status == 0, status
assert all(cache.get("a") == 1 for cache in caches)
print("done")
""",
    )


def test_spawned_child_starts_clean(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        """
import multiprocessing

def work(shared, own):
    assert shared is get_global_pattern_cache()
    assert own.max_size == 7
    for cache in (shared, own):
        assert not cache._cache
        assert cache.get_or_build("a", lambda: 2) == 2

if __name__ == "__main__":
    caches = get_global_pattern_cache(), PatternCache(7)
    for cache in caches:
        cache.put("a", 1)
    child = multiprocessing.get_context("spawn").Process(target=work, args=caches)
    child.start()
    child.join()
    assert child.exitcode == 0
    print("done")
""",
    )


def test_synchronize_needs_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="needs an initialised torch"):
        PatternCache().synchronize()


def test_synchronize_gives_the_values_of_one_rank_to_all(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        f"""
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank):
    dist.init_process_group("gloo", init_method={(tmp_path / "ranks").as_uri()!r}, rank=rank, world_size=2)
    cache = PatternCache(3)
    cache.put("both", torch.full((4,), rank))
    cache.put("own", rank)
    if rank == 0:
        cache.put(("plan", 64), (range(3), {{"x": torch.arange(5)}}))
    cache.synchronize()
    assert cache.get("both").tolist() == [0] * 4
    assert cache.get("own") == 0
    ranges, tensors = cache.get(("plan", 64))
    assert ranges == range(3) and tensors["x"].tolist() == list(range(5))
    if rank == 1:
        cache.put("new", 11)  # evicts the oldest of three
        cache.put("own", 12)
    cache.synchronize(group=dist.new_group([0, 1]), src=1)
    assert cache.get("new") == 11 and cache.get("own") == 12
    assert len(cache) == 3 and cache.get_stats()["misses"] == 0
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
    print("done")
""",
    )
