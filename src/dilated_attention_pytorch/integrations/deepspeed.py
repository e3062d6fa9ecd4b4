"""Dilated attention of heads that are spread over ranks, and as the local attention of DeepSpeed Ulysses.

Offsets of dilation depend on a head's number. It counts over all ranks, so that the result is that of one
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

from torch import Tensor

from ..checks import check_positive_int, refuse_unknown
from ..functional import attend, dilated_attention
from ..ring.comm import group_place
from ..spec import SPEC_FIELDS, DilatedSpec

Group = Any  # a ProcessGroup, or None for the default group


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

        local = functools.partial(ulysses_attention, segment_lengths=..., dilation_rates=..., group=group)
        attention = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)

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
    batch_dim_idx = int(batch_dim_idx)
    if "head_slice" in options:
        raise TypeError("head_slice follows from group and num_heads here, got one")
    if (more := options.pop("return_lse", False)) is not False:
        raise ValueError(f"DeepSpeed takes one result of its local attention, got return_lse={more!r}")
    check_four_dimensions(q, k, v, "of which the third is heads")
    head_slice = local_heads(q.shape[2], k.shape[2], group, num_heads)
    q, k, v = (x.transpose(0, batch_dim_idx) for x in (q, k, v))
    branches = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    return attend_heads(q, k, v, head_slice=head_slice, **branches, **options).transpose(0, batch_dim_idx)


def check_four_dimensions(q: Tensor, k: Tensor, v: Tensor, rule: str) -> None:
    """Raises unless all are tensors of 4 dimensions; `rule` says which of them is heads."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            shown = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must have 4 dimensions, {rule}, got {shown}")


def local_heads(h: int, h_kv: int, group: Group, num_heads: int | None = None) -> tuple[int, int]:
    """(first, total): which of all heads the h of this rank are; of `num_heads` the first ranks have more."""
    rank, size = group_place(group)
    if num_heads is None:
        return rank * h, size * h
    check_positive_int("num_heads", num_heads)
    if num_heads < size:  # an error on all ranks, or those with heads would wait for the others
        raise ValueError(f"num_heads must be at least one for each of {size} ranks, got {num_heads}")
    share, extra = divmod(num_heads, size)
    expected = share + (rank < extra)
    if h != expected or (extra and h != h_kv):
        raise ValueError(
            f"{num_heads} heads on {size} ranks must give rank {rank} {expected} of q, k and v, "
            f"got {h} of q and {h_kv} of k and v"
        )
    return rank * share + min(rank, extra), num_heads


def attend_heads(
    q: Tensor, k: Tensor, v: Tensor, *, head_slice: tuple[int, int] | None = None, **options: Any
) -> Tensor:
    """`dilated_attention` of the heads (first, total) of a layer; by default of all of them."""
    refuse_unknown("dilated_attention", options, signature(dilated_attention).parameters)
    spec = DilatedSpec(**{name: options.pop(name) for name in SPEC_FIELDS if name in options})
    return attend(q, k, v, spec, head_slice=head_slice, **options)[0]
