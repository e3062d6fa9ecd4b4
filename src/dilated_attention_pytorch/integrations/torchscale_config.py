"""torchscale's settings as arguments of this library's LongNet. Plain data; nothing is evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import check_flags, one_of, parse_json

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
