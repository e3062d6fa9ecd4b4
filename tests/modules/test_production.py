"""`RingDilatedAttentionProduction`: each field of its configuration does what it says."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import DilatedAttention, RingAttentionConfig, RingDilatedAttentionProduction
from dilated_attention_pytorch.core import get_global_memory_pool, get_global_pattern_cache
from support.weighed import RATES, SEGMENTS, qkv, run

pytestmark = pytest.mark.usefixtures("alone_on_a_large_machine")


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
            results.append(run(each, qkv()))
        flops.append(counter.get_total_flops())
    for actual, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(actual, expected)
    assert flops[1] == flops[0] * 9 // 7 > 0  # two products forward, five backward
    assert saved_bytes(plain, qkv()) > 0
    assert saved_bytes(module, qkv()) == 0
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(*qkv())
    assert counter.get_total_flops() == flops[0] * 2 // 7


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_mixed_precision(low: torch.dtype) -> None:
    module = make(mixed_precision=True if low == torch.bfloat16 else low)
    tensors = qkv()
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
    exact = qkv(dtype=torch.float64)
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
            run(module, qkv(n, torch.bfloat16))
        kept = module.get_memory_stats()["memory_pool"]["cached_buffers"]
        assert kept == size if size in (0, 2) else 2 < kept <= (size or 100)
    assert make(memory_pool_size=2).memory_pool is make(memory_pool_size=2).memory_pool
    with pytest.raises(AttributeError):
        module.memory_pool = get_global_memory_pool()  # type: ignore[misc]


def test_the_pool_is_reused_and_cleared() -> None:
    module = make()
    module.clear_caches()
    first = run(module, qkv())
    before = module.get_memory_stats()
    second = run(module, qkv())
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
        make()(*qkv())
        assert not caplog.records
        make(log_memory_usage=True)(*qkv())
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
        assert torch.equal(compiled(*qkv()), module(*qkv()))
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
    expected = run(module, qkv())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.config == module.config
        assert twin.memory_pool is module.memory_pool
        assert all(map(torch.equal, run(twin, qkv()), expected))


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
        module([1.0], *qkv()[1:])
