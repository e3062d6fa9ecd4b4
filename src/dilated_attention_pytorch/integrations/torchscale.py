"""torchscale's LongNet as a `LongNetEncoder` or `LongNetDecoder`: its settings as plain data, its weights.

Files of checkpoints are read without running code that they hold.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import check_flags, one_of, parse_json
from ..modules.attention import DilatedAttention
from ..modules.longnet import LongNetDecoder, LongNetEncoder
from ..modules.multihead import MultiheadModule
from ..modules.positions import XPos
from ..modules.pretrained import (
    LoadReport,
    check_has_memory,
    check_state,
    copy_state,
    read_tensors,
    regroup_projections,
)

Stack = LongNetEncoder | LongNetDecoder
Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Names = Sequence[str]
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
_FLAGS = {"subln", "checkpoint_activations", "normalize_output", "xpos_rel_pos"}
_FLAGS |= {f"{part}_normalize_before" for part in _PARTS}
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
    *("max_source_positions", "max_target_positions", "moe_eval_capacity_token_fraction", "vocab_size"),
    *("moe_expert_count", "moe_gating_use_fp32", "moe_normalize_gate_prob_before_dropping"),
    *("moe_second_expert_policy", "moe_top1_expert", "no_output_layer", "patch_size", "seq_parallel"),
    *("share_all_embeddings", "share_decoder_input_output_embed", "share_encoder_input_output_embed"),
}
_BIAS = ("rel_pos_buckets", "max_rel_pos")
_OWN = {
    *("segment_length", "dilated_ratio", "normalize_output", "xpos_rel_pos", "xpos_scale_base", *_BIAS),
    *(f"{part}_{name}" for part in _PARTS for name in (*_SIZES, "normalize_before")),
}
# Keys under which training scripts put the weights.
_HOLDERS = ("model", "state_dict")
# What torch.load raises for bytes that it did not write: it takes them for instructions, and obeys some.
UNREADABLE: tuple[type[Exception], ...] = (pickle.UnpicklingError, struct.error, EOFError, RuntimeError)
UNREADABLE += (LookupError, ValueError, TypeError, AttributeError, AssertionError)
# What wrappers of torch and fairscale put into names.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_fpw_module.", "_orig_mod.")
_REFUSED = {
    r"relative_attention_bias\.": "a relative position bias (rel_pos_buckets), which dilated attention lacks",
    r"(^|\.)moe_layer\.": "a mixture of experts (moe_freq), which these layers have none of",
    r"\.[AB]\.(\w+\.)*(weight|bias)$": "two sets of weights (multiway), of which these layers have one",
}
_OUTSIDE_LAYERS = ("embed_tokens.", "embed_positions.", "output_projection.", "layernorm_embedding.")


def read_checkpoint(path: Path, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """The state dict in a file, `.safetensors` or else of `torch.save`, on `device` (the CPU by default).

    See `unwrap_state`. Pickled objects other than tensors and plain data are refused.
    """
    check_has_memory(device)
    if path.suffix == ".safetensors":
        return read_tensors(path, device=device)
    try:
        held = torch.load(path, map_location="cpu" if device is None else device, weights_only=True)
    except UNREADABLE as error:
        rule = f"{path} must be a file of torch.save that holds tensors and plain data only"
        raise ValueError(f"{rule}, got: {error!r}") from error
    return unwrap_state(held, source=str(path))


def unwrap_state(held: Any, *, source: str) -> dict[str, Tensor]:
    """The state dict that a checkpoint is, or holds under "model" or "state_dict"."""
    odd = f"a {type(held).__name__}"
    if isinstance(held, Mapping):
        for name in _HOLDERS:
            if isinstance(held.get(name), Mapping):
                return unwrap_state(held[name], source=source)
        if held and all(isinstance(key, str) and isinstance(x, Tensor) for key, x in held.items()):
            return dict(held)
        others = (f"{key!r}: a {type(x).__name__}" for key, x in held.items() if not isinstance(x, Tensor))
        odd = next(others, "{}")
    rule = f"{source} must be a state dict, or hold one under {' or '.join(map(repr, _HOLDERS))}"
    raise ValueError(f"{rule}, got {odd}")


def plain_names(state: Tensors, prefix: str = "") -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors by name without wrappers and `prefix`, and the names that do not start with it."""
    check_state(state)
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string, got {prefix!r}")
    named: dict[str, Tensor] = {}
    outside = []
    for name, tensor in state.items():
        plain = name.removeprefix("module.")  # of DistributedDataParallel
        for wrapper in _WRAPPERS:
            plain = plain.replace(wrapper, "")
        if not plain.startswith(prefix):
            outside.append(name)
        elif plain[len(prefix) :] in named:
            raise ValueError(f"the names of a state dict must differ without wrappers, got {plain} twice")
        else:
            named[plain[len(prefix) :]] = tensor
    return named, tuple(outside)


def split_torchscale_state(stack: Stack, named: Tensors) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors by the names of `stack`, and the names of constants, which are checked.

    Raises unless the layers attend as torchscale's do.
    """
    _check_pattern(stack)
    for pattern, fact in _REFUSED.items():
        if refused := [name for name in named if re.search(pattern, name)]:
            raise ValueError(f"a checkpoint must not have {fact}, got {refused[0]}")
    found = dict(named)
    constants = re.compile(r"version|layers\.\d+\.self_attn\.xpos\.scale")  # "version" is fairseq's
    dropped = {name: found.pop(name) for name in named if constants.fullmatch(name)}
    for path, attention in stack.named_modules():
        if isinstance(attention, MultiheadModule):
            scale = f"{path}.xpos.scale"
            if f"{path}.out_proj.weight" in named or scale in named:
                _check_xpos(attention, scale, dropped.get(scale))
            if attention.fused_qkv:
                regroup_projections(found, f"{path}.", fused=True)
    return found, tuple(dropped)


def _check_pattern(stack: Stack) -> None:
    needed = {"head_mixing": "all", "head_offsets": "blocked"}
    if isinstance(stack, LongNetEncoder):  # phantom keys lie after every query of a causal decoder
        needed["tail"] = "phantom"
    for number, layer in enumerate(stack.layers):
        attention = layer.get_submodule("self_attn.attention")
        if not isinstance(attention, DilatedAttention):
            kind = type(attention).__name__
            raise ValueError(f"torchscale's LongNet has dilated attention, got a {kind} in layer {number}")
        own = {name: getattr(attention.spec, name) for name in needed}
        if wrong := [f"{name}={value!r}" for name, value in own.items() if value != needed[name]]:
            rule = ", ".join(f"{name}={value!r}" for name, value in needed.items())
            raise ValueError(f"torchscale's weights need {rule}, got {', '.join(wrong)} in layer {number}")


def _check_xpos(attention: MultiheadModule, name: str, scale: Tensor | None) -> None:
    has_xpos, d = isinstance(attention.positions, XPos), attention.head_dim
    if scale is None and has_xpos:
        raise ValueError(f'position_encoding="xpos" needs a checkpoint with {name}, got one without XPOS')
    if scale is None:
        return
    if not has_xpos:
        rule = 'a checkpoint with XPOS needs position_encoding="xpos"'
        raise ValueError(f"{rule}, got {name} and no such encoding")
    expected = (torch.arange(0, d, 2) + 0.4 * d) / (1.4 * d)
    if scale.shape != expected.shape:
        shapes = f"{tuple(expected.shape)} for heads of {d} features, got {tuple(scale.shape)}"
        raise ValueError(f"{name} must be {shapes}: another number of heads?")
    # Half precision keeps three digits of these numbers between 0.28 and 1.
    if not torch.allclose(scale.detach().float().cpu(), expected, atol=4e-3, rtol=0):
        raise ValueError(f"{name} must be (i + 0.4 d) / (1.4 d) for i = 0, 2 .. d, got {scale.tolist()}")


def load_torchscale_state(
    module: Stack, state: Tensors, *, prefix: str = "", ignore: Names = (), strict: bool = True
) -> LoadReport:
    """Copies the weights of a torchscale LongNet encoder or decoder into `module`, and reports on the names.

    Args:
        module: made with `head_offsets="blocked"`, and an encoder with `tail="phantom"`: what the weights
            were trained with. `encoder_from_torchscale` and `decoder_from_torchscale` make one from a config.
        state: a state dict with torchscale's names, also with those of DDP, FSDP, fairscale and compile.
        prefix: what the names of this module start with, such as "encoder.". Others are reported as outside.
        ignore: beginnings of names (after the prefix) that are not wanted here, such as "embed_tokens.". They
            are reported as outside too.
        strict: missing and unexpected names are an error, which states them. Other shapes always are.

    Nothing is copied unless everything fits. Constants (`xpos.scale`) are checked and dropped. Relative
    position biases, mixtures of experts and multiway layers are refused. A state dict does not tell the
    number of heads, segments, rates, or whether it was trained with DeepNorm: see its config.
    """
    if not isinstance(module, (LongNetEncoder, LongNetDecoder)):
        raise TypeError(f"module must be a LongNetEncoder or a LongNetDecoder, got {type(module).__name__}")
    check_flags(strict=strict)
    if not isinstance(ignore, Sequence) or isinstance(ignore, str) or any(type(x) is not str for x in ignore):
        raise TypeError(f"ignore must be a sequence of strings, got {ignore!r}")
    named, outside = plain_names(state, prefix)
    unwanted = tuple(prefix + name for name in named if name.startswith(tuple(ignore)))
    named = {name: tensor for name, tensor in named.items() if prefix + name not in unwanted}
    found, dropped = split_torchscale_state(module, named)
    report = copy_state(module, found, strict=strict, hint=_hint(module.state_dict(), state, named))
    return replace(report, dropped=dropped, outside=(*outside, *unwanted))


def encoder_from_torchscale(
    config: Config, state: Tensors | None = None, *, prefix: str = "", ignore: Names = (), **options: Any
) -> LongNetEncoder:
    """The `LongNetEncoder` that torchscale's settings `config` describe, with the weights of `state` if any.

    `config` is that of `torchscale_settings`, `prefix` and `ignore` are those of `load_torchscale_state`.
    `options` are further arguments of `LongNetEncoder`, such as dtype, or `detach_mixing=True` for
    torchscale's gradients.
    """
    pattern = {"head_offsets": "blocked", "tail": "phantom"}
    encoder = LongNetEncoder(**{**torchscale_settings(config, "encoder"), **pattern, **options})
    if state is not None:
        load_torchscale_state(encoder, state, prefix=prefix, ignore=ignore)
    return encoder


def decoder_from_torchscale(
    config: Config, state: Tensors | None = None, *, prefix: str = "", ignore: Names = (), **options: Any
) -> LongNetDecoder:
    """The `LongNetDecoder` that torchscale's settings `config` describe, with the weights of `state` if any.

    As `encoder_from_torchscale`, with the arguments of torchscale's DecoderConfig. cross_attention is None by
    default; "dense" is for the decoder of an encoder-decoder.
    """
    pattern = {"head_offsets": "blocked", "cross_attention": None}
    decoder = LongNetDecoder(**{**torchscale_settings(config, "decoder"), **pattern, **options})
    if state is not None:
        load_torchscale_state(decoder, state, prefix=prefix, ignore=ignore)
    return decoder


def torchscale_settings(config: Config, part: str = "encoder") -> dict[str, Any]:
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
    buckets = {name: config.get(name, 0) for name in _BIAS}
    if odd := [name for name, value in buckets.items() if type(value) is not int]:
        raise ValueError(f"{odd[0]} must be an integer, got {buckets[odd[0]]!r}")
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


def _hint(own: Tensors, state: Tensors, named: Tensors) -> str:
    """What a state dict that does not fit may need."""
    first = "layers.0.self_attn_layer_norm.weight"
    if first not in named:
        begins = sorted({name[: -len(first)] for name in state if name.endswith(first)})
        return f" (names of layers start with {', '.join(map(repr, begins))}: see prefix)" if begins else ""
    if any(".inner_attn_ln." in name for name in own) > any(".inner_attn_ln." in name for name in named):
        return " (a checkpoint without sub-layer norms needs sub_layer_norm=False)"
    if beside := [each for each in _OUTSIDE_LAYERS if any(name.startswith(each) for name in named)]:
        return f" (this module takes and gives embeddings: see ignore for {', '.join(map(repr, beside))})"
    return ""


def _integers(config: Config, name: str) -> Sequence[int]:
    values = config.get(name)
    if isinstance(values, str):
        try:
            values = parse_json(values)
        except ValueError as error:
            raise ValueError(f"{name} must be a list of integers, got {config[name]!r}") from error
    if not isinstance(values, Sequence) or not values or any(type(each) is not int for each in values):
        raise ValueError(f"{name} must be a list of integers, got {config.get(name)!r}")
    return tuple(values)
