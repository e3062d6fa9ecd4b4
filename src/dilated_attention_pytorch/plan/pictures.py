"""Maps of what attends to what, with title, axes and legend, as PNG or SVG: drawn by matplotlib, an extra."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

import torch
from torch import Tensor

from ..checks import check_positive_int

if TYPE_CHECKING:
    from .block_pattern import BlockPattern

Colour = tuple[int, int, int]

INK: Colour = (24, 52, 110)
WHITE: Colour = (255, 255, 255)
FUTURE: Colour = (236, 236, 240)
FRAME: Colour = (120, 120, 120)
COLUMNS = 4  # maps side by side
DPI = {"png": 64, "svg": 72}  # pixels an inch: no size of a PNG is rounded, and those of an SVG are points
LETTER, LINE = 8, 18  # pixels of a letter, at most, and of a line of text
LABEL = 6 * LINE  # pixels of the label of an axis
LEAST_WIDTH = 320  # a narrow picture gets a margin rather than a title in pieces
SVG = "http://www.w3.org/2000/svg"


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
    colours = shade(torch.arange(1, steps + 1, device="cpu")[None] / steps, ink)[0]
    return tuple((r, g, b) for r, g, b in colours.tolist())


def draw_pattern(pattern: BlockPattern, path: str | Path, layout: int, pixels: int) -> None:
    """One layout of a pattern; see `BlockPattern.draw`."""
    check_positive_int("pixels", pixels)
    share = pattern.coverage(layout, pixels)
    n, size = pattern.n, pattern.block_size
    title = f"Block pattern: {n} positions, blocks of {size}, {pattern.density:.1%} kept"
    title += f", layout {layout} (of {len(pattern)})" if len(pattern) > 1 else ""
    title += ", causal" if pattern.is_causal else ""
    is_exact = len(share) == pattern.rows
    kept = "kept block" if is_exact else "kept blocks: the darker, the more"
    legend = [Meaning(kept, (INK,) if is_exact else scale_of(INK)), Meaning("not kept", (WHITE,))]
    if pattern.is_causal:
        legend.append(Meaning("future, never seen", (FUTURE,)))
    painted = Map("", shade(share, is_causal=pattern.is_causal), pattern.rows * size)
    write_picture(path, title, [painted], legend, pixels)


def write_picture(
    path: str | Path, title: str, maps: Sequence[Map], legend: Sequence[Meaning], pixels: int
) -> None:
    """As SVG, if the name ends in .svg, or else as PNG; cells of a PNG have whole pixels, of an SVG not."""
    if Path(path).suffix.lower() == ".svg":
        Path(path).write_text(svg_of(title, maps, legend, pixels, "pattern"), encoding="utf-8")
        return
    cells = len(maps[0].colours)
    Path(path).write_bytes(_draw("png", title, maps, legend, max(1, pixels // cells) * cells))


def svg_of(title: str, maps: Sequence[Map], legend: Sequence[Meaning], pixels: int, svg_id: str) -> str:
    """The picture as an `<svg>` element with maps of so many pixels."""
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(_draw("svg", title, maps, legend, pixels))
    for group in root.iter(f"{{{SVG}}}g"):
        group.attrib.pop("id", None)  # the same in every picture
    root.attrib |= {name: root.attrib[name].removesuffix("pt") for name in ("width", "height")}
    root.attrib |= {"id": svg_id, "role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


def _draw(kind: str, title: str, maps: Sequence[Map], legend: Sequence[Meaning], side: int) -> bytes:
    """A file with maps of so many pixels a side."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
        from matplotlib.transforms import IdentityTransform
    except ImportError as error:
        advice = "pictures are drawn by matplotlib: pip install 'dilated-attention[charts]'"
        raise ModuleNotFoundError(advice, name="matplotlib") from error
    columns = min(COLUMNS, len(maps))
    left = 2 * LINE + LETTER * len(str(maps[0].n))  # of a map, for its axis
    step, right = left + side + LINE, 2 * LINE  # a map with its axis; and half of a last tick
    width = max(columns * step + right, LEAST_WIDTH)
    lines = textwrap.wrap(title, (width - 2 * LINE) // LETTER)
    top, map_height = LINE * (len(lines) + 1), max(side, LABEL)
    row_height = map_height + 4 * LINE
    height = top + row_height * -(-len(maps) // columns) + LINE * (len(legend) + 1)
    dpi = DPI[kind]
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "map", "text.parse_math": False}
    with rc_context({**settings, "font.family": "sans-serif", "font.size": 13 * 72 / dpi}):
        figure = Figure((width / dpi, height / dpi), dpi)
        figure.text(LINE / width, 1 - LINE / 2 / height, "\n".join(lines), va="top")
        for number, each in enumerate(maps):
            x = left + number % columns * step
            y = height - top - number // columns * row_height - LINE - (map_height + side) // 2
            frame: dict[str, Any] = {"transform": IdentityTransform(), "fc": _rgb(FRAME), "zorder": -1}
            figure.add_artist(Rectangle((x - 1, y - 1), side + 2, side + 2, **frame))
            _draw_map(figure.add_axes((x / width, y / height, side / width, side / height)), each, side)
        _draw_legend(figure, legend)
        drawn = io.BytesIO()
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type") if kind == "svg" else ("Software",))
        figure.savefig(drawn, format=kind, dpi="figure", metadata=unsaid)
    return drawn.getvalue()


def _draw_map(axes: Any, each: Map, side: int) -> None:
    name = textwrap.shorten(each.name, max(8, side // LETTER), placeholder=" ...")
    axes.set_title(name, loc="left", fontsize="medium")
    axes.imshow(each.colours.numpy(), interpolation="none", extent=(0, each.n, each.n, 0), aspect="auto")
    axes.set(xlabel="key position", ylabel="query position")
    # The frame lies behind the map, and ticks begin outside of it: lines would cover pixels of the map.
    axes.spines[:].set(visible=False, position=("outward", 2 * 72 / axes.figure.dpi))
    # From 0 to n in equal parts of whole positions, as many as their texts leave room for.
    room = side / (LETTER * (len(str(each.n)) + 1))
    parts = next((p for p in (4, 3, 5, 2) if each.n % p == 0 and p <= room), 1)
    ticks = range(0, each.n + 1, each.n // parts)
    axes.set(xticks=ticks, yticks=ticks)


def _draw_legend(figure: Any, legend: Sequence[Meaning]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    handles = [tuple(Patch(fc=_rgb(c), ec=_rgb(FRAME)) for c in each.colours) for each in legend]
    side_by_side = {tuple: HandlerTuple(ndivide=None, pad=0)}
    texts = [each.text for each in legend]
    figure.legend(handles, texts, loc="lower left", frameon=False, handler_map=side_by_side)


def _rgb(colour: Colour) -> tuple[float, ...]:
    return tuple(part / 255 for part in colour)
