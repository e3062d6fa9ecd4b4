"""The tables of block patterns: tiles, kept once each, and files of plain numbers.

Tiles say which pairs inside a partial block are seen, (block, block) bool. In what lies behind the end of
the sequence they repeat the last position, so that a block at the end is like any other: whole if all pairs
that it has are seen, causal if those up to the diagonal are.

A file is a line of JSON, and the tables as numbers, little-endian.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import parse_json

CHUNK = 2**22  # pairs that are looked at together
WHOLE, EMPTY = -1, -2  # blocks that need no tile, and blocks in which nothing is seen
FORMAT = "dilated_attention_pytorch block pattern 1"
_MAX_HEADER = 4096


def evaluate_tiles(mask_mod: Callable[..., Any], blocks: Tensor, size: int, n: int) -> tuple[Tensor, Tensor]:
    """The tiles (tiles, size, size) that FlexAttention's `mask_mod` makes of blocks, and that of each block.

    `blocks` (blocks, 4) lists batch, head, row and column. A block may also be `WHOLE` or `EMPTY`.
    """
    # One axis after the other: what a mask_mod looks up by query or by key alone is looked up once a row.
    over_keys = torch.vmap(mask_mod, (None, None, None, 0))
    function = torch.vmap(torch.vmap(over_keys, (None, None, 0, None)))
    place = torch.arange(size, device=blocks.device)
    found, which, num = [place.new_empty(0, size, size, dtype=torch.bool)], [blocks.new_empty(0)], 0
    for part in torch.split(blocks, max(1, CHUNK // size**2)) if len(blocks) else ():
        b, h, row, column = part.unbind(1)
        q, k = (x[:, None] * size + place for x in (row, column))
        # Behind the end a mask_mod would read beyond its own tensors: the last position stands in.
        tiles = function(b, h, q.clamp_max(n - 1), k.clamp_max(n - 1))
        if tiles.dtype != torch.bool or tiles.shape != (len(part), size, size):
            raise TypeError(
                f"mask_mod must give one bool for a query and a key, got {tiles.dtype} of shape "
                f"{tuple(tiles.shape[3:])}"
            )
        distinct, index = unique_tiles(tiles)
        index = (index + num).masked_fill_(tiles.flatten(1).all(1), WHOLE)
        index.masked_fill_(~tiles.flatten(1).any(1), EMPTY)
        found.append(distinct)
        which.append(index)
        num += len(distinct)
    return keep_tiles(torch.cat(found), torch.cat(which))


def unique_tiles(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The different ones among tiles (tiles, size, size), and which of them each is."""
    # Bytes in words of 8: fewer comparisons.
    lines = tiles.contiguous().flatten(1).view(torch.uint8)
    words, index = torch.unique(
        pad(lines, (0, -lines.shape[1] % 8)).view(torch.int64), dim=0, return_inverse=True
    )
    distinct = words.view(torch.uint8)[:, : lines.shape[1]].contiguous()
    return distinct.view(torch.bool).view(-1, *tiles.shape[1:]), index


def count_seen(tiles: Tensor, which: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """(blocks,): the pairs seen in the first so many rows and columns of each block's tile, if it has one."""
    cases, index = torch.unique(torch.stack([which, queries, keys], 1), dim=0, return_inverse=True)
    place, found = torch.arange(tiles.shape[1], device=tiles.device), [cases.new_empty(0)]
    for part in torch.split(cases, max(1, CHUNK // tiles[0].numel())):
        tile, num_queries, num_keys = part.unbind(1)
        inside = (place < num_queries[:, None])[:, :, None] & (place < num_keys[:, None])[:, None]
        found.append((tiles[tile.clamp_min(0)] & inside).sum((1, 2)))
    return torch.cat(found)[index]


def keep_tiles(tiles: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the tiles that some block has, each once; `which` follows."""
    is_tiled = which >= 0
    used, place = torch.unique(which[is_tiled], return_inverse=True)
    distinct, index = unique_tiles(tiles[used])
    which = which.clone()
    which[is_tiled] = index[place].to(which.dtype)
    return distinct, which


def write_pattern(path: str | Path, sizes: dict[str, int], tables: list[Tensor]) -> None:
    """Writes the fields that are numbers and the tables of a pattern."""
    header = json.dumps({"format": FORMAT, **sizes}).encode()
    Path(path).write_bytes(header + b"\n" + b"".join(map(raw_bytes, tables)))


def read_pattern(path: str | Path) -> list[Any]:
    """The fields of the pattern in a file of `write_pattern`."""
    with Path(path).open("rb") as file:
        line, tables = file.readline(_MAX_HEADER), file.read()
    try:
        header = parse_json(line)
        given, is_causal = header["format"], header["is_causal"]
        sizes = [header[name] for name in ("n", "block_size", "rows", "blocks")]
        sizes.append(header.get("tiles", 0))
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} is not a block pattern: it does not begin with a line of its JSON"
        ) from None
    if given != FORMAT:
        raise ValueError(f"{path} has the format {given!r}, and this version reads {FORMAT!r}")
    if not isinstance(is_causal, bool) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"{path} is not a block pattern: its header holds {header}")
    n, block_size, rows, blocks, tiles = sizes
    lengths = [8 * (rows + 1), 4 * blocks, tiles * block_size**2, 4 * blocks * (tiles > 0)]
    if len(tables) != sum(lengths):
        raise ValueError(f"{path} is cut off or damaged: {sum(lengths)} bytes announced, {len(tables)} found")
    dtypes = torch.int64, torch.int32, torch.bool, torch.int32
    spans = pairwise([0, *accumulate(lengths)])
    parts = [_tensor(tables[a:b], dtype) for (a, b), dtype in zip(spans, dtypes, strict=True)]
    tiled = [parts[2].view(tiles, block_size, block_size), parts[3]] if tiles else []
    return [n, block_size, *parts[:2], is_causal, *tiled]


def raw_bytes(x: Tensor) -> bytes:
    """The elements of a tensor on the cpu, little-endian. NumPy is no dependency."""
    data = bytearray(x.nbytes)
    if data:
        torch.frombuffer(data, dtype=x.dtype).copy_(_little_endian(x.detach().flatten()))
    return bytes(data)


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return _little_endian(torch.frombuffer(bytearray(data), dtype=dtype))


def _little_endian(x: Tensor) -> Tensor:
    """From the machine's order of bytes, or back to it."""
    if sys.byteorder == "little":
        return x
    return x.view(torch.uint8).view(-1, x.element_size()).flip(1).flatten().view(x.dtype)
