"""Scratch of one call by slot, and the blocks of memory that a pool keeps."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Make = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
Fit = Literal["class", "best", "exact", "scratch", "fresh"]
SMALLEST = 512  # bytes of the smallest size class


class Workspace:
    """Scratch that the jobs of a call reuse one after the other. Serves one call, in one thread.

    Scratch never leaves the workspace; what outlives the call comes from `result`. Both are fresh memory, or
    host memory from functions that make it: of (slot, shape, dtype), where the slot of results is "output".
    """

    def __init__(self, make_scratch: Make | None = None, make_result: Make | None = None) -> None:
        self._make_scratch, self._make_result = make_scratch, make_result
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, slot: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory of `shape`, valid until the slot is taken again."""
        numel = math.prod(shape)
        buffer = self.buffers.get((slot, dtype))
        if buffer is None or buffer.numel() < numel:
            self.buffers.pop((slot, dtype), None)  # freed before its successor is allocated
            del buffer
            if self._make_scratch is None:
                buffer = torch.empty(numel, dtype=dtype, device=device)
            else:
                buffer = self._make_scratch(slot, (numel,), dtype)
            self.buffers[slot, dtype] = buffer
        if buffer.numel() != numel:
            buffer = buffer[:numel]
        return buffer if len(shape) == 1 else buffer.view(shape)

    def result(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory that belongs to the caller."""
        if self._make_result is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return self._make_result("output", shape, dtype)


class Request(NamedTuple):
    """A contiguous tensor in memory of a pool; see `MemoryPool.allocate`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tag: str
    fit: Fit
    alignment: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def needed(self) -> int:
        """In so many bytes the tensor finds an aligned place."""
        return self.nbytes + max(0, (self.alignment or 0) - self.dtype.itemsize)

    def tensor_in(self, storage: torch.UntypedStorage) -> Tensor:
        """At the first aligned place of a storage."""
        offset = -storage.data_ptr() % self.alignment if self.alignment else 0
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, offset // self.dtype.itemsize, self.shape)  # type: ignore[call-overload, no-any-return]


@dataclass(eq=False)
class Block:
    """Host memory of a pool. Whether anyone uses it is asked of torch each time, never remembered."""

    storage: torch.UntypedStorage
    tag: str = ""
    is_scratch: bool = False
    requested: int = 0  # bytes of the tensor in it
    used: int = 0  # when it was last handed out or returned
    returned: bool = False

    def __post_init__(self) -> None:
        self.cdata, self.address = self.storage._cdata, self.storage.data_ptr()
        self.nbytes = self.storage.nbytes()

    def has_users(self, number: Literal[0, 1]) -> bool:
        """Whether no tensor, view or graph holds the storage, or one, and no Python storage object does."""
        # `tensor.untyped_storage()` gives out this very Python object, which torch counts once. Python is
        # asked twice: between the questions another thread may turn a tensor into its storage.
        return (
            self.references == _REFERENCES[number]
            and torch._C._storage_Use_Count(self.cdata) == 1 + number
            and self.references == _REFERENCES[number]
        )

    @property
    def references(self) -> int:
        return sys.getrefcount(self.storage)

    @property
    def is_sound(self) -> bool:
        """Still the memory that was made: a user may have resized it or moved it to other processes."""
        same = self.storage.nbytes() == self.nbytes and self.storage.data_ptr() == self.address
        return same and not self.storage.is_shared()


def size_class(nbytes: int) -> int:
    """Rounded up to one of four sizes between powers of two."""
    step = max(SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(SMALLEST, -(-nbytes // step) * step)


def fill_if_deterministic(buffer: Tensor) -> Tensor:
    """Reused memory keeps the promise that torch makes for `torch.empty` when asked to be deterministic."""
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if fills and torch.are_deterministic_algorithms_enabled():
        # 255 is NaN in every floating point type, and no bool.
        buffer.view(-1).view(torch.uint8).fill_(1 if buffer.dtype == torch.bool else 255)
    return buffer


def _count_references() -> tuple[int, int]:
    """Of the storage of a block that no tensor uses, or one: torch may hold the Python object, too."""
    block = Block(torch.empty(0, device="cpu").untyped_storage())
    alone = block.references
    _user = Request((0,), torch.uint8, "", "exact").tensor_in(block.storage)
    return alone, block.references


_REFERENCES = _count_references()
