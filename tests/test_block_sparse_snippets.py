"""The python snippets of requirement document 002 about sparse attention and its pools run as printed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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

PATTERN_CACHE = """
self.pattern_cache = PersistentPatternCache(max_size=100)
"""
MEMORY_POOL = """
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
NAMES = {each.__name__: each for each in (SparsePatternConfig, PersistentPatternCache, MemoryPool)}


def check(module: Any, n: int) -> None:
    """The module keeps what its config asks, and attends to just that, over n positions."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 8) for _ in range(3))
    pattern = module.get_pattern(n, 2)
    out = module(q, k, v)
    expected = block_sparse_attention_reference(*(x.double() for x in (q, k, v)), pattern.to_dense())
    assert isinstance(expected, torch.Tensor)
    assert_close(out, expected, torch.float32)
    rows = pattern.rows
    assert abs(pattern.density - module.sparse_config.sparsity_ratio) * rows**2 <= rows


def test_pattern_cache() -> None:
    module = SimpleNamespace()
    exec(PATTERN_CACHE, {**NAMES, "self": module})
    assert module.pattern_cache.get_stats()["max_size"] == 100


def test_memory_pool() -> None:
    module = SimpleNamespace()
    exec(MEMORY_POOL, {**NAMES, "self": module})
    pool = module.memory_pool
    for buffer in [pool.allocate((64,)) for _ in range(20)]:
        pool.deallocate(buffer)
    assert pool.get_stats()["cached_buffers"] == 10
    assert RingDilatedAttentionProduction().memory_pool.pool_size == 10


def test_base_configuration() -> None:
    config = eval(BASE_CONFIGURATION)
    module: Any = create_block_sparse_attention(variant="base", **config)
    assert (module.sparse_config.sparsity_ratio, module.spec.segment_lengths) == (0.01, (2048,))
    check(module, 1500)


def test_ring_configuration() -> None:
    module = BlockSparseRingDilatedAttention(**eval(RING_CONFIGURATION, NAMES))
    assert module.sparse_config == SparsePatternConfig("dilated_sparse", 0.02, 256)
    assert module.spec.branches == ((65536, 1), (131072, 2))
    check(module, 2000)
    large = module.get_pattern(131072, 1)
    assert abs(large.density - 0.02) * large.rows <= 1


def test_for_maximum_sequence_length() -> None:
    found: dict[str, Any] = {}
    exec(MAXIMUM_LENGTH, found)
    check(found["model"], 1000)
    pattern = found["model"].get_pattern(131072, 1)
    assert abs(pattern.density - 0.01) * pattern.rows <= 1
    assert pattern.nbytes < 2**17
