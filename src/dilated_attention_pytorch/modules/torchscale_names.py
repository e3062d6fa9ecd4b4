"""State dicts of torchscale's LongNet by the names of this library's stacks; what these lack is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from .attention import DilatedAttention
from .longnet_stack import LongNetStack
from .multihead_skin import MultiheadSkin
from .multihead_state import regroup_projections
from .positions import XPos
from .state_fit import check_state

# What wrappers of torch and fairscale put into names.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_fpw_module.", "_orig_mod.")
_REFUSED = {
    r"relative_attention_bias\.": "a relative position bias (rel_pos_buckets), which dilated attention lacks",
    r"(^|\.)moe_layer\.": "a mixture of experts (moe_freq), which these layers have none of",
    r"\.[AB]\.(\w+\.)*(weight|bias)$": "two sets of weights (multiway), of which these layers have one",
}
_XPOS = re.compile(r"^(?P<attention>layers\.\d+\.self_attn)\.xpos\.scale$")


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
        if not isinstance(attention, MultiheadSkin):
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
    if not isinstance(attention, MultiheadSkin) or not isinstance(attention.positions, XPos):
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
