"""A tensor (b, n, heads, d) as rows of d features that are gathered by number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .engine import Inputs


@dataclass(frozen=True)
class FlatRows:
    """Rows of d features, and the steps between those of neighbouring batches, positions and heads."""

    rows: Tensor
    batch: int
    time: int
    head: int

    @classmethod
    def of(cls, x: Tensor) -> FlatRows:
        """A view of `x`, or of a copy if its strides are no multiples of d."""
        d, axes = x.shape[-1], list(zip(x.shape[:3], x.stride(), strict=False))
        if x.stride(-1) != 1 or any(step % d for size, step in axes if size > 1):
            x = x.contiguous()
            axes = list(zip(x.shape[:3], x.stride(), strict=False))
        steps = [step // d if size > 1 else 0 for size, step in axes]  # an axis of length 1 may have any step
        if not x.numel():
            return cls(x.reshape(0, d), *steps)
        count = 1 + sum((size - 1) * step for (size, _), step in zip(axes, steps, strict=True))
        return cls(x.as_strided((count, d), (d, 1)), *steps)

    @classmethod
    def onto(cls, x: Tensor) -> FlatRows:
        """A view of `x` to write to, whose strides are multiples of d."""
        rows = cls.of(x)
        assert rows.rows.data_ptr() == x.data_ptr(), f"a copy would lose what is written to it: {x.stride()}"
        return rows

    def same_steps(self, other: FlatRows) -> bool:
        return (self.batch, self.time, self.head) == (other.batch, other.time, other.head)

    def gather(self, slot: str, index: Tensor, inputs: Inputs) -> Tensor:
        """The rows of the given numbers, in the dtype of tiles."""
        shape, dtype, device = (index.numel(), self.rows.shape[1]), self.rows.dtype, self.rows.device
        # In their own dtype first: index_select converts nothing.
        name = slot if dtype == inputs.tile_dtype else f"{slot}_{dtype}"
        gathered = inputs.workspace.take(name, shape, dtype, device)
        torch.index_select(self.rows, 0, index, out=gathered)
        if dtype == inputs.tile_dtype:
            return gathered
        return inputs.workspace.take(slot, shape, inputs.tile_dtype, device).copy_(gathered)
