"""Block patterns as files, pictures, text and FlexAttention masks."""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checks import check_device, check_positive_int, parse_json
from .pictures import FUTURE, INK, WHITE, Map, Meaning, scale_of, shade, write_picture

if TYPE_CHECKING:
    from .block_pattern import BlockPattern

FORMAT = "dilated_attention_pytorch block pattern 1"
_SHADES = " ░▒▓█"
_MAX_HEADER = 4096


def raw_bytes(x: Tensor) -> bytes:
    """The elements of a tensor on the cpu, little-endian. NumPy is no dependency."""
    data = bytearray(x.nbytes)
    if data:
        torch.frombuffer(data, dtype=x.dtype).copy_(x.detach().flatten())
    return _little_endian(bytes(data), x.element_size())


def _little_endian(data: bytes, itemsize: int) -> bytes:
    """From the machine's order of bytes, or back to it."""
    if sys.byteorder == "little" or itemsize == 1:
        return data
    values = array({4: "i", 8: "q"}[itemsize], data)
    values.byteswap()
    return values.tobytes()


def save(pattern: BlockPattern, path: str | Path) -> None:
    header = {
        "format": FORMAT,
        "n": pattern.n,
        "block_size": pattern.block_size,
        "is_causal": pattern.is_causal,
        "rows": pattern.starts.numel() - 1,
        "blocks": pattern.columns.numel(),
    }
    with Path(path).open("wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        file.write(raw_bytes(pattern.starts))
        file.write(raw_bytes(pattern.columns))


def load(cls: type[BlockPattern], path: str | Path) -> BlockPattern:
    with Path(path).open("rb") as file:
        line, rest = file.readline(_MAX_HEADER), file.read()
    try:
        header = parse_json(line)
        given, causal = header["format"], header["is_causal"]
        sizes = [header[name] for name in ("n", "block_size", "rows", "blocks")]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} is not a block pattern: it does not begin with a line of its JSON"
        ) from None
    if given != FORMAT:
        raise ValueError(f"{path} has the format {given!r}, and this version reads {FORMAT!r}")
    if not isinstance(causal, bool) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"{path} is not a block pattern: its header holds {header}")
    n, block_size, rows, blocks = sizes
    if len(rest) != 8 * (rows + 1) + 4 * blocks:
        raise ValueError(
            f"{path} is cut off or damaged: {8 * (rows + 1) + 4 * blocks} bytes announced, {len(rest)} found"
        )
    starts, columns = rest[: 8 * (rows + 1)], rest[8 * (rows + 1) :]
    return cls(n, block_size, _tensor(starts, torch.int64), _tensor(columns, torch.int32), causal)


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(_little_endian(data, dtype.itemsize)), dtype=dtype)


def coverage(pattern: BlockPattern, layout: int, cells: int) -> Tensor:
    """(cells, cells) float: the share of each cell's blocks that a layout keeps; at most one cell a block."""
    if isinstance(layout, bool) or not isinstance(layout, int) or not 0 <= layout < len(pattern):
        raise ValueError(f"layout must lie in 0 to {len(pattern) - 1}, got {layout!r}")
    rows = pattern.rows
    cells = min(cells, rows)
    first, last = (int(pattern.starts[i]) for i in (layout * rows, (layout + 1) * rows))
    counts = pattern.counts[layout * rows : (layout + 1) * rows]
    cell_of = torch.arange(rows, device="cpu") * cells // rows
    row = torch.repeat_interleave(cell_of, counts)
    column = cell_of[pattern.columns[first:last].long()]
    kept = torch.bincount(row * cells + column, minlength=cells * cells).view(cells, cells)
    size = torch.bincount(cell_of, minlength=cells)
    return kept / (size[:, None] * size)


def as_text(pattern: BlockPattern, cells: int = 32) -> str:
    """One layout in shades, two characters a cell."""
    shades = coverage(pattern, 0, cells).pow(0.5).mul(len(_SHADES) - 1).ceil().int().tolist()
    return "\n".join("".join(_SHADES[shade] * 2 for shade in line) for line in shades)


def draw(pattern: BlockPattern, path: str | Path, layout: int, pixels: int) -> None:
    check_positive_int("pixels", pixels)
    share = coverage(pattern, layout, pixels)
    n, size = pattern.n, pattern.block_size
    title = f"Block pattern: {n} positions, blocks of {size}, {pattern.density:.1%} kept"
    title += f", layout {layout} (of {len(pattern)})" if len(pattern) > 1 else ""
    title += ", causal" if pattern.is_causal else ""
    is_exact = len(share) == pattern.rows
    kept = "kept block" if is_exact else "kept blocks: the darker, the more"
    legend = [Meaning(kept, (INK,) if is_exact else scale_of(INK)), Meaning("not kept", (WHITE,))]
    if pattern.is_causal:
        legend.append(Meaning("future, never seen", (FUTURE,)))
    colours = shade(share, is_causal=pattern.is_causal)
    maps = [Map("", colours, pattern.rows * size)]
    write_picture(path, title, maps, legend, pixels)


def to_block_mask(
    pattern: BlockPattern, device: torch.device | str, num_heads: int | None, key_mask: Tensor | None = None
) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    n, size, rows = pattern.n, pattern.block_size, pattern.rows
    device = check_device(device) or torch.device("cpu")
    if num_heads is not None:
        check_positive_int("num_heads", num_heads)
    heads = len(pattern) if num_heads is None or len(pattern) == 1 else num_heads
    if len(pattern) % heads:
        raise ValueError(f"{len(pattern)} layouts are not one for each of {heads} heads")
    layout = pattern.to_layout().view(-1, heads, rows, rows).to(device)
    # Full blocks skip the mask function: all but the diagonal, the ends and, with padding, none.
    partial = torch.zeros(rows, rows, dtype=torch.bool, device=device)
    if pattern.is_causal:
        partial.fill_diagonal_(True)
    if n % size:
        partial[-1], partial[:, -1] = True, True
    if key_mask is not None:
        partial.fill_(True)
    batches, is_causal = layout.shape[0], pattern.is_causal

    def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        kept = layout[b if batches > 1 else b * 0, h if heads > 1 else h * 0, q // size, kv // size]
        if is_causal:
            kept = kept & (q >= kv)
        return kept if key_mask is None else kept & key_mask[b, kv]

    return BlockMask.from_kv_blocks(
        *_in_order(layout & partial),
        *_in_order(layout & ~partial),
        BLOCK_SIZE=(size, size),
        mask_mod=seen,
        seq_lengths=(n, n),
    )


def _in_order(layout: Tensor) -> tuple[Tensor, Tensor]:
    """FlexAttention's form of a layout: how many blocks each row keeps, and all columns, kept ones first."""
    order = torch.argsort(layout.to(torch.int8), dim=-1, descending=True, stable=True)
    return layout.sum(-1, dtype=torch.int32), order.to(torch.int32)


def from_block_mask(
    cls: type[BlockPattern], mask: Any, is_causal: bool, num_heads: int | None
) -> BlockPattern:
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a FlexAttention BlockMask, got {type(mask).__name__}")
    (q_size, k_size), (q_len, k_len) = mask.BLOCK_SIZE, mask.seq_lengths
    if q_size != k_size or q_len != k_len:
        raise ValueError(
            "a block pattern has square blocks and as many queries as keys, got blocks "
            f"{(q_size, k_size)} and lengths {(q_len, k_len)}"
        )
    layout = _kept(mask.kv_num_blocks, mask.kv_indices)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        layout |= _kept(mask.full_kv_num_blocks, mask.full_kv_indices)
    layout = _for_heads(layout, num_heads)
    return cls.from_layout(layout.flatten(0, 1), q_len, q_size, is_causal=is_causal)


def _for_heads(layout: Tensor, num_heads: int | None) -> Tensor:
    """(b, h, rows, columns), with all heads of a call where batches differ."""
    batches, heads = layout.shape[:2]
    if num_heads is None:
        if batches > 1 and heads == 1:
            raise ValueError(
                f"a mask of {batches} batches for all heads needs num_heads, or its layouts could be taken "
                "for those of heads, got none"
            )
        return layout
    check_positive_int("num_heads", num_heads)
    if heads not in (1, num_heads):
        raise ValueError(f"num_heads must be that of the mask, {heads}, got {num_heads}")
    return layout.expand(-1, num_heads, -1, -1) if batches > 1 else layout


def _kept(counts: Tensor, indices: Tensor) -> Tensor:
    """(b, h, rows, columns) bool from the first `counts` entries of each row of indices."""
    is_kept = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    return torch.zeros_like(is_kept).scatter_(-1, indices.long(), is_kept)
