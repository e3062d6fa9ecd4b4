"""One memory pool for scratch, results and buffers: reuse that never aliases, under a byte budget."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checks import check_count, check_device, check_flags, check_pool_size, check_shape
from . import relief
from .blocks import SMALLEST, Block, Blocks, Placement, needed_bytes, size_class, tensor_in
from .host_memory import describe_bytes, host_memory, numa_nodes
from .relief import with_relief
from .workspace import MakeResult, Workspace, fill_if_deterministic

LOGGER = logging.getLogger("dilated_attention_pytorch")
# The C library keeps what is freed below 32 MiB for the next caller; larger buffers start as fresh pages.
RESULT_BYTES = 32 * 2**20
LEAST_BUDGET, UNKNOWN_BUDGET = 64 * 2**20, 2**30  # the latter where the system does not tell
CHECK_SECONDS = 2.0  # between two looks at the machine's free memory, which cost about half a millisecond


class MemoryPool:
    """Memory that outlives its user and is handed out again once nothing else can see it.

    Host memory is kept in size classes (`allocate`, `deallocate`) and in workspaces (`workspace`), all under
    one byte budget; idle buffers go before idle scratch, the least recently used first. Memory of a CUDA
    device is left to a `torch.cuda.MemPool`, pinned memory to torch's own cache for it: both know about
    streams, and the pool counts no reuse there. Thread-safe.

    Args:
        max_bytes: the budget of host memory held, on loan or idle; what exceeds it is served by memory that
            the pool does not keep. By default a quarter of what the machine can give (64 MiB at least, 1 GiB
            where it does not tell), looked at again every few seconds; when that is scarce, nothing idle is
            kept.
        pool_size: the most idle buffers that are kept, scratch included; None sets no limit beside the bytes.
            A tensor that was dropped, not returned, counts from the next request or return on.
        enable_profiling: adds figures by type of buffer to `get_stats`.
    """

    def __init__(
        self, max_bytes: int | None = None, *, pool_size: int | None = None, enable_profiling: bool = False
    ) -> None:
        if max_bytes is not None:
            if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
                raise TypeError(f"max_bytes must be an integer or None, got {max_bytes!r}")
            if max_bytes < SMALLEST:
                raise ValueError(
                    f"max_bytes must be at least {SMALLEST}, the smallest buffer of a pool, got {max_bytes}"
                )
            check_count("max_bytes", max_bytes)
        check_pool_size("pool_size", pool_size)
        check_flags(enable_profiling=enable_profiling)
        self.max_bytes, self.pool_size, self.enable_profiling = max_bytes, pool_size, enable_profiling
        self._lock = threading.RLock()
        self._start_clean()
        with relief.POOLS_LOCK:
            relief.POOLS.add(self)

    def _start_clean(self) -> None:
        self._blocks = Blocks()
        self._idle: list[Workspace] = []  # most recently used last
        self._lent: dict[int, Workspace] = {}
        # Tensors that the pool made but does not hold, so that they too can be returned.
        self._loose: dict[int, weakref.ref[Tensor]] = {}
        self._device_pools: dict[torch.device, Any] = {}
        self._reserved: dict[object, int] = {}  # bytes of buffers that are being allocated
        self.memory_is_scarce = False  # when the machine was last looked at
        self._checked, self._budget = -math.inf, self.max_bytes or UNKNOWN_BUDGET
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._types: dict[str, dict[str, int]] = {}

    # Buffers

    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        zero_init: bool = False,
        **placement: Any,
    ) -> Tensor:
        """A contiguous tensor, uninitialised unless `zero_init`; to be returned with `deallocate` or dropped.

        Args:
            placement: `tag`, `fit`, `pinned`, `alignment` and `numa`, as in `Placement`.

        Raises ValueError for a buffer larger than `max_bytes`, torch.OutOfMemoryError without memory.
        """
        return self.lend(shape, dtype, device, zero_init=zero_init, **placement)[0]

    def lend(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        zero_init: bool = False,
        **placement: Any,
    ) -> tuple[Tensor, bool]:
        """As `allocate`, and whether the memory had been used before."""
        shape, place = check_shape(shape), Placement(**placement)
        where = check_device(device) or torch.device("cpu")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        check_flags(zero_init=zero_init)
        is_pooled = where.type == "cpu" and not (place.pinned and torch.accelerator.is_available())
        needed = needed_bytes(shape, dtype, place.alignment)
        if is_pooled and self.max_bytes is not None and needed > self.max_bytes:
            raise ValueError(
                f"a buffer of {needed} bytes does not fit the pool's budget of {self.max_bytes} bytes"
            )
        if needed >= 2**62:
            raise ValueError(f"a buffer must have fewer than 2**62 bytes, got {needed}")
        if is_pooled:
            buffer, reused = self._pooled(shape, dtype, place)
        else:
            buffer, reused = self._unpooled(shape, dtype, where, place), False
        self._evict_surplus()
        return (buffer.zero_() if zero_init else buffer), reused

    def deallocate(self, buffer: Tensor) -> None:
        """Returns a buffer. The tensor is empty afterwards; views of it stay valid and delay the reuse."""
        if not isinstance(buffer, Tensor):
            raise TypeError(f"buffer must be a tensor, got {type(buffer).__name__}")
        with self._lock:
            block = self._blocks.holding(buffer)
            if block is not None and not block.returned:
                self._blocks.touch(block, returned=True, requested=block.requested)
                if not block.is_sound:
                    self._blocks.drop(block)
                    self._counts["evictions"] += 1
            elif block is not None or self._loose.pop(id(buffer), None) is None:
                raise ValueError(
                    f"a tensor of shape {tuple(buffer.shape)} is not on loan from this pool: it was returned "
                    "before, or came from elsewhere"
                )
            self._counts["deallocation_count"] += 1
        # Whoever kept the tensor must not see the next user's data. If a graph or a view's base is this very
        # tensor it stays whole, and the memory waits for them.
        if buffer._use_count() == 1:  # type: ignore[attr-defined]
            buffer.data = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        self._evict_surplus()

    def tag_of(self, buffer: Tensor) -> str | None:
        """The tag under which a buffer on loan was allocated; None if the pool does not hold it."""
        with self._lock:
            block = self._blocks.holding(buffer)
            return block.tag if block is not None and not block.returned else None

    # Workspaces

    @contextmanager
    def workspace(
        self, device: torch.device, *, lightweight: bool = False, make_result: MakeResult | None = None
    ) -> Iterator[Workspace]:
        """Scratch for one call, warm from earlier calls; kept for later ones unless the call fails.

        What the call returns comes from `make_result`, by default from this pool where that pays.
        `lightweight` leaves out what costs time beside that: results are ordinary tensors, nothing is
        recorded by type and the machine's memory is not looked at.
        """
        if device.type != "cpu":
            with self._device_scope(device):
                yield Workspace()
            return
        with self._lock:
            workspace = self._idle.pop() if self._idle else Workspace()
            self._lent[id(workspace)] = workspace
        workspace.start(None if lightweight else make_result or self._result)
        try:
            yield workspace
        except BaseException:
            with self._lock:
                self._lent.pop(id(workspace), None)
            raise
        with self._lock:
            if self._lent.pop(id(workspace), None) is None:
                return  # the pool was reset in the meantime
            self._idle.append(workspace)
            self._count_workspace(workspace, lightweight)
            limit = self._limit(look=not lightweight)
            if workspace.fresh:
                self._note_peak()
                self._evict(limit)
        self._evict_surplus()

    def lend_result(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, bool | None]:
        """A tensor that outlives the call, and whether its memory had been used before.

        Pooled only where fresh pages would cost time and the budget allows; None stands for not pooled.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or nbytes < RESULT_BYTES or nbytes > self._limit():
            return torch.empty(shape, dtype=dtype, device=device), None
        return self._pooled(shape, dtype, _RESULT)

    def _result(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.lend_result(shape, dtype, device)[0]

    # Cleaning up

    def clear(self, tag: str | None = None) -> int:
        """Frees everything idle (of one tag or slot, if given) and returns how many bytes that were."""
        if tag is None:
            with self._lock:
                self._device_pools.clear()  # a MemPool gives its memory back when nothing refers to it
                return self._evict(-1)  # not 0: empty buffers too
        return self.trim(tag, 0) + self._clear_slots(tag)

    def trim(self, tag: str, keep: int) -> int:
        """Frees the least recently used idle buffers of a tag beyond `keep`; returns the bytes freed."""
        with self._lock:
            idle = [block for block in self._blocks.idle() if block.tag == tag]
            return sum(block.nbytes for block in idle[: max(0, len(idle) - keep)] if self._drop_idle(block))

    def _clear_slots(self, name: str) -> int:
        """Frees scratch of idle workspaces by the name of its slot."""
        freed = 0
        with self._lock:
            for workspace in self._idle:
                for slot in [slot for slot in workspace.buffers if slot[0] == name]:
                    freed += workspace.buffers.pop(slot).nbytes
                    self._counts["evictions"] += 1
        return freed

    def cleanup(self, *, aggressive: bool = False) -> int:
        """Frees what is idle if memory is scarce, or in any case if `aggressive`; returns the bytes freed.

        `aggressive` does so in all pools, collects Python's garbage and empties torch's caches of devices.
        """
        with self._lock:
            before = self._held()
            self._checked = -math.inf
            self._evict(self._limit())
        if aggressive:
            relief.release_idle_memory()
        return before - self._held()

    def reset(self) -> None:
        """Forgets everything but its settings. Buffers on loan stay valid, but are the pool's no longer."""
        with self._lock:
            self._start_clean()

    # Figures

    @property
    def budget(self) -> int:
        """Bytes that the pool may hold at present."""
        return self._limit()

    def idle_buffers(self) -> dict[str, tuple[int, int]]:
        """Number and bytes of the idle buffers by tag; scratch of idle workspaces by slot."""
        figures: dict[str, tuple[int, int]] = {}
        with self._lock:
            idle = [(block.tag, block.nbytes) for block in self._blocks.idle()]
            for workspace in self._idle:
                idle += [(slot, buffer.nbytes) for (slot, _), buffer in workspace.buffers.items()]
        for tag, size in idle:
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
            idle = self._blocks.idle()
            cached = sum(block.nbytes for block in idle)
            cached += sum(workspace.nbytes for workspace in self._idle)
            lent = [block for block in list(self._blocks.values()) if block not in idle]
            total, lent_bytes = self._held(), sum(block.nbytes for block in lent)
            devices = {str(device): _device_figures(pool) for device, pool in self._device_pools.items()}
            requests, reused = self._counts["allocation_count"], self._counts["reuse_count"]
            total += sum(figures["total"] for figures in devices.values())
            cached += sum(figures["cached"] for figures in devices.values())
            stats: dict[str, Any] = {
                "total_allocated": total,
                "in_use_bytes": total - cached,
                "cached_bytes": cached,
                "cached_buffers": len(idle) + sum(len(workspace.buffers) for workspace in self._idle),
                "max_bytes": self.max_bytes or self._budget,
                "reuse_rate": reused / requests if requests else 0.0,
                "fragmentation": 1 - sum(b.requested for b in lent) / lent_bytes if lent_bytes else 0.0,
                "numa_nodes": numa_nodes(),
                **self._counts,
            }
            if devices:
                stats["devices"] = devices
            if self.enable_profiling:
                stats["types"] = {tag: dict(figures) for tag, figures in self._types.items()}
            return stats

    def __repr__(self) -> str:
        # Without the lock: its owner may log, and wait for a handler that is formatting this very pool.
        requests, reused = self._counts["allocation_count"], self._counts["reuse_count"]
        return (
            f"MemoryPool({describe_bytes(self._held())} held, {reused} of {requests} requests reused memory)"
        )

    # A pool holds a lock and this process's memory: a copy shares it, another process starts its own.

    def __copy__(self) -> MemoryPool:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryPool:
        return self

    def __reduce__(self) -> tuple[Callable[..., MemoryPool], tuple[Any, ...]]:
        if self is _GLOBAL:
            return get_global_memory_pool, ()
        profiled = self.enable_profiling
        return partial(MemoryPool, self.max_bytes, pool_size=self.pool_size, enable_profiling=profiled), ()

    # Inside, with the lock held unless a docstring says otherwise

    def _pooled(self, shape: tuple[int, ...], dtype: torch.dtype, place: Placement) -> tuple[Tensor, bool]:
        """A tensor in a block that fits it, and if that was reused. Takes the lock itself."""
        nbytes, needed = math.prod(shape) * dtype.itemsize, needed_bytes(shape, dtype, place.alignment)
        token = object()
        with self._lock:
            limit = self._limit()
            size = needed if place.fit == "exact" else size_class(needed)
            size = size if size <= limit else needed
            block = self._blocks.find(needed, size, place)
            self._count(place.tag, nbytes, reused=block is not None)
            if block is not None:
                try:
                    buffer = tensor_in(block.storage, shape, dtype, place.alignment)
                finally:
                    block.is_claimed = False
                self._blocks.touch(block, returned=False, requested=nbytes)
            else:
                self._evict(limit - size)
                has_room = self._held() + size <= limit
                if has_room:
                    self._reserved[token] = size
        if block is not None:
            return fill_if_deterministic(buffer), True
        if not has_room:
            return self._unpooled(shape, dtype, torch.device("cpu"), place, counted=True), False
        storage = None
        try:
            storage = _fresh(size, spread=place.numa and numa_nodes() > 1)
        finally:
            with self._lock:
                was_reset = self._reserved.pop(token, None) is None
                if storage is not None:
                    buffer = tensor_in(storage, shape, dtype, place.alignment)
                if storage is not None and not was_reset:
                    self._blocks.add(Block(storage, place.tag, size, nbytes))
                    self._note_peak()
        return fill_if_deterministic(buffer), False

    def _unpooled(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        place: Placement,
        counted: bool = False,
    ) -> Tensor:
        """Memory that torch's own allocators look after. Takes the lock itself."""
        pinned = place.pinned and device.type == "cpu" and torch.accelerator.is_available()
        numel = -(-needed_bytes(shape, dtype, place.alignment) // dtype.itemsize)
        sizes = shape if place.alignment is None else (numel,)
        with self._device_scope(device):
            buffer = with_relief(
                lambda: torch.empty(sizes, dtype=dtype, device=device, pin_memory=pinned), device
            )
        if place.alignment is not None:
            buffer = tensor_in(buffer.untyped_storage(), shape, dtype, place.alignment)
        key, loose = id(buffer), self._loose
        with self._lock:
            loose[key] = weakref.ref(buffer, lambda _: loose.pop(key, None))
            if not counted:
                self._count(place.tag, buffer.nbytes, reused=False)
        return buffer

    def _device_scope(self, device: torch.device) -> AbstractContextManager[object]:
        """Where allocations of a CUDA device land: a MemPool of its own, made at first use."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return nullcontext()
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        with self._lock:
            if device not in self._device_pools:
                self._device_pools[device] = torch.cuda.MemPool()
            pool = self._device_pools[device]
        scope: AbstractContextManager[object] = torch.cuda.use_mem_pool(pool, device=device)
        return scope

    def _held(self) -> int:
        workspaces = sum(workspace.nbytes for workspace in (*self._idle, *self._lent.values()))
        return self._blocks.nbytes + workspaces + sum(self._reserved.values())

    def _limit(self, look: bool = True) -> int:
        """The budget in force; with none given, a share of what the machine can give."""
        now = time.monotonic()
        if look and now - self._checked > CHECK_SECONDS:
            self._checked = now
            memory = host_memory()
            if memory is not None:
                with self._lock:
                    self.memory_is_scarce = memory.is_scarce
                    if self.max_bytes is None:
                        self._budget = max(LEAST_BUDGET, (memory.available + self._held()) // 4)
                    if memory.is_scarce and self._evict(0):
                        self._counts["pressure_cleanups"] += 1
                        LOGGER.debug("memory is scarce (%s available): idle buffers freed", memory.available)
        return self._budget

    def _evict(self, limit: int) -> int:
        """Frees idle memory, the least recently used first, until `limit` bytes are held. Takes the lock."""
        with self._lock:
            held = before = self._held()
            for block in self._blocks.idle() if held > limit else ():
                if held <= limit:
                    break
                held -= block.nbytes if self._drop_idle(block) else 0
            while held > limit and self._idle:
                held -= self._idle.pop(0).nbytes
                self._counts["evictions"] += 1
            return before - held

    def _evict_surplus(self) -> None:
        """Frees idle buffers beyond `pool_size`, in the order of `_evict`. Takes the lock."""
        if self.pool_size is None:
            return
        with self._lock:
            idle = self._blocks.idle()
            surplus = len(idle) + sum(len(workspace.buffers) for workspace in self._idle) - self.pool_size
            surplus -= sum(self._drop_idle(block) for block in idle[: max(0, surplus)])
            for workspace in self._idle:
                for slot in list(workspace.buffers)[: max(0, surplus)]:
                    del workspace.buffers[slot]
                    self._counts["evictions"] += 1
                    surplus -= 1

    def _drop_idle(self, block: Block) -> bool:
        dropped = self._blocks.drop_idle(block)
        self._counts["evictions"] += dropped
        return dropped

    def _note_peak(self) -> None:
        self._counts["peak_allocated"] = max(self._counts["peak_allocated"], self._held())

    def _count_workspace(self, workspace: Workspace, lightweight: bool) -> None:
        fresh = set(workspace.fresh)
        grown_twice = len(workspace.fresh) - len(fresh)
        self._counts["allocation_count"] += len(workspace.taken) + grown_twice
        self._counts["reuse_count"] += len(workspace.taken) - len(fresh)
        if self.enable_profiling and not lightweight:
            for slot in workspace.taken:
                self._count_type(slot[0], workspace.buffers[slot].nbytes, reused=slot not in fresh)

    def _count(self, tag: str, nbytes: int, reused: bool) -> None:
        self._counts["allocation_count"] += 1
        self._counts["reuse_count"] += reused
        if self.enable_profiling:
            self._count_type(tag, nbytes, reused)

    def _count_type(self, tag: str, nbytes: int, reused: bool) -> None:
        figures = self._types.setdefault(tag, {"allocations": 0, "reuses": 0, "largest_bytes": 0})
        figures["allocations"] += 1
        figures["reuses"] += reused
        figures["largest_bytes"] = max(figures["largest_bytes"], nbytes)


_RESULT = Placement("output", "exact")
_COUNTS = (
    "allocation_count",
    "reuse_count",
    "deallocation_count",
    "evictions",
    "pressure_cleanups",
    "peak_allocated",
)
_GLOBAL: MemoryPool | None = None
_GLOBAL_LOCK = threading.Lock()


def get_global_memory_pool() -> MemoryPool:
    """The pool that all modules share; made at first use."""
    global _GLOBAL
    with _GLOBAL_LOCK:
        if _GLOBAL is None:
            _GLOBAL = MemoryPool()
        return _GLOBAL


def reset_global_memory_pool() -> None:
    """Empties the global pool and its statistics; modules that use it go on with the same pool."""
    get_global_memory_pool().reset()


def _fresh(nbytes: int, spread: bool) -> torch.UntypedStorage:
    device = torch.device("cpu")
    buffer = with_relief(lambda: torch.empty(nbytes, dtype=torch.uint8, device=device), device)
    return (buffer.zero_() if spread else buffer).untyped_storage()


def _device_figures(pool: Any) -> dict[str, int]:
    segments = pool.snapshot()
    total = sum(segment["total_size"] for segment in segments)
    return {"total": total, "cached": total - sum(segment["allocated_size"] for segment in segments)}


def _start_clean_after_fork() -> None:
    # The parent's lock may be held by a thread that does not exist here, and its memory is the parent's.
    global _GLOBAL_LOCK
    _GLOBAL_LOCK, relief.POOLS_LOCK = threading.Lock(), threading.Lock()
    for pool in list(relief.POOLS):
        pool._lock = threading.RLock()
        pool._start_clean()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_clean_after_fork)
