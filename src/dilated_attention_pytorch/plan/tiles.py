"""Tiles: which pairs inside a partial block are seen, (block, block) bool; equal ones are kept once.

In what lies behind the end of the sequence they repeat the last position, so that a block at the end is like
any other: whole if all pairs that it has are seen, causal if those up to the diagonal are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 2**22  # pairs that are looked at together
WHOLE, EMPTY = -1, -2  # blocks that need no tile, and blocks in which nothing is seen


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
