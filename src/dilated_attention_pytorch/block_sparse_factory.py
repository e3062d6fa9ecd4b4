"""Block-sparse attention modules by variant."""

from .block_factory import create_block_sparse_attention

__all__ = ["create_block_sparse_attention"]
