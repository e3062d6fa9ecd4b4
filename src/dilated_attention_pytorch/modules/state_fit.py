"""Whether tensors of a state dict fit the places that they are for: one judgement, and one message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


def check_state(state: Mapping[str, Tensor]) -> None:
    if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) for x in state.values()):
        raise TypeError(f"state must be a state dict of tensors, got {type(state).__name__}")
    if odd := [name for name in state if not isinstance(name, str)]:
        raise TypeError(f"state must have strings as names, got {odd[0]!r}")


def check_fit(
    own: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    *,
    strict: bool = True,
    copies: bool = True,
    source: str = "the state dict",
    hint: str = "",
) -> LoadReport:
    """Raises unless `state` has a tensor of the same shape and kind for each of `own`, and no others.

    Args:
        strict: False takes missing and unexpected names, which the report holds.
        copies: `own` are to be written to, hence must have memory; else they are to be replaced.
        source, hint: begin and end of the message.
    """
    report = LoadReport(
        missing=tuple(name for name in own if name not in state),
        unexpected=tuple(name for name in state if name not in own),
    )
    problems = []
    if strict:
        problems += [f"{name} is missing" for name in report.missing]
        problems += [f"{name} is unexpected" for name in report.unexpected]
    for name, tensor in own.items():
        if name not in state:
            continue
        given = state[name]
        if given.shape != tensor.shape:
            problems.append(f"{name} must be {tuple(tensor.shape)}, got {tuple(given.shape)}")
        elif given.is_floating_point() != tensor.is_floating_point():
            problems.append(f"{name} must be like {tensor.dtype}, got {given.dtype}")
        elif copies and tensor.is_meta:
            problems.append(f"{name} must have memory to be copied to, got the meta device")
        elif given.is_meta:
            problems.append(f"{name} must have values, got a tensor on the meta device")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"{source} does not fit: {'; '.join(problems[:_SHOWN])}{more}{hint}")
    return report


@torch.no_grad()
def copy_state(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool, hint: str = "") -> LoadReport:
    """Copies tensors into the parameters and buffers of the same names, keeping their dtypes and devices.

    What does not fit is an error, but for names without `strict`; then nothing is copied.
    """
    own = module.state_dict()
    report = check_fit(own, state, strict=strict, hint=hint)
    for name, tensor in own.items():
        if name in state:
            tensor.copy_(state[name])
    return report
