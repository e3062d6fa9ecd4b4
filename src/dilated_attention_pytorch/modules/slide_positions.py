"""Where tiles lie on a slide: cells of a grid, and their two-dimensional sine and cosine embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

_FINE = (torch.float32, torch.float64)  # half precision cannot tell neighbouring tiles apart


def tile_cells(coords: Tensor, tile_size: int, slide_ngrids: int) -> Tensor:
    """Cells int64 (..., 2) of the pixel coordinates (..., 2) of tiles: `floor(coords / tile_size)`.

    Coordinates are integers, float32 or float64. A cell outside the grid of slide_ngrids x slide_ngrids is an
    error; a table of positions that is read by a flat index would give the embedding of another cell.
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
    1 / 10000. The rows of the table (1 + slide_ngrids ** 2, width) of Prov-GigaPath, which takes 3 GB at its
    sizes, are put together from one axis of the grid. Its row 0, of the class token, is zero.
    """
    quarter = width // 4
    # On the CPU: not every device has float64, in which the angles keep their precision.
    step = torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter
    angle = torch.arange(slide_ngrids, dtype=torch.float64, device="cpu")[:, None] * 10000.0**-step
    axis = torch.cat([angle.sin(), angle.cos()], -1).to(cells.device, dtype)
    return torch.cat([axis[cells[..., 1]], axis[cells[..., 0]]], -1)
