"""One memory pool for scratch, results and buffers: reuse that never aliases, under a byte budget."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import MutableMapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..checks import check_count, check_flags, check_pool_size
from .host_memory import host_memory, numa_nodes
from .process import LOGGER, PerProcess, once, release_idle_memory, with_relief
from .workspace import CPU, SMALLEST, Block, Fit, Request, fill_if_deterministic, size_class

# The C library keeps what is freed below 32 MiB for the next caller; larger results start as fresh pages.
RESULT_BYTES = 32 * 2**20
LEAST_BUDGET, UNKNOWN_BUDGET = 64 * 2**20, 2**30  # the latter where the system does not tell
CHECK_SECONDS = 2.0  # between two looks at the machine's free memory, which cost about half a millisecond
MOST_ASKED = 64  # blocks that a request asks whether they are idle
FIGURES = ("allocations", "reuses", "deallocations", "largest_bytes")
_CLOCK = count(1)


class MemoryPool(PerProcess):
    """Memory that outlives its user and is handed out again once nothing else can see it. Thread-safe.

    Host memory is kept in blocks under one byte budget; idle buffers go before idle scratch, the least
    recently used first. Memory of devices and pinned memory are left to torch's own caches, which know about
    streams; the pool counts no reuse there.

    Args:
        max_bytes: the budget of host memory held, on loan or idle; what exceeds it is served by memory that
            the pool does not keep. By default a quarter of what the machine can give (64 MiB at least, 1 GiB
            where it does not tell), looked at again every few seconds; when that is scarce, nothing idle is
            kept.
        pool_size: the most idle buffers that are kept, scratch included; None sets no limit beside the bytes.
            A tensor that was dropped, not returned, counts from the next request or return on.
        enable_profiling: adds figures by type of buffer to `get_stats`.
    """

    SETTINGS = ("max_bytes", "pool_size", "enable_profiling")

    def __init__(
        self, max_bytes: int | None = None, *, pool_size: int | None = None, enable_profiling: bool = False
    ) -> None:
        if max_bytes is not None:
            check_count("max_bytes", max_bytes, SMALLEST)
        check_pool_size("pool_size", pool_size)
        check_flags(enable_profiling=enable_profiling)
        self.max_bytes, self.pool_size, self.enable_profiling = max_bytes, pool_size, enable_profiling
        super().__init__()

    def _start_clean(self) -> None:
        self._blocks: dict[int, Block] = {}  # by storage
        # Tensors that the pool made but does not hold, so that they too can be returned; and their tags.
        self._loose: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        self.memory_is_scarce = False  # when the machine was last looked at
        self._checked, self._budget = -math.inf, self.max_bytes or UNKNOWN_BUDGET
        self._evictions = self._pressure_cleanups = self._peak = 0
        # By tag: requests, those that found used memory, returns, and the largest request.
        self.figures: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        tag: str = "buffer",
        fit: Fit = "class",
        zero_init: bool = False,
        alignment: int | None = None,
        pinned: bool = False,
        numa: bool = False,
        ahead: bool = False,
    ) -> Tensor:
        """A contiguous tensor, uninitialised unless `zero_init`; to be returned with `deallocate` or dropped.

        Args:
            tag: memory serves again only under the tag that it had before.
            fit: "class" takes memory of the size class (at most a quarter larger), "best" the smallest that
                fits up to twice the size, "exact" only the very size, "scratch" any that is large enough
                and had that fit before; "fresh" memory is neither found nor kept.
            alignment: of the first element in bytes, a power of two.
            pinned: page-locked, where the machine has a device to copy to; ordinary memory elsewhere.
            numa: fresh memory is first touched by all threads of torch at once, which spreads it over the
                nodes that compute with it; nothing on a host with one node.
            ahead: for a later request, and not counted as one.

        Raises ValueError for a buffer larger than `max_bytes`, torch.OutOfMemoryError without memory.
        """
        check_flags(zero_init=zero_init)
        given: Any = (shape, dtype, tag, fit, alignment, device, pinned, numa, ahead)
        request = Request(*given).checked()
        if request.is_kept and self.max_bytes is not None and request.needed > self.max_bytes:
            limit = f"the pool's budget of {self.max_bytes} bytes"
            raise ValueError(f"a buffer of {request.needed} bytes does not fit {limit}")
        buffer = self.lend(request)
        self.trim()
        return buffer.zero_() if zero_init else buffer

    def lend(self, request: Request) -> Tensor:
        """`allocate` without its checks: a tensor in an idle block that fits it or in a new one.

        Beside the pool if that has no room, or does not keep such memory.
        """
        needed, is_scratch = request.needed, request.fit == "scratch"
        if not request.is_kept:
            fresh = _fresh(needed, request.device, request.pinned)
            with self._lock:
                self._count(request)
            return self._hand_out(request, fresh, -1)
        with self._lock:
            limit = self.budget
            size = size_class(needed) if request.fit == "class" else needed
            size = needed if size > limit else size
            buffer = self._find(request, size)
            self._count(request, reused=buffer is not None)
            if buffer is not None:
                return fill_if_deterministic(buffer)
            if is_scratch:  # what is too small now has no further use
                self._free([block for block in self._find_idle(request.tag) if block.is_scratch])
            self._evict(limit - size)
            size = size if self._held() + size <= limit else needed
        # Without the lock: a thread that runs out of memory asks all pools for theirs.
        return self._hand_out(request, _fresh(size, relieved=not is_scratch), limit)

    def _hand_out(self, request: Request, fresh: torch.UntypedStorage, limit: int) -> Tensor:
        """A tensor in fresh memory, which becomes a block if the pool then holds `limit` bytes at most."""
        buffer = request.tensor_in(fresh)
        if request.numa and request.is_kept and numa_nodes() > 1:
            buffer.zero_()
        with self._lock:
            if self._held() + fresh.nbytes() <= limit:
                block = Block(fresh, request.tag, request.fit == "scratch", request.nbytes, next(_CLOCK))
                self._blocks[block.cdata] = block
                self._peak = max(self._peak, self._held())
            else:
                self._loose[buffer] = request.tag
        return fill_if_deterministic(buffer) if request.device.type == "cpu" else buffer

    def deallocate(self, buffer: Tensor, tag: str | None = None) -> None:
        """Returns a buffer, which must have the tag if one is given.

        The tensor is empty afterwards; views of it stay valid and delay the reuse.
        """
        if not isinstance(buffer, Tensor):
            raise TypeError(f"buffer must be a tensor, got {type(buffer).__name__}")
        with self._lock:
            block = None
            if buffer.layout == torch.strided and buffer.device.type == "cpu":
                block = self._blocks.get(buffer.untyped_storage()._cdata)
            own = self._loose.get(buffer) if block is None else None if block.returned else block.tag
            if own is None:
                why = "it was returned before, or came from elsewhere"
                raise ValueError(
                    f"a tensor of shape {tuple(buffer.shape)} is not on loan from this pool: {why}"
                )
            if tag not in (None, own):
                raise ValueError(f"a buffer allocated as {own} cannot be returned as {tag}")
            if block is None:
                del self._loose[buffer]
            else:
                block.returned, block.used = True, next(_CLOCK)
                self._free([] if block.is_sound else [block])
            self.figures[own]["deallocations"] += 1
        # Whoever kept the tensor must not see the next user's data. If a graph or a view's base is this very
        # tensor it stays whole, and the memory waits for them.
        if buffer._use_count() == 1:  # type: ignore[attr-defined]
            buffer.data = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        self.trim()

    def clear(self, tag: str | None = None, keep: int = 0) -> int:
        """Frees what is idle (of one tag, if given) but the `keep` used last; returns the bytes."""
        with self._lock:
            idle = self._find_idle(tag)
            return self._free(idle[: max(0, len(idle) - keep)])

    def trim(self) -> None:
        """Frees the idle buffers beyond `pool_size`."""
        if self.pool_size is not None:
            self.clear(keep=self.pool_size)

    def release_idle(self) -> int:
        return self.clear()

    def cleanup(self, *, aggressive: bool = False) -> int:
        """Frees what is idle if memory is scarce, or in any case if `aggressive`; returns the bytes freed.

        `aggressive` does so in all pools, collects Python's garbage and empties torch's caches of devices.
        """
        with self._lock:
            before = self._held()
            self._checked = -math.inf
            self._evict(self.budget)
        if aggressive:
            release_idle_memory()
        return before - self._held()

    def reset(self) -> None:
        """Forgets everything but its settings. Buffers on loan stay valid, but are the pool's no longer."""
        with self._lock:
            self._start_clean()

    @property
    def budget(self) -> int:
        """Bytes that the pool may hold at present: `max_bytes`, or a share of what the machine can give."""
        now = time.monotonic()
        if now - self._checked > CHECK_SECONDS:
            self._checked = now
            if (memory := host_memory()) is not None:
                with self._lock:
                    self.memory_is_scarce = memory.is_scarce
                    if self.max_bytes is None:
                        self._budget = max(LEAST_BUDGET, (memory.available + self._held()) // 4)
                    if memory.is_scarce and self._evict(0):
                        self._pressure_cleanups += 1
                        LOGGER.debug("memory is scarce (%s available): idle buffers freed", memory.available)
        return self._budget

    def idle_buffers(self) -> dict[str, tuple[int, int]]:
        """Number and bytes of the idle buffers by tag; of scratch the tag is its slot."""
        with self._lock:
            idle = self._find_idle()
        sizes = {tag: [b.nbytes for b in idle if b.tag == tag] for tag in {block.tag for block in idle}}
        return {tag: (len(those), sum(those)) for tag, those in sizes.items()}

    def get_stats(self) -> dict[str, Any]:
        """Figures of the pool, in bytes and counts.

        `total_allocated` is all it holds: `in_use_bytes` on loan and `cached_bytes` idle; `peak_allocated`
        its largest value. `allocation_count` counts requests, a workspace's slot when it grows; `reuse_rate`
        is the share that needed no fresh memory. `fragmentation` is the share of lent buffers beyond what was
        asked for.
        """
        with self._lock:
            idle, counted = self._find_idle(), sum(self.figures.values(), Counter[str]())
            total, cached = self._held(), sum(block.nbytes for block in idle)
            asked = sum(block.requested for block in list(self._blocks.values()) if block not in idle)
            stats: dict[str, Any] = {"total_allocated": total, "peak_allocated": self._peak}
            stats |= {"in_use_bytes": total - cached, "cached_bytes": cached, "cached_buffers": len(idle)}
            stats |= {
                f"{name}_count": counted[f"{name}s"] for name in ("allocation", "reuse", "deallocation")
            }
            stats["reuse_rate"] = counted["reuses"] / max(1, counted["allocations"])
            stats["fragmentation"] = 1 - asked / (total - cached) if total > cached else 0.0
            stats |= {"max_bytes": self.max_bytes or self._budget, "numa_nodes": numa_nodes()}
            stats |= {"evictions": self._evictions, "pressure_cleanups": self._pressure_cleanups}
            if self.enable_profiling:
                stats["types"] = {tag: {name: x[name] for name in FIGURES} for tag, x in self.figures.items()}
        return stats

    def _find(self, request: Request, size: int) -> Tensor | None:
        """A tensor in an idle block, the smallest that fits: of a size what was returned last, then what was
        lent longest ago, which may have been dropped instead of returned.
        """
        tag, fit, is_scratch = request.tag, request.fit, request.fit == "scratch"
        most = 2 * size if fit == "best" else math.inf if is_scratch else size
        alike = [b for b in list(self._blocks.values()) if (b.tag, b.is_scratch) == (tag, is_scratch)]
        found = [b for b in alike if size <= b.nbytes <= most]
        found.sort(key=lambda b: (b.nbytes, -b.used if b.returned else b.used))
        for block in found[:MOST_ASKED]:
            if not block.has_users(0):
                continue
            if not block.is_sound:
                self._free([block])
                continue
            buffer = request.tensor_in(block.storage)
            # A signal handler that asked for memory in the meantime holds a tensor of its own.
            if block.has_users(1):
                block.returned, block.used, block.requested = False, next(_CLOCK), request.nbytes
                return buffer
        return None

    def _find_idle(self, tag: str | None = None) -> list[Block]:
        """What nobody uses, in the order in which it goes: buffers before scratch, the oldest first."""
        # A list first: a finaliser may return buffers at any time.
        idle = [b for b in list(self._blocks.values()) if tag in (None, b.tag) and b.has_users(0)]
        return sorted(idle, key=lambda block: (block.is_scratch, block.used))

    def _free(self, idle: Sequence[Block]) -> int:
        self._evictions += len(idle)
        for block in idle:
            self._blocks.pop(block.cdata, None)
        return sum(block.nbytes for block in idle)

    def _evict(self, limit: int) -> int:
        """Frees idle memory until `limit` bytes are held."""
        freed, excess = 0, self._held() - limit
        for block in self._find_idle() if excess > 0 else ():
            freed += self._free([block] if freed < excess else [])
        return freed

    def _held(self) -> int:
        return sum(block.nbytes for block in list(self._blocks.values()))

    def _count(self, request: Request, reused: bool = False) -> None:
        if request.ahead:
            return
        figures = self.figures[request.tag]
        figures["allocations"] += 1
        figures["reuses"] += reused
        figures["largest_bytes"] = max(figures["largest_bytes"], request.nbytes)


@once
def get_global_memory_pool() -> MemoryPool:
    """The pool that all modules share; made at first use."""
    return MemoryPool()


def reset_global_memory_pool() -> None:
    """Empties the global pool and its statistics; modules that use it go on with the same pool."""
    get_global_memory_pool().reset()


def _fresh(
    nbytes: int, device: torch.device = CPU, pinned: bool = False, *, relieved: bool = True
) -> torch.UntypedStorage:
    """Scratch needs no relief of its own: a call of attention is tried again as a whole."""
    make = partial(torch.empty, nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    fresh: Tensor = with_relief((make, make), device) if relieved else make()
    return fresh.untyped_storage()
