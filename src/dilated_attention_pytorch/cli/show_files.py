"""Pictures as files: all heads together, each kind of head and what layers reach, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..plan.pictures import FUTURE, INK, WHITE, Colour, Map, Meaning, scale_of, shade, svg_of, write_picture
from .show_numbers import Picture, even_cells, receptive_fields, shrink

FIELD_INK: Colour = (150, 60, 20)  # what layers reach, not what one of them scores
MAX_HEADS = 8  # more panels than these are hard to tell apart
SVG_CELLS = 128  # a side: each run of equal cells is an element


class Panel(NamedTuple):
    """A named map (n, n) of counts and its colour."""

    name: str
    counts: Tensor
    ink: Colour


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
    most = min(SVG_CELLS, pixels) if path.suffix.lower() == ".svg" else pixels
    write_picture(path, _title(picture), _maps(picture, panels, most), _legend(picture, panels), pixels)
    return len(panels)


def svg_text(picture: Picture, panels: list[Panel], pixels: int, *, svg_id: str = "pattern") -> str:
    """The picture that `draw` writes as SVG."""
    maps = _maps(picture, panels, min(SVG_CELLS, pixels))
    return svg_of(_title(picture), maps, _legend(picture, panels), pixels, svg_id)


def _maps(picture: Picture, panels: list[Panel], most: int) -> list[Map]:
    """The darker, the more often the pairs of a cell meet, within a panel."""
    found = []
    for panel in panels:
        share = shrink(panel.counts, even_cells(picture.n, most))
        share = share / share.max().clamp(min=1e-12)
        found.append(Map(panel.name, shade(share, panel.ink, is_causal=picture.is_causal), picture.n))
    return found


def _title(picture: Picture) -> str:
    heads = sum(map(len, picture.heads))
    causal = ", causal" if picture.is_causal else ""
    kind = "Dilated attention" if "branches" in picture.facts else "Block-sparse attention"
    return f"{kind}: {picture.title}; {picture.n} positions, {heads} head(s){causal}"


def _legend(picture: Picture, panels: list[Panel]) -> list[Meaning]:
    found = [Meaning("query attends to key: the darker, the more often", scale_of(INK))]
    if any(panel.ink == FIELD_INK for panel in panels):
        found.append(Meaning("reached through layers", scale_of(FIELD_INK)))
    found.append(Meaning("not attended", (WHITE,)))
    return [*found, Meaning("future, never seen", (FUTURE,))] if picture.is_causal else found
