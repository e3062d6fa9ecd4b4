"""Weights for the projections of multihead modules: of `nn.MultiheadAttention`, and of our other kinds."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .state_fit import check_fit, check_state


@torch.no_grad()
def copy_projections(
    state: Mapping[str, Tensor], weights: list[Tensor], biases: list[Tensor], out_proj: nn.Linear
) -> None:
    """Copies a state dict into the projections of query, key and value, and into `out_proj`.

    The input projections may be joint or separate there. Nothing is copied unless everything fits.
    """
    check_state(state)
    targets = {"in_proj_weight": weights}
    if "in_proj_weight" not in state:
        targets = {f"{x}_proj_weight": [weight] for x, weight in zip("qkv", weights, strict=True)}
    targets["out_proj.weight"] = [out_proj.weight]
    if out_proj.bias is not None:
        targets |= {"in_proj_bias": biases, "out_proj.bias": [out_proj.bias]}
    check_fit({name: _joint(parts) for name, parts in targets.items()}, state)
    for name, parts in targets.items():
        for part, piece in zip(parts, state[name].chunk(len(parts)), strict=True):
            part.copy_(piece)


def _joint(parts: list[Tensor]) -> Tensor:
    """Like all parts one below the other, in shape, dtype and device; without their memory."""
    first, rows = parts[0], sum(len(part) for part in parts)
    return first[:1].expand(rows, *first.shape[1:])


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


def _rows(x: Any) -> int | None:
    return len(x) if isinstance(x, Tensor) and x.dim() else None
