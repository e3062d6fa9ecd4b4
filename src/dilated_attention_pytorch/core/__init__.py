"""What outlives a call: the pattern cache, the memory pool and the attention buffer manager."""

from .attention_buffer_manager import (
    AttentionBufferManager,
    BufferConfig,
    BufferType,
    create_attention_buffer_manager,
)
from .memory_pool import MemoryPool, get_global_memory_pool, reset_global_memory_pool
from .pattern_cache import (
    PatternCache,
    PersistentPatternCache,
    get_block_pattern_cache,
    get_global_pattern_cache,
    reset_global_pattern_cache,
)

__all__ = [
    "AttentionBufferManager",
    "BufferConfig",
    "BufferType",
    "MemoryPool",
    "PatternCache",
    "PersistentPatternCache",
    "create_attention_buffer_manager",
    "get_block_pattern_cache",
    "get_global_memory_pool",
    "get_global_pattern_cache",
    "reset_global_memory_pool",
    "reset_global_pattern_cache",
]
