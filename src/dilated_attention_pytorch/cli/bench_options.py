"""The options of `dilated-attention bench`, and which of them go together."""

from __future__ import annotations

import argparse
from pathlib import Path

from .text import byte_count, int_list, positive_int

DTYPES = ("float32", "bfloat16", "float16", "float64")
MEMORIES = ("fresh", "pool", "lightweight")
DEFAULT_LIMIT = 8 * 2**30
EPILOG = """\
exit codes: 0 measured, whether or not targets are met; 1 a wrong answer, or nothing could be measured; 2 used
wrongly; 130 interrupted, with the cases measured so far in the file of --out.

examples:
  dilated-attention bench
  dilated-attention bench sdpa DilatedAttention --lengths 4k,16k,64k --dtype bfloat16 --html bench.html
  dilated-attention bench DilatedAttention --lengths 8192 --training --memory pool --out pool.json
  dilated-attention bench --compare before.json after.json
  dilated-attention bench --limit 8GiB --out limit.json
  dilated-attention bench speed --repeats 15 --out speed.json
  dilated-attention bench --render speed.json --update README.md
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "names", nargs="*", metavar="name", help="suites, or candidates; --list shows both (not mixed)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in their name")
    parser.add_argument(
        "--repeats", type=positive_int, metavar="N", help="rounds of the cases that compare times"
    )
    parser.add_argument(
        "--threads", type=positive_int, metavar="N", help="of each process (default: as torch chooses)"
    )
    _add_modes(parser.add_argument_group("instead of comparing"))
    _add_sizes(parser.add_argument_group("what candidates are asked for"))
    _add_places(parser.add_argument_group("where the figures go"))


def _add_modes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--list", action="store_true", help="list suites and candidates, measure nothing")
    group.add_argument(
        "--limit",
        type=byte_count,
        nargs="?",
        const=DEFAULT_LIMIT,
        metavar="BYTES",
        help="the longest sequence whose whole process stays within this memory (default: 8GiB), of the "
        "named candidates or of DilatedAttention, with and without gradients; bfloat16 by default",
    )
    group.add_argument(
        "--seconds",
        type=_seconds,
        metavar="S",
        help="with --limit: the most time for each search; what is confirmed by then is reported",
    )
    group.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="two records: ratios B / A of median times with 95%% confidence intervals, and of bytes",
    )
    group.add_argument("--render", type=Path, metavar="RECORD", help="take the figures from a JSON record")
    group.add_argument(
        "--draw", type=Path, metavar="DIR", help="paint the block patterns of the documentation"
    )
    group.add_argument(
        "--plan", action="store_true", help="show what rings of 8 to 1024 ranks would send and hold"
    )


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--lengths", "--length", type=int_list, metavar="N,...", help="tokens (default: 1024,4096,16384)"
    )
    group.add_argument("--batch", type=positive_int, metavar="B", help="sequences (default: 1)")
    group.add_argument("--heads", type=positive_int, metavar="H", help="(default: 8)")
    group.add_argument("--head-dim", type=positive_int, metavar="D", help="(default: 64)")
    group.add_argument("--dtype", choices=DTYPES, help="(default: float32; with --limit bfloat16)")
    group.add_argument(
        "--forward", action="store_true", help="the forward pass (default; with --limit both passes)"
    )
    group.add_argument("--training", action="store_true", help="forward and backward")
    group.add_argument("--causal", action="store_true", help="no token sees a later one")
    group.add_argument(
        "--segments",
        type=int_list,
        metavar="W,...",
        help="segment lengths (default: 2048 times powers of 4 until one spans the longest sequence, rates "
        "alike; with --limit 1024,4096,16384 and 1,4,16)",
    )
    group.add_argument("--rates", type=int_list, metavar="R,...", help="dilation rates of the segments")
    group.add_argument(
        "--sparsity", type=float, metavar="X", help="share of blocks that block patterns keep (default: 0.1)"
    )
    group.add_argument(
        "--block-size",
        type=positive_int,
        metavar="N",
        help="of block patterns (default: 128, or the shortest segment if that is less)",
    )
    group.add_argument(
        "--memory", choices=MEMORIES, help="where calls take memory from (default: each module's own way)"
    )
    group.add_argument("--no-pattern-cache", action="store_true", help="plan every call anew")


def _add_places(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=Path, metavar="FILE", help="the record as JSON, after each case")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="the table as Markdown")
    group.add_argument("--html", type=Path, metavar="FILE", help="a page with charts over the length")
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")
    group.add_argument(
        "--update",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="put the table between the markers of FILE; may be given more than once",
    )
    group.add_argument(
        "--markers",
        metavar="NAME",
        help="the markers are <!-- NAME:begin --> and <!-- NAME:end --> (default: bench, with --plan plan)",
    )


def check_modes(options: argparse.Namespace) -> None:
    """Every option that is given is used: a `ValueError` names one that would not be."""
    from ..bench.selection import given_sizes

    modes = [name for name in ("list", "draw", "plan", "compare", "render") if getattr(options, name)]
    if len(modes) + (options.limit is not None) > 1:
        asked = [*modes, *(["limit"] if options.limit is not None else [])]
        raise ValueError(f"one of these at a time, got {' and '.join(f'--{name}' for name in asked)}")
    if options.seconds is not None and options.limit is None:
        raise ValueError("--seconds is the time of --limit, got it without")
    if options.markers and not options.update:
        raise ValueError("--markers says where --update puts the table, got it without")
    if not modes:
        return
    (mode,) = modes
    given = [*options.names, *given_sizes(options)]
    given += [f"--{name}" for name in ("only", "repeats", "threads") if getattr(options, name)]
    if given:
        raise ValueError(f"--{mode} measures nothing, got {', '.join(given)} with it")
    places = {
        "list": (),
        "draw": (),
        "plan": ("update", "markers"),
        "compare": ("markdown", "json"),
        "render": ("out", "markdown", "html", "json", "update", "markers"),
    }[mode]
    for name in ("out", "markdown", "html", "json", "update", "markers"):
        if getattr(options, name) and name not in places:
            raise ValueError(f"--{mode} has no use for --{name}")
    if options.draw and not options.draw.is_dir():
        raise ValueError(f"--draw takes a directory that is there, got {options.draw}")


def _seconds(text: str) -> float:
    """For argparse: a positive number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a positive number of seconds is needed, got {text!r}")
    return seconds
