"""The memory pool: no two users of one memory, its budget, figures, workspaces, threads."""

from __future__ import annotations

import gc
import math
import random
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from dilated_attention_pytorch.core import (
    AttentionBufferManager,
    MemoryPool,
    get_global_memory_pool,
    memory_pool,
    process,
    reset_global_memory_pool,
)
from dilated_attention_pytorch.core.host_memory import Memory
from dilated_attention_pytorch.core.memory_pool import CHECK_SECONDS, LEAST_BUDGET, MOST_ASKED, UNKNOWN_BUDGET
from dilated_attention_pytorch.core.workspace import SMALLEST, Block, Request, Workspace, size_class
from support.threads import in_threads

CPU = torch.device("cpu")
KIB, MIB = 2**10, 2**20
PLENTY, SCARCE = Memory(90 * MIB, 100 * MIB), Memory(5 * MIB, 100 * MIB)


def check_consistent(pool: MemoryPool) -> dict[str, Any]:
    """The statistics, after they were held against what the pool really keeps."""
    stats, idle = pool.get_stats(), pool.idle_buffers().values()
    assert (stats["cached_buffers"], stats["cached_bytes"]) == (
        sum(n for n, _ in idle),
        sum(b for _, b in idle),
    )
    assert stats["total_allocated"] == sum(block.storage.nbytes() for block in pool._blocks.values())
    assert stats["total_allocated"] == stats["in_use_bytes"] + stats["cached_bytes"]
    assert stats["peak_allocated"] >= stats["total_allocated"]
    return stats


def read(pool: MemoryPool, names: str) -> tuple[Any, ...]:
    """Some of the statistics, checked."""
    stats = check_consistent(pool)
    return tuple(stats[name] for name in names.split())


def tag_of(pool: MemoryPool, buffer: Tensor) -> str | None:
    """Under which tag the pool holds the memory."""
    block = pool._blocks.get(buffer.untyped_storage()._cdata)
    return None if block is None or block.returned else block.tag


def reused(pool: MemoryPool, *args: Any, **options: Any) -> bool:
    """Whether a request, dropped at once, finds used memory."""
    before = pool.get_stats()["reuse_count"]
    pool.allocate(*args, **options)
    return pool.get_stats()["reuse_count"] > before


def scratch_of(pool: MemoryPool, **options: Any) -> AbstractContextManager[Workspace]:
    return AttentionBufferManager(pool=pool, **options).workspace(CPU)


def take(workspace: Workspace, *slots: str, numel: int = 100) -> list[Tensor]:
    return [workspace.take(slot, (numel,), torch.uint8, CPU) for slot in slots]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[[Memory | None], None]:
    """Sets what a pool sees of the machine's memory, at every request."""
    monkeypatch.setattr(memory_pool, "CHECK_SECONDS", -1.0)
    return lambda memory: monkeypatch.setattr(memory_pool, "host_memory", lambda: memory)


# Ways to see the memory of a tensor, for as long as the object that they give exists.
HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(-1)[3:30],
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "storage": lambda x: x.untyped_storage(),
    "bytes": lambda x: torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()),
    "storage slice": lambda x: x.untyped_storage()[:8],
    "dlpack": lambda x: torch.utils.dlpack.to_dlpack(x.detach()),
    "from_dlpack": lambda x: torch.from_dlpack(x.detach()),
}
if find_spec("numpy") is not None:
    HOLDS |= {
        "numpy": lambda x: x.detach().numpy(),
        "memoryview": lambda x: memoryview(x.detach().numpy()),
        "numpy of a view": lambda x: x.detach().view(-1)[2:].numpy(),
    }
ALWAYS = ("bytes", "from_dlpack")  # tensors that are no buffers of the pool


@dataclass
class Loan:
    """One allocation, filled with `value`, and all that can see its memory."""

    value: int
    tensor: Tensor | None
    holders: list[tuple[str, Any]] = field(default_factory=list)
    graphs: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # leaf, loss
    returned: bool = False

    def __post_init__(self) -> None:
        assert self.tensor is not None
        storage = self.tensor.untyped_storage()
        self.cdata, self.span = storage._cdata, (storage.data_ptr(), storage.data_ptr() + storage.nbytes())

    @property
    def tensors(self) -> list[Tensor]:
        """Those that see the memory: a returned one is empty, unless a view or a graph needs it."""
        held = [x for kind, x in self.holders if isinstance(x, Tensor) and kind not in ALWAYS]
        tensors = held if self.tensor is None else [self.tensor, *held]
        return [x for x in tensors if x.untyped_storage()._cdata == self.cdata]

    @property
    def is_seen(self) -> bool:
        # A view keeps the tensor it was taken of, also when the view itself was returned and is empty.
        others = any(kind in (*ALWAYS, "view") or not isinstance(x, Tensor) for kind, x in self.holders)
        return others or bool(self.tensors or self.graphs)


def refusal(pool: MemoryPool, buffer: Tensor) -> str:
    """What `deallocate` says; a traceback that `pytest.raises` keeps would be one more user."""
    try:
        pool.deallocate(buffer)
    except ValueError as error:
        return str(error)
    return ""


class NeverTwice(RuleBasedStateMachine):
    """Loans that are returned, dropped and held in every way and order, each filled with its own number."""

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
        fit=st.sampled_from(["class", "best", "exact", "scratch"]),
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
        value = self.requests % 100 + 1
        self.loans.append(Loan(value, tensor.fill_(value)))

    @rule(number=picks)
    def deallocate(self, number: int) -> None:
        loan = self.pick(number, lambda loan: loan.tensors and loan.cdata in self.pool._blocks)
        if loan is None:
            return
        tensor = loan.tensors[number % len(loan.tensors)]
        if loan.returned:
            assert "not on loan from this pool" in refusal(self.pool, tensor)
            return
        numel, is_needed = tensor.numel(), any(x._base is tensor for x in loan.tensors)
        self.pool.deallocate(tensor)
        assert tensor.numel() in ((numel,) if is_needed else (0,) if not loan.graphs else (0, numel))
        self.returns += 1
        loan.returned = True

    @rule(number=picks, kind=st.sampled_from(list(HOLDS)))
    def hold(self, number: int, kind: str) -> None:
        loan = self.pick(number)
        if loan is not None:
            loan.holders.append((kind, HOLDS[kind](loan.tensors[number % len(loan.tensors)])))

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

    @rule(number=picks, what=st.sampled_from(["tensor", "holders", "graphs", "all"]))
    def drop(self, number: int, what: str) -> None:
        loan = self.pick(number, lambda loan: True)
        if loan is None:
            return
        if what in ("tensor", "all"):
            loan.tensor = None
        for name in ("holders", "graphs"):
            if what in (name, "all"):
                getattr(loan, name).clear()
        self.loans = [loan for loan in self.loans if loan.is_seen]

    @precondition(lambda self: self.requests % 3 == 0)
    @rule(tag=tags, keep=st.integers(0, 3))
    def trim(self, tag: str, keep: int) -> None:
        self.pool.clear(tag, keep)
        assert self.pool.idle_buffers().get(tag, (0, 0))[0] <= keep

    @precondition(lambda self: self.requests % 5 == 0)
    @rule()
    def clear(self) -> None:
        before = self.pool.get_stats()
        assert self.pool.clear() == before["cached_bytes"]
        assert self.pool.get_stats()["cached_buffers"] == 0

    @rule(size=st.integers(0, 2000))
    def use_workspace(self, size: int) -> None:
        self.requests += 1
        with scratch_of(self.pool) as workspace:
            scratch = workspace.take("slot", (size,), torch.uint8, CPU).fill_(255)
            self.contents_stay()
            assert (scratch == 255).all()

    @invariant()
    def no_memory_has_two_users(self) -> None:
        spans = sorted(loan.span for loan in self.loans if loan.is_seen)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "two loans share memory"

    @invariant()
    def contents_stay(self) -> None:
        for loan in self.loans:
            held = [x for kind, x in loan.holders if kind.startswith("numpy") or kind == "from_dlpack"]
            assert all((x == loan.value).all() for x in (*loan.tensors, *held))

    @invariant()
    def figures_are_true(self) -> None:
        stats = check_consistent(self.pool)
        assert stats["total_allocated"] <= self.BUDGET
        assert (stats["allocation_count"], stats["deallocation_count"]) == (self.requests, self.returns)
        seen = {loan.cdata for loan in self.loans if loan.is_seen}
        blocks = self.pool._blocks.values()
        assert stats["in_use_bytes"] == sum(block.nbytes for block in blocks if block.cdata in seen)


TestNeverTwice = NeverTwice.TestCase
TestNeverTwice.settings = settings(max_examples=200, stateful_step_count=50)


@pytest.mark.parametrize("turns_into", ["tensor", "storage"])
def test_user_who_changes_hold_while_the_pool_looks(turns_into: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may turn a tensor into its storage, or back, between two looks at a block."""
    pool, use_count = MemoryPool(MIB), torch._C._storage_Use_Count
    tensor = pool.allocate((8,))
    kept: list[Any] = [tensor.untyped_storage() if turns_into == "tensor" else tensor]
    del tensor

    def look(cdata: int) -> int:
        if turns_into == "tensor":
            count = use_count(cdata)
            kept[:] = [torch.empty(0).set_(kept[0])]
            return count
        kept[:] = [kept[0].untyped_storage()]
        return use_count(cdata)

    monkeypatch.setattr(torch._C, "_storage_Use_Count", look)
    (block,) = pool._blocks.values()
    assert not block.has_users(0)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "share": lambda x: x.share_memory_(),
    "grow": lambda x: x.resize_(1000),
    "shrink": lambda x: x.untyped_storage().resize_(16),
}


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_memory_that_was_shared_or_resized_never_serves_again(change: str, returns: bool) -> None:
    pool = MemoryPool(MIB)
    buffer = pool.allocate((64,))
    CHANGES[change](buffer)
    address = buffer.untyped_storage().data_ptr()
    if returns:
        pool.deallocate(buffer)
        check_consistent(pool)
    del buffer
    for other in [pool.allocate((64,)) for _ in range(2)]:
        assert not other.is_shared()
        assert other.untyped_storage().nbytes() == SMALLEST
        # A freed address may come again from the C library, a shared one only from the pool.
        assert other.data_ptr() != address or change != "share"
    assert check_consistent(pool)["reuse_count"] == 0


def test_a_request_between_the_look_at_a_block_and_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, got, real = MemoryPool(), [], Request.tensor_in
    pool.allocate((100,))

    def interrupted(*args: Any) -> Tensor:
        monkeypatch.setattr(Request, "tensor_in", real)
        got.append(pool.allocate((100,)))
        return real(*args)

    monkeypatch.setattr(Request, "tensor_in", interrupted)
    mine = pool.allocate((100,))
    assert mine.data_ptr() != got[0].data_ptr()
    assert check_consistent(pool)["in_use_bytes"] == 2 * SMALLEST


def test_size_classes_waste_at_most_a_quarter() -> None:
    for nbytes in (*range(3000), *(2**k + i for k in range(12, 40) for i in (-1, 0, 1, 7))):
        size = size_class(nbytes)
        assert nbytes <= size <= max(1.25 * nbytes, nbytes + SMALLEST)
        assert size % SMALLEST == 0
        assert nbytes <= 2 * KIB or size <= 1.25 * nbytes
        assert size_class(size) == size
    assert len({size_class(n) for n in range(2**20 + 1, 2**21 + 1, 4096)}) == 4


@pytest.mark.parametrize(
    ("fit", "idle", "asked", "serves"),
    [
        ("class", 10_000, 9_500, True),
        ("class", 10_000, 8_000, False),
        ("exact", 10_000, 10_000, True),
        ("exact", 10_000, 9_999, False),
        ("best", 10_000, 5_000, True),
        ("best", 10_000, 4_999, False),
        ("best", 10_000, 10_001, False),
        ("scratch", 10_000, 1, True),
        ("scratch", 10_000, 10_001, False),
        ("fresh", 10_000, 10_000, False),
    ],
)
def test_which_memory_serves_again(fit: Any, idle: int, asked: int, serves: bool) -> None:
    pool = MemoryPool(MIB)
    size = pool.allocate((idle,), torch.uint8, fit=fit).untyped_storage().nbytes()
    assert size == (10_240 if fit == "class" else idle)
    found = pool.allocate((asked,), torch.uint8, fit=fit)
    stats = check_consistent(pool)
    assert stats["reuse_count"] == serves
    if serves:
        assert stats["fragmentation"] == pytest.approx(1 - asked / size)
    # Scratch that became too small is freed, and what is fresh is not kept.
    assert stats["cached_buffers"] == (0 if serves or fit in ("scratch", "fresh") else 1)
    del found


def test_tags_have_their_own_memory() -> None:
    pool = MemoryPool(MIB)
    address = pool.allocate((64,), tag="a").data_ptr()
    b = pool.allocate((64,), tag="b")
    assert b.data_ptr() != address
    with pytest.raises(ValueError, match="a buffer allocated as b cannot be returned as a"):
        pool.deallocate(b, "a")
    pool.deallocate(b, "b")
    assert pool.allocate((64,), tag="a").data_ptr() == address
    with scratch_of(pool) as workspace:
        take(workspace, "a")  # nor do scratch and buffers of one tag exchange theirs
    assert pool.idle_buffers() == {"a": (2, SMALLEST + 100), "b": (1, SMALLEST)}
    assert pool.clear("a") == SMALLEST + 100
    assert pool.idle_buffers() == {"b": (1, SMALLEST)}


def test_many_buffers_on_loan_cost_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request asks a bounded number of blocks whether they are free."""
    pool, asked, real = MemoryPool(), [], Block.has_users
    held = [pool.allocate((16,)) for _ in range(500)]
    monkeypatch.setattr(Block, "has_users", lambda self, number: asked.append(1) or real(self, number))
    held.append(pool.allocate((16,)))
    assert 0 < len(asked) <= MOST_ASKED
    pool.deallocate(held[7])
    assert reused(pool, (16,))


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_what_deterministic_mode_fills(dtype: torch.dtype) -> None:
    pool = MemoryPool(MIB)
    for shape in (torch.Size((3, 5)), (), (0,), (4, 0, 2)):
        for fit in ("class", "exact", "best", "scratch"):
            fresh = pool.allocate(shape, dtype, fit=fit)
            assert (fresh.shape, fresh.dtype, fresh.is_contiguous()) == (shape, dtype, True)
            assert not fresh.requires_grad
            expected = torch.empty(shape, dtype=dtype)  # filled, in these tests
            fresh.view(-1).view(torch.uint8).fill_(1)
            del fresh
            dirty = pool.allocate(shape, dtype, fit=fit)
            if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
                torch.testing.assert_close(dirty, expected, rtol=0, atol=0, equal_nan=True)
            del dirty
            zeros = pool.allocate(shape, dtype, fit=fit, zero_init=True)
            assert not zeros.view(-1).view(torch.uint8).any()
    assert pool.get_stats()["reuse_count"] >= 32
    assert check_consistent(pool)["in_use_bytes"] <= SMALLEST
    torch.use_deterministic_algorithms(False)  # the fixture of all tests turns it on, and restores it
    pool.allocate(5, torch.uint8, tag="a").fill_(3)  # type: ignore[arg-type]
    assert pool.allocate((5,), torch.uint8, tag="a").tolist() == [3] * 5


def test_of_best_fits_the_smallest_serves() -> None:
    pool, sizes = MemoryPool(MIB), (20_001, 9_001, 5_001, 10_001)
    held = [pool.allocate((size,), torch.uint8, fit="exact") for size in sizes]
    address = {size: buffer.data_ptr() for size, buffer in zip(sizes, held, strict=True)}
    held.clear()
    served = [pool.allocate((size,), torch.uint8, fit="best") for size in (5_000, 5_001, 5_001, 10_241)]
    assert [x.data_ptr() for x in served] == [address[size] for size in (5_001, 9_001, 10_001, 20_001)]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_least_recently_used_goes_first(order: str) -> None:
    pool = MemoryPool(4 * KIB)
    lent = {tag: pool.allocate((KIB,), torch.uint8, tag=tag) for tag in "abc"}
    for tag in order:  # the order of returning counts, not that of making
        pool.deallocate(lent.pop(tag))
    d = pool.allocate((2 * KIB,), torch.uint8, tag="d")
    assert pool.idle_buffers() == {order[1]: (1, KIB)}
    pool.allocate((KIB,), torch.uint8, tag=order[1])  # used again, and so recent
    lent.clear()
    e = pool.allocate((KIB,), torch.uint8, tag="e")
    assert pool.idle_buffers() == {order[1]: (1, KIB)}
    assert read(pool, "total_allocated peak_allocated evictions") == (4 * KIB, 4 * KIB, 2)
    assert d.data_ptr() != e.data_ptr()
    storage = weakref.ref(next(b.storage for b in pool._blocks.values() if b.tag == order[1]))
    assert pool.clear() == KIB
    assert storage() is None


def test_over_budget_is_served_beside_the_pool() -> None:
    pool = MemoryPool(4 * KIB)
    held = [pool.allocate((KIB,), torch.uint8).fill_(i) for i in range(10)]
    assert read(pool, "total_allocated in_use_bytes allocation_count") == (4096, 4096, 10)
    assert all((buffer == i).all() for i, buffer in enumerate(held))
    view = held[-1][5:]
    assert "not on loan" in refusal(pool, view)
    for buffer in held[::-1]:
        pool.deallocate(buffer)
        assert buffer is held[-1] or buffer.numel() == 0
        assert "not on loan" in refusal(pool, buffer)
    assert (view == 9).all()
    assert read(pool, "in_use_bytes cached_bytes deallocation_count") == (0, 4096, 10)
    held = [pool.allocate((KIB,), torch.uint8, zero_init=True) for _ in range(6)]
    assert not any(each.any() for each in held)
    assert len(pool._loose) == 2
    held.clear()
    assert len(pool._loose) == 0


def test_what_another_thread_takes_in_the_meantime_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is made without the lock: the whole budget may be gone then."""
    pool, real, other = MemoryPool(KIB), memory_pool._fresh, list[Tensor]()

    def fresh(*args: Any, **options: Any) -> torch.UntypedStorage:
        monkeypatch.setattr(memory_pool, "_fresh", real)
        other.append(pool.allocate((KIB,), torch.uint8))
        return real(*args, **options)

    monkeypatch.setattr(memory_pool, "_fresh", fresh)
    kept = pool.allocate((KIB,), torch.uint8)
    assert (tag_of(pool, kept), tag_of(pool, other[0])) == (None, "buffer")
    for buffer in (kept, other[0]):
        pool.deallocate(buffer)
    assert read(pool, "cached_bytes total_allocated") == (KIB, KIB)


def test_without_memory_all_pools_free_what_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, other, real = MemoryPool(1 << 60), MemoryPool(MIB), torch.empty
    other.allocate((64,))
    pool.allocate((64,))
    message = r"1048576.0 MiB were asked for, [\d.]+ MiB available, after all idle buffers were freed"
    with pytest.raises(torch.OutOfMemoryError, match=message) as error:
        pool.allocate((1 << 40,), torch.uint8)
    assert error.value.__cause__ is not None
    assert error.value.__cause__.__traceback__ is None  # it would keep the tensors of all callers
    assert other.get_stats()["cached_bytes"] == check_consistent(pool)["total_allocated"] == 0
    other.allocate((64,))

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        if other.get_stats()["cached_bytes"]:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 256 bytes.")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    assert pool.allocate((64,)).fill_(1).sum() == 64
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pool.allocate((640,))
    monkeypatch.undo()
    check_consistent(pool)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fit": "tight"}, ValueError, "fit must be one of 'class', 'best', 'exact', .* got 'tight'"),
        ({"shape": (5001,)}, ValueError, "a buffer of 5001 bytes does not fit the pool's budget of 5000"),
        ({"shape": (4997,), "alignment": 64}, ValueError, "a buffer of 5060 bytes does not fit"),
        ({"shape": (2**40, 2**40)}, ValueError, r"fewer than 2\*\*62 bytes, got"),
        ({"shape": (0, 2**70)}, TypeError, "Overflow"),  # refused by torch, in an idle block
        ({"shape": (0, 2**70), "fit": "exact"}, TypeError, "Overflow"),  # in fresh memory
    ],
    ids=str,
)
def test_bad_requests_change_nothing(options: dict[str, Any], error: type[Exception], message: str) -> None:
    pool = MemoryPool(5000)  # between two size classes
    assert pool.allocate((5000,), torch.uint8).untyped_storage().nbytes() == 5000
    pool.clear()
    pool.allocate((4,), torch.uint8)
    with pytest.raises(error, match=message):
        pool.allocate(**{"shape": (4,), "dtype": torch.uint8, **options})
    assert check_consistent(pool)["cached_bytes"] == SMALLEST
    assert reused(pool, (4,))


def test_foreign_tensors_are_refused_and_left_alone() -> None:
    pool, other = MemoryPool(MIB), MemoryPool(MIB)
    foreign, lent = torch.ones(3, 4), other.allocate((4,)).fill_(1)
    kept = pool.allocate((4,)).fill_(5)
    tensors = [foreign, foreign[1:], lent, lent[1:], kept.clone(), torch.empty(0)]
    tensors += [torch.eye(2).to_sparse(), torch.ones(2, device="meta"), torch.nn.Parameter(torch.ones(2))]
    for tensor in tensors:
        with pytest.raises(ValueError, match=r"a tensor of shape \(.*\) is not on loan from this pool"):
            pool.deallocate(tensor)
    for no_tensor in (None, [1.0], torch.float32):
        with pytest.raises(TypeError, match=f"buffer must be a tensor, got {type(no_tensor).__name__}"):
            pool.deallocate(no_tensor)  # type: ignore[arg-type]
    assert (foreign.sum(), lent.sum(), kept.sum()) == (12, 4, 20)
    assert check_consistent(pool)["deallocation_count"] == 0


@pytest.mark.parametrize("pool_size", [0, 1, 10, None])
def test_pool_size_bounds_the_idle_buffers(pool_size: int | None) -> None:
    pool, most = MemoryPool(pool_size=pool_size), 99 if pool_size is None else pool_size
    lent = [pool.allocate((64 * (i + 1),), torch.uint8, tag=f"tag {i % 3}") for i in range(12)]
    newest = lent[-1].data_ptr()
    for i, buffer in enumerate(lent, start=1):
        pool.deallocate(buffer)
        stats = check_consistent(pool)
        assert (stats["cached_buffers"], stats["evictions"]) == (min(i, most), max(0, i - most))
    if most:  # the least recently used went
        assert pool.allocate((64 * 12,), torch.uint8, tag="tag 2").data_ptr() == newest
    dropped = [pool.allocate((2**12,)) for _ in range(12)]
    del dropped
    pool.allocate((8,), torch.uint8, tag="other")
    with scratch_of(pool) as workspace:  # scratch counts, too, and goes last
        take(workspace, "key", "value")
    assert check_consistent(pool)["cached_buffers"] <= most
    assert ("key" in pool.idle_buffers()) == (most > 1)


@pytest.mark.parametrize("max_bytes", [None, 10 * MIB])
def test_scarce_memory_frees_what_is_idle(
    max_bytes: int | None, look: Callable[[Memory | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    pool = MemoryPool(max_bytes)
    look(PLENTY)
    kept = pool.allocate((64,), tag="kept")
    pool.allocate((64,))
    with scratch_of(pool) as workspace:
        take(workspace, "slot")
    assert not pool.memory_is_scarce
    assert pool.cleanup() == 0
    assert pool.get_stats()["cached_bytes"] == SMALLEST + 100
    look(SCARCE)
    with caplog.at_level("DEBUG", logger="dilated_attention_pytorch"):
        assert pool.cleanup() == SMALLEST + 100
    assert "memory is scarce" in caplog.text
    assert pool.memory_is_scarce
    assert read(pool, "pressure_cleanups cached_bytes in_use_bytes") == (1, 0, SMALLEST)
    pool.allocate((64,))  # by a request as well
    assert not reused(pool, (64,))
    assert pool.get_stats()["pressure_cleanups"] == 2
    for memory in (PLENTY, None):  # the latter on a system that does not tell
        look(memory)
        pool.allocate((64,))
        assert reused(pool, (64,))
        assert not pool.memory_is_scarce
    assert kept.numel() == 64


def test_dynamic_budget_follows_available_memory(look: Callable[[Memory | None], None]) -> None:
    pool = MemoryPool()
    look(Memory(4000 * MIB, 5000 * MIB))
    assert pool.budget == 1000 * MIB
    buffers = [pool.allocate((20 * MIB,), torch.uint8, tag=str(i)) for i in range(5)]
    assert pool.budget == 1025 * MIB  # what the pool holds is not lost
    look(Memory(3000 * MIB, 5000 * MIB))
    assert pool.budget == pool.get_stats()["max_bytes"] == 775 * MIB
    buffers.clear()
    look(Memory(120 * MIB, 1000 * MIB))  # less, but not scarce
    assert pool.cleanup() == 40 * MIB
    assert check_consistent(pool)["total_allocated"] == 60 * MIB <= pool.budget == LEAST_BUDGET
    beside = pool.allocate((LEAST_BUDGET + 1,), torch.uint8)  # nothing is refused
    assert check_consistent(pool)["total_allocated"] <= LEAST_BUDGET
    pool.deallocate(beside)
    look(None)
    assert pool.budget == LEAST_BUDGET  # the last known
    assert MemoryPool().budget == UNKNOWN_BUDGET
    look(Memory(4000 * MIB, 5000 * MIB))
    assert MemoryPool(MIB).budget == MIB


def test_machine_is_not_asked_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, now, pool = [], [1000.0], MemoryPool()
    monkeypatch.setattr(memory_pool, "host_memory", lambda: asked.append(1))
    monkeypatch.setattr(memory_pool.time, "monotonic", lambda: now[0])
    for times in (1, 2):
        for _ in range(5):
            pool.allocate((4,))
        assert len(asked) == times
        now[0] += CHECK_SECONDS + 0.1


def test_aggressive_cleanup_collects_and_frees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, emptied = MemoryPool(MIB), []
    cycle: list[Any] = [pool.allocate((64,))]
    cycle.append(cycle)
    del cycle
    with scratch_of(pool) as workspace:
        take(workspace, "slot")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    assert pool.cleanup(aggressive=True) == SMALLEST + 100
    assert check_consistent(pool)["total_allocated"] == 0
    process.release_idle_memory()
    assert emptied == [1, 1]


@pytest.mark.parametrize(("nodes", "numa"), [(2, True), (2, False), (1, True)])
def test_numa_touches_fresh_memory(nodes: int, numa: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)  # or the buffer would be filled after it was touched
    pool, real = MemoryPool(MIB), torch.empty
    monkeypatch.setattr(memory_pool, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: real(*args, **kwargs).fill_(7))
    for content in (0 if nodes > 1 and numa else 7, 5):  # the second time it was touched before
        assert (pool.allocate((64,), torch.uint8, numa=numa) == content).all()
        pool.allocate((64,), torch.uint8).fill_(5)
    assert pool.get_stats()["numa_nodes"] == nodes


def test_other_devices_are_left_to_torch() -> None:
    pool = MemoryPool(SMALLEST)  # a budget of host memory: it does not bound the device's
    buffer = pool.allocate((4096,), torch.float64, device="meta", alignment=256)
    assert (buffer.shape, buffer.dtype) == ((4096,), torch.float64)
    pool.deallocate(buffer)
    assert "not on loan" in refusal(pool, buffer)
    with AttentionBufferManager(pool=pool).workspace(torch.device("meta")) as workspace:
        assert workspace.take("slot", (4,), torch.float32, torch.device("meta")).device.type == "meta"
    stats = pool.get_stats()
    assert (stats["allocation_count"], stats["deallocation_count"], stats["total_allocated"]) == (1, 1, 0)
    with torch.device("meta"):  # a default device does not move the pool's memory
        assert pool.allocate((4,)).device == CPU
        assert pool.allocate((4,), zero_init=True).tolist() == [0] * 4  # now from a block


def test_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked, real = MemoryPool(MIB), [], torch.empty
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    buffer = pool.allocate((64,), pinned=True)
    assert tag_of(pool, buffer) == "buffer"  # ordinary memory of the pool
    assert not buffer.is_pinned()

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        asked.append(pin_memory)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    pinned = pool.allocate((64,), pinned=True)
    assert asked.count(True) == 1
    assert tag_of(pool, pinned) is None  # torch keeps pinned memory itself
    pool.deallocate(pinned)
    pool.allocate((64,), device="meta", pinned=True)
    assert asked.count(True) == 1


def test_slots_stay_warm_over_calls_and_layers() -> None:
    pool, addresses = MemoryPool(MIB, enable_profiling=True), set()
    for layer in range(10):
        with torch.inference_mode(layer % 2 == 0), scratch_of(pool) as workspace:
            key, value = take(workspace, "key", "value", numel=100 - layer)
            key.fill_(1)
            value.fill_(2)
            assert (key == 1).all()
            assert workspace.take("key", (5, 4), torch.uint8, CPU).data_ptr() == key.data_ptr()
            addresses.add((key.data_ptr(), value.data_ptr()))
            del key, value
    assert len(addresses) == 1
    names = "allocation_count reuse_count total_allocated"
    assert read(pool, names) == (20, 18, 200)
    with scratch_of(pool) as workspace:
        take(workspace, "key", numel=101)  # too small: replaced
        take(workspace, "key", numel=300)  # and again in the same call
        workspace.take("key", (2,), torch.float32, CPU)
    assert read(pool, names) == (23, 18, 408)
    with scratch_of(pool, enable_reuse=False) as workspace:
        take(workspace, "key")
    assert read(pool, names) == (24, 18, 408)
    for numel in (10, 20):
        pool.deallocate(pool.allocate((numel,), tag="mask"))
    pool.allocate((500,), tag="mask", ahead=True)  # not a request
    types, figures = pool.get_stats()["types"], ("allocations", "reuses", "deallocations", "largest_bytes")
    assert [types["mask"][name] for name in figures] == [2, 1, 2, 80]
    assert [types["key"][name] for name in figures] == [14, 9, 0, 300]
    assert pool.get_stats()["reuse_rate"] == 19 / 26
    assert "types" not in MemoryPool(MIB).get_stats()


def test_concurrent_calls_have_their_own_scratch() -> None:
    pool = MemoryPool(KIB)
    with scratch_of(pool) as first:
        (a,) = take(first, "key")
        with scratch_of(pool) as second:
            b, _ = take(second, "key", "value")
            a.fill_(1)
            b.fill_(2)
            assert (a == 1).all()
            assert check_consistent(pool)["in_use_bytes"] == 300
        del b, _
        assert pool.clear("key") == 100  # of the second one
    with scratch_of(pool) as third:
        (c,) = take(third, "key")
        assert c.data_ptr() != a.data_ptr()  # which is still seen here
    del a, c
    assert pool.idle_buffers() == {"key": (2, 200), "value": (1, 100)}
    with scratch_of(pool) as workspace:
        take(workspace, "slot", numel=KIB)
    assert read(pool, "total_allocated evictions") == (KIB, 4)
    with scratch_of(pool) as workspace:
        take(workspace, "slot", numel=2 * KIB)  # a call is not refused its scratch, but nobody keeps it
    assert check_consistent(pool)["total_allocated"] == 0


def test_scratch_of_a_failed_call_waits_for_its_frames() -> None:
    pool = MemoryPool(MIB)

    def fail() -> None:
        with scratch_of(pool) as workspace:
            _scratch = take(workspace, "slot")
            raise KeyError

    with pytest.raises(KeyError) as error:
        fail()
    assert check_consistent(pool)["in_use_bytes"] == 100
    error.value.__traceback__ = None
    del error
    gc.collect()
    assert check_consistent(pool)["cached_bytes"] == 100


def test_reset_while_lent() -> None:
    reset_global_memory_pool()
    pool, lock = get_global_memory_pool(), get_global_memory_pool()._lock
    buffer = pool.allocate((64,)).fill_(1)
    beside = pool.allocate((4,), device="meta")
    with scratch_of(pool) as workspace:
        (scratch,) = take(workspace, "slot")
        scratch.fill_(2)
        reset_global_memory_pool()
        assert pool.get_stats()["total_allocated"] == 0
        assert (scratch == 2).all()
    assert read(pool, "total_allocated allocation_count peak_allocated") == (0, 0, 0)
    assert (buffer == 1).all()
    assert all("not on loan" in refusal(pool, each) for each in (buffer, beside))
    assert pool.allocate((64,)).data_ptr() != buffer.data_ptr()
    assert get_global_memory_pool() is pool  # modules go on with it
    assert pool._lock is lock  # another one would let a second thread in before everything is reset
    pool.reset()


def test_results_are_pooled_from_a_size_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "RESULT_BYTES", 3000)
    pool = MemoryPool(MIB)

    def call(shape: tuple[int, ...], **options: Any) -> Tensor:
        with scratch_of(pool, **options) as workspace:
            return workspace.result(shape, torch.uint8, CPU)

    assert tag_of(pool, call((2999,))) is None
    first = call((3, 1001))
    assert (first.shape, tag_of(pool, first), first.untyped_storage().nbytes()) == ((3, 1001), "output", 3003)
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
    assert tag_of(pool, call((3003,), lightweight=True)) is None
    assert tag_of(pool, call((2 * MIB,))) is None  # beyond the budget
    check_consistent(pool)


def test_threads_share_a_pool() -> None:
    torch.use_deterministic_algorithms(False)  # filling takes time
    pool, num_operations = MemoryPool(64 * KIB), 20_000

    def work(seed: int) -> tuple[int, int]:
        choose, held, requests, returns = random.Random(seed), [], 0, 0
        for i in range(num_operations):
            action, number = choose.random(), seed * num_operations + i
            if action < 0.1:
                with scratch_of(pool) as workspace:
                    size = choose.randrange(1, 150)
                    scratch = workspace.take("slot", (size,), torch.int64, CPU).fill_(number)
                    requests += 1
                    if i % 50 == 0:
                        time.sleep(0)
                    assert scratch.tolist() == [number] * size
                    del scratch
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
                pool.clear("a", keep=3)
            while len(held) > 12:
                held.pop()
        return requests, returns

    figures = in_threads(work)
    stats = check_consistent(pool)
    assert stats["allocation_count"] == sum(requests for requests, _ in figures)
    assert stats["deallocation_count"] == sum(returns for _, returns in figures)
    assert stats["in_use_bytes"] == 0
    assert stats["total_allocated"] == stats["cached_bytes"] <= 64 * KIB
    assert min(stats["reuse_count"], stats["evictions"]) > 0
    assert len(pool._loose) == 0
    assert pool.clear() == stats["cached_bytes"]
    assert not pool._blocks


def test_threads_and_resets_leave_a_consistent_pool() -> None:
    pool = MemoryPool(16 * KIB)

    def work(i: int) -> None:
        for number in range(1500):
            if i == 0 and number % 10 == 0:
                pool.reset()
            buffer = pool.allocate((64 + number % 200,), torch.int64).fill_(number)
            with scratch_of(pool) as workspace:
                take(workspace, "slot", numel=number)
            assert buffer.tolist() == [number] * len(buffer)

    in_threads(work, 4)
    assert check_consistent(pool)["in_use_bytes"] == 0


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
            pool.clear("buffer", keep=1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled > 10
    assert shared == 0
    del mine
    got.clear()
    check_consistent(pool)


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("kind", HOLDS)
def test_memory_waits_for_whatever_sees_it(kind: str, returns: bool) -> None:
    pool = MemoryPool(MIB)
    buffer = pool.allocate((64,))
    address, held = buffer.data_ptr(), HOLDS[kind](buffer)
    if returns:
        pool.deallocate(buffer)
    del buffer
    others = [pool.allocate((64,)) for _ in range(3)]
    assert address not in {other.data_ptr() for other in others}
    assert check_consistent(pool)["in_use_bytes"] == 4 * SMALLEST
    del held
    assert pool.allocate((64,)).data_ptr() == address


def test_statistics_can_be_read_while_new_tags_are_counted() -> None:
    pool, requests = MemoryPool(), 3000

    def work(thread: int) -> None:
        for i in range(requests):
            if thread == 0:
                pool.get_stats()
            else:
                pool.allocate((4,), tag=f"{thread} {i % 1000}", fit="fresh")

    in_threads(work, 4)
    assert pool.get_stats()["allocation_count"] == 3 * requests
