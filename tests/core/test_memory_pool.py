"""The memory pool: no two users of one memory, its budget, figures, workspaces, threads and processes."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import multiprocessing
import pickle
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from dilated_attention_pytorch.core import blocks as blocks_module
from dilated_attention_pytorch.core import memory_pool, relief
from dilated_attention_pytorch.core.host_memory import Memory
from dilated_attention_pytorch.core.memory_pool import (
    CHECK_SECONDS,
    LEAST_BUDGET,
    SMALLEST,
    UNKNOWN_BUDGET,
    MemoryPool,
    get_global_memory_pool,
    reset_global_memory_pool,
)
from dilated_attention_pytorch.core.relief import release_idle_memory
from dilated_attention_pytorch.core.workspace import Workspace
from dilated_attention_pytorch.modules import DilatedAttention

CPU = torch.device("cpu")
KIB, MIB = 2**10, 2**20
PLENTY, SCARCE = Memory(90 * MIB, 100 * MIB), Memory(5 * MIB, 100 * MIB)


def check_consistent(pool: MemoryPool) -> dict[str, Any]:
    """The statistics, after they were held against what the pool really keeps."""
    stats = pool.get_stats()
    blocks = list(pool._blocks.values())
    workspaces = [*pool._idle, *pool._lent.values()]
    scratch = sum(buffer.untyped_storage().nbytes() for w in workspaces for buffer in w.buffers.values())
    assert stats["total_allocated"] == sum(block.storage.nbytes() for block in blocks) + scratch
    assert stats["total_allocated"] == stats["in_use_bytes"] + stats["cached_bytes"]
    assert stats["peak_allocated"] >= stats["total_allocated"] - scratch
    assert {id(block) for block in blocks} == {
        id(b) for each in pool._blocks.buckets.values() for b in each.values()
    }
    assert all(key == (b.tag, b.nbytes) for key, each in pool._blocks.buckets.items() for b in each.values())
    assert all(pool._blocks.buckets.values())
    assert not pool._reserved
    return stats


def in_threads(work: Callable[[int], Any], num: int = 8, timeout: float = 60) -> list[Any]:
    """Runs `work(i)` in threads that start together; fails if one raises or does not end."""
    barrier, results, errors = threading.Barrier(num), [None] * num, []

    def run(i: int) -> None:
        try:
            barrier.wait(30)
            results[i] = work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(num)]
    interval, end = sys.getswitchinterval(), time.monotonic() + timeout
    sys.setswitchinterval(1e-4)  # more switches, so that a race would show
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


@pytest.fixture
def global_pool() -> Iterator[MemoryPool]:
    reset_global_memory_pool()
    yield get_global_memory_pool()
    reset_global_memory_pool()


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[[Memory | None], None]:
    """Sets what a pool sees of the machine's memory, at every request."""
    monkeypatch.setattr(memory_pool, "CHECK_SECONDS", -1.0)
    return lambda memory: monkeypatch.setattr(memory_pool, "host_memory", lambda: memory)


# No two users


@dataclass
class Loan:
    """One allocation and all that can see its memory, which is filled with `value`."""

    value: int
    tensor: Tensor | None
    views: list[Tensor] = field(default_factory=list)
    storages: list[torch.UntypedStorage | Tensor] = field(default_factory=list)  # or bytes made from one
    graphs: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # leaf, loss
    returned: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        return self.views if self.tensor is None else [self.tensor, *self.views]

    @property
    def is_seen(self) -> bool:
        return bool(self.tensors or self.storages or self.graphs)

    def spans(self) -> Iterator[tuple[int, int]]:
        for x in (*self.tensors, *self.storages):
            nbytes = x.nbytes if isinstance(x, Tensor) else x.nbytes()
            if nbytes:
                yield x.data_ptr(), x.data_ptr() + nbytes


def storage_of(x: Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    return x.untyped_storage() if isinstance(x, Tensor) else x


def refusal(pool: MemoryPool, buffer: Tensor) -> str:
    """What `deallocate` says; a traceback that `pytest.raises` keeps would be one more user."""
    try:
        pool.deallocate(buffer)
    except ValueError as error:
        return str(error)
    return ""


class NeverTwice(RuleBasedStateMachine):
    """Loans that are returned, dropped, viewed and kept in every order, each filled with its own number."""

    BUDGET: ClassVar = 48 * KIB
    picks = st.integers(0, 999)
    tags = st.sampled_from(["a", "b"])

    @initialize()
    def start(self) -> None:
        self.pool = MemoryPool(self.BUDGET)
        self.loans: list[Loan] = []
        self.requests = self.returns = 0

    def pick(self, number: int, suits: Callable[[Loan], Any] = lambda loan: loan.tensors) -> Loan | None:
        loans = [loan for loan in self.loans if suits(loan)]
        return loans[number % len(loans)] if loans else None

    @rule(
        shape=st.lists(st.integers(0, 24), max_size=3),
        dtype=st.sampled_from([torch.float32, torch.uint8, torch.float64, torch.int16, torch.complex64]),
        tag=tags,
        fit=st.sampled_from(["class", "best", "exact"]),
        zero_init=st.booleans(),
        alignment=st.sampled_from([None, None, 1, 256, 4096]),
    )
    def allocate(self, shape: list[int], dtype: torch.dtype, **options: Any) -> None:
        self.requests += 1
        if math.prod(shape) * dtype.itemsize > 16 * KIB:
            shape = shape[:2]
        tensor = self.pool.allocate(shape, dtype, **options)
        assert (list(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert tensor.data_ptr() % (options["alignment"] or 1) == 0
        assert not options["zero_init"] or not tensor.any()
        value = self.requests % 200 + 1
        self.loans.append(Loan(value, tensor.fill_(value)))

    @rule(number=picks, by_view=st.booleans())
    def deallocate(self, number: int, by_view: bool) -> None:
        loan = self.pick(number, lambda loan: loan.tensors and not loan.returned)
        if loan is None:
            return
        use_view = loan.tensor is None or (by_view and bool(loan.views))
        if use_view:
            self.pool.deallocate(loan.views[-1])
        else:
            assert loan.tensor is not None
            numel, is_held = loan.tensor.numel(), any(view._base is loan.tensor for view in loan.views)
            self.pool.deallocate(loan.tensor)
            # Emptied, unless a view's base or a graph is this very tensor.
            assert loan.tensor.numel() in ((numel,) if is_held else (0,) if not loan.graphs else (0, numel))
        self.returns += 1
        loan.returned = True

    @rule(number=picks)
    def deallocate_again(self, number: int) -> None:
        loan = self.pick(number, lambda loan: loan.tensors and loan.returned)
        if loan is not None:
            assert "not on loan from this pool" in refusal(self.pool, loan.tensors[-1])

    @rule(number=picks, start=st.integers(0, 40), detached=st.booleans())
    def view(self, number: int, start: int, detached: bool) -> None:
        loan = self.pick(number)
        if loan is not None:
            source = loan.tensors[number % len(loan.tensors)]
            loan.views.append(source.detach() if detached else source.view(-1)[start : start + 30])

    @rule(number=picks)
    def keep_storage(self, number: int) -> None:
        loan = self.pick(number)
        if loan is not None:
            loan.storages.append(loan.tensors[-1].untyped_storage())

    @rule(number=picks)
    def tensor_from_storage(self, number: int) -> None:
        loan = self.pick(number, lambda loan: loan.storages)
        if loan is not None and isinstance(loan.storages[0], torch.UntypedStorage):
            loan.storages.append(torch.empty(0, dtype=torch.uint8).set_(loan.storages.pop(0)))

    @rule(number=picks)
    def use_in_graph(self, number: int) -> None:
        loan = self.pick(number, lambda loan: loan.tensors and loan.tensors[-1].is_floating_point())
        if loan is not None:
            leaf = torch.ones_like(loan.tensors[-1]).requires_grad_()
            loan.graphs.append((leaf, (leaf * loan.tensors[-1]).sum()))

    @rule(number=picks)
    def backward(self, number: int) -> None:
        loan = self.pick(number, lambda loan: loan.graphs)
        if loan is not None:
            leaf, loss = loan.graphs.pop()
            loss.backward()
            assert leaf.grad is not None
            assert (leaf.grad == loan.value).all()

    @rule(number=picks, what=st.sampled_from(["tensor", "views", "storages", "graphs", "all"]))
    def drop(self, number: int, what: str) -> None:
        loan = self.pick(number, lambda loan: True)
        if loan is None:
            return
        if what in ("tensor", "all"):
            loan.tensor = None
        for name in ("views", "storages", "graphs"):
            if what in (name, "all"):
                getattr(loan, name).clear()
        self.loans = [loan for loan in self.loans if loan.is_seen]

    @precondition(lambda self: self.requests % 3 == 0)
    @rule(tag=tags, keep=st.integers(0, 3))
    def trim(self, tag: str, keep: int) -> None:
        self.pool.trim(tag, keep)
        assert self.pool.idle_buffers().get(tag, (0, 0))[0] <= keep

    @precondition(lambda self: self.requests % 5 == 0)
    @rule()
    def clear(self) -> None:
        before = self.pool.get_stats()
        assert self.pool.clear() == before["cached_bytes"]
        assert self.pool.get_stats()["cached_buffers"] == 0

    @rule(sizes=st.lists(st.integers(0, 2000), min_size=1, max_size=3))
    def use_workspace(self, sizes: list[int]) -> None:
        self.requests += 1
        with self.pool.workspace(CPU) as workspace:
            scratch = workspace.take("slot", (sizes[0],), torch.uint8, CPU).fill_(255)
            self.contents_stay()
            assert (scratch == 255).all()

    @invariant()
    def no_memory_has_two_users(self) -> None:
        spans = sorted((*span, i) for i, loan in enumerate(self.loans) for span in loan.spans())
        reached, owner = 0, -1
        for start, end, i in spans:
            assert start >= reached or i == owner, "two loans share memory"
            reached, owner = max(reached, end), i

    @invariant()
    def contents_stay(self) -> None:
        for loan in self.loans:
            assert all((tensor == loan.value).all() for tensor in loan.tensors)

    @invariant()
    def figures_are_true(self) -> None:
        stats = check_consistent(self.pool)
        assert stats["total_allocated"] <= self.BUDGET
        assert (stats["allocation_count"], stats["deallocation_count"]) == (self.requests, self.returns)
        blocks = self.pool._blocks
        seen = {storage_of(x)._cdata for loan in self.loans for x in (*loan.tensors, *loan.storages)}
        # A view keeps the tensor it was taken of, also when the view itself was returned and is empty.
        bases = [view._base for loan in self.loans for view in loan.views if view._base is not None]
        seen |= {storage_of(base)._cdata for base in bases}
        for loan in self.loans:
            for _, loss in loan.graphs:  # sum(leaf * buffer) saved the buffer
                seen.add(loss.grad_fn.next_functions[0][0]._saved_other.untyped_storage()._cdata)
        assert stats["in_use_bytes"] == sum(block.nbytes for block in blocks.values() if block.cdata in seen)


TestNeverTwice = NeverTwice.TestCase
TestNeverTwice.settings = settings(max_examples=200, stateful_step_count=50)


@pytest.mark.parametrize("turns_into", ["tensor", "storage"])
def test_user_who_changes_hold_while_the_pool_looks(turns_into: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may turn a tensor into its storage, or back, between two looks at a block."""
    pool, use_count = MemoryPool(MIB), torch._C._storage_Use_Count
    tensor = pool.allocate((8,))
    kept: list[Any] = [tensor.untyped_storage() if turns_into == "tensor" else tensor]
    del tensor

    def turn() -> None:
        if turns_into == "tensor":
            kept.append(torch.empty(0).set_(kept[0]))
        else:
            kept.append(kept[0].untyped_storage())
        del kept[0]

    def look(cdata: int) -> int:
        if turns_into == "tensor":
            count = use_count(cdata)
            turn()
            return count
        turn()
        return use_count(cdata)

    monkeypatch.setattr(torch._C, "_storage_Use_Count", look)
    (block,) = pool._blocks.values()
    assert not block.is_idle


EXPORTS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "memoryview": lambda x: memoryview(x.numpy()),
    "dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "from_dlpack": torch.from_dlpack,
    "storage slice": lambda x: x.untyped_storage()[4:8],
    "parameter": lambda x: torch.nn.Parameter(x),
    "data": lambda x: x.data,
    "numpy of a view": lambda x: x[2:].numpy(),
}


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("name", EXPORTS)
def test_exported_memory_waits_for_its_users(name: str, returns: bool) -> None:
    if "numpy" in name or name == "memoryview":
        pytest.importorskip("numpy")
    pool = MemoryPool(MIB)
    buffer = pool.allocate((64,))
    address, exported = buffer.data_ptr(), EXPORTS[name](buffer)
    if returns:
        pool.deallocate(buffer)
    del buffer
    others = [pool.allocate((64,)) for _ in range(3)]
    assert address not in {other.data_ptr() for other in others}
    assert check_consistent(pool)["in_use_bytes"] == 4 * SMALLEST
    del exported
    assert pool.allocate((64,)).data_ptr() == address


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("change", ["share", "grow", "shrink"])
def test_memory_that_was_shared_or_resized_never_serves_again(change: str, returns: bool) -> None:
    pool = MemoryPool(MIB)
    buffer = pool.allocate((64,))
    if change == "share":
        buffer.share_memory_()
    elif change == "grow":
        buffer.resize_(1000)
    else:
        buffer.untyped_storage().resize_(16)
    changed = buffer.untyped_storage()
    address = changed.data_ptr()
    if returns:
        pool.deallocate(buffer)
        check_consistent(pool)
    del buffer, changed
    others = [pool.allocate((64,)) for _ in range(2)]
    for other in others:
        assert not other.is_shared()
        assert other.untyped_storage().nbytes() == SMALLEST
        # A freed address may come again from the C library, a shared one only from the pool.
        assert other.data_ptr() != address or change != "share"
    check_consistent(pool)
    assert pool.get_stats()["reuse_count"] == 0


def test_returned_tensor_is_empty_and_aliases_see_nothing() -> None:
    pool = MemoryPool(MIB)
    buffer = alias = pool.allocate((4,)).fill_(1)
    address = buffer.data_ptr()
    pool.deallocate(buffer)
    assert (alias.numel(), buffer.dtype) == (0, torch.float32)
    assert pool.allocate((4,)).data_ptr() == address


def test_storage_kept_by_a_saved_tensor_outlives_a_return() -> None:
    pool, weight = MemoryPool(MIB), torch.ones(4, requires_grad=True)
    buffer = pool.allocate((4,)).fill_(3)
    loss = (weight * buffer).sum()
    pool.deallocate(buffer)
    del buffer
    other = pool.allocate((4,)).fill_(7)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3] * 4
    assert other.tolist() == [7] * 4
    del loss
    assert pool.allocate((4,)).fill_(5).tolist() == [5] * 4
    assert pool.get_stats()["reuse_count"] == 1


@pytest.mark.parametrize("first", [True, False])
def test_inference_and_training_share_memory(first: bool) -> None:
    """A tensor of inference mode cannot be written to outside; its memory can."""
    pool = MemoryPool(MIB)
    for inference in (first, not first):
        with torch.inference_mode(inference):
            buffer = pool.allocate((4,)).fill_(1)
            with pool.workspace(CPU) as workspace:
                workspace.take("slot", (4,), torch.float32, CPU).fill_(1)
        pool.deallocate(buffer)
    assert pool.get_stats()["reuse_count"] == 2


def test_module_trains_after_inference(global_pool: MemoryPool) -> None:
    module = DilatedAttention((16, 32), (1, 2), enable_memory_pool=True)
    x = torch.randn(1, 64, 2, 8)
    with torch.inference_mode():
        expected = module(x, x, x)
    out = module(x.requires_grad_(), x, x)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert global_pool.get_stats()["reuse_count"] > 0


def test_default_device_does_not_move_buffers() -> None:
    pool = MemoryPool(MIB)
    with torch.device("meta"):
        assert pool.allocate((4,)).device == CPU
        assert pool.allocate((4,)).device == CPU  # now from a block
        assert pool.allocate((4,), zero_init=True).tolist() == [0] * 4
        assert pool.allocate((4,), device="meta").device.type == "meta"


# Sizes, tags, dtypes


def test_size_classes_waste_at_most_a_quarter() -> None:
    for nbytes in (*range(3000), *(2**k + i for k in range(12, 40) for i in (-1, 0, 1, 7))):
        size = blocks_module.size_class(nbytes)
        assert size >= nbytes
        assert size % SMALLEST == 0
        assert size <= max(1.25 * nbytes, nbytes + SMALLEST)
        assert nbytes <= 2 * KIB or size <= 1.25 * nbytes
        assert blocks_module.size_class(size) == size
    classes = {blocks_module.size_class(n) for n in range(2**20 + 1, 2**21 + 1, 4096)}
    assert len(classes) == 4


def test_class_serves_near_sizes_and_exact_only_its_own() -> None:
    pool = MemoryPool(MIB)
    for fit in ("class", "exact"):
        pool.allocate((10_000,), torch.uint8, tag=fit, fit=fit)
        near = pool.lend((9_500,), torch.uint8, tag=fit, fit=fit)
        assert near[1] == (fit == "class")
        assert near[0].untyped_storage().nbytes() == (10_240 if fit == "class" else 9_500)
        far = pool.lend((8_000,), torch.uint8, tag=fit, fit=fit)
        assert not far[1]
    assert pool.allocate((7, 3), torch.float64, fit="exact").untyped_storage().nbytes() == 7 * 3 * 8


def test_best_fit_takes_the_smallest_up_to_twice() -> None:
    pool = MemoryPool(MIB)
    sizes = (20_001, 9_001, 5_001, 10_001)
    held = [pool.allocate((size,), torch.uint8, fit="exact") for size in sizes]
    address = {size: buffer.data_ptr() for size, buffer in zip(sizes, held, strict=True)}
    del held
    best = pool.allocate((5_000,), torch.uint8, fit="best")
    assert best.data_ptr() == address[5_001]
    second = pool.allocate((5_001,), torch.uint8, fit="best")
    assert second.data_ptr() == address[9_001]
    third = pool.allocate((5_001,), torch.uint8, fit="best")
    assert third.data_ptr() == address[10_001]
    for size in (5_000, 10_000, 20_002):  # taken, one byte below half, one byte too long
        buffer, reused = pool.lend((size,), torch.uint8, fit="best")
        assert not reused
        assert buffer.untyped_storage().nbytes() <= 1.25 * size
    assert pool.allocate((10_241,), torch.uint8, fit="best").data_ptr() == address[20_001]


def test_tags_have_their_own_memory() -> None:
    pool = MemoryPool(MIB)
    address = pool.allocate((64,), tag="a").data_ptr()
    b = pool.allocate((64,), tag="b")
    assert b.data_ptr() != address
    assert pool.tag_of(b) == "b"
    assert pool.tag_of(b[1:]) == "b"
    pool.deallocate(b)
    assert pool.tag_of(b) is None
    assert pool.allocate((64,), tag="a").data_ptr() == address
    assert pool.idle_buffers() == {"a": (1, SMALLEST), "b": (1, SMALLEST)}
    assert pool.clear("a") == SMALLEST
    assert pool.idle_buffers() == {"b": (1, SMALLEST)}


def test_last_returned_serves_first() -> None:
    pool = MemoryPool(MIB)
    buffers = [pool.allocate((64,)) for _ in range(3)]
    addresses = [buffer.data_ptr() for buffer in buffers]
    for i in (1, 2, 0):
        pool.deallocate(buffers[i])
    served = [pool.allocate((64,)) for _ in range(3)]
    assert [buffer.data_ptr() for buffer in served] == [addresses[i] for i in (0, 2, 1)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128])
@pytest.mark.parametrize("alignment", [2**k for k in range(13)])
def test_alignment(alignment: int, dtype: torch.dtype) -> None:
    pool = MemoryPool(64 * KIB)
    plain = pool.allocate((100,), dtype)
    held = [plain, *(pool.allocate((101,), dtype, alignment=alignment) for _ in range(40))]
    held.append(pool.allocate((100,), dtype, alignment=alignment, fit="exact"))
    assert all(buffer.data_ptr() % alignment == 0 for buffer in held[1:])
    for i, buffer in enumerate(held):
        buffer.fill_(i)
    assert all((buffer == i).all() for i, buffer in enumerate(held))
    assert check_consistent(pool)["total_allocated"] <= 64 * KIB
    for buffer in held:
        pool.deallocate(buffer)
    assert pool.get_stats()["in_use_bytes"] == 0
    assert pool.allocate((101,), dtype, alignment=alignment).data_ptr() % alignment == 0


def test_alignment_where_torch_allocates() -> None:
    buffer = MemoryPool(MIB).allocate((3,), torch.float64, "meta", alignment=256)
    assert (tuple(buffer.shape), buffer.dtype) == ((3,), torch.float64)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    pool = MemoryPool(MIB)
    for shape in ((3, 5), (), (0,), (4, 0, 2)):
        for fit in ("class", "exact", "best"):
            fresh = pool.allocate(shape, dtype, fit=fit)
            assert (fresh.shape, fresh.dtype, fresh.is_contiguous()) == (shape, dtype, True)
            assert not fresh.requires_grad
            expected = torch.empty(shape, dtype=dtype)  # filled, in these tests
            fresh.view(-1).view(torch.uint8).fill_(1)
            del fresh
            dirty, reused = pool.lend(shape, dtype, fit=fit)
            assert reused
            if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
                torch.testing.assert_close(dirty, expected, rtol=0, atol=0, equal_nan=True)
            del dirty
            zeros = pool.allocate(shape, dtype, fit=fit, zero_init=True)
            assert not zeros.view(-1).view(torch.uint8).any()
    assert check_consistent(pool)["in_use_bytes"] <= SMALLEST


def test_reused_bools_are_bools_when_deterministic() -> None:
    pool = MemoryPool(MIB)
    pool.allocate((4,), torch.bool)
    assert pool.allocate((4,), torch.bool).view(torch.uint8).tolist() == [1] * 4


def test_only_deterministic_mode_fills_reused_memory() -> None:
    torch.use_deterministic_algorithms(False)  # the fixture of all tests turns it on, and restores it
    pool = MemoryPool(MIB)
    pool.allocate((4,)).fill_(3)
    assert pool.allocate((4,)).tolist() == [3] * 4
    assert pool.allocate((4,), zero_init=True).tolist() == [0] * 4


def test_shape_may_be_a_size_or_a_number() -> None:
    pool = MemoryPool(MIB)
    assert pool.allocate(torch.Size([2, 3])).shape == (2, 3)
    assert pool.allocate(5).shape == (5,)  # type: ignore[arg-type]


def test_fragmentation_is_what_was_not_asked_for() -> None:
    pool = MemoryPool(MIB)
    buffers = [pool.allocate((3 * KIB // 4,)), pool.allocate((1,))]
    assert pool.get_stats()["fragmentation"] == pytest.approx(1 - (3 * KIB + 4) / (3 * KIB + SMALLEST))
    del buffers
    assert pool.get_stats()["fragmentation"] == 0


# Budget


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_least_recently_used_goes_first(order: str) -> None:
    pool = MemoryPool(4 * KIB)
    lent = {tag: pool.allocate((KIB,), torch.uint8, tag=tag) for tag in "abc"}
    for tag in order:  # the order of returning counts, not that of making
        pool.deallocate(lent.pop(tag))
    d = pool.allocate((2 * KIB,), torch.uint8, tag="d")
    assert pool.idle_buffers() == {order[1]: (1, KIB)}
    lent.clear()
    e = pool.allocate((2 * KIB,), torch.uint8, tag="e")  # c is idle too; only room for d and e
    assert pool.idle_buffers() == {}
    stats = check_consistent(pool)
    assert (stats["total_allocated"], stats["peak_allocated"], stats["evictions"]) == (4 * KIB, 4 * KIB, 3)
    assert d.data_ptr() != e.data_ptr()


def test_using_again_makes_recent() -> None:
    pool = MemoryPool(3 * KIB)
    held = [pool.allocate((KIB,), torch.uint8, tag=tag) for tag in "ab"]
    held.clear()
    pool.allocate((KIB,), torch.uint8, tag="a")
    d = pool.allocate((2 * KIB,), torch.uint8, tag="d")
    assert pool.idle_buffers() == {"a": (1, KIB)}
    assert d.numel() == 2 * KIB


def test_eviction_frees_the_memory() -> None:
    pool = MemoryPool(MIB)
    pool.allocate((64,))
    (block,) = pool._blocks.values()
    storage = weakref.ref(block.storage)
    del block
    assert pool.clear() == SMALLEST
    assert storage() is None


def test_trim_keeps_the_most_recent() -> None:
    pool = MemoryPool(MIB)
    buffers = [pool.allocate((KIB * i,), torch.uint8) for i in range(1, 6)]
    in_use = pool.allocate((9 * KIB,), torch.uint8)
    other = pool.allocate((64,), tag="other")
    for buffer in (buffers.pop(2), *buffers):
        pool.deallocate(buffer)
    assert pool.trim("buffer", 5) == 0
    assert pool.trim("buffer", 2) == (3 + 1 + 2) * KIB
    assert {block.nbytes for block in pool._blocks.values()} == {4 * KIB, 5 * KIB, 10 * KIB, SMALLEST}
    assert pool.trim("buffer", 0) == 9 * KIB
    assert pool.trim("unknown", 0) == 0
    assert check_consistent(pool)["in_use_bytes"] == 10 * KIB + SMALLEST
    assert (in_use.numel(), other.numel()) == (9 * KIB, 64)


def test_over_budget_is_served_beside_the_pool() -> None:
    pool = MemoryPool(4 * KIB)
    held = [pool.allocate((KIB,), torch.uint8).fill_(i) for i in range(10)]
    stats = check_consistent(pool)
    assert (stats["total_allocated"], stats["in_use_bytes"], stats["allocation_count"]) == (4096, 4096, 10)
    assert len(pool._loose) == 6
    assert all((buffer == i).all() for i, buffer in enumerate(held))
    for buffer in held[::-1]:
        pool.deallocate(buffer)
        assert buffer.numel() == 0
        assert "not on loan" in refusal(pool, buffer)
    stats = check_consistent(pool)
    assert (stats["in_use_bytes"], stats["cached_bytes"], stats["deallocation_count"]) == (0, 4096, 10)
    assert not pool._loose
    held = [pool.allocate((KIB,), torch.uint8, zero_init=True) for _ in range(6)]
    assert not any(buffer.any() for buffer in held)
    assert len(pool._loose) == 2
    held.clear()
    assert not pool._loose


def test_view_of_a_loose_buffer_is_no_loan_and_outlives_it() -> None:
    pool = MemoryPool(KIB)
    first, loose = pool.allocate((KIB,), torch.uint8), pool.allocate((KIB,), torch.uint8).fill_(3)
    view = loose[5:]
    assert "not on loan" in refusal(pool, view)
    pool.deallocate(loose)
    assert (view == 3).all()
    assert first.numel() == KIB


def test_buffer_of_the_whole_budget_fits() -> None:
    pool = MemoryPool(5000)  # between two size classes
    buffer = pool.allocate((5000,), torch.uint8)
    assert buffer.untyped_storage().nbytes() == 5000
    with pytest.raises(
        ValueError, match="a buffer of 5001 bytes does not fit the pool's budget of 5000 bytes"
    ):
        pool.allocate((5001,), torch.uint8)
    with pytest.raises(ValueError, match="a buffer of 5060 bytes does not fit"):
        pool.allocate((4997,), torch.uint8, alignment=64)
    assert check_consistent(pool)["allocation_count"] == 1


def test_out_of_memory_leaves_a_usable_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, other = MemoryPool(1 << 60), MemoryPool(MIB)
    other.allocate((64,))
    pool.allocate((64,))
    with pytest.raises(
        torch.OutOfMemoryError, match=r"1048576.0 MiB were asked for, [\d.]+ MiB available"
    ) as error:
        pool.allocate((1 << 40,), torch.uint8)
    assert error.value.__cause__ is not None
    assert error.value.__cause__.__traceback__ is None  # it would keep the tensors of all callers
    assert "after all idle buffers were freed" in str(error.value)
    assert other.get_stats()["cached_bytes"] == 0
    stats = check_consistent(pool)
    assert stats["total_allocated"] == 0
    assert pool.allocate((64,)).fill_(1).sum() == 64


def test_relief_lets_an_allocation_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle memory of another pool is what is missing."""
    pool, other, real = MemoryPool(MIB), MemoryPool(MIB), torch.empty
    other.allocate((64,))

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        if other.get_stats()["cached_bytes"]:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 256 bytes.")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    assert pool.allocate((64,)).numel() == 64
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pool.allocate((640,))
    monkeypatch.undo()
    check_consistent(pool)


class GuardedPools(weakref.WeakSet[MemoryPool]):
    """A set that grows while another thread iterates it raises; so both happen under the lock."""

    def __iter__(self) -> Iterator[MemoryPool]:
        assert relief.POOLS_LOCK.locked()
        return super().__iter__()

    def add(self, item: MemoryPool) -> None:
        assert relief.POOLS_LOCK.locked()
        super().add(item)


def test_pools_may_be_made_while_memory_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relief, "POOLS", GuardedPools())
    pool = MemoryPool(MIB)
    pool.allocate((64,))
    assert release_idle_memory() == SMALLEST
    assert pool.get_stats()["total_allocated"] == 0


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shape": (3, -1)}, ValueError, r"shape must not be negative, got \(3, -1\)"),
        ({"shape": -1}, ValueError, r"shape must not be negative, got \(-1,\)"),
        ({"shape": (3, 1.5)}, TypeError, r"shape must consist of integers, got \(3, 1.5\)"),
        ({"shape": (True,)}, TypeError, "shape must consist of integers"),
        ({"shape": "33"}, TypeError, "shape must consist of integers, got '33'"),
        ({"shape": None}, TypeError, "shape must consist of integers, got None"),
        ({"dtype": float}, TypeError, "dtype must be a torch.dtype, got <class 'float'>"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype, got 'float32'"),
        (
            {"device": "nowhere"},
            ValueError,
            "device must be a torch.device or the name of one, got 'nowhere'",
        ),
        ({"fit": "tight"}, ValueError, "fit must be 'class', 'best' or 'exact', got 'tight'"),
        ({"alignment": 0}, ValueError, "alignment must be a power of two, got 0"),
        ({"alignment": -64}, ValueError, "alignment must be a power of two, got -64"),
        ({"alignment": 48}, ValueError, "alignment must be a power of two, got 48"),
        ({"alignment": 64.0}, TypeError, "alignment must be an integer or None, got 64.0"),
        ({"alignment": True}, TypeError, "alignment must be an integer or None, got True"),
        ({"shape": (2**20 + 1,)}, ValueError, "a buffer of 4194308 bytes does not fit the pool's budget of"),
        ({"shape": (2**40, 2**40)}, ValueError, "does not fit the pool's budget of 1048576 bytes"),
    ],
    ids=str,
)
def test_bad_requests(options: dict[str, Any], error: type[Exception], message: str) -> None:
    pool = MemoryPool(MIB)
    kept = pool.allocate((4,)).fill_(1)
    before = pool.get_stats()
    with pytest.raises(error, match=message):
        pool.allocate(**{"shape": (4,), **options})
    assert check_consistent(pool) == before
    pool.deallocate(kept)
    assert pool.allocate((4,)).fill_(2).tolist() == [2] * 4


def test_shape_that_torch_refuses_loses_no_block() -> None:
    pool = MemoryPool(MIB)
    pool.allocate((4,))
    for fit in ("class", "exact"):  # from an idle block, and fresh
        with pytest.raises(TypeError, match="Overflow"):
            pool.allocate((0, 2**70), fit=fit)
    assert check_consistent(pool)["cached_bytes"] == SMALLEST
    assert pool.lend((4,))[1] is True


@pytest.mark.parametrize("buffer", [None, 3, [1.0], "x", torch.float32], ids=str)
def test_only_tensors_are_returned(buffer: Any) -> None:
    with pytest.raises(TypeError, match=f"buffer must be a tensor, got {type(buffer).__name__}"):
        MemoryPool(MIB).deallocate(buffer)


def test_foreign_tensors_are_refused_and_left_alone() -> None:
    pool, other = MemoryPool(MIB), MemoryPool(MIB)
    foreign, lent = torch.ones(3, 4), other.allocate((4,)).fill_(1)
    kept = pool.allocate((4,)).fill_(5)
    tensors = [foreign, foreign[1:], lent, lent[1:], kept.clone(), torch.empty(0)]
    tensors += [torch.eye(2).to_sparse(), torch.ones(2, device="meta"), torch.nn.Parameter(torch.ones(2))]
    for tensor in tensors:
        with pytest.raises(ValueError, match=r"a tensor of shape \(.*\) is not on loan from this pool"):
            pool.deallocate(tensor)
    assert foreign.sum() == 12
    assert lent.sum() == 4
    assert kept.sum() == 20
    assert check_consistent(pool)["deallocation_count"] == 0
    other.deallocate(lent)


def test_double_return() -> None:
    pool = MemoryPool(MIB)
    buffer = pool.allocate((4,)).fill_(1)
    view = buffer[1:]
    pool.deallocate(buffer)  # whole, since the view needs it
    for tensor in (buffer, view):
        with pytest.raises(ValueError, match="it was returned before, or came from elsewhere"):
            pool.deallocate(tensor)
    del tensor
    assert view.tolist() == [1] * 3
    assert check_consistent(pool)["deallocation_count"] == 1
    del buffer, view
    gc.collect()  # the frames of the errors above
    again = pool.allocate((4,))
    assert pool.get_stats()["reuse_count"] == 1
    pool.deallocate(again)
    with pytest.raises(ValueError, match=r"a tensor of shape \(0,\) is not on loan"):
        pool.deallocate(again)


@pytest.mark.parametrize("value", [-1, 0, SMALLEST - 1])
def test_budget_below_the_smallest_buffer(value: int) -> None:
    with pytest.raises(ValueError, match=f"max_bytes must be at least {SMALLEST}.*got {value}"):
        MemoryPool(value)
    assert MemoryPool(SMALLEST).allocate((SMALLEST,), torch.uint8).numel() == SMALLEST


@pytest.mark.parametrize("value", [True, 1e6, "1G"])
def test_budget_is_an_integer(value: Any) -> None:
    with pytest.raises(TypeError, match="max_bytes must be an integer or None, got"):
        MemoryPool(value)


@pytest.mark.parametrize("pool_size", [0, 1, 10])
def test_pool_size_bounds_the_idle_buffers(pool_size: int) -> None:
    pool = MemoryPool(pool_size=pool_size)
    lent = [pool.allocate((64 * (i + 1),), torch.uint8, tag=f"tag {i % 3}") for i in range(12)]
    assert check_consistent(pool)["cached_buffers"] == 0
    newest = lent[-1].data_ptr()
    for i, buffer in enumerate(lent, start=1):
        pool.deallocate(buffer)
        stats = check_consistent(pool)
        assert (stats["cached_buffers"], stats["evictions"]) == (min(i, pool_size), max(0, i - pool_size))
    if pool_size:  # the least recently used went
        assert pool.allocate((64 * 12,), torch.uint8, tag="tag 2").data_ptr() == newest
    dropped = [pool.allocate((2**12,)) for _ in range(12)]
    del dropped
    kept = pool.allocate((8,), torch.uint8, tag="other")
    assert check_consistent(pool)["cached_buffers"] <= pool_size
    assert kept.numel() == 8


@pytest.mark.parametrize("pool_size", [0, 2, 5])
def test_pool_size_counts_scratch(pool_size: int) -> None:
    pool = MemoryPool(pool_size=pool_size)
    for _ in range(3):
        with pool.workspace(CPU) as workspace:
            for slot in ("query", "key", "value", "other"):
                workspace.take(slot, (100,), torch.float32, CPU).fill_(1)
        assert check_consistent(pool)["cached_buffers"] == min(4, pool_size)
    assert pool.get_stats()["reuse_count"] == 2 * min(4, pool_size)
    pool.deallocate(pool.allocate((100,)))  # buffers go before scratch
    assert pool.get_stats()["cached_buffers"] == min(5, pool_size)
    assert sum(number for number, _ in pool.idle_buffers().values()) == min(5, pool_size)
    assert ("buffer" in pool.idle_buffers()) == (pool_size == 5)


def test_without_a_pool_size_the_bytes_are_the_limit() -> None:
    pool = MemoryPool()
    for buffer in [pool.allocate((64,)) for _ in range(50)]:
        pool.deallocate(buffer)
    assert (pool.pool_size, check_consistent(pool)["cached_buffers"]) == (None, 50)
    for value in (-1, True, 2.0, "10"):
        with pytest.raises(ValueError, match="pool_size must be an integer of 0 or more, or None, got"):
            MemoryPool(pool_size=value)  # type: ignore[arg-type]


# Pressure


@pytest.mark.parametrize("max_bytes", [None, 10 * MIB])
def test_scarce_memory_frees_what_is_idle(
    max_bytes: int | None, look: Callable[[Memory | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    pool = MemoryPool(max_bytes)
    look(PLENTY)
    kept = pool.allocate((64,), tag="kept")
    pool.allocate((64,))
    with pool.workspace(CPU) as workspace:
        workspace.take("slot", (100,), torch.uint8, CPU)
    assert not pool.memory_is_scarce
    assert pool.cleanup() == 0
    assert pool.get_stats()["cached_bytes"] == SMALLEST + 100
    look(SCARCE)
    with caplog.at_level("DEBUG", logger="dilated_attention_pytorch"):
        assert pool.cleanup() == SMALLEST + 100
    assert "memory is scarce" in caplog.text
    assert pool.memory_is_scarce
    stats = check_consistent(pool)
    assert (stats["pressure_cleanups"], stats["cached_bytes"], stats["in_use_bytes"]) == (1, 0, SMALLEST)
    pool.allocate((64,))  # by a request as well
    assert pool.lend((64,))[1] is False
    assert pool.get_stats()["pressure_cleanups"] == 2
    look(PLENTY)
    pool.allocate((64,))
    assert pool.lend((64,))[1] is True
    assert not pool.memory_is_scarce
    look(None)  # a system that does not tell
    assert pool.lend((64,))[1] is True
    assert kept.numel() == 64


def test_dynamic_budget_follows_available_memory(look: Callable[[Memory | None], None]) -> None:
    pool = MemoryPool()
    look(Memory(4000 * MIB, 5000 * MIB))
    assert pool.budget == 1000 * MIB
    buffer = pool.allocate((8 * MIB,), torch.uint8)
    assert pool.budget == 1002 * MIB  # what the pool holds is not lost
    look(Memory(3000 * MIB, 5000 * MIB))
    assert pool.budget == pool.get_stats()["max_bytes"] == 752 * MIB
    look(Memory(MIB, 5000 * MIB))
    assert pool.budget == LEAST_BUDGET
    look(None)
    assert pool.budget == LEAST_BUDGET  # the last known
    assert MemoryPool().budget == UNKNOWN_BUDGET
    look(Memory(4000 * MIB, 5000 * MIB))
    assert MemoryPool(MIB).budget == MIB
    assert buffer.numel() == 8 * MIB


def test_dynamic_budget_refuses_nothing(look: Callable[[Memory | None], None]) -> None:
    pool = MemoryPool()
    look(Memory(100 * MIB, 500 * MIB))
    buffer = pool.allocate((LEAST_BUDGET + 1,), torch.uint8)
    assert check_consistent(pool)["total_allocated"] == 0  # beside the pool
    pool.deallocate(buffer)
    assert pool.get_stats()["deallocation_count"] == 1


def test_shrunk_budget_evicts(look: Callable[[Memory | None], None]) -> None:
    pool = MemoryPool()
    look(Memory(1000 * MIB, 1000 * MIB))
    buffers = [pool.allocate((20 * MIB,), torch.uint8, tag=str(i)) for i in range(5)]
    buffers.clear()
    look(Memory(120 * MIB, 1000 * MIB))  # not scarce
    assert pool.cleanup() == 40 * MIB
    assert check_consistent(pool)["total_allocated"] == 60 * MIB <= pool.budget == LEAST_BUDGET


def test_machine_is_not_asked_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(memory_pool, "host_memory", lambda: asked.append(1))
    now = [1000.0]
    monkeypatch.setattr(memory_pool.time, "monotonic", lambda: now[0])
    pool = MemoryPool()
    for _ in range(5):
        pool.allocate((4,))
    assert len(asked) == 1
    now[0] += CHECK_SECONDS + 0.1
    with pool.workspace(CPU, lightweight=True) as workspace:
        workspace.take("slot", (4,), torch.float32, CPU)
    assert len(asked) == 1
    with pool.workspace(CPU):
        pass
    assert len(asked) == 2


def test_aggressive_cleanup_collects_and_frees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, emptied = MemoryPool(MIB), []
    cycle: list[Any] = [pool.allocate((64,))]
    cycle.append(cycle)
    del cycle
    with pool.workspace(CPU) as workspace:
        workspace.take("slot", (100,), torch.uint8, CPU)
    del workspace
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    assert pool.cleanup(aggressive=True) == SMALLEST + 100
    assert emptied == [1]
    assert check_consistent(pool)["total_allocated"] == 0
    release_idle_memory()
    assert emptied == [1, 1]


# NUMA and devices


@pytest.mark.parametrize(("nodes", "numa"), [(2, True), (2, False), (1, True)])
def test_numa_touches_fresh_memory(nodes: int, numa: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "numa_nodes", lambda: nodes)
    torch.use_deterministic_algorithms(False)  # or the buffer would be filled after it was touched
    pool, real = MemoryPool(MIB), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: real(*args, **kwargs).fill_(7))
    buffer = pool.allocate((64,), torch.uint8, numa=numa)
    assert (buffer == (0 if nodes > 1 and numa else 7)).all()
    assert pool.get_stats()["numa_nodes"] == nodes
    buffer.fill_(5)
    del buffer
    assert (pool.allocate((64,), torch.uint8, numa=numa) == 5).all()  # touched before


@dataclass(eq=False)
class FakeDevicePool:
    segments: list[dict[str, int]] = field(default_factory=list)

    def snapshot(self) -> list[dict[str, int]]:
        return self.segments


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """A CUDA of two devices, on meta memory: the pools made, and those entered with their device."""
    seen: dict[str, list[Any]] = {"made": [], "entered": [], "inside": []}
    real = torch.empty

    def make() -> FakeDevicePool:
        seen["made"].append(FakeDevicePool())
        return seen["made"][-1]

    @contextmanager
    def use(pool: FakeDevicePool, device: torch.device) -> Iterator[None]:
        seen["entered"].append((pool, device))
        seen["inside"].append(device)
        yield
        seen["inside"].pop()

    def empty(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if torch.device(device or "cpu").type != "cuda":
            return real(*args, device=device, **kwargs)
        assert seen["inside"], "allocated outside of the pool"
        return real(*args, device="meta", **kwargs)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "MemPool", make)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch, "empty", empty)
    return seen


def test_device_memory_has_one_pool_a_device(cuda: dict[str, list[Any]]) -> None:
    pool = MemoryPool(MIB)
    host = pool.allocate((64,))
    with pool._device_scope(CPU):
        assert not cuda["made"]
    with pool._device_scope(torch.device("cuda")):
        assert cuda["inside"] == [torch.device("cuda:1")]
    assert not cuda["inside"]
    with pool.workspace(torch.device("cuda:1")) as workspace:
        assert isinstance(workspace, Workspace)
        workspace.take("slot", (4,), torch.float32, torch.device("cuda:1"))
        workspace.result((4,), torch.float32, torch.device("cuda:1"))
    with pool._device_scope(torch.device("cuda:0")):
        pass
    assert [device.index for _, device in cuda["entered"]] == [1, 1, 0]
    assert [pool for pool, _ in cuda["entered"]] == [cuda["made"][i] for i in (0, 0, 1)]
    assert len(cuda["made"]) == 2
    cuda["made"][0].segments = [
        {"total_size": 100, "allocated_size": 60},
        {"total_size": 20, "allocated_size": 0},
    ]
    stats = pool.get_stats()
    assert stats["devices"] == {"cuda:1": {"total": 120, "cached": 60}, "cuda:0": {"total": 0, "cached": 0}}
    assert stats["total_allocated"] == SMALLEST + 120
    assert (stats["in_use_bytes"], stats["cached_bytes"]) == (SMALLEST + 60, 60)
    assert host.numel() == 64
    pool.clear()  # a MemPool keeps its memory until nothing refers to it
    assert "devices" not in pool.get_stats()


def test_device_buffers_are_counted_and_returned(cuda: dict[str, list[Any]]) -> None:
    pool = MemoryPool(SMALLEST)  # a budget of host memory: it does not bound the device's
    buffer = pool.allocate((4096,), device="cuda:0")
    assert buffer.shape == (4096,)
    assert pool.tag_of(buffer) is None
    pool.deallocate(buffer)
    assert "not on loan" in refusal(pool, buffer)
    stats = pool.get_stats()
    assert (stats["allocation_count"], stats["deallocation_count"], stats["total_allocated"]) == (1, 1, 0)


def test_device_without_cuda_needs_no_pool() -> None:
    pool = MemoryPool(MIB)
    with pool._device_scope(torch.device("meta")), pool._device_scope(torch.device("cuda")):
        pass
    assert not pool._device_pools
    with pool.workspace(torch.device("meta")) as workspace:
        assert workspace.take("slot", (4,), torch.float32, torch.device("meta")).device.type == "meta"
    assert pool.get_stats()["total_allocated"] == 0


def test_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = MemoryPool(MIB)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    buffer = pool.allocate((64,), pinned=True)
    assert pool.tag_of(buffer) == "buffer"  # ordinary memory of the pool
    assert not buffer.is_pinned()
    asked, real = [], torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        asked.append(pin_memory)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    pinned = pool.allocate((64,), pinned=True)
    assert asked == [True]
    assert pool.tag_of(pinned) is None  # torch keeps pinned memory itself
    pool.deallocate(pinned)
    pool.allocate((64,), device="meta", pinned=True)
    assert True not in asked[1:]


# Workspaces


def take(workspace: Workspace, *slots: str, numel: int = 100) -> list[Tensor]:
    return [workspace.take(slot, (numel,), torch.uint8, CPU) for slot in slots]


def test_slots_stay_warm_over_calls_and_layers() -> None:
    pool, addresses = MemoryPool(MIB), set()
    for layer in range(10):
        with pool.workspace(CPU) as workspace:
            key, value = take(workspace, "key", "value", numel=100 - layer)
            key.fill_(1)
            value.fill_(2)
            assert (key == 1).all()
            assert workspace.take("key", (5, 4), torch.uint8, CPU).data_ptr() == key.data_ptr()
            addresses.add((key.data_ptr(), value.data_ptr()))
    stats = check_consistent(pool)
    assert len(addresses) == 1
    assert (stats["allocation_count"], stats["reuse_count"], stats["total_allocated"]) == (20, 18, 200)
    assert stats["cached_buffers"] == 2
    assert pool.idle_buffers() == {"key": (1, 100), "value": (1, 100)}
    with pool.workspace(CPU) as workspace:
        take(workspace, "key", numel=101)  # too small: replaced
        take(workspace, "key", numel=300)  # and again in the same call
        workspace.take("key", (2,), torch.float32, CPU)
    stats = check_consistent(pool)
    assert (stats["allocation_count"], stats["reuse_count"], stats["total_allocated"]) == (23, 18, 408)


def test_clearing_a_slot_frees_idle_scratch_of_that_name() -> None:
    pool = MemoryPool(MIB)
    with pool.workspace(CPU) as lent:
        take(lent, "key")
        with pool.workspace(CPU) as workspace:
            take(workspace, "key", "value")
        assert pool.clear("key") == 100
        assert check_consistent(pool)["in_use_bytes"] == 100
    assert pool.idle_buffers() == {"key": (1, 100), "value": (1, 100)}


def test_concurrent_calls_have_their_own_scratch() -> None:
    pool = MemoryPool(MIB)
    with pool.workspace(CPU) as first, pool.workspace(CPU) as second:
        assert first is not second
        (a,), (b,) = take(first, "slot"), take(second, "slot")
        a.fill_(1)
        b.fill_(2)
        assert (a == 1).all()
        assert check_consistent(pool)["in_use_bytes"] == 200
    assert check_consistent(pool)["cached_bytes"] == 200
    with pool.workspace(CPU) as third:
        assert third is first  # the last returned: warm
    assert pool.clear() == 200


def test_failing_call_drops_its_workspace() -> None:
    pool = MemoryPool(MIB)
    with pool.workspace(CPU) as kept:
        take(kept, "slot")
    with contextlib.suppress(KeyError), pool.workspace(CPU) as workspace:
        take(workspace, "slot")
        raise KeyError
    assert workspace is kept
    stats = check_consistent(pool)
    assert (stats["total_allocated"], stats["allocation_count"]) == (0, 1)
    with pool.workspace(CPU) as fresh:
        assert fresh is not workspace


def test_reset_while_lent() -> None:
    pool = MemoryPool(MIB)
    buffer = pool.allocate((64,)).fill_(1)
    over = MemoryPool(SMALLEST)
    held = over.allocate((64,)), over.allocate((128,))
    over.reset()
    for each in held:
        assert "not on loan" in refusal(over, each)
    with pool.workspace(CPU) as workspace:
        (scratch,) = take(workspace, "slot")
        scratch.fill_(2)
        pool.reset()
        assert pool.get_stats()["total_allocated"] == 0
        assert (scratch == 2).all()
    stats = check_consistent(pool)
    assert (stats["total_allocated"], stats["allocation_count"], stats["peak_allocated"]) == (0, 0, 0)
    assert (buffer == 1).all()
    assert "not on loan" in refusal(pool, buffer)
    assert pool.allocate((64,)).data_ptr() != buffer.data_ptr()


def test_reset_keeps_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock made anew would let another thread in before everything is reset."""
    pool = MemoryPool(MIB)
    lock = pool._lock
    monkeypatch.setattr(memory_pool.threading, "RLock", never)
    pool.reset()
    assert pool._lock is lock


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("called although it should not be")


def test_reset_during_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, real = MemoryPool(KIB), memory_pool._fresh
    other: list[Tensor] = []

    def fresh(nbytes: int, spread: bool) -> torch.UntypedStorage:
        monkeypatch.setattr(memory_pool, "_fresh", real)
        pool.reset()
        other.append(pool.allocate((KIB,), torch.uint8))  # the whole budget
        return real(nbytes, spread)

    monkeypatch.setattr(memory_pool, "_fresh", fresh)
    buffer = pool.allocate((KIB,), torch.uint8).fill_(1)
    assert check_consistent(pool)["total_allocated"] == KIB
    assert "not on loan" in refusal(pool, buffer)
    pool.deallocate(other[0])
    assert check_consistent(pool)["cached_bytes"] == KIB


def test_memory_being_allocated_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or two threads that allocate at once would exceed the budget together."""
    pool, real = MemoryPool(KIB), memory_pool._fresh
    other: list[Tensor] = []

    def fresh(nbytes: int, spread: bool) -> torch.UntypedStorage:
        monkeypatch.setattr(memory_pool, "_fresh", real)
        assert pool.get_stats()["in_use_bytes"] == KIB
        other.append(pool.allocate((KIB,), torch.uint8))
        return real(nbytes, spread)

    monkeypatch.setattr(memory_pool, "_fresh", fresh)
    kept = pool.allocate((KIB,), torch.uint8)
    assert check_consistent(pool)["total_allocated"] == KIB
    assert pool.tag_of(kept) == "buffer"
    assert pool.tag_of(other[0]) is None


def test_workspaces_are_evicted_to_the_budget() -> None:
    pool = MemoryPool(KIB)
    idle = pool.allocate((KIB // 2,), torch.uint8)
    del idle
    with pool.workspace(CPU) as workspace:
        take(workspace, "slot", numel=KIB)
    stats = check_consistent(pool)
    assert (stats["total_allocated"], stats["evictions"]) == (KIB, 1)
    with pool.workspace(CPU) as workspace:
        take(workspace, "slot", numel=2 * KIB)  # a call is not refused its scratch, but nobody keeps it
    assert check_consistent(pool)["total_allocated"] == 0
    assert pool.get_stats()["peak_allocated"] == 2 * KIB


def test_results_are_pooled_from_a_size_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "RESULT_BYTES", 3000)
    pool = MemoryPool(MIB)

    def call(shape: tuple[int, ...], **options: Any) -> Tensor:
        with pool.workspace(CPU, **options) as workspace:
            return workspace.result(shape, torch.uint8, CPU)

    assert pool.tag_of(call((2999,))) is None
    first = call((3, 1001))
    assert first.shape == (3, 1001)
    assert pool.tag_of(first) == "output"
    assert first.untyped_storage().nbytes() == 3003
    address, second = first.data_ptr(), call((3003,))
    assert second.data_ptr() != address
    view = first[1:].fill_(7)
    del first
    assert call((3003,)).data_ptr() != address
    del view
    assert call((3002,)).data_ptr() != address  # another size
    held = [call((3003,)), call((3003,))]
    assert address in {buffer.data_ptr() for buffer in held}
    assert pool.get_stats()["reuse_count"] == 2
    assert pool.tag_of(call((3003,), lightweight=True)) is None
    assert pool.tag_of(call((2 * MIB,))) is None  # beyond the budget
    own = torch.zeros(1)
    assert call((3003,), make_result=lambda shape, dtype, device: own) is own
    check_consistent(pool)


def test_profiling_counts_by_type() -> None:
    pool = MemoryPool(MIB, enable_profiling=True)
    for lightweight in (False, False, True):
        with pool.workspace(CPU, lightweight=lightweight) as workspace:
            take(workspace, "key")
    for numel in (10, 20):
        pool.allocate((numel,), tag="mask")
    assert pool.get_stats()["types"] == {
        "key": {"allocations": 2, "reuses": 1, "largest_bytes": 100},
        "mask": {"allocations": 2, "reuses": 1, "largest_bytes": 80},
    }
    assert pool.get_stats()["reuse_rate"] == 3 / 5
    assert "types" not in MemoryPool(MIB).get_stats()


def test_repr() -> None:
    pool = MemoryPool(4 * MIB)
    kept = pool.allocate((MIB,), torch.uint8)
    for _ in range(3):
        pool.allocate((MIB // 2,), torch.uint8)
    assert repr(pool) == "MemoryPool(1.5 MiB held, 2 of 4 requests reused memory)"
    assert kept.numel() == MIB


# Threads and processes


def test_threads_share_a_pool() -> None:
    torch.use_deterministic_algorithms(False)  # filling takes time
    pool, num_operations = MemoryPool(64 * KIB), 20_000

    def work(seed: int) -> tuple[int, int]:
        choose, held, requests, returns = random.Random(seed), [], 0, 0
        for i in range(num_operations):
            action, number = choose.random(), seed * num_operations + i
            if action < 0.1:
                with pool.workspace(CPU) as workspace:
                    size = choose.randrange(1, 150)
                    scratch = workspace.take("slot", (size,), torch.int64, CPU).fill_(number)
                    requests += 1
                    if i % 50 == 0:
                        time.sleep(0)
                    assert scratch.tolist() == [number] * size
            elif action < 0.5 or not held:
                fit = ("class", "best", "exact")[i % 3]
                buffer = pool.allocate((choose.randrange(1, 150),), torch.int64, tag="ab"[i % 2], fit=fit)
                held.append((buffer.fill_(number), number))
                requests += 1
            else:
                buffer, number = held.pop(choose.randrange(len(held)))
                assert buffer.tolist() == [number] * len(buffer)
                if action < 0.8:
                    pool.deallocate(buffer)
                    returns += 1
                del buffer
            if i % 1000 == 0:
                assert pool.get_stats()["total_allocated"] >= 0
                pool.trim("a", 3)
            while len(held) > 12:
                held.pop()
        return requests, returns

    figures = in_threads(work)
    stats = check_consistent(pool)
    assert stats["allocation_count"] == sum(requests for requests, _ in figures)
    assert stats["deallocation_count"] == sum(returns for _, returns in figures)
    assert stats["in_use_bytes"] == 0
    assert stats["total_allocated"] == stats["cached_bytes"] <= 64 * KIB
    assert stats["reuse_count"] > 0
    assert stats["evictions"] > 0
    assert not pool._lent
    assert not pool._loose
    assert pool.clear() == stats["cached_bytes"]
    assert not pool._blocks
    assert not pool._blocks.buckets


def test_threads_and_resets_leave_a_consistent_pool() -> None:
    pool = MemoryPool(16 * KIB)

    def work(i: int) -> None:
        for number in range(1500):
            if i == 0 and number % 10 == 0:
                pool.reset()
            buffer = pool.allocate((64 + number % 200,), torch.int64).fill_(number)
            with pool.workspace(CPU) as workspace:
                take(workspace, "slot", numel=number)
            assert buffer.tolist() == [number] * len(buffer)

    in_threads(work, 4)
    assert check_consistent(pool)["in_use_bytes"] == 0
    assert not pool._lent


@contextmanager
def locked_elsewhere(*locks: Any) -> Iterator[None]:
    """While another thread holds the locks."""
    holds, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        holds.set()
        may_end.wait(60)
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(30)
    try:
        yield
    finally:
        may_end.set()
        thread.join()


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_starts_clean(global_pool: MemoryPool) -> None:
    context = multiprocessing.get_context("fork")
    pool = MemoryPool(MIB)
    kept, idle = pool.allocate((64,)).fill_(1), pool.allocate((64,))
    del idle
    before = pool.get_stats()
    receiver, sender = context.Pipe(False)

    def child() -> None:
        stats = pool.get_stats()
        own = pool.allocate((64,)).fill_(2)
        with pool.workspace(CPU) as workspace:
            take(workspace, "slot")
        MemoryPool(MIB).allocate((4,))
        release_idle_memory()
        get_global_memory_pool().allocate((4,))
        sender.send((stats, own.tolist(), kept.tolist(), refusal(pool, kept), check_consistent(pool)))

    with pool.workspace(CPU), locked_elsewhere(pool._lock, memory_pool._GLOBAL_LOCK, relief.POOLS_LOCK):
        process = context.Process(target=child)
        process.start()
        try:
            assert receiver.poll(30), "the child hangs"
            stats, own, inherited, said, after = receiver.recv()
            process.join(30)
            assert process.exitcode == 0
        finally:
            process.kill()  # or a child that hangs would keep this process from its end
    assert all(stats[name] == 0 for name in ("total_allocated", "allocation_count", "peak_allocated"))
    assert own == [2] * 64
    assert inherited == [1] * 64  # the child's copy of the parent's buffer, not on loan there
    assert "not on loan" in said
    assert after["in_use_bytes"] == SMALLEST
    assert check_consistent(pool) == before
    pool.deallocate(kept)
    assert check_consistent(pool)["cached_bytes"] == 2 * SMALLEST


def test_spawn_starts_clean(global_pool: MemoryPool) -> None:
    pool = MemoryPool(3 * KIB, enable_profiling=True)
    kept = pool.allocate((64,)), global_pool.allocate((64,))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        for each in (pool, global_pool):
            stats = executor.submit(MemoryPool.get_stats, each).result(120)
            assert (stats["total_allocated"], stats["allocation_count"]) == (0, 0)
        assert executor.submit(attrgetter("max_bytes"), pool).result(120) == 3 * KIB
    assert all(check_consistent(each)["in_use_bytes"] == SMALLEST for each in (pool, global_pool))
    assert len(kept) == 2


def test_copies_share_and_pickles_keep_the_settings(global_pool: MemoryPool) -> None:
    pool = MemoryPool(3 * KIB, pool_size=7, enable_profiling=True)
    kept = pool.allocate((64,))
    assert copy.copy(pool) is copy.deepcopy({"pool": pool})["pool"] is pool
    assert pickle.loads(pickle.dumps(global_pool)) is global_pool
    other = pickle.loads(pickle.dumps(pool))
    assert other is not pool
    assert (other.max_bytes, other.pool_size, other.enable_profiling) == (3 * KIB, 7, True)
    assert other.get_stats()["total_allocated"] == 0
    assert "not on loan" in refusal(other, kept)
    assert pickle.loads(pickle.dumps(MemoryPool())).max_bytes is None


def test_global_pool_is_one_and_stays_through_reset(global_pool: MemoryPool) -> None:
    assert get_global_memory_pool() is global_pool
    kept = global_pool.allocate((64,))
    reset_global_memory_pool()
    assert get_global_memory_pool() is global_pool
    assert global_pool.get_stats()["total_allocated"] == 0
    assert kept.numel() == 64


def test_pools_are_freed_with_their_memory() -> None:
    pool = MemoryPool(MIB)
    pool.allocate((64,))
    (block,) = pool._blocks.values()
    gone = weakref.ref(pool), weakref.ref(block.storage)
    del pool, block
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the platform has no interval timer")
def test_a_signal_handler_gets_its_own_memory() -> None:
    """A handler runs between any two instructions of the thread that holds the pool's lock."""
    pool, got, shared = MemoryPool(), [], 0
    before = signal.signal(signal.SIGALRM, lambda *_: got.append(pool.allocate((100,))))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        end, handled = time.monotonic() + 2, 0
        while time.monotonic() < end:
            got.clear()
            mine = pool.allocate((100,))
            shared += any(mine.data_ptr() == other.data_ptr() for other in list(got))
            handled += len(got)
            pool.trim("buffer", 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled > 10
    assert shared == 0
    del mine
    got.clear()
    check_consistent(pool)


@pytest.mark.parametrize("moment", ["idle", "pop"])
def test_a_request_in_the_middle_of_a_drop(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that allocates after the idle blocks were listed, or while one of them leaves."""
    pool, got = MemoryPool(), []
    pool.allocate((100,))
    real = getattr(blocks_module.Blocks, moment)

    def interrupted(self: blocks_module.Blocks, *args: Any) -> Any:
        found = real(self, *args) if moment == "idle" else None
        monkeypatch.setattr(blocks_module.Blocks, moment, real)
        got.append(pool.allocate((100,)))
        return found if moment == "idle" else real(self, *args)

    monkeypatch.setattr(blocks_module.Blocks, moment, interrupted)
    freed = pool.trim("buffer", 0)
    assert freed == (0 if moment == "idle" else 512)
    check_consistent(pool)
    pool.deallocate(got.pop())
    check_consistent(pool)


def test_the_pool_can_be_logged_while_it_is_locked() -> None:
    pool, text = MemoryPool(), []
    with pool._lock:
        thread = threading.Thread(target=lambda: text.append(repr(pool)), daemon=True)
        thread.start()
        thread.join(timeout=30)
    assert text == ["MemoryPool(0.0 MiB held, 0 of 0 requests reused memory)"]


def test_many_buffers_on_loan_cost_no_search() -> None:
    """Each request asks a bounded number of blocks whether they are free."""
    pool, asked = MemoryPool(), 0
    held = [pool.allocate((16,)) for _ in range(500)]
    real = blocks_module.Block.is_idle

    class Counted(blocks_module.Block):
        @property
        def is_idle(self) -> bool:
            nonlocal asked
            asked += 1
            return real.__get__(self)

    for block in pool._blocks.values():
        block.__class__ = Counted
    held.append(pool.allocate((16,)))
    assert 0 < asked <= blocks_module.MOST_ASKED
