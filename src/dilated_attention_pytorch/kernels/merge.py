"""Partial attentions (out, lse) over disjoint sets of keys become one softmax, in place."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, out_part: Tensor, lse_part: Tensor) -> None:
    """Merges a partial into `out` (..., d) and `lse` (...), both in accumulation precision.

    Equals `out = (exp(lse) out + exp(lse_part) out_part) / (exp(lse) + exp(lse_part))` without overflow.
    A row may be empty (lse -inf) on both sides, without keys or as its scores overflow, and then stays empty.
    """
    # The clamp keeps -inf - (-inf), which is NaN, at -inf: a weight of 0.
    weight = torch.sigmoid(lse_part - lse.clamp_min(torch.finfo(lse.dtype).min))
    out.lerp_(out_part.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, lse_part, out=lse)


def add_null_keys(out: Tensor, lse: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The partial as if `count` more keys of logit 0 and value 0 had been there."""
    joint = torch.logaddexp(lse, lse.new_tensor(math.log(count)))
    return out * torch.exp(lse - joint).unsqueeze(-1).to(out.dtype), joint
