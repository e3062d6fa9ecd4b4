"""Block-sparse attention modules by variant."""

from .factory import create_block_sparse_attention

__all__ = ["create_block_sparse_attention"]
