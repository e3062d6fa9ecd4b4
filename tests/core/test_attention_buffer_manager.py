"""The attention buffer manager to the letter: types, strategies, reuse without aliases, figures."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import FrozenInstanceError, astuple
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.core import memory_pool, workspace
from dilated_attention_pytorch.core.attention_buffer_manager import (
    AttentionBufferManager,
    BufferConfig,
    BufferType,
    create_attention_buffer_manager,
)
from dilated_attention_pytorch.core.host_memory import Memory, normal_device
from dilated_attention_pytorch.core.memory_pool import MemoryPool
from dilated_attention_pytorch.core.workspace import DEFAULT_CONFIGS
from dilated_attention_pytorch.modules import ImprovedDilatedAttentionV2
from support.threads import in_threads

MIB, GIB = 2**20, 2**30
CPU = torch.device("cpu")
EACH_TYPE = pytest.mark.parametrize("buffer_type", BufferType, ids=lambda each: each.value)
SHAPE = (2, 64, 8, 16)
LIFETIMES = ["operation", "forward", "iteration", "persistent"]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Memory]:
    """A machine with memory to spare; a test may change what it has."""
    has = {"memory": Memory(8 * GIB, 16 * GIB)}
    monkeypatch.setattr(memory_pool, "host_memory", lambda: has["memory"])
    return has


@pytest.fixture
def manager() -> AttentionBufferManager:
    return AttentionBufferManager()


def use(manager: AttentionBufferManager, buffer_type: BufferType | str, *args: Any, **options: Any) -> int:
    """Allocates a buffer, returns it at once and says where its memory was."""
    buffer = manager.allocate(buffer_type, *args, **options)
    address = buffer.data_ptr()
    manager.deallocate(buffer, buffer_type)
    return address


def idle(manager: AttentionBufferManager) -> dict[str, int]:
    """Idle buffers by type, of those that have any."""
    types = manager.get_stats()["buffer_types"].items()
    return {name: figures["cached_buffers"] for name, figures in types if figures["cached_buffers"]}


def hits_and_misses(manager: AttentionBufferManager) -> tuple[int, int]:
    stats = manager.get_stats()
    assert stats["allocations"] == stats["cache_hits"] + stats["cache_misses"]
    for name in ("cache_hits", "cache_misses", "deallocations", "cached_buffers", "cached_bytes"):
        assert stats[name] == sum(figures[name] for figures in stats["buffer_types"].values())
    return stats["cache_hits"], stats["cache_misses"]


def fill_all_types(manager: AttentionBufferManager) -> None:
    for each in BufferType:
        use(manager, each, SHAPE)
    assert idle(manager) == {each.value: 1 for each in BufferType}


def test_types_and_configs_are_those_of_the_guide(manager: AttentionBufferManager) -> None:
    names = ["QUERY", "KEY", "VALUE", "OUTPUT", "SCORES", "WEIGHTS", "TEMP", "COMM", "MASK", "CACHE"]
    assert [(each.name, each.value) for each in BufferType] == [(name, name.lower()) for name in names]
    assert list(DEFAULT_CONFIGS) == list(BufferType)
    facts: dict[str, Callable[[BufferConfig], Any]] = {
        "query key value output temp": lambda config: config.reuse_frequency == "high",
        "output": lambda config: config.zero_init,
        "scores weights": lambda config: config.prefer_numa,
        "comm": lambda config: config.prefer_pinned,
        "mask": lambda config: config.alignment,
        "comm mask cache": lambda config: config.lifetime == "persistent",
    }
    for types, fact in facts.items():
        assert [each.value for each, config in DEFAULT_CONFIGS.items() if fact(config)] == types.split()
    output = BufferConfig(1.0, "low", "forward")
    assert astuple(output) == (1.0, "low", "forward", True, False, False, False, None)
    with pytest.raises(FrozenInstanceError):
        output.zero_init = True  # type: ignore[misc]
    scores = BufferConfig(16.0, "high", "iteration", prefer_bucketed=False, prefer_numa=True, zero_init=True)
    custom = AttentionBufferManager({"scores": scores, BufferType.OUTPUT: output})  # type: ignore[dict-item]
    assert custom.configs == {**manager.configs, BufferType.SCORES: scores, BufferType.OUTPUT: output}
    assert custom.allocate("scores", SHAPE).eq(0).all()
    assert custom.allocate("output", SHAPE).isnan().all()
    assert (custom.capacity("scores"), manager.capacity("scores"), custom.capacity("output")) == (10, 7, 5)


@EACH_TYPE
def test_buffers_are_as_requested_and_only_output_is_zeroed(
    manager: AttentionBufferManager, buffer_type: BufferType
) -> None:
    for shape in ((3, 5, 7), (), (0,), (2, 0, 3), torch.Size([4, 4]), 6):
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128):
            buffer = manager.allocate(buffer_type.value, shape, dtype)  # type: ignore[arg-type]
            assert buffer.shape == ((6,) if shape == 6 else shape)
            assert (buffer.dtype, buffer.device, buffer.is_contiguous()) == (dtype, CPU, True)
            assert not buffer.requires_grad
            assert buffer.data_ptr() % (manager.configs[buffer_type].alignment or 1) == 0
            manager.deallocate(buffer, buffer_type)
    assert manager.get_stats()["total_allocated"] == manager.get_stats()["cached_bytes"]
    is_output = buffer_type is BufferType.OUTPUT
    dirty = manager.allocate(buffer_type, SHAPE)
    address = dirty.data_ptr()
    assert dirty.eq(0).all() if is_output else dirty.isnan().all()  # see conftest.py
    for zero_init, zeroed in ((None, is_output), (True, True), (False, False)):
        manager.deallocate(dirty.fill_(7.0), buffer_type)
        assert dirty.numel() == 0  # nothing that the next user writes can be seen in it
        dirty = manager.allocate(buffer_type, SHAPE, zero_init=zero_init)
        assert dirty.data_ptr() == address
        assert dirty.eq(0).all() if zeroed else dirty.isnan().all()


@pytest.mark.parametrize(
    ("buffer_type", "nbytes", "nodes", "strategy", "smaller"),
    [
        ("query", MIB - 4, 2, "bucketed", MIB - 1024),  # one bucket
        ("query", MIB, 2, "direct", MIB - 4),  # which has a bucket of that size
        ("query", 8 * MIB, 2, "direct", 0),  # the very size
        ("query", 8 * MIB + 4, 2, "fragment_aware", 0),
        ("query", 64 * MIB, 2, "fragment_aware", 60 * MIB),  # does not prefer NUMA
        ("mask", 4, 2, "direct", 0),  # not reused often
        ("comm", 4, 2, "direct", 0),  # reused, but no buckets wanted
        ("temp", 5 * MIB, 1, "fragment_aware", 3 * MIB),  # up to twice the size
        ("scores", 16 * MIB, 2, "direct", 0),
        ("scores", 16 * MIB + 4, 2, "numa", 0),
        ("weights", 40 * MIB, 2, "numa", 0),
        ("scores", 16 * MIB + 4, 1, "direct", 0),
        ("weights", 40 * MIB, 1, "fragment_aware", 36 * MIB),
    ],
)
def test_strategy_by_type_size_and_machine(
    monkeypatch: pytest.MonkeyPatch,
    buffer_type: str,
    nbytes: int,
    nodes: int,
    strategy: str,
    smaller: int,
) -> None:
    for module in (workspace, memory_pool):
        monkeypatch.setattr(module, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    manager = AttentionBufferManager()
    assert manager.configs[BufferType(buffer_type)].strategy(nbytes) == strategy
    address = use(manager, buffer_type, (nbytes // 4,))
    assert use(manager, buffer_type, (nbytes // 4,)) == address
    assert hits_and_misses(manager) == (1, 1)
    use(manager, buffer_type, ((smaller or nbytes - 4) // 4,))
    assert hits_and_misses(manager) == ((2, 1) if smaller else (1, 2))


@EACH_TYPE
@pytest.mark.parametrize("way", ["returned", "dropped"])
def test_five_to_ten_idle_buffers_a_type(
    manager: AttentionBufferManager, buffer_type: BufferType, way: str
) -> None:
    capacity = manager.capacity(buffer_type)
    assert capacity == {"low": 5, "medium": 7, "high": 10}[manager.configs[buffer_type].reuse_frequency]
    sizes = [256 * 2**i for i in range(capacity + 3)]
    for size in (*sizes[:3], sizes[0], *sizes[3:]):  # the first is used again before the fourth comes
        (use if way == "returned" else AttentionBufferManager.allocate)(manager, buffer_type, (size,))
    held = manager.allocate(buffer_type, (3,))
    assert idle(manager) == {buffer_type.value: capacity}
    _, misses = hits_and_misses(manager)
    buffers = [manager.allocate(buffer_type, (size,)) for size in reversed(sizes)]
    assert hits_and_misses(manager)[1] == misses + 3  # the three least recently used are gone
    assert len({buffer.data_ptr() for buffer in (held, *buffers)}) == 1 + len(buffers)


def test_one_device_has_one_name(manager: AttentionBufferManager, monkeypatch: pytest.MonkeyPatch) -> None:
    address = use(manager, "query", SHAPE)
    for device in ("cpu", torch.device("cpu"), "cpu:0", torch.device("cpu", 0), None):
        assert use(manager, "query", SHAPE, device=device) == address
    with torch.device("meta"):
        buffer = manager.allocate("output", SHAPE)
    assert (buffer.shape, buffer.device.type) == (SHAPE, "meta")
    manager.deallocate(buffer, "output")
    assert hits_and_misses(manager) == (5, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    names = ("cuda", torch.device("cuda"), "cuda:1")
    assert {normal_device(name) for name in names} == {torch.device("cuda:1")}


@pytest.mark.parametrize("lifetime", [None, *LIFETIMES])
def test_clear_cache_by_type_and_lifetime(lifetime: Any) -> None:
    manager = AttentionBufferManager({BufferType.VALUE: BufferConfig(1.0, "high", "iteration")})
    fill_all_types(manager)
    manager.clear_cache(BufferType.TEMP)
    manager.clear_cache("query")
    held = manager.allocate("cache", (3,)).fill_(2.0)
    there = [each for each in BufferType if each.value not in ("temp", "query")]
    assert list(idle(manager)) == [each.value for each in there]
    lasting = [] if lifetime is None else LIFETIMES[LIFETIMES.index(lifetime) + 1 :]
    left = {each.value: 1 for each in there if manager.configs[each].lifetime in lasting}
    manager.clear_cache(lifetime=lifetime)
    assert idle(manager) == left
    manager.clear_cache("mask", lifetime="operation")  # a type whose time has not come
    assert idle(manager) == left
    assert manager.get_stats()["total_allocated"] - manager.get_stats()["cached_bytes"] >= held.nbytes
    assert held.eq(2.0).all()


@pytest.mark.parametrize("seq_len", [16, 2048], ids=["bucketed", "direct"])
def test_preallocation_makes_the_first_requests_hits(manager: AttentionBufferManager, seq_len: int) -> None:
    sizes = (2, seq_len, 8, 64)
    assert manager.preallocate_buffers(*sizes) == 4
    others = ["scores", BufferType.TEMP]
    assert manager.preallocate_buffers(*sizes, dtype=torch.float64, buffer_types=others) == 2
    assert hits_and_misses(manager) == (0, 0)  # nobody asked for anything yet
    assert manager.get_stats()["cached_buffers"] == 6
    for each in ("query", "key", "value", "output"):
        assert manager.allocate(each, sizes).eq(0).all() == (each == "output")
    for each in ("scores", "temp"):
        manager.allocate(each, sizes, torch.float64)
    assert hits_and_misses(manager) == (6, 0)
    manager.clear_cache()
    assert manager.preallocate_buffers(1, 8, 2, 4, buffer_types=["mask"] * 9) == idle(manager)["mask"] == 5
    assert AttentionBufferManager(enable_reuse=False).preallocate_buffers(1, 8, 2, 4) == 0
    assert manager.preallocate_buffers() == 0  # nothing learnt


@pytest.mark.parametrize("learns", [True, False])
def test_recurring_shapes_are_allocated_ahead(learns: bool) -> None:
    manager = create_attention_buffer_manager(enable_preallocation=learns)
    for shape in (SHAPE, SHAPE, SHAPE, (5, 2**10)):  # once is no habit
        use(manager, "query", shape)
    assert manager.get_stats()["known_shapes"] == 2 * learns
    manager.clear_cache()
    assert not idle(manager)
    other = manager.allocate("key", (3,))
    assert manager.get_stats()["cached_buffers"] == learns
    hits, misses = hits_and_misses(manager)
    buffer = manager.allocate("query", SHAPE)
    assert hits_and_misses(manager) == (hits + learns, misses + (not learns))
    assert other.data_ptr() != buffer.data_ptr()


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
    assert "cache" not in idle(manager)


@pytest.mark.parametrize(("lightweight", "reuse"), [(True, True), (False, True), (False, False)])
def test_scratch_and_results_of_a_call(lightweight: bool, reuse: bool) -> None:
    manager = create_attention_buffer_manager(lightweight=lightweight, enable_reuse=reuse)
    for _ in range(2):
        with manager.workspace(CPU) as scratch:
            for slot in ("key", "comm_in", "acc_out"):
                scratch.take(slot, (5,), torch.float32, CPU)
            results = [scratch.result((size,), torch.uint8, CPU) for size in (5, 32 * MIB) if reuse]
        del results
        use(manager, "query", SHAPE)
    types = manager.get_stats()["buffer_types"]
    for name in ("key", "comm", "temp", "query") + ("output",) * (reuse and not lightweight):
        assert (types[name]["cache_hits"], types[name]["cache_misses"]) == (reuse, 2 - reuse)
    assert hits_and_misses(manager) == ((0, 8) if not reuse else (4, 4) if lightweight else (5, 5))
    if not reuse:  # every buffer is fresh
        assert not idle(manager)
        assert not any(manager.capacity(each) for each in BufferType)


@pytest.mark.parametrize("way", ["preallocated", "learnt"])
def test_attention_returns_what_was_allocated_ahead(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "RESULT_BYTES", 1 * MIB)
    manager = AttentionBufferManager(enable_preallocation=way == "learnt")
    attention = ImprovedDilatedAttentionV2([64, 128], [1, 2], buffer_manager=manager)
    q, k, v = torch.randn(3, 2, 1500, 8, 64).unbind(0)  # 6 MiB, more than a typical output
    if way == "learnt":
        for _ in range(3):
            attention(q, k, v)
        attention.cleanup_buffers()
        assert not idle(manager)
    else:
        manager.preallocate_buffers(2, 1500, 8, 64)
    before = manager.get_stats()["buffer_types"]["output"]
    attention(q, k, v)
    after = manager.get_stats()["buffer_types"]["output"]
    assert after["cache_misses"] == before["cache_misses"]
    assert after["cache_hits"] == before["cache_hits"] + 1


def test_clearing_a_type_clears_its_scratch(manager: AttentionBufferManager) -> None:
    # The stock kernel packs queries, keys and values apart from one another.
    attention = ImprovedDilatedAttentionV2([64, 128], [1, 2], buffer_manager=manager, kernel="stock")
    q, k, v = (torch.randn(2, 150, 8, 8, requires_grad=True) for _ in range(3))
    attention(q, k, v).sum().backward()
    assert {"query", "key", "temp"} <= idle(manager).keys()
    manager.clear_cache("query")
    assert "query" not in idle(manager)
    manager.clear_cache(lifetime="operation")
    assert "temp" not in idle(manager)
    assert idle(manager)["key"] == 1
    manager.clear_cache(lifetime="persistent")
    assert manager.get_stats()["cached_bytes"] == 0
    again = ImprovedDilatedAttentionV2([64, 128], [1, 2], kernel="stock")
    assert torch.equal(attention(q, k, v), again(q, k, v))


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


def test_statistics_exist_and_move() -> None:
    manager = AttentionBufferManager(enable_profiling=True)
    start = manager.get_stats()
    assert start["cache_hit_rate"] == start["cached_buffers"] == start["cached_bytes"] == 0
    assert list(start["buffer_types"]) == [each.value for each in BufferType]
    buffers = [manager.allocate("value", SHAPE) for _ in range(3)]
    nbytes = buffers[0].nbytes
    assert manager.get_stats()["total_allocated"] >= 3 * nbytes
    for buffer in buffers:
        manager.deallocate(buffer, "value")
    manager.allocate("value", SHAPE)
    stats = manager.get_stats()
    assert hits_and_misses(manager) == (1, 3)
    assert (stats["cache_hit_rate"], stats["deallocations"], stats["cached_buffers"]) == (0.25, 3, 3)
    assert stats["cached_bytes"] >= 3 * nbytes
    value = stats["buffer_types"]["value"]
    assert (value["cached_buffers"], value["cached_bytes"]) == (3, stats["cached_bytes"])
    assert value["largest_bytes"] == nbytes
    assert value["seconds"] > stats["buffer_types"]["key"]["seconds"] == 0
    assert "seconds" not in AttentionBufferManager().get_stats()["buffer_types"]["value"]
    manager.clear_cache()
    cleared = manager.get_stats()
    assert (cleared["cached_bytes"], cleared["peak_allocated"]) == (0, stats["peak_allocated"])
    assert cleared["evictions"] > stats["evictions"]


def test_nothing_idle_is_kept_while_memory_is_scarce(machine: dict[str, Memory]) -> None:
    manager = AttentionBufferManager(enable_preallocation=True)
    fill_all_types(manager)
    machine["memory"] = Memory(GIB, 16 * GIB)
    manager.pool.cleanup()  # looks at the machine at once
    assert manager.pool.memory_is_scarce
    assert not idle(manager)
    assert not any(manager.capacity(each) for each in BufferType)
    use(manager, "query", SHAPE)
    assert manager.get_stats()["cached_buffers"] == manager.preallocate_buffers(*SHAPE) == 0
    machine["memory"] = Memory(8 * GIB, 16 * GIB)
    manager.pool.cleanup()
    fill_all_types(manager)


V, T, config = ValueError, TypeError, BufferConfig
ERRORS: list[tuple[type[Exception], str, Callable[[Any, Any], Any]]] = [
    (V, "buffer_type must be one of .* got 'sores'", lambda m, _: m.allocate("sores", (2,))),
    (V, "buffer_type must be one of .* got None", lambda m, b: m.deallocate(b, None)),
    (V, r"shape must not be negative, got \(2, -1\)", lambda m, _: m.allocate("query", (2, -1))),
    (T, r"shape must consist of integers, got \(2\.0,\)", lambda m, _: m.allocate("query", (2.0,))),
    (T, "dtype must be .* got 'float32'", lambda m, _: m.allocate("query", (2,), "float32")),
    (V, "allocated as query cannot be returned as key", lambda m, b: m.deallocate(b, "key")),
    (V, r"shape \(3,\) is not on loan", lambda m, _: m.deallocate(torch.ones(3), "query")),
    (T, "buffer must be a tensor, got list", lambda m, _: m.deallocate([1.0], "query")),
    (V, "given all or none, got ", lambda m, _: m.preallocate_buffers(2, 64)),
    (V, "seq_len must be a positive .* got 0", lambda m, _: m.preallocate_buffers(2, 0, 8, 16)),
    (V, "lifetime must be one of .* got 'week'", lambda m, _: m.clear_cache(lifetime="week")),
    (V, "buffer_type must be one of", lambda m, _: AttentionBufferManager({"score": m.configs})),
    (T, "scores must be a BufferConfig, got 3", lambda m, _: AttentionBufferManager({"scores": 3})),
    (T, "pool must be a MemoryPool, got int", lambda m, _: AttentionBufferManager(pool=3)),
    (T, "retries must be a bool, got 'no'", lambda m, _: AttentionBufferManager(retries="no")),
    (V, "alignment must be a power of two", lambda *_: config(1.0, "low", "forward", alignment=48)),
    (V, "typical_size_mb must be positive .* got 0", lambda *_: config(0, "low", "forward")),
    (V, "reuse_frequency must be .* got 'often'", lambda *_: config(1.0, "often", "forward")),
    (V, "lifetime must be one of .* got 'epoch'", lambda *_: config(1.0, "low", "epoch")),
]


@pytest.mark.parametrize(("error", "message", "do"), ERRORS, ids=[message for _, message, _ in ERRORS])
def test_errors_are_clear_and_change_nothing(
    manager: AttentionBufferManager, error: type[Exception], message: str, do: Callable[..., Any]
) -> None:
    fill_all_types(manager)
    buffer = manager.allocate("query", SHAPE).fill_(3.0)
    before, address = manager.get_stats(), buffer.data_ptr()
    with pytest.raises(error, match=message):
        do(manager, buffer)
    assert manager.get_stats() == before
    assert buffer.eq(3.0).all()
    manager.deallocate(buffer, "query")
    assert use(manager, "query", SHAPE) == address


def test_eight_threads(manager: AttentionBufferManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # costs half the time
    requests, kinds = 10_000, ["query", "key", "output", "temp"]

    def work(thread: int) -> None:
        held: list[tuple[Tensor, str, float]] = []
        for i in range(requests):
            kind = kinds[(thread + i) % 4]
            buffer = manager.allocate(kind, (8 + (i * (thread + 1)) % 5 * 64,))
            assert kind != "output" or not buffer.any()
            held.append((buffer.fill_(mark := float(thread * requests + i)), kind, mark))
            del buffer
            if len(held) > thread % 3:
                buffer, kind, mark = held.pop(i % len(held))
                assert buffer.eq(mark).all(), "two users of one memory"
                manager.deallocate(buffer, kind)
        for buffer, kind, _ in held:
            manager.deallocate(buffer, kind)

    in_threads(work)
    assert sum(hits_and_misses(manager)) == manager.get_stats()["deallocations"] == 8 * requests
    assert all(number <= manager.capacity(each) for each, number in idle(manager).items())


def test_managers_share_the_memory_and_the_figures_of_a_pool() -> None:
    pool = MemoryPool()
    one, two = AttentionBufferManager(pool=pool), AttentionBufferManager(pool=pool)
    address = use(one, "query", SHAPE)
    buffer = two.allocate("query", SHAPE)
    assert buffer.data_ptr() == address
    one.deallocate(buffer, "query")  # it is the pool's, whoever asked for it
    assert hits_and_misses(one) == hits_and_misses(two) == (1, 1)
    assert one.get_stats()["cached_bytes"] == two.get_stats()["cached_bytes"] == pool.clear()
    with pytest.raises(ValueError, match="not on loan"):
        AttentionBufferManager().deallocate(two.allocate("query", SHAPE), "query")


@pytest.mark.parametrize(
    ("buffer_type", "first", "then", "serves"),
    [
        ("query", 100_000, 98_400, True),  # one bucket
        ("query", 100_000, 60_000, False),
        ("query", 2 * MIB, 2 * MIB - 4, False),  # direct: the very size
        ("temp", 5 * MIB, 3 * MIB, True),  # fragment-aware: up to twice the size
        ("temp", 9 * MIB, 3 * MIB, False),
    ],
)
def test_what_a_strategy_reuses(
    manager: AttentionBufferManager, buffer_type: str, first: int, then: int, serves: bool
) -> None:
    address = use(manager, buffer_type, (first,), torch.uint8)
    assert (use(manager, buffer_type, (then,), torch.uint8) == address) == serves
