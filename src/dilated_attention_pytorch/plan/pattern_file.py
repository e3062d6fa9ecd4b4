"""The file of a `BlockPattern`: a line of JSON, and its tables as plain numbers, little-endian."""

from __future__ import annotations

import json
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import parse_json

FORMAT = "dilated_attention_pytorch block pattern 1"
_MAX_HEADER = 4096


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
