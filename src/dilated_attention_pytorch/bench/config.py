"""The attention that a case measures."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import DilatedSpec


@dataclass(frozen=True)
class Config:
    """The attention of a case, float32: heads, head size and branches.

    One branch has rate 1, so that every position attends to something.
    """

    h: int
    d: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    is_causal: bool = False

    @property
    def dtype(self) -> str:
        return "float32"

    @property
    def spec(self) -> DilatedSpec:
        return DilatedSpec(self.segment_lengths, self.dilation_rates, self.is_causal)
