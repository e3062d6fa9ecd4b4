"""Tiles of a slide: what they must be, cells of coordinates, embeddings of cells; sizes of encoders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checks import check_dense, check_positive_int, one_of

_FINE = (torch.float32, torch.float64)  # half precision cannot tell neighbouring tiles apart
# The names under which Prov-GigaPath registers sizes; the feed-forward is 4 * embed_dim wide in each.
ARCHITECTURES: Mapping[str, Mapping[str, int]] = {
    f"gigapath_slide_enc{depth}l{d}d": {"in_chans": tiles, "embed_dim": d, "depth": depth, "nhead": 16}
    for tiles, d, depth in ((1536, 768, 12), (384, 384, 12), (1536, 1024, 24), (1536, 1536, 12))
}


def gigapath_segment_lengths(max_wsi_size: int = 262144, tile_size: int = 256) -> tuple[int, ...]:
    """Five lengths in equal ratios, cut to integers, from 1024 to the largest power of two that is not more
    than the tiles of a square slide of `max_wsi_size` pixels.
    """
    check_positive_int("max_wsi_size", max_wsi_size)
    check_positive_int("tile_size", tile_size)
    side = max_wsi_size // tile_size
    if side < 1:
        rule = f"max_wsi_size must be at least tile_size {tile_size}, or no tile fits"
        raise ValueError(f"{rule}, got {max_wsi_size}")
    last = (side * side).bit_length() - 1
    return tuple(math.floor(2.0 ** (10 + (last - 10) * step / 4)) for step in range(5))


def grid_coords(coords: Tensor, tile_size: float, unit: int = 256) -> Tensor:
    """Coordinates int64 (..., 2) of the same cells on a grid of tiles with the side `unit`.

    For tiles of another side, such as 512 pixels of a slide at 40x that are 256 at 20x, or in micrometres: a
    `LongNetViT` divides coordinates by its own tile_size, which is to be `unit`.
    """
    if not tile_size > 0:
        raise ValueError(f"tile_size must be positive, got {tile_size}")
    check_positive_int("unit", unit)
    # On the CPU, for float64; micrometres may be rounded to just before their cell, pixels are whole.
    cells = coords.cpu().double() / tile_size + (1e-3 if coords.is_floating_point() else 0.0)
    return cells.floor().long().to(coords.device) * unit


def tile_cells(coords: Tensor, tile_size: int, slide_ngrids: int) -> Tensor:
    """Cells int64 (..., 2) of the pixel coordinates (..., 2) of tiles: `floor(coords / tile_size)`.

    A cell outside the grid is an error; a table that is read by a flat index would give another cell's row.
    """
    if not coords.is_floating_point() and not coords.is_complex() and coords.dtype != torch.bool:
        coords = coords.long()  # narrow integers have no room for tile_size
    elif coords.dtype not in _FINE:
        raise TypeError(f"coords must be integers, float32 or float64, got {coords.dtype}")
    cells = torch.div(coords, tile_size, rounding_mode="floor")
    inside = (cells >= 0) & (cells < slide_ngrids)
    if torch.compiler.is_compiling():
        torch._assert_async(inside.all(), "coords must lie on the grid")
    elif not inside.all():
        worst = coords[~inside.all(-1)][0].tolist()
        raise ValueError(
            f"coords must lie on the grid, at least 0 and below slide_ngrids x tile_size = "
            f"{slide_ngrids} x {tile_size} = {slide_ngrids * tile_size}, got a tile at {worst}"
        )
    return cells.long()


def cell_embeddings(cells: Tensor, width: int, slide_ngrids: int, dtype: torch.dtype) -> Tensor:
    """Embeddings (..., width) of cells (..., 2): of the second coordinate in one half, then of the first.

    A half holds the sines, then the cosines of the coordinate at width / 4 frequencies from 1 down towards
    1 / 10000: rows of Prov-GigaPath's table, which takes 3 GB, from one axis of the grid.
    """
    quarter = width // 4
    # On the CPU: not every device has float64, in which the angles keep their precision.
    step = torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter
    angle = torch.arange(slide_ngrids, dtype=torch.float64, device="cpu")[:, None] * 10000.0**-step
    axis = torch.cat([angle.sin(), angle.cos()], -1).to(cells.device, dtype)
    return torch.cat([axis[cells[..., 1]], axis[cells[..., 0]]], -1)


def check_tiles(x: Tensor, coords: Tensor, padding_mask: Tensor | None, in_chans: int) -> None:
    """Raises unless these are tiles (b, n, in_chans), their coordinates, and where there is no tile."""
    given = {"x": x, "coords": coords} | ({} if padding_mask is None else {"padding_mask": padding_mask})
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        check_dense(name, tensor)
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    if not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {x.dtype}")
    shape = tuple(x.shape)
    if len(shape) != 3 or shape[2] != in_chans or 0 in shape:
        rule = f"x must have the shape (b, n, in_chans) with in_chans {in_chans} and at least one tile"
        raise ValueError(f"{rule}, got {shape}")
    if coords.shape != (*shape[:2], 2):
        shapes = f"{tuple(coords.shape)} for x {shape}"
        raise ValueError(f"coords must have the shape (b, n, 2), a pair for each tile of x, got {shapes}")
    if padding_mask is None:
        return
    if padding_mask.dtype != torch.bool:
        rule = "padding_mask must be a bool tensor, True where there is no tile"
        raise TypeError(f"{rule}, got {padding_mask.dtype}")
    if padding_mask.shape != shape[:2]:
        shapes = f"{tuple(padding_mask.shape)} for x {shape}"
        raise ValueError(f"padding_mask must have the shape (b, n), got {shapes}")
    if not all(counts := (~padding_mask).sum(1).tolist()):
        raise ValueError(f"each slide must have at least one tile, got {counts} without the padding")


def check_arch(arch: str | None, sizes: Mapping[str, Any], *, source: str) -> None:
    """Raises where sizes are not those of the name; what they do not tell, as the heads, is."""
    if arch is None:
        return
    one_of("arch", arch, tuple(ARCHITECTURES))
    wanted = ARCHITECTURES[arch]
    if odd := {name: sizes[name] for name, size in wanted.items() if sizes.get(name, size) != size}:
        raise ValueError(f"{source} must have the sizes of {arch}, {dict(wanted)}, got {odd}")
