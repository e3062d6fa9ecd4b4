"""The pictures of the documentation show what the library builds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.bench.pictures import example_patterns
from dilated_attention_pytorch.cli.main import main
from support.pictures import read_png

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_pictures_are_those_that_the_library_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--draw", str(tmp_path)]) == 0
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in (DOCS / "images").glob("pattern_*.png"))
    assert sorted(Path(line).name for line in capsys.readouterr().out.split()) == drawn
    for name in drawn:
        assert (DOCS / "images" / name).stat().st_size < 30_000
        drawn_pixels, stored = read_png(tmp_path / name), read_png(DOCS / "images" / name)
        assert torch.equal(drawn_pixels, stored), name  # builds of zlib pack them differently


def test_page_shows_every_picture_and_no_other() -> None:
    shown = re.findall(r'src="images/pattern_(\w+)\.png"', (DOCS / "block_sparse.md").read_text())
    assert sorted(shown) == sorted(example_patterns())
