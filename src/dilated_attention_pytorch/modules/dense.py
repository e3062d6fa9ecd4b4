"""Dense attention, for keys of any number: what a decoder attends to its memory with."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import (
    autocast_inputs,
    check_flags,
    check_inputs,
    check_probabilities,
    finite_float,
    one_dropout,
)


class DenseAttention(nn.Module):
    """Every query attends to every key: `scaled_dot_product_attention` over (b, n, h, d) tensors.

    Args:
        softmax_scale: factor of the scores, 1 / sqrt(d) by default.
        attention_dropout: probability to drop an attention weight, in training only; also `dropout`.

    Unlike the other attention modules it takes any number of keys. A query without a visible key gives zeros,
    not NaN. It has no pattern, and no cache for decoding.
    """

    takes_other_lengths = True  # read by MultiheadModule

    def __init__(
        self,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        dropout: float | None = None,
    ) -> None:
        super().__init__()
        self.softmax_scale = None if softmax_scale is None else finite_float("softmax_scale", softmax_scale)
        self.dropout = one_dropout(attention_dropout, dropout)
        check_probabilities(dropout=self.dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """query (b, n, h, d), key and value (b, m, h_kv, d) -> (b, n, h, d).

        `attention_mask` is (b, m) bool, True where a key may be attended; is_causal needs n == m.
        """
        query, key, value = autocast_inputs(query, key, value)
        _check(query, key, value, is_causal, attention_mask)
        key, value = (_without_hidden(x, attention_mask) for x in (key, value))
        mask, empty = _visible(query, is_causal, attention_mask)
        scale = self.softmax_scale
        if is_causal and scale is not None and scale <= 0:
            # The CPU's op multiplies its causal mask, -inf, by the scale.
            query, scale = (-query, -scale) if scale < 0 else (query * 0.0, 1.0)
        q_bhnd, k_bhnd, v_bhnd = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q_bhnd,
            k_bhnd,
            v_bhnd,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal and mask is None,
            scale=scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        if mask is None and query.device.type == "cpu":
            # The CPU's op takes a row of NaN scores for one without keys and gives zeros.
            is_nan = _has_nan(query, key, is_causal).unsqueeze(-1)
            out = out + torch.where(is_nan, math.nan, 0.0).to(out.dtype)
        return (out if empty is None else out.masked_fill(empty, 0.0)).transpose(1, 2)

    def attention_weights(
        self, query: Tensor, key: Tensor, is_causal: bool = False, attention_mask: Tensor | None = None
    ) -> Tensor:
        """(b, n, m): probabilities without dropout, averaged over the heads."""
        _check(query, key, key, is_causal, attention_mask)
        mask, blind = _visible(query, is_causal, attention_mask)
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        keys = _without_hidden(key, attention_mask).repeat_interleave(query.shape[2] // key.shape[2], 2)
        scores = torch.einsum("bihd,bjhd->bhij", query, keys) * scale
        if mask is None and is_causal:
            mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        logits = scores if mask is None else scores.masked_fill(~mask, -math.inf)
        empty = (logits == -math.inf).all(-1, keepdim=True)  # scores may overflow
        empty = empty if blind is None else empty | blind
        return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).mean(1)

    def extra_repr(self) -> str:
        shown = {"softmax_scale": (self.softmax_scale, None), "dropout": (self.dropout, 0.0)}
        return ", ".join(f"{name}={value!r}" for name, (value, default) in shown.items() if value != default)


def _check(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None) -> None:
    check_flags(is_causal=is_causal)
    check_inputs(query, key, value, None, None, same_length=False)
    check_lengths(query.shape[1], key.shape[1], is_causal)
    check_inputs(key, key, value, mask, None)  # whose mask it is


def check_lengths(n: int, m: int, is_causal: bool) -> None:
    """Raises unless n queries can attend to m keys."""
    if not m:
        raise ValueError("k must have at least one position, got none")
    if is_causal and n != m:
        raise ValueError(f"is_causal needs as many keys as queries, got {m} and {n}")


def _without_hidden(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros for hidden keys: they may hold anything, and softmax gives NaN a weight of 0 that is NaN."""
    return x if mask is None else x.masked_fill(~mask[:, :, None, None], 0.0)


def _visible(query: Tensor, is_causal: bool, keys: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What each query may see, (b, 1, 1 or n, m), and the queries that see nothing, for which all is seen."""
    if keys is None:
        return None, None
    mask = keys[:, None, None, :]
    if is_causal:
        mask = mask & mask.new_ones(query.shape[1], query.shape[1]).tril()
    empty = ~mask.any(-1, keepdim=True)
    return mask | empty, empty


def _has_nan(query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    """(b, h, n): whether a query is NaN or sees a key that is, in a feature."""
    queries, keys = (x.isnan().any(-1).transpose(1, 2) for x in (query, key))
    seen = keys.cumsum(-1) > 0 if is_causal else keys.any(-1, keepdim=True)
    return queries | seen.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
