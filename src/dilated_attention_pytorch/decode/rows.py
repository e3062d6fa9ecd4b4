"""Batches whose rows have different lengths: rows that are alike run together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


def row_runs(keys: Sequence[Key]) -> Iterator[tuple[slice, Key]]:
    """Neighbouring rows with equal keys, as slices: views of a batch, where a list of rows would copy."""
    first = 0
    for key, run in groupby(keys):
        last = first + sum(1 for _ in run)
        yield slice(first, last), key
        first = last


def whole_numbers(
    name: str, values: Sequence[int] | Tensor, num: int | None, largest: int, *, least: int = 0
) -> list[int]:
    """`num` integers (or, for None, any number but 0 of them) from `least` to `largest`, checked."""
    if isinstance(values, Tensor):
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"{name} must hold integers, got {values.dtype}")
        values = values.tolist()
    if not isinstance(values, (list, tuple, range)):
        raise TypeError(f"{name} must be a sequence or tensor of integers, got {values!r}")
    if num is None and not values:
        raise ValueError(f"{name} must have at least one entry, got none")
    if num is not None and len(values) != num:
        raise ValueError(f"{name} must have one entry for each of the {num} rows, got {len(values)}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must hold integers, got {value!r}")
        if not least <= value <= largest:
            raise ValueError(f"{name} must lie between {least} and {largest}, got {value}")
    return list(values)
