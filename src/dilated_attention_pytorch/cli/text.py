"""Numbers, lists and sizes as a command line reads them, and what commands print. Needs no torch."""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from typing import Any

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# What people write for KiB, MiB, GiB and TiB.
_UNITS = {name.lower(): factor for name, factor in UNITS.items()}
_UNITS |= {short + end: UNITS[f"{short.upper()}iB"] for short in "kmgt" for end in ("", "i")}
CODES = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2"}


def whole_number(text: str) -> int:
    """For argparse: 4096, 4k (4096), 1M (1048576); also 0 and negative numbers."""
    found = re.fullmatch(r"(-?\d[\d_]*)([kKmM]?)", text.strip())
    if found is None:
        raise ArgumentTypeError(f"a whole number is needed, as 4096, 4k or 1M, got {text!r}")
    return int(found[1].replace("_", "")) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()]


def positive_int(text: str) -> int:
    """For argparse: a whole number from 1 on."""
    number = whole_number(text)
    if number < 1:
        raise ArgumentTypeError(f"a positive whole number is needed, as 4096, 4k or 1M, got {text!r}")
    return number


def int_list(text: str) -> tuple[int, ...]:
    """For argparse: positive numbers separated by commas."""
    parts = text.split(",")
    if thousands := [part for part in parts[1:] if re.fullmatch(r"0\d\d", part)]:  # of 1,048,576
        raise ArgumentTypeError(f"commas separate the numbers of a list, got {thousands[0]!r} in {text!r}")
    return tuple(map(positive_int, parts))


def byte_count(text: str) -> int:
    """For argparse: 8GiB, 512MiB, 16GB; bytes without a unit from 1 MiB on, as fewer are a unit forgotten."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    if found is None or found[2].lower() not in _UNITS or float(found[1]) <= 0:
        raise ArgumentTypeError(f"a size is needed, as 8GiB, 512MiB or 16GB, got {text!r}")
    number = float(found[1])
    if not found[2] and number < 2**20:
        likely = "GiB" if number < 2**10 else "MiB"
        raise ArgumentTypeError(f"{text} is {text} bytes; did you mean {text}{likely}?")
    return int(number * _UNITS[found[2].lower()])


def paint(text: str, colour: str) -> str:
    """The text in a colour of `CODES`, on a terminal that wants colours; see no-color.org."""
    is_plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain else f"\x1b[{CODES[colour]}m{text}\x1b[0m"


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def labelled(name: str, *values: str) -> Iterator[str]:
    """A line a value, the first after the name, the others below it."""
    for number, value in enumerate(values):
        yield f"{'' if number else name:<17} {value}"


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
