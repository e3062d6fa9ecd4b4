"""Block-sparse attention modules: a pattern, or its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..block_sparse import attend_blocks, build_block_pattern, check_branches
from ..checks import autocast_inputs, check_flags, check_inputs
from ..core import PersistentPatternCache, get_block_pattern_cache
from ..core.tracing import uncompiled
from ..ops import Tensors, block_spec, write_recipe
from ..plan import BlockPattern
from ..ring.attention import attend_ring_blocks
from ..ring.call import RingSettings
from ..ring.comm import Group
from ..spec import SparsePatternConfig
from .attention import AttentionModule, Branch, Mask, Number
from .ring import RingModule, Timeout

Config = SparsePatternConfig | Mapping[str, Any] | BlockPattern | None
_build_by_content = uncompiled(build_block_pattern)  # what is kept depends on values: no compiler traces it


class Prepared(NamedTuple):
    """Queries and keys as they are attended, the pattern or its recipe, and the factor of the scores."""

    query: Tensor
    key: Tensor
    pattern: BlockPattern | str
    scale: float | None


class BlockSparseDilatedAttention(AttentionModule):
    """Attention over the blocks that a pattern keeps, one softmax a row; see `block_sparse_attention`.

    Args:
        segment_lengths, dilation_rates, max_length: the branches of the pattern type "dilated_sparse".
        sparse_config: a `SparsePatternConfig`, its fields as a dict, or a `BlockPattern` for one length. The
            type "adaptive" scores blocks anew in each call, by their mean queries and keys; see
            `build_block_pattern`.
        softmax_scale, attention_dropout, options: as in `DilatedAttention`, which has the same but for those
            of the dilated softmax; the pattern cache is `pattern_cache`, with patterns and plans by length,
            and workspace_bytes are 4 MiB a thread by default.
    """

    def __init__(
        self,
        segment_lengths: Branch = None,
        dilation_rates: Branch = None,
        sparse_config: Config = None,
        softmax_scale: Number = None,
        attention_dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, softmax_scale, attention_dropout, **options)
        self.pattern: BlockPattern | None = None
        self.sparse_config: SparsePatternConfig | None = None
        self._recipe = ""
        if isinstance(sparse_config, BlockPattern):
            self.pattern = sparse_config
        else:
            self.sparse_config = SparsePatternConfig.of(sparse_config)
            branches = check_branches(self.sparse_config, self.spec.segment_lengths, self.spec.dilation_rates)
            self._recipe = write_recipe(self.sparse_config, branches)

    @property
    def pattern_cache(self) -> PersistentPatternCache | None:
        """The cache of patterns that all block-sparse modules share; None with use_pattern_cache=False."""
        return get_block_pattern_cache() if self.use_pattern_cache else None

    _pattern_cache = pattern_cache

    @property
    def longest_segment(self) -> int | None:
        config = self.sparse_config
        return super().longest_segment if config and config.pattern_type == "dilated_sparse" else None

    def get_pattern(self, n: int, num_heads: int, *, is_causal: bool = False) -> BlockPattern:
        """The pattern that a call of this length and number of heads uses."""
        if self.pattern is not None:
            if n != self.pattern.n:
                raise ValueError(f"the pattern is for a length of {self.pattern.n}, got {n}")
            return self.pattern.causal() if is_causal else self.pattern
        if self._is_adaptive:
            raise ValueError("an adaptive pattern is made in each call, from its queries and keys")
        branches = {name: getattr(self.spec, name) for name in ("segment_lengths", "dilation_rates")}
        return build_block_pattern(self._config, n, num_heads, is_causal=is_causal, **branches)

    def attention_weights(
        self, query: Tensor, key: Tensor, is_causal: bool = False, attention_mask: Mask = None
    ) -> Tensor:
        """(b, n, n): probabilities without dropout, averaged over the heads, differentiable.

        For short sequences, in one process.
        """
        if self.is_sharded:
            raise ValueError("attention_weights needs the whole sequence in one process, got a part in each")
        check_flags(is_causal=is_causal)
        check_inputs(query, key, key, attention_mask, None)
        # Attention to the rows of an identity matrix shows the weights themselves.
        b, n, _, width = query.shape
        unit = torch.eye(n, dtype=query.dtype, device=query.device)
        prepared = self._prepare(query, key, is_causal, attention_mask)
        parts = (x[None, :, None].expand(b, n, key.shape[2], -1) for x in torch.split(unit, width, 1))
        how = (is_causal, attention_mask, 0)
        shown = [self._attend_prepared(prepared, part, *how).mean(2) for part in parts]
        return torch.cat(shown, -1).to(query.dtype)

    @property
    def _config(self) -> SparsePatternConfig:
        return SparsePatternConfig.of(self.sparse_config)

    @property
    def _is_adaptive(self) -> bool:
        return self.sparse_config is not None and self.sparse_config.pattern_type == "adaptive"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Mask) -> Tensor:
        check_flags(is_causal=is_causal)
        check_inputs(*autocast_inputs(q, k, v), mask, None)  # before values are padded
        prepared = self._prepare(q, k, is_causal, mask)
        return self._attend_prepared(prepared, v, is_causal, mask, self._dropout_now)

    def _prepare(self, query: Tensor, key: Tensor, is_causal: bool, mask: Mask) -> Prepared:
        """What is attended, before the values are known."""
        pattern: BlockPattern | str = self._recipe if self.pattern is None else self.pattern
        if self._is_adaptive:
            query, key, _ = autocast_inputs(query, key, key)
            content: dict[str, Any] = {"query": query, "key": key, "key_mask": mask}
            pattern = _build_by_content(self._config, *query.shape[1:3], is_causal=is_causal, **content)
        return Prepared(query, key, pattern, self.spec.scale)

    def _attend_prepared(
        self, prepared: Prepared, value: Tensor, is_causal: bool, mask: Mask, dropout_p: float
    ) -> Tensor:
        query, key, pattern, scale = prepared
        execution, d = self._execution, value.shape[-1]
        if self._is_adaptive:
            execution = replace(execution, use_pattern_cache=False)
        wide = F.pad(value, (0, key.shape[-1] - d)) if d < key.shape[-1] else value
        spec = block_spec(is_causal, scale, dropout_p)
        out, _ = attend_blocks(query, key, wide, pattern, spec, execution, key_mask=mask)
        return out[..., :d] if d < key.shape[-1] else out

    def extra_repr(self) -> str:
        shown = self.sparse_config if self.pattern is None else self.pattern
        return f"{super().extra_repr()}, sparse_config={shown!r}"


class BlockSparseRingDilatedAttention(RingModule, BlockSparseDilatedAttention):
    """`BlockSparseDilatedAttention` over a sequence of which each process of a group holds a contiguous part.

    With several processes query, key, value and attention_mask are this process's part, (b, n_local, ...), as
    in `RingDilatedAttentionV2`, and the pattern is that of the whole sequence; see
    `ring_block_sparse_attention`. In one process it is the base module.

    Args:
        sparse_config: as in the base module; with several processes not "adaptive", whose choice of blocks
            depends on the keys of all of them.
        ring_size: as in `RingDilatedAttentionV2`, but it changes nothing in one process, whose tiles are
            small already.
        group, timeout: as in `RingDilatedAttentionV2`.
        options: those of `BlockSparseDilatedAttention`.
    """

    def __init__(
        self,
        segment_lengths: Branch = None,
        dilation_rates: Branch = None,
        sparse_config: Config = None,
        *,
        ring_size: int | None = None,
        group: Group = None,
        timeout: Timeout = None,
        **options: Any,
    ) -> None:
        ring: dict[str, Any] = {"ring_size": ring_size, "group": group, "timeout": timeout}
        super().__init__(segment_lengths, dilation_rates, sparse_config, **ring, **options)

    def _check_ring(self) -> None:
        super()._check_ring()
        if self._is_adaptive and self.is_sharded:
            rule = 'an "adaptive" pattern depends on all keys, which must be in one process'
            raise ValueError(f"{rule}, got a part in each of {self.ring.num_processes}")

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Mask) -> Tensor:
        if not self.is_sharded:
            return super()._attend(q, k, v, is_causal, mask)
        make_spec = partial(block_spec, is_causal, self.spec.scale, self._dropout_now)
        how = self.ring.timeout, self.ring.steps, self._execution
        settings, pattern = (
            RingSettings(self.ring.group, "auto", None, *how),
            partial(self._whole_pattern, q, is_causal),
        )
        out = attend_ring_blocks(Tensors(q, k, v, mask), pattern, make_spec, settings)
        assert isinstance(out, Tensor)
        return out

    def _whole_pattern(self, query: Tensor, is_causal: bool, n: int) -> BlockPattern:
        """`get_pattern`, kept in the pattern cache unless it was given."""
        num_heads, cache = query.shape[2], self.pattern_cache
        build = partial(self.get_pattern, n, num_heads, is_causal=is_causal)
        if cache is None or self.pattern is not None:
            return build()
        return cache.get_or_build(("pattern", self._recipe, n, num_heads, is_causal), build)
