"""Checkpoints: whole or not there, damage is seen, the one before is kept, and no code of a file is run."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cli.train.runs import ALONE
from dilated_attention_pytorch.cli.train import folder as module
from dilated_attention_pytorch.cli.train.folder import (
    CheckpointError,
    find_checkpoint,
    latest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)


def tensors(seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    odd = torch.randn(7, 5, generator=rng).T  # not contiguous
    return {"a": torch.randn(40, 3, generator=rng), "b.c": odd, "d": torch.randn((), generator=rng).double()}


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint(folder, ALONE, step, tensors(step), {"about": [step]}, 2)


def check_latest(folder: Path, step: int) -> list[str]:
    found, problems = latest_checkpoint(folder, ALONE)
    assert found is not None
    assert (found.step, found.facts) == (step, {"about": [step]})
    loaded = {name: torch.zeros_like(x) for name, x in tensors(0).items()}
    found.load(loaded)
    assert all(torch.equal(loaded[name], x) for name, x in tensors(step).items())
    return problems


def test_what_was_saved_is_loaded_and_old_ones_go(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    assert latest_checkpoint(folder, ALONE) == (None, [])
    save(folder, 1, 2)
    (folder / ".step-00000003.pt.12ab").write_bytes(b"half")  # not seen, and gone with the next
    assert check_latest(folder, 2) == []
    save(folder, 100_000_000)
    assert check_latest(folder, 100_000_000) == []
    assert sorted(x.name for x in folder.iterdir()) == ["step-00000002.pt", "step-100000000.pt"]
    save(folder, 100_000_000)  # again, in its place
    assert check_latest(folder, 100_000_000) == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "no archive": lambda path: path.write_text("[]"),
    "another format": lambda path: torch.save({"format": 1}, path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_set_aside_and_the_one_before_used(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1, 2)
    DAMAGES[damage](folder / "step-00000002.pt")
    found, problems = find_checkpoint(tmp_path)  # changes nothing
    assert (found.step, check_latest(folder, 1)) == (1, problems)
    assert "step-00000002" in problems[0]
    assert "is damaged" in problems[0] or "must have format 2, got 1" in problems[0]
    assert (folder / "step-00000002.pt.damaged").is_file()
    save(folder, 2)
    assert check_latest(folder, 2) == []


def test_if_none_is_whole_nothing_is_begun_anew(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1, 2)
    for path in folder.iterdir():
        flip(path)
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is whole: .*step-00000002.*step-00000001"):
        latest_checkpoint(folder, ALONE)
    assert len(list(folder.iterdir())) == 2
    with pytest.raises(CheckpointError, match="must hold a whole checkpoint"):
        find_checkpoint(tmp_path)
    (tmp_path / "older" / "step-00000001").mkdir(parents=True)  # as earlier versions wrote them
    with pytest.raises(CheckpointError, match="step-00000001 is damaged: Is a directory"):
        latest_checkpoint(tmp_path / "older", ALONE)


@pytest.mark.parametrize("place", ["torch.save", "os.fsync", "os.replace"])
def test_a_full_disk_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(f"{module.__name__}.{place}", fail)
        with pytest.raises(CheckpointError, match=r"00000003.pt could not be written: No space .*00000002"):
            save(tmp_path, 3)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["step-00000001.pt", "step-00000002.pt"]
    assert check_latest(tmp_path, 2) == []
    save(tmp_path, 3)
    assert check_latest(tmp_path, 3) == []


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = read_checkpoint(tmp_path / "step-00000001.pt")
    with pytest.raises(CheckpointError, match=r"must hold a of \(3, 40\), got a: \(40, 3\)"):
        found.load({"a": torch.zeros(3, 40)})
    with pytest.raises(CheckpointError, match=r"must hold e .* absent"):
        found.load({"e": torch.zeros(3)})


def test_nothing_in_a_checkpoint_is_a_pickle_that_is_run(tmp_path: Path) -> None:
    class Program:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "was run",))

    path = tmp_path / "step-00000001.pt"
    torch.save({"format": 2, "step": 1, "facts": "{}", "tensors": {"a": Program()}}, path)
    with pytest.raises(CheckpointError, match="could not be read"):
        read_checkpoint(path)
    assert not (tmp_path / "was run").exists()
