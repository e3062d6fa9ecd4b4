"""Dilated attention as the local attention of DeepSpeed Ulysses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .local_heads import Group, attend_heads, check_four_dimensions, even_slice, uneven_slice


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    group: Group = None,
    num_heads: int | None = None,
    batch_dim_idx: int = 0,
    **options: Any,
) -> Tensor:
    """Local attention for `deepspeed.sequence.layer.DistributedAttention`: all tokens of this rank's heads.

        branches = {"segment_lengths": [2048, 8192], "dilation_rates": [1, 4]}
        local = functools.partial(ulysses_attention, group=group, is_causal=True, **branches)
        attention = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)
        out = attention(q, k, v, 0)

    Args:
        q: (b, n, h, d), or (n, b, h, d) with `batch_dim_idx=1`: the heads that the all-to-all gave this rank.
        k, v: the same with h_kv heads.
        group: the sequence parallel group that was given to `DistributedAttention`.
        num_heads: of all ranks together, needed where they are no multiple of the ranks. DeepSpeed then gives
            the first ranks one head more; h and h_kv must be equal.
        batch_dim_idx: the dimension of the batch, as DeepSpeed's `forward` has it.
        options: of `dilated_attention`, but no return_lse.

    Returns the attention, in the layout of q. `ring_dilated_attention(..., strategy="ulysses")` does the
    exchange as well, without DeepSpeed and for shards of any lengths.
    """
    if batch_dim_idx not in (0, 1):
        raise ValueError(f"batch_dim_idx must be 0 or 1, got {batch_dim_idx!r}")
    if "head_slice" in options:
        raise TypeError("head_slice follows from group and num_heads here, got one")
    if options.get("return_lse", False) is not False:
        raise ValueError(
            f"DeepSpeed takes one result of its local attention, got return_lse={options['return_lse']!r}"
        )
    check_four_dimensions(q, k, v, "of which the third is heads")
    h = q.shape[2]
    head_slice = even_slice(h, group) if num_heads is None else uneven_slice(h, k.shape[2], num_heads, group)
    if batch_dim_idx == 1:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    branches = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    out = attend_heads(q, k, v, head_slice=head_slice, **branches, **options)
    return out.transpose(0, 1) if batch_dim_idx == 1 else out
