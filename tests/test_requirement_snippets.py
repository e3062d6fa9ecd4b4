"""Every python snippet of the requirement documents runs, and its figures move."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dilated_attention_pytorch as package
from dilated_attention_pytorch import (
    DilatedAttention,
    ImprovedDilatedAttention,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
    SparsePatternConfig,
    core,
    factory,
)
from dilated_attention_pytorch.block_sparse_factory import create_block_sparse_attention
from dilated_attention_pytorch.block_sparse_ring_dilated_attention import (
    BlockSparseRingDilatedAttention,
    PersistentPatternCache,
)
from dilated_attention_pytorch.core import BufferType, get_global_memory_pool, get_global_pattern_cache
from dilated_attention_pytorch.core.host_memory import Memory
from dilated_attention_pytorch.reference import block_sparse_attention_reference
from dilated_attention_pytorch.ring_dilated_attention_production import RingDilatedAttentionProduction
from support.snippets import SNIPPETS
from support.tolerances import assert_close

# The classes that the documents' snippets about the ring name.
RINGS: dict[str, type[RingDilatedAttentionV2]] = {
    "001 ring_cache": RingDilatedAttentionV2,
    "001 ring_lightweight": RingDilatedAttentionV2,
    "001 ring_combined": RingDilatedAttentionV3,
    "001 profiling": RingDilatedAttentionV3,
}
# Of document 001: at most so many patterns, 1000 by default, and times of building them.
ENVIRONMENT = {"PATTERN_CACHE_MAX_SIZE": "2000", "PATTERN_CACHE_ENABLE_PROFILING": "1"}
PASSES = "# After running some forward passes"
DIALECT = {
    '"cuda"': '"cpu"',
    "self, ..., ": "self, *, ",  # the class sketches leave out their other parameters
}


@pytest.fixture(autouse=True)
def _alone_on_a_large_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(core.memory_pool, "host_memory", lambda: Memory(8 * 2**30, 16 * 2**30))
    monkeypatch.setattr(factory, "device_memory", lambda device: Memory(8 * 2**30, 16 * 2**30))
    monkeypatch.setattr(get_global_pattern_cache(), "cache_on_gpu", False)
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("dilated_attention_pytorch")
    level = logger.level
    core.reset_global_pattern_cache()
    core.reset_global_memory_pool()
    yield
    logger.setLevel(level)
    monkeypatch.undo()
    core.reset_global_pattern_cache()
    core.reset_global_memory_pool()
    get_global_memory_pool().enable_profiling = False


def names() -> dict[str, Any]:
    """What the snippets take for granted; short sequences under the long segments."""
    tensors = {name: torch.randn(1, 320, 4, 8) for name in ("query", "key", "value")}
    sizes = {"batch_size": 2, "seq_len": 64, "num_heads": 4, "head_dim": 8}
    known = {name: getattr(package, name) for name in package.__all__}
    known |= {name: getattr(core, name) for name in core.__all__}
    known["PersistentPatternCache"] = PersistentPatternCache
    return {"torch": torch, "nn": nn, "self": SimpleNamespace(), **known, **tensors, **sizes}


def run(snippet: str, namespace: dict[str, Any]) -> dict[str, Any]:
    for printed, here in DIALECT.items():
        snippet = snippet.replace(printed, here)
    exec(compile(snippet, "snippet", "exec"), namespace)
    return namespace


def attend(model: nn.Module, namespace: dict[str, Any]) -> Tensor:
    out: Tensor = model(namespace["query"], namespace["key"], namespace["value"])
    return out


@pytest.mark.parametrize("name", SNIPPETS)
def test_runs_as_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    attention = package.ImprovedDilatedAttentionV2([256, 512], [1, 2], enable_memory_pool=True)
    own = {"attention": attention, "model": attention, "manager": attention.buffer_manager}
    run(SNIPPETS[name], {**names(), **own})
    assert len(capsys.readouterr().out.splitlines()) == SNIPPETS[name].count("print(")


def test_no_snippet_is_left_out() -> None:
    named = {name: found[0] for name, text in SNIPPETS.items() if (found := re.findall(r"Ring\w+V\d", text))}
    assert named == {name: cls.__name__ for name, cls in RINGS.items()}
    counts = [sum(name.startswith(f"00{document}") for name in SNIPPETS) for document in range(5)]
    assert counts == [4, 11, 4, 1, 7]


@pytest.mark.parametrize("name", RINGS)
def test_guide_ring(name: str) -> None:
    found = run(SNIPPETS[name].partition(PASSES)[0], names())
    model = found["model"]
    assert type(model) is RINGS[name]
    plain = DilatedAttention(model.spec.segment_lengths, model.spec.dilation_rates)
    for _ in range(2):
        torch.testing.assert_close(attend(model, found), attend(plain, found), rtol=2e-5, atol=2e-5)
    assert model.use_pattern_cache
    assert model._pattern_cache.get_stats()["hits"] > 0
    assert model.enable_memory_pool == (name != "001 ring_cache")
    assert model.lightweight_pool == (name == "001 ring_lightweight")
    if model.enable_memory_pool:
        assert model._memory_pool.get_stats()["reuse_count"] > 0
    if isinstance(model, RingDilatedAttentionV3):
        assert model.cache_on_gpu
        assert get_global_pattern_cache().cache_on_gpu


def test_report_extreme_sequences() -> None:
    long, _, extreme = SNIPPETS["003 configuration"].partition("# For extreme sequences")
    attention = run(long, names())["attention"]
    assert type(attention) is ImprovedDilatedAttention
    assert attention.enable_memory_pool
    found = run(extreme, names())
    attention = found["attention"]
    assert type(attention) is RingDilatedAttentionV2
    assert (attention.ring_size, attention.enable_memory_pool) == (8, True)
    plain = DilatedAttention([32768, 65536, 131072], [1, 2, 4])
    torch.testing.assert_close(attend(attention, found), attend(plain, found), rtol=2e-5, atol=2e-5)


def test_report_lightweight_pool() -> None:
    found = run(SNIPPETS["000 lightweight"], names())
    before = get_global_memory_pool().get_stats()
    for _ in range(2):
        attend(found["attention"], found)
    after = get_global_memory_pool().get_stats()
    assert isinstance(found["attention"], ImprovedDilatedAttention)
    assert all(after[name] > before[name] for name in ("allocation_count", "reuse_count"))


def test_report_buffer_manager_preallocated_and_monitored(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(SNIPPETS["000 buffer_manager"], names())
    attention = found["attention"]
    attention.cleanup_buffers()
    before = attention.get_buffer_stats()
    run(SNIPPETS["000 preallocate"], found)
    ready = attention.get_buffer_stats()
    assert ready["cached_buffers"] - before["cached_buffers"] == 4
    shape = [found[name] for name in ("batch_size", "seq_len", "num_heads", "head_dim")]
    attention.buffer_manager.allocate(BufferType.QUERY, shape)
    assert attention.get_buffer_stats()["cache_hits"] == ready["cache_hits"] + 1
    rates = []
    for _ in range(3):
        attend(attention, found)
        stats = run(SNIPPETS["000 monitor"], found)["stats"]
        assert capsys.readouterr().out == f"Cache hit rate: {stats['cache_hit_rate']:.1%}\n"
        rates.append(stats["cache_hit_rate"])
    assert rates == sorted(rates)
    assert rates[-1] > rates[0]


def test_guide_global_cache(capsys: pytest.CaptureFixture[str]) -> None:
    found = names()
    model = DilatedAttention([256, 512], [1, 2])
    for calls in (1, 4):
        for _ in range(calls):
            attend(model, found)
        run(SNIPPETS["001 global_cache"], found)
        assert capsys.readouterr().out.splitlines() == [
            f"Cache hits: {calls - 1}, misses: 1",
            f"Hit rate: {(calls - 1) / calls:.1%}",
        ]
        emptied = get_global_pattern_cache().get_stats()
        assert emptied["hits"] == emptied["misses"] == emptied["size"] == 0


def test_guide_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_global_pattern_cache().get_stats()["max_size"] == 1000
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    core.reset_global_pattern_cache()
    stats = get_global_pattern_cache().get_stats()
    assert stats["max_size"] == 2000
    assert stats["build_seconds"] == 0.0


@pytest.mark.parametrize("name", ["001 pool", "001 pool_profiled"])
def test_guide_memory_pool(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(SNIPPETS[name], names())
    model = found["model"]
    assert type(model) is {"001 pool": DilatedAttention}.get(name, ImprovedDilatedAttention)
    attend(model, found)
    first = model._memory_pool.get_stats()
    attend(model, found)
    second = run(SNIPPETS["001 global_pool"], found)["stats"]
    assert second["allocation_count"] == 2 * first["allocation_count"] > 0
    assert second["total_allocated"] == first["total_allocated"] > 0
    assert second["peak_allocated"] >= second["total_allocated"]
    assert ("types" in second) == (name == "001 pool_profiled")
    assert capsys.readouterr().out.splitlines() == [
        f"Total allocated: {second['total_allocated'] / 1024 / 1024:.1f} MB",
        f"Peak allocated: {second['peak_allocated'] / 1024 / 1024:.1f} MB",
        f"Allocation count: {second['allocation_count']}",
    ]
    emptied = get_global_memory_pool().get_stats()
    assert emptied["total_allocated"] == emptied["peak_allocated"] == emptied["allocation_count"] == 0


def test_guide_adding_support() -> None:
    sketch = run(SNIPPETS["001 add_cache"], names())["MyAttention"]
    assert sketch()._pattern_cache is None
    assert sketch(use_pattern_cache=True)._pattern_cache is get_global_pattern_cache()
    sketch = run(SNIPPETS["001 add_pool"], names())["MyAttention"]
    assert sketch()._memory_pool is None
    assert sketch(enable_memory_pool=True)._memory_pool is get_global_memory_pool()


@pytest.mark.parametrize("cls", [RingDilatedAttentionV3, DilatedAttention, ImprovedDilatedAttention])
def test_guide_profiling(cls: type[DilatedAttention], capsys: pytest.CaptureFixture[str]) -> None:
    head, passes, tail = SNIPPETS["001 profiling"].partition(PASSES)
    found = run(head, {**names(), "RingDilatedAttentionV3": cls})
    for _ in range(4):
        attend(found["model"], found)
    run(passes + tail, found)
    assert (found["cache_stats"]["hits"], found["cache_stats"]["misses"]) == (3, 1)
    assert "build_seconds" in found["cache_stats"]
    assert "types" in found["pool_stats"]
    assert found["pool_stats"]["reuse_rate"] >= 0.75
    efficiency, reuse = capsys.readouterr().out.splitlines()
    assert efficiency == "Cache efficiency: 75.0%"
    assert reuse == f"Memory reuse rate: {found['pool_stats']['reuse_rate']:.1%}"


@pytest.mark.parametrize("cls", [RingDilatedAttentionV3, DilatedAttention, ImprovedDilatedAttention])
def test_guide_debugging(cls: type[DilatedAttention], capsys: pytest.CaptureFixture[str]) -> None:
    found = {**names(), "model": cls([256, 512], [1, 2], enable_memory_pool=True)}
    for size in (0, 1):
        run(SNIPPETS["001 debugging"], found)
        assert capsys.readouterr().out.splitlines() == [
            "Pattern cache enabled: True",
            "Memory pool enabled: True",
            f"Cache size: {size}",
        ]
        attend(found["model"], found)
    assert logging.getLogger("dilated_attention_pytorch").level == logging.DEBUG


def test_manager_guide_basic_usage() -> None:
    head, returning, tail = SNIPPETS["004 basic"].partition("# Return for reuse")
    found = run(head, names())
    assert found["query"].shape == found["key"].shape == found["value"].shape == (2, 1024, 8, 64)
    address = found["query"].data_ptr()
    assert found["manager"].get_stats()["cache_misses"] == 3
    run(returning + tail, found)
    stats = found["manager"].get_stats()
    assert found["query2"].data_ptr() == address
    assert (stats["cache_hits"], stats["cache_misses"], stats["cache_hit_rate"]) == (1, 3, 0.25)
    assert (stats["deallocations"], stats["cached_buffers"]) == (3, 2)
    assert stats["cached_bytes"] == 2 * found["query2"].nbytes
    assert stats["buffer_types"]["query"]["cache_hits"] == 1


def test_manager_guide_attention_module(capsys: pytest.CaptureFixture[str]) -> None:
    making, passing, tail = SNIPPETS["004 attention"].partition("# Forward pass")
    found = run(making, names())
    attention = found["attention"]
    hits = []
    for _ in range(3):
        run(passing + tail, found)
        stats = attention.get_buffer_stats()
        assert capsys.readouterr().out.splitlines() == [
            f"Cache hits: {stats['cache_hits']}",
            f"Cache hit rate: {stats['cache_hit_rate']:.2%}",
        ]
        hits.append(stats["cache_hits"])
    assert hits[0] < hits[1] < hits[2]
    plain = DilatedAttention([256, 512, 1024], [1, 2, 4])
    assert torch.equal(found["output"], attend(plain, found))


def test_manager_guide_custom_configuration() -> None:
    manager = run(SNIPPETS["004 custom_config"], names())["manager"]
    config = manager.configs[BufferType.SCORES]
    assert (config.typical_size_mb, config.reuse_frequency, config.lifetime) == (16.0, "high", "iteration")
    assert (config.prefer_bucketed, config.prefer_numa, config.zero_init) == (False, True, False)
    assert manager.capacity(BufferType.SCORES) == 10
    for _ in range(2):
        manager.deallocate(manager.allocate(BufferType.SCORES, (8, 64, 64)), BufferType.SCORES)
    assert manager.get_stats()["cache_hit_rate"] == 0.5


@pytest.mark.parametrize("name", ["004 reuse", "004 fast"])
def test_manager_guide_best_practices(name: str) -> None:
    found = run(SNIPPETS[name], names())
    manager = found["manager"]
    assert (manager.enable_reuse, manager.lightweight) == (True, name == "004 fast")
    run(SNIPPETS["004 preallocate"], found)
    assert manager.get_stats()["cached_buffers"] == 4
    query = manager.allocate(BufferType.QUERY, (2, 1024, 8, 64))
    temp = manager.allocate(BufferType.TEMP, (16,))
    assert (manager.get_stats()["cache_hits"], manager.get_stats()["cache_misses"]) == (1, 1)
    manager.deallocate(query, BufferType.QUERY)
    manager.deallocate(temp, BufferType.TEMP)
    clear_all, _, clear_type = SNIPPETS["004 clear"].strip().rpartition("\n")
    run(clear_type, found)
    assert manager.get_stats()["cached_buffers"] == 4
    run(clear_all, found)
    assert manager.get_stats()["cached_bytes"] == 0


@pytest.mark.parametrize(
    ("kind", "ratio", "block_size", "branches", "n"),
    [
        ("base", 0.01, 128, ((2048, 1),), 1500),
        ("ring", 0.02, 256, ((65536, 1), (131072, 2)), 2000),
        ("maximum length", 0.01, 128, ((2048, 1),), 1000),
    ],
)
def test_sparse_modules_attend_to_what_their_configs_ask(
    kind: str, ratio: float, block_size: int, branches: tuple[tuple[int, int], ...], n: int
) -> None:
    module: Any
    if kind == "base":
        module = create_block_sparse_attention("base", **eval(SNIPPETS["002 base_configuration"]))
    elif kind == "ring":
        module = BlockSparseRingDilatedAttention(**eval(SNIPPETS["002 ring_configuration"], names()))
    else:
        module = run(SNIPPETS["002 maximum_length"], {})["model"]
    assert module.sparse_config == SparsePatternConfig("dilated_sparse", ratio, block_size)
    assert module.spec.branches == branches
    q, k, v = (torch.randn(1, n, 2, 8) for _ in range(3))
    for length in (n, 131072):
        pattern = module.get_pattern(length, 2)
        assert abs(pattern.density - ratio) * pattern.rows <= 1
    assert pattern.nbytes < 2**17
    mask = module.get_pattern(n, 2).to_dense()
    expected = block_sparse_attention_reference(*(x.double() for x in (q, k, v)), mask)
    assert_close(module(q, k, v), expected, torch.float32)


def test_sparse_pools() -> None:
    module = run(SNIPPETS["002 pools"], names())["self"]
    assert module.pattern_cache.get_stats()["max_size"] == 100
    pool = module.memory_pool
    for buffer in [pool.allocate((64,)) for _ in range(20)]:
        pool.deallocate(buffer)
    assert pool.get_stats()["cached_buffers"] == 10
    assert RingDilatedAttentionProduction().memory_pool.pool_size == 10
