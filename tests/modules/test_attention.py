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
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
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
from support.weighed import RATES, SEGMENTS, qkv, run

N = 37
pytestmark = pytest.mark.usefixtures("alone_on_a_large_machine")
Options = dict[str, Any]
Module = type[DilatedAttention]


def every_combination() -> Iterator[tuple[Module, Options]]:
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
            yield ImprovedDilatedAttentionV2, {**options, "enable_buffer_manager": False}
        for manager in managers:
            yield ImprovedDilatedAttentionV2, {**options, **manager}
        if not pool:
            yield ImprovedDilatedAttentionV2, {**options, "lightweight_pool": True}


COMBINATIONS = list(every_combination())
CHOSEN: list[tuple[Module, Options]] = [
    (DilatedAttention, {"enable_memory_pool": True}),
    (
        ImprovedDilatedAttention,
        {"enable_memory_pool": True, "lightweight_pool": True, "enable_profiling": True},
    ),
    (ImprovedDilatedAttentionV2, {}),
    (ImprovedDilatedAttentionV2, {"enable_memory_pool": True, "use_pattern_cache": False}),
    (ImprovedDilatedAttentionV2, {"buffer_manager": "own"}),
]


def name_of(combination: tuple[Module, Options]) -> str:
    cls, options = combination
    return "-".join([cls.__name__, *(f"{name}={value}" for name, value in options.items())])


def make(combination: tuple[Module, Options], *args: Any, **more: Any) -> DilatedAttention:
    cls, options = combination
    if options.get("buffer_manager") == "own":
        pool = get_global_memory_pool() if options.get("enable_memory_pool") else None
        manager = AttentionBufferManager(lightweight=options.get("lightweight_pool", False), pool=pool)
        options = {**options, "buffer_manager": manager}
    return cls(*(args or (SEGMENTS, RATES)), **options, **more)


each_chosen = pytest.mark.parametrize("combination", CHOSEN, ids=name_of)


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


@pytest.mark.parametrize("combination", COMBINATIONS, ids=name_of)
def test_bit_equal_with_every_memory_option(
    combination: tuple[Module, Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cases()
    reset_global_pattern_cache()
    module = make(combination)
    kept = [run(module, tensors, **options) for tensors, options, _ in expected]  # misses the caches
    monkeypatch.setattr(memory_pool, "RESULT_BYTES", 1)  # results come from the pool, however small
    kept += [run(module, tensors, **options) for tensors, options, _ in expected]  # hits them
    for got, (_, _, want) in zip(kept, expected * 2, strict=True):
        assert_equal(got, want)
    stats = get_global_pattern_cache().get_stats()
    assert (stats["hits"] > 0) == (stats["misses"] > 0) == module.use_pattern_cache


@each_chosen
def test_bit_equal_in_small_tiles_and_with_dropout(combination: tuple[Module, Options]) -> None:
    for options in ({"workspace_bytes": 2000}, {"dropout": 0.3}, {"detach_mixing": True, "tail": "phantom"}):
        plain, module = DilatedAttention(SEGMENTS, RATES, **options), make(combination, **options)
        for _ in range(2):
            torch.manual_seed(4)
            expected = run(plain, qkv(dtype=torch.bfloat16))
            torch.manual_seed(4)
            assert_equal(run(module, qkv(dtype=torch.bfloat16)), expected)


class Block(nn.Module):
    """Projections around attention, so that there are weights whose gradients add up."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.into, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).view(*x.shape[:2], 3, 3, 8).unbind(2)
        out: Tensor = self.out(self.attention(q, k, v, is_causal=True).flatten(2))
        return x + out


def weight_gradients(block: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in block.parameters() if parameter.grad is not None]


@each_chosen
def test_gradients_accumulate_over_micro_batches(combination: tuple[Module, Options]) -> None:
    blocks = [Block(DilatedAttention(SEGMENTS, RATES)), Block(make(combination))]
    for block in blocks:
        rng = torch.Generator().manual_seed(5)
        outs = [block(torch.randn(2, n, 24, generator=rng)) for n in (37, 64, 37, 5)]
        for out in outs[::-1]:  # all graphs are alive at once
            out.square().mean().backward()
    assert_equal(weight_gradients(blocks[1]), weight_gradients(blocks[0]))


@each_chosen
def test_mixed_precision(combination: tuple[Module, Options]) -> None:
    blocks = [Block(DilatedAttention(SEGMENTS, RATES)), Block(make(combination))]
    for block in blocks:
        x = torch.randn(2, N, 24, generator=torch.Generator().manual_seed(5))
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                out = block.attention(*(block.into(x).view(2, N, 3, 3, 8).unbind(2)))
                assert out.dtype == torch.bfloat16
                loss = block(x).float().square().mean()
            loss.backward()
    gradients = weight_gradients(blocks[1])
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert_equal(gradients, weight_gradients(blocks[0]))


@each_chosen
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(
    combination: tuple[Module, Options], reentrant: bool, dropout: float
) -> None:
    module = make(combination, dropout=dropout)
    torch.manual_seed(2)
    expected = run(module, qkv())
    torch.manual_seed(2)
    tensors = qkv()
    out = checkpoint(module, *tensors, use_reentrant=reentrant)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out * weight).sum().backward()
    assert_equal([out.detach(), *(x.grad for x in tensors)], expected)  # type: ignore[list-item]


@each_chosen
def test_copies_and_pickles(combination: tuple[Module, Options]) -> None:
    module = make(combination)
    expected = run(module, qkv())
    twins = [copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))]
    for twin in twins:
        assert_equal(run(twin, qkv()), expected)
    if isinstance(module, ImprovedDilatedAttentionV2):
        managers = [twin.buffer_manager for twin in twins]
        assert managers[0] is managers[1] is module.buffer_manager
        assert (managers[2] is module.buffer_manager) == ("buffer_manager" not in combination[1])
        assert managers[2].get_stats()["allocations"] > 0


def test_pickles_in_a_fresh_process(tmp_path: Path) -> None:
    modules = [make(combination) for combination in CHOSEN]
    expected = [run(module, qkv()) for module in modules]
    (tmp_path / "modules").write_bytes(pickle.dumps(modules))
    torch.save((qkv(), expected), tmp_path / "tensors")
    script = f"""
import pickle, sys, torch
torch.set_num_threads(1)
modules = pickle.load(open({str(tmp_path / "modules")!r}, "rb"))
tensors, expected = torch.load({str(tmp_path / "tensors")!r})
for module, want in zip(modules, expected, strict=True):
    for _ in range(2):
        out = module(*tensors)
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
        got = [out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)]
        assert all(map(torch.equal, got, want))
assert modules[-1].get_buffer_stats()["cache_hits"] > 0
print("done")
"""
    command = [sys.executable, "-c", script]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert child.stdout.split() == ["done"], child.stderr


@each_chosen
def test_twelve_compiled_layers_share_one_graph(combination: tuple[Module, Options]) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    shared = make(combination)
    layers = [shared] * 2 if "buffer_manager" in combination[1] else [make(combination) for _ in range(12)]
    expected = run(layers[0], qkv())
    for layer in layers:
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        assert_equal(run(compiled, qkv()), expected)
    assert counter.frame_count == 1


def test_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    module = ImprovedDilatedAttentionV2(SEGMENTS, RATES, enable_memory_pool=True)
    compiled = torch.compile(module, fullgraph=True, backend="inductor")
    for _ in range(2):
        assert_equal(run(compiled, qkv()), run(module, qkv()))


@each_chosen
def test_export_round_trips(combination: tuple[Module, Options]) -> None:
    module = make(combination).eval()
    q, k, v = (x.detach() for x in qkv())
    n = torch.export.Dim("n", min=2, max=1 << 20)
    shapes = {name: {1: n} for name in ("query", "key", "value")}
    program = torch.export.export(module, (q, k, v), dynamic_shapes=shapes)
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
def test_eight_threads_at_once(combination: tuple[Module, Options], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "RESULT_BYTES", 1)
    plain, module = DilatedAttention(SEGMENTS, RATES), make(combination)
    expected = [run(plain, qkv(20 + thread, seed=thread)) for thread in range(8)]
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for _ in range(8):
                assert_equal(run(module, qkv(20 + thread, seed=thread)), expected[thread])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(each.is_alive() for each in threads)
    assert not failures, failures[0]


def held_bytes(module: DilatedAttention) -> int:
    pool = (
        module.buffer_manager.pool if isinstance(module, ImprovedDilatedAttentionV2) else module._memory_pool
    )
    return pool.get_stats()["total_allocated"]  # type: ignore[union-attr, no-any-return]


@each_chosen
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_layers_hold_the_scratch_of_one(combination: tuple[Module, Options], dtype: torch.dtype) -> None:
    if "buffer_manager" in combination[1]:
        combination = (combination[0], {"buffer_manager": AttentionBufferManager()})
    layers = [make(combination) for _ in range(12)]
    if isinstance(layers[0], ImprovedDilatedAttentionV2):
        layers[0].cleanup_buffers()
    x = torch.randn(2, 3 * N, 6, 8, dtype=dtype, requires_grad=True)
    layers[0](x, x, x).sum().backward()
    one = held_bytes(layers[0])
    for layer in layers:
        x = layer(x, x, x)
    x.sum().backward()
    assert held_bytes(layers[0]) == one > 0


def shares(before: Options, after: Options, hits: str, *requests: str) -> float:
    """Hits among the requests between two readings of statistics."""
    made = sum(after[name] - before[name] for name in requests)
    assert made > 0
    return (after[hits] - before[hits]) / made


class Readings:
    """Hit rates since the last reading, of the pattern cache, the pool and V2's manager."""

    def __init__(self, module: DilatedAttention) -> None:
        self.module = module
        self.cache, self.pool, self.manager = self.read()

    def read(self) -> tuple[Options, Options, Options]:
        manager = getattr(self.module, "get_buffer_stats", dict)()
        return get_global_pattern_cache().get_stats(), get_global_memory_pool().get_stats(), manager

    def rates(self) -> tuple[float, float]:
        cache, pool, manager = self.read()
        planned = shares(self.cache, cache, "hits", "hits", "misses")
        if manager:
            return planned, shares(self.manager, manager, "cache_hits", "cache_hits", "cache_misses")
        return planned, shares(self.pool, pool, "reuse_count", "allocation_count")


def train(module: DilatedAttention, tensors: list[Tensor]) -> None:
    module(*tensors, is_causal=True).sum().backward()


@each_chosen
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reuse_in_training_at_a_fixed_length(combination: tuple[Module, Options], dtype: torch.dtype) -> None:
    if not combination[1].get("use_pattern_cache", True):
        combination = (combination[0], {**combination[1], "use_pattern_cache": True})
    module = make(combination)
    train(module, qkv(128, dtype))
    readings = Readings(module)
    for step in range(20):
        train(module, qkv(128, dtype, seed=step))
    planned, reused = readings.rates()
    assert planned >= 0.95
    assert reused >= 0.9


@pytest.mark.parametrize("cls", [DilatedAttention, ImprovedDilatedAttentionV2])
def test_reuse_in_training_at_varying_lengths(cls: Module) -> None:
    """Batches of 1 to 4, lengths of 256 to 2048: 64 shapes as the report had them, with less work in each."""
    is_v2 = cls is ImprovedDilatedAttentionV2
    memory = {"buffer_manager": AttentionBufferManager()} if is_v2 else {"enable_memory_pool": True}
    module = cls((32, 64, 128), (1, 2, 4), **memory)
    lengths = torch.linspace(256, 2048, 16).int().tolist()
    shapes = [(b, n, 4, 2) for b in range(1, 5) for n in lengths]
    assert len(set(shapes)) == 64

    def epoch() -> None:
        for i in torch.randperm(64).tolist():
            q, k, v = (torch.randn(shapes[i], requires_grad=True) for _ in range(3))
            train(module, [q, k, v])

    epoch()
    readings = Readings(module)
    for _ in range(3):
        epoch()
    planned, reused = readings.rates()
    assert planned >= 0.9
    assert reused >= 0.9
    if is_v2:
        assert module.get_buffer_stats()["buffer_types"]["query"]["cache_hits"] > 0  # type: ignore[operator]


@each_chosen
def test_backward_after_the_module_is_gone(combination: tuple[Module, Options]) -> None:
    tensors = qkv()
    expected = run(DilatedAttention(SEGMENTS, RATES), tensors)
    module = make(combination)
    out = module(*tensors)
    del module
    gc.collect()
    reset_global_memory_pool()
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    assert_equal([out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)], expected)


@pytest.mark.parametrize("cls", [DilatedAttention, ImprovedDilatedAttention, ImprovedDilatedAttentionV2])
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


def test_profiling_turns_on_the_figures() -> None:
    module = ImprovedDilatedAttentionV2(SEGMENTS, RATES, enable_memory_pool=True, enable_profiling=True)
    run(module, qkv(dtype=torch.bfloat16))
    assert module._pattern_cache.get_stats()["build_seconds"] > 0  # type: ignore[union-attr]
    assert module._memory_pool.get_stats()["types"]["query"]["allocations"] > 0  # type: ignore[union-attr]
    assert "seconds" in module.get_buffer_stats()["buffer_types"]["query"]
    own = AttentionBufferManager()
    alone = ImprovedDilatedAttentionV2(
        SEGMENTS, RATES, enable_profiling=True, use_pattern_cache=False, buffer_manager=own
    )
    assert alone.buffer_manager is own
    assert own.enable_profiling


def test_improved_takes_either_name_of_the_dropout() -> None:
    for cls in (ImprovedDilatedAttention, ImprovedDilatedAttentionV2):
        assert cls(SEGMENTS, RATES).spec.dropout_p == 0.0
        assert cls(SEGMENTS, RATES, 0.2).spec.dropout_p == 0.2
        assert cls(SEGMENTS, RATES, dropout=0.2, attention_dropout=0.2).spec.dropout_p == 0.2
        assert cls(SEGMENTS, RATES, attention_dropout=0.2, softmax_scale=0.5).spec.dropout_p == 0.2


def test_buffer_manager_of_the_second_version() -> None:
    off = ImprovedDilatedAttentionV2(SEGMENTS, RATES, enable_buffer_manager=False)
    assert off.buffer_manager is None
    assert off.get_buffer_stats() == {}
    off.cleanup_buffers()
    one, two = (ImprovedDilatedAttentionV2(SEGMENTS, RATES) for _ in range(2))
    assert one.buffer_manager is two.buffer_manager
    apart = ImprovedDilatedAttentionV2(SEGMENTS, RATES, enable_buffer_reuse=False)
    assert apart.buffer_manager is not one.buffer_manager
    assert one.buffer_manager is not None
    assert one.buffer_manager.pool is not get_global_memory_pool()
    pooled = ImprovedDilatedAttentionV2(SEGMENTS, RATES, enable_memory_pool=True)
    assert pooled.buffer_manager is not None
    assert pooled.buffer_manager.pool is get_global_memory_pool()
    run(one, qkv())
    before = two.get_buffer_stats()
    run(two, qkv())
    stats = one.get_buffer_stats()
    assert stats["cache_hits"] > before["cache_hits"]
    assert (stats["cache_misses"], stats["cached_bytes"]) == (before["cache_misses"], before["cached_bytes"])
    one.cleanup_buffers()
    assert one.get_buffer_stats()["cached_bytes"] == 0


@pytest.mark.parametrize(
    ("cls", "options", "error", "message"),
    [
        (DilatedAttention, {"lightweight_pool": True}, ValueError, "got enable_memory_pool=False"),
        (
            DilatedAttention,
            {"enable_profiling": True, "use_pattern_cache": False},
            ValueError,
            "enable_profiling needs a pattern cache or a memory pool, got neither",
        ),
        (ImprovedDilatedAttention, {"buffer_manager": None}, TypeError, "buffer_manager"),
        (ImprovedDilatedAttentionV2, {"buffer_manager": 3}, TypeError, "AttentionBufferManager, got int"),
        (
            ImprovedDilatedAttentionV2,
            {"buffer_manager": AttentionBufferManager(), "enable_buffer_manager": False},
            ValueError,
            "are for a buffer manager, got enable_buffer_manager=False",
        ),
        (
            ImprovedDilatedAttentionV2,
            {"enable_buffer_manager": False, "lightweight_pool": True},
            ValueError,
            "got enable_memory_pool=False",
        ),
        (
            ImprovedDilatedAttentionV2,
            {"enable_buffer_manager": False, "enable_profiling": True, "use_pattern_cache": False},
            ValueError,
            "got neither",
        ),
    ],
)
def test_bad_combinations_raise(cls: Module, options: Options, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cls(SEGMENTS, RATES, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_buffer_reuse": False},
        {"enable_preallocation": True},
        {"lightweight_pool": True},
        {"enable_memory_pool": True},
    ],
    ids=str,
)
def test_a_given_manager_keeps_its_settings(options: Options) -> None:
    with pytest.raises(ValueError, match="the settings of a buffer_manager are its own, got"):
        ImprovedDilatedAttentionV2(SEGMENTS, RATES, buffer_manager=AttentionBufferManager(), **options)
    suitable = AttentionBufferManager(
        enable_reuse=options.get("enable_buffer_reuse", True),
        enable_preallocation=options.get("enable_preallocation", False),
        lightweight=options.get("lightweight_pool", False),
        pool=get_global_memory_pool() if options.get("enable_memory_pool") else None,
    )
    module = ImprovedDilatedAttentionV2(SEGMENTS, RATES, buffer_manager=suitable, **options)
    assert module.buffer_manager is suitable


@pytest.mark.parametrize("options", [{"enable_buffer_reuse": False}, {"enable_preallocation": True}], ids=str)
def test_settings_of_no_manager_raise(options: Options) -> None:
    with pytest.raises(ValueError, match="are for a buffer manager, got enable_buffer_manager=False"):
        ImprovedDilatedAttentionV2(SEGMENTS, RATES, enable_buffer_manager=False, **options)


def test_memory_options_take_effect_when_set_later() -> None:
    module = DilatedAttention(SEGMENTS, RATES)
    expected = run(module, qkv())
    module.enable_memory_pool = True
    assert_equal(run(module, qkv()), expected)
    assert get_global_memory_pool().get_stats()["allocation_count"] > 0


def test_equals_the_function() -> None:
    mask = torch.rand(2, 37) > 0.3
    module = DilatedAttention(SEGMENTS, RATES, softmax_scale=0.2, head_offsets="blocked", tail="phantom")
    expected = dilated_attention(
        *qkv(), SEGMENTS, RATES, scale=0.2, head_offsets="blocked", tail="phantom", key_mask=mask
    )
    assert torch.equal(module(*qkv(), attention_mask=mask), expected)
    causal = DilatedAttention(SEGMENTS, RATES)(*qkv(), is_causal=True)
    assert torch.equal(causal, dilated_attention(*qkv(), SEGMENTS, RATES, is_causal=True))


@pytest.mark.parametrize("name", ["attention_dropout", "dropout"])
def test_dropout_acts_only_in_training(name: str) -> None:
    module = DilatedAttention(SEGMENTS, RATES, **{name: 0.5})  # type: ignore[arg-type]
    plain = dilated_attention(*qkv(), SEGMENTS, RATES)
    assert not torch.allclose(module(*qkv()), plain)
    assert torch.equal(module.eval()(*qkv()), plain)


def test_the_two_dropout_names_must_agree() -> None:
    with pytest.raises(ValueError, match=r"are one option, got the two values 0\.1 and 0\.2"):
        DilatedAttention(SEGMENTS, RATES, attention_dropout=0.2, dropout=0.1)
    assert DilatedAttention(SEGMENTS, RATES, attention_dropout=0.2, dropout=0.2).spec.dropout_p == 0.2


def test_declared_device_and_dtype_are_checked() -> None:
    assert DilatedAttention(SEGMENTS, RATES, device="cpu", dtype=torch.float32)(*qkv()).shape == (2, 37, 6, 8)
    with pytest.raises(TypeError, match=r"made for torch\.float64, got torch\.float32"):
        DilatedAttention(SEGMENTS, RATES, dtype=torch.float64)(*qkv())
    with pytest.raises(ValueError, match="made for the device cuda:1, got cpu"):
        DilatedAttention(SEGMENTS, RATES, device="cuda:1")(*qkv())
    assert DilatedAttention(SEGMENTS, RATES, device="cpu:0")(*qkv()).shape == (2, 37, 6, 8)
    with pytest.raises(TypeError, match=r"dtype must be a floating-point torch\.dtype, got 'float32'"):
        DilatedAttention(SEGMENTS, RATES, dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dtype must be a floating-point torch\.dtype, got torch\.int64"):
        DilatedAttention(dtype=torch.int64)
    with pytest.raises(TypeError, match="q must be a tensor, got int"):
        DilatedAttention(SEGMENTS, RATES, dtype=torch.float32)(1, 2, 3)


def test_copies_pickles_and_prints() -> None:
    module = DilatedAttention(SEGMENTS, RATES, tail="phantom")
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(*qkv()), module(*qkv()))
    assert repr(module) == (
        "DilatedAttention(segment_lengths=(8, 14, 40), dilation_rates=(1, 2, 5), tail='phantom')"
    )
    assert not list(module.parameters())
    assert not module.state_dict()
