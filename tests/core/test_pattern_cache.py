"""The pattern cache: its bounds against a model, its statistics, devices, threads and ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dilated_attention_pytorch.core import (
    PatternCache,
    get_global_pattern_cache,
    process,
    reset_global_pattern_cache,
)
from support.threads import in_threads


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
    """A value like a plan: its bytes, and copies on devices of the same bytes."""

    nbytes: int
    device: torch.device | None = None

    def to(self, device: torch.device) -> Sized:
        return Sized(self.nbytes, device)


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
        self.seen: list[tuple[int, int]] = []  # keys and requests, those evicted by max_size as if kept
        self.hits = self.misses = self.evictions = 0

    def find(self, key: int) -> Sized | None:
        for item in self.held:
            if item[0] == key:
                self.held.remove(item)
                self.held.append(item)
                self.hits += 1
                return item[1]
        self.misses += 1
        if self.tune and dict(self.seen).get(key, 0) >= self.keep_after:
            self.max_size *= 2
            self.seen = []
        return None

    def store(self, key: int, value: Sized) -> None:
        self.held = [item for item in self.held if item[0] != key]
        if value.nbytes <= self.max_bytes:
            self.held.append((key, value))
            self.see(key, 0)
        self.shrink()

    def see(self, key: int, count: int) -> None:
        self.seen = [item for item in self.seen if item[0] != key] + [(key, count)] * (count > 0)

    def shrink(self) -> None:
        while len(self.held) > self.max_size or sum(v.nbytes for _, v in self.held) > self.max_bytes:
            crowded = len(self.held) > self.max_size
            key, _ = self.held.pop(0)
            self.evictions += 1
            if crowded:
                self.see(key, self.keep_after)
        self.seen = self.seen[-8 * self.max_size :]

    @rule(key=keys, size=sizes)
    def get_or_build(self, key: int, size: int) -> None:
        built = Sized(size)
        expected = self.find(key)
        if expected is None:
            expected = built
            count = dict(self.seen).get(key, 0) + 1
            self.see(key, count if count < self.keep_after else 0)
            if count >= self.keep_after:
                self.store(key, built)
            self.shrink()
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
        self.held, self.seen = [], []
        self.cache.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert [(key, entry.value) for key, entry in self.cache._cache.items()] == self.held
        expected: dict[str, float] = {"hits": self.hits, "misses": self.misses, "evictions": self.evictions}
        expected["hit_rate"] = self.hits / max(1, self.hits + self.misses)
        expected |= {"size": len(self.held), "max_size": self.max_size, "max_bytes": self.max_bytes}
        expected |= {"bytes": sum(value.nbytes for _, value in self.held), "device_bytes": 0}
        assert self.cache.get_stats() == expected
        assert len(self.cache) == len(self.held)
        assert all((key in self.cache) == (key in dict(self.held)) for key in range(7))
        assert list(self.cache._seen.items()) == self.seen


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=150, stateful_step_count=40)


def test_none_is_a_value_and_builds_may_nest_or_fail() -> None:
    cache = PatternCache()
    assert cache.get_or_build("a", lambda: None) is cache.get_or_build("a", never) is None
    assert (cache.get("a", "default"), cache.get("b", "default")) == (None, "default")
    assert cache.get_or_build("c", lambda: cache.get_or_build("d", lambda: 1) + 1) == 2
    with pytest.raises(ZeroDivisionError):
        cache.get_or_build("e", lambda: 1 // 0)
    assert "e" not in cache
    assert cache.get_or_build("e", lambda: 1) == 1
    with pytest.raises(TypeError, match="unhashable"):
        cache.get_or_build([], never)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Holder:
    parts: tuple[torch.Tensor, ...]


def test_bytes_count_what_a_value_holds() -> None:
    cache, parts = PatternCache(), (ones(600), ones(400))
    for value in (ones(1000), parts, [parts[0], {"x": parts[1]}], Holder(parts), b"x" * 1000):
        cache.put("a", value)
        assert 1000 <= cache.get_stats()["bytes"] < 1600
    cache.put("a", ones(7))
    assert cache.get_stats()["bytes"] == 7
    cache.clear()
    assert cache.get_stats()["bytes"] == 0


def test_auto_tune_grows_to_the_working_set_and_no_further() -> None:
    cache = PatternCache(4, auto_tune=True)
    for _ in range(5):
        for key in range(13):
            cache.get_or_build(key, lambda: 1)
    assert (cache.get_stats()["max_size"], cache.get_stats()["size"]) == (16, 13)
    once = PatternCache(4, auto_tune=True)
    for key in range(100):
        once.get_or_build(key, lambda: 1)
    assert once.get_stats()["max_size"] == 4
    bounded = PatternCache(8, max_bytes=40, auto_tune=True)  # a larger max_size would not help
    for key in [*range(8)] * 5:
        bounded.get_or_build(key, lambda: Sized(10))
    assert (bounded.get_stats()["max_size"], bounded.get_stats()["size"]) == (8, 4)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("value", [ones(8), Sized(8)], ids=["tensor", "plan"])
def test_device_copies_are_made_once(keeps: bool, value: Any) -> None:
    cache = PatternCache(cache_on_gpu=keeps)
    first = cache.get_or_build("a", lambda: value, device="meta")
    second = cache.get_or_build("a", never, device=torch.device("meta"))
    assert first.device == second.device == torch.device("meta")
    assert (first is second) == keeps
    assert cache.get_or_build("a", never) is cache.get("a") is value
    assert cache.get_stats()["device_bytes"] == 8 * keeps
    process.release_idle_memory()  # when memory runs out, copies go and values stay
    assert cache.get_stats()["device_bytes"] == 0
    assert cache.get_or_build("a", never) is value
    ranges, host = (range(4), range(0, 8, 2)), ones(8)
    assert cache.get_or_build("ranges", lambda: ranges, device="meta") is ranges  # which have no `to`
    assert cache.get_or_build("host", lambda: host, device="cpu") is host
    assert cache.get_stats()["device_bytes"] == 0
    with pytest.raises(RuntimeError, match="nowhere"):
        cache.get_or_build("host", never, device="nowhere")


class Growing(Sized):
    """A value whose copies are larger than itself, so that they alone meet the bound."""

    def to(self, device: torch.device) -> Sized:
        return Sized(40, device)


def test_device_copies_have_a_bound_and_go_with_their_values() -> None:
    cache = PatternCache(max_bytes=100, cache_on_gpu=True)
    copies = {key: cache.get_or_build(key, lambda: Growing(1), device="meta") for key in "ab"}
    assert cache.get_or_build("a", never, device="meta") is copies["a"]
    cache.get_or_build("c", lambda: Growing(1), device="meta")
    stats = cache.get_stats()  # the oldest copy is gone, all host values are kept
    assert (stats["size"], stats["evictions"], stats["bytes"], stats["device_bytes"]) == (3, 0, 3, 80)
    assert cache.get_or_build("a", never, device="meta") is copies["a"]
    assert cache.get_or_build("b", never, device="meta") is not copies["b"]
    cache.put("b", Sized(40))  # a new value, without copies
    assert cache.get_stats()["device_bytes"] == 40
    cache.resize(1)
    assert cache.get_stats()["device_bytes"] == 0
    cache.get_or_build("large", lambda: Sized(101), device="meta")  # not kept
    assert cache.get_stats()["device_bytes"] == 0


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_values_of_inference_serve_training(device: str | None) -> None:
    cache, weight = PatternCache(cache_on_gpu=True), torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        index = cache.get_or_build("a", lambda: torch.tensor([2, 0]), device=device)
        assert torch.is_inference_mode_enabled()
    assert not index.is_inference()
    assert not cache.get_or_build("b", lambda: weight * 2).requires_grad
    if device != "meta":
        weight[index].sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [1, 0, 1]


def test_profiling_tells_build_times_and_what_they_saved(caplog: pytest.LogCaptureFixture) -> None:
    cache = PatternCache(1)
    cache.get_or_build("slow", lambda: time.sleep(0.02))
    for _ in range(3):
        cache.get_or_build("slow", never)
    assert "build_seconds" not in cache.get_stats()
    cache.enable_profiling = True  # also late
    stats = cache.get_stats()
    assert 0.02 <= stats["build_seconds"] < 2
    assert stats["saved_seconds"] == pytest.approx(3 * stats["build_seconds"])
    with caplog.at_level("DEBUG", logger="dilated_attention_pytorch"):
        cache.put("b", 2)
    assert [record.getMessage() for record in caplog.records] == ["pattern cache evicts 'slow'"]
    assert cache.get_stats()["saved_seconds"] == stats["saved_seconds"]


def test_global_cache_stays_through_reset(
    global_cache: PatternCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    global_cache.get_or_build("a", lambda: 1)
    reset_global_pattern_cache()
    assert get_global_pattern_cache() is global_cache
    stats = global_cache.get_stats()
    assert (stats["hits"], stats["misses"], stats["hit_rate"], stats["size"]) == (0, 0, 0.0, 0)
    assert (stats["max_size"], stats["max_bytes"]) == (1000, 64 * 2**20)
    monkeypatch.setenv("PATTERN_CACHE_MAX_SIZE", "2000")
    for text, profiles in {"1": True, "TRUE": True, "yes": True, "on": True, "0": False, "": False}.items():
        monkeypatch.setenv("PATTERN_CACHE_ENABLE_PROFILING", text)
        reset_global_pattern_cache()
        assert global_cache.get_stats()["max_size"] == 2000
        assert ("build_seconds" in global_cache.get_stats()) == profiles


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

    requests, stats = sum(in_threads(work)), cache.get_stats()
    assert stats["hits"] + stats["misses"] == requests
    assert stats["bytes"] == sum(entry.value.nbytes for entry in cache._cache.values()) <= 300
    assert stats["size"] == len(cache._cache) <= 16
    assert min(stats["hits"], stats["evictions"]) > 0


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


def work_of_a_rank(rank: int, address: str) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    cache = PatternCache(3)
    cache.put("both", torch.full((4,), rank))
    cache.put("own", rank)
    if rank == 0:
        cache.put(("plan", 64), (range(3), {"x": torch.arange(5)}))
    cache.synchronize()
    assert (cache.get("both").tolist(), cache.get("own")) == ([0] * 4, 0)
    ranges, tensors = cache.get(("plan", 64))
    assert (ranges, tensors["x"].tolist()) == (range(3), [0, 1, 2, 3, 4])
    if rank == 1:
        cache.put("new", 11)  # evicts the oldest of three
        cache.put("own", 12)
    cache.synchronize(group=dist.new_group([0, 1]), src=1)
    assert (cache.get("new"), cache.get("own"), len(cache)) == (11, 12, 3)
    assert cache.get_stats()["misses"] == 0
    dist.destroy_process_group()


def test_synchronize_gives_the_values_of_one_rank_to_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="needs an initialised torch"):
        PatternCache().synchronize()
    mp.spawn(work_of_a_rank, args=((tmp_path / "ranks").as_uri(),), nprocs=2)
