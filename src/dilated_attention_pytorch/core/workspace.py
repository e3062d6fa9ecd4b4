"""The memory that a pool keeps: scratch by slot for one call at a time, and blocks of host memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Slot = tuple[str, torch.dtype]
MakeResult = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
SMALLEST = 512  # bytes of the smallest size class


class Workspace:
    """Scratch that the tiles of a call reuse one after the other, and where a call's results come from.

    It serves one call at a time and is not thread-safe. Scratch never leaves the workspace; what outlives the
    call comes from `result`.
    """

    def __init__(self) -> None:
        self.make_result: MakeResult | None = None
        self.buffers: dict[Slot, Tensor] = {}
        self.taken: set[Slot] = set()  # by the present call
        self.fresh: set[Slot] = set()  # what the present call had to allocate

    @property
    def nbytes(self) -> int:
        # A list first: the owner may add a slot while another thread asks.
        return sum(buffer.nbytes for buffer in list(self.buffers.values()))

    def take(self, slot: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory of `shape`, valid until the slot is taken again."""
        key, numel = (slot, dtype), math.prod(shape)
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            self.buffers.pop(key, None)  # freed before its successor is allocated
            del buffer
            # A tensor of inference mode could not be written to outside it.
            with torch.inference_mode(False):
                buffer = self.buffers[key] = torch.empty(numel, dtype=dtype, device=device)
            self.fresh.add(key)
        elif key not in self.taken:
            fill_if_deterministic(buffer)  # what an earlier call left there
        self.taken.add(key)
        return buffer[:numel].view(shape)

    def result(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory that belongs to the caller."""
        if self.make_result is not None:
            return self.make_result(shape, dtype, device)
        return torch.empty(shape, dtype=dtype, device=device)

    def start(self, make_result: MakeResult | None) -> None:
        """Begins another call: slots keep their memory, the counts start over."""
        self.make_result = make_result
        self.taken.clear()
        self.fresh.clear()


@dataclass(eq=False)
class Block:
    """Host memory of a pool. Whether anyone uses it is asked of torch each time, never remembered."""

    storage: torch.UntypedStorage
    tag: str
    nbytes: int
    requested: int  # bytes of the tensor in it
    used: int  # when it was last handed out or returned
    returned: bool = False

    def __post_init__(self) -> None:
        self.cdata, self.address = self.storage._cdata, self.storage.data_ptr()

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


def tensor_in(
    storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: torch.dtype, alignment: int | None
) -> Tensor:
    """A contiguous tensor at the first aligned place of a storage."""
    offset = -storage.data_ptr() % alignment if alignment else 0
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, shape)  # type: ignore[call-overload, no-any-return]


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
    block = Block(torch.empty(0, device="cpu").untyped_storage(), "", 0, 0, 0)
    alone = block.references
    _user = tensor_in(block.storage, (0,), torch.uint8, None)
    return alone, block.references


_REFERENCES = _count_references()
