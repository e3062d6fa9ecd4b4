"""The python snippets of requirement document 002 about sparse attention and its pools run as printed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.block_sparse_factory import create_block_sparse_attention
from dilated_attention_pytorch.block_sparse_ring_dilated_attention import (
    BlockSparseRingDilatedAttention,
    PersistentPatternCache,
    SparsePatternConfig,
)
from dilated_attention_pytorch.core import MemoryPool
from dilated_attention_pytorch.reference import block_sparse_attention_reference
from dilated_attention_pytorch.ring_dilated_attention_production import RingDilatedAttentionProduction
from support.tolerances import assert_close

NAMES = {each.__name__: each for each in (SparsePatternConfig, PersistentPatternCache, MemoryPool)}
POOLS = """
self.pattern_cache = PersistentPatternCache(max_size=100)
self.memory_pool = MemoryPool(pool_size=10)  # Pre-allocated buffer pool
"""
BASE_CONFIGURATION = """{
    "segment_lengths": [2048],
    "dilation_rates": [1],
    "sparsity_ratio": 0.01  # 99% sparse
}"""
RING_CONFIGURATION = """{
    "segment_lengths": [65536, 131072],  # Adaptive, large segments
    "dilation_rates": [1, 2],
    "sparse_config": SparsePatternConfig(
        pattern_type="dilated_sparse",
        sparsity_ratio=0.02,  # 98% sparse
        block_size=256  # Larger blocks
    )
}"""
MAXIMUM_LENGTH = """
from dilated_attention_pytorch.block_sparse_factory import create_block_sparse_attention

model = create_block_sparse_attention(
    variant="base",
    segment_lengths=[2048],  # Small segments
    dilation_rates=[1],      # Simple pattern
    sparsity_ratio=0.01,     # 99% sparse
)
"""


def run(snippet: str) -> dict[str, Any]:
    found: dict[str, Any] = {**NAMES, "self": SimpleNamespace()}
    exec(snippet, found)
    return found


@pytest.mark.parametrize(
    ("make", "ratio", "block_size", "branches", "n"),
    [
        (
            lambda: create_block_sparse_attention(variant="base", **eval(BASE_CONFIGURATION)),
            *(0.01, 128, ((2048, 1),), 1500),
        ),
        (
            lambda: BlockSparseRingDilatedAttention(**eval(RING_CONFIGURATION, NAMES)),
            *(0.02, 256, ((65536, 1), (131072, 2)), 2000),
        ),
        (lambda: run(MAXIMUM_LENGTH)["model"], 0.01, 128, ((2048, 1),), 1000),
    ],
    ids=["base", "ring", "maximum length"],
)
def test_modules_attend_to_what_their_configs_ask(
    make: Callable[[], Any], ratio: float, block_size: int, branches: tuple[tuple[int, int], ...], n: int
) -> None:
    module = make()
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


def test_pools() -> None:
    module = run(POOLS)["self"]
    assert module.pattern_cache.get_stats()["max_size"] == 100
    pool = module.memory_pool
    for buffer in [pool.allocate((64,)) for _ in range(20)]:
        pool.deallocate(buffer)
    assert pool.get_stats()["cached_buffers"] == 10
    assert RingDilatedAttentionProduction().memory_pool.pool_size == 10
