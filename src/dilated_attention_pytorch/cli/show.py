"""Draws what attends to what, in the terminal or as a picture (--out), for dilated attention or for a block
pattern (--pattern): offsets of each head, multiplicity (how many branches connect a pair), coverage (of the
positions that a token may see, the share it reaches in one layer) and the receptive field over layers."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .text import int_list, paint, positive_int, print_json, show_count

if TYPE_CHECKING:
    from torch import Tensor

    from .show_maps import Picture

SUFFIXES = (".png", ".svg")
PATTERNS = ("dilated_sparse", "local_window", "global_local", "strided", "random", "hierarchical", "adaptive")
SHADES = "·░▒▓█"
EPILOG = """\
examples:
  dilated-attention show
  dilated-attention show --length 512 --segments 64,256,512 --rates 1,4,8 --heads 8 --causal --layers 3
  dilated-attention show --length 1024 --pattern local_window --density 0.1 --block-size 32 --out window.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    number: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    add("--length", "--lengths", default=32, help="positions (default: 32)", **number)
    add("--segments", type=int_list, default=(8, 32), metavar="W,...", help="segment lengths (default: 8,32)")
    add("--rates", type=int_list, default=(1, 4), metavar="R,...", help="dilation rates (default: 1,4)")
    add("--heads", default=4, help="heads (default: 4)", **number)
    add("--causal", action="store_true", help="no query sees a later key")
    add("--mixing", choices=("all", "grouped"), default="all", help="head_mixing (default: all)")
    add("--offsets", choices=("interleaved", "blocked"), default="interleaved", help="head_offsets")
    add("--layers", default=1, help="what is reached after so many layers (default: 1)", **number)
    add = parser.add_argument_group("block patterns, instead of dilated attention").add_argument
    add("--pattern", choices=PATTERNS, help="type of the pattern")
    add("--density", type=float, default=0.1, help="share of the blocks that is kept (default: 0.1)")
    add("--block-size", default=4, help="(default: 4)", **number)
    add("--window", help="window_size, in tokens", **number)
    add("--global-tokens", help="first tokens, seen by all", **number)
    add("--seed", type=int, default=0, help="of random patterns (default: 0)")
    add = parser.add_argument_group("output").add_argument
    add("--head", type=int, metavar="H", help="draw this head alone in the terminal")
    add("--out", type=Path, metavar="FILE", help="write a picture, .png or .svg")
    add("--pixels", type=positive_int, default=320, help="side of a panel of the picture (default: 320)")
    add("--json", action="store_true", help="print the numbers as JSON, draw nothing in text")


def run(options: argparse.Namespace) -> int:
    from .show_maps import describe, draw, make_picture

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
    for line in _lines(picture, numbers, options):
        print(line)
    if options.out is not None:
        print(f"\n{panels} panels written to {options.out}")
    return 0


def _lines(picture: Picture, numbers: Mapping[str, Any], options: argparse.Namespace) -> Iterator[str]:
    from .show_maps import receptive_fields

    yield paint(picture.describe_size(), "bold")
    name, counts = "all heads together", picture.together
    if options.head is not None:
        name, counts = f"head {options.head}", picture.counts[picture.class_of_head[options.head]]
    cells = _cells(picture.n)
    legend = "the number is how often a pair meets"
    if cells < picture.n:
        legend = f"each cell stands for {picture.n / cells:.3g} x {picture.n / cells:.3g} positions"
    yield f"\n{name}: query down, key across; {legend}"
    yield from _map(counts, picture.is_causal)
    if options.layers > 1:
        yield f"\nreached after {options.layers} layers"
        yield from _map(receptive_fields(picture.together > 0, options.layers)[-1].long(), picture.is_causal)
    yield ""
    yield from _facts(numbers)


def _cells(n: int) -> int:
    """Cells a side, as many as the terminal has room for."""
    from .show_maps import even_cells

    return even_cells(n, min(40, max(8, (shutil.get_terminal_size().columns - 4) // 2)))


def _map(counts: Tensor, is_causal: bool) -> Iterator[str]:
    """Counts where every position has a cell, else shades; two characters a cell."""
    from .show_maps import shrink

    cells = _cells(len(counts))
    rows = shrink(counts, cells).tolist()
    most = max(map(max, rows)) or 1.0
    for y, row in enumerate(rows):
        seen = row[: y + 1] if is_causal else row
        yield "  " + "".join(_cell(value, most, cells == len(counts)) for value in seen)


def _cell(value: float, most: float, is_exact: bool) -> str:
    if value <= 0:
        return paint("· ", "dim")
    if is_exact:
        count = round(value)
        return paint(f"{count} " if count < 10 else "+ ", "cyan" if count == 1 else "yellow")
    shade = SHADES[min(len(SHADES) - 1, 1 + int((len(SHADES) - 1) * (value / most) ** 0.5 * 0.999))]
    return paint(shade * 2, "cyan")


def _facts(numbers: Mapping[str, Any]) -> Iterator[str]:
    dense = f"{numbers['share_of_dense']:.1%} of dense attention"
    yield f"scored pairs      {show_count(numbers['scored_pairs']).strip()} over all heads, {dense}"
    if "branches" in numbers:
        for index, branch in enumerate(numbers["branches"]):
            offsets = ["-" if each[index] is None else str(each[index]) for each in numbers["offsets"]]
            name = f"{branch['segment_length']} / {branch['dilation_rate']}"
            shown = " ".join(offsets[:32]) + (" ..." if len(offsets) > 32 else "")
            yield f"branch {name:<10} offset of each head: {shown}"
        met = ", ".join(f"{count} pairs {times}x" for times, count in numbers["multiplicity"].items())
        yield f"multiplicity      {met or 'no pair meets'}"
    else:
        kept, asked = numbers["density"], numbers["density_asked"]
        yield f"density           {kept:.1%} of the blocks are kept, {asked:.1%} were asked for"
    cover = numbers["coverage"]
    yield (
        f"coverage          one layer, all heads: {cover['mean']:.1%} of the positions a token may see; "
        f"the last token {cover['last_position']:.1%}"
    )
    mean = sum(numbers["coverage_by_head"]) / numbers["heads"]
    yield f"                  one layer, one head: {mean:.1%}"
    without = numbers["positions_without_keys"]
    for count in dict.fromkeys(filter(None, without)):
        heads = ", ".join(str(head) for head, of_head in enumerate(without) if of_head == count)
        yield f"                  head {heads}: {count} positions reach nothing"
    for layer in numbers["layers"][1:]:
        yield (
            f"after {layer['layer']} layers    {layer['mean']:.1%} of the positions a token may see; "
            f"the last token {layer['last_position']:.1%}"
        )


def svg_of(words: str, pixels: int, svg_id: str) -> str:
    """The picture that the command writes with these options."""
    from .show_maps import svg_of_options

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return svg_of_options(parser.parse_args([*words.split(), "--pixels", str(pixels)]), svg_id)
