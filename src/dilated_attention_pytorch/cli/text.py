"""What commands print: colours on a terminal only, sizes and counts for people, JSON for programs."""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import ArgumentTypeError
from typing import IO, Any

CODES = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2"}
UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


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


def positive_int(text: str) -> int:
    """For argparse: 4096, 4k (4096), 1M (1048576)."""
    found = re.fullmatch(r"([\d_,]+)([kKmM]?)", text)
    digits = re.sub(r"[_,]", "", found[1]) if found else ""
    number = int(digits) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()] if found and digits else 0
    if number < 1:
        raise ArgumentTypeError(f"a positive whole number is needed, as 4096, 4k or 1M, got {text!r}")
    return number


def int_list(text: str) -> tuple[int, ...]:
    """For argparse: numbers separated by commas."""
    return tuple(positive_int(part) for part in text.split(","))


def byte_count(text: str) -> int:
    """For argparse: 8GiB, 512MiB, 16GB or plain bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    units = {name.lower(): factor for name, factor in UNITS.items()}
    if found is None or found[2].lower() not in units or float(found[1]) <= 0:
        raise ArgumentTypeError(f"a size is needed, as 8GiB, 512MiB or 16GB, got {text!r}")
    return int(float(found[1]) * units[found[2].lower()])
