"""Weights of Prov-GigaPath's slide encoder in a `LongNetViT`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..checks import check_flags
from ..modules.checkpoint_files import unwrap_state
from ..modules.longnet_vit import LongNetViT, split_slide_state
from ..modules.state_fit import LoadReport, copy_state
from ..modules.torchscale_names import plain_names


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
    named, outside = plain_names(unwrap_state(state, source="state"), prefix)
    found, dropped = split_slide_state(model, named)
    return replace(copy_state(model, found, strict=strict), dropped=dropped, outside=outside)
