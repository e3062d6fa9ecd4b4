"""Blocks of host memory: how they are asked for, found again, and known to be free."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..checks import check_alignment, check_flags

SMALLEST = 512  # bytes of the smallest size class
MOST_ASKED = 64  # blocks of a size that are asked whether they are idle
Fit = Literal["class", "best", "exact"]


@dataclass(frozen=True)
class Placement:
    """Where a buffer may lie.

    Args:
        tag: memory serves again only under the tag that it had before.
        fit: "class" takes memory of the size class (at most a quarter larger), "best" the smallest that fits
            up to twice the size, "exact" only the very size.
        pinned: page-locked, where the machine has a device to copy to; ordinary memory elsewhere.
        alignment: of the first element in bytes, a power of two.
        numa: fresh memory is first touched by all threads of torch at once, which spreads it over the
            nodes that compute with it; nothing on a host with one node.
    """

    tag: str = "buffer"
    fit: Fit = "class"
    pinned: bool = False
    alignment: int | None = None
    numa: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.tag, str):
            raise TypeError(f"tag must be a string, got {self.tag!r}")
        check_flags(pinned=self.pinned, numa=self.numa)
        if self.fit not in get_args(Fit):
            raise ValueError(f"fit must be 'class', 'best' or 'exact', got {self.fit!r}")
        check_alignment(self.alignment)


@dataclass(eq=False)
class Block:
    """Host memory of a pool. Whether anyone uses it is asked of torch each time, never remembered."""

    storage: torch.UntypedStorage
    tag: str
    nbytes: int
    requested: int = 0
    returned: bool = False
    is_claimed: bool = False  # by a request that is under way, if a signal handler makes another

    def __post_init__(self) -> None:
        self.cdata, self.address = self.storage._cdata, self.storage.data_ptr()

    @property
    def is_idle(self) -> bool:
        """Nothing but the pool holds the storage: no tensor, view or graph, no Python storage object."""
        # Asked twice of Python: between the questions another thread may turn a tensor into its storage.
        return (
            self.references == _ALONE
            and torch._C._storage_Use_Count(self.cdata) == 1
            and self.references == _ALONE
        )

    @property
    def references(self) -> int:
        """From Python: `tensor.untyped_storage()` gives out this very object, which torch counts once."""
        return sys.getrefcount(self.storage)

    @property
    def is_sound(self) -> bool:
        """Still the memory that was made: a user may have resized it or moved it to other processes."""
        same = self.storage.nbytes() == self.nbytes and self.storage.data_ptr() == self.address
        return same and not self.storage.is_shared()


_ALONE = Block(torch.empty(0, device="cpu").untyped_storage(), "", 0).references


class Blocks(OrderedDict[int, Block]):
    """The blocks of a pool by storage, least recently used first, and by tag and size. Not thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        # What was returned last stands last, and is so found first.
        self.buckets: dict[tuple[str, int], OrderedDict[int, Block]] = {}

    def find(self, needed: int, size: int, placement: Placement) -> Block | None:
        """An idle block of `size` bytes, or with "best" the smallest that fits; it is claimed."""
        tag = placement.tag
        if placement.fit != "best":
            return self._newest(tag, size)
        most = max(2 * needed, size_class(needed))
        sizes = sorted(other for name, other in self.buckets if name == tag and needed <= other <= most)
        return next(filter(None, (self._newest(tag, other) for other in sizes)), None)

    def _newest(self, tag: str, size: int) -> Block | None:
        """An idle block of the very size, claimed: the one returned last, or one that was dropped."""
        # One step, in which no signal handler can change the bucket.
        newest = list(self.buckets.get((tag, size), {}).values())
        for block in newest[: -MOST_ASKED - 1 : -1]:
            if block.is_claimed:
                continue
            block.is_claimed = True
            if not block.is_idle:
                block.is_claimed = False
            elif block.is_sound:
                return block
            else:
                self.drop(block)
        return None

    def holding(self, buffer: Tensor) -> Block | None:
        """The block in which a tensor lies."""
        if buffer.layout != torch.strided or buffer.device.type != "cpu":
            return None
        return self.get(buffer.untyped_storage()._cdata)

    def add(self, block: Block) -> None:
        self[block.cdata] = block
        self.buckets.setdefault((block.tag, block.nbytes), OrderedDict())[block.cdata] = block
        self.buckets[block.tag, block.nbytes].move_to_end(block.cdata, last=False)
        self.nbytes += block.nbytes

    def idle(self) -> list[Block]:
        """The blocks that nobody uses, the least recently used first."""
        return [block for block in list(self.values()) if not block.is_claimed and block.is_idle]

    def touch(self, block: Block, *, returned: bool, requested: int) -> None:
        """Notes that a block was handed out or returned."""
        block.returned, block.requested = returned, requested
        self.move_to_end(block.cdata)
        self.buckets[block.tag, block.nbytes].move_to_end(block.cdata, last=returned)

    def drop_idle(self, block: Block) -> bool:
        """Drops a block unless somebody, if only a signal handler, has got hold of it since it was found."""
        if block.is_claimed:
            return False
        block.is_claimed = True
        if block.is_idle:
            self.drop(block)
            return True
        block.is_claimed = False
        return False

    def drop(self, block: Block) -> None:
        block.is_claimed = True  # for good: nobody may find it halfway out
        if self.pop(block.cdata, None) is None:
            return
        bucket = self.buckets[block.tag, block.nbytes]
        del bucket[block.cdata]
        if not bucket:
            del self.buckets[block.tag, block.nbytes]
        self.nbytes -= block.nbytes


def tensor_in(
    storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: torch.dtype, alignment: int | None
) -> Tensor:
    """A contiguous tensor at the first aligned place of a storage."""
    offset = -storage.data_ptr() % alignment if alignment else 0
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, shape)  # type: ignore[call-overload, no-any-return]


def needed_bytes(shape: tuple[int, ...], dtype: torch.dtype, alignment: int | None) -> int:
    """Bytes in which a tensor finds an aligned place."""
    return math.prod(shape) * dtype.itemsize + max(0, (alignment or 0) - dtype.itemsize)


def size_class(nbytes: int) -> int:
    """Rounded up to one of four sizes between powers of two."""
    step = max(SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(SMALLEST, -(-nbytes // step) * step)
