"""Weights of others in modules of this library: names made equal, everything checked, then copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# What wrappers of torch and fairscale put into names.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_fpw_module.", "_orig_mod.")
_SHOWN = 20


@dataclass(frozen=True)
class LoadReport:
    """What became of the names of a state dict.

    Attributes:
        missing: parameters and buffers of the module that the state dict lacks; they keep their values.
        unexpected: names of the state dict that the module has no place for.
        dropped: names that carry nothing the module does not know, such as constants that were checked.
        outside: names that do not start with the prefix, hence belong to something else.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()


def plain_names(state: Mapping[str, Tensor], prefix: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors by name without wrappers and `prefix`, and the names that do not start with it."""
    if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) for x in state.values()):
        raise TypeError(f"state must be a state dict of tensors, got {type(state).__name__}")
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


@torch.no_grad()
def copy_state(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool, hint: str = "") -> LoadReport:
    """Copies tensors into the parameters and buffers of the same names, keeping their dtypes and devices.

    A wrong shape is always an error, other names are one with `strict`; then nothing is copied.
    """
    own = module.state_dict()
    missing = tuple(name for name in own if name not in state)
    unexpected = tuple(name for name in state if name not in own)
    problems = []
    if strict:
        problems += [f"{name} is missing" for name in missing]
        problems += [f"{name} is unexpected" for name in unexpected]
    for name, tensor in own.items():
        if name in state and state[name].shape != tensor.shape:
            problems.append(f"{name} must be {tuple(tensor.shape)}, got {tuple(state[name].shape)}")
        elif name in state and tensor.is_meta:
            problems.append(f"{name} must have memory to be copied to, got the meta device")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"the state dict does not fit: {'; '.join(problems[:_SHOWN])}{more}{hint}")
    for name, tensor in own.items():
        if name in state:
            tensor.copy_(state[name])
    return LoadReport(missing, unexpected)
