"""The parts of a MAGNETO block (arXiv:2210.06423) beside its attention: feed-forward, drop path, gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import check_count, check_device, check_flags, check_float_dtype, check_positive_int, one_of
from .call_checks import check_positive, check_probabilities

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swish": F.silu}


def magneto_gamma(num_encoder_layers: int, num_decoder_layers: int, *, is_decoder: bool = False) -> float:
    """The gain of v_proj, out_proj, fc1 and fc2 that keeps the updates of deep models bounded.

    For N encoder and M decoder layers: sqrt(log(2 N)) or sqrt(log(2 M)) where there is only one of them;
    else sqrt(log(3 M)) in the decoder and sqrt(log(3 M) log(2 N) / 3) in the encoder. See arXiv:2210.06423.
    """
    for name, value in {
        "num_encoder_layers": num_encoder_layers,
        "num_decoder_layers": num_decoder_layers,
    }.items():
        check_count(name, value)
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
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
        self.fc1 = nn.Linear(d_model, dim_feedforward, True, device, dtype)
        self.ffn_layernorm = (
            nn.LayerNorm(dim_feedforward, layer_norm_eps, True, True, device, dtype) if layer_norm else None
        )
        self.fc2 = nn.Linear(dim_feedforward, d_model, True, device, dtype)
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
