"""Reads weights from files that others wrote: torch or safetensors. No code of a file is run."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .pretrained import check_has_memory, read_tensors

_HOLDERS = ("model", "state_dict")  # keys under which training scripts put the weights
# What torch.load raises for bytes that it did not write: it takes them for instructions, and obeys some.
_UNREADABLE = (
    *(pickle.UnpicklingError, struct.error, EOFError, RuntimeError),
    *(LookupError, ValueError, TypeError, AttributeError, AssertionError),
)


def read_checkpoint(path: Path, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """The state dict in a file, on `device` (the CPU by default).

    The name decides: `.safetensors`, or else what `torch.save` writes. That may be a state dict, or a dict
    with a state dict under "model" or "state_dict". Pickled objects other than tensors and plain data are
    refused.
    """
    check_has_memory(device)
    if path.suffix == ".safetensors":
        return read_tensors(path, device=device)
    try:
        held = torch.load(path, map_location="cpu" if device is None else device, weights_only=True)
    except _UNREADABLE as error:
        raise ValueError(
            f"{path} must be a file of torch.save that holds tensors and plain data only, got: {error!r}"
        ) from error
    return unwrap_state(held, source=str(path))


def unwrap_state(held: Any, *, source: str = "the checkpoint") -> dict[str, Tensor]:
    """The state dict that a checkpoint is, or holds under "model" or "state_dict"."""
    if isinstance(held, Mapping):
        for name in _HOLDERS:
            if isinstance(held.get(name), Mapping):
                return unwrap_state(held[name], source=source)
        if held and all(isinstance(key, str) and isinstance(x, Tensor) for key, x in held.items()):
            return dict(held)
        odd = next(
            (f"{key!r}: a {type(x).__name__}" for key, x in held.items() if not isinstance(x, Tensor)), "{}"
        )
    else:
        odd = f"a {type(held).__name__}"
    raise ValueError(
        f"{source} must be a state dict, or hold one under {' or '.join(map(repr, _HOLDERS))}, got {odd}"
    )
