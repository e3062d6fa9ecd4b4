"""Caches, pools and managers in copies, pickles, forked and spawned processes."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.core import (
    AttentionBufferManager,
    BufferConfig,
    BufferType,
    MemoryPool,
    PatternCache,
    PersistentPatternCache,
    get_block_pattern_cache,
    get_global_memory_pool,
    get_global_pattern_cache,
    process,
)
from dilated_attention_pytorch.core.attention_buffer_manager import (
    Settings,
    find_buffer_manager,
    shared_buffer_manager,
)
from support.threads import in_threads, locked_elsewhere

SHARED: list[Callable[[], Any]] = [
    get_global_pattern_cache,
    get_block_pattern_cache,
    get_global_memory_pool,
    lambda: shared_buffer_manager(Settings(lightweight=True)),
]
POOL_SETTINGS = {"max_bytes": 2**20, "pool_size": 7, "enable_profiling": True}
CACHE_SETTINGS = {"max_size": 3, "max_bytes": 50, "keep_after": 2, "auto_tune": True, "cache_on_gpu": True}


@pytest.mark.parametrize("find", SHARED)
def test_what_modules_share_is_one(find: Callable[[], Any]) -> None:
    one, *others = in_threads(lambda _: find())
    assert all(other is one for other in others)
    assert pickle.loads(pickle.dumps(one)) is one
    assert copy.copy(one) is copy.deepcopy([one])[0] is one


def test_threads_make_it_once() -> None:
    made: list[MemoryPool] = []

    @process.once
    def find() -> MemoryPool:
        time.sleep(0.01)
        made.append(MemoryPool())
        return made[-1]

    assert {id(each) for each in in_threads(lambda _: find())} == {id(made[0])}
    assert len(made) == 1


@pytest.mark.parametrize(
    ("cls", "settings"),
    [(PatternCache, CACHE_SETTINGS), (PersistentPatternCache, CACHE_SETTINGS), (MemoryPool, POOL_SETTINGS)],
)
def test_pickles_carry_the_settings_alone(cls: Any, settings: dict[str, Any]) -> None:
    own = cls(**settings)
    start = own.get_stats()
    kept = own.allocate((64,)) if cls is MemoryPool else own.put("a", 1)
    assert own.get_stats() != start
    assert copy.copy(own) is copy.deepcopy([own])[0] is own
    other = pickle.loads(pickle.dumps(own))
    assert type(other) is cls
    assert other is not own
    assert {name: getattr(other, name) for name in settings} == settings
    assert other.get_stats() == start
    del kept


def test_pickled_managers() -> None:
    config, pool = BufferConfig(3.0, "low", "forward"), MemoryPool(2**20)
    manager = AttentionBufferManager(
        {BufferType.KEY: config}, enable_preallocation=True, retries=False, pool=pool
    )
    manager.allocate("query", (4,))
    one, two = pickle.loads(pickle.dumps((manager, AttentionBufferManager(pool=pool))))
    assert (one.configs, one.settings) == (manager.configs, manager.settings)
    assert one.name != manager.name
    assert one.pool is two.pool is not pool
    assert one.pool.max_bytes == 2**20
    assert one.get_stats()["allocations"] == 0
    pooled = AttentionBufferManager(pool=get_global_memory_pool())
    assert pickle.loads(pickle.dumps(pooled)).pool is get_global_memory_pool()


def test_nothing_lives_longer_than_its_users() -> None:
    manager = AttentionBufferManager()
    manager.allocate("query", (64,))
    (block,) = manager.pool._blocks.values()
    name, gone = manager.name, [weakref.ref(each) for each in (manager, manager.pool, block.storage)]
    assert find_buffer_manager(name) is manager
    settings = Settings(lightweight=True, enable_profiling=True)
    shared = shared_buffer_manager(settings)
    assert shared is shared_buffer_manager(settings)
    assert shared is not shared_buffer_manager(Settings(enable_profiling=True))
    gone.append(weakref.ref(shared))
    del manager, block, shared
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    assert find_buffer_manager(name) is None


def use_all(cache: PatternCache, pool: MemoryPool, manager: AttentionBufferManager) -> None:
    """Starts with everything empty, and finds it usable."""
    assert len(cache) == cache.get_stats()["misses"] == 0
    assert cache.get_or_build("a", lambda: 2) == 2
    for each in (AttentionBufferManager(pool=pool), manager):
        stats = each.pool.get_stats()
        assert stats["total_allocated"] == stats["allocation_count"] == stats["peak_allocated"] == 0
        own = each.pool.allocate((64,)).fill_(2)
        with each.workspace(torch.device("cpu")) as workspace:
            workspace.take("slot", (4,), torch.float32, torch.device("cpu"))
        assert own.tolist() == [2] * 64
    assert manager.get_stats()["known_shapes"] == 0
    manager.allocate("query", (4, 4))
    process.release_idle_memory()
    for find in SHARED:
        find()


def filled() -> tuple[PatternCache, MemoryPool, AttentionBufferManager]:
    cache, pool = PatternCache(7), MemoryPool(2**20)
    manager = AttentionBufferManager(enable_preallocation=True)
    cache.put("a", 1)
    cache.get("b")
    pool.allocate((64,))
    manager.allocate("query", (4, 4))
    return cache, pool, manager


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_starts_clean_while_the_locks_are_held() -> None:
    states = cache, pool, manager = filled()
    shared = [find() for find in SHARED]
    kept, before = pool.allocate((64,)).fill_(1), pool.get_stats()

    def child() -> None:
        use_all(*states)
        assert all(find() is each for find, each in zip(SHARED, shared, strict=True))
        assert find_buffer_manager(manager.name) is manager
        assert cache.max_size == 7
        assert kept.tolist() == [1] * 64  # the child's copy of the parent's buffer, not on loan there
        with pytest.raises(ValueError, match="not on loan"):
            pool.deallocate(kept)

    locks = [each._lock for each in (*states, manager.pool, *shared)]
    with manager.workspace(torch.device("cpu")), locked_elsewhere(process.LOCK, *locks):
        forked = multiprocessing.get_context("fork").Process(target=child)
        forked.start()
        forked.join(30)
        code = forked.exitcode
        forked.kill()  # or a child that hangs would keep this process from its end
    assert code == 0
    assert cache.get("a") == 1
    assert pool.get_stats() == before
    pool.deallocate(kept)


def test_a_spawned_child_starts_clean() -> None:
    child = multiprocessing.get_context("spawn").Process(target=use_all, args=filled())
    child.start()
    child.join(120)
    assert child.exitcode == 0
