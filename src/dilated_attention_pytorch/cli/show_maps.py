"""What attends to what: counts of every pair, coverage, receptive field over layers, and pictures of them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..block_sparse import build_block_pattern
from ..plan.dilated import branch_heads
from ..plan.pictures import FUTURE, INK, WHITE, Colour, Map, Meaning, scale_of, shade, svg_of, write_picture
from ..reference import multiplicity
from ..spec import DilatedSpec, SparsePatternConfig
from .text import show_count

MAX_PAIRS = 2**26  # of all heads and branches: about half a GiB of counts
FIELD_INK: Colour = (150, 60, 20)  # what layers reach, not what one of them scores
MAX_HEADS = 8  # more panels than these are hard to tell apart
SVG_CELLS = 128  # a side: each run of equal cells is an element


@dataclass(frozen=True)
class Picture:
    """Counts (heads, n, n) of how often a query (row) meets a key (column), and how to name the heads.

    `heads` are those of each layer of `counts`: heads that look alike are drawn once.
    """

    title: str
    counts: Tensor
    heads: tuple[tuple[int, ...], ...]
    is_causal: bool
    facts: dict[str, Any]

    @property
    def n(self) -> int:
        return self.counts.shape[-1]

    def describe_size(self) -> str:
        causal = ", causal" if self.is_causal else ""
        return f"{self.title}; {self.n} positions, {len(self.class_of_head)} head(s){causal}"

    @property
    def class_of_head(self) -> list[int]:
        """Which layer of `counts` is that of each head."""
        classes = {head: number for number, heads in enumerate(self.heads) for head in heads}
        return [classes[head] for head in range(len(classes))]

    @property
    def together(self) -> Tensor:
        """(n, n) counts over all heads."""
        return self.counts[self.class_of_head].sum(0)


def make_picture(options: Namespace) -> Picture:
    """From the options of the command; a ValueError states what does not fit."""
    return _dilated(options) if options.pattern is None else _blocks(options)


def _dilated(options: Namespace) -> Picture:
    spec = DilatedSpec(
        options.segments,
        options.rates,
        options.causal,
        head_mixing=options.mixing,
        head_offsets=options.offsets,
    )
    n, num_heads = options.length, options.heads
    _check_size(n, num_heads * len(spec.branches))
    offsets: list[list[int | None]] = [[None] * len(spec.branches) for _ in range(num_heads)]
    for branch in range(len(spec.branches)):
        for head in branch_heads(spec, branch, num_heads, num_heads):
            offsets[head.head][branch] = head.row
    counts = multiplicity(
        n,
        num_heads,
        spec.segment_lengths,
        spec.dilation_rates,
        is_causal=spec.is_causal,
        head_mixing=spec.head_mixing,
        head_offsets=spec.head_offsets,
    )
    classes: dict[tuple[int | None, ...], list[int]] = {}
    for number, of_head in enumerate(offsets):
        classes.setdefault(tuple(of_head), []).append(number)
    branches = [{"segment_length": w, "dilation_rate": r} for w, r in spec.branches]
    facts = {"branches": branches, "offsets": offsets, "head_mixing": spec.head_mixing}
    title = ", ".join(f"segments of {w} at rate {r}" for w, r in spec.branches)
    heads = tuple(map(tuple, classes.values()))
    return Picture(title, counts[[same[0] for same in heads]], heads, spec.is_causal, facts)


def _blocks(options: Namespace) -> Picture:
    if options.pattern == "adaptive":
        raise ValueError("an adaptive pattern depends on queries and keys, of which there are none to show")
    config = SparsePatternConfig(
        options.pattern,
        options.density,
        options.block_size,
        window_size=options.window,
        global_tokens=options.global_tokens,
        seed=options.seed,
    )
    _check_size(options.length, options.heads)
    pattern = build_block_pattern(
        config,
        options.length,
        options.heads,
        is_causal=options.causal,
        segment_lengths=options.segments,
        dilation_rates=options.rates,
    )
    layouts = pattern.to_dense().to(torch.int64)
    if pattern.is_causal:
        layouts = layouts.tril()
    alike = len(layouts) == 1
    heads = (tuple(range(options.heads)),) if alike else tuple((head,) for head in range(options.heads))
    facts = {
        "pattern": config.pattern_type,
        "block_size": config.block_size,
        "density": pattern.density,
        "density_asked": config.sparsity_ratio,
    }
    title = f"{config.pattern_type}, {pattern.density:.1%} of the blocks of {config.block_size}"
    return Picture(title, layouts, heads, options.causal, facts)


def _check_size(n: int, maps: int) -> None:
    if maps * n * n > MAX_PAIRS:
        most = int((MAX_PAIRS / maps) ** 0.5)
        raise ValueError(
            f"every pair of every head and branch is counted, {show_count(MAX_PAIRS)}at most: with these "
            f"heads and branches --length must be at most {most}, got {n} (shorter segments look the same)"
        )


def describe(picture: Picture, layers: int) -> dict[str, Any]:
    """All numbers of a picture; `layers` is a list of what is reached after 1, 2, ... layers."""
    n = picture.n  # of which a query may see so many at all:
    allowed = torch.arange(1, n + 1).double() if picture.is_causal else torch.full((n,), float(n)).double()
    reached = (picture.counts > 0).any(0)
    share = (picture.counts > 0).sum(-1).double()[picture.class_of_head] / allowed
    by_head, without = share.mean(1).tolist(), (share == 0).sum(1).tolist()
    each_head = picture.counts[picture.class_of_head]
    pairs = torch.bincount(each_head.flatten()).tolist()
    scored = sum(times * count for times, count in enumerate(pairs))
    return {
        "length": n,
        "heads": len(by_head),
        "is_causal": picture.is_causal,
        **picture.facts,
        "head_classes": [list(heads) for heads in picture.heads],
        "scored_pairs": scored,
        "share_of_dense": scored / (len(by_head) * allowed.sum().item()),
        "multiplicity": {str(times): count for times, count in enumerate(pairs) if times and count},
        "coverage": _summary(reached.sum(-1) / allowed),
        "coverage_by_head": by_head,
        "positions_without_keys": without,
        "layers": [
            {"layer": layer, **_summary(field.sum(-1) / allowed)}
            for layer, field in enumerate(receptive_fields(reached, layers), 1)
        ],
    }


def _summary(share: Tensor) -> dict[str, float]:
    """Of all positions, and of the last one, which under a causal mask has the most to see."""
    return {"mean": share.mean().item(), "least": share.min().item(), "last_position": share[-1].item()}


def receptive_fields(reached: Tensor, layers: int) -> list[Tensor]:
    """(n, n) bool after 1, 2, ... layers: a projection mixes the heads, and the residual keeps a row."""
    step = (reached | torch.eye(len(reached), dtype=torch.bool)).float()
    fields = [step > 0]
    for _ in range(1, layers):
        fields.append(fields[-1].float() @ step > 0)
    return fields


def even_cells(n: int, most: int) -> int:
    """Cells a side: one a position if they fit, else a number that divides the positions, if one does."""
    if n <= most:
        return n
    return next((cells for cells in range(most, most // 2, -1) if n % cells == 0), most)


def shrink(counts: Tensor, cells: int) -> Tensor:
    """(cells, cells) float: the mean count of the pairs of each cell; at most one cell a position."""
    n = len(counts)
    cells = min(n, cells)
    edges = torch.arange(cells + 1) * n // cells
    sums = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    sums[1:, 1:] = counts.double().cumsum(0).cumsum(1)
    corners = sums[edges][:, edges]
    totals = corners[1:, 1:] - corners[:-1, 1:] - corners[1:, :-1] + corners[:-1, :-1]
    sizes = edges.diff().double()
    return totals / (sizes[:, None] * sizes)


def make_panels(picture: Picture, layers: int) -> list[tuple[str, Tensor, Colour]]:
    """Name, counts (n, n) and colour of each: all heads together, each kind of head, what layers reach."""
    panels = [("all heads", picture.together, INK)]
    if len(picture.heads) > 1:
        for counts, heads in list(zip(picture.counts, picture.heads, strict=True))[:MAX_HEADS]:
            panels.append((f"head {', '.join(map(str, heads))}", counts, INK))
    fields = receptive_fields(picture.together > 0, layers)
    return panels + [(f"after {i} layers", x.long(), FIELD_INK) for i, x in enumerate(fields[1:], 2)]


def picture_parts(picture: Picture, layers: int, most: int) -> tuple[str, list[Map], list[Meaning]]:
    """Title, maps of at most so many cells a side, and legend. A map has colours of its own."""
    maps = []
    for name, counts, ink in make_panels(picture, layers):
        share = shrink(counts, even_cells(picture.n, most))
        share = share / share.max().clamp(min=1e-12)
        maps.append(Map(name, shade(share, ink, is_causal=picture.is_causal), picture.n))
    legend = [Meaning("query attends to key: the darker, the more often", scale_of(INK))]
    legend += [Meaning("reached through layers", scale_of(FIELD_INK))] if layers > 1 else []
    legend += [Meaning("not attended", (WHITE,))]
    legend += [Meaning("future, never seen", (FUTURE,))] if picture.is_causal else []
    kind = "Dilated attention" if "branches" in picture.facts else "Block-sparse attention"
    return f"{kind}: {picture.describe_size()}", maps, legend


def draw(picture: Picture, layers: int, path: Path, pixels: int) -> int:
    """Writes .svg or .png with panels of about so many pixels; returns the number of panels."""
    most = min(SVG_CELLS, pixels) if path.suffix.lower() == ".svg" else pixels
    title, maps, legend = picture_parts(picture, layers, most)
    write_picture(path, title, maps, legend, pixels)
    return len(maps)


def svg_of_options(options: Namespace, svg_id: str) -> str:
    """The picture that the command writes with these options as SVG."""
    parts = picture_parts(make_picture(options), options.layers, min(SVG_CELLS, options.pixels))
    return svg_of(*parts, options.pixels, svg_id)
