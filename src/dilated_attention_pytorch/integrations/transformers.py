"""`attn_implementation="dilated"` for models of Hugging Face transformers, which are imported by `register`.

config.dilated_attention = {"max_length": 32768}
model = AutoModelForCausalLM.from_pretrained(name, config=config, attn_implementation="dilated")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_flags, check_positive_int, did_you_mean, one_of, plain_int
from ..modules.attention import warn_isolated
from ..ops import check_execution
from ..ring import group_size
from ..spec import DilatedSpec, Execution, branches_for
from .tokens import (
    SLIDING_WINDOW,
    TokenMask,
    attend_new,
    attend_rows,
    checked_mask,
    dilated_attention_mask,
    longest_row,
)

Settings = Mapping[str, Any]
REQUIRED = ("segment_lengths", "dilation_rates")
# Settings that no new token of a causal sequence can feel: `attend_last` does not take them.
WITHOUT_EFFECT_ON_NEW = ("tail", "detach_mixing")
SPEC = (*REQUIRED, "head_mixing", "head_offsets", *WITHOUT_EFFECT_ON_NEW)
EXECUTION = tuple(field.name for field in fields(Execution))
# Of whole models, beside those of an attention, and their defaults.
MODEL: dict[str, Any] = {"max_length": None, "allow_isolated_segments": False, "sliding_layers": "refuse"}
_branches = lru_cache(branches_for)  # so that what it warns of is said once, and not by every layer
# What models hand to their attention that changes its result, and that dilated attention has no place for.
REFUSED = {
    "sliding_window": SLIDING_WINDOW,
    "softcap": "soft capping of the scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "output_attentions": "attention weights as an output (dilated_attention_pytorch.attention_rows has them)",
    "cache": "a paged cache",
    "indices": "a model that selects its own keys",
    "block_indices": "a model that selects its own blocks of keys",
}


def register(name: str = "dilated") -> None:
    """Makes `attn_implementation=name` known to transformers, with its mask function. May be repeated.

    Models then read `config.dilated_attention`, see `check_model_settings`. Raises ImportError without
    transformers, and ValueError for the name of another implementation.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name must be an identifier, got {name!r}")
    attentions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    if attentions.get(name, dilated_attention_forward) is not dilated_attention_forward or (
        name == "eager" or masks.get(name, dilated_attention_mask) is not dilated_attention_mask
    ):
        raise ValueError(f"name must not be that of another attention implementation, got {name!r}")
    # transformers looks for these words in a name, and then expects what belongs to them.
    if any(word in name for word in ("flash", "flex", "sdpa", "paged")):
        raise ValueError(f"name must not contain flash, flex, sdpa or paged, got {name!r}")
    AttentionInterface.register(name, dilated_attention_forward)
    AttentionMaskInterface.register(name, dilated_attention_mask)


def use_dilated_attention(model: nn.Module, settings: Settings, *, name: str = "dilated") -> None:
    """Switches a `PreTrainedModel` and all of its sub-models to dilated attention, registered as `name`.

    `settings` are what `config.dilated_attention` will hold, see `check_model_settings`.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel of transformers, got {type(model).__name__}")
    register(name)
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if fixed := [type(each).__name__ for each in models if not each._can_set_attn_implementation()]:
        rule = "model must take its attention from transformers' AttentionInterface"
        raise ValueError(f"{rule}, got {', '.join(fixed)}")
    wholes = (model.config, model.config.get_text_config())
    plain = [_plain_settings(settings, _longest_input(each.config, *wholes)) for each in models]
    for each, data in zip(models, plain, strict=True):
        each.config.dilated_attention = data
        each.config.attn_implementation = name  # as `_settings_of` does
    model.set_attn_implementation(name)


def load(
    model_class: Any, path: Any, settings: Settings | None = None, *, name: str = "dilated", **options: Any
) -> Any:
    """A pretrained model with dilated attention, in all of its sub-models.

    `model_class` is one of transformers or one of its Auto classes, `path` and `options` are those of its
    `from_pretrained`. The settings are by default those that the model was saved with.
    """
    register(name)
    model = model_class.from_pretrained(path, attn_implementation=name, **options)
    found = getattr(model.config, "dilated_attention", None) if settings is None else settings
    if found is None:
        raise ValueError(f"settings must be given where a model was saved without them, got none in {path}")
    use_dilated_attention(model, found, name=name)
    return model


def dilated_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | TokenMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' `AttentionInterface`.

    Args:
        module: the attention layer; its `config.dilated_attention` holds the settings.
        query: (b, h, n, d), the last n of N positions.
        key, value: (b, h_kv, N, d), values may have fewer features; what lies beyond the mask's length is
            the unused room of a static cache.
        attention_mask: what `dilated_attention_mask` returns, or such tokens as a `TokenMask` has.
        dropout, scaling: of the probabilities and of the scores; 0 and 1 / sqrt(d) by default.
        is_causal: where no `TokenMask` tells; by default what the module says.

    Returns:
        (out (b, n, h, d) with the features of the values, None); what padding gives, see `tokens`.

    The segments of a row count its tokens: padding, on either side or between, takes no place in them. With
    n == N, and whenever a gradient is needed, this is `dilated_attention`; else the new tokens read only the
    keys that their segments select.
    """
    if isinstance(attention_mask, TokenMask):
        if attention_mask.refusal is not None:
            raise ValueError(attention_mask.refusal)
        if attention_mask.pairs is not None:  # of a layer that keeps its window
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            _refuse(module, query, {**kwargs, "sliding_window": None})
            own = (query, key, value, attention_mask.pairs)
            return sdpa_attention_forward(module, *own, dropout=dropout, scaling=scaling)[0], None
        is_causal, attention_mask = attention_mask.is_causal, attention_mask.tokens
    _refuse(module, query, kwargs)
    branches, of_model = _settings_of(module, query.shape[1])
    settings = {**call_options(branches), "scale": scaling}
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    features = value.shape[-1]
    if features < query.shape[-1]:  # multi-head latent attention
        value = nn.functional.pad(value, (0, query.shape[-1] - features))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = checked_mask(attention_mask, kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"), q, k)
    if mask is not None:
        k, v = k[:, : mask.shape[1]], v[:, : mask.shape[1]]
    n, total = q.shape[1], k.shape[1]
    if n > total or (n < total and not causal):
        raise ValueError(f"dilated attention has no cross attention, got {n} queries and {total} keys")
    longest = max(settings["segment_lengths"])
    if total > longest and not (of_model["allow_isolated_segments"] or torch.compiler.is_compiling()):
        warn_isolated(module, longest_row(mask, total), longest)
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if n == total or needs_gradient or dropout:
        if n < total:
            q = nn.functional.pad(q, (0, 0, 0, 0, total - n, 0))  # in front, where nothing is read
        out = attend_rows(q, k, v, mask, dropout_p=dropout, is_causal=bool(causal), **settings)
        return out[:, total - n :, :, :features], None
    options = {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT_ON_NEW}
    options["execution"] = replace(settings["execution"], memory="fresh")
    return attend_new(q, k, v, mask, **options)[..., :features], None


def _refuse(module: nn.Module, query: Tensor, kwargs: Settings) -> None:
    for name, what in REFUSED.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"dilated attention cannot honour {what}: {name} must be None, got {shown}")
    is_decoder, is_causal = getattr(module, "is_decoder", False), getattr(module, "is_causal", True)
    is_cross = getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__
    if is_cross or (is_decoder and not is_causal):
        raise ValueError(f"dilated attention has no cross attention, got {type(module).__name__}")
    here = query.shape[1]
    heads = getattr(getattr(module, "config", None), "num_attention_heads", here)
    if heads != here and group_size() > 1:
        rule = f"dilated attention needs all {heads} heads of a layer on one rank"
        raise ValueError(f"{rule}, got {here}: tensor parallelism is not supported here")


def _settings_of(module: nn.Module, num_heads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    config: Any = getattr(module, "config", None)
    settings: Settings | None = getattr(config, "dilated_attention", None)
    if settings is None:
        raise ValueError(
            'dilated attention needs its settings, as in config.dilated_attention = {"max_length": 32768}, '
            f"got none in the {type(config).__name__} of {type(module).__name__}"
        )
    if not torch.compiler.is_compiling():  # saved with the config, and obeyed when it is loaded
        config.attn_implementation = getattr(config, "_attn_implementation", "dilated")
    return check_model_settings(settings, _longest_input(config), num_heads)


def _longest_input(*configs: Any) -> int | None:
    """max_position_embeddings of the first config that has it; some have it without a use, and not whole."""
    found = (getattr(each, "max_position_embeddings", None) for each in configs)
    return next((length for length in found if isinstance(length, int) and length > 0), None)


def check_settings(settings: Settings) -> dict[str, Any]:
    """Validates settings and returns them in types that JSON knows; `call_options` gives them to a call.

    `segment_lengths` and `dilation_rates` are required; `head_mixing`, `head_offsets`, `tail`,
    `detach_mixing`, `kernel`, `workspace_bytes`, `memory` and `use_pattern_cache` are optional. Scale,
    causality and dropout are not settings: the model decides on them.
    """
    _check_names(settings, (*SPEC, *EXECUTION))
    if missing := " and ".join(key for key in REQUIRED if key not in settings):
        rule = f"settings of dilated attention must include {' and '.join(REQUIRED)}"
        raise ValueError(f"{rule}, got no {missing}")
    spec = DilatedSpec(**{key: settings[key] for key in SPEC if key in settings})
    check_execution(call_options(settings)["execution"])
    return {**settings, **{key: list(getattr(spec, key)) for key in REQUIRED}}


def call_options(settings: Settings) -> dict[str, Any]:
    """Settings as keywords of `dilated_attention`."""
    options = {key: value for key, value in settings.items() if key not in EXECUTION}
    execution = Execution(**{key: settings[key] for key in EXECUTION if key in settings})
    return {**options, "execution": execution}


def check_model_settings(
    settings: Settings, max_length: int | None = None, num_heads: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of a model: those of `check_settings`, and those of `MODEL` with their defaults.

    Without `segment_lengths` and `dilation_rates` the branches are those of `branches_for`, for
    `settings["max_length"]` or else for `max_length`, the longest input that the model's config names.
    `allow_isolated_segments` silences `warn_isolated`; `sliding_layers` says whether layers with a sliding
    window are refused, "refuse", or keep their own attention, "own".
    """
    _check_names(settings, (*SPEC, *MODEL, *EXECUTION))
    of_model = {**MODEL, "max_length": max_length}
    of_model |= {key: settings[key] for key in MODEL if key in settings}
    check_flags(allow_isolated_segments=of_model["allow_isolated_segments"])
    one_of("sliding_layers", of_model["sliding_layers"], ("refuse", "own"))
    rest = {key: value for key, value in settings.items() if key not in MODEL}
    if of_model["max_length"] is not None:
        check_positive_int("max_length", length := plain_int(of_model["max_length"]))
        if not _has_lists(settings):
            rest |= dict(zip(REQUIRED, _branches(length, num_heads), strict=True))
    elif not _has_lists(settings):
        raise ValueError(
            "settings of dilated attention must include max_length, or segment_lengths and dilation_rates, "
            "where the model's config has no max_position_embeddings, got neither"
        )
    return check_settings(rest), of_model


def _plain_settings(settings: Settings, max_length: int | None) -> dict[str, Any]:
    """Valid settings of a model as data that JSON knows; the length is kept where it makes the branches."""
    branches, of_model = check_model_settings(settings, max_length)
    if _has_lists(settings):
        return {**settings, **{key: branches[key] for key in REQUIRED}}
    return {**settings, "max_length": of_model["max_length"]}


def _has_lists(settings: Settings) -> bool:
    return any(key in settings for key in REQUIRED)


def _check_names(settings: Settings, known: tuple[str, ...]) -> None:
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings of dilated attention must be a dict, got {type(settings).__name__}")
    if unknown := [key for key in settings if key not in known]:
        hint = did_you_mean(str(unknown[0]), known, 1) or f" They must be among {', '.join(known)}"
        raise ValueError(f"dilated settings have no {', '.join(map(repr, unknown))}.{hint}")
