"""The python snippets of the requirement documents 000, 001, 003 and 004."""

from __future__ import annotations

# As printed, by document and order, but for indentation and spaces at the end of a line.
SNIPPETS = {
    "000 lightweight": """
attention = ImprovedDilatedAttention(
    enable_memory_pool=True,
    lightweight_pool=True
)
""",
    "000 buffer_manager": """
attention = ImprovedDilatedAttentionV2(
    enable_buffer_manager=True,
    enable_buffer_reuse=True
)
""",
    "000 preallocate": """
if hasattr(attention, 'buffer_manager'):
    attention.buffer_manager.preallocate_buffers(
        batch_size, seq_len, num_heads, head_dim
    )
""",
    "000 monitor": """
stats = attention.get_buffer_stats()
print(f"Cache hit rate: {stats['cache_hit_rate']:.1%}")
""",
    "001 ring_cache": """
from dilated_attention_pytorch.ring_dilated_attention_v2 import RingDilatedAttentionV2

model = RingDilatedAttentionV2(
    segment_lengths=[2048, 4096, 8192],
    dilation_rates=[1, 2, 4],
    use_pattern_cache=True  # Enable pattern caching
)
""",
    "001 global_cache": """
from dilated_attention_pytorch.core import (
    get_global_pattern_cache,
    reset_global_pattern_cache
)

# Get cache statistics
cache = get_global_pattern_cache()
stats = cache.get_stats()
print(f"Cache hits: {stats['hits']}, misses: {stats['misses']}")
print(f"Hit rate: {stats['hit_rate']:.1%}")

# Clear cache when needed
reset_global_pattern_cache()
""",
    "001 pool": """
from dilated_attention_pytorch import DilatedAttention

model = DilatedAttention(
    segment_lengths=[2048, 4096, 8192],
    dilation_rates=[1, 2, 4],
    enable_memory_pool=True  # Enable memory pooling
)
""",
    "001 pool_profiled": """
from dilated_attention_pytorch import ImprovedDilatedAttention

model = ImprovedDilatedAttention(
    segment_lengths=[2048, 4096, 8192],
    dilation_rates=[1, 2, 4],
    enable_memory_pool=True,
    enable_profiling=True  # Enable pool profiling
)
""",
    "001 global_pool": """
from dilated_attention_pytorch.core import (
    get_global_memory_pool,
    reset_global_memory_pool
)

# Get pool statistics
pool = get_global_memory_pool()
stats = pool.get_stats()
print(f"Total allocated: {stats['total_allocated'] / 1024 / 1024:.1f} MB")
print(f"Peak allocated: {stats['peak_allocated'] / 1024 / 1024:.1f} MB")
print(f"Allocation count: {stats['allocation_count']}")

# Clear pool when needed
reset_global_memory_pool()
""",
    "001 ring_lightweight": """
# Use lightweight pool for faster allocation
model = RingDilatedAttentionV2(
    segment_lengths=[2048, 4096],
    dilation_rates=[1, 2],
    enable_memory_pool=True,
    lightweight_pool=True  # Faster but less features
)
""",
    "001 ring_combined": """
from dilated_attention_pytorch.ring_dilated_attention_v3 import RingDilatedAttentionV3

model = RingDilatedAttentionV3(
    segment_lengths=[2048, 4096, 8192],
    dilation_rates=[1, 2, 4],
    use_pattern_cache=True,     # Enable pattern caching
    enable_memory_pool=True,    # Enable memory pooling
    cache_on_gpu=True          # Keep patterns on GPU (V3 only)
)
""",
    "001 add_cache": """
from dilated_attention_pytorch.core import get_global_pattern_cache

class MyAttention(nn.Module):
    def __init__(self, ..., use_pattern_cache=False):
        self.use_pattern_cache = use_pattern_cache
        self._pattern_cache = get_global_pattern_cache() if use_pattern_cache else None
""",
    "001 add_pool": """
from dilated_attention_pytorch.core import get_global_memory_pool

class MyAttention(nn.Module):
    def __init__(self, ..., enable_memory_pool=False):
        self.enable_memory_pool = enable_memory_pool
        self._memory_pool = get_global_memory_pool() if enable_memory_pool else None
""",
    "001 profiling": """
# Enable profiling for both systems
model = RingDilatedAttentionV3(
    segment_lengths=[2048, 4096],
    dilation_rates=[1, 2],
    use_pattern_cache=True,
    enable_memory_pool=True,
    enable_profiling=True  # Enables detailed statistics
)

# After running some forward passes
cache_stats = model._pattern_cache.get_stats()
pool_stats = model._memory_pool.get_stats()

print(f"Cache efficiency: {cache_stats['hit_rate']:.1%}")
print(f"Memory reuse rate: {pool_stats.get('reuse_rate', 0):.1%}")
""",
    "001 debugging": """
# Enable debug logging
import logging
logging.getLogger("dilated_attention_pytorch").setLevel(logging.DEBUG)

# Check optimization status
print(f"Pattern cache enabled: {model.use_pattern_cache}")
print(f"Memory pool enabled: {model.enable_memory_pool}")
print(f"Cache size: {len(model._pattern_cache._cache)}")
""",
    "003 configuration": """
# Optimal configuration for long sequences
attention = create_dilated_attention(
    "improved",
    segment_lengths=[16384, 32768, 65536],
    dilation_rates=[1, 2, 4],
    # Auto-enables memory pool for sequences >= 4096
)

# For extreme sequences
attention = create_dilated_attention(
    "ring",
    segment_lengths=[32768, 65536, 131072],
    dilation_rates=[1, 2, 4],
    ring_size=8,  # Distribute across ring
)
""",
    "004 basic": """
from dilated_attention_pytorch.core.attention_buffer_manager import (
    create_attention_buffer_manager,
    BufferType
)

# Create buffer manager
manager = create_attention_buffer_manager(
    enable_reuse=True,         # Enable buffer caching
    enable_preallocation=False, # Pre-allocate common sizes
    lightweight=True           # Use fast configuration
)

# Allocate buffers
query = manager.allocate(BufferType.QUERY, shape=(2, 1024, 8, 64),
                        dtype=torch.float32, device="cuda")
key = manager.allocate(BufferType.KEY, shape=(2, 1024, 8, 64))
value = manager.allocate(BufferType.VALUE, shape=(2, 1024, 8, 64))

# Use buffers...

# Return for reuse
manager.deallocate(query, BufferType.QUERY)
manager.deallocate(key, BufferType.KEY)
manager.deallocate(value, BufferType.VALUE)

# Next allocation will reuse cached buffers
query2 = manager.allocate(BufferType.QUERY, shape=(2, 1024, 8, 64))
# This reuses the previously deallocated buffer!
""",
    "004 attention": """
from dilated_attention_pytorch.improved_dilated_attention_v2 import (
    ImprovedDilatedAttentionV2
)

# Attention module with integrated buffer management
attention = ImprovedDilatedAttentionV2(
    segment_lengths=[256, 512, 1024],
    dilation_rates=[1, 2, 4],
    enable_buffer_manager=True,
    enable_buffer_reuse=True,
    enable_preallocation=False  # Optional
)

# Forward pass automatically uses optimized allocation
output = attention(query, key, value)

# Check buffer statistics
stats = attention.get_buffer_stats()
print(f"Cache hits: {stats['cache_hits']}")
print(f"Cache hit rate: {stats['cache_hit_rate']:.2%}")
""",
    "004 custom_config": """
from dilated_attention_pytorch.core.attention_buffer_manager import (
    AttentionBufferManager,
    BufferConfig,
    BufferType
)

# Define custom configuration for a buffer type
custom_configs = {
    BufferType.SCORES: BufferConfig(
        typical_size_mb=16.0,      # Expected size
        reuse_frequency="high",    # Cache aggressively
        lifetime="iteration",      # Lives for one iteration
        prefer_bucketed=False,     # Too large for buckets
        prefer_numa=True,          # Use NUMA for large tensors
        zero_init=False,          # Don't waste time zeroing
    )
}

manager = AttentionBufferManager(
    custom_configs=custom_configs,
    enable_reuse=True
)
""",
    "004 reuse": """
# Good for training loops
manager = create_attention_buffer_manager(enable_reuse=True)
""",
    "004 fast": """
# Faster allocation with less tracking
manager = create_attention_buffer_manager(lightweight=True)
""",
    "004 preallocate": """
# Pre-allocate common sizes
manager.preallocate_buffers(
    batch_size=2,
    seq_len=1024,
    num_heads=8,
    head_dim=64
)
""",
    "004 clear": """
# Clear caches to free memory
manager.clear_cache()  # Clear all
manager.clear_cache(BufferType.TEMP)  # Clear specific type
""",
}
