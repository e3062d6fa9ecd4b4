"""The alias modules of the package: paths that are promised and hold no logic."""

from __future__ import annotations

# Module paths that are promised, beside the rooms that hold the code.
ALIASES = {
    "improved_dilated_attention_v2",
    "block_sparse_factory",
    "block_sparse_ring_dilated_attention",
    "ring_dilated_attention_production",
    "ring_dilated_attention_v2",
    "ring_dilated_attention_v3",
}
