"""Stacks of transformer layers in the structure of torchscale's LongNet: tensors in, tensors out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..checks import check_count, check_flags
from ..decode import DilatedKVCache
from .call_checks import check_caches, check_embedded, check_in_step
from .longnet_config import LongNetDecoderConfig, LongNetEncoderConfig, StackConfig
from .pretrained import PretrainedModel
from .transformer import (
    Device,
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    Dtype,
    Lengths,
    Mask,
)

Caches = Sequence[DilatedKVCache] | None
_NOT_OF_LAYERS = ("drop_path_rate", "normalize_output", "checkpoint_activations", "attention_options")


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


class LongNetStack(PretrainedModel):
    """Layers, one after the other, and a final norm. It can be saved where its settings are plain data."""

    config_class: ClassVar[type[StackConfig]] = LongNetEncoderConfig
    _layer_class: type[DilatedTransformerEncoderLayer] = DilatedTransformerEncoderLayer

    def __init__(
        self,
        d_model: int = 768,
        nhead: int = 12,
        num_layers: int = 12,
        *,
        device: Device = None,
        dtype: Dtype = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if "batch_first" in settings:
            raise TypeError("batch_first is no option of a stack, whose tensors are (b, n, d_model)")
        sizes = {"d_model": d_model, "nhead": nhead, "num_layers": num_layers}
        self.config: StackConfig = self.config_class.of(**sizes, **settings)
        config = self.config
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        options = {**config.stack_options(), **config.attention_options, **placed}
        options = {name: value for name, value in options.items() if name not in _NOT_OF_LAYERS}
        cross_attention = getattr(config, "cross_attention", None)
        if self._layer_class is DilatedTransformerDecoderLayer:
            options["cross_attention"] = cross_attention
        if config.gamma_init is None:
            # Alone, encoder and decoder have one gain; behind an encoder its number of layers plays no part.
            gain = magneto_gamma(0 if cross_attention is None else 1, num_layers, is_decoder=True)
            options["gamma_init"] = gain if config.sub_layer_norm else 1.0
        self.d_model, self.checkpoint_activations = d_model, config.checkpoint_activations
        rates = [config.drop_path_rate * depth / max(1, num_layers - 1) for depth in range(num_layers)]
        self.layers = nn.ModuleList(self._layer_class(**options, drop_path=rate) for rate in rates)
        self.layer_norm: nn.LayerNorm | None = None
        if config.normalize_output:
            self.layer_norm = nn.LayerNorm(d_model, config.layer_norm_eps, **placed)

    def reset_parameters(self) -> None:
        """Initialises all layers, as after `.to_empty()`."""
        for layer in self._typed_layers():
            layer.reset_parameters()
        if self.layer_norm is not None:
            self.layer_norm.reset_parameters()

    def make_caches(
        self, batch_size: int, device: Device = None, dtype: Dtype = None
    ) -> list[DilatedKVCache]:
        """An empty cache a layer, for `caches` of `forward`; see `MultiheadModule.make_cache`."""
        return [layer.self_attn.make_cache(batch_size, device, dtype) for layer in self._typed_layers()]

    @property
    def is_sharded(self) -> bool:
        """Whether inputs are parts of a sequence that several processes share."""
        return self._typed_layers()[0].self_attn.is_sharded

    def _typed_layers(self) -> list[DilatedTransformerEncoderLayer]:
        return [each for each in self.layers if isinstance(each, DilatedTransformerEncoderLayer)]

    def _run(
        self, x: Tensor, call: dict[str, Any], caches: Caches, return_all: bool
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Applies layer by layer, each with the arguments `call` and its cache, then the final norm."""
        check_embedded("x", x, self.d_model, "(b, n, d_model)")
        check_flags(return_all=return_all)
        if caches is not None:
            self._check_cached(x, call, caches)
        recompute = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        states = [x] if return_all else []
        for index, layer in enumerate(self.layers):
            if recompute and caches is None:
                x = checkpoint(layer, x, **call, use_reentrant=False)
            else:
                x = layer(x, **call, cache=None if caches is None else caches[index])
            if return_all:
                states.append(x)
        out = x if self.layer_norm is None else self.layer_norm(x)
        return (out, states) if return_all else out

    def _check_cached(self, x: Tensor, call: dict[str, Any], caches: Sequence[DilatedKVCache]) -> None:
        """Raises before any layer runs: caches of which some had taken the tokens would be out of step."""
        check_caches(caches, len(self.layers))
        given = [each for each in (x, *call.values()) if isinstance(each, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*given, *self.layers.parameters())):
            raise ValueError(
                "a stack with caches has no gradient: call it under torch.no_grad() or "
                "torch.inference_mode(), got inputs or weights that require one"
            )
        for layer, cache in zip(self._typed_layers(), caches, strict=True):
            layer.self_attn.check_call(x, is_causal=True, cache=cache)
        check_in_step(caches)


class LongNetEncoder(LongNetStack):
    """Encoder layers and a final norm over (b, n, d_model); loads state dicts of torchscale's encoder layers.

    Args:
        d_model, nhead, num_layers, dim_feedforward: features, heads, layers, features inside feed-forwards.
        drop_path_rate: of the last layer; those before grow linearly from 0, which a single layer has.
        normalize_output: end with `layer_norm`.
        gamma_init: gain of the initial weights, by default `magneto_gamma` of a model that is only this
            stack; 1 without sub_layer_norm.
        checkpoint_activations: in training keep only the inputs of the layers and compute them once more.
        settings: the other fields of `LongNetEncoderConfig`, such as segment_lengths, dilation_rates, dropout
            and kind; what is no field goes to the attention modules, such as head_offsets="blocked", and is
            refused if these do not know it.

    It embeds nothing: tokens, tiles and their absolute positions are the caller's.
    """

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Mask = None,
        is_causal: bool = False,
        *,
        return_all: bool = False,
        caches: Caches = None,
        lengths: Lengths = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """x (b, n, d_model) -> (b, n, d_model).

        Args:
            key_padding_mask: (b, n) bool, True where a key is ignored. It hides keys only.
            return_all: also return the list of input and outputs of all layers, before the final norm.
            caches: from `make_caches`: x holds the next n tokens of each row. Needs is_causal=True and no
                gradients.
            lengths: (b,) ints, how many of the n tokens of each row are real, with caches only.
        """
        call = {"src_key_padding_mask": key_padding_mask, "is_causal": is_causal, "lengths": lengths}
        return self._run(x, call, caches, return_all)


class LongNetDecoder(LongNetStack):
    """Decoder layers and a final norm over (b, n, d_model), causal; loads those of torchscale's decoder.

    Args:
        cross_attention: "dense", "dilated" or None; see `DilatedTransformerDecoderLayer`.
        gamma_init: by default `magneto_gamma` of a decoder, with cross attention of one behind an encoder.
        Others: as in `LongNetEncoder`.
    """

    config_class = LongNetDecoderConfig
    _layer_class = DilatedTransformerDecoderLayer

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        key_padding_mask: Mask = None,
        memory_key_padding_mask: Mask = None,
        is_causal: bool = True,
        *,
        return_all: bool = False,
        caches: Caches = None,
        lengths: Lengths = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """x (b, n, d_model) and memory (b, m, d_model) -> (b, n, d_model).

        Args:
            memory: needed unless cross_attention is None; m == n with "dilated".
            key_padding_mask, memory_key_padding_mask: (b, n) and (b, m) bool, True where a key is ignored.
            is_causal: False attends in both directions.
            return_all, caches, lengths: as in `LongNetEncoder.forward`.
        """
        masks = {"tgt_key_padding_mask": key_padding_mask, "memory_key_padding_mask": memory_key_padding_mask}
        call = {"memory": memory, **masks, "tgt_is_causal": is_causal, "lengths": lengths}
        return self._run(x, call, caches, return_all)
