"""torchscale's LongNet as a `LongNetEncoder` or `LongNetDecoder`: its settings as plain data, its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checks import check_flags, one_of, parse_json
from ..modules.longnet import LongNetDecoder, LongNetEncoder
from ..modules.state_dicts import LoadReport, copy_state
from .checkpoints import check_torchscale_pattern, plain_names, split_torchscale_state

_PARTS = ("encoder", "decoder")
# torchscale's name: this library's name, and torchscale's default.
_SIZES = {
    "embed_dim": ("d_model", 768),
    "attention_heads": ("nhead", 12),
    "ffn_embed_dim": ("dim_feedforward", 3072),
    "layers": ("num_layers", 12),
}
_SHARED = {
    "dropout": ("dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "activation_dropout": ("activation_dropout", 0.0),
    "drop_path_rate": ("drop_path_rate", 0.0),
    "activation_fn": ("activation", "gelu"),
    "layernorm_eps": ("layer_norm_eps", 1e-5),
    "subln": ("sub_layer_norm", True),
    "checkpoint_activations": ("checkpoint_activations", False),
}
_FLAGS = (
    *("subln", "checkpoint_activations", "normalize_output", "xpos_rel_pos"),
    *(f"{part}_normalize_before" for part in _PARTS),
)
# The only value that can be honoured, and what another would ask for.
_FIXED = {
    "deepnorm": (False, "residuals scaled by DeepNorm"),
    "moe_freq": (0, "mixtures of experts"),
    "use_xmoe": (False, "mixtures of experts"),
    "multiway": (False, "multiway layers"),
    "layernorm_embedding": (False, "norm of the embeddings"),
    "no_scale_embedding": (True, "embeddings scaled by sqrt(embed_dim)"),
}
# Of embeddings, output layers, experts that are not there, training machines, and flash-attn.
_WITHOUT_EFFECT = {
    *("bert_init", "block_shift", "ddp_rank", "flash_attention", "fsdp", "img_size", "in_chans"),
    *("max_source_positions", "max_target_positions", "moe_eval_capacity_token_fraction"),
    *("moe_expert_count", "moe_gating_use_fp32", "moe_normalize_gate_prob_before_dropping"),
    *("moe_second_expert_policy", "moe_top1_expert", "no_output_layer", "patch_size", "seq_parallel"),
    *("share_all_embeddings", "share_decoder_input_output_embed", "share_encoder_input_output_embed"),
    *("vocab_size",),
}
_OWN = {
    *("segment_length", "dilated_ratio", "normalize_output", "xpos_rel_pos", "xpos_scale_base"),
    *("rel_pos_buckets", "max_rel_pos"),
    *(f"{part}_{name}" for part in _PARTS for name in (*_SIZES, "normalize_before")),
}


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


def torchscale_settings(config: Mapping[str, Any], part: str = "encoder") -> dict[str, Any]:
    """Arguments of `LongNetEncoder` (or with part="decoder" `LongNetDecoder`) for settings of torchscale.

    `config` holds arguments of torchscale's EncoderConfig, DecoderConfig or EncoderDecoderConfig; what is
    absent has torchscale's default. segment_length and dilated_ratio are lists of integers, or such lists as
    text ("[1024, 2048]"), which is read as JSON. What these layers cannot do (DeepNorm, norms after the
    residual, mixtures of experts, multiway, relative position biases) and unknown names are errors.
    """
    one_of("part", part, _PARTS)
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a mapping of torchscale's settings, got {type(config).__name__}")
    if odd := [name for name in config if not isinstance(name, str)]:
        raise TypeError(f"config must have strings as names, got {odd[0]!r}")
    if unknown := sorted(set(config) - _OWN - _SHARED.keys() - _FIXED.keys() - _WITHOUT_EFFECT):
        raise ValueError(f"config must hold settings of torchscale's LongNet only, got {unknown}")
    check_flags(**{name: config[name] for name in _FLAGS if name in config})
    for name, (allowed, fact) in _FIXED.items():
        if config.get(name, allowed) != allowed:
            raise ValueError(f"{name} must be {allowed}, these layers have no {fact}, got {config[name]!r}")
    buckets = {name: config.get(name, 0) for name in ("rel_pos_buckets", "max_rel_pos")}
    for name, value in buckets.items():
        if type(value) is not int:
            raise ValueError(f"{name} must be an integer, got {value!r}")
    if min(buckets.values()) > 0:
        got = " and ".join(f"{name}={value}" for name, value in buckets.items())
        raise ValueError(f"dilated attention has no relative position bias, got {got}")
    # torchscale's sub-layer norms turn norms before the residual on, whatever the config says.
    if not config.get("subln", True) and not config.get(f"{part}_normalize_before", True):
        raise ValueError(f"these layers normalise before attention, got {part}_normalize_before=False")
    settings = {ours: config.get(f"{part}_{name}", default) for name, (ours, default) in _SIZES.items()}
    settings |= {ours: config.get(name, default) for name, (ours, default) in _SHARED.items()}
    settings["segment_lengths"] = _integers(config, "segment_length")
    settings["dilation_rates"] = _integers(config, "dilated_ratio")
    if part == "encoder":
        settings["normalize_output"] = config.get("normalize_output", True)
    if config.get("xpos_rel_pos", False):
        settings |= {"position_encoding": "xpos", "xpos_scale_base": config.get("xpos_scale_base", 512)}
    return settings


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


def _integers(config: Mapping[str, Any], name: str) -> Sequence[int]:
    values = config.get(name)
    if isinstance(values, str):
        try:
            values = parse_json(values)
        except ValueError as error:
            raise ValueError(f"{name} must be a list of integers, got {config[name]!r}") from error
    if not isinstance(values, Sequence) or not values or any(type(each) is not int for each in values):
        raise ValueError(f"{name} must be a list of integers, got {config.get(name)!r}")
    return tuple(values)
