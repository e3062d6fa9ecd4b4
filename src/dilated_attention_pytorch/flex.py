"""Block-sparse attention through FlexAttention, the way on CUDA: checked on the CPU in small, not timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .plan import BlockPattern

_BLOCK_MULTIPLE = 128  # FlexAttention's own tiles must fit into blocks
_MIN_HEAD_DIM = 16
_MAX_ROWS = 4096  # its masks take the square of this many entries, for each layout


def why_not_flex(q: Tensor, pattern: BlockPattern, dropout_p: float) -> str | None:
    """Why FlexAttention cannot run a call; None if it can."""
    if q.device.type != "cuda":
        return f"it is used on cuda, and the tensors are on {q.device}"
    if q.dtype == torch.float64:
        return "it takes no float64"
    if dropout_p:
        return "it has no dropout"
    if pattern.block_size % _BLOCK_MULTIPLE:
        return (
            f"it takes blocks in multiples of {_BLOCK_MULTIPLE}, and the pattern's are {pattern.block_size}"
        )
    if q.shape[-1] < _MIN_HEAD_DIM:
        return f"it takes {_MIN_HEAD_DIM} features or more, and a head has {q.shape[-1]}"
    if pattern.rows > _MAX_ROWS:
        return f"its mask of {pattern.rows} x {pattern.rows} blocks would be larger than the schedule"
    return None


def flex_block_sparse(
    q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, *, scale: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n), as `block_sparse_attention` gives them."""
    from torch.nn.attention.flex_attention import AuxRequest

    mask = pattern.to_block_mask(q.device, num_heads=q.shape[2], key_mask=key_mask)
    out, aux = _compiled(q.device.type)(
        *(x.transpose(1, 2) for x in (q, k, v)),
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
        return_aux=AuxRequest(lse=True),
    )
    return out.transpose(1, 2).contiguous(), aux.lse


@lru_cache(maxsize=2)
def _compiled(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # On the cpu the compiled form gives no lse.
    run: Callable[..., Any] = flex_attention
    return torch.compile(run) if device_type == "cuda" else run
