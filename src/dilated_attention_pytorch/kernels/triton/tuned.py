"""Which blocks a launch uses: what `autotune` found best on this device and stored, else the table's."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from ...checks import parse_json
from .tuning import Blocks, Pass, Target, blocks_for, head_parts

VARIABLE = "DILATED_ATTENTION_TUNING"  # names the file, in place of the one in the user's cache
FORMAT = 1
SOURCES = ("pieces.py", "attend.py", "gradients.py")  # of others, other blocks may be best
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4}
PASSES: tuple[Pass, ...] = get_args(Pass)


class Choice(NamedTuple):
    """Blocks, and whether they were tuned on this device; they are the table's otherwise."""

    blocks: Blocks
    is_tuned: bool


class Result(NamedTuple):
    """What is best for heads that have the same parts as those of `d` features, and how that was found."""

    which: Pass
    dtype: str
    d: int
    blocks: Blocks
    seconds: float
    shipped_seconds: float


_tried: dict[Pass, Blocks] = {}


@contextmanager
def trying(which: Pass, blocks: Blocks) -> Iterator[None]:
    """Launches of a pass use these blocks, in all threads: gradients are computed in one of their own."""
    _tried[which] = blocks
    try:
        yield
    finally:
        del _tried[which]


def choose_blocks(device: torch.device, target: Target, which: Pass, dtype: torch.dtype, d: int) -> Choice:
    if which in _tried:
        return Choice(_tried[which], True)
    size = dtype.itemsize
    tuned = _stored(device_name(device)).get((which, str(dtype).removeprefix("torch."), head_parts(d, size)))
    return Choice(blocks_for(target, which, size, d), False) if tuned is None else Choice(tuned, True)


@cache
def device_name(device: torch.device) -> str:
    """By which results are stored."""
    return "interpreter" if device.type == "cpu" else torch.cuda.get_device_name(device)


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    if device.type == "cpu":
        return 2**20
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def tuning_file(name: str) -> Path | None:
    """Where results for a device are; for the interpreter only where the variable says so."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    if name == "interpreter":
        return None
    cached = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cached = cached if cached.is_absolute() else Path(os.path.expanduser("~/.cache"))
    return cached / "dilated_attention_pytorch" / "tuning.json"


@cache
def made_with() -> dict[str, str]:
    """What results depend on beside the device."""
    import triton

    text = b"".join((Path(__file__).parent / name).read_bytes() for name in SOURCES)
    return {"triton": triton.__version__, "kernels": hashlib.sha256(text).hexdigest()[:16]}


@cache
def _stored(name: str) -> dict[tuple[Pass, str, tuple[int, int]], Blocks]:
    """The blocks for a device, read once in a process; a warning says why a file is ignored."""
    file = tuning_file(name)
    try:
        document = {} if file is None or not file.is_file() else read_document(file)
        results = read_results(document, name)
    except (OSError, ValueError) as error:
        how = "`dilated-attention autotune` writes it anew"
        warnings.warn(f"shipped blocks are used, {file} is ignored: {error}; {how}", stacklevel=2)
        return {}
    return {(x.which, x.dtype, head_parts(x.d, DTYPES[x.dtype])): x.blocks for x in results}


def read_document(file: Path) -> dict[str, Any]:
    """Results by the names of devices; a ValueError says why a file does not hold any."""
    document = parse_json(file.read_text(encoding="utf-8"))
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT or not isinstance(document.get("devices"), dict):
        raise ValueError(f"it must hold devices in format {FORMAT}, got format {found!r}")
    devices: dict[str, Any] = document["devices"]
    return devices


def read_results(devices: dict[str, Any], name: str) -> list[Result]:
    """Those for a device; a ValueError says why they cannot be used, or that they are out of date."""
    if name not in devices:
        return []
    try:
        made, rows = devices[name]["made_with"], devices[name]["results"]
        results = [Result(**{**row, "blocks": Blocks(*row["blocks"])}) for row in rows]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the results for {name} are incomplete: {error!r}") from None
    if made != made_with():
        raise ValueError(f"the results for {name} are of {made}, and this is {made_with()}")
    for result in results:
        check_result(result)
    return results


def check_result(result: Result) -> None:
    """A ValueError for what no launch could use."""
    queries, keys, warps, stages = result.blocks
    are_right = (
        str(result.which) in PASSES
        and str(result.dtype) in DTYPES
        and all(type(x) is int for x in (*result.blocks, result.d))
        and all(16 <= x <= 256 and x & (x - 1) == 0 for x in (queries, keys))
        and warps in (1, 2, 4, 8, 16)
        and 1 <= stages <= 8
        and 1 <= result.d <= 256
    )
    if not are_right:
        raise ValueError(f"a result must hold a pass, a dtype, a head size and blocks, got {tuple(result)}")
