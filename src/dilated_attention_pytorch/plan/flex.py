"""FlexAttention: patterns as its `BlockMask`, that of dilated and banded attention, and calls through it.

Calls go this way on CUDA; the path is checked on the CPU in small, not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checks import check_device, check_kind, check_positive_int
from .pattern_tables import EMPTY, WHOLE, evaluate_tiles

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
    n, size, rows = pattern.n, pattern.block_size, pattern.rows
    device = check_device(device) or torch.device("cpu")
    if num_heads is not None:
        check_positive_int("num_heads", num_heads)
    heads = len(pattern) if num_heads is None or len(pattern) == 1 else num_heads
    if len(pattern) % heads:
        raise ValueError(f"{len(pattern)} layouts are not one for each of {heads} heads")
    layout = pattern.to_layout().view(-1, heads, rows, rows).to(device)
    # Full blocks skip the mask function: all but tiles, the diagonal and, with padding, none.
    partial, tiles = torch.zeros_like(layout[:1, :1]), pattern.tiles
    if tiles is not None:
        table, tiles = pattern.tile_table().view(layout.shape).to(device), tiles.to(device)
        partial = table >= 0
    if pattern.is_causal:
        partial.diagonal(dim1=-2, dim2=-1).fill_(True)
    if key_mask is not None:
        check_kind("key_mask", key_mask, "a bool", torch.bool)
        if key_mask.dim() != 2 or key_mask.shape[1] != n or layout.shape[0] not in (1, key_mask.shape[0]):
            raise ValueError(f"key_mask must have the shape (b, n) with n = {n}, got {tuple(key_mask.shape)}")
        if key_mask.device != layout.device:
            found = f"{layout.device}, got {key_mask.device}"
            raise ValueError(f"key_mask must be on the device of the mask, {found}")
        partial.fill_(True)
    batches, is_causal = layout.shape[0], pattern.is_causal

    def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = b if batches > 1 else b * 0, h if heads > 1 else h * 0, q // size, kv // size
        kept = layout[block]
        if tiles is not None:
            tile = table[block]
            kept = kept & ((tile < 0) | tiles[tile.clamp_min(0), q % size, kv % size])
        if is_causal:
            kept = kept & (q >= kv)
        return kept if key_mask is None else kept & key_mask[b, kv]

    return make_block_mask(layout, partial, size, n, seen)


def make_block_mask(
    layout: Tensor, partial: Tensor, size: int, n: int, mask_mod: Callable[..., Tensor]
) -> Any:
    """A `BlockMask` of the blocks of a layout (b, h, blocks, blocks); `mask_mod` acts in partial ones."""
    from torch.nn.attention.flex_attention import BlockMask

    partial = partial.clone()
    if n % size:  # FlexAttention takes no full blocks at the ends
        partial[..., -1, :], partial[..., -1] = True, True
    return BlockMask.from_kv_blocks(
        *_in_order(layout & partial),
        *_in_order(layout & ~partial),
        BLOCK_SIZE=(size, size),
        mask_mod=mask_mod,
        seq_lengths=(n, n),
    )


def _in_order(layout: Tensor) -> tuple[Tensor, Tensor]:
    """FlexAttention's form of a layout: how many blocks each row keeps, and all columns, kept ones first."""
    order = torch.argsort(layout.to(torch.int8), dim=-1, descending=True, stable=True)
    return layout.sum(-1, dtype=torch.int32), order.to(torch.int32)


def read_block_mask(mask: Any, num_heads: int | None) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """What a `BlockMask` shows: the layouts (layouts, blocks, blocks) of blocks in which anything is seen,
    tiles and the tile of each of these blocks, then length and block size."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a FlexAttention BlockMask, got {type(mask).__name__}")
    (q_size, k_size), (n, k_len) = mask.BLOCK_SIZE, mask.seq_lengths
    if n != k_len:
        raise ValueError(f"a block pattern has as many queries as keys, got a mask of lengths {(n, k_len)}")
    size = gcd(q_size, k_size)
    full = torch.zeros_like(partial := _kept(mask, mask.kv_num_blocks, mask.kv_indices))
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _kept(mask, mask.full_kv_num_blocks, mask.full_kv_indices)
    which, blocks = full.int() * (WHOLE - EMPTY) + EMPTY, (partial & ~full).nonzero()
    tiles, found = evaluate_tiles(mask.mask_mod, blocks, size, n)
    which[blocks.unbind(1)] = found.int()
    which = _for_heads(which.cpu(), num_heads).flatten(0, 1)
    layout = which != EMPTY
    return layout, tiles.cpu(), which[layout], n, size


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


def _kept(mask: Any, counts: Tensor, indices: Tensor) -> Tensor:
    """(b, h, blocks, blocks) of square blocks, from the first `counts` entries of each row of indices."""
    (q_size, k_size), n = mask.BLOCK_SIZE, mask.seq_lengths[0]
    rows, columns = (-(-n // size) for size in mask.BLOCK_SIZE)
    counts, indices = counts[(None,) * (3 - counts.dim())], indices[(None,) * (4 - indices.dim())]
    if counts.shape[2] != rows:
        raise ValueError(f"{n} queries in blocks of {q_size} are {rows} rows, got {counts.shape[2]}")
    is_kept = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    # What stands behind the first `counts` may be anything.
    indices = torch.where(is_kept, indices, columns).long()
    kept = is_kept.new_zeros(*counts.shape, columns + 1).scatter_(-1, indices, True)[..., :columns]
    size = gcd(q_size, k_size)
    kept = kept.repeat_interleave(q_size // size, -2).repeat_interleave(k_size // size, -1)
    blocks = -(-n // size)
    return kept[..., :blocks, :blocks]


def dilated_block_mask(
    n: int,
    branches: Sequence[tuple[int, int]],
    *,
    is_causal: bool,
    window_size: int | None,
    block_size: int,
    num_heads: int | None,
    device: torch.device,
) -> Any:
    """See `create_dilated_block_mask`."""
    branches = [(min(length, n), rate) for length, rate in branches]
    # All heads see the same where nothing is left out between the positions of a segment.
    heads = num_heads if num_heads is not None and any(rate > 1 for _, rate in branches) else 1
    offsets = torch.arange(heads, device=device)
    start = torch.arange(0, n, block_size, device=device)
    end = (start + block_size).clamp_max(n)
    seen = torch.zeros(heads, len(start), len(start), dtype=torch.bool, device=device)
    full = torch.zeros_like(seen[0])
    for length, rate in branches:
        seen |= _meets(start, end, length, rate, offsets % rate)
        first, last = start // length, (end - 1) // length
        full |= (rate == 1) & (first[:, None] == last) & (first == last[:, None])
    if window_size is not None:
        farthest = torch.maximum(end[:, None] - 1 - start, end - 1 - start[:, None])
        nearest = (start[:, None] - start).abs() - (block_size - 1)
        seen |= nearest < window_size
        full |= farthest < window_size
    if is_causal:
        seen, full = seen.tril(), full.tril(-1)

    def mask_mod(_b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        shown = (q - kv).abs() < (window_size or 0)
        for length, rate in branches:
            offset = h % rate if heads > 1 else 0
            lies_on = [(x % length) % rate == offset for x in (q, kv)]
            shown = shown | ((q // length == kv // length) & lies_on[0] & lies_on[1])
        return shown & (q >= kv) if is_causal else shown

    return make_block_mask(seen[None], ~full, block_size, n, mask_mod)


def _meets(start: Tensor, end: Tensor, length: int, rate: int, offset: Tensor) -> Tensor:
    """(heads, rows, columns): whether blocks have positions that a branch selects in one segment."""
    first, last = start // length, (end - 1) // length

    def has_any(segment: Tensor) -> Tensor:
        """(heads, blocks): whether a position of the segment, of those in the block, is selected."""
        origin = segment * length + offset[:, None]
        point = origin + -(-(start - origin).clamp_min(0) // rate) * rate
        return point < torch.minimum(end, (segment + 1) * length)

    in_first, in_last = has_any(first), has_any(last)
    # What two blocks have in common is the segment that reaches from the one into the other.
    later = ((last[:, None] == first) & in_last.unsqueeze(2) & in_first.unsqueeze(1)).triu(1)
    own = in_first | in_last | (last - first > 1)
    return later | later.transpose(1, 2) | torch.diag_embed(own)
