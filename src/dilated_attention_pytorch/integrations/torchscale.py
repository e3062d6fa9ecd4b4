"""Weights of torchscale's LongNet in a `LongNetEncoder` or `LongNetDecoder`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.blocks import check_flags
from ..modules.attention import DilatedAttention
from ..modules.longnet_stack import LongNetDecoder, LongNetEncoder
from ..modules.multihead import MultiheadSkin
from ..modules.positions import XPos
from .state_dicts import LoadReport, copy_state, plain_names
from .torchscale_config import torchscale_settings

_REFUSED = {
    r"relative_attention_bias\.": "a relative position bias (rel_pos_buckets), which dilated attention lacks",
    r"(^|\.)moe_layer\.": "a mixture of experts (moe_freq), which these layers have none of",
    r"\.[AB]\.(\w+\.)*(weight|bias)$": "two sets of weights (multiway), of which these layers have one",
}
_XPOS = re.compile(r"^(?P<attention>layers\.\d+\.self_attn)\.xpos\.scale$")


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
    if isinstance(ignore, str):
        raise TypeError(f"ignore must be a sequence of strings, got the string {ignore!r}")
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


def check_torchscale_pattern(stack: LongNetEncoder | LongNetDecoder, *, is_causal: bool) -> None:
    """The layers attend as torchscale's do. Under `is_causal` phantom keys lie after every query."""
    for number, layer in enumerate(stack.layers):
        attention = layer.get_submodule("self_attn.attention")
        if not isinstance(attention, DilatedAttention):
            kind = type(attention).__name__
            raise ValueError(f"torchscale's LongNet has dilated attention, got a {kind} in layer {number}")
        spec = attention.spec
        needed = {"head_mixing": "all", "head_offsets": "blocked"}
        if not is_causal:
            needed["tail"] = "phantom"
        wrong = [f"{name}={getattr(spec, name)!r}" for name in needed if getattr(spec, name) != needed[name]]
        if wrong:
            rule = ", ".join(f"{name}={value!r}" for name, value in needed.items())
            raise ValueError(f"torchscale's weights need {rule}, got {', '.join(wrong)} in layer {number}")


def split_torchscale_state(
    stack: LongNetEncoder | LongNetDecoder, named: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors by the names of `stack`, and the names of constants, which are checked."""
    for pattern, fact in _REFUSED.items():
        if refused := [name for name in named if re.search(pattern, name)]:
            raise ValueError(f"a checkpoint must not have {fact}, got {refused[0]}")
    found, dropped, scaled = dict(named), [], set()
    for name, tensor in named.items():
        if constant := _XPOS.match(name):
            scaled.add(constant["attention"])
            _check_xpos(stack, constant["attention"], name, tensor)
        if constant or name == "version":  # of fairseq's models
            dropped.append(name)
            del found[name]
    for path, attention in stack.named_modules():
        if not isinstance(attention, MultiheadSkin):
            continue
        if (
            isinstance(attention.positions, XPos)
            and path not in scaled
            and f"{path}.out_proj.weight" in named
        ):
            raise ValueError(
                f'position_encoding="xpos" needs a checkpoint with {path}.xpos.scale, got one without XPOS'
            )
        if attention.fused_qkv:
            _fuse(found, path)
    return found, tuple(dropped)


def _check_xpos(stack: LongNetEncoder | LongNetDecoder, path: str, name: str, scale: Tensor) -> None:
    try:
        attention = stack.get_submodule(path)
    except AttributeError:
        return  # a layer that the stack does not have, reported by its weights
    if not isinstance(attention, MultiheadSkin) or not isinstance(attention.positions, XPos):
        raise ValueError(
            f'a checkpoint with XPOS needs position_encoding="xpos", got {name} and no such encoding'
        )
    d = attention.head_dim
    expected = (torch.arange(0, d, 2) + 0.4 * d) / (1.4 * d)
    if scale.shape != expected.shape:
        shapes = f"{tuple(expected.shape)} for heads of {d} features, got {tuple(scale.shape)}"
        raise ValueError(f"{name} must be {shapes}: another number of heads?")
    # Half precision keeps three digits of these numbers between 0.28 and 1.
    if not torch.allclose(scale.detach().float().cpu(), expected, atol=4e-3, rtol=0):
        raise ValueError(f"{name} must be (i + 0.4 d) / (1.4 d) for i = 0, 2 .. d, got {scale.tolist()}")


def _fuse(found: dict[str, Tensor], path: str) -> None:
    """Three projections become the one that a module with fused projections has."""
    for kind in ("weight", "bias"):
        names = [f"{path}.{which}_proj.{kind}" for which in "qkv"]
        if all(name in found for name in names):
            found[f"{path}.qkv_proj.{kind}"] = torch.cat([found.pop(name) for name in names])


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
