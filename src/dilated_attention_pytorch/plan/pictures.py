"""Maps of what attends to what, as pictures with title, axes and legend: SVG, or PNG with its own letters."""

from __future__ import annotations

import struct
import textwrap
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Anchor = Literal["start", "middle", "end"]
Colour = tuple[int, int, int]

INK: Colour = (24, 52, 110)
WHITE: Colour = (255, 255, 255)
FUTURE: Colour = (236, 236, 240)
FRAME: Colour = (120, 120, 120)
TEXT: Colour = (29, 33, 37)
COLUMNS = 4  # maps side by side
GAP = 16
LEAST_LETTERS = 30  # of a line: a narrow picture gets a margin rather than a title in pieces

# 5 x 8 dots for each character from the space to the tilde: five columns of two hexadecimal digits, of which
# the lowest bit is the top.
FONT = bytes.fromhex(
    "000000000000005f00000007000700147f147f14242a7f2a12231308646236495620500000070000001c2241000041221c00"
    "2a1c7f1c2a08083e080800806000000808080808006060000060100804033e5149453e00427f400042615149462141454b31"
    "1814127f1027454545393c4a49493001710905033649494936064949291e003636000000b676000008142241001414141414"
    "00412214080201510906324979413e7e1111117e7f494949363e414141227f4141221c7f494949417f090909013e4149497a"
    "7f0808087f00417f41002040413f017f081422417f404040407f020c027f7f0408107f3e4141413e7f090909063e4151215e"
    "7f09192946464949493101017f01013f4040403f1f2040201f3f4038403f631408146307087008076151494543007f414100"
    "03040810600041417f0004020102048080808080000102040020545454787f484444383844444428384444487f3854545418"
    "00087e090218a4a4a47c7f0804047800447d40004080847d007f1028440000417f40007c047804787c080404783844444438"
    "fc2424241818242424fc7c08040408485454542400043f44243c4040207c1c2040201c3c4030403c44281028441ca0a0a07c"
    "4464544c44000836410000007f000000413608000804081008"
)


class Map(NamedTuple):
    """A named square of colours (cells, cells, 3), 0 to 255, whose sides stand for `n` positions."""

    name: str
    colours: Tensor
    n: int


class Meaning(NamedTuple):
    """An entry of the legend: colours from the first to the last, and what they say."""

    text: str
    colours: tuple[Colour, ...]


def shade(share: Tensor, ink: Colour = INK, *, is_causal: bool = False) -> Tensor:
    """(cells, cells, 3): from paper at 0 to ink at 1. A square root keeps what is rare visible."""
    paper = torch.full((*share.shape, 3), 255.0, device="cpu")
    if is_causal:
        future = torch.ones(share.shape, dtype=torch.bool, device="cpu").triu(1)
        paper[future] = torch.tensor(FUTURE, dtype=torch.float32, device="cpu")
    strength = share.sqrt().unsqueeze(-1).float()
    return (paper + strength * (torch.tensor(ink, device="cpu") - paper)).round().to(torch.uint8)


def scale_of(ink: Colour, steps: int = 5) -> tuple[Colour, ...]:
    """Some of the colours between paper, which is left out, and ink."""
    return tuple(
        (int(255 + (r - 255) * s), int(255 + (g - 255) * s), int(255 + (b - 255) * s))
        for r, g, b in [ink]
        for s in (((i + 1) / steps) ** 0.5 for i in range(steps))
    )


def write_picture(
    path: str | Path, title: str, maps: Sequence[Map], legend: Sequence[Meaning], pixels: int
) -> None:
    """As SVG, if the name ends in .svg, or else as PNG."""
    if Path(path).suffix.lower() == ".svg":
        Path(path).write_text(svg_of(title, maps, legend, pixels, "pattern"), encoding="utf-8")
    else:
        Path(path).write_bytes(png_of(title, maps, legend, pixels))


def svg_of(title: str, maps: Sequence[Map], legend: Sequence[Meaning], pixels: int, svg_id: str) -> str:
    """The picture as an `<svg>` element with maps of so many pixels."""
    layout = _Layout(title, maps, legend, pixels, letter=7.3, line=18)
    pen = _SvgPen(layout, svg_id)
    layout.paint(pen)
    return pen.text_of()


def png_of(title: str, maps: Sequence[Map], legend: Sequence[Meaning], pixels: int) -> bytes:
    """The picture as a PNG file; each cell has a whole number of pixels, so that a map may be smaller."""
    cells = len(maps[0].colours)
    layout = _Layout(title, maps, legend, max(1, pixels // cells) * cells, letter=12, line=24)
    pen = _PngPen(layout)
    layout.paint(pen)
    return png_bytes(pen.image)


class _Layout:
    """Where things are: the title on top, maps in rows of `COLUMNS` with their axes, the legend below."""

    def __init__(
        self,
        title: str,
        maps: Sequence[Map],
        legend: Sequence[Meaning],
        side: int,
        *,
        letter: float,
        line: int,
    ) -> None:
        self.title, self.maps, self.side, self.letter, self.line = title, maps, side, letter, line
        self.margin = line + letter * len(str(maps[0].n)) + 10  # of a map on its left, for the axis
        columns = min(COLUMNS, len(maps))
        needed = GAP + columns * (self.margin + side + letter * len(str(maps[0].n)) / 2 + GAP)
        self.width = round(max(needed, 2 * GAP + LEAST_LETTERS * letter))
        self.step = (needed - GAP) / columns
        self.lines = textwrap.wrap(title, int((self.width - 2 * GAP) / letter))
        self.top = GAP + line * len(self.lines)
        self.head = line if any(each.name for each in maps) else 0
        self.map_height = self.head + side + 2 * line + 2 * GAP
        self.legend_top = self.top + -(-len(maps) // columns) * self.map_height
        self.entries = self._flow(legend)
        self.height = self.entries[-1][1] + line + GAP

    def _flow(self, legend: Sequence[Meaning]) -> list[tuple[int, int, Meaning]]:
        """Entries from left to right, in as many lines as they need."""
        found: list[tuple[int, int, Meaning]] = []
        x, y = GAP, self.legend_top
        for each in legend:
            width = self.line * len(each.colours) + round(self.letter * (len(each.text) + 3))
            if x > GAP and x + width > self.width:
                x, y = GAP, y + self.line + 4
            found.append((x, y, each))
            x += width
        return found

    def paint(self, pen: _SvgPen | _PngPen) -> None:
        for number, text in enumerate(self.lines):
            pen.text(GAP, GAP + number * self.line, text)
        for number, each in enumerate(self.maps):
            x = GAP + number % COLUMNS * self.step + self.margin
            y = self.top + number // COLUMNS * self.map_height + GAP + self.head
            self._paint_map(pen, each, round(x), round(y))
        box = self.line - 4
        for left, top, entry in self.entries:
            for number, colour in enumerate(entry.colours):
                pen.box(left + number * box, top, box, box, colour)
            pen.frame(left, top, box * len(entry.colours), box)
            pen.text(left + box * len(entry.colours) + self.letter, top - 2, entry.text)

    def _paint_map(self, pen: _SvgPen | _PngPen, each: Map, x: int, y: int) -> None:
        side, line = self.side, self.line
        name = textwrap.shorten(each.name, max(8, int(side / self.letter)), placeholder=" ...")
        pen.text(x, y - line - 2, name)
        pen.cells(x, y, side, each.colours)
        pen.frame(x - 1, y - 1, side + 2, side + 2)
        for tick in self._ticks(each.n):
            place = round(tick / each.n * side)
            pen.box(x + place - (tick == each.n), y + side + 1, 1, 5, TEXT)
            pen.box(x - 6, y + place - (tick == each.n), 5, 1, TEXT)
            pen.text(x + place, y + side + 7, str(tick), "middle")
            pen.text(x - 9, y + place - line / 2, str(tick), "end")
        pen.text(x + side / 2, y + side + 7 + line, "key position", "middle")
        pen.text(x - self.margin, y + side / 2, "query position", "middle", is_upright=True)

    def _ticks(self, n: int) -> range:
        """From 0 to n in equal parts of whole positions, as many as their texts leave room for."""
        room = self.side / (self.letter * (len(str(n)) + 1))
        parts = next((p for p in (4, 3, 5, 2) if n % p == 0 and p <= room), 1)
        return range(0, n + 1, n // parts)


class _SvgPen:
    def __init__(self, layout: _Layout, svg_id: str) -> None:
        width, height, title = layout.width, layout.height, escape(layout.title)
        self.line = layout.line
        self.parts = [
            f'<svg id="{svg_id}" role="img" aria-label="{title}" xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'shape-rendering="crispEdges" font-family="sans-serif" font-size="13">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def text(self, x: float, y: float, text: str, anchor: Anchor = "start", is_upright: bool = False) -> None:
        y += 0.75 * self.line if not is_upright else 0
        turn = f' transform="rotate(-90 {x + 12:.5g} {y:.5g})"' if is_upright else ""
        place = f'x="{x + 12 * is_upright:.5g}" y="{y:.5g}"'
        fill = _hex(TEXT)
        self.parts.append(f'<text {place} fill="{fill}" text-anchor="{anchor}"{turn}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        self.parts.append(f'<rect {place} fill="{_hex(colour)}"/>')

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        self.parts.append(f'<rect {place} fill="none" stroke="{_hex(FRAME)}"/>')

    def cells(self, x: float, y: float, side: int, colours: Tensor) -> None:
        """Rectangles, one for each run of equal cells in a row, so that files stay small."""
        self.parts.append(f'<g transform="translate({x} {y}) scale({side / len(colours):.6g})">')
        for row, line in enumerate(colours.tolist()):
            start = 0
            for end in range(1, len(line) + 1):
                if end == len(line) or line[end] != line[start]:
                    if tuple(line[start]) != WHITE:
                        place = f'x="{start}" y="{row}" width="{end - start}" height="1"'
                        self.parts.append(f'<rect {place} fill="{_hex(line[start])}"/>')
                    start = end
        self.parts.append("</g>")

    def text_of(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


class _PngPen:
    def __init__(self, layout: _Layout) -> None:
        self.image = torch.full((layout.height, layout.width, 3), 255, dtype=torch.uint8, device="cpu")

    def text(self, x: float, y: float, text: str, anchor: Anchor = "start", is_upright: bool = False) -> None:
        dots = _dots(text)
        if is_upright:
            dots = dots.rot90()
            y -= {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * dots.shape[0]
        else:
            x -= {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * dots.shape[1]
            y += 4
        top, left = max(0, round(y)), max(0, round(x))
        place = self.image[top : top + dots.shape[0], left : left + dots.shape[1]]
        place[dots[: place.shape[0], : place.shape[1]]] = torch.tensor(TEXT, dtype=torch.uint8, device="cpu")

    def box(self, x: int, y: int, width: int, height: int, colour: Colour) -> None:
        colours = torch.tensor(colour, dtype=torch.uint8, device="cpu")
        self.image[max(0, y) : y + height, max(0, x) : x + width] = colours

    def frame(self, x: int, y: int, width: int, height: int) -> None:
        for top, tall in ((y, 1), (y + height - 1, 1)):
            self.box(x, top, width, tall, FRAME)
        for left in (x, x + width - 1):
            self.box(left, y, 1, height, FRAME)

    def cells(self, x: int, y: int, side: int, colours: Tensor) -> None:
        zoom = side // len(colours)
        self.image[y : y + side, x : x + side] = colours.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)


def _dots(text: str) -> Tensor:
    """(16, 12 letters) bool: where the ink of a text is, two pixels a dot."""
    codes = [max(0, min(94, code - 32)) for code in text.encode("ascii", "replace")]
    columns = [byte for code in codes for byte in (*FONT[5 * code : 5 * code + 5], 0)]
    bits = torch.tensor(columns, dtype=torch.int64, device="cpu") >> torch.arange(8, device="cpu")[:, None]
    return (bits & 1).bool().repeat_interleave(2, 0).repeat_interleave(2, 1)


def _hex(colour: Sequence[int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def png_bytes(image: Tensor) -> bytes:
    """The PNG file of colours (height, width, 3) in uint8."""
    height, width, _ = image.shape
    data = bytearray(height * (1 + 3 * width))  # NumPy is no dependency
    lines = torch.frombuffer(data, dtype=torch.uint8).view(height, 1 + 3 * width)
    lines[:, 1:] = image.reshape(height, 3 * width)  # after a byte a line that says: no filter
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + _chunk(b"IDAT", zlib.compress(data, 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
