"""Scratch of one call by slot, the types of buffers, and the blocks of memory that a pool keeps."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..checks import (
    check_alignment,
    check_device,
    check_dtype,
    check_flags,
    check_positive,
    check_shape,
    one_of,
)
from .host_memory import numa_nodes

Make = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
Fit = Literal["class", "best", "exact", "scratch", "fresh"]
Frequency = Literal["low", "medium", "high"]
Lifetime = Literal["operation", "forward", "iteration", "persistent"]
CAPACITY: dict[str, int] = {"low": 5, "medium": 7, "high": 10}  # idle buffers kept of a type
FITS: dict[str, Fit] = {"bucketed": "class", "numa": "exact", "fragment_aware": "best", "direct": "exact"}
MIB, CPU = 2**20, torch.device("cpu")
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


class BufferType(str, Enum):
    """What a buffer is for."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    OUTPUT = "output"
    SCORES = "scores"
    WEIGHTS = "weights"
    TEMP = "temp"
    COMM = "comm"
    MASK = "mask"
    CACHE = "cache"

    @classmethod
    def _missing_(cls, value: object) -> None:
        known = ", ".join(each.value for each in cls)
        raise ValueError(f"buffer_type must be one of {known}, got {value!r}")

    @classmethod
    def of(cls, tag: str) -> BufferType:
        """The type of a tag or a slot of scratch: "key", or "comm_in"; those of no type are temporary."""
        name = tag.partition("_")[0]
        return cls(name) if name in cls._value2member_map_ else cls.TEMP


@dataclass(frozen=True)
class BufferConfig:
    """How buffers of a type are had and kept.

    Args:
        typical_size_mb: in MiB. A buffer of more than twice that takes the best fitting idle one.
        reuse_frequency: "low", "medium" or "high": 5, 7 or 10 idle buffers are kept.
        lifetime: "operation", "forward", "iteration" or "persistent": when idle buffers of the type have no
            further use; `clear_cache(lifetime=...)` frees what has reached its end.
        prefer_bucketed: below 1 MiB and with high reuse, sizes are rounded up to a size class.
        prefer_numa: above 16 MiB on a host of several NUMA nodes, memory is spread over them.
        prefer_pinned: page-locked memory, where there is a device to copy to.
        zero_init: filled with zeros when handed out.
        alignment: of the first element in bytes, a power of two.
    """

    typical_size_mb: float
    reuse_frequency: Frequency
    lifetime: Lifetime
    prefer_bucketed: bool = True
    prefer_numa: bool = False
    prefer_pinned: bool = False
    zero_init: bool = False
    alignment: int | None = None

    def __post_init__(self) -> None:
        check_positive(typical_size_mb=self.typical_size_mb)
        one_of("reuse_frequency", self.reuse_frequency, get_args(Frequency))
        one_of("lifetime", self.lifetime, get_args(Lifetime))
        names = ("prefer_bucketed", "prefer_numa", "prefer_pinned", "zero_init")
        check_flags(**{name: getattr(self, name) for name in names})
        check_alignment(self.alignment)

    def strategy(self, nbytes: int) -> str:
        """ "bucketed", "numa", "fragment_aware" or "direct", by the size of a buffer."""
        if nbytes < MIB and self.prefer_bucketed and self.reuse_frequency == "high":
            return "bucketed"
        if nbytes > 16 * MIB and self.prefer_numa and numa_nodes() > 1:
            return "numa"
        return "fragment_aware" if nbytes > 2 * self.typical_size_mb * MIB else "direct"


_INPUT = BufferConfig(4.0, "high", "forward")
_SCORES = BufferConfig(16.0, "medium", "operation", prefer_bucketed=False, prefer_numa=True)
DEFAULT_CONFIGS: Mapping[BufferType, BufferConfig] = {
    **dict.fromkeys((BufferType.QUERY, BufferType.KEY, BufferType.VALUE), _INPUT),
    BufferType.OUTPUT: BufferConfig(4.0, "high", "forward", zero_init=True),
    **dict.fromkeys((BufferType.SCORES, BufferType.WEIGHTS), _SCORES),
    BufferType.TEMP: BufferConfig(1.0, "high", "operation"),
    BufferType.COMM: BufferConfig(8.0, "medium", "persistent", prefer_bucketed=False, prefer_pinned=True),
    BufferType.MASK: BufferConfig(1.0, "low", "persistent", alignment=64),
    BufferType.CACHE: BufferConfig(32.0, "low", "persistent", prefer_bucketed=False),
}


class Request(NamedTuple):
    """A contiguous tensor in memory of a pool; see `MemoryPool.allocate`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tag: str
    fit: Fit
    alignment: int | None = None
    device: torch.device = CPU
    pinned: bool = False
    numa: bool = False
    ahead: bool = False

    def checked(self) -> Request:
        """The same with normal values, or an error that says what is wrong."""
        check_dtype(self.dtype)
        if not isinstance(self.tag, str):
            raise TypeError(f"tag must be a string, got {self.tag!r}")
        one_of("fit", self.fit, get_args(Fit))
        check_flags(pinned=self.pinned, numa=self.numa, ahead=self.ahead)
        check_alignment(self.alignment)
        shape, device = check_shape(self.shape), check_device(self.device) or CPU
        pinned = self.pinned and device.type == "cpu" and torch.accelerator.is_available()
        request = self._replace(shape=shape, device=device, pinned=pinned)
        if request.needed >= 2**62:
            raise ValueError(f"a buffer must have fewer than 2**62 bytes, got {request.needed}")
        return request

    @property
    def is_kept(self) -> bool:
        """By the pool: torch caches pinned memory and that of devices itself, and knows about streams."""
        return self.device.type == "cpu" and not self.pinned and self.fit != "fresh"

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
