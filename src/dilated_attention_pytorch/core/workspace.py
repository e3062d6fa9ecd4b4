"""Scratch memory by slot, for one call at a time; kept by a pool, it is warm for the next call."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Slot = tuple[str, torch.dtype]
MakeResult = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]


def fill_if_deterministic(buffer: Tensor) -> Tensor:
    """Reused memory keeps the promise that torch makes for `torch.empty` when asked to be deterministic."""
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if fills and torch.are_deterministic_algorithms_enabled():
        # 255 is NaN in every floating point type, and no bool.
        buffer.view(-1).view(torch.uint8).fill_(1 if buffer.dtype == torch.bool else 255)
    return buffer


class Workspace:
    """Scratch that the tiles of a call reuse one after the other, and where a call's results come from.

    It serves one call at a time and is not thread-safe. Scratch never leaves the workspace; what outlives the
    call comes from `result`.
    """

    def __init__(self) -> None:
        self.make_result: MakeResult | None = None
        self.buffers: dict[Slot, Tensor] = {}
        self.taken: set[Slot] = set()  # by the present call
        self.fresh: list[Slot] = []  # what the present call had to allocate

    @property
    def nbytes(self) -> int:
        # A list first: the owner may add a slot while another thread asks.
        return sum(buffer.nbytes for buffer in list(self.buffers.values()))

    def take(self, slot: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory of `shape`, valid until the slot is taken again."""
        key, numel = (slot, dtype), math.prod(shape)
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            self.buffers.pop(key, None)  # freed before its successor is allocated
            del buffer
            # A tensor of inference mode could not be written to outside it.
            with torch.inference_mode(False):
                buffer = self.buffers[key] = torch.empty(numel, dtype=dtype, device=device)
            self.fresh.append(key)
        elif key not in self.taken:
            fill_if_deterministic(buffer)  # what an earlier call left there
        self.taken.add(key)
        return buffer[:numel].view(shape)

    def result(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory that belongs to the caller."""
        if self.make_result is not None:
            return self.make_result(shape, dtype, device)
        return torch.empty(shape, dtype=dtype, device=device)

    def start(self, make_result: MakeResult | None) -> None:
        """Begins another call: slots keep their memory, the counts start over."""
        self.make_result = make_result
        self.taken.clear()
        self.fresh.clear()
