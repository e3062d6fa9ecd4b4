"""The pictures of the documentation show what the library builds."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import pytest

from dilated_attention_pytorch.bench.pictures import example_patterns
from dilated_attention_pytorch.cli.main import main

DOCS = Path(__file__).resolve().parents[2] / "docs"


def pixels(path: Path) -> bytes:
    """The decompressed image data of a PNG: how well it is packed differs between builds of zlib."""
    data, at, packed = path.read_bytes(), 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    return zlib.decompress(packed)


def test_pictures_are_those_that_the_library_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--draw", str(tmp_path)]) == 0
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in (DOCS / "images").glob("pattern_*.png"))
    assert sorted(Path(line).name for line in capsys.readouterr().out.split()) == drawn
    for name in drawn:
        assert (DOCS / "images" / name).stat().st_size < 30_000
        assert pixels(tmp_path / name) == pixels(DOCS / "images" / name), name


def test_page_shows_every_picture_and_no_other() -> None:
    shown = re.findall(r'src="images/pattern_(\w+)\.png"', (DOCS / "block_sparse.md").read_text())
    assert sorted(shown) == sorted(example_patterns())
