"""Batches whose rows have different lengths: rows that are alike run together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def row_runs(keys: Sequence[Key]) -> Iterator[tuple[slice, Key]]:
    """Neighbouring rows with equal keys, as slices: views of a batch, where a list of rows would copy."""
    first = 0
    for key, run in groupby(keys):
        last = first + sum(1 for _ in run)
        yield slice(first, last), key
        first = last
