"""Block-sparse attention modules: a pattern, its config, or a learned scorer that chooses the blocks."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from .. import block_sparse as blocks
from ..block_sparse import attend_blocks, build_block_pattern, check_branches
from ..checks import autocast_inputs, check_flags, check_inputs, check_positive_int, finite_float
from ..core import PersistentPatternCache, get_block_pattern_cache
from ..core.tracing import uncompiled
from ..ops import Tensors, block_spec, write_recipe
from ..plan import BlockPattern, choose_blocks
from ..ring.attention import attend_ring_blocks
from ..ring.call import RingSettings
from ..spec import SparsePatternConfig
from .attention import AttentionModule, Branch, Mask, Number
from .ring import RingModule

Config = SparsePatternConfig | Mapping[str, Any] | BlockPattern | None
_FIRST_CALL = threading.RLock()  # of lazy modules, which could be neither copied nor pickled with their own
LEAST_SCALE = 1e-3  # the gate is divided by the scale, which must leave it in the range of half precision
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
        branches, options: those of `BlockSparseDilatedAttention`.
    """

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


class BlockSparseAdaptiveDilatedAttention(LazyModuleMixin, BlockSparseDilatedAttention):
    """Each row of blocks attends to the blocks that a learned scorer ranks highest, within the budget.

    The mean query of a row and the mean key of a block, projected to `scorer_dim` features, give a score:

        score = (mean(q) @ query_scorer) . (mean(k) @ key_scorer) / sqrt(scorer_dim)     for blocks
        out   = softmax(scale * q @ k.T + score, over kept blocks) @ v

    The score is a gate inside the softmax, so that the scorer has a true gradient: blocks that help rise,
    others sink. In training Gumbel noise of `temperature` gives other blocks a try; `anneal` lowers it.

    Under `is_causal` nothing knows the future: the mean query is that of the positions up to the first of the
    row, and the gate of a key takes the mean of its block up to that key. Positions that a mask hides count
    in no mean, and blocks without a visible key use up no budget.

    Args:
        sparse_config: as in `BlockSparseDilatedAttention`, of type "adaptive"; that is the default.
        num_heads, head_dim, num_kv_heads: sizes of the scorer's weights; left out, the first call sets them.
        scorer_dim: features of a score; they are attended beside the head_dim features of q and k.
        temperature, final_temperature: of the noise at the beginning and at the end of annealing.
        options: those of `BlockSparseDilatedAttention`.
    """

    query_scorer: Tensor
    key_scorer: Tensor
    progress: Tensor
    cls_to_become = None

    def __init__(
        self,
        segment_lengths: Branch = None,
        dilation_rates: Branch = None,
        sparse_config: SparsePatternConfig | Mapping[str, Any] | None = None,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        scorer_dim: int = 16,
        temperature: float = 1.0,
        final_temperature: float = 0.05,
        **options: Any,
    ) -> None:
        if isinstance(sparse_config, BlockPattern):
            raise TypeError("an adaptive module makes its patterns itself, got a BlockPattern")
        given = SparsePatternConfig("adaptive") if sparse_config is None else sparse_config
        config = SparsePatternConfig.of(given)
        if config.pattern_type != "adaptive":
            raise ValueError(f'sparse_config must be of type "adaptive", got {config.pattern_type!r}')
        super().__init__(segment_lengths, dilation_rates, config, **options)
        sizes = {"num_heads": num_heads, "head_dim": head_dim, "num_kv_heads": num_kv_heads}
        for name, size in {**sizes, "scorer_dim": scorer_dim}.items():
            check_positive_int(name, 1 if size is None else size)
        if (num_heads is None) != (head_dim is None) or (num_heads is None and num_kv_heads is not None):
            raise ValueError("num_heads and head_dim are given together, num_kv_heads only with them")
        if num_heads is not None and num_heads % (num_kv_heads or num_heads):
            raise ValueError(f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}")
        for name, value in {"temperature": temperature, "final_temperature": final_temperature}.items():
            if finite_float(name, value) < 0.0:
                raise ValueError(f"{name} must not be negative, got {float(value)}")
        self.scorer_dim = scorer_dim
        self.first_temperature, self.final_temperature = float(temperature), float(final_temperature)
        self.register_buffer("progress", torch.zeros(()))
        where: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        self.query_scorer, self.key_scorer = (UninitializedParameter(**where) for _ in range(2))
        if num_heads is not None and head_dim is not None:
            self._make_scorer(num_heads, num_kv_heads or num_heads, head_dim)

    @property
    def temperature(self) -> float:
        """Of the noise in training now; it falls geometrically with the progress."""
        first, final, done = self.first_temperature, self.final_temperature, float(self.progress)
        if not first or not final:
            return first + done * (final - first)
        return float(first * (final / first) ** done)

    def anneal(self, progress: float) -> None:
        """Sets how much of the training is done, from 0 to 1. It is saved with the module."""
        progress = finite_float("progress", progress)
        if not 0.0 <= progress <= 1.0:
            raise ValueError(f"progress must lie between 0 and 1, got {progress}")
        self.progress.fill_(progress)

    def initialize_parameters(self, query: Tensor, key: Tensor, *_: Any, **__: Any) -> None:
        """Called by torch before the first forward."""
        if self.has_uninitialized_params():
            check_inputs(query, key, key, None, None)
            with _FIRST_CALL:
                if self.has_uninitialized_params():
                    self._make_scorer(query.shape[2], key.shape[2], query.shape[3], query.device)

    def _infer_parameters(self, *args: Any, **kwargs: Any) -> None:
        with _FIRST_CALL:
            if hasattr(self, "_initialize_hook"):  # else another thread was first
                super()._infer_parameters(*args, **kwargs)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The scores begin near the mean attention scores: one random projection for queries and keys."""
        self.progress.zero_()
        if not self.has_uninitialized_params():
            h_kv, d, _ = self.key_scorer.shape
            made = self._first_scorers(self.query_scorer.shape[0], h_kv, d, self.key_scorer.device)
            self.query_scorer.copy_(made[0]), self.key_scorer.copy_(made[1])

    def _first_scorers(self, h: int, h_kv: int, d: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
        """Weights (heads, d, scorer_dim) of queries and keys, float32: half has no orthogonal matrices."""
        made = torch.empty((h_kv, d, self.scorer_dim), dtype=torch.float32, device=device)
        for head in range(h_kv):
            nn.init.orthogonal_(made[head], gain=(d / self.scorer_dim) ** 0.25)
        return made.repeat_interleave(h // h_kv, 0), made

    def _make_scorer(self, h: int, h_kv: int, d: int, device: torch.device | None = None) -> None:
        scorers = self.query_scorer, self.key_scorer
        with torch.inference_mode(False):  # an inference tensor could not be trained later
            made = self._first_scorers(h, h_kv, d, self.query_scorer.device if device is None else device)
            for scorer, weights in zip(scorers, made, strict=True):
                scorer.data = weights.to(scorer.dtype)
        # What `materialize` does at last. Other threads take the weights for made from here on, so they are.
        for scorer in scorers:
            scorer.__class__ = nn.Parameter

    def features(
        self, query: Tensor, key: Tensor, is_causal: bool = False, mask: Mask = None
    ) -> tuple[Tensor, Tensor]:
        """(b, h, blocks, scorer_dim) of rows and (b, n, h_kv, scorer_dim) of keys: their products are scores.

        The score of a block is that of its last key, whose feature stands for the mean of the block.
        """
        check_inputs(query, key, key, mask, None)
        self.initialize_parameters(query, key)
        for x, scorer in ((query, self.query_scorer), (key, self.key_scorer)):
            if x.shape[2:] != scorer.shape[:2]:
                rule = f"the scorer was made for {tuple(scorer.shape[:2])} heads and features"
                raise ValueError(f"{rule}, got {tuple(x.shape[2:])}")
        size, n = self._config.block_size, key.shape[1]
        rows = blocks.pool_queries(query, size, is_causal, mask)
        keys = blocks.pool_keys(key, size, mask)
        if not is_causal:  # all keys of a block may know all of it
            keys = keys[:, blocks.block_ends(n, size).to(key.device)].repeat_interleave(size, 1)[:, :n]
        row = rows @ self.query_scorer.to(rows.dtype) / math.sqrt(self.scorer_dim)
        return row, torch.einsum("bnhd,hdf->bnhf", keys, self.key_scorer.to(keys.dtype))

    # What is kept depends on values, which no compiler can trace.
    @uncompiled
    def choose(self, row: Tensor, keys: Tensor, is_causal: bool = False, mask: Mask = None) -> BlockPattern:
        """The pattern of the given features, with noise in training."""
        n, config = keys.shape[1], self._config
        column = keys[:, blocks.block_ends(n, config.block_size).to(keys.device)].transpose(1, 2)
        noise = self.temperature if self.training else 0.0
        return choose_blocks(row, column, n, config, is_causal, mask, noise)

    def _prepare(self, query: Tensor, key: Tensor, is_causal: bool, mask: Mask) -> Prepared:
        query, key, _ = autocast_inputs(query, key, key)
        row, keys = self.features(query, key, is_causal, mask)
        pattern = self.choose(row, keys, is_causal, mask)
        scale = self.spec.scale_for(query.shape[-1])
        rows = row.repeat_interleave(self._config.block_size, 2)[:, :, : query.shape[1]].transpose(1, 2)
        if abs(scale) < LEAST_SCALE:
            query, scale = query * scale, 1.0
        # scale q k + row key is the product of longer rows: the gate costs no kernel of its own.
        wide_q = torch.cat([query, (rows / scale).to(query.dtype)], -1)
        return Prepared(wide_q, torch.cat([key, keys.to(key.dtype)], -1), pattern, scale)
