"""Weights of Prov-GigaPath's slide encoder in a `LongNetViT`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..core.blocks import check_flags
from ..modules.checkpoint_files import unwrap_state
from ..modules.longnet_vit import LongNetViT
from .state_dicts import LoadReport, copy_state, plain_names
from .torchscale import check_torchscale_pattern, split_torchscale_state


def load_gigapath_state(
    model: LongNetViT, state: Mapping[str, Any], *, prefix: str = "", strict: bool = True
) -> LoadReport:
    """Copies the weights of a Prov-GigaPath slide encoder into `model`, and reports on the names.

    Args:
        state: a state dict with Prov-GigaPath's names, or what its file slide_encoder.pth holds: a dict with
            the state dict under "model".
        prefix: what the names start with, "slide_encoder." in a classifier of its fine-tuning code. Names
            that start otherwise are reported as outside.
        strict: missing and unexpected names are an error, which states them. Other shapes always are.

    Nothing is copied unless everything fits. The table `pos_embed`, which is computed here, is dropped.
    `LongNetViT.from_pretrained` reads the file itself, and builds the model by the sizes of the weights.
    """
    if not isinstance(model, LongNetViT):
        raise TypeError(f"model must be a LongNetViT, got {type(model).__name__}")
    check_flags(strict=strict)
    check_torchscale_pattern(model.encoder, is_causal=False)
    named, outside = plain_names(unwrap_state(state, source="state"), prefix)
    dropped = ("pos_embed",) if named.pop("pos_embed", None) is not None else ()
    # The layers have torchscale's names, and may have its refusals.
    inner, constants = split_torchscale_state(model.encoder, plain_names(named, "encoder.")[0])
    outer = {name: tensor for name, tensor in named.items() if not name.startswith("encoder.")}
    found = {**outer, **{f"encoder.{name}": tensor for name, tensor in inner.items()}}
    report = copy_state(model, found, strict=strict)
    return replace(report, dropped=(*dropped, *(f"encoder.{name}" for name in constants)), outside=outside)
