"""Weights of torchscale's LongNet in a `LongNetEncoder` or `LongNetDecoder`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checks import check_flags
from ..modules.longnet_stack import LongNetDecoder, LongNetEncoder
from ..modules.state_dicts import LoadReport, copy_state
from .checkpoints import check_torchscale_pattern, plain_names, split_torchscale_state
from .torchscale_config import torchscale_settings


def load_torchscale_state(
    module: LongNetEncoder | LongNetDecoder,
    state: Mapping[str, Tensor],
    *,
    prefix: str = "",
    ignore: Sequence[str] = (),
    strict: bool = True,
) -> LoadReport:
    """Copies the weights of a torchscale LongNet encoder or decoder into `module`, and reports on the names.

    Args:
        module: made with `head_offsets="blocked"`, and an encoder with `tail="phantom"`: what the weights
            were trained with. `encoder_from_torchscale` and `decoder_from_torchscale` make one from a config.
        state: a state dict with torchscale's names. The names of DDP, FSDP, fairscale and compile wrappers
            are seen through.
        prefix: what the names of this module start with, such as "encoder.". Others are reported as outside.
        ignore: beginnings of names (after the prefix) that are not wanted here, such as "embed_tokens." and
            "output_projection.": this module takes and gives embeddings. They are reported as outside too.
        strict: missing and unexpected names are an error, which states them. Other shapes always are.

    Nothing is copied unless everything fits. Constants (`xpos.scale`) are checked and dropped. Relative
    position biases, mixtures of experts and multiway layers are refused. A state dict does not tell the
    number of heads, segments, rates, or whether it was trained with DeepNorm: that is the config's business.
    """
    if not isinstance(module, (LongNetEncoder, LongNetDecoder)):
        raise TypeError(f"module must be a LongNetEncoder or a LongNetDecoder, got {type(module).__name__}")
    check_flags(strict=strict)
    if not isinstance(ignore, Sequence) or isinstance(ignore, str) or any(type(x) is not str for x in ignore):
        raise TypeError(f"ignore must be a sequence of strings, got {ignore!r}")
    check_torchscale_pattern(module, is_causal=isinstance(module, LongNetDecoder))
    named, outside = plain_names(state, prefix)
    unwanted = tuple(prefix + name for name in named if name.startswith(tuple(ignore)))
    named = {name: tensor for name, tensor in named.items() if prefix + name not in unwanted}
    found, dropped = split_torchscale_state(module, named)
    report = copy_state(module, found, strict=strict, hint=_hint(module, state, named))
    return replace(report, dropped=dropped, outside=(*outside, *unwanted))


def encoder_from_torchscale(
    config: Mapping[str, Any],
    state: Mapping[str, Tensor] | None = None,
    *,
    prefix: str = "",
    ignore: Sequence[str] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> LongNetEncoder:
    """The `LongNetEncoder` that torchscale's settings `config` describe, with the weights of `state` if any.

    `config` holds the arguments of torchscale's EncoderConfig as plain data; see `torchscale_settings`.
    `options` are further arguments of `LongNetEncoder`, such as `detach_mixing=True` for torchscale's
    gradients.
    """
    settings = {
        **torchscale_settings(config, "encoder"),
        "head_offsets": "blocked",
        "tail": "phantom",
        **options,
    }
    encoder = LongNetEncoder(**settings, device=device, dtype=dtype)
    if state is not None:
        load_torchscale_state(encoder, state, prefix=prefix, ignore=ignore)
    return encoder


def decoder_from_torchscale(
    config: Mapping[str, Any],
    state: Mapping[str, Tensor] | None = None,
    *,
    cross_attention: str | None = None,
    prefix: str = "",
    ignore: Sequence[str] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> LongNetDecoder:
    """The `LongNetDecoder` that torchscale's settings `config` describe, with the weights of `state` if any.

    `config` holds the arguments of torchscale's DecoderConfig as plain data; see `torchscale_settings`.
    `cross_attention="dense"` is for the decoder of an encoder-decoder. `options` are further arguments of
    `LongNetDecoder`, such as `detach_mixing=True` for torchscale's gradients.
    """
    settings = {**torchscale_settings(config, "decoder"), "head_offsets": "blocked", **options}
    decoder = LongNetDecoder(cross_attention=cross_attention, **settings, device=device, dtype=dtype)
    if state is not None:
        load_torchscale_state(decoder, state, prefix=prefix, ignore=ignore)
    return decoder


def _hint(
    module: LongNetEncoder | LongNetDecoder, state: Mapping[str, Tensor], named: Mapping[str, Tensor]
) -> str:
    """What a state dict that does not fit may need."""
    first = "layers.0.self_attn_layer_norm.weight"
    if first not in named:
        begins = sorted({name[: -len(first)] for name in state if name.endswith(first)})
        return f" (names of layers start with {', '.join(map(repr, begins))}: see prefix)" if begins else ""
    own = module.state_dict()
    if any(".inner_attn_ln." in name for name in own) and not any(
        ".inner_attn_ln." in name for name in named
    ):
        return " (a checkpoint without sub-layer norms needs sub_layer_norm=False)"
    outer = ("embed_tokens.", "embed_positions.", "output_projection.", "layernorm_embedding.")
    if beside := [each for each in outer if any(name.startswith(each) for name in named)]:
        return f" (this module takes and gives embeddings: see ignore for {', '.join(map(repr, beside))})"
    return ""
