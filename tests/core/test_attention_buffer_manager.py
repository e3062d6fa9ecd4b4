"""The attention buffer manager to the letter: types, strategies, reuse without aliases, threads, forks."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.core import (
    buffer_config,
    get_global_memory_pool,
    memory_pool,
    reset_global_memory_pool,
)
from dilated_attention_pytorch.core.attention_buffer_manager import (
    DEFAULT_CONFIGS,
    AttentionBufferManager,
    BufferConfig,
    BufferType,
    Settings,
    create_attention_buffer_manager,
    find_buffer_manager,
    normal_device,
    shared_buffer_manager,
)
from dilated_attention_pytorch.core.host_memory import Memory
from dilated_attention_pytorch.core.memory_pool import MemoryPool
from dilated_attention_pytorch.core.workspace import Workspace
from dilated_attention_pytorch.modules import ImprovedDilatedAttentionV2

MIB, GIB = 2**20, 2**30
EACH_TYPE = pytest.mark.parametrize("buffer_type", BufferType, ids=lambda each: each.value)
SHAPE = (2, 64, 8, 16)
ERRORS: list[tuple[type[Exception], str, Callable[[Any, Any], Any]]] = [
    (ValueError, "buffer_type must be one of .* got 'sores'", lambda m, _: m.allocate("sores", (2,))),
    (ValueError, "buffer_type must be one of .* got None", lambda m, b: m.deallocate(b, None)),
    (ValueError, r"shape must not be negative, got \(2, -1\)", lambda m, _: m.allocate("query", (2, -1))),
    (TypeError, r"shape must consist of integers, got \(2\.0,\)", lambda m, _: m.allocate("query", (2.0,))),
    (TypeError, "dtype must be .* got 'float32'", lambda m, _: m.allocate("query", (2,), "float32")),
    (ValueError, "allocated as query cannot be returned as key", lambda m, b: m.deallocate(b, "key")),
    (ValueError, r"shape \(3,\) is not on loan", lambda m, _: m.deallocate(torch.ones(3), "query")),
    (TypeError, "buffer must be a tensor, got list", lambda m, _: m.deallocate([1.0], "query")),
    (ValueError, "given all or none, got ", lambda m, _: m.preallocate_buffers(2, 64)),
    (ValueError, "seq_len must be a positive .* got 0", lambda m, _: m.preallocate_buffers(2, 0, 8, 16)),
    (ValueError, "lifetime must be one of .* got 'week'", lambda m, _: m.clear_cache(lifetime="week")),
]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Memory]:
    """A machine with memory to spare; a test may change what it has."""
    has = {"memory": Memory(8 * GIB, 16 * GIB)}
    monkeypatch.setattr(memory_pool, "host_memory", lambda: has["memory"])
    return has


@pytest.fixture
def manager() -> AttentionBufferManager:
    return AttentionBufferManager()


def hand_back(manager: AttentionBufferManager, buffer: Tensor, buffer_type: BufferType | str) -> int:
    """Returns a buffer and says where its memory was."""
    address = buffer.data_ptr()
    manager.deallocate(buffer, buffer_type)
    return address


def idle(manager: AttentionBufferManager, buffer_type: BufferType) -> int:
    number: int = manager.get_stats()["buffer_types"][buffer_type.value]["cached_buffers"]
    return number


def hits_and_misses(manager: AttentionBufferManager) -> tuple[int, int]:
    stats = manager.get_stats()
    assert stats["allocations"] == stats["cache_hits"] + stats["cache_misses"]
    return stats["cache_hits"], stats["cache_misses"]


def test_ten_types_with_lower_case_values() -> None:
    names = ["QUERY", "KEY", "VALUE", "OUTPUT", "SCORES", "WEIGHTS", "TEMP", "COMM", "MASK", "CACHE"]
    assert [each.name for each in BufferType] == names
    assert [each.value for each in BufferType] == [name.lower() for name in names]
    assert set(DEFAULT_CONFIGS) == set(BufferType)


def test_config_fields_and_defaults() -> None:
    config = BufferConfig(4.0, "high", "forward")
    values = [(field.name, getattr(config, field.name)) for field in fields(BufferConfig)]
    assert values == [
        ("typical_size_mb", 4.0),
        ("reuse_frequency", "high"),
        ("lifetime", "forward"),
        ("prefer_bucketed", True),
        ("prefer_numa", False),
        ("prefer_pinned", False),
        ("zero_init", False),
        ("alignment", None),
    ]
    with pytest.raises(FrozenInstanceError):
        config.zero_init = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"typical_size_mb": 0}, ValueError, r"typical_size_mb must be positive and below 2\*\*62, got 0"),
        (
            {"typical_size_mb": float("nan")},
            ValueError,
            r"typical_size_mb must be positive and below 2\*\*62, got nan",
        ),
        ({"typical_size_mb": "4"}, TypeError, "typical_size_mb must be a number, got '4'"),
        ({"reuse_frequency": "often"}, ValueError, "reuse_frequency must be one of .* got 'often'"),
        ({"lifetime": "epoch"}, ValueError, "lifetime must be one of .* got 'epoch'"),
        ({"zero_init": 1}, TypeError, "zero_init must be a bool, got 1"),
        ({"prefer_numa": "yes"}, TypeError, "prefer_numa must be a bool, got 'yes'"),
        ({"alignment": 48}, ValueError, "alignment must be a power of two, got 48"),
        ({"alignment": 0}, ValueError, "alignment must be a power of two, got 0"),
        ({"alignment": 64.0}, TypeError, r"alignment must be an integer or None, got 64\.0"),
    ],
)
def test_config_is_validated(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BufferConfig(**{"typical_size_mb": 1.0, "reuse_frequency": "low", "lifetime": "forward", **options})


def test_default_configs_are_those_of_the_guide() -> None:
    types, configs = BufferType, DEFAULT_CONFIGS
    for each in (types.QUERY, types.KEY, types.VALUE, types.TEMP):  # frequently reused
        assert configs[each].reuse_frequency == "high"
    assert [each for each in types if configs[each].zero_init] == [types.OUTPUT]
    assert [each for each in types if configs[each].prefer_numa] == [types.SCORES, types.WEIGHTS]
    assert [each for each in types if configs[each].prefer_pinned] == [types.COMM]
    assert [each for each in types if configs[each].alignment] == [types.MASK]
    persistent = [types.COMM, types.MASK, types.CACHE]
    assert [each for each in types if configs[each].lifetime == "persistent"] == persistent


@EACH_TYPE
def test_only_output_is_zeroed(manager: AttentionBufferManager, buffer_type: BufferType) -> None:
    dirty = manager.allocate(buffer_type, SHAPE)
    address = dirty.data_ptr()
    assert dirty.eq(0).all() if buffer_type is BufferType.OUTPUT else dirty.isnan().all()  # see conftest.py
    for zero_init, zeroed in ((None, buffer_type is BufferType.OUTPUT), (True, True), (False, False)):
        dirty.fill_(7.0)
        manager.deallocate(dirty, buffer_type)
        dirty = manager.allocate(buffer_type, SHAPE, zero_init=zero_init)
        assert dirty.data_ptr() == address
        assert dirty.eq(0).all() if zeroed else dirty.isnan().all()


@EACH_TYPE
def test_buffers_are_as_requested(manager: AttentionBufferManager, buffer_type: BufferType) -> None:
    for shape in ((3, 5, 7), (), (0,), (2, 0, 3), torch.Size([4, 4]), 6):
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128):
            buffer = manager.allocate(buffer_type.value, shape, dtype)  # type: ignore[arg-type]
            assert buffer.shape == ((6,) if shape == 6 else shape)
            assert (buffer.dtype, buffer.device.type, buffer.is_contiguous()) == (dtype, "cpu", True)
            assert not buffer.requires_grad
            alignment = manager.configs[buffer_type].alignment
            assert not alignment or buffer.data_ptr() % alignment == 0
            manager.deallocate(buffer, buffer_type)
    assert manager.get_stats()["total_allocated"] == manager.get_stats()["cached_bytes"]


@pytest.mark.parametrize(
    ("buffer_type", "nbytes", "nodes", "strategy"),
    [
        ("query", MIB - 4, 2, "bucketed"),
        ("query", MIB, 2, "direct"),
        ("query", 8 * MIB, 2, "direct"),
        ("query", 8 * MIB + 4, 2, "fragment_aware"),
        ("query", 64 * MIB, 2, "fragment_aware"),  # does not prefer NUMA
        ("mask", 4, 2, "direct"),  # not reused often
        ("comm", 4, 2, "direct"),  # reused, but no buckets wanted
        ("temp", 2 * MIB + 4, 1, "fragment_aware"),
        ("scores", 4, 2, "direct"),
        ("scores", 16 * MIB, 2, "direct"),
        ("scores", 16 * MIB + 4, 2, "numa"),
        ("weights", 40 * MIB, 2, "numa"),
        ("scores", 16 * MIB + 4, 1, "direct"),
        ("weights", 40 * MIB, 1, "fragment_aware"),
    ],
)
def test_strategy_by_type_size_and_machine(
    monkeypatch: pytest.MonkeyPatch, buffer_type: str, nbytes: int, nodes: int, strategy: str
) -> None:
    monkeypatch.setattr(buffer_config, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(memory_pool, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    manager = AttentionBufferManager()
    assert manager.configs[BufferType(buffer_type)].strategy(nbytes) == strategy
    for _ in range(2):
        buffer = manager.allocate(buffer_type, (nbytes // 4,))
        assert buffer.shape == (nbytes // 4,)
        manager.deallocate(buffer, buffer_type)
    assert manager.get_stats()["buffer_types"][buffer_type]["strategies"] == {strategy: 2}
    assert hits_and_misses(manager) == (1, 1)


def test_what_a_strategy_reuses(manager: AttentionBufferManager) -> None:
    def serves(buffer_type: str, first: int, then: int) -> bool:
        address = hand_back(manager, manager.allocate(buffer_type, (first,), torch.uint8), buffer_type)
        found = manager.allocate(buffer_type, (then,), torch.uint8).data_ptr() == address
        manager.clear_cache()
        return found

    assert serves("query", 100_000, 98_400)  # one bucket
    assert not serves("query", 100_000, 60_000)
    assert not serves("query", 2 * MIB, 2 * MIB - 4)  # direct: the very size
    assert serves("temp", 5 * MIB, 3 * MIB)  # fragment-aware: up to twice the size
    assert not serves("temp", 9 * MIB, 3 * MIB)


@EACH_TYPE
@pytest.mark.parametrize("way", ["returned", "dropped"])
def test_five_to_ten_idle_buffers_a_type(
    manager: AttentionBufferManager, buffer_type: BufferType, way: str
) -> None:
    capacity = manager.capacity(buffer_type)
    assert capacity == {"low": 5, "medium": 7, "high": 10}[manager.configs[buffer_type].reuse_frequency]
    sizes = [256 * 2**i for i in range(capacity + 3)]
    for size in sizes:
        buffer = manager.allocate(buffer_type, (size,))
        if way == "returned":
            manager.deallocate(buffer, buffer_type)
        del buffer
    held = manager.allocate(buffer_type, (3,))
    assert idle(manager, buffer_type) == capacity
    _, misses = hits_and_misses(manager)
    buffers = [manager.allocate(buffer_type, (size,)) for size in reversed(sizes)]
    assert hits_and_misses(manager)[1] == misses + 3  # the three least recently used are gone
    assert len({buffer.data_ptr() for buffer in (held, *buffers)}) == 1 + len(buffers)


def test_use_keeps_a_buffer_from_eviction(manager: AttentionBufferManager) -> None:
    sizes = [256 * 2**i for i in range(6)]
    for size in (*sizes[:5], sizes[0], sizes[5]):  # the first is used again before the sixth comes
        manager.deallocate(manager.allocate("mask", (size,)), "mask")
    hits, misses = hits_and_misses(manager)
    kept = manager.allocate("mask", (sizes[0],))
    evicted = manager.allocate("mask", (sizes[1],))
    assert kept.data_ptr() != evicted.data_ptr()
    assert hits_and_misses(manager) == (hits + 1, misses + 1)


@EACH_TYPE
@pytest.mark.parametrize("shape", [(3,), SHAPE, (3, 100, 1000), (5, 2**20)], ids=str)
def test_next_allocation_reuses_what_was_returned(
    monkeypatch: pytest.MonkeyPatch, buffer_type: BufferType, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    manager = AttentionBufferManager()
    first, second = (manager.allocate(buffer_type, shape) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    for buffer in (first, second, first):
        if not buffer.numel():
            buffer = manager.allocate(buffer_type, shape)
        address = hand_back(manager, buffer, buffer_type)
        assert buffer.numel() == 0  # nothing that the next user writes can be seen in it
        again = manager.allocate(buffer_type, shape)
        assert again.data_ptr() == address
        again.fill_(1.0)
        manager.deallocate(again, buffer_type)


def test_a_live_view_delays_the_reuse(manager: AttentionBufferManager) -> None:
    for look in (
        lambda x: x[0],
        lambda x: x.detach(),
        lambda x: x.view(-1)[3:],
        lambda x: x.untyped_storage(),
    ):
        buffer = manager.allocate("query", SHAPE).fill_(3.0)
        view = look(buffer)
        address = hand_back(manager, buffer, "query")
        other = manager.allocate("query", SHAPE).fill_(5.0)
        assert other.data_ptr() != address
        assert not isinstance(view, Tensor) or view.eq(3.0).all()
        del view, buffer, other
        reused = [manager.allocate("query", SHAPE) for _ in range(2)]
        assert address in {each.data_ptr() for each in reused}
        del reused


def test_a_graph_delays_the_reuse(manager: AttentionBufferManager) -> None:
    buffer = manager.allocate("query", (4,)).fill_(3.0)
    weight = torch.ones(4, requires_grad=True)
    loss = (buffer * weight).sum()
    address = hand_back(manager, buffer, "query")
    other = manager.allocate("query", (4,)).fill_(5.0)
    assert other.data_ptr() != address
    loss.backward()
    assert torch.equal(weight.grad, torch.full((4,), 3.0))
    del loss, buffer
    assert manager.allocate("query", (4,)).data_ptr() == address


def test_types_do_not_share_idle_buffers(manager: AttentionBufferManager) -> None:
    address = hand_back(manager, manager.allocate("query", SHAPE), "query")
    assert manager.allocate("key", SHAPE).data_ptr() != address
    assert manager.allocate("query", SHAPE, torch.int32).data_ptr() == address  # the same bytes


def test_one_device_has_one_name(manager: AttentionBufferManager, monkeypatch: pytest.MonkeyPatch) -> None:
    address = hand_back(manager, manager.allocate("query", SHAPE), "query")
    for device in ("cpu", torch.device("cpu"), "cpu:0", torch.device("cpu", 0), None):
        buffer = manager.allocate("query", SHAPE, device=device)
        assert hand_back(manager, buffer, "query") == address
    assert hits_and_misses(manager) == (5, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert {normal_device(name) for name in ("cuda", torch.device("cuda"), "cuda:1")} == {
        torch.device("cuda:1")
    }


def test_other_devices_and_the_default_device(manager: AttentionBufferManager) -> None:
    with torch.device("meta"):
        buffer = manager.allocate("output", SHAPE)
    assert (buffer.shape, buffer.device.type) == (SHAPE, "meta")
    manager.deallocate(buffer, "output")
    with pytest.raises(ValueError, match="not on loan"):
        manager.deallocate(buffer, "output")
    assert hits_and_misses(manager) == (0, 1)


def fill_all_types(manager: AttentionBufferManager) -> None:
    for each in BufferType:
        manager.deallocate(manager.allocate(each, SHAPE), each)
    assert all(idle(manager, each) == 1 for each in BufferType)


def test_clear_cache(manager: AttentionBufferManager) -> None:
    fill_all_types(manager)
    manager.clear_cache(BufferType.TEMP)
    assert [each for each in BufferType if not idle(manager, each)] == [BufferType.TEMP]
    manager.clear_cache("query")
    assert [each for each in BufferType if not idle(manager, each)] == [BufferType.QUERY, BufferType.TEMP]
    held = manager.allocate("cache", SHAPE).fill_(2.0)
    manager.clear_cache()
    stats = manager.get_stats()
    assert stats["cached_buffers"] == stats["cached_bytes"] == 0
    assert stats["total_allocated"] >= held.nbytes
    assert held.eq(2.0).all()
    manager.deallocate(held, "cache")


@pytest.mark.parametrize("lifetime", ["operation", "forward", "iteration", "persistent"])
def test_clear_cache_at_the_end_of_a_lifetime(lifetime: Any) -> None:
    config = BufferConfig(1.0, "high", "iteration")
    manager = AttentionBufferManager({BufferType.VALUE: config})
    fill_all_types(manager)
    manager.clear_cache(lifetime=lifetime)
    order = ["operation", "forward", "iteration", "persistent"]
    left = {each for each in BufferType if idle(manager, each)}
    lasting = order[order.index(lifetime) + 1 :]
    assert left == {each for each, config in manager.configs.items() if config.lifetime in lasting}
    manager.clear_cache("mask", lifetime="operation")  # a type whose time has not come
    assert left == {each for each in BufferType if idle(manager, each)}


@pytest.mark.parametrize("seq_len", [16, 2048], ids=["bucketed", "direct"])
def test_preallocation_makes_the_first_requests_hits(manager: AttentionBufferManager, seq_len: int) -> None:
    sizes = (2, seq_len, 8, 64)
    assert manager.preallocate_buffers(*sizes) == 4
    assert (
        manager.preallocate_buffers(*sizes, dtype=torch.float64, buffer_types=["scores", BufferType.TEMP])
        == 2
    )
    assert hits_and_misses(manager) == (0, 0)  # nobody asked for anything yet
    assert manager.get_stats()["cached_buffers"] == 6
    for each in ("query", "key", "value", "output"):
        buffer = manager.allocate(each, sizes)
        assert each != "output" or buffer.eq(0).all()
    for each in ("scores", "temp"):
        manager.allocate(each, sizes, torch.float64)
    assert hits_and_misses(manager) == (6, 0)


def test_preallocation_tells_what_is_ready(manager: AttentionBufferManager) -> None:
    assert manager.preallocate_buffers(1, 8, 2, 4, buffer_types=["mask"] * 9) == 5
    assert idle(manager, BufferType.MASK) == 5
    assert AttentionBufferManager(enable_reuse=False).preallocate_buffers(1, 8, 2, 4) == 0
    assert manager.preallocate_buffers() == 0  # nothing learnt


def test_recurring_shapes_are_allocated_ahead() -> None:
    manager = create_attention_buffer_manager(enable_preallocation=True)
    for _ in range(3):
        manager.deallocate(manager.allocate("query", SHAPE), "query")
    manager.deallocate(manager.allocate("query", (5, 2**10)), "query")  # once is no habit
    assert manager.get_stats()["known_shapes"] == 2
    manager.clear_cache()
    assert manager.get_stats()["cached_buffers"] == 0
    other = manager.allocate("key", (3,))
    assert manager.get_stats()["cached_buffers"] == 1
    hits, misses = hits_and_misses(manager)
    buffer = manager.allocate("query", SHAPE)
    assert hits_and_misses(manager) == (hits + 1, misses)
    assert other.data_ptr() != buffer.data_ptr()


def test_shapes_are_learnt_only_on_request() -> None:
    manager = create_attention_buffer_manager()
    for _ in range(4):
        manager.deallocate(manager.allocate("query", SHAPE), "query")
    manager.clear_cache()
    manager.allocate("key", (3,))
    assert manager.get_stats()["known_shapes"] == idle(manager, BufferType.QUERY) == 0


def test_habits_stay_within_capacity_and_budget() -> None:
    manager = AttentionBufferManager(enable_preallocation=True, pool=MemoryPool(16 * MIB))
    for _ in range(3):
        manager.allocate("cache", (MIB,))
        for size in range(1, 9):
            manager.allocate("mask", (size * 1024,))
    manager.clear_cache()
    assert manager.preallocate_buffers() == 1 + 5  # of eight masks as many as are kept
    manager.clear_cache()
    manager.pool._budget = MIB  # as when the machine has less to give
    assert manager.allocate("query", (3,)).shape == (3,)
    assert idle(manager, BufferType.CACHE) == 0


def test_without_reuse_every_buffer_is_fresh(manager: AttentionBufferManager) -> None:
    fresh = create_attention_buffer_manager(enable_reuse=False)
    for _ in range(5):
        fresh.deallocate(fresh.allocate("query", SHAPE), "query")
        dropped = fresh.allocate("key", SHAPE)
        del dropped
        with fresh.workspace(torch.device("cpu")) as workspace:
            workspace.take("query", (4,), torch.float32, torch.device("cpu"))
    assert hits_and_misses(fresh) == (0, 15)
    assert all(fresh.capacity(each) == 0 for each in BufferType)
    assert idle(fresh, BufferType.QUERY) == 0


def test_lightweight_leaves_results_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "RESULT_BYTES", 1)
    for lightweight in (True, False):
        manager = create_attention_buffer_manager(lightweight=lightweight)
        with manager.workspace(torch.device("cpu")) as workspace:
            workspace.result((4,), torch.float32, torch.device("cpu"))
        assert hits_and_misses(manager) == (0, 0 if lightweight else 1)


def test_a_preallocated_output_is_what_attention_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "RESULT_BYTES", 1 * MIB)
    manager = AttentionBufferManager()
    attention = ImprovedDilatedAttentionV2([64, 128], [1, 2], buffer_manager=manager)
    q, k, v = torch.randn(3, 2, 1500, 8, 64).unbind(0)  # 6 MiB, more than a typical output
    manager.preallocate_buffers(2, 1500, 8, 64)
    attention(q, k, v)
    assert manager.get_stats()["buffer_types"]["output"]["cache_hits"] == 1


def test_recurring_results_are_allocated_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "RESULT_BYTES", 1 * MIB)
    manager = AttentionBufferManager(enable_preallocation=True)
    attention = ImprovedDilatedAttentionV2(
        [64, 128], [1, 2], buffer_manager=manager, enable_preallocation=True
    )
    q, k, v = torch.randn(3, 2, 1500, 8, 64).unbind(0)
    for _ in range(3):
        attention(q, k, v)
    attention.cleanup_buffers()
    assert idle(manager, BufferType.OUTPUT) == 0
    before = manager.get_stats()["buffer_types"]["output"]
    attention(q, k, v)
    after = manager.get_stats()["buffer_types"]["output"]
    assert after["cache_misses"] == before["cache_misses"]
    assert after["cache_hits"] == before["cache_hits"] + 1


def test_clearing_a_type_clears_its_scratch() -> None:
    manager = AttentionBufferManager()
    attention = ImprovedDilatedAttentionV2([64, 128], [1, 2], buffer_manager=manager)
    q, k, v = (torch.randn(2, 150, 8, 8, requires_grad=True) for _ in range(3))
    attention(q, k, v).sum().backward()
    query, key, temp = BufferType.QUERY, BufferType.KEY, BufferType.TEMP
    assert min(idle(manager, each) for each in (query, key, temp)) > 0
    manager.clear_cache("query")
    assert (idle(manager, query), idle(manager, key)) == (0, 1)
    manager.clear_cache(lifetime="operation")
    assert (idle(manager, temp), idle(manager, key)) == (0, 1)
    manager.clear_cache(lifetime="persistent")
    assert manager.get_stats()["cached_bytes"] == 0
    assert torch.equal(attention(q, k, v), ImprovedDilatedAttentionV2([64, 128], [1, 2])(q, k, v))


def test_garbage_may_return_buffers_at_any_time(manager: AttentionBufferManager) -> None:
    """A collection can run inside any call of the manager, on the same thread."""

    class Owner:
        def __init__(self) -> None:
            self.buffer, self.itself = manager.allocate("temp", (8,)), self

        def __del__(self) -> None:
            manager.deallocate(self.buffer, "temp")

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            Owner()
            manager.get_stats()
            manager.allocate("query", (8,))
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert manager.get_stats()["buffer_types"]["temp"]["deallocations"] == 50


def test_custom_configs(manager: AttentionBufferManager) -> None:
    scores = BufferConfig(16.0, "high", "iteration", prefer_bucketed=False, prefer_numa=True, zero_init=True)
    custom = AttentionBufferManager(
        {"scores": scores, BufferType.OUTPUT: BufferConfig(1.0, "low", "forward")}
    )  # type: ignore[dict-item]
    assert custom.configs[BufferType.SCORES] is scores
    assert custom.configs[BufferType.QUERY] is manager.configs[BufferType.QUERY]
    assert custom.allocate("scores", SHAPE).eq(0).all()
    assert custom.allocate("output", SHAPE).isnan().all()
    assert (custom.capacity("scores"), manager.capacity("scores"), custom.capacity("output")) == (10, 7, 5)
    with pytest.raises(ValueError, match="buffer_type must be one of"):
        AttentionBufferManager({"score": scores})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="the config of scores must be a BufferConfig, got 3"):
        AttentionBufferManager({BufferType.SCORES: 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="pool must be a MemoryPool, got int"):
        AttentionBufferManager(pool=3)  # type: ignore[arg-type]
    for name in ("enable_reuse", "enable_preallocation", "lightweight", "enable_profiling"):
        with pytest.raises(TypeError, match=f"{name} must be a bool, got 'no'"):
            create_attention_buffer_manager(**{name: "no"})  # type: ignore[arg-type]


def test_statistics_exist_and_move(manager: AttentionBufferManager) -> None:
    start = manager.get_stats()
    assert (
        start["cache_hits"] == start["cache_misses"] == start["cached_buffers"] == start["cached_bytes"] == 0
    )
    assert start["cache_hit_rate"] == 0.0
    assert list(start["buffer_types"]) == [each.value for each in BufferType]
    buffers = [manager.allocate("value", SHAPE) for _ in range(3)]
    nbytes = buffers[0].nbytes
    assert manager.get_stats()["total_allocated"] >= 3 * nbytes
    for buffer in buffers:
        manager.deallocate(buffer, "value")
    manager.allocate("value", SHAPE)
    stats = manager.get_stats()
    assert (stats["cache_hits"], stats["cache_misses"], stats["cache_hit_rate"]) == (1, 3, 0.25)
    assert (stats["allocations"], stats["deallocations"], stats["cached_buffers"]) == (4, 3, 3)
    assert stats["cached_bytes"] >= 3 * nbytes
    value = stats["buffer_types"]["value"]
    assert (value["cache_hits"], value["cache_misses"], value["deallocations"]) == (1, 3, 3)
    assert (value["cached_buffers"], value["cached_bytes"]) == (3, stats["cached_bytes"])
    assert value["largest_bytes"] == nbytes
    assert stats["buffer_types"]["key"]["cache_misses"] == 0
    manager.clear_cache()
    cleared = manager.get_stats()
    assert (cleared["cached_bytes"], cleared["peak_allocated"]) == (0, stats["peak_allocated"])
    assert cleared["evictions"] > stats["evictions"]
    assert "1 hits, 3 misses" in repr(manager)


def test_profile_table() -> None:
    manager = AttentionBufferManager(enable_profiling=True)
    for each in ("query", "scores", "query"):
        manager.deallocate(manager.allocate(each, SHAPE), each)
    assert manager.get_stats()["buffer_types"]["query"]["seconds"] > 0
    head, query, scores = manager.profile_table().splitlines()
    assert re.split(r" {2,}", head) == [
        *("type", "hits", "misses", "hit rate", "idle", "idle MiB", "largest MiB", "us a request")
    ]
    assert re.match(r"query +1 +1 +50\.0% +1 +0\.06 +0\.06 +\d+\.\d$", query)
    assert re.match(r"scores +0 +1 +0\.0% +1 +0\.06 +0\.06 +\d+\.\d$", scores)
    assert len({len(line) for line in (head, query, scores)}) == 1
    plain = AttentionBufferManager()
    assert plain.profile_table().split() == head.split()
    plain.allocate("query", (3,))
    assert plain.profile_table().endswith(" -")


def test_nothing_idle_is_kept_while_memory_is_scarce(machine: dict[str, Memory]) -> None:
    manager = AttentionBufferManager(enable_preallocation=True)
    fill_all_types(manager)
    machine["memory"] = Memory(GIB, 16 * GIB)
    manager.pool.cleanup()  # looks at the machine at once
    assert manager.pool.memory_is_scarce
    assert manager.get_stats()["cached_buffers"] == 0
    assert all(manager.capacity(each) == 0 for each in BufferType)
    manager.deallocate(manager.allocate("query", SHAPE), "query")
    assert manager.get_stats()["cached_buffers"] == manager.preallocate_buffers(*SHAPE) == 0
    machine["memory"] = Memory(8 * GIB, 16 * GIB)
    manager.pool.cleanup()
    assert manager.capacity("query") == 10
    fill_all_types(manager)


@pytest.mark.parametrize(("error", "message", "do"), ERRORS, ids=[message for _, message, _ in ERRORS])
def test_errors_are_clear_and_change_nothing(
    manager: AttentionBufferManager, error: type[Exception], message: str, do: Callable[..., Any]
) -> None:
    fill_all_types(manager)
    buffer = manager.allocate("query", SHAPE).fill_(3.0)
    before = manager.get_stats()
    with pytest.raises(error, match=message):
        do(manager, buffer)
    assert manager.get_stats() == before
    assert buffer.eq(3.0).all()
    address = hand_back(manager, buffer, "query")
    assert manager.allocate("query", SHAPE).data_ptr() == address


@pytest.mark.parametrize("viewed", [False, True])
def test_a_buffer_is_returned_once(manager: AttentionBufferManager, viewed: bool) -> None:
    buffer = manager.allocate("query", SHAPE)
    others = [buffer, buffer[0]] if viewed else [buffer]
    manager.deallocate(buffer, "query")
    for tensor in others:
        with pytest.raises(ValueError, match="is not on loan from this pool: it was returned before"):
            manager.deallocate(tensor, "query")
    assert manager.get_stats()["deallocations"] == 1
    del buffer, tensor, others
    one, two = manager.allocate("query", SHAPE), manager.allocate("query", SHAPE)
    assert one.data_ptr() != two.data_ptr()
    assert hits_and_misses(manager) == (1, 2)


def test_a_buffer_beyond_the_budget() -> None:
    manager = AttentionBufferManager(pool=MemoryPool(MIB))
    with pytest.raises(ValueError, match=f"does not fit the pool's budget of {MIB} bytes"):
        manager.allocate("query", (MIB,))
    held = [manager.allocate("query", (MIB // 8,)) for _ in range(3)]  # the third has no room in the pool
    assert len({buffer.data_ptr() for buffer in held}) == 3
    for buffer in held:
        manager.deallocate(buffer, "query")
    assert manager.get_stats()["total_allocated"] <= MIB
    assert hits_and_misses(manager) == (0, 3)


def test_eight_threads(manager: AttentionBufferManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # costs half the time
    operations, failures = 20_000, []
    kinds = ["query", "key", "output", "temp"]

    def work(thread: int) -> None:
        held: list[tuple[Tensor, str, float]] = []
        try:
            for i in range(operations // 2):
                kind = kinds[(thread + i) % 4]
                buffer = manager.allocate(kind, (8 + (i * (thread + 1)) % 5 * 64,))
                if kind == "output":
                    assert not buffer.any()
                held.append((buffer.fill_(mark := float(thread * operations + i)), kind, mark))
                del buffer
                if len(held) > thread % 3:
                    buffer, kind, mark = held.pop(i % len(held))
                    assert buffer.eq(mark).all(), "two users of one memory"
                    manager.deallocate(buffer, kind)
            for buffer, kind, _ in held:
                manager.deallocate(buffer, kind)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures[0]
    stats = manager.get_stats()
    assert stats["cache_hits"] + stats["cache_misses"] == stats["deallocations"] == 8 * operations // 2
    assert all(idle(manager, each) <= manager.capacity(each) for each in BufferType)


def test_scratch_is_counted_before_another_call_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, cpu = AttentionBufferManager(), torch.device("cpu")
    lend = manager.pool.workspace

    @contextmanager
    def taken_at_once(*args: Any, **options: Any) -> Iterator[Workspace]:
        with lend(*args, **options) as workspace:
            yield workspace
        workspace.start(None)  # as the next call does, maybe before this one goes on
        workspace.buffers.clear()

    monkeypatch.setattr(manager.pool, "workspace", taken_at_once)
    for _ in range(3):
        with manager.workspace(cpu) as workspace:
            for slot in ("query", "acc_out"):
                workspace.take(slot, (5,), torch.float32, cpu)
    types = manager.get_stats()["buffer_types"]
    assert types["query"]["cache_misses"] == types["temp"]["cache_misses"] == 3


def test_scratch_and_large_results_of_a_call(manager: AttentionBufferManager) -> None:
    cpu = torch.device("cpu")
    for _ in range(2):
        with manager.workspace(cpu) as workspace:
            workspace.take("key", (5,), torch.float32, cpu)
            small = workspace.result((5,), torch.float32, cpu)
            large = workspace.result((32 * MIB,), torch.uint8, cpu)
        del small, large
    types = manager.get_stats()["buffer_types"]
    assert (types["key"]["cache_hits"], types["key"]["cache_misses"]) == (1, 1)
    assert (types["output"]["cache_hits"], types["output"]["cache_misses"]) == (1, 1)
    assert types["output"]["strategies"] == {"direct": 2}


def test_scratch_of_a_failed_call_is_not_kept(manager: AttentionBufferManager) -> None:
    def fail() -> None:
        with manager.workspace(torch.device("cpu")) as workspace:
            workspace.take("key", (5,), torch.float32, torch.device("cpu"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert hits_and_misses(manager) == (0, 0)
    assert manager.get_stats()["total_allocated"] == 0


def test_two_managers_share_a_pool() -> None:
    pool = MemoryPool()
    one, two = AttentionBufferManager(pool=pool), AttentionBufferManager(pool=pool)
    address = hand_back(one, one.allocate("query", SHAPE), "query")
    buffer = two.allocate("query", SHAPE)
    assert buffer.data_ptr() == address
    assert (hits_and_misses(one), hits_and_misses(two)) == ((0, 1), (1, 0))
    one.deallocate(buffer, "query")  # it is the pool's, whoever asked for it
    assert (
        one.get_stats()["cached_bytes"] == two.get_stats()["cached_bytes"] == pool.get_stats()["cached_bytes"]
    )
    apart = AttentionBufferManager()
    with pytest.raises(ValueError, match="not on loan"):
        apart.deallocate(two.allocate("query", SHAPE), "query")


def test_copies_share_and_pickles_start_their_own() -> None:
    config = BufferConfig(3.0, "low", "forward")
    manager = AttentionBufferManager(
        {BufferType.KEY: config}, enable_preallocation=True, pool=MemoryPool(MIB)
    )
    assert copy.deepcopy(manager) is manager
    manager.deallocate(manager.allocate("query", SHAPE), "query")
    twin = pickle.loads(pickle.dumps(manager))
    assert twin is not manager
    assert twin.name != manager.name
    assert (twin.configs, twin.settings) == (manager.configs, manager.settings)
    assert twin.pool is not manager.pool
    assert twin.pool.max_bytes == MIB
    assert hits_and_misses(twin) == (0, 0)
    one, two = pickle.loads(pickle.dumps((manager, AttentionBufferManager(pool=manager.pool))))
    assert one.pool is two.pool
    reset_global_memory_pool()
    pooled = AttentionBufferManager(pool=get_global_memory_pool())
    assert pickle.loads(pickle.dumps(pooled)).pool is get_global_memory_pool()


def test_a_manager_is_found_by_name_as_long_as_it_lives() -> None:
    manager = AttentionBufferManager()
    name = manager.name
    assert find_buffer_manager(name) is manager
    settings = Settings(lightweight=True, enable_profiling=True)
    shared = shared_buffer_manager(settings)
    assert shared is shared_buffer_manager(settings)
    assert shared is pickle.loads(pickle.dumps(shared))
    assert shared is not shared_buffer_manager(Settings(enable_profiling=True))
    del manager
    gc.collect()
    assert find_buffer_manager(name) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_forked_child_starts_clean_while_the_locks_are_held() -> None:
    script = """
import os, signal, threading
from dilated_attention_pytorch.core import attention_buffer_manager as module

manager = module.AttentionBufferManager(enable_preallocation=True)
shared = module.shared_buffer_manager(module.Settings())
manager.deallocate(manager.allocate("query", (4, 4)), "query")
on_loan = manager.allocate("key", (4, 4)).fill_(3.0)
held, finish = threading.Event(), threading.Event()

def hold():
    with manager._lock, manager.pool._lock, module._SHARED_LOCK:
        held.set()
        finish.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)  # ends a child that waits for a lock
    code = 1
    try:
        stats = manager.get_stats()
        assert stats["allocations"] == stats["cached_buffers"] == stats["known_shapes"] == 0
        assert module.find_buffer_manager(manager.name) is manager
        assert module.shared_buffer_manager(module.Settings()) is shared
        assert on_loan.eq(3.0).all()
        manager.deallocate(manager.allocate("query", (4, 4)), "query")
        manager.allocate("query", (4, 4))
        assert manager.get_stats()["cache_hit_rate"] == 0.5
        code = 0
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
finish.set()
assert status == 0, status
manager.deallocate(on_loan, "key")
assert manager.get_stats()["cached_buffers"] == 2
print("done")
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["done"], run.stderr
