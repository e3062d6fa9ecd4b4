"""Numbers, lists and sizes as a command line reads them, and what commands print. Needs no torch."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator
from typing import IO, Any

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


def wants_colours(stream: IO[str]) -> bool:
    """Whether it is a terminal that wants colours; see no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: IO[str] | None = None) -> str:
    """The text in a colour of `CODES`, where the stream, by default standard output, wants colours."""
    return f"\x1b[{CODES[colour]}m{text}\x1b[0m" if wants_colours(stream or sys.stdout) else text


class Progress:
    """A bar on one line of a terminal, drawn over itself; nothing where the stream is no terminal."""

    def __init__(self, name: str, total: int, stream: IO[str] | None = None) -> None:
        self.name, self.total, self.done, self.begin = name, total, 0, time.perf_counter()
        self.stream = sys.stderr if stream is None else stream

    def step(self, *_: Any) -> None:
        """One more of `total` is done. Takes and leaves any arguments, so that it can be a hook."""
        self.done = min(self.total, self.done + 1)
        width = 24 * self.done // self.total
        bar = "#" * width + "." * (24 - width)
        seconds = show_seconds(time.perf_counter() - self.begin)
        self._draw(f"{self.name} [{bar}] {self.done}/{self.total}  {seconds}")

    def clear(self) -> None:
        self._draw("")

    def _draw(self, text: str) -> None:
        if self.stream.isatty():
            print(f"\r\x1b[2K{text}", end="", file=self.stream, flush=True)


def print_json(value: Any) -> None:
    """JSON has no NaN and no infinity: they become null."""
    print(json.dumps(_without_nan(value), indent=2))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def show_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
