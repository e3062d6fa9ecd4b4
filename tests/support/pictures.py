"""Pictures read back: the pixels of a PNG, and the maps in it or in an SVG."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from xml.etree.ElementTree import Element

import torch
from matplotlib.image import imread
from torch import Tensor

FRAME = torch.tensor([120, 120, 120], dtype=torch.uint8)


def read_png(path: Path | io.BytesIO) -> Tensor:
    """(height, width, 3), 0 to 255."""
    return torch.from_numpy(imread(path))[..., :3].mul(255).round().to(torch.uint8)


def read_svg_maps(root: Element) -> list[Tensor]:
    """(cells, cells, 3) of each map in an SVG."""
    images = root.iter("{http://www.w3.org/2000/svg}image")
    texts = [each.attrib["{http://www.w3.org/1999/xlink}href"].partition(",")[2] for each in images]
    return [read_png(io.BytesIO(base64.b64decode(text))) for text in texts]


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
