"""`BlockPattern`: which key blocks each row of query blocks keeps, as compressed rows; no n x n tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import check_dense, check_flags, check_positive_int
from ..core.tracing import uncompiled
from . import flex, pictures
from .pattern_tables import count_seen, keep_tiles, raw_bytes, read_pattern, write_pattern

_SHADES = " ░▒▓█"


@dataclass(frozen=True, eq=False)
class BlockPattern:
    """The kept blocks of one layout for all heads, of one a head, or of one for each batch and head.

    Row `i` of layout `l` keeps `columns[starts[l * rows + i] : starts[l * rows + i + 1]]`, ascending. Blocks
    at the end of the sequence may be shorter. A causal pattern keeps nothing above the diagonal, and its
    diagonal blocks are seen up to the diagonal. Of a kept block with a tile, `tiles[tile_of[i]]`, the pairs
    (query, key) are seen that are True in it. Constructing a pattern validates it.

    `len(pattern)` counts layouts, `print(pattern)` shows the pattern, `pattern.draw("file.png")` paints it.
    """

    n: int
    block_size: int
    starts: Tensor  # (layouts * rows + 1,) int64
    columns: Tensor  # (kept blocks,) int32
    is_causal: bool = False
    tiles: Tensor | None = None  # (tiles, block_size, block_size) bool
    tile_of: Tensor | None = None  # (kept blocks,) int32, -1 for blocks without one
    key: str = field(init=False)  # a digest of the content, under which plans of the pattern are cached
    _versions: tuple[int, ...] = field(init=False, repr=False)  # of the tensors, when they were checked

    def __post_init__(self) -> None:
        # A pattern outlives the call: it must not be an inference tensor, which training refuses.
        with torch.inference_mode(False):
            for name in ("starts", "columns", "tiles", "tile_of"):
                x = getattr(self, name)
                if isinstance(x, Tensor) and x.is_inference():
                    object.__setattr__(self, name, x.clone())
            self._check()
        digest = blake2b(f"{self.n} {self.block_size} {self.is_causal}".encode(), digest_size=16)
        for x in self._tensors:
            digest.update(raw_bytes(x))
        # At once, although not all need it: compilers can read it, but not compute it.
        object.__setattr__(self, "key", digest.hexdigest())
        object.__setattr__(self, "_versions", tuple([x._version for x in self._tensors]))

    @property
    def _tensors(self) -> list[Tensor]:
        return [x for x in (self.starts, self.columns, self.tiles, self.tile_of) if x is not None]

    def __reduce__(self) -> tuple[type[BlockPattern], tuple[Any, ...]]:
        tables = self.starts, self.columns, self.is_causal, self.tiles, self.tile_of
        return BlockPattern, (self.n, self.block_size, *tables)

    @property
    def is_changed(self) -> bool:
        """Whether somebody wrote to the tensors, so that neither checks nor key hold any more."""
        return self._versions != tuple([x._version for x in self._tensors])

    def _check(self) -> None:
        _check_sizes(self.n, self.block_size, self.is_causal)
        _check_table("starts", self.starts, torch.int64)
        _check_table("columns", self.columns, torch.int32)
        entries = self.starts.numel() - 1
        if entries < self.rows or entries % self.rows:
            raise ValueError(
                f"starts must have one entry a row and one more, for rows in multiples of {self.rows}, "
                f"got {entries + 1}"
            )
        # Compared, not subtracted: differences wrap, and would pass.
        falls = bool((self.starts[1:] < self.starts[:-1]).any())
        if falls or self.starts[0] != 0 or self.starts[-1] != self.columns.numel():
            raise ValueError(f"starts must rise from 0 to the number of columns, {self.columns.numel()}")
        if self.columns.numel():
            low, high = (int(x) for x in self.columns.aminmax())
            if low < 0 or high >= self.rows:
                raise ValueError(f"columns must lie in 0 to {self.rows - 1}, got {low} to {high}")
            rises = self.columns[1:] > self.columns[:-1]
            begins = self.starts[1:-1]
            begins = begins[(begins > 0) & (begins < self.columns.numel())]
            rises[begins - 1] = True  # from one row to the next
            if not bool(rises.all()):
                raise ValueError("the columns of each row must rise")
            is_kept = self.counts > 0
            row = torch.arange(entries, device="cpu")[is_kept] % self.rows
            if self.is_causal and bool((self.columns[(self.starts[1:] - 1)[is_kept]] > row).any()):
                raise ValueError("a causal pattern keeps no block above the diagonal, got one that does")
        if self.tiles is not None or self.tile_of is not None:
            self._check_tiles()

    def _check_tiles(self) -> None:
        size = self.block_size
        _check_table("tiles", self.tiles, torch.bool, 3)
        _check_table("tile_of", self.tile_of, torch.int32)
        assert self.tiles is not None
        assert self.tile_of is not None
        if self.tiles.shape[1:] != (size, size) or self.tile_of.shape != self.columns.shape:
            raise ValueError(
                f"tiles must have the shape (tiles, {size}, {size}) and tile_of one entry for each of "
                f"{self.columns.numel()} blocks, got {tuple(self.tiles.shape)} and {self.tile_of.numel()}"
            )
        low, high = (int(x) for x in self.tile_of.aminmax()) if self.tile_of.numel() else (-1, -1)
        if low < -1 or high >= len(self.tiles):
            raise ValueError(f"tile_of must lie in -1 to {len(self.tiles) - 1}, got {low} to {high}")
        if self.is_causal:
            used = self.tile_of[(self.columns == self.row_of_blocks % self.rows) & (self.tile_of >= 0)]
            if bool(self.tiles[torch.unique(used).long()].triu(1).any()):
                raise ValueError("a causal pattern shows nothing above the diagonal, got a tile that does")

    @classmethod
    def from_layout(cls, layout: Tensor, n: int, block_size: int, *, is_causal: bool = False) -> BlockPattern:
        """From a bool tensor (blocks, blocks), or (layouts, blocks, blocks) with a layout a head.

        With `is_causal` the blocks above the diagonal are left out.
        """
        if not isinstance(layout, Tensor) or layout.dtype != torch.bool:
            kind = layout.dtype if isinstance(layout, Tensor) else type(layout).__name__
            raise TypeError(f"a layout must be a bool tensor, got {kind}")
        check_dense("a layout", layout, needs_values=True)
        _check_sizes(n, block_size, is_causal)
        blocks = count_blocks(n, block_size)
        if layout.dim() not in (2, 3) or layout.shape[-2:] != (blocks, blocks) or not layout.numel():
            raise ValueError(
                f"a layout of {n} tokens in blocks of {block_size} must have the shape ({blocks}, {blocks}), "
                f"or that for each head, got {tuple(layout.shape)}"
            )
        layout = layout.detach().cpu().reshape(-1, blocks, blocks)
        layout = layout.tril() if is_causal else layout
        return cls.from_counts(n, block_size, layout.sum(-1).flatten(), layout.nonzero()[:, 2], is_causal)

    @classmethod
    def from_counts(
        cls,
        n: int,
        block_size: int,
        counts: Tensor,
        columns: Tensor,
        is_causal: bool,
        tiles: Tensor | None = None,
        tile_of: Tensor | None = None,
    ) -> BlockPattern:
        """From the number of kept blocks of each row and all columns, row by row; and of their tiles."""
        starts = torch.zeros(counts.numel() + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(counts, 0, out=starts[1:])
        if tiles is not None and tile_of is not None:
            tiles, tile_of = keep_tiles(tiles, tile_of)
            tiles, tile_of = (tiles, tile_of.to(torch.int32)) if len(tiles) else (None, None)
        return cls(n, block_size, starts, columns.to(torch.int32), is_causal, tiles, tile_of)

    @property
    def rows(self) -> int:
        """Blocks of a sequence, along either side."""
        return count_blocks(self.n, self.block_size)

    def __len__(self) -> int:
        return (self.starts.numel() - 1) // self.rows

    @property
    def counts(self) -> Tensor:
        """The number of kept blocks of each row, layout after layout."""
        return self.starts.diff()

    @property
    def row_of_blocks(self) -> Tensor:
        """For every kept block its row, counted over all layouts."""
        return torch.repeat_interleave(torch.arange(self.starts.numel() - 1, device="cpu"), self.counts)

    @property
    def density(self) -> float:
        """Kept over all block pairs; under a causal mask over those of the lower triangle."""
        rows = self.rows
        total = rows * (rows + 1) // 2 if self.is_causal else rows * rows
        return self.columns.numel() / (total * len(self))

    @property
    def nbytes(self) -> int:
        """What the pattern itself takes."""
        return sum(x.nbytes for x in self._tensors)

    @cached_property
    def num_pairs(self) -> int:
        """Query-key pairs seen over all layouts: of short and causal blocks and of tiles what is in them."""
        tail = self.n - (self.rows - 1) * self.block_size
        row, column = self.row_of_blocks % self.rows, self.columns
        q_len = torch.where(row == self.rows - 1, tail, self.block_size)
        k_len = torch.where(column == self.rows - 1, tail, self.block_size)
        on_diagonal = self.is_causal & (row == column)
        pairs = torch.where(on_diagonal, q_len * (q_len + 1) // 2, q_len * k_len)
        if self.tiles is not None and self.tile_of is not None:
            seen = count_seen(self.tiles, self.tile_of, q_len, k_len)
            pairs = torch.where(self.tile_of < 0, pairs, seen)
        return int(pairs.sum())

    def causal(self) -> BlockPattern:
        """The pattern without what lies above the diagonal."""
        if self.is_causal:
            return self
        row = self.row_of_blocks
        kept = self.columns <= row % self.rows
        row, columns, tiles, tile_of = row[kept], self.columns[kept], self.tiles, self.tile_of
        counts = torch.bincount(row, minlength=self.starts.numel() - 1)
        if tiles is not None and tile_of is not None:
            cut, tile_of = tiles.tril(), tile_of[kept].long()
            # A diagonal block of which all up to the diagonal is seen needs no tile any more.
            is_plain = (cut == torch.ones_like(cut[:1]).tril()).flatten(1).all(1)
            own = torch.arange(len(tiles), 2 * len(tiles), device="cpu").masked_fill_(is_plain, -1)
            is_cut = (columns == row % self.rows) & (tile_of >= 0)
            tile_of = torch.where(is_cut, own[tile_of.clamp_min(0)], tile_of)
            tiles = torch.cat([tiles, cut])
        return self.from_counts(self.n, self.block_size, counts, columns, True, tiles, tile_of)

    def to_layout(self) -> Tensor:
        """(layouts, blocks, blocks) bool. For small patterns: its size grows with the square of n."""
        layout = torch.zeros(len(self) * self.rows, self.rows, dtype=torch.bool, device="cpu")
        layout[self.row_of_blocks, self.columns.long()] = True
        return layout.view(len(self), self.rows, self.rows)

    def tile_table(self) -> Tensor:
        """(layouts, blocks, blocks): the number of each block's tile, -1 for none. For small patterns."""
        table = torch.full((len(self) * self.rows, self.rows), -1, device="cpu")
        if self.tile_of is not None:
            table[self.row_of_blocks, self.columns.long()] = self.tile_of.long()
        return table.view(len(self), self.rows, self.rows)

    def to_dense(self) -> Tensor:
        """(layouts, n, n) bool, True where a query may attend a key. For small patterns."""
        index = torch.arange(self.n, device="cpu")
        block, place = index // self.block_size, index % self.block_size
        dense = self.to_layout()[:, block][:, :, block]
        if self.tiles is not None:
            tile = self.tile_table()[:, block][:, :, block]
            dense &= (tile < 0) | self.tiles[tile.clamp_min(0), place[:, None], place]
        return dense.tril() if self.is_causal else dense

    def to_block_mask(
        self,
        device: torch.device | str = "cpu",
        *,
        num_heads: int | None = None,
        key_mask: Tensor | None = None,
    ) -> Any:
        """FlexAttention's `BlockMask` of the same blocks; it takes n^2 / block_size^2 entries a layout.

        A pattern for batches and heads needs `num_heads`. `key_mask` (b, n) hides keys besides.
        """
        return flex.to_block_mask(self, device, num_heads, key_mask)

    @classmethod
    @uncompiled
    def from_block_mask(
        cls, mask: Any, *, is_causal: bool = False, num_heads: int | None = None
    ) -> BlockPattern:
        """What a FlexAttention `BlockMask` shows; of its partial blocks what its `mask_mod` shows, as tiles.

        `mask_mod` is evaluated here, once, in partial blocks alone. Blocks in which it shows all or nothing
        become whole ones or are left out, and equal tiles are kept once. With `is_causal` the triangle is
        applied, too. A mask that differs by batch and not by head needs `num_heads`: the pattern has a layout
        for each of both. Blocks that are not square are cut into squares.
        """
        layout, tiles, tile_of, n, block_size = flex.read_block_mask(mask, num_heads)
        counts, columns = layout.sum(-1).flatten(), layout.nonzero()[:, -1]
        pattern = cls.from_counts(n, block_size, counts, columns, False, tiles, tile_of)
        return pattern.causal() if is_causal else pattern

    def save(self, path: str | Path) -> None:
        """Writes the pattern to a file that `load` reads: a line of JSON and plain numbers."""
        sizes = {"n": self.n, "block_size": self.block_size, "is_causal": self.is_causal}
        sizes |= {"rows": self.starts.numel() - 1, "blocks": self.columns.numel()}
        sizes |= {"tiles": 0 if self.tiles is None else len(self.tiles)}
        write_pattern(path, sizes, self._tensors)

    @classmethod
    def load(cls, path: str | Path) -> BlockPattern:
        """Reads a file of `save`, and validates it. Runs no code from the file."""
        return cls(*read_pattern(path))

    def draw(self, path: str | Path, *, layout: int = 0, pixels: int = 512) -> None:
        """Paints one layout, as PNG or by its suffix as SVG, with title, axes and legend (extra `charts`).

        Args:
            path: of the file; .svg makes it SVG.
            layout: which one, if heads or sequences have their own.
            pixels: side of the map without what stands around it, at most; less if blocks would not be equal.
        """
        pictures.draw_pattern(self, path, layout, pixels)

    def __repr__(self) -> str:
        tiles = "" if self.tiles is None else f", tiles={len(self.tiles)}"
        return (
            f"BlockPattern(n={self.n}, block_size={self.block_size}, layouts={len(self)}, "
            f"density={self.density:.4f}, is_causal={self.is_causal}{tiles})"
        )

    def __str__(self) -> str:
        shades = self.coverage(0, 32).sqrt().mul(len(_SHADES) - 1).ceil().int().tolist()
        return "\n".join([repr(self), *("".join(_SHADES[shade] * 2 for shade in line) for line in shades)])

    def coverage(self, layout: int, cells: int) -> Tensor:
        """(cells, cells): the share of each cell's blocks that a layout keeps; at most one cell a block."""
        if isinstance(layout, bool) or not isinstance(layout, int) or not 0 <= layout < len(self):
            raise ValueError(f"layout must lie in 0 to {len(self) - 1}, got {layout!r}")
        rows = self.rows
        cells = min(cells, rows)
        starts = self.starts[layout * rows : (layout + 1) * rows + 1]
        cell_of = torch.arange(rows, device="cpu") * cells // rows
        row = torch.repeat_interleave(cell_of, starts.diff())
        column = cell_of[self.columns[starts[0] : starts[-1]].long()]
        kept = torch.bincount(row * cells + column, minlength=cells * cells).view(cells, cells)
        size = torch.bincount(cell_of, minlength=cells)
        return kept / (size[:, None] * size)


def count_blocks(n: int, block_size: int) -> int:
    """How many blocks hold n tokens."""
    return -(-n // block_size)


def _check_table(name: str, x: Any, dtype: torch.dtype, dim: int = 1) -> None:
    if not isinstance(x, Tensor) or x.dtype != dtype or x.dim() != dim or x.device.type != "cpu":
        kind = f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x)
        raise TypeError(f"{name} must be a {dim}-d {dtype} tensor on the cpu, got {kind}")
    check_dense(name, x)


def _check_sizes(n: int, block_size: int, is_causal: bool) -> None:
    check_positive_int("n", n)
    check_positive_int("block_size", block_size)
    check_flags(is_causal=is_causal)
