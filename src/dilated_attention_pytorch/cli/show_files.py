"""Pictures as files: panels side by side, as SVG with names or as PNG without."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.pattern_files import png_bytes
from .show_numbers import Picture, receptive_fields, shrink

INK = torch.tensor([24.0, 52.0, 110.0])
FIELD_INK = torch.tensor([150.0, 60.0, 20.0])  # what layers reach, not what one of them scores
FUTURE = torch.tensor([236.0, 236.0, 240.0])
MAX_HEADS = 8  # more panels than these are hard to tell apart
CELLS = 256


class Panel(NamedTuple):
    """A named map (n, n) of counts and its colour."""

    name: str
    counts: Tensor
    ink: Tensor


def make_panels(picture: Picture, layers: int) -> list[Panel]:
    """All heads together, each kind of head, and what is reached after each layer from the second on."""
    panels = [Panel("all heads", picture.together, INK)]
    if len(picture.heads) > 1:
        for counts, heads in list(zip(picture.counts, picture.heads, strict=True))[:MAX_HEADS]:
            panels.append(Panel(f"head {', '.join(map(str, heads))}", counts, INK))
    fields = receptive_fields(picture.together > 0, layers)
    panels += [Panel(f"after {i} layers", x.long(), FIELD_INK) for i, x in enumerate(fields[1:], 2)]
    return panels


def draw(picture: Picture, layers: int, path: Path, pixels: int) -> int:
    """Writes .svg or .png with panels of about so many pixels; returns the number of panels."""
    panels = make_panels(picture, layers)
    if path.suffix.lower() == ".svg":
        path.write_text(svg_text(picture, panels, pixels), encoding="utf-8")
    else:
        path.write_bytes(png_bytes(_image(picture, panels, pixels)))
    return len(panels)


def _colours(panel: Panel, cells: int, is_causal: bool) -> Tensor:
    """(cells, cells, 3), 0 to 255: the darker, the more often its pairs meet; a root keeps few visible."""
    share = shrink(panel.counts, cells)
    shade = (share / share.max().clamp(min=1e-12)).sqrt().unsqueeze(-1).float()
    paper = torch.full((*share.shape, 3), 255.0)
    if is_causal:
        future = torch.ones_like(share, dtype=torch.bool).triu(1)
        paper[future] = FUTURE
    return (paper + shade * (panel.ink - paper)).round()


def _image(picture: Picture, panels: list[Panel], pixels: int) -> Tensor:
    """(height, width, 3) uint8: the panels from left to right, four a row, framed."""
    images = []
    for panel in panels:
        colours = _colours(panel, min(CELLS, pixels), picture.is_causal)
        zoom = max(1, pixels // len(colours))
        image = colours.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)
        framed = torch.nn.functional.pad(image.permute(2, 0, 1), (1, 1, 1, 1), value=120.0)
        images.append(torch.nn.functional.pad(framed, (8, 8, 8, 8), value=255.0))
    rows = []
    for start in range(0, len(images), 4):
        row = torch.cat(images[start : start + 4], dim=2)
        missing = min(4, len(images)) * images[0].shape[2] - row.shape[2]
        rows.append(torch.nn.functional.pad(row, (0, missing), value=255.0))
    return torch.cat(rows, dim=1).permute(1, 2, 0).to(torch.uint8)


def svg_text(picture: Picture, panels: list[Panel], pixels: int, *, svg_id: str = "pattern") -> str:
    """Rectangles, one for each run of equal cells in a row, so that files stay small."""
    columns, gap = min(4, len(panels)), 28
    width = columns * (pixels + gap) + gap
    height = -(-len(panels) // columns) * (pixels + gap + 8) + gap + 20
    parts = [
        f'<svg id="{svg_id}" role="img" aria-label="{escape(_caption(picture))}" '
        f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" shape-rendering="crispEdges" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{gap}" y="22" font-size="15">{escape(_caption(picture))}</text>',
    ]
    for number, panel in enumerate(panels):
        x = gap + number % columns * (pixels + gap)
        y = 52 + number // columns * (pixels + gap + 8)
        parts.append(f'<text x="{x}" y="{y - 6}">{escape(panel.name)}</text>')
        colours = _colours(panel, min(CELLS // 2, pixels), picture.is_causal)
        parts.append(f'<g transform="translate({x} {y}) scale({pixels / len(colours):.6g})">')
        parts += _rectangles(colours)
        parts.append("</g>")
        frame = f'width="{pixels}" height="{pixels}" fill="none" stroke="#787878"'
        parts.append(f'<rect x="{x}" y="{y}" {frame}/>')
    return "\n".join([*parts, "</svg>", ""])


def _caption(picture: Picture) -> str:
    causal = ", causal" if picture.is_causal else ""
    return f"{picture.title}, {picture.n} positions{causal} (query down, key across)"


def _rectangles(colours: Tensor) -> list[str]:
    found = []
    rows = colours.long().tolist()
    for y, row in enumerate(rows):
        start = 0
        for x in range(1, len(row) + 1):
            if x == len(row) or row[x] != row[start]:
                if row[start] != [255, 255, 255]:
                    red, green, blue = row[start]
                    colour = f"#{red:02x}{green:02x}{blue:02x}"
                    found.append(
                        f'<rect x="{start}" y="{y}" width="{x - start}" height="1" fill="{colour}"/>'
                    )
                start = x
    return found
