"""Heads of a layer that are spread over ranks: which of them all are this rank's.

Offsets of dilation depend on a head's number. It counts over all ranks, so that the result is that of one
process.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor

from ..checks import check_positive_int, refuse_unknown
from ..functional import attend, dilated_attention
from ..ring.comm import group_place
from ..spec import SPEC_FIELDS, DilatedSpec

Group = Any  # a ProcessGroup, or None for the default group


def check_four_dimensions(q: Tensor, k: Tensor, v: Tensor, rule: str) -> None:
    """Raises unless all are tensors of 4 dimensions; `rule` says which of them is heads."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            shown = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must have 4 dimensions, {rule}, got {shown}")


def even_slice(h: int, group: Group) -> tuple[int, int]:
    """(first, total) of h heads on each rank."""
    rank, size = group_place(group)
    return rank * h, size * h


def uneven_slice(h: int, h_kv: int, num_heads: int, group: Group) -> tuple[int, int]:
    """(first, total) where the first ranks have one head more."""
    check_positive_int("num_heads", num_heads)
    rank, size = group_place(group)
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
    of_spec = {name: options.pop(name) for name in SPEC_FIELDS if name in options}
    options.pop("return_lse", None)  # out alone is returned
    return attend(q, k, v, DilatedSpec(**of_spec), head_slice=head_slice, **options)[0]
