"""Rows in which not every place holds a token: segments count tokens, and padding takes no place in them.

Masks are (b, N): bool with True at tokens, or int32, the number of each token's document in its row.
Results at padding are zeros, but for a padded first place that sees both ways: models pool there, so it
attends as the first token of its row would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention_maps import attention_rows
from ..core.tracing import uncompiled
from ..decode import attend_last
from ..functional import dilated_attention

OF_ATTENTION_ROWS = ("segment_lengths", "dilation_rates", "scale", "head_mixing", "head_offsets", "tail")


def attend_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """All places of each row, (b, N, h, d), with the options of `dilated_attention`; differentiable."""
    out: Tensor
    out = dilated_attention(q, k, v, **options) if mask is None else _attend_packed(q, k, v, mask, options)
    return out


@uncompiled
def longest_row(mask: Tensor | None, n: int) -> int:
    """Tokens of the longest row, or of the longest document, of n places."""
    if mask is None:
        return n
    if mask.dtype == torch.bool:
        return int(mask.sum(1).max())
    return max(int(row.unique_consecutive(return_counts=True)[1].max()) for row in mask)


@uncompiled
def _attend_packed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    (b, n), is_packed = mask.shape, mask.dtype != torch.bool
    row = torch.arange(b, device=mask.device)[:, None]
    # Every place of packed documents holds a token; else the tokens are gathered, and a row is a document.
    places = slice(None) if is_packed else mask.flatten().nonzero()[:, 0]
    document = (row * (n + 1) + mask if is_packed else row.expand(b, n)).flatten()[places]
    if not len(document):
        return torch.zeros_like(q)
    counts: Tensor = torch.unique_consecutive(document, return_counts=True)[1]
    boundaries = nn.functional.pad(counts.cumsum(0), (1, 0))
    packed_q, packed_k, packed_v = (x.flatten(0, 1)[places][None] for x in (q, k, v))
    out: Tensor = dilated_attention(packed_q, packed_k, packed_v, cu_seqlens=boundaries, **options)[0]
    if not isinstance(places, slice):
        out = out.new_zeros(b * n, *out.shape[1:]).index_copy(0, places, out)
    out = out.view(b, n, *out.shape[1:])
    return out if is_packed or options.get("is_causal") else _attend_first(out, q, k, v, mask, options)


def _attend_first(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """`out` with padded first places filled in, one row after the other: few batches have them."""
    options = {name: value for name, value in options.items() if name in OF_ATTENTION_ROWS}
    for row in (mask.any(1) & ~mask[:, 0]).nonzero()[:, 0]:
        places = mask[row].nonzero()[:, 0]
        query = torch.cat([q[row, :1], q[row, places[1:]]])[None]
        shares: Tensor = attention_rows(query, k[row, places][None], [0], **options)[0, :, 0]
        values = v[row, places].repeat_interleave(q.shape[2] // v.shape[2], 1)
        first = torch.einsum("ht,thd->hd", shares, values.to(shares.dtype))
        out = out.index_put((row, torch.zeros_like(row)), first.to(out.dtype))
    return out


@uncompiled
def attend_new(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """The last n of N places, (b, n, h, d), with the options of `attend_last`; causal, without gradients."""
    if mask is None:
        out: Tensor = attend_last(q, k, v, **options)
        return out
    is_new_token, back = mask[:, -q.shape[1] :], None
    if bool((mask[:, 1:] < mask[:, :-1]).any()):  # padding behind a token: move it to the front of its row
        order, new_order = (x.byte().argsort(stable=True, dim=1) for x in (mask, is_new_token))
        q, k, v = _reorder(q, new_order), _reorder(k, order), _reorder(v, order)
        back = new_order.argsort(1)
    out = attend_last(q, k, v, starts=k.shape[1] - mask.sum(1), **options)
    out = out if back is None else _reorder(out, back)
    return out.masked_fill(~is_new_token[..., None, None], 0.0)


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """(b, n, h, d) in the order (b, n) of each row."""
    return x.take_along_dim(order[..., None, None], 1)
