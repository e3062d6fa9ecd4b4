"""Calls under a real limit of the address space: idle memory is freed, tiles shrink, or the error says why.

Each case runs in a process of its own, this file as a script, for the limit is the whole process's.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.core import MemoryPool, get_global_memory_pool, memory_pool
from dilated_attention_pytorch.core.host_memory import PROC, _fields, is_out_of_memory
from dilated_attention_pytorch.modules import (
    DilatedAttention,
    ImprovedDilatedAttentionV2,
    RingDilatedAttentionProduction,
)

MIB = 2**20
LONG, SHORT = 8192, 512  # a result of the long call takes 16 MiB
ROOMY = 256 * MIB  # a workspace in which each branch is one tile
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


@contextmanager
def free_memory(nbytes: int) -> Iterator[None]:
    """Lets the process grow by `nbytes` only."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    gc.collect()
    limit = _fields(PROC / "self/status")["VmSize"] * 1024 + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def make(cls: type[DilatedAttention] = DilatedAttention, **options: Any) -> DilatedAttention:
    # The stock kernel: the native one has no scratch to run out of.
    given = {"workspace_bytes": ROOMY, "allow_isolated_segments": True, "kernel": "stock", **options}
    return cls(segment_lengths=(256, 1024), dilation_rates=(1, 4), **given)


def inputs(n: int) -> Tensor:
    return torch.randn(1, n, 8, 64, generator=torch.Generator().manual_seed(n), requires_grad=True)


def attend(module: DilatedAttention, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x, x, x, is_causal=True)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def expect_out_of_memory(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return error.with_traceback(None)  # whose frames would keep the failed call's tensors
    raise AssertionError("there was enough memory")


def assert_says_what_is_missing(error: BaseException, asked: float, available: float) -> None:
    assert type(error) is torch.OutOfMemoryError, repr(error)
    found = re.search(
        r"out of memory on cpu: ([\d.]+) MiB were asked for, ([\d.]+) MiB available", str(error)
    )
    assert found, error
    assert float(found[1]) == asked, error
    assert abs(float(found[2]) - available) < 16, error


class Freed(logging.Handler):
    """The bytes that each emergency cleanup freed."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []
        memory_pool.LOGGER.addHandler(self)
        memory_pool.LOGGER.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        found = re.fullmatch(r"out of memory: (\d+) idle bytes freed", record.getMessage())
        if found:
            self.nbytes.append(int(found[1]))


def fill(pool: MemoryPool, nbytes: int) -> None:
    buffers = [pool.allocate((4 * MIB,), torch.uint8) for _ in range(nbytes // (4 * MIB))]
    for buffer in buffers:
        pool.deallocate(buffer)
    assert pool.get_stats()["cached_bytes"] == nbytes


@case
def idle_buffers_make_room() -> None:
    pool, freed, x = get_global_memory_pool(), Freed(), inputs(LONG)
    memory_pool.CHECK_SECONDS = 1e9  # or scarcity would free them before anything failed
    expected = attend(make(), x)
    options = {"enable_memory_pool": True, "workspace_bytes": 4 * MIB}
    for cls, more, result_bytes in (
        (DilatedAttention, {}, 64 * MIB),
        (DilatedAttention, {}, MIB),  # results come from the pool, too
        (DilatedAttention, {"lightweight_pool": True}, MIB),
        (ImprovedDilatedAttentionV2, {}, MIB),
    ):
        memory_pool.RESULT_BYTES = result_bytes
        pool.reset()
        fill(pool, 60 * MIB)
        freed.nbytes.clear()
        with free_memory(8 * MIB):
            expect_out_of_memory(lambda: attend(make(workspace_bytes=4 * MIB), x))
            assert pool.get_stats()["cached_bytes"] == 60 * MIB
            actual = attend(make(cls, **options, **more), x)
        assert_same(actual, expected)
        assert freed.nbytes[0] == 60 * MIB
        assert pool.get_stats()["pressure_cleanups"] == 0


@case
def smaller_tiles_make_room_unless_told_not_to() -> None:
    freed, x = Freed(), inputs(LONG)
    expected = attend(make(), x)
    for cls in (DilatedAttention, ImprovedDilatedAttentionV2, RingDilatedAttentionProduction):
        get_global_memory_pool().reset()
        freed.nbytes.clear()
        is_ring = cls is RingDilatedAttentionProduction
        strict = make(cls, enable_error_recovery=False) if is_ring else make()
        with free_memory(40 * MIB):
            expect_out_of_memory(lambda strict=strict: attend(strict, x))
            assert not freed.nbytes
            actual = attend(make(cls, enable_memory_pool=True), x)
        assert_same(actual, expected)
        assert len(freed.nbytes) >= 2  # the first two tries have the tiles that were asked for
        assert_same(attend(strict, x), expected)


@case
def hopeless_calls_say_so_and_leave_the_module_usable() -> None:
    long, short = inputs(LONG), inputs(SHORT)
    expected, expected_long = attend(make(), short), attend(make(), long)
    for cls, result_bytes in (
        (DilatedAttention, 64 * MIB),
        (DilatedAttention, MIB),
        (ImprovedDilatedAttentionV2, MIB),
    ):
        memory_pool.RESULT_BYTES = result_bytes
        get_global_memory_pool().reset()
        module = make(cls, enable_memory_pool=True)
        with free_memory(12 * MIB):
            error = expect_out_of_memory(lambda module=module: attend(module, long))
            assert_says_what_is_missing(error, asked=16, available=12)
            first = attend(module, short)  # while the caller still has the error
            expect_out_of_memory(lambda module=module: attend(module, long))
            second = attend(module, short)
        assert_same(first, expected)
        assert_same(second, expected)
        assert_same(attend(module, long), expected_long)


@case
def backward_makes_room_or_says_so() -> None:
    long, short = inputs(LONG), inputs(SHORT)

    def prepare(module: DilatedAttention, x: Tensor) -> Callable[[], Tensor]:
        out = module(x, x, x, is_causal=True)
        grad_out = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, x, grad_out, retain_graph=True)[0]

    expected, expected_short = prepare(make(), long)(), prepare(make(), short)()
    for cls, result_bytes in ((DilatedAttention, 64 * MIB), (ImprovedDilatedAttentionV2, MIB)):
        memory_pool.RESULT_BYTES = result_bytes
        get_global_memory_pool().reset()
        module = make(cls, enable_memory_pool=True)
        without, backward, short_backward = (
            prepare(make(), long),
            prepare(module, long),
            prepare(module, short),
        )
        with free_memory(100 * MIB):
            expect_out_of_memory(without)
            actual = backward()
        assert_same(actual, expected)
        del actual
        get_global_memory_pool().reset()
        with free_memory(24 * MIB):
            error = expect_out_of_memory(backward)
            assert_says_what_is_missing(error, asked=16, available=24)
            actual = short_backward()
        assert_same(actual, expected_short)
        assert_same(backward(), expected)


@case
def dropout_is_the_same_in_smaller_batches() -> None:
    x, options = inputs(LONG // 4), {"dropout": 0.5, "workspace_bytes": 16 * MIB, "kernel": "eager"}

    def attend_seeded(module: DilatedAttention) -> Tensor:
        torch.manual_seed(5)
        return attend(module, x)

    plain, pooled = make(**options), make(**options, enable_memory_pool=True)
    expected = attend_seeded(plain)
    assert_same(attend_seeded(pooled), expected)
    pool, freed = get_global_memory_pool(), Freed()
    pool.reset()
    fill(pool, 100 * MIB)
    with free_memory(2 * MIB):
        expect_out_of_memory(lambda: attend_seeded(plain))
        actual = attend_seeded(pooled)
    assert_same(actual, expected)
    assert freed.nbytes == [100 * MIB]
    pool.reset()
    freed.nbytes.clear()
    with free_memory(20 * MIB):  # enough for the results, and for smaller batches
        expect_out_of_memory(lambda: attend_seeded(plain))
        actual = attend_seeded(pooled)
    torch.testing.assert_close(actual, expected)
    assert len(freed.nbytes) >= 2
    assert_same(attend_seeded(pooled), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit and /proc are Linux's")
@pytest.mark.parametrize("name", CASES)
def test_under_a_limit(name: str) -> None:
    # Freed memory goes back to the system at once, so that the limit is about what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    warnings = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
    child = subprocess.run(
        [sys.executable, *warnings, __file__, name],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stdout


def main() -> None:
    torch.set_num_threads(1)
    for cls in (DilatedAttention, ImprovedDilatedAttentionV2):  # what is loaded at first use
        module, x = make(cls, enable_memory_pool=True), inputs(64)
        module(x, x, x, is_causal=True).sum().backward()
    gc.collect()
    gc.freeze()  # what torch has loaded: each cleanup collects garbage, and would look through all of it
    CASES[sys.argv[1]]()


if __name__ == "__main__":
    main()
