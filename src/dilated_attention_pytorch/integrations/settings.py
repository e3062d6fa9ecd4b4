"""Dilated attention described by plain data, as configuration files of other libraries hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from ..checks import check_flags, check_positive_int, did_you_mean, one_of, plain_int
from ..ops import check_execution
from ..spec import Branches, DilatedSpec, Execution, branches_for

REQUIRED = ("segment_lengths", "dilation_rates")
SPEC = (*REQUIRED, "head_mixing", "head_offsets", "tail", "detach_mixing")
EXECUTION = tuple(field.name for field in fields(Execution))
# Of whole models, beside those of an attention.
MODEL = ("max_length", "allow_isolated_segments", "sliding_layers")


def check_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Validates settings and returns them in types that JSON knows; `call_options` gives them to a call.

    `segment_lengths` and `dilation_rates` are required; `head_mixing`, `head_offsets`, `tail`,
    `detach_mixing`, `kernel`, `workspace_bytes`, `memory` and `use_pattern_cache` are optional. Scale,
    causality and dropout are not settings: the model decides on them.
    """
    _check_names(settings, (*SPEC, *EXECUTION))
    if missing := " and ".join(key for key in REQUIRED if key not in settings):
        raise ValueError(
            f"settings of dilated attention must include {' and '.join(REQUIRED)}, got no {missing}"
        )
    spec = DilatedSpec(**{key: settings[key] for key in SPEC if key in settings})
    check_execution(call_options(settings)["execution"])
    return {**settings, **{key: list(getattr(spec, key)) for key in REQUIRED}}


def call_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as keywords of `dilated_attention`."""
    options = {key: value for key, value in settings.items() if key not in EXECUTION}
    execution = Execution(**{key: settings[key] for key in EXECUTION if key in settings})
    return {**options, "execution": execution}


def check_model_settings(
    settings: Mapping[str, Any], max_length: int | None = None, num_heads: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of a model: those of `check_settings`, and those of `MODEL` with their defaults.

    Without `segment_lengths` and `dilation_rates` the branches are those of `branches_for`, for
    `settings["max_length"]` or else for `max_length`, the longest input that the model's config names.
    `allow_isolated_segments` silences `warn_isolated`; `sliding_layers` says whether layers with a sliding
    window are refused, "refuse", or keep their own attention, "own".
    """
    _check_names(settings, (*SPEC, *MODEL, *EXECUTION))
    defaults = {"max_length": max_length, "allow_isolated_segments": False, "sliding_layers": "refuse"}
    of_model: dict[str, Any] = {key: settings.get(key, default) for key, default in defaults.items()}
    check_flags(allow_isolated_segments=of_model["allow_isolated_segments"])
    one_of("sliding_layers", of_model["sliding_layers"], ("refuse", "own"))
    rest = {key: value for key, value in settings.items() if key not in MODEL}
    if of_model["max_length"] is not None:
        check_positive_int("max_length", length := plain_int(of_model["max_length"]))
        if not any(key in settings for key in REQUIRED):
            rest |= dict(zip(REQUIRED, _branches(length, num_heads), strict=True))
    elif not any(key in settings for key in REQUIRED):
        raise ValueError(
            "settings of dilated attention must include max_length, or segment_lengths and dilation_rates, "
            "where the model's config has no max_position_embeddings, got neither"
        )
    return check_settings(rest), of_model


def plain_settings(settings: Mapping[str, Any], max_length: int | None) -> dict[str, Any]:
    """Valid settings of a model as data that JSON knows; the length is kept where it makes the branches."""
    branches, of_model = check_model_settings(settings, max_length)
    if any(key in settings for key in REQUIRED):
        return {**settings, **{key: branches[key] for key in REQUIRED}}
    return {**settings, "max_length": of_model["max_length"]}


@lru_cache  # so that what `branches_for` warns of is said once, and not by every layer
def _branches(max_length: int, num_heads: int | None) -> Branches:
    return branches_for(max_length, num_heads)


def _check_names(settings: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings of dilated attention must be a dict, got {type(settings).__name__}")
    if unknown := [key for key in settings if key not in known]:
        hint = did_you_mean(str(unknown[0]), known, 1) or f" They must be among {', '.join(known)}"
        raise ValueError(f"dilated settings have no {', '.join(map(repr, unknown))}.{hint}")
