"""The contract every kernel keeps: one packed tile in, (out, lse) out; and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Request(NamedTuple):
    """What a call asks of a kernel, as far as it decides whether a kernel can run."""

    device: torch.device
    dtype: torch.dtype
    masked: bool = False
    dropout: bool = False
    scale: float = 1.0


class Dropout(NamedTuple):
    """Drops attention probabilities; the same seed draws the same mask again in backward."""

    p: float
    seed: int


class How(NamedTuple):
    """How a tile attends. `mask` (batch, key heads, keys) is True where a key may be attended."""

    is_causal: bool
    scale: float
    mask: Tensor | None = None
    dropout: Dropout | None = None


Forward = Callable[[Tensor, Tensor, Tensor, How], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, How], tuple[Tensor, Tensor, Tensor]
]


class Kernel(NamedTuple):
    """A way to attend one tile of packed, contiguous tensors.

    `forward(q, k, v, how)`: q (B, H, N, d), k and v (B, H_kv, M, d), H a multiple of H_kv, N == M when
    causal; returns out like q and lse (B, H, N), natural log, in float32 (float64 for float64). A row
    without a visible key gives out 0 and lse -inf.

    `backward(grad_out, grad_lse, q, k, v, out, lse, how)`: out and lse are those of the *merged* softmax,
    with +inf in place of -inf for empty rows; the result is the tile's share (dq, dk, dv) of the joint
    gradient.
    """

    name: str
    why_not: Callable[[Request], str | None]
    forward: Forward
    backward: Backward
    widens: bool = False  # half precision reaches it as float32 tiles
