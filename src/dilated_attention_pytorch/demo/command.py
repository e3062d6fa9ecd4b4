"""A first look at the library on this machine, written up as a page of HTML.

Checks the library against its definition; measures time and memory of dense, dilated and block-sparse
attention as the length doubles; trains a small language model on the source of Python's own library and lets
it write. It needs no network and about two and a half minutes on two cores. Ctrl-C ends it early; the report
then holds what was found until then.

    dilated-attention demo
    dilated-attention demo --seconds 20 --train-seconds 20 --out look.html
"""

from __future__ import annotations

import argparse
import io
import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..cli.text import print_json
from ..flags import positive_int

if TYPE_CHECKING:
    from .view import View

DONE, FAILED, INTERRUPTED = 0, 1, 130
SECONDS, TRAIN_SECONDS = 60.0, 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="S",
        help=f"time that the measurements may take (default: {SECONDS:.0f})",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--train-seconds",
        type=float,
        default=TRAIN_SECONDS,
        metavar="S",
        help=f"time that the training may take; 0 trains nothing (default: {TRAIN_SECONDS:.0f})",
    )
    length.add_argument(
        "--steps", type=positive_int, metavar="N", help="train so many steps, however long they take"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("dilated-attention-demo.html"),
        metavar="FILE",
        help="the report (default: dilated-attention-demo.html)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print what was found as JSON; progress goes to standard error"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the demo and writes its report; 1 if the library is not exact here, 130 after Ctrl-C."""
    check_options(options)
    from .report import write_report
    from .story import gather, summarize_all, to_json

    view = choose_view(options.json)
    findings = gather(view, options.seconds, options.train_seconds, options.steps)
    write_report(findings, command_of(options), options.out)
    view.show_end(summarize_all(findings), f"The report is in {options.out}")
    if options.json:
        print_json(to_json(findings) | {"report": str(options.out)})
    if findings.is_interrupted:
        return INTERRUPTED
    return DONE if findings.is_exact and not findings.has_failed else FAILED


def check_options(options: argparse.Namespace) -> None:
    """Refuses, before anything is measured, what could not be done or written."""
    if not 0 < options.seconds < math.inf:
        raise ValueError(f"--seconds must be positive, got {options.seconds}")
    if not 0 <= options.train_seconds < math.inf:
        raise ValueError(f"--train-seconds must be 0 or more, got {options.train_seconds}")
    folder = options.out.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"--out must lie in a directory that is there, got {options.out}")
    if options.out.is_dir():
        raise ValueError(f"--out must be a file, got the directory {options.out}")
    if not os.access(options.out if options.out.exists() else folder, os.W_OK):
        raise ValueError(f"--out must be a file that can be written, got {options.out}")


def command_of(options: argparse.Namespace) -> str:
    """The command line that does the same again."""
    words = ["dilated-attention", "demo", "--seconds", f"{options.seconds:g}"]
    if options.steps is not None:
        words += ["--steps", str(options.steps)]
    else:
        words += ["--train-seconds", f"{options.train_seconds:g}"]
    return shlex.join([*words, "--out", str(options.out)])


def choose_view(is_json: bool) -> View:
    """The live view on a terminal with rich installed, plain lines everywhere else."""
    from .view import PlainView

    stream = sys.stderr if is_json else sys.stdout
    if isinstance(stream, io.TextIOWrapper):  # a model may write characters that a terminal does not know
        stream.reconfigure(errors="replace")
    if not stream.isatty():
        return PlainView(stream)
    try:
        from rich.console import Console
    except ImportError:
        print("For a live view: pip install 'dilated-attention[demo]'\n", file=stream)
        return PlainView(stream)
    from .rich_view import RichView

    return RichView(Console(file=stream, highlight=False))
