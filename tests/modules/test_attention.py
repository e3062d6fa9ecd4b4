"""`DilatedAttention`, its presets and memory options: bit for bit what the function computes, and how much
they reuse."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch import (
    DilatedAttention,
    ImprovedDilatedAttention,
    ImprovedDilatedAttentionV2,
    dilated_attention,
)
from dilated_attention_pytorch.core import (
    AttentionBufferManager,
    get_global_memory_pool,
    get_global_pattern_cache,
    memory_pool,
    reset_global_memory_pool,
    reset_global_pattern_cache,
)
from dilated_attention_pytorch.modules import MultiheadModule
from support.threads import in_threads
from support.weighed import RATES, SEGMENTS, qkv, run

N = 37
pytestmark = pytest.mark.usefixtures("alone_on_a_large_machine")
Options = dict[str, Any]
Module = type[DilatedAttention]
V2 = ImprovedDilatedAttentionV2
Made = tuple[Module, Options]


def every_combination() -> Iterator[Made]:
    """All memory options that may be combined, of all three classes."""
    pools = ({}, {"enable_memory_pool": True}, {"enable_memory_pool": True, "lightweight_pool": True})
    managers: tuple[Options, ...] = (
        {},
        {"enable_buffer_reuse": False},
        {"enable_preallocation": True},
        {"buffer_manager": "own"},
    )
    for pool, cached, profiled in itertools.product(pools, (True, False), (True, False)):
        options = {**pool, "use_pattern_cache": cached, "enable_profiling": profiled}
        if cached or pool or not profiled:
            yield DilatedAttention, options
            yield ImprovedDilatedAttention, options
            yield V2, {**options, "enable_buffer_manager": False}
        for manager in managers:
            yield V2, {**options, **manager}
        if not pool:
            yield V2, {**options, "lightweight_pool": True}


CHOSEN: list[Made] = [
    (DilatedAttention, {"enable_memory_pool": True}),
    (
        ImprovedDilatedAttention,
        {"enable_memory_pool": True, "lightweight_pool": True, "enable_profiling": True},
    ),
    (V2, {}),
    (V2, {"enable_memory_pool": True, "use_pattern_cache": False}),
    (V2, {"buffer_manager": "own"}),
]


def name_of(made: Made) -> str:
    cls, options = made
    return "-".join([cls.__name__, *(f"{name}={value}" for name, value in options.items())])


def make(made: Made, **more: Any) -> DilatedAttention:
    cls, options = made
    if options.get("buffer_manager") == "own":
        pool = get_global_memory_pool() if options.get("enable_memory_pool") else None
        manager = AttentionBufferManager(lightweight=options.get("lightweight_pool", False), pool=pool)
        options = {**options, "buffer_manager": manager}
    return cls(SEGMENTS, RATES, **{**options, **more})


each_chosen = pytest.mark.parametrize("made", CHOSEN, ids=name_of)
in_two_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@lru_cache(maxsize=1)
def cases() -> list[tuple[list[Tensor], Options, list[Tensor]]]:
    """Inputs, options and what plain `DilatedAttention` makes of them."""
    plain, found = DilatedAttention(SEGMENTS, RATES), []
    mask = torch.rand(2, N, generator=torch.Generator().manual_seed(1)) > 0.3
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for is_causal, key_mask in ((dtype == torch.bfloat16, None), (dtype != torch.bfloat16, mask)):
            tensors, options = qkv(dtype=dtype), {"is_causal": is_causal, "attention_mask": key_mask}
            found.append((tensors, options, run(plain, tensors, **options)))
    return found


@pytest.mark.parametrize("made", list(every_combination()), ids=name_of)
def test_bit_equal_with_every_memory_option(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = cases()
    reset_global_pattern_cache()
    module = make(made)
    kept = [run(module, tensors, **options) for tensors, options, _ in expected]  # misses the caches
    monkeypatch.setattr(memory_pool, "RESULT_BYTES", 1)  # results come from the pool, however small
    kept += [run(module, tensors, **options) for tensors, options, _ in expected]  # hits them
    for got, (_, _, want) in zip(kept, expected * 2, strict=True):
        assert_equal(got, want)
    stats = get_global_pattern_cache().get_stats()
    assert (stats["hits"] > 0) == (stats["misses"] > 0) == module.use_pattern_cache


@each_chosen
def test_bit_equal_in_small_tiles_and_with_dropout(made: Made) -> None:
    for options in ({"workspace_bytes": 2000}, {"dropout": 0.3}, {"detach_mixing": True, "tail": "phantom"}):
        plain, module = DilatedAttention(SEGMENTS, RATES, **options), make(made, **options)
        for _ in range(2):
            torch.manual_seed(4)
            expected = run(plain, qkv(dtype=torch.bfloat16))
            torch.manual_seed(4)
            assert_equal(run(module, qkv(dtype=torch.bfloat16)), expected)


@each_chosen
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_accumulate_over_micro_batches(made: Made, autocast: bool) -> None:
    gradients = []
    for attention in (DilatedAttention(SEGMENTS, RATES), make(made)):
        torch.manual_seed(3)
        block, rng = MultiheadModule(24, 3, attention), torch.Generator().manual_seed(5)
        inputs = [torch.randn(2, n, 24, generator=rng) for n in (37, 64, 37, 5)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outs = [block(x, is_causal=True)[0] for x in inputs]
        assert {out.dtype for out in outs} == {torch.bfloat16 if autocast else torch.float32}
        for out in outs[::-1]:  # all graphs are alive at once
            out.float().square().mean().backward()
        gradients.append([x.grad for x in block.parameters() if x.grad is not None])
    assert {gradient.dtype for gradient in gradients[1]} == {torch.float32}
    assert_equal(gradients[1], gradients[0])


@each_chosen
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(made: Made, reentrant: bool, dropout: float) -> None:
    module = make(made, dropout=dropout)
    torch.manual_seed(2)
    expected = run(module, qkv())
    torch.manual_seed(2)
    checkpointed = lambda *tensors: checkpoint(module, *tensors, use_reentrant=reentrant)  # noqa: E731
    assert_equal(run(checkpointed, qkv()), expected)


@each_chosen
def test_copies_and_pickles(made: Made) -> None:
    module = make(made, tail="phantom")
    expected = run(module, qkv())
    twins = [copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))]
    for twin in twins:
        assert_equal(run(twin, qkv()), expected)
        assert repr(twin) == repr(module)
    if isinstance(module, V2):
        managers = [twin.buffer_manager for twin in twins]
        assert managers[0] is managers[1] is module.buffer_manager
        assert (managers[2] is module.buffer_manager) == ("buffer_manager" not in made[1])
        assert managers[2].get_stats()["allocations"] > 0


def test_pickles_in_a_fresh_process(tmp_path: Path) -> None:
    modules = [make(made) for made in CHOSEN]
    expected = [run(module, qkv()) for module in modules]
    (tmp_path / "modules").write_bytes(pickle.dumps(modules))
    torch.save((qkv(), expected), tmp_path / "tensors")
    script = """
import pickle, sys, torch
torch.set_num_threads(1)
modules = pickle.load(open("modules", "rb"))
tensors, expected = torch.load("tensors")
for module, (want, *_) in zip(modules, expected, strict=True):
    for _ in range(2):
        assert torch.equal(module(*tensors), want)
assert modules[-1].get_buffer_stats()["cache_hits"] > 0
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120, cwd=tmp_path).returncode == 0


@each_chosen
def test_twelve_compiled_layers_share_one_graph(made: Made) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    shared = make(made)
    layers = [shared] * 2 if "buffer_manager" in made[1] else [make(made) for _ in range(12)]
    expected = run(layers[0], qkv())
    for layer in layers:
        assert_equal(run(torch.compile(layer, fullgraph=True, backend=counter), qkv()), expected)
    assert counter.frame_count == 1


def test_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    module = V2(SEGMENTS, RATES, enable_memory_pool=True)
    compiled = torch.compile(module, fullgraph=True, backend="inductor")
    for _ in range(2):
        assert_equal(run(compiled, qkv()), run(module, qkv()))


@each_chosen
def test_export_round_trips(made: Made) -> None:
    module = make(made).eval()
    shapes = {name: {1: torch.export.Dim("n", min=2, max=1 << 20)} for name in ("query", "key", "value")}
    program = torch.export.export(module, tuple(x.detach() for x in qkv()), dynamic_shapes=shapes)
    del module
    gc.collect()  # with its buffer manager
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for length in (N, 90):
        tensors = [x.detach() for x in qkv(length)]
        assert torch.equal(loaded(*tensors), DilatedAttention(SEGMENTS, RATES)(*tensors))


@each_chosen
def test_eight_threads_at_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "RESULT_BYTES", 1)
    plain, module = DilatedAttention(SEGMENTS, RATES), make(made)
    expected = [run(plain, qkv(20 + thread, seed=thread)) for thread in range(8)]

    def work(thread: int) -> None:
        for _ in range(8):
            assert_equal(run(module, qkv(20 + thread, seed=thread)), expected[thread])

    in_threads(work)


@each_chosen
@in_two_dtypes
def test_many_layers_hold_the_scratch_of_one(made: Made, dtype: torch.dtype) -> None:
    if "buffer_manager" in made[1]:
        made = (made[0], {"buffer_manager": AttentionBufferManager()})
    layers = [make(made) for _ in range(12)]
    pool: Any = layers[0]._memory_pool
    if isinstance(layers[0], V2):
        layers[0].cleanup_buffers()
        pool = layers[0].buffer_manager.pool
    x = torch.randn(2, 3 * N, 6, 8, dtype=dtype, requires_grad=True)
    layers[0](x, x, x).sum().backward()
    one = pool.get_stats()["total_allocated"]
    for layer in layers:
        x = layer(x, x, x)
    x.sum().backward()
    assert pool.get_stats()["total_allocated"] == one > 0


def hit_rates(module: DilatedAttention, train: Callable[[], Any]) -> tuple[float, float]:
    """In training, of the pattern cache and of the pool or V2's manager."""

    def counts() -> list[int]:
        plans, pool = get_global_pattern_cache().get_stats(), get_global_memory_pool().get_stats()
        reused, requests = pool["reuse_count"], pool["allocation_count"]
        if isinstance(module, V2):
            own = module.get_buffer_stats()
            reused, requests = own["cache_hits"], own["cache_hits"] + own["cache_misses"]
        return [plans["hits"], plans["hits"] + plans["misses"], reused, requests]

    before = counts()
    train()
    hits, planned, reused, requests = (now - then for now, then in zip(counts(), before, strict=True))
    return hits / planned, reused / requests


@each_chosen
@in_two_dtypes
def test_reuse_in_training_at_a_fixed_length(made: Made, dtype: torch.dtype) -> None:
    module = make(made, use_pattern_cache=True)
    run(module, qkv(128, dtype), is_causal=True)
    steps = [qkv(128, dtype, seed=step) for step in range(20)]
    planned, reused = hit_rates(module, lambda: [run(module, x, is_causal=True) for x in steps])
    assert planned >= 0.95
    assert reused >= 0.9


@pytest.mark.parametrize("cls", [DilatedAttention, V2])
def test_reuse_in_training_at_varying_lengths(cls: Module) -> None:
    """Batches of 1 to 4, lengths of 256 to 2048: 64 shapes as the report had them, with less work in each."""
    memory = {"buffer_manager": AttentionBufferManager()} if cls is V2 else {"enable_memory_pool": True}
    module = cls((32, 64, 128), (1, 2, 4), kernel="stock", **memory)  # which packs queries by themselves
    lengths = torch.linspace(256, 2048, 16).int().tolist()
    shapes = [(b, n, 4, 2) for b in range(1, 5) for n in lengths]
    assert len(set(shapes)) == 64

    def epoch() -> None:
        for i in torch.randperm(64).tolist():
            run(module, [torch.randn(shapes[i], requires_grad=True) for _ in range(3)], is_causal=True)

    epoch()
    assert min(hit_rates(module, epoch)) >= 0.9
    if isinstance(module, V2):
        assert module.get_buffer_stats()["buffer_types"]["query"]["cache_hits"] > 0


@each_chosen
def test_backward_after_the_module_is_gone(made: Made) -> None:
    tensors = qkv()
    expected = run(DilatedAttention(SEGMENTS, RATES), tensors)

    def forgotten(*tensors: Tensor) -> Tensor:
        out = make(made)(*tensors)
        gc.collect()
        reset_global_memory_pool()
        return out

    assert_equal(run(forgotten, tensors), expected)


@pytest.mark.parametrize("cls", [DilatedAttention, ImprovedDilatedAttention, V2])
def test_documented_names(cls: Module) -> None:
    off = cls(SEGMENTS, RATES, use_pattern_cache=False)
    assert off.use_pattern_cache is off.enable_memory_pool is False
    assert off._pattern_cache is off._memory_pool is None
    on = cls(SEGMENTS, RATES, enable_memory_pool=True)
    assert on.use_pattern_cache is on.enable_memory_pool is True
    assert on._pattern_cache is get_global_pattern_cache()
    assert on._memory_pool is get_global_memory_pool()
    run(on, qkv())
    assert len(on._pattern_cache._cache) == on._pattern_cache.get_stats()["size"] > 0
    assert on._memory_pool.get_stats()["allocation_count"] > 0
    assert cls().spec.segment_lengths == (2048, 4096, 8192)
    assert not list(on.parameters())
    assert not on.state_dict()
    shown = repr(cls(SEGMENTS, RATES, tail="phantom"))
    assert shown == f"{cls.__name__}(segment_lengths=(8, 14, 40), dilation_rates=(1, 2, 5), tail='phantom')"


def test_profiling_turns_on_the_figures() -> None:
    module = V2(SEGMENTS, RATES, enable_memory_pool=True, enable_profiling=True, kernel="stock")
    run(module, qkv(dtype=torch.bfloat16))
    assert module._pattern_cache.get_stats()["build_seconds"] > 0
    assert module._memory_pool.get_stats()["types"]["query"]["allocations"] > 0
    assert "seconds" in module.get_buffer_stats()["buffer_types"]["query"]
    own = AttentionBufferManager()
    alone = V2(SEGMENTS, RATES, enable_profiling=True, use_pattern_cache=False, buffer_manager=own)
    assert alone.buffer_manager is own
    assert own.enable_profiling


def test_buffer_manager_of_the_second_version() -> None:
    off = V2(SEGMENTS, RATES, enable_buffer_manager=False)
    assert off.buffer_manager is None
    assert off.get_buffer_stats() == {}
    off.cleanup_buffers()
    one, two = (V2(SEGMENTS, RATES) for _ in range(2))
    assert one.buffer_manager is two.buffer_manager
    assert V2(SEGMENTS, RATES, enable_buffer_reuse=False).buffer_manager is not one.buffer_manager
    pooled: Any = V2(SEGMENTS, RATES, enable_memory_pool=True).buffer_manager
    assert pooled.pool is get_global_memory_pool()
    assert one.buffer_manager is not None
    assert one.buffer_manager.pool is not pooled.pool
    run(one, qkv())
    before = two.get_buffer_stats()
    run(two, qkv())
    stats = one.get_buffer_stats()
    assert stats["cache_hits"] > before["cache_hits"]
    assert (stats["cache_misses"], stats["cached_bytes"]) == (before["cache_misses"], before["cached_bytes"])
    one.cleanup_buffers()
    assert one.get_buffer_stats()["cached_bytes"] == 0


def test_a_given_manager_with_the_same_settings_is_taken() -> None:
    own: Options = {"enable_preallocation": True, "lightweight_pool": True}
    manager = AttentionBufferManager(enable_reuse=False, enable_preallocation=True, lightweight=True)
    assert V2(SEGMENTS, RATES, enable_buffer_reuse=False, buffer_manager=manager, **own)._manager is manager
    pooled = AttentionBufferManager(pool=get_global_memory_pool())
    assert V2(SEGMENTS, RATES, enable_memory_pool=True, buffer_manager=pooled).buffer_manager is pooled


def test_memory_options_take_effect_when_set_later() -> None:
    module = DilatedAttention(SEGMENTS, RATES)
    expected = run(module, qkv())
    module.enable_memory_pool = True
    assert_equal(run(module, qkv()), expected)
    assert get_global_memory_pool().get_stats()["allocation_count"] > 0


def test_equals_the_function() -> None:
    mask, named = torch.rand(2, 37) > 0.3, {"head_offsets": "blocked", "tail": "phantom"}
    module = DilatedAttention(SEGMENTS, RATES, softmax_scale=0.2, **named)
    expected = dilated_attention(*qkv(), SEGMENTS, RATES, scale=0.2, **named, key_mask=mask)
    assert torch.equal(module(*qkv(), attention_mask=mask), expected)
    causal = DilatedAttention(SEGMENTS, RATES)(*qkv(), is_causal=True)
    assert torch.equal(causal, dilated_attention(*qkv(), SEGMENTS, RATES, is_causal=True))


@pytest.mark.parametrize("cls", [DilatedAttention, ImprovedDilatedAttention, V2])
@pytest.mark.parametrize(
    "named", [{"attention_dropout": 0.5}, {"dropout": 0.5}, {"dropout": 0.5, "attention_dropout": 0.5}]
)
def test_dropout_by_either_name_acts_only_in_training(cls: Module, named: Options) -> None:
    module = cls(SEGMENTS, RATES, **named)
    assert module.spec.dropout_p == 0.5
    assert cls(SEGMENTS, RATES).spec.dropout_p == 0.0
    plain = dilated_attention(*qkv(), SEGMENTS, RATES)
    assert not torch.allclose(module(*qkv()), plain)
    assert torch.equal(module.eval()(*qkv()), plain)
    if cls is not DilatedAttention:  # whose third argument is the scale
        assert cls(SEGMENTS, RATES, 0.2).spec.dropout_p == 0.2
        assert cls(SEGMENTS, RATES, attention_dropout=0.2, softmax_scale=0.5).spec.dropout_p == 0.2


def test_declared_device_and_dtype_are_checked() -> None:
    for declared in ({"device": "cpu", "dtype": torch.float32}, {"device": "cpu:0"}):
        assert DilatedAttention(SEGMENTS, RATES, **declared)(*qkv()).shape == (2, 37, 6, 8)
    with pytest.raises(TypeError, match=r"made for torch\.float64, got torch\.float32"):
        DilatedAttention(SEGMENTS, RATES, dtype=torch.float64)(*qkv())
    with pytest.raises(ValueError, match="made for the device cuda:1, got cpu"):
        DilatedAttention(SEGMENTS, RATES, device="cuda:1")(*qkv())
    with pytest.raises(TypeError, match="q must be a tensor, got int"):
        DilatedAttention(SEGMENTS, RATES, dtype=torch.float32)(1, 2, 3)
