"""What Prov-GigaPath's weights tell: architectures by name, sizes of a state dict, its names as ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..checks import one_of
from ..modules.longnet import LongNetEncoder
from .torchscale import plain_names, split_torchscale_state

GIGAPATH_FILE = "slide_encoder.pth"
# The names under which Prov-GigaPath registers sizes; the feed-forward is 4 * embed_dim wide in each.
ARCHITECTURES: Mapping[str, Mapping[str, int]] = {
    f"gigapath_slide_enc{depth}l{width}d": {
        "in_chans": tiles,
        "embed_dim": width,
        "depth": depth,
        "nhead": 16,
    }
    for tiles, width, depth in ((1536, 768, 12), (384, 384, 12), (1536, 1024, 24), (1536, 1536, 12))
}


def split_slide_state(
    encoder: LongNetEncoder, named: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors of Prov-GigaPath by our names, and the names of what is computed or checked here."""
    inside, outside = plain_names(named, "encoder.")
    layers, constants = split_torchscale_state(encoder, inside)
    state = {name: named[name] for name in outside} | {f"encoder.{name}": x for name, x in layers.items()}
    table = () if state.pop("pos_embed", None) is None else ("pos_embed",)
    return state, (*table, *(f"encoder.{name}" for name in constants))


def slide_sizes(state: Mapping[str, Tensor], *, source: str) -> dict[str, int]:
    """The arguments of `LongNetViT` that the shapes of a state dict tell."""
    for name in ("patch_embed.proj.weight", "encoder.layers.0.ffn.fc1.weight"):
        if name not in state or state[name].dim() != 2:
            got = f"one of {tuple(state[name].shape)}" if name in state else "none"
            raise ValueError(f"{source} must hold a slide encoder with a matrix {name}, got {got}")
    embed_dim, in_chans = state["patch_embed.proj.weight"].shape
    layers = {found[1] for name in state if (found := re.match(r"encoder\.layers\.(\d+)\.", name))}
    sizes = {"in_chans": in_chans, "embed_dim": embed_dim, "depth": len(layers)}
    return {**sizes, "dim_feedforward": len(state["encoder.layers.0.ffn.fc1.weight"])}


def arch_sizes(arch: str) -> Mapping[str, int]:
    """The arguments of `LongNetViT` that a name stands for."""
    one_of("arch", arch, tuple(ARCHITECTURES))
    return ARCHITECTURES[arch]


def check_arch(arch: str | None, sizes: Mapping[str, Any], *, source: str) -> None:
    """Raises where sizes are not those of the name; what they do not tell, as the heads, is."""
    wanted = {} if arch is None else arch_sizes(arch)
    if odd := {name: sizes[name] for name, size in wanted.items() if sizes.get(name, size) != size}:
        raise ValueError(f"{source} must have the sizes of {arch}, {dict(wanted)}, got {odd}")
