"""Block patterns and FlexAttention: patterns as its `BlockMask`, and calls through it, the way on CUDA.

The path is checked on the CPU in small, not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checks import check_device, check_positive_int

if TYPE_CHECKING:
    from .block_pattern import BlockPattern

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
    size, rows, d = pattern.block_size, pattern.rows, q.shape[-1]
    if size % _BLOCK_MULTIPLE:
        return f"it takes blocks in multiples of {_BLOCK_MULTIPLE}, and the pattern's are {size}"
    if d < _MIN_HEAD_DIM:
        return f"it takes {_MIN_HEAD_DIM} features or more, and a head has {d}"
    if rows > _MAX_ROWS:
        return f"its mask of {rows} x {rows} blocks would be larger than the plan"
    return None


def flex_block_sparse(
    q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, *, scale: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n), as `block_sparse_attention` gives them."""
    from torch.nn.attention.flex_attention import AuxRequest

    out, aux = _compiled(q.device.type)(
        *(x.transpose(1, 2) for x in (q, k, v)),
        block_mask=pattern.to_block_mask(q.device, num_heads=q.shape[2], key_mask=key_mask),
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


def to_block_mask(
    pattern: BlockPattern, device: torch.device | str, num_heads: int | None, key_mask: Tensor | None = None
) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    n, size, rows = pattern.n, pattern.block_size, pattern.rows
    device = check_device(device) or torch.device("cpu")
    if num_heads is not None:
        check_positive_int("num_heads", num_heads)
    heads = len(pattern) if num_heads is None or len(pattern) == 1 else num_heads
    if len(pattern) % heads:
        raise ValueError(f"{len(pattern)} layouts are not one for each of {heads} heads")
    layout = pattern.to_layout().view(-1, heads, rows, rows).to(device)
    # Full blocks skip the mask function: all but the diagonal, the ends and, with padding, none.
    partial = torch.zeros(rows, rows, dtype=torch.bool, device=device)
    if pattern.is_causal:
        partial.fill_diagonal_(True)
    if n % size:
        partial[-1], partial[:, -1] = True, True
    if key_mask is not None:
        partial.fill_(True)
    batches, is_causal = layout.shape[0], pattern.is_causal

    def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        kept = layout[b if batches > 1 else b * 0, h if heads > 1 else h * 0, q // size, kv // size]
        if is_causal:
            kept = kept & (q >= kv)
        return kept if key_mask is None else kept & key_mask[b, kv]

    return BlockMask.from_kv_blocks(
        *_in_order(layout & partial),
        *_in_order(layout & ~partial),
        BLOCK_SIZE=(size, size),
        mask_mod=seen,
        seq_lengths=(n, n),
    )


def _in_order(layout: Tensor) -> tuple[Tensor, Tensor]:
    """FlexAttention's form of a layout: how many blocks each row keeps, and all columns, kept ones first."""
    order = torch.argsort(layout.to(torch.int8), dim=-1, descending=True, stable=True)
    return layout.sum(-1, dtype=torch.int32), order.to(torch.int32)


def read_block_mask(mask: Any, num_heads: int | None) -> tuple[Tensor, int, int]:
    """Layouts (layouts, blocks, blocks), length and block size of a `BlockMask`."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a FlexAttention BlockMask, got {type(mask).__name__}")
    (q_size, k_size), (q_len, k_len) = mask.BLOCK_SIZE, mask.seq_lengths
    if q_size != k_size or q_len != k_len:
        raise ValueError(
            "a block pattern has square blocks and as many queries as keys, got blocks "
            f"{(q_size, k_size)} and lengths {(q_len, k_len)}"
        )
    layout = _kept(mask.kv_num_blocks, mask.kv_indices)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        layout |= _kept(mask.full_kv_num_blocks, mask.full_kv_indices)
    return _for_heads(layout, num_heads).flatten(0, 1), q_len, q_size


def check_whole_blocks(mask: Any, is_causal: bool) -> None:
    """Raises if the `mask_mod` of a `BlockMask` hides what its blocks, up to a causal diagonal, show."""
    size, last = mask.BLOCK_SIZE[0], mask.seq_lengths[0] - 1
    partial = _kept(mask.kv_num_blocks, mask.kv_indices).nonzero()
    place = torch.arange(size, device=partial.device)
    for blocks in torch.split(partial, max(1, 2**22 // size**2)) if len(partial) else ():
        b, h, row, column = blocks.T[:, :, None, None]
        q = (row * size + place[:, None]).clamp_max(last)
        kv = (column * size + place).clamp_max(last)
        places = [x.expand(len(blocks), size, size).flatten() for x in (b, h, q, kv)]
        hidden = ~torch.vmap(mask.mask_mod)(*places)
        if bool((hidden & (places[2] >= places[3]) if is_causal else hidden).any()):
            raise ValueError(
                "a block pattern keeps whole blocks, up to the diagonal if is_causal, got a BlockMask whose "
                f"mask_mod hides single positions, and is_causal={is_causal}"
            )


def _for_heads(layout: Tensor, num_heads: int | None) -> Tensor:
    """(b, h, rows, columns), with all heads of a call where batches differ."""
    batches, heads = layout.shape[:2]
    if num_heads is None:
        if batches > 1 and heads == 1:
            raise ValueError(
                f"a mask of {batches} batches for all heads needs num_heads, or its layouts could be taken "
                "for those of heads, got none"
            )
        return layout
    check_positive_int("num_heads", num_heads)
    if heads not in (1, num_heads):
        raise ValueError(f"num_heads must be that of the mask, {heads}, got {num_heads}")
    return layout.expand(-1, num_heads, -1, -1) if batches > 1 else layout


def _kept(counts: Tensor, indices: Tensor) -> Tensor:
    """(b, h, rows, columns) bool from the first `counts` entries of each row of indices."""
    is_kept = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    return torch.zeros_like(is_kept).scatter_(-1, indices.long(), is_kept)
