"""Block-sparse attention modules: a pattern config, or a pattern, kept in a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..block_ops import write_recipe
from ..block_sparse import attend_blocks, build_block_pattern, check_branches
from ..core import PersistentPatternCache, get_block_pattern_cache
from ..plan import BlockPattern
from ..sparse_spec import SparsePatternConfig
from ..spec import DEFAULT_DILATION_RATES, DEFAULT_SEGMENT_LENGTHS, DilatedSpec
from .skin import AttentionSkin, one_dropout


class BlockSparseDilatedAttention(AttentionSkin):
    """Attention over the blocks that a pattern keeps, one softmax a row; see `block_sparse_attention`.

    Args:
        segment_lengths, dilation_rates: the branches of the pattern type "dilated_sparse".
        sparse_config: a `SparsePatternConfig`, its fields as a dict, or a `BlockPattern` for one length. The
            type "adaptive" scores blocks anew in each call, by their mean queries and keys.
        softmax_scale: factor of the scores, 1 / sqrt(d) by default.
        attention_dropout: probability to drop an attention weight, in training only; also `dropout`.
        options: as in `DilatedAttention`: enable_memory_pool, lightweight_pool, enable_profiling,
            use_pattern_cache (patterns and schedules by length, in `pattern_cache`), kernel, workspace_bytes
            (4 MiB a thread by default), device and dtype.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int] = DEFAULT_SEGMENT_LENGTHS,
        dilation_rates: Sequence[int] = DEFAULT_DILATION_RATES,
        sparse_config: SparsePatternConfig | Mapping[str, Any] | BlockPattern | None = None,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        dropout: float | None = None,
        **options: Any,
    ) -> None:
        dropout_p = one_dropout(attention_dropout, dropout)
        super().__init__(
            DilatedSpec(segment_lengths, dilation_rates, scale=softmax_scale, dropout_p=dropout_p), **options
        )
        self.pattern = sparse_config if isinstance(sparse_config, BlockPattern) else None
        if isinstance(sparse_config, BlockPattern):
            self.sparse_config = SparsePatternConfig(block_size=sparse_config.block_size)
        else:
            self.sparse_config = SparsePatternConfig.of(sparse_config)
        branches = () if self.pattern else check_branches(self.sparse_config, segment_lengths, dilation_rates)
        self._recipe = write_recipe(self.sparse_config, branches)

    @property
    def pattern_cache(self) -> PersistentPatternCache | None:
        """The cache of patterns that all block-sparse modules share; None with use_pattern_cache=False."""
        return get_block_pattern_cache() if self.use_pattern_cache else None

    _pattern_cache = pattern_cache

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """query (b, n, h, d), key and value (b, n, h_kv, d) -> (b, n, h, d).

        `attention_mask` is (b, n) bool, True where a key may be attended.
        """
        self._check_declared(query)
        return self._attend(query, key, value, is_causal, attention_mask)[0]

    def get_pattern(self, n: int, num_heads: int = 1, *, is_causal: bool = False) -> BlockPattern:
        """The pattern that a call of this length uses; "adaptive" ones are made in the call alone."""
        if self.pattern is not None:
            return self.pattern
        spec = self.spec
        return build_block_pattern(
            self.sparse_config,
            n,
            num_heads,
            is_causal=is_causal,
            segment_lengths=spec.segment_lengths,
            dilation_rates=spec.dilation_rates,
        )

    def attention_weights(
        self, query: Tensor, key: Tensor, is_causal: bool = False, attention_mask: Tensor | None = None
    ) -> Tensor:
        """(b, n, n): the attention probabilities, averaged over the heads. For short sequences."""
        # Attention to the rows of an identity matrix shows the weights themselves.
        b, n, _, width = query.shape
        weights = query.new_zeros(b, n, n)
        with torch.no_grad():
            for start in range(0, n, width):
                columns = torch.eye(n, dtype=query.dtype, device=query.device)[:, start : start + width]
                values = torch.nn.functional.pad(columns, (0, width - columns.shape[1]))
                values = values[None, :, None].expand(b, n, key.shape[2], width)
                out, _ = self._attend(query, key, values, is_causal, attention_mask)
                weights[:, :, start : start + width] = out.mean(2)[..., : columns.shape[1]]
        return weights

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        pattern: BlockPattern | str = self._recipe if self.pattern is None else self.pattern
        if self.sparse_config.pattern_type == "adaptive" and self.pattern is None:
            pattern = _content_pattern(self.sparse_config, query, key, is_causal)
        result: tuple[Tensor, Tensor] = attend_blocks(  # type: ignore[assignment]
            query,
            key,
            value,
            pattern,
            is_causal=is_causal,
            scale=self.spec.scale,
            dropout_p=self._dropout_now,
            key_mask=attention_mask,
            return_lse=True,
            kernel=self.kernel,
            workspace_bytes=self.workspace_bytes,
            memory=self._memory,
            use_pattern_cache=self.use_pattern_cache and self.sparse_config.pattern_type != "adaptive",
        )
        return result

    def extra_repr(self) -> str:
        shown = self.sparse_config if self.pattern is None else self.pattern
        return f"{super().extra_repr()}, sparse_config={shown!r}"


class BlockSparseRingDilatedAttention(BlockSparseDilatedAttention):
    """`BlockSparseDilatedAttention` by the name that rings of processes use; in one process it is the same.

    Nothing is allocated for a ring that is not there: no communication buffers, pools or masks.

    Args:
        ring_size: processes of the ring; this version runs in one.
        options: those of `BlockSparseDilatedAttention`.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int] = DEFAULT_SEGMENT_LENGTHS,
        dilation_rates: Sequence[int] = DEFAULT_DILATION_RATES,
        sparse_config: SparsePatternConfig | Mapping[str, Any] | BlockPattern | None = None,
        *,
        ring_size: int | None = None,
        **options: Any,
    ) -> None:
        if ring_size not in (None, 1) or isinstance(ring_size, bool):
            raise ValueError(
                f"this version runs in one process: ring_size must be None or 1, got {ring_size}"
            )
        super().__init__(segment_lengths, dilation_rates, sparse_config, **options)
        self.ring_size = 1


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _content_pattern(
    config: SparsePatternConfig, query: Tensor, key: Tensor, is_causal: bool
) -> BlockPattern:
    """Depends on values, which no compiler can trace."""
    n, num_heads = query.shape[1], query.shape[2]
    return build_block_pattern(config, n, num_heads, is_causal=is_causal, query=query, key=key)
