"""FlexAttention's `BlockMask` of dilated and banded patterns, from formulas over pairs of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .flex import make_block_mask


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
