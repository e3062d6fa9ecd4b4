"""Sizes of blocks, by target, pass, size of the numbers and head size: what compiles without spills.

The rows of tuning.csv are shipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

Target = Literal["sm_80", "sm_90", "sm_100", "gfx942", "interpreter"]
Pass = Literal["attend", "query_gradients", "key_gradients"]


class Blocks(NamedTuple):
    """Query rows and keys of a tile, warps of a program, tiles that are loaded ahead."""

    queries: int
    keys: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.queries} x {self.keys}, {self.warps}, {self.stages}"


def _read_table() -> dict[tuple[Target, Pass, int], dict[int, Blocks]]:
    table: dict[Any, dict[int, Blocks]] = {}
    for line in Path(__file__).with_name("tuning.csv").read_text().split()[1:]:
        target, which, *numbers = line.split(",")
        size, d, *blocks = map(int, numbers)
        table.setdefault((target, which, size), {})[d] = Blocks(*blocks)
    return table


# By the features of a head, up to which they hold. On GPUs for desktops, which are like sm_80, a program has
# 99 KiB of shared memory. Heads of up to 48 and 80 features have a part of 16: its vectors have 128 bits if
# a tile that is loaded has 16 rows (gfx942: 32) for each warp. Float32 above 128 features fits no registers
# of NVIDIA's GPUs: for three products of TF32 every number is held in two halves.
TABLE = _read_table()


def blocks_for(target: Target, which: Pass, itemsize: int, d: int) -> Blocks:
    if target == "interpreter":
        return Blocks(32, 32, 1, 1)
    row = TABLE[target, which, itemsize]
    return row[min(size for size in row if size >= d)]


# What `autotune` tries beside a row: twice (1) or half (-1) the queries, keys, warps; stages more or fewer.
STEPS = (
    *((0, -1, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1), (0, 0, 0, -1), (0, 0, 1, 0), (0, 0, -1, 0)),
    *((1, 0, 0, 0), (-1, 0, 0, 0), (1, 0, 1, 0), (-1, 0, -1, 0), (0, 1, 1, 0), (0, -1, -1, 0)),
    *((1, -1, 0, 0), (-1, 1, 0, 0), (0, -1, 0, 1), (0, -1, 0, 2), (1, -1, 1, 1), (-1, 0, 0, 1)),
)


def candidates(blocks: Blocks, which: Pass, itemsize: int, d: int, shared: int) -> list[Blocks]:
    """The blocks and their neighbours whose tiles in flight fit so many bytes of shared memory."""
    found = [blocks]
    for *doublings, stages in STEPS:
        queries, keys, warps = (int(x * 2.0**more) for x, more in zip(blocks[:3], doublings, strict=True))
        near = Blocks(queries, keys, warps, blocks.stages + stages)
        loaded = queries if which == "key_gradients" else keys
        tiles = 2 * loaded * sum(head_parts(d, itemsize)) * itemsize * max(1, near.stages - 1)
        is_possible = min(queries, keys) >= 16 and max(queries, keys) <= 256 and 1 <= warps <= 8
        if is_possible and near.stages >= 1 and tiles <= shared:
            found.append(near)
    return found


def most_features(target: Target, itemsize: int) -> int:
    """The largest head that all passes have blocks for."""
    if target == "interpreter":
        return 256
    return min(max(row) for (name, _, size), row in TABLE.items() if (name, size) == (target, itemsize))


def head_parts(d: int, itemsize: int) -> tuple[int, int]:
    """Powers of two that hold d features: one, or two where that leaves fewer of them unused."""
    least = 16 if itemsize == 2 else 32  # of the second; a smaller one makes programs of float32 spill
    whole = max(16, 1 << (d - 1).bit_length())
    first = whole // 2
    second = max(least, 1 << max(0, d - first - 1).bit_length())
    return (first, second) if 16 <= first < d and first + second < whole else (whole, 0)


def precision(target: str) -> str:
    """How float32 is multiplied: as three products of tf32 where that is faster and as exact."""
    return "tf32x3" if target.startswith("sm") else "ieee"
