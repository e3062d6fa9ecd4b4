"""Checkpoints of others: their files, read without running their code, and torchscale's names of weights."""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..modules.attention import DilatedAttention
from ..modules.longnet import LongNetStack
from ..modules.multihead_module import MultiheadModule
from ..modules.positions import XPos
from ..modules.state_dicts import check_has_memory, check_state, read_tensors, regroup_projections

_HOLDERS = ("model", "state_dict")  # keys under which training scripts put the weights
# What torch.load raises for bytes that it did not write: it takes them for instructions, and obeys some.
_UNREADABLE = (
    *(pickle.UnpicklingError, struct.error, EOFError, RuntimeError),
    *(LookupError, ValueError, TypeError, AttributeError, AssertionError),
)
# What wrappers of torch and fairscale put into names.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_fpw_module.", "_orig_mod.")
_REFUSED = {
    r"relative_attention_bias\.": "a relative position bias (rel_pos_buckets), which dilated attention lacks",
    r"(^|\.)moe_layer\.": "a mixture of experts (moe_freq), which these layers have none of",
    r"\.[AB]\.(\w+\.)*(weight|bias)$": "two sets of weights (multiway), of which these layers have one",
}
_XPOS = re.compile(r"^(?P<attention>layers\.\d+\.self_attn)\.xpos\.scale$")


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


def plain_names(state: Mapping[str, Tensor], prefix: str = "") -> tuple[dict[str, Tensor], tuple[str, ...]]:
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


def check_torchscale_pattern(stack: LongNetStack, *, is_causal: bool) -> None:
    """The layers attend as torchscale's do. Under `is_causal` phantom keys lie after every query."""
    for number, layer in enumerate(stack.layers):
        attention = layer.get_submodule("self_attn.attention")
        if not isinstance(attention, DilatedAttention):
            kind = type(attention).__name__
            raise ValueError(f"torchscale's LongNet has dilated attention, got a {kind} in layer {number}")
        spec = attention.spec
        needed = {"head_mixing": "all", "head_offsets": "blocked"}
        if not is_causal:
            needed["tail"] = "phantom"
        wrong = [f"{name}={getattr(spec, name)!r}" for name in needed if getattr(spec, name) != needed[name]]
        if wrong:
            rule = ", ".join(f"{name}={value!r}" for name, value in needed.items())
            raise ValueError(f"torchscale's weights need {rule}, got {', '.join(wrong)} in layer {number}")


def split_torchscale_state(
    stack: LongNetStack, named: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors by the names of `stack`, and the names of constants, which are checked."""
    for pattern, fact in _REFUSED.items():
        if refused := [name for name in named if re.search(pattern, name)]:
            raise ValueError(f"a checkpoint must not have {fact}, got {refused[0]}")
    found, dropped, scaled = dict(named), [], set()
    for name, tensor in named.items():
        if constant := _XPOS.match(name):
            scaled.add(constant["attention"])
            _check_xpos(stack, constant["attention"], name, tensor)
        if constant or name == "version":  # of fairseq's models
            dropped.append(name)
            del found[name]
    for path, attention in stack.named_modules():
        if not isinstance(attention, MultiheadModule):
            continue
        if (
            isinstance(attention.positions, XPos)
            and path not in scaled
            and f"{path}.out_proj.weight" in named
        ):
            raise ValueError(
                f'position_encoding="xpos" needs a checkpoint with {path}.xpos.scale, got one without XPOS'
            )
        if attention.fused_qkv:
            regroup_projections(found, f"{path}.", fused=True)
    return found, tuple(dropped)


def _check_xpos(stack: LongNetStack, path: str, name: str, scale: Tensor) -> None:
    try:
        attention = stack.get_submodule(path)
    except AttributeError:
        return  # a layer that the stack does not have, reported by its weights
    if not isinstance(attention, MultiheadModule) or not isinstance(attention.positions, XPos):
        raise ValueError(
            f'a checkpoint with XPOS needs position_encoding="xpos", got {name} and no such encoding'
        )
    d = attention.head_dim
    expected = (torch.arange(0, d, 2) + 0.4 * d) / (1.4 * d)
    if scale.shape != expected.shape:
        shapes = f"{tuple(expected.shape)} for heads of {d} features, got {tuple(scale.shape)}"
        raise ValueError(f"{name} must be {shapes}: another number of heads?")
    # Half precision keeps three digits of these numbers between 0.28 and 1.
    if not torch.allclose(scale.detach().float().cpu(), expected, atol=4e-3, rtol=0):
        raise ValueError(f"{name} must be (i + 0.4 d) / (1.4 d) for i = 0, 2 .. d, got {scale.tolist()}")
