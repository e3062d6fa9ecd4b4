"""Draws what attends to what, in the terminal or as a picture (--out), for dilated attention or for a block
pattern (--pattern): offsets of each head, multiplicity (how many branches connect a pair), coverage (of the
positions that a token may see, the share it reaches in one layer) and the receptive field over layers."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..flags import int_list, positive_int
from .text import paint, print_json, show_count

if TYPE_CHECKING:
    from torch import Tensor

    from .show_numbers import Picture

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
    parser.add_argument(
        "--length", "--lengths", type=positive_int, default=32, metavar="N", help="positions (default: 32)"
    )
    parser.add_argument(
        "--segments", type=int_list, default=(8, 32), metavar="W,...", help="segment lengths (default: 8,32)"
    )
    parser.add_argument(
        "--rates", type=int_list, default=(1, 4), metavar="R,...", help="dilation rates (default: 1,4)"
    )
    parser.add_argument("--heads", type=positive_int, default=4, metavar="H", help="heads (default: 4)")
    parser.add_argument("--causal", action="store_true", help="no query sees a later key")
    parser.add_argument(
        "--mixing", choices=("all", "grouped"), default="all", help="head_mixing (default: all)"
    )
    parser.add_argument(
        "--offsets", choices=("interleaved", "blocked"), default="interleaved", help="head_offsets"
    )
    parser.add_argument(
        "--layers",
        type=positive_int,
        default=1,
        metavar="L",
        help="what is reached after L layers (default: 1)",
    )
    blocks = parser.add_argument_group("block patterns, instead of dilated attention")
    blocks.add_argument("--pattern", choices=PATTERNS, help="type of the pattern")
    blocks.add_argument(
        "--density", type=float, default=0.1, help="share of the blocks that is kept (default: 0.1)"
    )
    blocks.add_argument("--block-size", type=positive_int, default=4, metavar="B", help="(default: 4)")
    blocks.add_argument("--window", type=positive_int, metavar="TOKENS", help="window_size")
    blocks.add_argument(
        "--global-tokens", type=positive_int, metavar="TOKENS", help="first tokens, seen by all"
    )
    blocks.add_argument("--seed", type=int, default=0, help="of random patterns (default: 0)")
    output = parser.add_argument_group("output")
    output.add_argument("--head", type=int, metavar="H", help="draw this head alone in the terminal")
    output.add_argument("--out", type=Path, metavar="FILE", help="write a picture, .png or .svg")
    output.add_argument(
        "--pixels", type=positive_int, default=320, help="side of a panel of the picture (default: 320)"
    )
    output.add_argument("--json", action="store_true", help="print the numbers as JSON, draw nothing in text")


def run(options: argparse.Namespace) -> int:
    from .show_files import draw
    from .show_numbers import describe, make_picture

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
    causal = ", causal" if picture.is_causal else ""
    yield paint(f"{picture.title}; {picture.n} positions, {numbers['heads']} head(s){causal}", "bold")
    yield ""
    yield from _maps(picture, options)
    yield ""
    yield from _facts(numbers)


def _maps(picture: Picture, options: argparse.Namespace) -> Iterator[str]:
    from .show_numbers import receptive_fields

    if options.head is None:
        name, counts = "all heads together", picture.together
    else:
        name = f"head {options.head}"
        counts = picture.counts[next(i for i, heads in enumerate(picture.heads) if options.head in heads)]
    yield f"{name}: query down, key across{_legend(picture.n)}"
    yield from _map(counts, picture.is_causal)
    if options.layers > 1:
        yield ""
        yield f"reached after {options.layers} layers"
        yield from _map(receptive_fields(picture.together > 0, options.layers)[-1].long(), picture.is_causal)


def _cells(n: int) -> int:
    """Cells a side, as many as the terminal has room for."""
    from .show_numbers import even_cells

    return even_cells(n, min(40, max(8, (shutil.get_terminal_size().columns - 4) // 2)))


def _legend(n: int) -> str:
    if _cells(n) == n:
        return "; the number is how often a pair meets"
    return f"; each cell stands for {n / _cells(n):.3g} x {n / _cells(n):.3g} positions"


def _map(counts: Tensor, is_causal: bool) -> Iterator[str]:
    """Counts where every position has a cell, else shades; two characters a cell."""
    from .show_numbers import shrink

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
        yield from _branches(numbers)
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
    for heads, without in _groups(numbers["positions_without_keys"]).items():
        if without:
            yield f"                  head {heads}: {without} positions reach nothing"
    for layer in numbers["layers"][1:]:
        yield (
            f"after {layer['layer']} layers    {layer['mean']:.1%} of the positions a token may see; "
            f"the last token {layer['last_position']:.1%}"
        )


def _branches(numbers: Mapping[str, Any]) -> Iterator[str]:
    for index, branch in enumerate(numbers["branches"]):
        offsets = ["-" if each[index] is None else str(each[index]) for each in numbers["offsets"]]
        name = f"{branch['segment_length']} / {branch['dilation_rate']}"
        shown = " ".join(offsets[:32]) + (" ..." if len(offsets) > 32 else "")
        yield f"branch {name:<10} offset of each head: {shown}"


def _groups(values: list[int]) -> dict[str, int]:
    """Heads of which the same holds, as one name."""
    heads: dict[int, list[str]] = {}
    for head, value in enumerate(values):
        heads.setdefault(value, []).append(str(head))
    return {", ".join(names): value for value, names in heads.items()}
