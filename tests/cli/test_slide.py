"""`dilated-attention slide`: what it writes is what the encoder gives, and what does not fit is said."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from matplotlib.image import imread
from torch import Tensor

from dilated_attention_pytorch import LongNetViT
from dilated_attention_pytorch.cli.main import main
from dilated_attention_pytorch.cli.text import Progress
from dilated_attention_pytorch.integrations.slide_maps import heat_map
from dilated_attention_pytorch.integrations.tile_grid import grid_coords

WIDTH = 12


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of weights and two slides, in which the command runs."""
    torch.manual_seed(0)
    torch.save({"model": LongNetViT(WIDTH, 32, 2).state_dict()}, tmp_path / "slide_encoder.pth")
    for name, n in (("one", 70), ("two", 40)):
        write_slide(tmp_path / f"{name}.h5", n, patch_size_level0=512)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_slide(path: Path, n: int, width: int = WIDTH, **told: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    features = torch.randn(n, width, generator=generator)
    coords = torch.randint(0, 90, (n, 2), generator=generator) * 512
    with h5py.File(path, "w") as file:
        file["features"], file["coords"] = features.numpy(), coords.numpy()
        file["coords"].attrs.update(told)
    return features, coords


def run(*words: str) -> int:
    return main(["slide", *words, "--weights", "slide_encoder.pth", "--device", "cpu"])


def read(path: Path) -> dict[str, Tensor]:
    with h5py.File(path) as file:
        return {name: torch.from_numpy(file[name][:]) for name in file}


@pytest.mark.parametrize(
    ("words", "options", "how"),
    [
        ((), {}, {"rollout": True, "relative": True}),
        (("--global-pool", "--raw"), {"global_pool": True}, {"rollout": True}),
        (("--map", "last", "--raw"), {}, {"layers": [-1]}),
        (("--map", "mean", "--dtype", "bfloat16"), {"dtype": torch.bfloat16}, {"relative": True}),
    ],
)
def test_embedding_and_map_are_those_of_the_encoder(folder: Path, words: Any, options: Any, how: Any) -> None:
    assert run("one.h5", "--out", "out/e.h5", "--heat-map", "map.png", *words) == 0
    features, coords = write_slide(folder / "again.h5", 70)
    model = LongNetViT.from_pretrained(folder / "slide_encoder.pth", **options)
    x = features[None], grid_coords(coords, 512)[None]
    with torch.inference_mode():
        [embedding] = model(*x)
        maps = model.attention_maps(*x, **how)
    found = read(folder / "out" / "e.h5")
    assert torch.equal(found["features"], embedding[0].float())
    assert torch.equal(found["coords"], coords)
    weights = maps.flatten(0, -2).mean(0)
    assert torch.equal(found["attention"], weights)
    shown = (torch.from_numpy(imread(folder / "map.png")) * 255).round().to(torch.uint8)
    assert torch.equal(shown, heat_map(coords, weights, 512))
    with h5py.File(folder / "out" / "e.h5") as file:
        assert file.attrs["tile_size"] == 512.0


def test_several_slides_go_on_past_those_that_do_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_slide(folder / "wide.h5", 9, width=13)
    write_slide(folder / "none.h5", 0)
    (folder / "text.h5").write_text("no HDF5")
    with h5py.File(folder / "lost.h5", "w") as file:
        file["features"] = torch.ones(3, WIDTH).numpy()
    write_slide(folder / "far.h5", 20, patch_size_level0=1)
    names = ["one", "wide", "none", "text", "lost", "absent", "far", "two"]
    assert run(*(f"{name}.h5" for name in names), "--out", "all", "--heat-map", "maps") == 1
    assert sorted(path.name for path in (folder / "all").iterdir()) == ["one.h5", "two.h5"]
    assert sorted(path.name for path in (folder / "maps").iterdir()) == ["one.png", "two.png"]
    said = capsys.readouterr()
    assert "one (1 of 8): 70 tiles in" in said.out
    assert "two (8 of 8): 40 tiles in" in said.out
    for sentence in (
        "wide (2 of 8): error: features must have the width 12 that the encoder was trained with, that of",
        "none (3 of 8): error: none.h5 must have at least one tile",
        "text (4 of 8): error: text.h5 must be an HDF5 file",
        "lost (5 of 8): error: lost.h5 must hold coords",
        "absent (6 of 8): error: there is no absent.h5",
        "far (7 of 8): error: coords must lie on the grid",
    ):
        assert sentence in said.err
    assert "#" not in said.err  # no bar where there is no terminal
    before = (folder / "all" / "one.h5").stat().st_mtime_ns
    assert run("one.h5", "two.h5", "--out", "all", "--skip-existing") == 0
    assert (folder / "all" / "one.h5").stat().st_mtime_ns == before
    assert "all embeddings are there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "message", "words"),
    [
        (2, "--out must be a folder for several slides, got e.h5", ("one.h5", "two.h5", "--out", "e.h5")),
        (
            2,
            "--heat-map must be a folder, or end in .png, got m.jpg",
            ("one.h5", "--out", "o", "--heat-map", "m.jpg"),
        ),
        (2, "got two files of one name", ("one.h5", "one.h5", "--out", "o")),
        (2, "tile_size must be positive, got 0.0", ("one.h5", "--out", "o", "--tile-size", "0")),
        (2, "arch must be one of", ("one.h5", "--out", "o", "--arch", "vit")),
        (
            2,
            "must have the sizes of gigapath_slide_enc12l768d",
            ("one.h5", "--out", "o", "--arch", "gigapath_slide_enc12l768d"),
        ),
        (1, "there is no three.h5", ("three.h5", "--out", "o")),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], code: int, message: str, words: Any
) -> None:
    assert run(*words) == code
    assert message in capsys.readouterr().err


def test_a_file_that_does_not_tell_the_side_of_tiles_is_noted(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_slide(folder / "clam.h5", 30)
    assert run("clam.h5", "--out", "assumed.h5") == 0
    assert "tiles of 256 pixels assumed" in capsys.readouterr().err
    assert run("clam.h5", "--out", "told.npz", "--tile-size", "512") == 0
    assert "assumed" not in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert run("clam.h5", "--out", "e.h5") == 1
    assert 'h5py is not installed; pip install "dilated-attention[slides]"' in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_the_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    assert run("one.h5", "--out", "e.h5", "--heat-map", "m.png") == 0
    bars = [line for line in stream.getvalue().split("\r\x1b[2K") if "[" in line]
    assert [bar.split("] ")[1].split()[0] for bar in bars] == [f"{done}/6" for done in range(1, 7)]
    assert bars[2].startswith("one [############............]")
    assert stream.getvalue().endswith("\r\x1b[2K")
    silent = io.StringIO()
    Progress("name", 3, silent).step()
    assert silent.getvalue() == ""
