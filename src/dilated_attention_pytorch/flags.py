"""Numbers, lists and sizes as a command line writes them. Needs no torch."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# What people write for KiB, MiB, GiB and TiB.
_UNITS = {name.lower(): factor for name, factor in UNITS.items()}
_UNITS |= {short + end: UNITS[f"{short.upper()}iB"] for short in "kmgt" for end in ("", "i")}


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
