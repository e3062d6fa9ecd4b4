"""The grid of a slide's tiles: cells of coordinates, embeddings of cells, segment lengths for its size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import check_positive_int

_FINE = (torch.float32, torch.float64)  # half precision cannot tell neighbouring tiles apart


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
    if not inside.all():
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
