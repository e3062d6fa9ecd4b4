"""Block-sparse attention whose blocks a learned scorer chooses by content."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from .. import block_sparse as blocks
from ..checks import autocast_inputs, check_inputs, check_positive_int, finite_float
from ..core.tracing import uncompiled
from ..plan import BlockPattern, choose_blocks
from ..spec import SparsePatternConfig
from .attention import Branch, Mask
from .block_sparse import BlockSparseDilatedAttention, Prepared

_FIRST_CALL = threading.RLock()  # of lazy modules, which could be neither copied nor pickled with their own
LEAST_SCALE = 1e-3  # the gate is divided by the scale, which must leave it in the range of half precision


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
