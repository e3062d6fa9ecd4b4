"""Thousands of training steps of changing shapes leave resident memory and the pools as they were.

The steps run in a process of their own, this file as a script, for other tests would move its memory.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.core import MemoryPool, get_global_memory_pool
from dilated_attention_pytorch.modules import DilatedAttention, ImprovedDilatedAttentionV2

NUM_STEPS, NUM_LEAKY_STEPS = 4000, 800
LENGTHS = (1, 2, 17, 31, 63, 64, 65, 97, 128, 130, 191, 255, 256, 257, 300, 347, 384, 401, 480, 509, 512)
MAX_SLOPE = 512  # bytes a step
# The C library keeps what is freed: what it gives back and asks for again would hide a slope.
KEEPS = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_ARENA_MAX": "1"}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(values: Sequence[int]) -> float:
    """Of least-squares lines, a step: the lowest one of the last six eighths.

    A jump of the allocator lies in one of them or two, a leak in all.
    """
    eighths = torch.tensor(values, dtype=torch.float64).reshape(8, -1)
    x = torch.arange(eighths.shape[1], dtype=torch.float64)
    x -= x.mean()
    return float((eighths[2:] @ x / (x @ x)).min())


def held_bytes(pool: MemoryPool) -> int:
    """Of the storages that the pool's internals refer to, each once."""
    return sum({block.storage._cdata: block.storage.nbytes() for block in pool._blocks.values()}.values())


def train(modules: Sequence[DilatedAttention], num_steps: int, leaks: bool = False) -> Sequence[int]:
    """Resident bytes after each step; one that leaks keeps 32 KiB more."""
    choose, leaked = random.Random(0), []
    resident = array("q", range(num_steps))  # a list of integers would grow by 40 bytes a step
    for step in range(num_steps):
        shape = (choose.randint(1, 4), choose.choice(LENGTHS), 2, 16)
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        out = modules[step % len(modules)](q, k, v, is_causal=step % 3 == 0)
        out.square().mean().backward()
        if leaks:
            leaked.append(torch.ones(8192))
        resident[step] = resident_bytes()
    return resident


def main() -> None:
    torch.set_num_threads(1)
    improved = ImprovedDilatedAttentionV2((64, 256), (1, 2))
    modules = (DilatedAttention((64, 256), (1, 2), enable_memory_pool=True), improved)
    clean = slope(train(modules, NUM_STEPS))
    assert improved.buffer_manager is not None
    for pool in (get_global_memory_pool(), improved.buffer_manager.pool):
        stats = pool.get_stats()
        assert stats["reuse_rate"] > 0.9, stats
        assert stats["in_use_bytes"] == 0, stats
        assert stats["total_allocated"] == stats["cached_bytes"] == held_bytes(pool) > 0, stats
    print(clean, slope(train(modules, NUM_LEAKY_STEPS, leaks=True)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_training_does_not_leak() -> None:
    child = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, **KEEPS},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    clean, leaky = map(float, child.stdout.split())
    print(f"resident memory grows by {clean:.0f} bytes a step, with a leak by {leaky:.0f}")
    assert clean < MAX_SLOPE
    assert leaky > MAX_SLOPE, "the measurement does not see a leak"


if __name__ == "__main__":
    main()
