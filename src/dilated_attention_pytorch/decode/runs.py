"""WHICH keys a later token can select: for each branch and offset, every r-th position of the segment."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TypeVar

from ..plan.dilated import branch_heads
from ..spec import DilatedSpec

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class KeyRun:
    """The keys of one offset of a branch: row j of a segment is its position `offset + j * rate`.

    Each key/value head in `kv_heads` serves `len(heads) // len(kv_heads)` of the query heads, in order.
    """

    branch: int
    window: int
    rate: int
    offset: int
    kv_heads: tuple[int, ...]
    heads: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.branch, self.offset, self.kv_heads))

    @property
    def capacity(self) -> int:
        """Rows of a whole segment."""
        return self.rows_before(self.window)

    def rows_before(self, position: int) -> int:
        """How many rows the segment has before a position, counted from the segment's start."""
        return max(0, -((self.offset - position) // self.rate))

    @cached_property
    def query_index(self) -> slice | list[int]:
        """Indexes the run's query heads: a view where they are evenly spaced, else a copy."""
        return as_index(self.heads)

    @cached_property
    def key_index(self) -> slice | list[int]:
        """Indexes the run's key/value heads."""
        return as_index(self.kv_heads)


@lru_cache(maxsize=64)
def key_runs(spec: DilatedSpec, num_heads: int, num_kv_heads: int) -> tuple[KeyRun, ...]:
    """The runs of all branches, those of a branch with equally many query heads a key head together."""
    runs = []
    for branch, (window, rate) in enumerate(spec.branches):
        sharing: dict[tuple[int, int], list[int]] = {}
        for head, offset, kv in branch_heads(spec, branch, num_heads, num_kv_heads):
            sharing.setdefault((offset, kv), []).append(head)
        alike: dict[tuple[int, int], list[int]] = {}
        for (offset, kv), heads in sharing.items():
            alike.setdefault((offset, len(heads)), []).append(kv)
        for (offset, _), kv_heads in alike.items():
            if offset < window:  # or no position of a segment has this offset
                heads = [head for kv in kv_heads for head in sharing[offset, kv]]
                runs.append(KeyRun(branch, window, rate, offset, tuple(kv_heads), tuple(heads)))
    return tuple(runs)


def as_index(numbers: Sequence[int]) -> slice | list[int]:
    """The slice of evenly spaced, rising numbers, or a list of others."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if step < 1 or any(number != numbers[0] + i * step for i, number in enumerate(numbers)):
        return list(numbers)
    return slice(numbers[0], numbers[-1] + 1, step)


def alike_rows(keys: Sequence[Key]) -> Iterator[tuple[slice, Key]]:
    """Neighbouring rows of a batch with equal keys, as slices: views, where a list of rows would copy."""
    first = 0
    for key, those in groupby(keys):
        last = first + sum(1 for _ in those)
        yield slice(first, last), key
        first = last
