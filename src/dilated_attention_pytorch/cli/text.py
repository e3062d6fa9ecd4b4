"""What commands print: colours on a terminal only, sizes and counts for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from typing import IO, Any

from ..flags import UNITS

CODES = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2"}


def has_colours(stream: IO[str] | None = None) -> bool:
    """Whether a stream (by default standard output) is a terminal that wants them; see no-color.org."""
    stream = sys.stdout if stream is None else stream
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str) -> str:
    """The text in a colour of `CODES`, if standard output shows colours."""
    return f"\x1b[{CODES[colour]}m{text}\x1b[0m" if has_colours() else text


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def show_bytes(nbytes: float) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(nbytes) >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.1f} {unit}"
    return f"{nbytes:.0f} B"


def show_count(count: float) -> str:
    """12 345 678 as 12.3 M: for FLOPs and pairs."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {letter}"
    return f"{count:.0f} "
