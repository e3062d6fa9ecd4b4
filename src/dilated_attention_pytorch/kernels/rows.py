"""Where the rows of jobs of one shape lie in a tensor: strided views if evenly spaced, else numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..core.workspace import Workspace
from ..plan.runs import Plan, even_parts
from .merge import merge_

_T = TypeVar("_T")
_P = ParamSpec("_P")
Step = tuple[int, int, int]  # in (batch, time, head)
Axis = tuple[int, Step]  # (size, step)
Origin = tuple[int, int, int]  # (batch, time, head) at which a tensor starts
Numbered = dict[tuple[Step, Origin], Tensor]  # the numbers of rows in tensors of some steps, once known
WHOLE: Origin = (0, 0, 0)


def kept(build: Callable[Concatenate[Plan, _P], _T]) -> Callable[Concatenate[Plan, _P], _T]:
    """Keeps what a kernel builds from a plan, by the other arguments, with the plan."""

    @wraps(build)
    def find(plan: Plan, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        key = (build, *args, *kwargs.items())
        found: _T | None = plan.by_kernel.get(key)
        if found is None:
            found = plan.by_kernel[key] = build(plan, *args, **kwargs)
        return found

    return find


class FlatRows(NamedTuple):
    """A tensor (b, n, heads, ...) as rows, and the steps between rows of neighbouring (batch, time, head)."""

    rows: Tensor
    steps: Step

    @classmethod
    def of(cls, x: Tensor) -> FlatRows:
        """A view of `x`, or of a copy if its strides are no multiples of the size of a row."""
        d = prod(x.shape[3:])
        is_dense = x.dim() == 3 or d == 1 or x.stride(-1) == 1
        if not is_dense or any(step % d for size, step in _outer(x) if size > 1):
            x = x.contiguous()
        # An axis of length 1 may have any step.
        a, b, c = (step // d if size > 1 else 0 for size, step in _outer(x))
        steps = (a, b, c)
        if not x.numel():
            return cls(x.reshape(0, d), steps)
        count = 1 + sum((size - 1) * step for size, step in zip(x.shape[:3], steps, strict=True))
        return cls(x.as_strided((count, d), (d, 1)), steps)

    def read(self, slot: str, index: Tensor, workspace: Workspace, dtype: torch.dtype) -> Tensor:
        """The rows of the given numbers, packed; valid until the slot is read again."""
        rows = self.rows
        shape = (index.numel(), rows.shape[1])
        # In their own dtype first: index_select converts nothing.
        name = slot if rows.dtype == dtype else f"{slot}_{rows.dtype}"
        taken = workspace.take(name, shape, rows.dtype, rows.device)
        torch.index_select(rows, 0, index, out=taken)
        if rows.dtype == dtype:
            return taken
        return workspace.take(slot, shape, dtype, rows.device).copy_(taken)


def _outer(x: Tensor) -> Iterable[tuple[int, int]]:
    """(size, step) of the axes batch, time and head."""
    return zip(x.shape[:3], x.stride()[:3], strict=True)


class Blocks(NamedTuple):
    """`num` of the blocks of rows that jobs of a plan keep, without the first `skip` rows of the first.

    They are those of the runs from `first` (jobs,) on, or of evenly spaced ones: (first, step).
    """

    plan: Plan
    first: Tensor | tuple[int, int]
    jobs: int
    num: int
    skip: int

    @classmethod
    def of(cls, plan: Plan, first: Tensor, num: int, skip: int) -> Blocks:
        step = int(first[1] - first[0]) if len(first) > 1 else num
        is_even = step >= 0 and bool((first.diff() == step).all())
        return cls(plan, (int(first[0]), step) if is_even else first, len(first), num, skip)

    def numbers(self, device: torch.device | None) -> Tensor:
        """(jobs, blocks); made at each use, as they take more memory than the plan."""
        return self._of_runs(self.plan.run_blocks, device)

    def tiles(self) -> Tensor:
        """(jobs, blocks, size, size), if all of the blocks have a tile."""
        assert self.plan.tiles is not None
        assert self.plan.run_tiles is not None
        return self.plan.tiles[self._of_runs(self.plan.run_tiles, None)]

    def _of_runs(self, values: Tensor, device: torch.device | None) -> Tensor:
        if isinstance(self.first, tuple):
            return values.as_strided((self.jobs, self.num), (self.first[1], 1), self.first[0]).to(device)
        return values[self.first[:, None] + torch.arange(self.num)].to(device)

    def times(self, count: int, device: torch.device | None) -> Tensor:
        """(jobs, count): the times of the rows."""
        size, shift = self.plan.unit
        times = (self.numbers(device) * size - shift).unsqueeze(-1) + torch.arange(size, device=device)
        return times.flatten(1)[:, self.skip : self.skip + count]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows (jobs, *inner) of a tensor (b, n, heads, ...), counted in its first three axes.

    `axes` unfold the jobs, evenly spaced from `first` on; or `firsts` (jobs, 3) lists where they begin. With
    `blocks`, the rows of a job are those of several blocks of time. With `counts` (jobs,) a job has only so
    many of the rows; its last one is read in place of the others, which are not written.
    """

    first: Step
    axes: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    firsts: Tensor | None = None
    blocks: Blocks | None = None
    counts: Tensor | None = None

    @property
    def places(self) -> Tensor:
        """(jobs, 3): where each begins, as (batch, time, head)."""
        if self.firsts is not None:
            return self.firsts
        found = torch.tensor([self.first])
        for size, step in self.axes:
            found = (found.unsqueeze(1) + torch.arange(size)[:, None] * torch.tensor(step)).flatten(0, 1)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        jobs = prod(size for size, _ in self.axes) if self.firsts is None else len(self.firsts)
        return (jobs, *(size for size, _ in self.inner))

    def view(self, x: Tensor, origin: Origin = WHOLE) -> Tensor:
        """(*axes, *inner, ...) of evenly spaced jobs; `x` begins at `origin`."""
        a, b, c, *rest = x.stride()
        offset = x.storage_offset() + _dot(self.first, (a, b, c)) - _dot(origin, (a, b, c))
        axes = (*self.axes, *self.inner)
        sizes, steps = [size for size, _ in axes], [_dot(step, (a, b, c)) for _, step in axes]
        return x.as_strided((*sizes, *x.shape[3:]), (*steps, *rest), offset)

    def numbers(self, steps: Step, origin: Origin = WHOLE, device: torch.device | None = None) -> Tensor:
        """The numbers of all rows, in one line, where (batch, time, head) count so many rows."""
        index = self.places @ torch.tensor(steps) - _dot(origin, steps)
        if self.blocks is not None:
            times = self.blocks.times(self.inner[-1][0], device)
            times = times * steps[1] if steps[1] != 1 else times
            return (times + index.to(device).unsqueeze(-1)).flatten()
        (heads, head_step), (count, step) = self.inner
        rows = torch.arange(count)
        if self.counts is not None:
            rows = torch.minimum(rows, self.counts[:, None, None] - 1)
        index = index[:, None] + torch.arange(heads) * _dot(head_step, steps)
        return (index.unsqueeze(-1) + rows * _dot(step, steps)).flatten().to(device)

    def is_real(self, device: torch.device | None = None) -> Tensor | None:
        """(jobs, 1, rows): False where a job has fewer rows; None if all have all."""
        if self.counts is None:
            return None
        return (torch.arange(self.inner[-1][0]) < self.counts[:, None, None]).to(device)

    def _find(self, steps: Step, origin: Origin, device: torch.device, numbered: Numbered) -> Tensor:
        if (steps, origin) not in numbered:
            numbered[steps, origin] = self.numbers(steps, origin, device)
        return numbered[steps, origin]

    def _to_write(
        self, steps: Step, packed: Tensor, origin: Origin, numbered: Numbered
    ) -> tuple[Tensor, Tensor]:
        """The numbers of the rows that are there, and their packed values as lines."""
        index = self._find(steps, origin, packed.device, numbered)
        lines, real = packed.reshape(index.numel(), -1), self.is_real(packed.device)
        if real is None:
            return index, lines
        kept = real.expand(self.shape).flatten().nonzero()[:, 0]
        return index[kept], lines.index_select(0, kept)  # faster than lines[kept]

    def read(
        self,
        slot: str,
        x: Tensor,
        workspace: Workspace,
        dtype: torch.dtype,
        numbered: Numbered,
        origin: Origin = WHOLE,
        strided: bool = False,
    ) -> Tensor:
        """(jobs, *inner, ...) packed, valid until the slot is read again; no copy where none is needed.

        `numbered` keeps the numbers of rows for other tensors of the same strides. `strided`: rows may be
        apart, if their numbers are not.
        """
        shape = (*self.shape, *x.shape[3:])
        if self.firsts is None:
            view = self.view(x, origin)
            if view.dtype == dtype and (view.is_contiguous() or (strided and _is_one_axis(view, self.axes))):
                return view.view(shape)
            packed = workspace.take(slot, shape, dtype, x.device)
            packed.view(view.shape).copy_(view)
            return packed
        flat = FlatRows.of(x)
        index = self._find(flat.steps, origin, x.device, numbered)
        return flat.read(slot, index, workspace, dtype).view(shape)

    def write(
        self, x: Tensor, packed: Tensor, origin: Origin, numbered: Numbered, *, adds: bool = False
    ) -> None:
        """The rows of `x` take the packed values, or those are added to them."""
        if self.firsts is None:
            view = self.view(x, origin)
            (view.add_ if adds else view.copy_)(packed.view(view.shape))
            return
        flat = FlatRows.of(x)
        index, lines = self._to_write(flat.steps, packed, origin, numbered)
        (flat.rows.index_add_ if adds else flat.rows.index_copy_)(0, index, lines.to(x.dtype))

    def add_blocks(self, sums: Tensor, packed: Tensor, origin: Origin, numbered: Numbered) -> None:
        """Adds rows (jobs, 1, rows, d) of blocks to sums (b, heads, blocks, size, d), from `origin` on.

        Whole blocks are added, since rows would take a step each. Jobs may have blocks in common.
        """
        assert self.blocks is not None
        assert self.firsts is not None
        _, heads, num, size, d = sums.shape
        key = ((heads * num, -1, num), origin)  # no tensor of rows has such steps
        if key not in numbered:
            blocks = self.blocks.numbers(sums.device)
            batch, _, head = (self.firsts - torch.tensor(origin)).to(sums.device).unbind(1)
            first = self.blocks.plan.unit[1] // size
            numbered[key] = ((batch * heads + head)[:, None] * num + blocks - first).flatten()
        index = numbered[key]
        missing = index.numel() // len(self.firsts) * size - self.blocks.skip - packed.shape[2]
        if self.blocks.skip or missing:
            packed = torch.nn.functional.pad(packed, (0, 0, self.blocks.skip, missing))
        sums.view(-1, size * d).index_add_(0, index, packed.reshape(-1, size * d).to(sums.dtype))

    def merge(
        self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, origin: Origin, numbered: Numbered
    ) -> None:
        """Continues the softmax of the rows of out (b, n, heads, d) and lse (b, n, heads)."""
        if self.firsts is None:
            rows, lse_rows = self.view(out, origin), self.view(lse, origin)
            merge_(rows, lse_rows, part.view(rows.shape), part_lse.view(lse_rows.shape))
            return
        flat, flat_lse = FlatRows.of(out), FlatRows.of(lse)
        index, lines = self._to_write(flat.steps, part, origin, numbered)
        lse_index, lse_lines = self._to_write(flat_lse.steps, part_lse, origin, numbered)
        rows, lse_rows = flat.rows.index_select(0, index), flat_lse.rows.index_select(0, lse_index)
        merge_(rows, lse_rows.squeeze(-1), lines, lse_lines.squeeze(-1))
        flat.rows.index_copy_(0, index, rows)
        flat_lse.rows.index_copy_(0, lse_index, lse_rows)


def _is_one_axis(view: Tensor, axes: tuple[Axis, ...]) -> bool:
    """Whether the jobs are evenly spaced in memory, and the features of a row side by side."""
    sizes = list(zip(view.shape, view.stride(), strict=True))[: len(axes)]
    jobs = [(size, step) for size, step in sizes if size > 1]
    even = all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(jobs))
    return even and view.stride(-1) == 1


def _dot(a: Step, b: Step) -> int:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


class Box(NamedTuple):
    """Rows `first, first + 1, ...` of a table, evenly spaced: axes of (size, difference of the columns)."""

    first: int
    values: list[int]
    axes: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        return prod(size for size, _ in self.axes)


def fold(table: Tensor, most_axes: int = 5) -> Iterator[Box]:
    """Cuts a table into boxes of rows whose values advance evenly along a few nested axes."""
    first = 0
    while first < len(table):
        box = _leading_box(table[first:], most_axes)._replace(first=first)
        yield box
        first += box.size


def _leading_box(table: Tensor, most_axes: int) -> Box:
    """The box that a table begins with."""
    values = table[0].tolist()
    axes: list[tuple[int, tuple[int, ...]]] = []
    while len(table) > 1 and len(axes) < most_axes:
        step = table[1] - table[0]
        if bool((step < 0).any()):  # tensors have no negative strides
            break
        differs = ((table[1:] - table[:-1]) != step).any(1).nonzero()
        size = int(differs[0]) + 1 if len(differs) else len(table)
        axes.insert(0, (size, tuple(step.tolist())))
        whole = len(table) // size
        if whole < 2:
            break
        rows = table[: whole * size].view(whole, size, -1)
        inside = rows[0] - rows[0, 0]
        alike = ((rows - rows[:, :1]) == inside).flatten(1).all(1)
        broken = (~alike).nonzero()
        table = rows[: int(broken[0]) if len(broken) else whole, 0]
    return Box(0, values, tuple(axes))


def split_box(box: Box, at_most: int) -> Iterator[Box]:
    """Smaller boxes of at most so many rows (at least one), cut along the outer axes first."""
    if box.size <= at_most or not box.axes:
        yield box
        return
    (size, step), inner = box.axes[0], box.axes[1:]
    inside = prod(each for each, _ in inner)
    for start, count in even_parts(size, at_most // inside):
        values = [value + start * change for value, change in zip(box.values, step, strict=True)]
        axes = inner if count == 1 else ((count, step), *inner)
        yield from split_box(Box(box.first + start * inside, values, axes), at_most)
