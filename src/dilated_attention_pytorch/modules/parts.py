"""Parts of transformer layers: feed-forward, drop path, gains, and dense attention to a memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import (
    autocast_inputs,
    check_count,
    check_device,
    check_flags,
    check_float_dtype,
    check_inputs,
    check_positive,
    check_positive_int,
    check_probabilities,
    finite_float,
    one_dropout,
    one_of,
)
from .attention import Device, Dtype, Mask, Number

CROSS_ATTENTIONS = ("dense", "dilated")
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swish": F.silu}


def magneto_gamma(num_encoder_layers: int, num_decoder_layers: int, *, is_decoder: bool = False) -> float:
    """The gain of v_proj, out_proj, fc1 and fc2 that keeps the updates of deep models bounded.

    For N encoder and M decoder layers: sqrt(log(2 N)) or sqrt(log(2 M)) where there is only one of them;
    else sqrt(log(3 M)) in the decoder and sqrt(log(3 M) log(2 N) / 3) in the encoder.
    """
    check_count("num_encoder_layers", num_encoder_layers)
    check_count("num_decoder_layers", num_decoder_layers)
    check_flags(is_decoder=is_decoder)
    own = num_decoder_layers if is_decoder else num_encoder_layers
    if not own:
        raise ValueError(f"the {'decoder' if is_decoder else 'encoder'} must have layers, got 0")
    if not num_encoder_layers or not num_decoder_layers:
        return math.sqrt(math.log(2 * own))
    decoder = math.log(3 * num_decoder_layers)
    return math.sqrt(decoder if is_decoder else decoder * math.log(2 * num_encoder_layers) / 3)


class FeedForward(nn.Module):
    """Two linear layers: dropout(fc2(ffn_layernorm(activation_dropout(activation(fc1(x)))))).

    Args:
        d_model, dim_feedforward: features of input and output, and between the layers.
        dropout, activation_dropout: of the output, and after the activation; in training only.
        activation: "gelu", "relu" or "swish", computed in float32 (float64 for float64) and cast back.
        layer_norm: the sub-layer norm `ffn_layernorm` over dim_feedforward, with layer_norm_eps.
        gamma_init: gain of the initial weights, MAGNETO's gamma.
    """

    def __init__(
        self,
        d_model: int,
        dim_feedforward: int,
        *,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation: str = "gelu",
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        check_positive_int("d_model", d_model, bits=28)
        check_positive_int("dim_feedforward", dim_feedforward, bits=28)
        check_device(device)
        check_positive(layer_norm_eps=layer_norm_eps, gamma_init=gamma_init)
        check_probabilities(dropout=dropout, activation_dropout=activation_dropout)
        check_flags(layer_norm=layer_norm)
        one_of("activation", activation, tuple(ACTIVATIONS))
        check_float_dtype("dtype", dtype)
        self.activation, self.gamma_init = activation, gamma_init
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fc1 = nn.Linear(d_model, dim_feedforward, **placed)
        self.ffn_layernorm = nn.LayerNorm(dim_feedforward, layer_norm_eps, **placed) if layer_norm else None
        self.fc2 = nn.Linear(dim_feedforward, d_model, **placed)
        self.activation_dropout, self.dropout = nn.Dropout(activation_dropout), nn.Dropout(dropout)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises both layers and the norm. Call it after those of submodules."""
        for layer in (self.fc1, self.fc2):
            nn.init.xavier_normal_(layer.weight, self.gamma_init)
            nn.init.zeros_(layer.bias)
        if self.ffn_layernorm is not None:
            self.ffn_layernorm.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d_model) -> (..., d_model)."""
        x = self.fc1(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        x = self.activation_dropout(ACTIVATIONS[self.activation](x.to(wide)).to(x.dtype))
        out: Tensor = self.dropout(self.fc2(x if self.ffn_layernorm is None else self.ffn_layernorm(x)))
        return out

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, gamma_init={self.gamma_init!r}"


class DropPath(nn.Module):
    """Drops a residual branch of whole rows of the batch with probability p, in training only."""

    def __init__(self, p: float = 0.0, *, batch_first: bool = True) -> None:
        super().__init__()
        check_probabilities(drop_path=p)
        check_flags(batch_first=batch_first)
        self.p, self.batch_first = float(p), batch_first
        # A bool, because torch.compile turns a float it reads from a module into a symbol and compiles twice.
        self._drops = self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        """x (b, n, d), or (n, b, d) with batch_first=False."""
        if not (self.training and self._drops):
            return x
        shape = (x.shape[0], 1, 1) if self.batch_first else (1, x.shape[1], 1)
        return x * F.dropout(x.new_ones(shape), self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


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
        self, softmax_scale: Number = None, attention_dropout: float = 0.0, *, dropout: Number = None
    ) -> None:
        super().__init__()
        self.softmax_scale = None if softmax_scale is None else finite_float("softmax_scale", softmax_scale)
        self.dropout = one_dropout(attention_dropout, dropout)
        check_probabilities(dropout=self.dropout)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, attention_mask: Mask = None
    ) -> Tensor:
        """query (b, n, h, d), key and value (b, m, h_kv, d) -> (b, n, h, d).

        `attention_mask` is (b, m) bool, True where a key may be attended; is_causal needs n == m.
        """
        query, key, value = autocast_inputs(query, key, value)
        _check(query, key, value, is_causal, attention_mask)
        key, value = (_without_hidden(x, attention_mask) for x in (key, value))
        mask, empty = None, None
        if attention_mask is not None:
            mask, empty = _visible(query, is_causal, attention_mask)
        scale = self.softmax_scale
        if is_causal and scale is not None and scale <= 0:
            # The CPU's op multiplies its causal mask, -inf, by the scale.
            query, scale = (-query, -scale) if scale < 0 else (query * 0.0, 1.0)
        how: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal and mask is None, "scale": scale}
        how |= {"dropout_p": self.dropout if self.training else 0.0}
        how |= {"enable_gqa": query.shape[2] != key.shape[2]}
        q_bhnd, k_bhnd, v_bhnd = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q_bhnd, k_bhnd, v_bhnd, **how)
        if mask is None and query.device.type == "cpu":
            # The CPU's op takes a row of NaN scores for one without keys and gives zeros.
            is_nan = _has_nan(query, key, is_causal).unsqueeze(-1)
            out = out + torch.where(is_nan, math.nan, 0.0).to(out.dtype)
        return (out if empty is None else out.masked_fill(empty, 0.0)).transpose(1, 2)

    def attention_weights(
        self, query: Tensor, key: Tensor, is_causal: bool = False, attention_mask: Mask = None
    ) -> Tensor:
        """(b, n, m): probabilities without dropout, averaged over the heads."""
        _check(query, key, key, is_causal, attention_mask)
        all_keys = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device)
        mask, blind = _visible(query, is_causal, all_keys if attention_mask is None else attention_mask)
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        keys = _without_hidden(key, attention_mask).repeat_interleave(query.shape[2] // key.shape[2], 2)
        scores = torch.einsum("bihd,bjhd->bhij", query, keys) * scale
        logits = scores.masked_fill(~mask, -math.inf)
        empty = blind | (logits == -math.inf).all(-1, keepdim=True)  # scores may overflow
        return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).mean(1)

    def extra_repr(self) -> str:
        shown = {"softmax_scale": (self.softmax_scale, None), "dropout": (self.dropout, 0.0)}
        return ", ".join(f"{name}={value!r}" for name, (value, default) in shown.items() if value != default)


def _check(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Mask) -> None:
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


def _without_hidden(x: Tensor, mask: Mask) -> Tensor:
    """Zeros for hidden keys, which may hold anything: NaN times a weight of 0 is NaN."""
    return x if mask is None else x.masked_fill(~mask[:, :, None, None], 0.0)


def _visible(query: Tensor, is_causal: bool, keys: Tensor) -> tuple[Tensor, Tensor]:
    """What each query may see, (b, 1, 1 or n, m), and the queries that see nothing, for which all is seen."""
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
