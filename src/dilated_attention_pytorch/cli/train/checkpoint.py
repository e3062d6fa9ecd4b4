"""Checkpoints of a run: written whole or not at all, checked when read, the previous one kept.

Each rank writes the rows of the tensors that it holds, and any number of ranks reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...checks import parse_json
from .ranks import Ranks

MANIFEST, FORMAT = "manifest.json", 1
CHECKPOINTS = "checkpoints"  # the folder of them in that of a run
# What files of others may lead to.
MALFORMED = (OSError, ValueError, KeyError, AttributeError, TypeError, RuntimeError, UnpicklingError)


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; the message says which, why and what is left."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was read and found whole. `facts` are what the run wrote beside its tensors."""

    path: Path
    step: int
    facts: Mapping[str, Any]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills `tensors`, which must be in the checkpoint under their names and with their sizes."""
        try:
            files = sorted(self.path.glob("part-*.pt"))
            parts = [torch.load(file, mmap=True, weights_only=True) for file in files]
            for name, tensor in tensors.items():
                stored = [part[name] for part in parts if name in part]
                size = tuple(stored[0]["size"]) if stored else "absent"
                if size != tuple(tensor.shape):
                    rule = f"must hold {name} of {tuple(tensor.shape)}"
                    raise CheckpointError(f"{self.path} {rule}, got {name}: {size}")
                for part in stored:
                    _copy_rows(part["rows"], part["start"], tensor)
        except MALFORMED as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.path} could not be read: {_reason(error)}") from error


def _own_rows(x: Tensor) -> tuple[int, Tensor]:
    """What this rank holds of a tensor, and at which row that starts; FSDP2 shards the first dimension."""
    if not isinstance(x, DTensor):
        return 0, x
    step = -(-x.shape[0] // x.device_mesh.size())
    return min(x.shape[0], step * x.device_mesh.get_local_rank()), x.to_local()


def _copy_rows(rows: Tensor, first: int, x: Tensor) -> None:
    """Copies rows, of which the first has this number, into those of them that this rank holds."""
    start, own = _own_rows(x)
    if x.dim() == 0:
        own.copy_(rows)
    low, high = max(start, first), min(start + len(own), first + len(rows)) if x.dim() else 0
    if low < high:
        own[low - start : high - start].copy_(rows[low - first : high - first])


def _write_part(folder: Path, ranks: Ranks, tensors: Mapping[str, Tensor]) -> None:
    """Writes what this rank holds; what all hold is written by the first."""
    part = {}
    for name, x in tensors.items():
        if ranks.is_first or isinstance(x, DTensor):
            start, own = _own_rows(x)
            rows = own.detach().to("cpu", copy=True).contiguous()
            part[name] = {"size": list(x.shape), "start": start, "rows": rows}
    with open(folder / f"part-{ranks.rank}.pt", "wb") as file:
        torch.save(part, file)
        file.flush()
        os.fsync(file.fileno())


def save_checkpoint(
    folder: Path, ranks: Ranks, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], keep: int
) -> None:
    """Writes `step-00000100` and so on into `folder` and deletes the oldest. All ranks must call it.

    Files are complete and on the disk before they get their name. If anything goes wrong, what was
    written is deleted, the checkpoints before stay as they were, and a CheckpointError says so.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".{final.name}.partial"

    def finish() -> None:
        _seal(temporary, step, facts)
        if final.exists():
            shutil.rmtree(final)  # of the same step of the same run
        os.rename(temporary, final)
        _sync_folder(folder)
        for path in named_checkpoints(folder)[keep:]:
            shutil.rmtree(path, ignore_errors=True)

    problem = ranks.told(_problem(lambda: _empty(temporary)) if ranks.is_first else None)
    if problem is None:
        problem = _problem(lambda: _write_part(temporary, ranks, tensors))
        problem = (problem or "another rank failed") if ranks.any(problem is not None) else None
    if problem is None:
        problem = ranks.told(_problem(finish) if ranks.is_first else None)
    if problem is not None:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        before = named_checkpoints(folder)
        left = f"the last one is {before[0]}" if before else "there is none before it"
        raise CheckpointError(f"checkpoint {final} could not be written: {problem}; {left}")


def latest_checkpoint(folder: Path, ranks: Ranks) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and what is wrong with newer ones, which are set aside. For all ranks.

    Raises CheckpointError if there are checkpoints and none of them is whole.
    """
    checkpoint, damaged = newest_whole(folder) if ranks.is_first else (None, {})
    for path in damaged if checkpoint is not None else ():  # they count no more, and can be looked at
        aside = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)
    checkpoint, problems = ranks.told((checkpoint, list(damaged.values())))
    if checkpoint is None and problems:
        raise CheckpointError(f"no checkpoint in {folder} is whole: " + "; ".join(problems))
    return checkpoint, problems


def find_checkpoint(folder: Path) -> tuple[Checkpoint, list[str]]:
    """The checkpoint in `folder`, or of the run in it the newest whole one, and what is wrong with newer.

    Nothing is changed, so that it can be asked while the run goes on.
    """
    if (folder / MANIFEST).is_file():
        return read_checkpoint(folder), []
    checkpoint, damaged = newest_whole(folder / CHECKPOINTS)
    problems = list(damaged.values())
    if checkpoint is None:
        raise CheckpointError("; ".join([f"{folder} must hold a whole checkpoint, got none", *problems]))
    return checkpoint, problems


def newest_whole(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest checkpoint in `folder` that is whole, and what is wrong with newer ones."""
    damaged: dict[Path, str] = {}
    for path in named_checkpoints(folder):
        try:
            return read_checkpoint(path), damaged
        except CheckpointError as error:
            damaged[path] = str(error)
    return None, damaged


def named_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that have their final name, the newest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    named = [path for path in paths if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder; every byte of its files is compared with its digest."""
    try:
        manifest = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
        digest = manifest.pop("digest")
        if digest != _digest(manifest):
            raise CheckpointError(f"{path / MANIFEST} is damaged: its digest is another")
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} must have format {FORMAT}, got {manifest['format']}")
        for name, expected in manifest["files"].items():
            if _fingerprint(path / name) != expected:
                raise CheckpointError(f"{path / name} is damaged: its size or digest is another")
        return Checkpoint(path, int(manifest["step"]), manifest["facts"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is incomplete: {Path(str(error.filename)).name} is missing") from None
    except MALFORMED as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _seal(folder: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Writes the manifest, which makes a checkpoint whole, and brings all to the disk."""
    files = {file.name: _fingerprint(file) for file in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "step": step, "facts": dict(facts), "files": files}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({**manifest, "digest": _digest(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)


def _fingerprint(file: Path) -> dict[str, Any]:
    known = hashlib.sha256()
    with open(file, "rb") as opened:
        while part := opened.read(2**20):
            known.update(part)
        return {"bytes": opened.tell(), "sha256": known.hexdigest()}


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _empty(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".step-*.partial"):  # of a run that was killed while it wrote
        shutil.rmtree(left)
    folder.mkdir()


def _sync_folder(folder: Path) -> None:
    """Names are on the disk, too."""
    if os.name == "nt":  # folders cannot be opened there
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _problem(action: Callable[[], None]) -> str | None:
    """What goes wrong in an action, if anything."""
    try:
        action()
    except (OSError, RuntimeError) as error:
        return _reason(error)
    return None


def _reason(error: BaseException) -> str:
    """What the operating system said, or the first line of an error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
