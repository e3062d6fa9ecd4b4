"""One memory pool for scratch, results and buffers: reuse that never aliases, under a byte budget."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..checks import check_device, check_flags, check_pool_size, check_whole_number
from .host_memory import host_memory, numa_nodes
from .process import LOGGER, PerProcess, once, release_idle_memory, with_relief
from .workspace import SMALLEST, Block, MakeResult, Request, Workspace, fill_if_deterministic, size_class

# The C library keeps what is freed below 32 MiB for the next caller; larger buffers start as fresh pages.
RESULT_BYTES = 32 * 2**20
LEAST_BUDGET, UNKNOWN_BUDGET = 64 * 2**20, 2**30  # the latter where the system does not tell
CHECK_SECONDS = 2.0  # between two looks at the machine's free memory, which cost about half a millisecond
MOST_ASKED = 64  # blocks that a request asks whether they are idle
CPU = torch.device("cpu")
Idle = tuple[str, int, MutableMapping[Any, Any], Any]  # tag, bytes, and where under which key it is kept
_CLOCK = count(1)


class MemoryPool(PerProcess):
    """Memory that outlives its user and is handed out again once nothing else can see it.

    Host memory is kept in size classes (`allocate`, `deallocate`) and in workspaces (`workspace`), all under
    one byte budget; idle buffers go before idle scratch, the least recently used first. Memory of devices and
    pinned memory are left to torch's own caches, which know about streams; the pool counts no reuse there.
    Thread-safe.

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
            check_whole_number("max_bytes", max_bytes, SMALLEST)
        check_pool_size("pool_size", pool_size)
        check_flags(enable_profiling=enable_profiling)
        self.max_bytes, self.pool_size, self.enable_profiling = max_bytes, pool_size, enable_profiling
        super().__init__()

    def _start_clean(self) -> None:
        self._blocks: dict[int, Block] = {}  # by storage
        self._idle: list[Workspace] = []  # most recently used last
        self._lent: dict[int, Workspace] = {}
        # Tensors that the pool made but does not hold, so that they too can be returned; and their tags.
        self._loose: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        self.memory_is_scarce = False  # when the machine was last looked at
        self._checked, self._budget = -math.inf, self.max_bytes or UNKNOWN_BUDGET
        self._evictions = self._pressure_cleanups = self._peak = 0
        # By tag or slot: requests, those that found used memory, returns, and the largest request.
        self.figures: defaultdict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_FIGURES, 0))

    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        zero_init: bool = False,
        ahead: bool = False,
        **placement: Any,
    ) -> Tensor:
        """A contiguous tensor, uninitialised unless `zero_init`; to be returned with `deallocate` or dropped.

        Args:
            ahead: for a later request, and not counted as one.
            placement: `tag`, `fit`, `alignment`, `pinned` and `numa`, as in `workspace.Request`.

        Raises ValueError for a buffer larger than `max_bytes`, torch.OutOfMemoryError without memory.
        """
        request, where = Request(shape, dtype, **placement), check_device(device) or CPU
        check_flags(zero_init=zero_init, ahead=ahead)
        pinned = request.pinned and where.type == "cpu" and torch.accelerator.is_available()
        if where.type == "cpu" and not pinned:
            buffer = self._find_or_make(request, ahead)
        else:
            buffer = request.tensor_in(_fresh(request.needed, where, pinned))
            with self._lock:
                self._loose[buffer] = request.tag
                self._count(request.tag, request.nbytes, reused=False)
        self._trim()
        return buffer.zero_() if zero_init else buffer

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
                raise ValueError(
                    f"a tensor of shape {tuple(buffer.shape)} is not on loan from this pool: it was returned "
                    "before, or came from elsewhere"
                )
            if tag not in (None, own):
                raise ValueError(f"a buffer allocated as {own} cannot be returned as {tag}")
            if block is None:
                del self._loose[buffer]
            else:
                block.returned, block.used = True, next(_CLOCK)
                self._free([] if block.is_sound else [(own, block.nbytes, self._blocks, block.cdata)])
            self.figures[own]["deallocations"] += 1
        # Whoever kept the tensor must not see the next user's data. If a graph or a view's base is this very
        # tensor it stays whole, and the memory waits for them.
        if buffer._use_count() == 1:  # type: ignore[attr-defined]
            buffer.data = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        self._trim()

    @contextmanager
    def workspace(
        self,
        device: torch.device,
        *,
        lightweight: bool = False,
        make_result: MakeResult | None = None,
        keep: bool = True,
    ) -> Iterator[Workspace]:
        """Scratch for one call, warm from earlier calls; kept for later ones unless the call fails.

        What the call returns comes from `make_result`, by default from `result`. With `lightweight` it is an
        ordinary tensor, and the machine's memory is not looked at. Without `keep` the scratch is fresh, and
        freed after the call.
        """
        if device.type != "cpu":
            yield Workspace()
            return
        with self._lock:
            workspace = self._idle.pop() if self._idle and keep else Workspace()
            self._lent[id(workspace)] = workspace
        workspace.start(None if lightweight else make_result or self.result)
        try:
            yield workspace
        except BaseException:
            with self._lock:
                self._lent.pop(id(workspace), None)
            raise
        with self._lock:
            if self._lent.pop(id(workspace), None) is None:
                return  # the pool was reset in the meantime
            self._idle += [workspace] if keep else []
            for slot in workspace.taken:
                is_fresh = slot in workspace.fresh  # otherwise its size is known
                self._count(slot[0], workspace.buffers[slot].nbytes if is_fresh else 0, not is_fresh)
            limit = self._budget if lightweight else self.budget
            if workspace.fresh:
                self._peak = max(self._peak, self._held())
                self._evict(limit)
        self._trim()

    def result(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that outlives the call; pooled where fresh pages would cost time and the budget allows."""
        nbytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or nbytes < RESULT_BYTES or nbytes > self.budget:
            return torch.empty(shape, dtype=dtype, device=device)
        return self.allocate(shape, dtype, tag="output", fit="exact")

    def clear(self, tag: str | None = None, keep: int = 0) -> int:
        """Frees what is idle (of one tag or slot, if given) but the `keep` used last; returns the bytes."""
        with self._lock:
            idle = self._find_idle(tag)
            return self._free(idle[: max(0, len(idle) - keep)])

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
        """Number and bytes of the idle buffers by tag; scratch of idle workspaces by slot."""
        figures: dict[str, tuple[int, int]] = {}
        with self._lock:
            for tag, size, _, _ in self._find_idle():
                number, nbytes = figures.get(tag, (0, 0))
                figures[tag] = (number + 1, nbytes + size)
        return figures

    def get_stats(self) -> dict[str, Any]:
        """Figures of the pool, in bytes and counts.

        `total_allocated` is all it holds: `in_use_bytes` on loan and `cached_bytes` idle; `peak_allocated`
        its largest value. `allocation_count` counts requests, a workspace's slot once a call; `reuse_rate` is
        the share that needed no fresh memory. `fragmentation` is the share of lent buffers beyond what was
        asked for.
        """
        with self._lock:
            idle, types = self._find_idle(), {tag: dict(counted) for tag, counted in self.figures.items()}
            total, cached = self._held(), sum(nbytes for _, nbytes, _, _ in idle)
            lent = [block for block in list(self._blocks.values()) if not block.has_users(0)]
            lent_bytes, asked = sum(b.nbytes for b in lent), sum(b.requested for b in lent)
            requests, reuses, returns = (
                sum(counted[name] for counted in types.values())
                for name in ("allocations", "reuses", "deallocations")
            )
            return {
                "total_allocated": total,
                "in_use_bytes": total - cached,
                "cached_bytes": cached,
                "cached_buffers": len(idle),
                "max_bytes": self.max_bytes or self._budget,
                "reuse_rate": reuses / requests if requests else 0.0,
                "fragmentation": 1 - asked / lent_bytes if lent_bytes else 0.0,
                "numa_nodes": numa_nodes(),
                "allocation_count": requests,
                "reuse_count": reuses,
                "deallocation_count": returns,
                "evictions": self._evictions,
                "pressure_cleanups": self._pressure_cleanups,
                "peak_allocated": self._peak,
                **({"types": types} if self.enable_profiling else {}),
            }

    def _find_or_make(self, request: Request, ahead: bool) -> Tensor:
        """A tensor in a block that fits it, or in memory beside the pool if that has no room."""
        tag, needed = request.tag, request.needed
        if self.max_bytes is not None and needed > self.max_bytes:
            raise ValueError(
                f"a buffer of {needed} bytes does not fit the pool's budget of {self.max_bytes} bytes"
            )
        with self._lock:
            limit, size = self.budget, size_class(needed)
            size = needed if request.fit == "exact" or size > limit else size
            least, most = (needed, max(2 * needed, size)) if request.fit == "best" else (size, size)
            buffer = None
            for block in self._find_fitting(tag, least, most):
                buffer = request.tensor_in(block.storage)
                # A signal handler that asked for memory in the meantime holds a tensor of its own.
                if block.has_users(1):
                    block.returned, block.used, block.requested = False, next(_CLOCK), request.nbytes
                    break
                buffer = None
            if not ahead:
                self._count(tag, request.nbytes, buffer is not None)
            if buffer is not None:
                return fill_if_deterministic(buffer)
            self._evict(limit - size)
            size = size if self._held() + size <= limit else needed
        # Without the lock: a thread that runs out of memory asks all pools for theirs.
        storage = _fresh(size, CPU, touched=request.numa and numa_nodes() > 1)
        buffer = request.tensor_in(storage)
        with self._lock:
            if self._held() + size <= limit:
                self._blocks[storage._cdata] = Block(storage, tag, size, request.nbytes, next(_CLOCK))
                self._peak = max(self._peak, self._held())
            else:
                self._loose[buffer] = tag
        return fill_if_deterministic(buffer)

    def _find_fitting(self, tag: str, least: int, most: int) -> Iterator[Block]:
        """Idle blocks, the smallest first: of a size what was returned last, then what was lent longest ago.

        The latter may have been dropped instead of returned.
        """
        blocks = [b for b in list(self._blocks.values()) if b.tag == tag and least <= b.nbytes <= most]
        blocks.sort(key=lambda b: (b.nbytes, -b.used if b.returned else b.used))
        for block in blocks[:MOST_ASKED]:
            if block.has_users(0):
                if block.is_sound:
                    yield block
                else:
                    self._free([(tag, block.nbytes, self._blocks, block.cdata)])

    def _find_idle(self, tag: str | None = None) -> list[Idle]:
        """What nobody uses, in the order in which it goes: buffers before scratch, the oldest first."""
        # Lists first: a finaliser may return buffers at any time.
        blocks = [b for b in list(self._blocks.values()) if tag in (None, b.tag) and b.has_users(0)]
        blocks.sort(key=lambda block: block.used)
        idle: list[Idle] = [(block.tag, block.nbytes, self._blocks, block.cdata) for block in blocks]
        for workspace in self._idle:
            slots = list(workspace.buffers.items())
            idle += [(s[0], b.nbytes, workspace.buffers, s) for s, b in slots if tag in (None, s[0])]
        return idle

    def _free(self, idle: Sequence[Idle]) -> int:
        self._evictions += len(idle)
        for _, _, kept, key in idle:
            kept.pop(key, None)
        return sum(nbytes for _, nbytes, _, _ in idle)

    def _evict(self, limit: int) -> int:
        """Frees idle memory until `limit` bytes are held."""
        excess = self._held() - limit
        going: list[Idle] = []
        for each in self._find_idle() if excess > 0 else ():
            if excess > 0:
                going.append(each)
                excess -= each[1]
        return self._free(going)

    def _trim(self) -> None:
        if self.pool_size is not None:
            self.clear(keep=self.pool_size)

    def _held(self) -> int:
        blocks = sum(block.nbytes for block in list(self._blocks.values()))
        return blocks + sum(workspace.nbytes for workspace in (*self._idle, *self._lent.values()))

    def _count(self, tag: str, nbytes: int, reused: bool) -> None:
        figures = self.figures[tag]
        figures["allocations"] += 1
        figures["reuses"] += reused
        if nbytes > figures["largest_bytes"]:
            figures["largest_bytes"] = nbytes


_FIGURES = ("allocations", "reuses", "deallocations", "largest_bytes")


@once
def get_global_memory_pool() -> MemoryPool:
    """The pool that all modules share; made at first use."""
    return MemoryPool()


def reset_global_memory_pool() -> None:
    """Empties the global pool and its statistics; modules that use it go on with the same pool."""
    get_global_memory_pool().reset()


def _fresh(
    nbytes: int, device: torch.device, pinned: bool = False, touched: bool = False
) -> torch.UntypedStorage:
    def make() -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)

    buffer = with_relief(make, device)
    return (buffer.zero_() if touched else buffer).untyped_storage()
