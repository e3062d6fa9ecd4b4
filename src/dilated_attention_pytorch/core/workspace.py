"""The memory that a pool keeps: scratch by slot for one call at a time, and blocks of host memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..checks import check_alignment, check_flags, check_shape, one_of

Slot = tuple[str, torch.dtype]
MakeResult = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
Fit = Literal["class", "best", "exact"]
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
class Request:
    """A contiguous tensor in memory of a pool.

    Args:
        tag: memory serves again only under the tag that it had before.
        fit: "class" takes memory of the size class (at most a quarter larger), "best" the smallest that
            fits up to twice the size, "exact" only the very size.
        alignment: of the first element in bytes, a power of two.
        pinned: page-locked, where the machine has a device to copy to; ordinary memory elsewhere.
        numa: fresh memory is first touched by all threads of torch at once, which spreads it over the
            nodes that compute with it; nothing on a host with one node.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    tag: str = "buffer"
    fit: Fit = "class"
    alignment: int | None = None
    pinned: bool = False
    numa: bool = False

    def __post_init__(self) -> None:
        self.shape = check_shape(self.shape)
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {self.dtype!r}")
        if not isinstance(self.tag, str):
            raise TypeError(f"tag must be a string, got {self.tag!r}")
        one_of("fit", self.fit, ("class", "best", "exact"))
        check_flags(pinned=self.pinned, numa=self.numa)
        check_alignment(self.alignment)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        # In so many bytes the tensor finds an aligned place.
        self.needed = self.nbytes + max(0, (self.alignment or 0) - self.dtype.itemsize)
        if self.needed >= 2**62:
            raise ValueError(f"a buffer must have fewer than 2**62 bytes, got {self.needed}")

    def tensor_in(self, storage: torch.UntypedStorage) -> Tensor:
        """At the first aligned place of a storage."""
        offset = -storage.data_ptr() % self.alignment if self.alignment else 0
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, offset // self.dtype.itemsize, self.shape)  # type: ignore[call-overload, no-any-return]


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
    _user = Request((0,), torch.uint8).tensor_in(block.storage)
    return alone, block.references


_REFERENCES = _count_references()
