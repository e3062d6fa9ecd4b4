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
import math
import os
import shlex
import textwrap
from pathlib import Path
from typing import Any

from .text import positive_int, print_json

DONE, FAILED, INTERRUPTED = 0, 1, 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    seconds: dict[str, Any] = {"type": float, "default": 60.0, "metavar": "S"}
    parser.add_argument("--seconds", help="time that the measurements may take (default: 60)", **seconds)
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--train-seconds", help="time that the training may take; 0 trains nothing (default: 60)", **seconds
    )
    length.add_argument(
        "--steps", type=positive_int, metavar="N", help="train so many steps, however long they take"
    )
    report = Path("dilated-attention-demo.html")
    parser.add_argument(
        "--out", type=Path, default=report, metavar="FILE", help=f"the report (default: {report})"
    )
    parser.add_argument(
        "--json", action="store_true", help="print what was found as JSON; progress goes to standard error"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the demo and writes its report; 1 if the library is not exact here, 130 after Ctrl-C."""
    check_options(options)
    from . import demo_story
    from .demo_report import make_page

    view = demo_story.choose_view(options.json)
    found = demo_story.gather(view, options.seconds, options.train_seconds, options.steps)
    options.out.write_text(make_page(found, command_of(options)).render(), encoding="utf-8")
    view.say("", *textwrap.wrap(found.summary, demo_story.WIDTH), "", style="bold")
    view.say(f"The report is in {options.out}", style="bold cyan")
    if options.json:
        print_json(found.to_json() | {"report": str(options.out)})
    if found.is_interrupted:
        return INTERRUPTED
    return DONE if found.is_exact and not found.has_failed else FAILED


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
