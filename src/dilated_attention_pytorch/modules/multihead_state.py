"""Weights of `nn.MultiheadAttention` for the projections of this package's multihead modules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


@torch.no_grad()
def copy_state(
    state: Mapping[str, Tensor], weights: list[Tensor], biases: list[Tensor], out_proj: nn.Linear
) -> None:
    """Copies a state dict into the projections of query, key and value, and into `out_proj`.

    The input projections may be joint or separate there. Nothing is copied unless everything fits.
    """
    if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) for x in state.values()):
        raise TypeError(f"state must be a state dict of tensors, got {type(state).__name__}")
    targets = {"in_proj_weight": weights}
    if "in_proj_weight" not in state:
        targets = {f"{x}_proj_weight": [weight] for x, weight in zip("qkv", weights, strict=True)}
    targets["out_proj.weight"] = [out_proj.weight]
    if out_proj.bias is not None:
        targets |= {"in_proj_bias": biases, "out_proj.bias": [out_proj.bias]}
    problems = [f"{name} is missing" for name in targets if name not in state]
    problems += [f"{name} is unexpected" for name in state if name not in targets]
    for name, parts in targets.items():
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        if name in state and state[name].shape != shape:
            problems.append(f"{name} must be {shape}, got {tuple(state[name].shape)}")
    if problems:
        raise ValueError("the state dict does not fit: " + "; ".join(problems))
    for name, parts in targets.items():
        for part, piece in zip(parts, state[name].chunk(len(parts)), strict=True):
            part.copy_(piece)
