"""WHERE rows live: attention over sequences that several processes hold in shards."""

from .attention import plan_ring, ring_block_sparse_attention, ring_dilated_attention
from .comm import RingError, Traffic, group_size, ring_traffic, sharing_errors
from .schedule import RingSchedule
from .shards import even_shards, shard_bounds, shard_positions, shard_sequence, unshard_sequence

__all__ = [
    "RingError",
    "RingSchedule",
    "Traffic",
    "even_shards",
    "group_size",
    "plan_ring",
    "ring_block_sparse_attention",
    "ring_dilated_attention",
    "ring_traffic",
    "shard_bounds",
    "shard_positions",
    "shard_sequence",
    "sharing_errors",
    "unshard_sequence",
]
