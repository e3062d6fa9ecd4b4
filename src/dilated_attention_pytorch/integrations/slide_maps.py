"""Attention maps of a slide encoder, and their picture: a heat map over the grid of tiles, written as PNG."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import check_positive_int
from ..modules.longnet import LongNetEncoder

_MAP_NUMEL = 2**25  # probabilities of a layer that are held at a time
_MAX_CELLS = 2**26
# From no attention to the most, and where there is no tile.
_COLOURS = ((22, 26, 78), (116, 33, 129), (214, 60, 84), (249, 150, 48), (255, 246, 176))
_PAPER = 255
_TOP_SHARE = 4.0  # of the uniform share, at the least, gets the last colour: an even map looks even


def layer_numbers(layers: Sequence[int] | None, depth: int) -> list[int]:
    """The numbers of chosen layers, all of them by default, counted from the first."""
    if layers is None:
        return list(range(depth))
    try:
        chosen = [range(depth)[int(layer)] for layer in layers]
    except (TypeError, ValueError, IndexError):
        chosen = []
    if not chosen:
        rule = f"layers must be a non-empty list of integers between {-depth} and {depth - 1}"
        raise ValueError(f"{rule}, got {layers!r}")
    return chosen


def maps_one_by_one(
    alone: Callable[..., Any], x: Tensor, coords: Tensor, rows: Tensor | None, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Maps, 0 at padding, and embeddings of slides of which only `kept` (b, n) tiles are there.

    `alone` gives those of one slide without padding; in `rows`, positions of tokens, tiles count as given.
    """
    maps, embeddings = [], []
    for number, there in enumerate(torch.nn.functional.pad(kept, (1, 0), value=True)):
        if rows is not None and not there[rows].all():
            lost = rows[~there[rows]].tolist()
            raise ValueError(f"rows must be tiles of each slide, got {lost}, padding in slide {number}")
        own = None if rows is None else (there.cumsum(0) - 1)[rows]
        slide = (each[number : number + 1, there[1:]] for each in (x, coords))
        found, embedding = alone(*slide, own, return_embedding=True)
        maps.append(found.new_zeros(*found.shape[:-1], len(there) - 1))
        maps[-1][..., there[1:]] = found
        embeddings.append(embedding)
    return torch.cat(maps), torch.cat(embeddings)


def encode_with_maps(
    encoder: LongNetEncoder, x: Tensor, rows: Tensor | None, layers: list[int], rollout: bool, relative: bool
) -> tuple[Tensor, Tensor]:
    """Maps of `LongNetViT.attention_maps` over tokens (b, 1 + n, d), and the encoder's output."""
    stack: list[Any] = list(encoder.layers)
    found = {}  # maps of layers, or for a rollout their inputs
    for number, layer in enumerate(stack):
        if number in layers:
            found[number] = x if rollout else _layer_map(layer, x, rows)
        x = layer(x)
    out = x if encoder.layer_norm is None else encoder.layer_norm(x)
    start, blank = _start(x, rows), torch.zeros_like(x)
    maps = _roll_out(stack, found, start) if rollout else torch.stack([found[each] for each in layers], 1)
    if relative:
        if rollout:
            alike = _roll_out(stack, dict.fromkeys(layers, blank), start)
        else:
            alike = torch.stack([_layer_map(stack[each], blank, rows) for each in layers], 1)
        maps = torch.where(alike > 0, maps / alike, 0.0)
    tiles = maps[..., 1:]
    total = tiles.sum(-1, keepdim=True)
    return tiles / total.masked_fill(total == 0, 1.0), out  # a row that attends to no tile stays 0


def _roll_out(stack: Sequence[Any], inputs: dict[int, Tensor], weights: Tensor) -> Tensor:
    """weights (b, rows, 1 + n) through the layers that get these inputs, from the last to the first."""
    for number in sorted(inputs, reverse=True):
        normed = stack[number].self_attn_layer_norm(inputs.pop(number))
        weights = stack[number].self_attn.attention_sums(normed, weights, residual=True)
    return weights


def _layer_map(layer: Any, x: Tensor, rows: Tensor | None) -> Tensor:
    """Probabilities (b, rows, 1 + n), mean over heads, of a layer that gets x."""
    normed = layer.self_attn_layer_norm(x)
    if rows is None:
        mean: Tensor = layer.self_attn.attention_sums(normed, _start(x, rows))
        return mean
    at_once = max(1, _MAP_NUMEL // (x.shape[0] * x.shape[1] * layer.self_attn.num_heads))
    parts = torch.split(rows, at_once)
    return torch.cat([layer.self_attn.attention_rows(normed, part).mean(1) for part in parts], 1)


def _start(x: Tensor, rows: Tensor | None) -> Tensor:
    """(b, rows, 1 + n): 1 at each row, or the mean over all tiles."""
    b, n = x.shape[:2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    if rows is None:
        weights = torch.full((b, 1, n), 1.0 / (n - 1), dtype=dtype, device=x.device)
        weights[..., 0] = 0.0
        return weights
    return torch.nn.functional.one_hot(rows, n).to(dtype).expand(b, -1, -1)


def heat_map(coords: Tensor, weights: Tensor, tile_size: float, *, pixels: int = 1024) -> Tensor:
    """A picture of weights of tiles on the grid of a slide: uint8 (height, width, 3), red, green, blue.

    Colours go from dark blue at 0 through red to light yellow, which stands for the 99th percentile of the
    weights and for no less than 4 times the uniform share; where there is no tile, the picture is white. Its
    first pixel belongs to the cell of the smallest x and y.

    Args:
        coords: (n, 2), x and y of a corner of each tile.
        weights: (n,), not negative, such as a map of `LongNetViT.attention_maps`; tiles of one cell are
            averaged.
        tile_size: side of a tile in the unit of coords.
        pixels: of the longer side, at most, if cells of whole pixels allow; a cell has one at the least.
    """
    check_positive_int("pixels", pixels)
    coords, weights = coords.cpu().double(), weights.cpu().double()
    if coords.dim() != 2 or coords.shape[1] != 2 or weights.shape != coords.shape[:1] or not len(coords):
        shapes = f"{tuple(coords.shape)} and {tuple(weights.shape)}"
        raise ValueError(f"coords and weights must have the shapes (n, 2) and (n,), got {shapes}")
    if not (weights.isfinite().all() and (weights >= 0).all()):
        raise ValueError(f"weights must be finite and not negative, got {weights.min()} to {weights.max()}")
    if not tile_size > 0 or not coords.isfinite().all():
        raise ValueError(f"tile_size must be positive and coords finite, got {tile_size}")
    cells = (coords / tile_size).floor().long()
    cells = cells - cells.amin(0)
    width, height = (1 + cells.amax(0)).tolist()
    if width * height > _MAX_CELLS:
        rule = f"the grid must have at most {_MAX_CELLS} cells of tile_size"
        raise ValueError(f"{rule}, got {width} x {height}")
    place = cells[:, 1] * width + cells[:, 0]
    counts = torch.zeros(height * width, dtype=torch.float64).index_add_(0, place, torch.ones_like(weights))
    sums = torch.zeros_like(counts).index_add_(0, place, weights)
    share = sums / counts.clamp(min=1) * len(weights) / weights.sum().clamp(min=1e-300)
    top = max(_TOP_SHARE, share[counts > 0].quantile(0.99).item())
    colours = torch.tensor(_COLOURS, dtype=torch.float64)
    level = (share / top).clamp(max=1.0) * (len(colours) - 1)
    below = level.long().clamp(max=len(colours) - 2)
    painted = torch.lerp(colours[below], colours[below + 1], (level - below).unsqueeze(1))
    painted[counts == 0] = _PAPER
    image = painted.round().to(torch.uint8).view(height, width, 3)
    scale = max(1, pixels // max(width, height))
    return image.repeat_interleave(scale, 0).repeat_interleave(scale, 1)


def write_png(path: str | Path, image: Tensor) -> None:
    """Writes an image uint8 (height, width, 3), pixel for pixel; needs nothing but zlib."""
    if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[2] != 3 or not image.numel():
        rule = "image must be uint8 of the shape (height, width, 3)"
        raise ValueError(f"{rule}, got {image.dtype} {tuple(image.shape)}")
    height, width, _ = image.shape
    lines = torch.nn.functional.pad(image.cpu().reshape(height, -1), (1, 0))  # each begins with "no filter"
    held = zlib.compress(lines.contiguous().view(-1).numpy().tobytes(), 6)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, red green blue
    written = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", head), (b"IDAT", held), (b"IEND", b"")):
        written += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    Path(path).write_bytes(written)
