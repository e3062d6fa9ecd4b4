"""Block-sparse attention whose pattern is learned: a scorer decides which blocks each row keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from ..block_sparse import attend_blocks, pool_blocks
from ..plan import BlockPattern, score_pattern
from ..sparse_spec import SparsePatternConfig
from ..spec import DEFAULT_DILATION_RATES, DEFAULT_SEGMENT_LENGTHS, finite_float
from .block_sparse import BlockSparseDilatedAttention


class BlockSparseAdaptiveDilatedAttention(LazyModuleMixin, BlockSparseDilatedAttention):
    """Each row of blocks attends to the blocks that a learned scorer ranks highest, within the budget.

    The mean query of a row and the mean key of a block, projected to `scorer_dim` features, give a score:

        score = (mean(q) @ query_scorer) . (mean(k) @ key_scorer) / sqrt(scorer_dim)     for blocks
        out   = softmax(scale * q @ k.T + score, over kept blocks) @ v

    The score is a gate inside the softmax, so that the scorer has a true gradient: blocks that help rise,
    others sink. In training Gumbel noise of `temperature` gives other blocks a try; `anneal` lowers it.

    Args:
        sparse_config: as in `BlockSparseDilatedAttention`, of type "adaptive"; that is the default.
        num_heads, head_dim, num_kv_heads: sizes of the scorer's weights; left out, the first call sets them.
        scorer_dim: features of a score; they are attended beside the head_dim features of q and k.
        temperature, final_temperature: of the noise at the beginning and at the end of annealing.
        options: those of `BlockSparseDilatedAttention`.
    """

    query_scorer: Tensor
    key_scorer: Tensor
    cls_to_become = None

    def __init__(
        self,
        segment_lengths: Sequence[int] = DEFAULT_SEGMENT_LENGTHS,
        dilation_rates: Sequence[int] = DEFAULT_DILATION_RATES,
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
        config = (
            SparsePatternConfig("adaptive")
            if sparse_config is None
            else SparsePatternConfig.of(sparse_config)
        )
        if config.pattern_type != "adaptive":
            raise ValueError(f'sparse_config must be of type "adaptive", got {config.pattern_type!r}')
        super().__init__(segment_lengths, dilation_rates, config, **options)
        sizes = {"num_heads": num_heads, "head_dim": head_dim, "num_kv_heads": num_kv_heads}
        for name, size in {**sizes, "scorer_dim": scorer_dim}.items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(f"{name} must be a positive integer, got {size!r}")
        if (num_heads is None) != (head_dim is None):
            raise ValueError("num_heads and head_dim are given together, got one of them")
        if num_heads is not None and num_heads % (num_kv_heads or num_heads):
            raise ValueError(f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}")
        self.scorer_dim = scorer_dim
        self.first_temperature = _temperature("temperature", temperature)
        self.final_temperature = _temperature("final_temperature", final_temperature)
        self.register_buffer("progress", torch.zeros(()))
        self.query_scorer, self.key_scorer = (UninitializedParameter() for _ in range(2))
        if num_heads is not None and head_dim is not None:
            self._make_scorer(num_heads, num_kv_heads or num_heads, head_dim)

    progress: Tensor

    @property
    def temperature(self) -> float:
        """Of the noise in training now; it falls geometrically with the progress."""
        done = float(self.progress)
        if self.final_temperature == 0.0 or self.first_temperature == 0.0:
            return self.first_temperature + done * (self.final_temperature - self.first_temperature)
        return float(self.first_temperature * (self.final_temperature / self.first_temperature) ** done)

    def anneal(self, progress: float) -> None:
        """Sets how much of the training is done, from 0 to 1. It is saved with the module."""
        progress = finite_float("progress", progress)
        if not 0.0 <= progress <= 1.0:
            raise ValueError(f"progress must lie between 0 and 1, got {progress}")
        self.progress.fill_(progress)

    def initialize_parameters(self, query: Tensor, key: Tensor, *_: Any, **__: Any) -> None:
        """Called by torch before the first forward."""
        if self.has_uninitialized_params():
            self._make_scorer(query.shape[2], key.shape[2], query.shape[3], query.device)

    def reset_parameters(self) -> None:
        """The scores begin near the mean attention scores: one random projection for queries and keys."""
        if self.has_uninitialized_params():
            return
        h_kv, d, _ = self.key_scorer.shape
        with torch.no_grad():
            for head in range(h_kv):
                nn.init.orthogonal_(self.key_scorer[head], gain=(d / self.scorer_dim) ** 0.25)
            group = self.query_scorer.shape[0] // h_kv
            self.query_scorer.copy_(self.key_scorer.repeat_interleave(group, 0))

    def _make_scorer(self, h: int, h_kv: int, d: int, device: torch.device | None = None) -> None:
        for scorer, heads in ((self.query_scorer, h), (self.key_scorer, h_kv)):
            assert isinstance(scorer, UninitializedParameter)
            scorer.materialize((heads, d, self.scorer_dim), device=device)
        self.reset_parameters()

    def scores(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Features (b, h, blocks, scorer_dim) of queries and keys, whose products are the scores."""
        features = []
        for x, scorer in ((query, self.query_scorer), (key, self.key_scorer)):
            if x.shape[2:] != scorer.shape[:2]:
                raise ValueError(
                    f"the scorer was made for {tuple(scorer.shape[:2])} heads and features, "
                    f"got {tuple(x.shape[2:])}"
                )
            means = pool_blocks(x, self.sparse_config.block_size)
            features.append(means @ scorer.to(means.dtype))
        return features[0] / math.sqrt(self.scorer_dim), features[1]

    # What is kept depends on values, which no compiler can trace.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def choose(self, row: Tensor, column: Tensor, n: int, is_causal: bool) -> BlockPattern:
        """The pattern of the given scores, with noise in training."""
        group = row.shape[1] // column.shape[1]
        columns = column.repeat_interleave(group, 1)
        noise = self.temperature if self.training else 0.0
        with torch.no_grad():
            return score_pattern(
                row.flatten(0, 1),
                columns.flatten(0, 1),
                n,
                self.sparse_config,
                is_causal=is_causal,
                noise=noise,
            )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        n, d = query.shape[1], query.shape[-1]
        row, column = self.scores(query, key)
        pattern = self.choose(row, column, n, is_causal)
        scale = 1.0 / math.sqrt(d) if self.spec.scale is None else self.spec.scale
        # scale q k + row column is the product of longer rows: the gate costs no kernel of its own.
        wide_q = torch.cat([query * scale, self._tokens(row, n).to(query.dtype)], -1)
        wide_k = torch.cat([key, self._tokens(column, n).to(key.dtype)], -1)
        out, lse = attend_blocks(
            wide_q,
            wide_k,
            F.pad(value, (0, self.scorer_dim)),
            pattern,
            is_causal=is_causal,
            scale=1.0,
            dropout_p=self._dropout_now,
            key_mask=attention_mask,
            return_lse=True,
            kernel=self.kernel,
            workspace_bytes=self.workspace_bytes,
            memory=self._memory,
            use_pattern_cache=False,
        )
        return out[..., :d], lse

    def _tokens(self, features: Tensor, n: int) -> Tensor:
        """(b, h, blocks, f) of blocks -> (b, n, h, f) of their tokens."""
        size = self.sparse_config.block_size
        return features.repeat_interleave(size, 2)[:, :, :n].transpose(1, 2)


def _temperature(name: str, value: float) -> float:
    value = finite_float(name, value)
    if value < 0.0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value
