"""`show`: what attends to what: counts of every pair, coverage, receptive field over layers, pictures."""

from __future__ import annotations

import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..block_sparse import build_block_pattern
from ..plan import pictures
from ..plan.dilated import branch_heads
from ..plan.pictures import FUTURE, INK, WHITE, Colour, Map, Meaning, scale_of, shade, write_picture
from ..reference import multiplicity
from ..spec import DilatedSpec, SparsePatternConfig
from . import arguments
from .text import labelled, paint, print_json, show_count

SUFFIXES = (".png", ".svg")
SHADES = "·░▒▓█"
MAX_PAIRS = 2**26  # of all heads and branches: about half a GiB of counts
FIELD_INK: Colour = (150, 60, 20)  # what layers reach, not what one of them scores
MAX_HEADS = 8  # more panels than these are hard to tell apart
SVG_CELLS = 128  # a side: each run of equal cells is an element


@dataclass(frozen=True)
class Picture:
    """Counts (heads, n, n) of how often a query (row) meets a key (column).

    `classes` are the heads that look alike, which are drawn once.
    """

    title: str
    counts: Tensor
    classes: list[list[int]]
    is_causal: bool
    facts: dict[str, Any]

    @property
    def n(self) -> int:
        return self.counts.shape[-1]

    @property
    def size(self) -> str:
        causal = ", causal" if self.is_causal else ""
        return f"{self.title}; {self.n} positions, {len(self.counts)} head(s){causal}"


def run(options: Namespace) -> int:
    """Prints the map and its numbers, and writes the picture that --out names."""
    if options.out is not None and options.out.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--out must end in {' or '.join(SUFFIXES)}, got {options.out}")
    if options.head is not None and not 0 <= options.head < options.heads:
        raise ValueError(f"--head must lie in 0 to {options.heads - 1}, got {options.head}")
    picture = make_picture(options)
    numbers = describe(picture, options.layers)
    panels = 0 if options.out is None else draw(picture, options.layers, options.out, options.pixels)
    if options.json:
        print_json(numbers)
        return 0
    print(*text_map(picture, options.head, options.layers), "", *text_facts(numbers), sep="\n")
    if options.out is not None:
        print(f"\n{panels} panels written to {options.out}")
    return 0


def make_picture(options: Namespace) -> Picture:
    """From the options of the command; a ValueError states what does not fit."""
    return _dilated(options) if options.pattern is None else _blocks(options)


def _dilated(options: Namespace) -> Picture:
    mixing: dict[str, Any] = {"head_mixing": options.mixing, "head_offsets": options.offsets}
    spec = DilatedSpec(options.segments, options.rates, options.causal, **mixing)
    n, num_heads = options.length, options.heads
    _check_size(n, num_heads * len(spec.branches))
    offsets: list[list[int | None]] = [[None] * len(spec.branches) for _ in range(num_heads)]
    for branch in range(len(spec.branches)):
        for head in branch_heads(spec, branch, num_heads, num_heads):
            offsets[head.head][branch] = head.row
    branches = (spec.segment_lengths, spec.dilation_rates)
    counts = multiplicity(n, num_heads, *branches, is_causal=spec.is_causal, **mixing)
    classes: dict[tuple[int | None, ...], list[int]] = {}
    for number, of_head in enumerate(offsets):
        classes.setdefault(tuple(of_head), []).append(number)
    facts = {
        "branches": [{"segment_length": w, "dilation_rate": r} for w, r in spec.branches],
        "offsets": offsets,
        "head_mixing": spec.head_mixing,
    }
    title = ", ".join(f"segments of {w} at rate {r}" for w, r in spec.branches)
    return Picture(title, counts, [*classes.values()], spec.is_causal, facts)


def _blocks(options: Namespace) -> Picture:
    if options.pattern == "adaptive":
        raise ValueError("an adaptive pattern depends on queries and keys, of which there are none to show")
    n, num_heads = options.length, options.heads
    more = {"window_size": options.window, "global_tokens": options.global_tokens, "seed": options.seed}
    config = SparsePatternConfig(options.pattern, options.density, options.block_size, **more)
    _check_size(n, num_heads)
    branches = {"segment_lengths": options.segments, "dilation_rates": options.rates}
    pattern = build_block_pattern(config, n, num_heads, is_causal=options.causal, **branches)
    layouts = pattern.to_dense().long()
    counts = (layouts.tril() if pattern.is_causal else layouts).expand(num_heads, n, n)
    heads = list(range(num_heads))
    facts = {
        "pattern": config.pattern_type,
        "block_size": config.block_size,
        "density": pattern.density,
        "density_asked": config.sparsity_ratio,
    }
    title = f"{config.pattern_type}, {pattern.density:.1%} of the blocks of {config.block_size}"
    classes = [heads] if len(layouts) == 1 else [[head] for head in heads]
    return Picture(title, counts, classes, options.causal, facts)


def _check_size(n: int, maps: int) -> None:
    if maps * n * n > MAX_PAIRS:
        most = int((MAX_PAIRS / maps) ** 0.5)
        raise ValueError(
            f"every pair of every head and branch is counted, {show_count(MAX_PAIRS)}at most: with these "
            f"heads and branches --length must be at most {most}, got {n} (shorter segments look the same)"
        )


def describe(picture: Picture, layers: int) -> dict[str, Any]:
    """All numbers of a picture; `layers` is a list of what is reached after 1, 2, ... layers."""
    counts, n = picture.counts, picture.n  # of which a query may see so many at all:
    allowed = torch.arange(1, n + 1).double() if picture.is_causal else torch.full((n,), float(n)).double()
    reached = (counts > 0).any(0)
    share = (counts > 0).sum(-1).double() / allowed
    pairs = torch.bincount(counts.flatten()).tolist()
    defined = sum(times * count for times, count in enumerate(pairs))
    return {
        "length": n,
        "heads": len(counts),
        "is_causal": picture.is_causal,
        **picture.facts,
        "head_classes": picture.classes,
        "defined_pairs": defined,
        "share_of_dense": defined / (len(counts) * allowed.sum().item()),
        "multiplicity": {str(times): count for times, count in enumerate(pairs) if times and count},
        "coverage": _summary(reached.sum(-1) / allowed),
        "coverage_by_head": share.mean(1).tolist(),
        "positions_without_keys": (share == 0).sum(1).tolist(),
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
    sizes = edges.diff().double()
    return corners.diff(dim=0).diff(dim=1) / (sizes[:, None] * sizes)


def text_map(picture: Picture, head: int | None, layers: int) -> Iterator[str]:
    """Title and maps of one head or of all, and of what layers reach, as large as the terminal has room."""
    cells = even_cells(picture.n, min(40, max(8, (shutil.get_terminal_size().columns - 4) // 2)))
    side = f"{picture.n / cells:.3g}"
    is_exact = cells == picture.n
    legend = "the number is how often a pair meets"
    legend = legend if is_exact else f"each cell stands for {side} x {side} positions"
    name = "all heads together" if head is None else f"head {head}"
    together = picture.counts.sum(0)
    maps = {f"{name}: query down, key across; {legend}": together if head is None else picture.counts[head]}
    if layers > 1:
        maps[f"reached after {layers} layers"] = receptive_fields(together > 0, layers)[-1].long()
    yield paint(picture.size, "bold")
    for name, counts in maps.items():
        yield f"\n{name}"
        rows = shrink(counts, cells).tolist()
        most = max(map(max, rows)) or 1.0
        for y, row in enumerate(rows):
            seen = row[: y + 1] if picture.is_causal else row
            yield "  " + "".join(_cell(value, most, is_exact) for value in seen)


def _cell(value: float, most: float, is_exact: bool) -> str:
    """Two characters: a count where every position has a cell, else a shade."""
    if value <= 0:
        return paint("· ", "dim")
    if is_exact:
        count = round(value)
        return paint(f"{count} " if count < 10 else "+ ", "cyan" if count == 1 else "yellow")
    shade = SHADES[min(len(SHADES) - 1, 1 + int((len(SHADES) - 1) * (value / most) ** 0.5 * 0.999))]
    return paint(shade * 2, "cyan")


def text_facts(numbers: Mapping[str, Any]) -> Iterator[str]:
    """The numbers of `describe` in words."""
    defined, dense = show_count(numbers["defined_pairs"]).strip(), numbers["share_of_dense"]
    yield from labelled("defined pairs", f"{defined} over all heads, {dense:.1%} of dense attention")
    for index, branch in enumerate(numbers.get("branches", ())):
        offsets = ["-" if each[index] is None else str(each[index]) for each in numbers["offsets"]]
        shown = " ".join(offsets[:32]) + (" ..." if len(offsets) > 32 else "")
        name = f"branch {branch['segment_length']} / {branch['dilation_rate']}"
        yield from labelled(name, f"offset of each head: {shown}")
    if "branches" in numbers:
        met = ", ".join(f"{count} pairs {times}x" for times, count in numbers["multiplicity"].items())
        yield from labelled("multiplicity", met or "no pair meets")
    else:
        kept, asked = numbers["density"], numbers["density_asked"]
        yield from labelled("density", f"{kept:.1%} of the blocks are kept, {asked:.1%} were asked for")
    mean, without = sum(numbers["coverage_by_head"]) / numbers["heads"], numbers["positions_without_keys"]
    unreached = []
    for count in dict.fromkeys(filter(None, without)):
        heads = ", ".join(str(head) for head, of_head in enumerate(without) if of_head == count)
        unreached.append(f"head {heads}: {count} positions reach nothing")
    of_all = f"one layer, all heads: {_coverage(numbers['coverage'])}"
    yield from labelled("coverage", of_all, f"one layer, one head: {mean:.1%}", *unreached)
    for layer in numbers["layers"][1:]:
        yield from labelled(f"after {layer['layer']} layers", _coverage(layer))


def _coverage(share: Mapping[str, float]) -> str:
    last = f"the last token {share['last_position']:.1%}"
    return f"{share['mean']:.1%} of the positions a token may see; {last}"


def picture_parts(picture: Picture, layers: int, most: int) -> tuple[str, list[Map], list[Meaning]]:
    """Title, maps of at most so many cells a side, and legend.

    The maps are those of all heads together, of each class of heads, and of what layers reach, each with
    colours of its own.
    """
    together = picture.counts.sum(0)
    panels = [("all heads", together, INK)]
    for heads in picture.classes[:MAX_HEADS] if len(picture.classes) > 1 else ():
        panels.append((f"head {', '.join(map(str, heads))}", picture.counts[heads[0]], INK))
    fields = receptive_fields(together > 0, layers)
    panels += [(f"after {i} layers", field.long(), FIELD_INK) for i, field in enumerate(fields[1:], 2)]
    maps = []
    for name, counts, ink in panels:
        share = shrink(counts, even_cells(picture.n, most))
        share = share / share.max().clamp(min=1e-12)
        maps.append(Map(name, shade(share, ink, is_causal=picture.is_causal), picture.n))
    legend = [Meaning("query attends to key: the darker, the more often", scale_of(INK))]
    legend += [Meaning("reached through layers", scale_of(FIELD_INK))] if layers > 1 else []
    legend += [Meaning("not attended", (WHITE,))]
    legend += [Meaning("future, never seen", (FUTURE,))] if picture.is_causal else []
    kind = "Dilated attention" if "branches" in picture.facts else "Block-sparse attention"
    return f"{kind}: {picture.size}", maps, legend


def draw(picture: Picture, layers: int, path: Path, pixels: int) -> int:
    """Writes .svg or .png with panels of about so many pixels; returns the number of panels."""
    most = min(SVG_CELLS, pixels) if path.suffix.lower() == ".svg" else pixels
    title, maps, legend = picture_parts(picture, layers, most)
    write_picture(path, title, maps, legend, pixels)
    return len(maps)


def svg_of(words: str, pixels: int, svg_id: str) -> str | None:
    """The picture that the command writes with these options; None without matplotlib."""
    parser = ArgumentParser()
    arguments.show(parser)
    options = parser.parse_args(words.split())
    parts = picture_parts(make_picture(options), options.layers, min(SVG_CELLS, pixels))
    try:
        return pictures.svg_of(*parts, pixels, svg_id)
    except ModuleNotFoundError:
        return None
