"""One memory pool for scratch, results and buffers: reuse that never aliases, under a byte budget."""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from .host_memory import asked_bytes, describe_bytes, device_memory, host_memory, is_out_of_memory, numa_nodes
from .workspace import MakeResult, Workspace, fill_if_deterministic

LOGGER = logging.getLogger("dilated_attention_pytorch")
SMALLEST = 512  # bytes of the smallest size class
# The C library keeps what is freed below 32 MiB for the next caller; larger buffers start as fresh pages.
RESULT_BYTES = 32 * 2**20
LEAST_BUDGET = 64 * 2**20
CHECK_SECONDS = 2.0  # between two looks at the machine's free memory, which cost about half a millisecond

Fit = Literal["class", "best", "exact"]


@dataclass(eq=False)
class _Block:
    """Host memory of the pool. Whether anyone uses it is asked of torch each time, never remembered."""

    storage: torch.UntypedStorage
    tag: str
    nbytes: int
    requested: int = 0
    returned: bool = False

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


_ALONE = _Block(torch.empty(0, device="cpu").untyped_storage(), "", 0).references


class MemoryPool:
    """Memory that outlives its user and is handed out again once nothing else can see it.

    Host memory is kept in size classes (`allocate`, `deallocate`) and in workspaces (`workspace`), all under
    one byte budget; the least recently used goes first. Memory of a CUDA device is left to a
    `torch.cuda.MemPool`, pinned memory to torch's own cache for it: both know about streams. Thread-safe.

    Args:
        max_bytes: the budget of host memory held, on loan or idle. By default a quarter of what the machine
            can give, looked at again every few seconds; when that is scarce, nothing idle is kept.
        enable_profiling: adds figures by type of buffer to `get_stats`.
    """

    def __init__(self, max_bytes: int | None = None, *, enable_profiling: bool = False) -> None:
        if max_bytes is not None:
            if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
                raise TypeError(f"max_bytes must be an integer or None, got {max_bytes!r}")
            if max_bytes < SMALLEST:
                raise ValueError(
                    f"max_bytes must be at least {SMALLEST}, the smallest buffer of a pool, got {max_bytes}"
                )
        self.max_bytes, self.enable_profiling = max_bytes, enable_profiling
        self._lock = threading.RLock()
        self._start_clean()
        with _POOLS_LOCK:
            _POOLS.add(self)

    def _start_clean(self) -> None:
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # least recently used first
        # By tag and size; what was returned last stands last, and is so found first.
        self._buckets: dict[tuple[str, int], OrderedDict[int, _Block]] = {}
        self._block_bytes = 0
        self._idle: list[Workspace] = []  # most recently used last
        self._lent: dict[int, Workspace] = {}
        # Tensors that the pool made but does not hold, so that they too can be returned.
        self._loose: dict[int, weakref.ref[Tensor]] = {}
        self._device_pools: dict[torch.device, Any] = {}
        self._reserved: dict[object, int] = {}  # bytes of buffers that are being allocated
        self.memory_is_scarce = False  # when the machine was last looked at
        self._checked, self._budget = -math.inf, self.max_bytes or LEAST_BUDGET
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._types: dict[str, dict[str, int]] = {}

    # Buffers

    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        tag: str = "buffer",
        fit: Fit = "class",
        zero_init: bool = False,
        pinned: bool = False,
        alignment: int | None = None,
        numa: bool = False,
    ) -> Tensor:
        """A contiguous tensor, uninitialised unless `zero_init`.

        It may be returned with `deallocate` or simply dropped. Memory last used under the same `tag` serves
        again: "class" takes it from the size class (at most a quarter larger), "best" the smallest that fits
        up to twice the size, "exact" only the very size.

        Args:
            pinned: page-locked, where the machine has a device to copy to; ordinary memory elsewhere.
            alignment: of the first element in bytes, a power of two.
            numa: fresh memory is first touched by all threads of torch at once, which spreads it over the
                nodes that compute with it; nothing on a host with one node.

        Raises ValueError for a buffer larger than the whole budget, torch.OutOfMemoryError without memory.
        """
        return self.lend(
            shape,
            dtype,
            device,
            tag=tag,
            fit=fit,
            zero_init=zero_init,
            pinned=pinned,
            alignment=alignment,
            numa=numa,
        )[0]

    def lend(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        tag: str = "buffer",
        fit: Fit = "class",
        zero_init: bool = False,
        pinned: bool = False,
        alignment: int | None = None,
        numa: bool = False,
    ) -> tuple[Tensor, bool]:
        """As `allocate`, and whether the memory had been used before."""
        shape, device = check_shape(shape), torch.device(device)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        if fit not in ("class", "best", "exact"):
            raise ValueError(f"fit must be 'class', 'best' or 'exact', got {fit!r}")
        if alignment is not None:
            if isinstance(alignment, bool) or not isinstance(alignment, int):
                raise TypeError(f"alignment must be an integer or None, got {alignment!r}")
            if alignment < 1 or alignment & (alignment - 1):
                raise ValueError(f"alignment must be a power of two, got {alignment}")
        if device.type != "cpu" or (pinned and torch.accelerator.is_available()):
            pinned = pinned and device.type == "cpu"
            buffer, reused = self._unpooled(shape, dtype, device, alignment, pinned), False
        else:
            needed = _needed(shape, dtype, alignment)
            if needed > self._limit():
                raise ValueError(
                    f"a buffer of {needed} bytes does not fit the pool's budget of {self._budget} bytes"
                )
            buffer, reused = self._pooled(shape, dtype, tag, fit, alignment, numa)
        return (buffer.zero_() if zero_init else buffer), reused

    def deallocate(self, buffer: Tensor) -> None:
        """Returns a buffer. The tensor is empty afterwards; views of it stay valid and delay the reuse."""
        if not isinstance(buffer, Tensor):
            raise TypeError(f"buffer must be a tensor, got {type(buffer).__name__}")
        with self._lock:
            block = self._block_of(buffer)
            if block is not None and not block.returned:
                block.returned = True
                self._blocks.move_to_end(block.cdata)
                self._buckets[block.tag, block.nbytes].move_to_end(block.cdata)
                if not block.is_sound:
                    self._drop(block)
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

    def tag_of(self, buffer: Tensor) -> str | None:
        """The tag under which a buffer on loan was allocated; None if the pool does not hold it."""
        with self._lock:
            block = self._block_of(buffer)
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

    def _result(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that outlives the call: pooled where fresh pages would cost time, if the budget allows."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < RESULT_BYTES or nbytes > self._limit():
            return torch.empty(shape, dtype=dtype, device=device)
        return self._pooled(shape, dtype, "output", "exact", None, numa=False)[0]

    # Cleaning up

    def clear(self, tag: str | None = None) -> int:
        """Frees everything idle (of one tag, if given) and returns how many bytes that were."""
        return self._evict(-1) if tag is None else self.trim(tag, 0)  # -1: empty buffers too

    def trim(self, tag: str, keep: int) -> int:
        """Frees the least recently used idle buffers of a tag beyond `keep`; returns the bytes freed."""
        with self._lock:
            idle = [block for block in self._blocks.values() if block.tag == tag and block.is_idle]
            surplus = idle[: max(0, len(idle) - keep)]
            for block in surplus:
                self._drop(block)
            return sum(block.nbytes for block in surplus)

    def cleanup(self, *, aggressive: bool = False) -> int:
        """Frees what is idle if memory is scarce, or in any case if `aggressive`; returns the bytes freed.

        `aggressive` also runs Python's garbage collector and empties torch's caches of device memory.
        """
        if not aggressive:
            with self._lock:
                before = self._held()
                self._checked = -math.inf
                self._evict(self._limit())
                return before - self._held()
        gc.collect()
        freed = self.clear()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        return freed

    def reset(self) -> None:
        """Forgets everything, statistics too. Buffers on loan stay valid, but are the pool's no longer."""
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
            idle = [(block.tag, block.nbytes) for block in self._blocks.values() if block.is_idle]
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
            idle = [block.is_idle for block in self._blocks.values()]
            blocks = list(zip(self._blocks.values(), idle, strict=True))
            cached = sum(block.nbytes for block, is_idle in blocks if is_idle)
            cached += sum(workspace.nbytes for workspace in self._idle)
            lent = [block for block, is_idle in blocks if not is_idle]
            total, lent_bytes = self._held(), sum(block.nbytes for block in lent)
            devices = {str(device): _device_figures(pool) for device, pool in self._device_pools.items()}
            requests, reused = self._counts["allocation_count"], self._counts["reuse_count"]
            total += sum(figures["total"] for figures in devices.values())
            cached += sum(figures["cached"] for figures in devices.values())
            stats: dict[str, Any] = {
                "total_allocated": total,
                "in_use_bytes": total - cached,
                "cached_bytes": cached,
                "cached_buffers": sum(idle) + sum(len(workspace.buffers) for workspace in self._idle),
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
        stats = self.get_stats()
        return (
            f"MemoryPool({describe_bytes(stats['total_allocated'])} held, "
            f"{describe_bytes(stats['cached_bytes'])} idle, reuse rate {stats['reuse_rate']:.1%})"
        )

    # A pool holds a lock and this process's memory: a copy shares it, another process starts its own.

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryPool:
        return self

    def __reduce__(self) -> tuple[Callable[..., MemoryPool], tuple[Any, ...]]:
        if self is _GLOBAL:
            return get_global_memory_pool, ()
        return partial(MemoryPool, self.max_bytes, enable_profiling=self.enable_profiling), ()

    # Inside, with the lock held unless a docstring says otherwise

    def _pooled(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        tag: str,
        fit: Fit,
        alignment: int | None,
        numa: bool,
    ) -> tuple[Tensor, bool]:
        """A tensor in a block that fits it, and if that was reused. Takes the lock itself."""
        nbytes, needed = math.prod(shape) * dtype.itemsize, _needed(shape, dtype, alignment)
        token = object()
        with self._lock:
            limit = self._limit()
            size = needed if fit == "exact" else _size_class(needed)
            size = size if size <= limit else needed
            block = self._find(needed, tag) if fit == "best" else self._newest(tag, size)
            if block is not None:
                block.returned, block.requested = False, nbytes
                self._blocks.move_to_end(block.cdata)
                self._buckets[tag, block.nbytes].move_to_end(block.cdata, last=False)
                self._count(tag, nbytes, reused=True)
                buffer = _tensor_in(block.storage, shape, dtype, alignment)
            else:
                self._count(tag, nbytes, reused=False)
                self._evict(limit - size)
                has_room = self._held() + size <= limit
                if has_room:
                    self._reserved[token] = size
        if block is not None:
            return fill_if_deterministic(buffer), True
        if not has_room:
            return self._unpooled(shape, dtype, torch.device("cpu"), alignment, counted=True), False
        storage = None
        try:
            storage = _fresh(size, spread=numa and numa_nodes() > 1)
        finally:
            with self._lock:
                was_reset = self._reserved.pop(token, None) is None
                if storage is not None:
                    buffer = _tensor_in(storage, shape, dtype, alignment)
                if storage is not None and not was_reset:
                    block = _Block(storage, tag, size, nbytes)
                    self._blocks[block.cdata] = block
                    self._buckets.setdefault((tag, size), OrderedDict())[block.cdata] = block
                    self._block_bytes += size
                    self._note_peak()
        return buffer, False

    def _find(self, needed: int, tag: str) -> _Block | None:
        """The smallest idle block that fits, up to twice what is needed or the size class."""
        most = max(2 * needed, _size_class(needed))
        sizes = sorted(size for name, size in self._buckets if name == tag and needed <= size <= most)
        return next(filter(None, (self._newest(tag, size) for size in sizes)), None)

    def _newest(self, tag: str, size: int) -> _Block | None:
        """The idle block of the very size that was returned last."""
        for block in list(reversed(self._buckets.get((tag, size), {}).values())):
            if block.is_idle:
                if block.is_sound:
                    return block
                self._drop(block)
        return None

    def _unpooled(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        alignment: int | None = None,
        pinned: bool = False,
        counted: bool = False,
    ) -> Tensor:
        """Memory that torch's own allocators look after. Takes the lock itself."""
        sizes = shape if alignment is None else (-(-_needed(shape, dtype, alignment) // dtype.itemsize),)
        with self._device_scope(device):
            buffer = _with_relief(
                lambda: torch.empty(sizes, dtype=dtype, device=device, pin_memory=pinned), device
            )
        if alignment is not None:
            buffer = _tensor_in(buffer.untyped_storage(), shape, dtype, alignment)
        key, loose = id(buffer), self._loose
        with self._lock:
            loose[key] = weakref.ref(buffer, lambda _: loose.pop(key, None))
            if not counted:
                self._count(device.type, buffer.nbytes, reused=False)
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

    def _block_of(self, buffer: Tensor) -> _Block | None:
        if buffer.layout != torch.strided or buffer.device.type != "cpu":
            return None
        return self._blocks.get(buffer.untyped_storage()._cdata)

    def _held(self) -> int:
        workspaces = sum(workspace.nbytes for workspace in (*self._idle, *self._lent.values()))
        return self._block_bytes + workspaces + sum(self._reserved.values())

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
            for block in list(self._blocks.values()):
                if held <= limit:
                    break
                if block.is_idle:
                    self._drop(block)
                    held -= block.nbytes
            while held > limit and self._idle:
                held -= self._idle.pop(0).nbytes
                self._counts["evictions"] += 1
            return before - held

    def _drop(self, block: _Block) -> None:
        del self._blocks[block.cdata]
        bucket = self._buckets[block.tag, block.nbytes]
        del bucket[block.cdata]
        if not bucket:
            del self._buckets[block.tag, block.nbytes]
        self._block_bytes -= block.nbytes
        self._counts["evictions"] += 1

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


_COUNTS = (
    "allocation_count",
    "reuse_count",
    "deallocation_count",
    "evictions",
    "pressure_cleanups",
    "peak_allocated",
)
_POOLS: weakref.WeakSet[MemoryPool] = weakref.WeakSet()
_POOLS_LOCK = threading.Lock()  # a set that grows cannot be iterated
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


def release_idle_memory() -> int:
    """The emergency cleanup: frees what is idle in all pools and torch's caches; returns the pools' bytes."""
    gc.collect()
    with _POOLS_LOCK:
        pools = list(_POOLS)
    freed = sum(pool.clear() for pool in pools)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    LOGGER.debug("out of memory: %d idle bytes freed", freed)
    return freed


def out_of_memory(error: BaseException, device: torch.device, tried: str) -> torch.OutOfMemoryError:
    """The error to raise when nothing helped: what was asked, what there is, what was tried."""
    memory = device_memory(device)
    available = describe_bytes(None if memory is None else memory.available)
    return torch.OutOfMemoryError(
        f"out of memory on {device}: {describe_bytes(asked_bytes(error))} were asked for, {available} "
        f"available, {tried}"
    )


def _with_relief(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Calls `make`, and after running out of memory once more when all pools gave up what they could."""
    try:
        return make()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    release_idle_memory()
    try:
        return make()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # Without its traceback, whose frames would keep the tensors of the callers.
        failure = error.with_traceback(None)
        raise out_of_memory(failure, device, "after all idle buffers were freed") from failure


def _fresh(nbytes: int, spread: bool) -> torch.UntypedStorage:
    device = torch.device("cpu")
    buffer = _with_relief(lambda: torch.empty(nbytes, dtype=torch.uint8, device=device), device)
    return (buffer.zero_() if spread else buffer).untyped_storage()


def _tensor_in(
    storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: torch.dtype, alignment: int | None
) -> Tensor:
    offset = -storage.data_ptr() % alignment if alignment else 0
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, shape)  # type: ignore[call-overload, no-any-return]


def _needed(shape: tuple[int, ...], dtype: torch.dtype, alignment: int | None) -> int:
    """Bytes in which a tensor finds an aligned place."""
    return math.prod(shape) * dtype.itemsize + max(0, (alignment or 0) - dtype.itemsize)


def _size_class(nbytes: int) -> int:
    """Rounded up to one of four sizes between powers of two."""
    step = max(SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(SMALLEST, -(-nbytes // step) * step)


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple of sizes that are not negative."""
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"shape must consist of integers, got {shape!r}")
        if size < 0:
            raise ValueError(f"shape must not be negative, got {tuple(sizes)}")
    return sizes


def _device_figures(pool: Any) -> dict[str, int]:
    segments = pool.snapshot()
    total = sum(segment["total_size"] for segment in segments)
    return {"total": total, "cached": total - sum(segment["allocated_size"] for segment in segments)}


def _start_clean_after_fork() -> None:
    # The parent's lock may be held by a thread that does not exist here, and its memory is the parent's.
    global _GLOBAL_LOCK, _POOLS_LOCK
    _GLOBAL_LOCK, _POOLS_LOCK = threading.Lock(), threading.Lock()
    for pool in list(_POOLS):
        pool._lock = threading.RLock()
        pool._start_clean()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_clean_after_fork)
