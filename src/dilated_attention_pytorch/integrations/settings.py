"""Dilated attention described by plain data, as configuration files of other libraries hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checks import check_execution
from ..plan import DEFAULT_WORKSPACE_BYTES
from ..spec import DilatedSpec

REQUIRED = ("segment_lengths", "dilation_rates")
SPEC = (*REQUIRED, "head_mixing", "head_offsets", "tail", "detach_mixing")
EXECUTION = {
    "kernel": "auto",
    "workspace_bytes": DEFAULT_WORKSPACE_BYTES,
    "memory": "fresh",
    "use_pattern_cache": True,
}


def check_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Validates settings and returns them as keywords of `dilated_attention`, in types that JSON knows.

    `segment_lengths` and `dilation_rates` are required; `head_mixing`, `head_offsets`, `tail`,
    `detach_mixing`, `kernel`, `workspace_bytes`, `memory` and `use_pattern_cache` are optional. Scale,
    causality and dropout are not settings: the model decides on them.
    """
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings of dilated attention must be a dict, got {type(settings).__name__}")
    known = (*SPEC, *EXECUTION)
    unknown = ", ".join(repr(key) for key in settings if key not in known)
    if unknown:
        raise ValueError(f"settings of dilated attention must be among {', '.join(known)}, got {unknown}")
    missing = " and ".join(key for key in REQUIRED if key not in settings)
    if missing:
        raise ValueError(
            f"settings of dilated attention must include {' and '.join(REQUIRED)}, got no {missing}"
        )
    spec = DilatedSpec(**{key: settings[key] for key in SPEC if key in settings})
    check_execution(**{key: settings.get(key, default) for key, default in EXECUTION.items()})
    return {**settings, **{key: list(getattr(spec, key)) for key in REQUIRED}}
