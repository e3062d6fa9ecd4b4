"""Pictures read back: the pixels of a PNG, and the framed maps in it."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

FRAME = torch.tensor([120, 120, 120], dtype=torch.uint8)


def read_png(path: Path) -> Tensor:
    """(height, width, 3) of a PNG of plain lines."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert checksum == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    lines = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8)
    lines = lines.view(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def find_maps(image: Tensor, side: int) -> list[Tensor]:
    """What stands in frames of so many pixels a side, line by line."""
    is_frame = (image == FRAME).all(-1)
    found = []
    for y, x in is_frame.nonzero().tolist():
        box = is_frame[y : y + side + 2, x : x + side + 2]
        if box.shape == (side + 2, side + 2) and all(
            edge.all() for edge in (box[0], box[-1], box[:, 0], box[:, -1])
        ):
            found.append(image[y + 1 : y + 1 + side, x + 1 : x + 1 + side])
    return found


def has_ink(image: Tensor) -> bool:
    """Whether letters, which are nearly black, are in a part of a picture."""
    return bool((image < 60).all(-1).any())
