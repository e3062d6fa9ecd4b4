"""Ring modules in one process: the numbers of `DilatedAttention` whatever the size, and options that act.

`RingDilatedAttentionProduction`: each field of its configuration does what it says.
"""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import (
    DilatedAttention,
    MultiheadDilatedAttention,
    RingAttentionConfig,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
    RingMultiheadDilatedAttention,
)
from dilated_attention_pytorch.core import get_global_memory_pool, get_global_pattern_cache
from dilated_attention_pytorch.core.attention_buffer_manager import find_buffer_manager
from dilated_attention_pytorch.modules import ring as ring_module
from dilated_attention_pytorch.ring import plan_ring
from support import weighed
from support.weighed import RATES, SEGMENTS, run

BRANCHES: dict[str, Any] = {"segment_lengths": SEGMENTS, "dilation_rates": RATES}
CAUSAL = torch.ones(37, 37, dtype=torch.bool).triu(1)
CLASSES = (RingDilatedAttentionV2, RingDilatedAttentionV3, RingDilatedAttentionProduction)


@pytest.fixture(autouse=True)
def _shared_settings_stay(alone_on_a_large_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_global_pattern_cache(), "cache_on_gpu", False)


def qkv(n: int = 37) -> list[Tensor]:
    return weighed.qkv(n, torch.float64)


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ring_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("cls", CLASSES)
def test_equals_plain_attention_at_any_size(cls: type[RingDilatedAttentionV2], ring_size: int) -> None:
    plain, module = DilatedAttention(SEGMENTS, RATES), cls(**BRANCHES, ring_size=ring_size)
    assert (module.ring_size, module.is_sharded) == (ring_size, False)
    for n, is_causal, masked in itertools.product((1, 5, 37, 63), (False, True), (False, True)):
        mask = torch.rand(2, n) > 0.3 if masked else None
        options = {"is_causal": is_causal, "attention_mask": mask}
        assert_same(run(module, qkv(n), **options), run(plain, qkv(n), **options))


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "options",
    [
        {"softmax_scale": 0.3},
        {"head_mixing": "grouped", "head_offsets": "blocked"},
        {"tail": "phantom"},
        {"detach_mixing": True},
        {"workspace_bytes": 2000, "kernel": "eager", "use_pattern_cache": False},
        {"lightweight_pool": True, "enable_memory_pool": True, "enable_profiling": True},
    ],
)
def test_takes_the_options_of_plain_attention(
    cls: type[RingDilatedAttentionV2], options: dict[str, Any]
) -> None:
    plain = DilatedAttention(SEGMENTS, RATES, **options)
    assert_same(run(cls(**BRANCHES, ring_size=3, **options), qkv()), run(plain, qkv()))


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
def test_dropout_in_training_only(cls: type[RingDilatedAttentionV2], name: str) -> None:
    module, tensors = cls(**BRANCHES, **{name: 0.5}), qkv()
    kept = DilatedAttention(SEGMENTS, RATES)(*tensors)
    assert not torch.allclose(module(*tensors), kept)
    assert_same([module.eval()(*tensors)], [kept])


def compiled(module: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("cls", CLASSES)
def test_copies_pickles_and_compiles_to_one_graph(cls: type[RingDilatedAttentionV2]) -> None:
    module = cls(**BRANCHES, ring_size=4)
    expected = run(module, qkv())
    for twin in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module)
        assert_same(run(twin, qkv()), expected)
    assert_same(run(compiled(module), qkv()), expected)


@pytest.fixture
def lone_group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("cls", CLASSES)
def test_a_group_of_one_is_one_process(cls: type[RingDilatedAttentionV2], lone_group: Any) -> None:
    module = cls(**BRANCHES, group=lone_group, ring_size=2)
    assert (module.ring_size, module.is_sharded) == (2, False)
    assert cls(**BRANCHES).ring_size == 1
    assert_same(run(module, qkv()), run(DilatedAttention(SEGMENTS, RATES), qkv()))
    assert copy.deepcopy(module).ring.group is lone_group
    with pytest.raises((TypeError, RuntimeError)):
        pickle.dumps(module)
    assert_same(run(compiled(module), qkv()), run(module, qkv()))


class Calls(list[dict[str, Any]]):
    """Stands for `attend_ring` and keeps what it was called with."""

    def __call__(self, tensors: Any, make_spec: Any, settings: Any) -> Tensor:
        self.append(tensors._asdict() | vars(make_spec()) | vars(settings.execution) | settings._asdict())
        return tensors.q * 2


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(ring_module, "group_size", lambda group: 2)
    monkeypatch.setattr(ring_module, "attend_ring", calls)
    return calls


@pytest.mark.parametrize("cls", CLASSES)
def test_several_processes_meet_in_the_ring(cls: type[RingDilatedAttentionV2], two_processes: Calls) -> None:
    query, key, value = qkv()
    mask = torch.ones(2, 37, dtype=torch.bool)
    for ring_size, steps in ((None, 1), (2, 1), (8, 4)):
        options = {"strategy": "ulysses", "timeout": 3.5, "softmax_scale": 0.5, "dropout": 0.1}
        module = cls(**BRANCHES, ring_size=ring_size, **options)
        assert (module.ring_size, module.is_sharded) == (ring_size or 2, True)
        assert torch.equal(module(query, key, value, True, mask), 2 * query)
        how = {"steps": steps, "strategy": "ulysses", "timeout": 3.5, "group": None}
        how |= {"is_causal": True, "scale": 0.5, "dropout_p": 0.1, "memory": module._memory}
        call = two_processes.pop()
        assert call["key_mask"] is mask
        assert {name: call[name] for name in how} == how
    for odd in (1, 3):
        with pytest.raises(ValueError, match=f"must divide ring_size, got 2 processes and ring_size={odd}"):
            cls(**BRANCHES, ring_size=odd)


def test_a_group_that_comes_later_is_checked_in_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module = RingDilatedAttentionV2(SEGMENTS, RATES, ring_size=3)
    monkeypatch.setattr(ring_module, "group_size", lambda group: 2)
    with pytest.raises(ValueError, match="must divide ring_size, got 2 processes and ring_size=3"):
        module(*qkv())


@pytest.mark.parametrize("asked", [{"attn_mask": torch.ones(37, 37).triu(1) > 0}, {"need_weights": True}])
def test_multihead_on_parts_refuses(asked: dict[str, Any], two_processes: Calls) -> None:
    module = RingMultiheadDilatedAttention(48, 6, SEGMENTS, RATES, num_kv_heads=3, ring_size=4)
    with pytest.raises(ValueError, match=rf"whole sequence in one process .* got {next(iter(asked))} with"):
        module(torch.randn(2, 37, 48), **asked)


def test_multihead_on_parts(two_processes: Calls) -> None:
    module = RingMultiheadDilatedAttention(48, 6, SEGMENTS, RATES, num_kv_heads=3, ring_size=4)
    x = torch.randn(2, 37, 48)
    ignored = torch.zeros(2, 37, dtype=torch.bool)
    ignored[:, 30:] = True
    out, weights = module(x, key_padding_mask=ignored, is_causal=True)
    assert (out.shape, weights) == (x.shape, None)
    call = two_processes.pop()
    assert torch.equal(call["key_mask"], ~ignored)
    assert (call["is_causal"], call["steps"]) == (True, 2)


def test_multihead_in_one_process() -> None:
    torch.manual_seed(0)
    module = RingMultiheadDilatedAttention(48, 6, SEGMENTS, RATES, ring_size=4, dtype=torch.float64)
    assert type(module.attention) is RingDilatedAttentionV2
    assert module.fused_qkv
    plain = MultiheadDilatedAttention(48, 6, SEGMENTS, RATES, dtype=torch.float64)
    plain.attention = DilatedAttention(SEGMENTS, RATES)
    plain.inner_attn_ln, plain.out_proj = module.inner_attn_ln, module.out_proj
    for name, weight, bias in zip("qkv", *module._qkv_parameters(), strict=True):
        plain.get_submodule(f"{name}_proj").load_state_dict({"weight": weight, "bias": bias})
    x = torch.randn(2, 37, 48, dtype=torch.float64)
    assert_same([module(x, attn_mask=CAUSAL)[0]], [plain(x, is_causal=True)[0]])


def test_memory_estimate() -> None:
    module = RingDilatedAttentionV2((2048, 8192), (1, 4), workspace_bytes=2**20)
    sizes: dict[str, Any] = {"batch_size": 2, "num_heads": 4, "head_dim": 32, "dtype": torch.bfloat16}
    alone = module.get_memory_estimate(65536, **sizes)
    assert alone == {
        "inputs": 3 * 2 * 65536 * 4 * 32 * 2,
        "outputs": 2 * 65536 * 4 * (32 * 2 + 4),
        "workspace": 2**20,
        "communication": 0,
        "total": sum(alone.values()) - alone["total"],
    }
    for processes in (2, 8, 64):
        each = module.get_memory_estimate(65536, **sizes, num_processes=processes)
        assert each["inputs"] * processes == alone["inputs"]
        assert each["outputs"] * processes == alone["outputs"]
        settings = {**sizes, "num_ranks": processes, "workspace_bytes": 2**20}
        plans = [plan_ring((2048, 8192), (1, 4), 65536, strategy=x, **settings) for x in ("ring", "ulysses")]
        assert each["total"] == max(plan.memory_bytes(rank) for plan in plans for rank in range(processes))
    assert module.get_memory_estimate(4096)["inputs"] == 3 * 4096 * 8 * 64 * 4
    with pytest.raises(ValueError, match="n must be a positive integer, got 0"):
        module.get_memory_estimate(0)


def test_memory_estimate_of_the_group(two_processes: Calls) -> None:
    estimate = RingDilatedAttentionV2(SEGMENTS, RATES, strategy="ring").get_memory_estimate
    assert estimate(1000) == estimate(1000, num_processes=2)
    assert estimate(1000)["communication"] > 0


def test_representation() -> None:
    branches = "segment_lengths=(8, 14, 40), dilation_rates=(1, 2, 5)"
    v2 = RingDilatedAttentionV2(SEGMENTS, RATES, ring_size=8, strategy="ring", timeout=9)
    assert repr(v2) == f"RingDilatedAttentionV2({branches}, ring_size=8, timeout=9, strategy='ring')"
    production = RingDilatedAttentionProduction(**BRANCHES, memory_pool_size=3, mixed_precision=True)
    options = "memory_pool_size=3, mixed_precision=True"
    assert repr(production) == f"RingDilatedAttentionProduction({branches}, {options})"


def test_cache_on_gpu_keeps_device_copies() -> None:
    cache = get_global_pattern_cache()
    assert not RingDilatedAttentionV3(SEGMENTS, RATES, cache_on_gpu=False).cache_on_gpu
    assert not cache.cache_on_gpu
    module = RingDilatedAttentionV3(SEGMENTS, RATES)
    assert module.cache_on_gpu
    copied = [cache.get_or_build("x", lambda: torch.ones(3), device="meta") for _ in range(2)]
    assert copied[0] is copied[1]
    assert cache.get_stats()["device_bytes"] > 0
    cache.cache_on_gpu = False
    assert pickle.loads(pickle.dumps(module)).cache_on_gpu
    assert cache.cache_on_gpu
    assert not RingDilatedAttentionV3(SEGMENTS, RATES, use_pattern_cache=False).cache_on_gpu


def make(**options: Any) -> RingDilatedAttentionProduction:
    return RingDilatedAttentionProduction(RingAttentionConfig(SEGMENTS, RATES, **options))


def saved_bytes(module: Any, tensors: list[Tensor]) -> int:
    """Bytes that a forward call keeps for its backward pass beside the inputs."""
    kept: dict[int, int] = {}
    given = {x.untyped_storage().data_ptr() for x in tensors}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in given:
            kept[x.untyped_storage().data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        module(*tensors)
    return sum(kept.values())


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradient_checkpointing_attends_twice_and_keeps_nothing(dropout: float) -> None:
    plain, module = make(dropout=dropout), make(dropout=dropout, use_gradient_checkpointing=True)
    results, flops = [], []
    for each in (plain, module):
        torch.manual_seed(4)
        with FlopCounterMode(display=False) as counter:
            results.append(run(each, weighed.qkv()))
        flops.append(counter.get_total_flops())
    for actual, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(actual, expected)
    assert flops[1] == flops[0] * 9 // 7 > 0  # two products forward, five backward
    assert saved_bytes(plain, weighed.qkv()) > 0
    assert saved_bytes(module, weighed.qkv()) == 0
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(*weighed.qkv())
    assert counter.get_total_flops() == flops[0] * 2 // 7


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_mixed_precision(low: torch.dtype) -> None:
    module = make(mixed_precision=True if low == torch.bfloat16 else low)
    tensors = weighed.qkv()
    cast = [x.detach().to(low).requires_grad_() for x in tensors]
    out = module(*tensors)
    expected = DilatedAttention(SEGMENTS, RATES)(*cast)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected.float())
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    for actual, wanted in zip(gradients, torch.autograd.grad(expected.sum(), cast), strict=True):
        assert torch.equal(actual, wanted.float())
    with torch.autocast("cpu", torch.float16 if low == torch.bfloat16 else torch.bfloat16):
        assert torch.equal(module(*tensors), out)
    exact = weighed.qkv(dtype=torch.float64)
    assert torch.equal(module(*exact), DilatedAttention(SEGMENTS, RATES)(*exact))
    assert make()(*tensors).dtype == torch.float32
    assert not torch.equal(make()(*tensors), out)


def test_memory_pool_size_bounds_what_is_kept() -> None:
    for size in (0, 2, 10, None):
        module = make(memory_pool_size=size)
        module.clear_caches()
        assert module.memory_pool.pool_size == size
        assert module._memory_pool is module.memory_pool is not get_global_memory_pool()
        for n in (37, 64):
            run(module, weighed.qkv(n, torch.bfloat16))
        kept = module.get_memory_stats()["memory_pool"]["cached_buffers"]
        assert kept == size if size in (0, 2) else 2 < kept <= (size or 100)
    assert make(memory_pool_size=2).memory_pool is make(memory_pool_size=2).memory_pool
    with pytest.raises(AttributeError):
        module.memory_pool = get_global_memory_pool()  # type: ignore[misc]


def test_the_pool_is_reused_and_cleared() -> None:
    module = make()
    module.clear_caches()
    first = run(module, weighed.qkv())
    before = module.get_memory_stats()
    second = run(module, weighed.qkv())
    after = module.get_memory_stats()
    assert all(map(torch.equal, first, second))
    assert after["memory_pool"]["reuse_count"] > before["memory_pool"]["reuse_count"]
    assert after["memory_pool"]["total_allocated"] == before["memory_pool"]["total_allocated"] > 0
    assert after["pattern_cache"]["hits"] > before["pattern_cache"]["hits"]
    assert sum(nbytes for _, nbytes in after["buffers"].values()) == after["memory_pool"]["cached_bytes"]
    module.clear_caches()
    cleared = module.get_memory_stats()
    assert cleared["memory_pool"]["cached_bytes"] == 0
    assert (cleared["pattern_cache"]["size"], cleared["buffers"]) == (0, {})
    assert len(get_global_pattern_cache()) == 0
    uncached = RingDilatedAttentionProduction(use_pattern_cache=False)
    assert uncached.get_memory_stats()["pattern_cache"] == {}
    uncached.clear_caches()


def test_memory_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dilated_attention_pytorch"):
        make()(*weighed.qkv())
        assert not caplog.records
        make(log_memory_usage=True)(*weighed.qkv())
    (record,) = caplog.records
    text = record.getMessage()
    assert (record.name, record.levelname) == ("dilated_attention_pytorch", "INFO")
    assert text.startswith("attention over (2, 37, 6, 8) torch.float32 on cpu: the pool holds ")
    assert text.endswith(" MiB available")


def test_a_logging_module_compiles_with_a_break(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    module = make(log_memory_usage=True)
    compiled = torch.compile(module, backend="aot_eager")
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="dilated_attention_pytorch"):
        assert torch.equal(compiled(*weighed.qkv()), module(*weighed.qkv()))
    assert len([each for each in caplog.records if each.name == "dilated_attention_pytorch"]) == 2


def test_everything_at_once_copies_and_pickles() -> None:
    module = make(
        ring_size=3,
        use_gradient_checkpointing=True,
        memory_pool_size=4,
        enable_error_recovery=False,
        mixed_precision=True,
        log_memory_usage=True,
    )
    expected = run(module, weighed.qkv())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.config == module.config
        assert twin.memory_pool is module.memory_pool
        assert all(map(torch.equal, run(twin, weighed.qkv()), expected))


def test_fields_by_name_or_as_a_config() -> None:
    config = RingAttentionConfig([8, 14], [1, 2], dropout=0.1, ring_size=4, strategy="ring", timeout=5)
    module = RingDilatedAttentionProduction(config, softmax_scale=0.5)
    assert module.config is config
    assert hash(config) == hash(RingAttentionConfig((8, 14), (1, 2), 0.1, 4, 5, "ring"))
    assert (module.spec.dropout_p, module.spec.scale, module.ring_size) == (0.1, 0.5, 4)
    assert (module.ring.timeout, module.strategy) == (5, "ring")
    by_name = RingDilatedAttentionProduction(
        segment_lengths=[8, 14], dilation_rates=[1, 2], dropout=0.1, ring_size=4, strategy="ring", timeout=5
    )
    assert by_name.config == config
    assert RingDilatedAttentionProduction().config == RingAttentionConfig()
    assert module.enable_memory_pool


def test_inputs_that_are_no_tensors_are_rejected() -> None:
    module = make(mixed_precision=True)
    with pytest.raises(TypeError, match="q must be a tensor, got list"):
        module([1.0], *weighed.qkv()[1:])


def test_error_recovery_is_the_retry_of_its_memory() -> None:
    """`test_out_of_memory` runs both under a real limit."""
    for recovers in (True, False):
        module = make(enable_error_recovery=recovers)
        manager = find_buffer_manager(module._memory)
        assert manager is not None
        assert manager.retries is recovers
