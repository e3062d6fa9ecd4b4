"""The types of attention buffers and how each is had and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

from ..checks import check_alignment, check_flags, check_positive, one_of
from .host_memory import numa_nodes
from .workspace import Fit

MIB = 2**20
BUCKETED_BELOW, NUMA_ABOVE = 1 * MIB, 16 * MIB
Frequency = Literal["low", "medium", "high"]
Lifetime = Literal["operation", "forward", "iteration", "persistent"]
CAPACITY: dict[str, int] = {"low": 5, "medium": 7, "high": 10}  # idle buffers kept of a type
FITS: dict[str, Fit] = {"bucketed": "class", "numa": "exact", "fragment_aware": "best", "direct": "exact"}


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
        if nbytes < BUCKETED_BELOW and self.prefer_bucketed and self.reuse_frequency == "high":
            return "bucketed"
        if nbytes > NUMA_ABOVE and self.prefer_numa and numa_nodes() > 1:
            return "numa"
        return "fragment_aware" if nbytes > 2 * self.typical_size_mb * MIB else "direct"


DEFAULT_CONFIGS: Mapping[BufferType, BufferConfig] = {
    BufferType.QUERY: BufferConfig(4.0, "high", "forward"),
    BufferType.KEY: BufferConfig(4.0, "high", "forward"),
    BufferType.VALUE: BufferConfig(4.0, "high", "forward"),
    BufferType.OUTPUT: BufferConfig(4.0, "high", "forward", zero_init=True),
    BufferType.SCORES: BufferConfig(16.0, "medium", "operation", prefer_bucketed=False, prefer_numa=True),
    BufferType.WEIGHTS: BufferConfig(16.0, "medium", "operation", prefer_bucketed=False, prefer_numa=True),
    BufferType.TEMP: BufferConfig(1.0, "high", "operation"),
    BufferType.COMM: BufferConfig(8.0, "medium", "persistent", prefer_bucketed=False, prefer_pinned=True),
    BufferType.MASK: BufferConfig(1.0, "low", "persistent", alignment=64),
    BufferType.CACHE: BufferConfig(32.0, "low", "persistent", prefer_bucketed=False),
}


def check_buffer_type(buffer_type: BufferType | str) -> BufferType:
    try:
        return BufferType(buffer_type)
    except ValueError:
        known = ", ".join(each.value for each in BufferType)
        raise ValueError(f"buffer_type must be one of {known}, got {buffer_type!r}") from None


def type_of(tag: str) -> BufferType:
    """The type of a tag or a slot of scratch: "key", or "comm_in"; those of no type are temporary."""
    return _TYPES.get(tag.partition("_")[0], BufferType.TEMP)


_TYPES = {each.value: each for each in BufferType}
