"""State dicts: whether they fit a module, input projections joined or parted, safetensors files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_device

_SHOWN = 20


@dataclass(frozen=True)
class LoadReport:
    """What became of the names of a state dict."""

    missing: tuple[str, ...] = ()  # parameters and buffers that it lacks; they keep their values
    unexpected: tuple[str, ...] = ()  # names that the module has no place for
    dropped: tuple[str, ...] = ()  # names that carry nothing new, such as constants that were checked
    outside: tuple[str, ...] = ()  # names without the prefix, hence of something else


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
    report = LoadReport(tuple(x for x in own if x not in state), tuple(x for x in state if x not in own))
    problems = []
    if strict:
        problems += [f"{name} is missing" for name in report.missing]
        problems += [f"{name} is unexpected" for name in report.unexpected]
    for name in [x for x in own if x in state]:
        tensor, given = own[name], state[name]
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


def regroup_projections(
    state: MutableMapping[str, Any],
    prefix: str,
    *,
    fused: bool,
    sizes: Sequence[int] = (),
    kinds: Sequence[str] = ("weight", "bias"),
) -> None:
    """Joins the input projections at `prefix` in a state dict, or parts them by `sizes`: kinds differ there.

    Those of `nn.MultiheadAttention` get our names. What is incomplete, there twice or has other sizes stays
    as it is, for `load_state_dict` to name.
    """
    for kind in kinds:
        joint, parts = f"{prefix}qkv_proj.{kind}", [f"{prefix}{x}_proj.{kind}" for x in "qkv"]
        theirs = [f"{prefix}in_proj_{kind}", *(f"{prefix}{x}_proj_{kind}" for x in "qkv")]
        for name, ours in zip(theirs, (joint, *parts), strict=True):
            if name in state and ours not in state and (ours != joint or _rows(state[name]) == sum(sizes)):
                state[ours] = state.pop(name)
        if fused and joint not in state and all(name in state for name in parts):
            state[joint] = torch.cat([state.pop(name) for name in parts])
        elif not fused and _rows(state.get(joint)) == sum(sizes) and not state.keys() & set(parts):
            state.update(zip(parts, torch.split(state.pop(joint), list(sizes)), strict=True))


def load_torch_weights(module: nn.Module, out_proj: nn.Linear, state: Mapping[str, Tensor]) -> None:
    """Copies the state dict of an `nn.MultiheadAttention` into a module that has its projections."""
    check_state(state)
    theirs: dict[str, Tensor] = {}
    for kind, x in out_proj.named_parameters():
        joint = x[:1].expand(3 * len(x), *x.shape[1:])  # a view of that shape
        is_joint = kind == "bias" or "in_proj_weight" in state
        theirs |= {f"in_proj_{kind}": joint} if is_joint else {f"{y}_proj_weight": x for y in "qkv"}
        theirs[f"out_proj.{kind}"] = x
    check_fit(theirs, state)
    module.load_state_dict(dict(state), strict=False)


def _rows(x: Any) -> int | None:
    return len(x) if isinstance(x, Tensor) and x.dim() else None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of `tensors`. One that stands under several names is written several times."""
    from safetensors.torch import save_file

    copies: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().contiguous()
        # The format refuses tensors that share memory.
        shares = plain.untyped_storage().data_ptr() in places
        copies[name] = plain.clone() if shares else plain
        places.add(copies[name].untyped_storage().data_ptr())
    save_file(copies, path, metadata={"format": "pt"})


def read_tensors(path: Path, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on `device` (the CPU by default)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_has_memory(device)
    try:
        return dict(load_file(path, device=str(torch.device("cpu" if device is None else device))))
    except SafetensorError as error:
        raise ValueError(f"{path} must be a safetensors file, got one that is not: {error}") from error


def check_has_memory(device: torch.device | str | None) -> None:
    if (place := check_device(device)) is not None and place.type == "meta":
        raise ValueError("device must be one with memory to load weights, got meta")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place if the block ends well and is deleted if not."""
    # Not a temporary file of the system: those are private, while this one is to have the usual mode.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
