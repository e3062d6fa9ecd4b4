"""Checkpoints of a run: written whole or not at all, checked when read, the previous one kept."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from ..checks import parse_json
from .ranks import Ranks
from .storage import read_tensors, stored_sizes, write_tensors

MANIFEST, FORMAT = "manifest.json", 1
CHECKPOINTS = "checkpoints"  # the folder of them in that of a run
_NAME = re.compile(r"step-(\d{8,})")


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
            stored = stored_sizes(self.path)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{self.path} could not be read: {error}") from None
        for name, tensor in tensors.items():
            if stored.get(name) != tuple(tensor.shape):
                fact = f"{name}: {stored.get(name, 'absent')}"
                raise CheckpointError(f"{self.path} must hold {name} of {tuple(tensor.shape)}, got {fact}")
        try:
            read_tensors(self.path, tensors)
        except (OSError, CheckpointException) as error:
            raise CheckpointError(f"{self.path} could not be read: {_reason(error)}") from error


class CheckpointFolder:
    """The checkpoints of one run, `step-00000100` and so on, in the order of their steps."""

    def __init__(self, folder: Path, ranks: Ranks, keep: int = 2) -> None:
        self.folder, self.ranks, self.keep = folder, ranks, keep

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
        """Writes a checkpoint of `step` and deletes the oldest. All ranks must call it.

        Files are complete and on the disk before they get their name. If anything goes wrong, what was
        written is deleted, the checkpoints before stay as they were, and a CheckpointError says so.
        """
        final = self.folder / f"step-{step:08d}"
        temporary = self.folder / f".{final.name}.partial"
        problem = self._attempt(lambda: _empty(temporary))
        if problem is None:
            try:
                write_tensors(temporary, tensors)
            except (OSError, CheckpointException, RuntimeError) as error:
                problem = _reason(error)
        problem = self._agree(problem)
        if problem is None:
            problem = self._attempt(lambda: self._finish(temporary, final, step, facts))
        if problem is not None:
            if self.ranks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            before = named_checkpoints(self.folder)
            left = f"the last one is {before[0]}" if before else "there is none before it"
            raise CheckpointError(f"checkpoint {final} could not be written: {problem}; {left}")
        return final

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint, and what is wrong with newer ones, which are set aside. For all ranks.

        Raises CheckpointError if there are checkpoints and none of them is whole.
        """
        found: tuple[Path | None, list[str]] = (None, [])
        if self.ranks.is_first:
            found = self._search()
        path, problems = self.ranks.told(found)
        if path is None and problems:
            raise CheckpointError(f"no checkpoint in {self.folder} is whole: " + "; ".join(problems))
        return (None if path is None else read_checkpoint(path, check=False)), problems

    def _search(self) -> tuple[Path | None, list[str]]:
        checkpoint, damaged = newest_whole(self.folder)
        for path in damaged if checkpoint is not None else ():  # they count no more, and can be looked at
            aside = path.with_name(f"{path.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
        return (None if checkpoint is None else checkpoint.path), list(damaged.values())

    def _finish(self, temporary: Path, final: Path, step: int, facts: Mapping[str, Any]) -> None:
        files = {file.name: _fingerprint(file) for file in sorted(temporary.iterdir())}
        manifest = {"format": FORMAT, "step": step, "facts": dict(facts), "files": files}
        with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
            json.dump({**manifest, "digest": _digest(manifest)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(temporary)
        if final.exists():
            shutil.rmtree(final)  # of the same step of the same run
        os.rename(temporary, final)
        _sync_folder(self.folder)
        for path in named_checkpoints(self.folder)[self.keep :]:
            shutil.rmtree(path, ignore_errors=True)

    def _attempt(self, action: Any) -> str | None:
        """What goes wrong on the first rank, if anything; all ranks hear it."""
        problem = None
        if self.ranks.is_first:
            try:
                action()
            except OSError as error:
                problem = _reason(error)
        return self.ranks.told(problem)

    def _agree(self, problem: str | None) -> str | None:
        if not self.ranks.any(problem is not None):
            return None
        return problem or "another rank failed"


def read_checkpoint(path: Path, *, check: bool = True) -> Checkpoint:
    """The checkpoint in a folder; with `check`, every byte of its files is compared with its digest."""
    try:
        manifest = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
        digest = manifest.pop("digest")
        if digest != _digest(manifest):
            raise CheckpointError(f"{path / MANIFEST} is damaged: its digest is another")
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} must have format {FORMAT}, got {manifest['format']}")
        for name, expected in manifest["files"].items() if check else ():
            if _fingerprint(path / name) != expected:
                raise CheckpointError(f"{path / name} is damaged: its size or digest is another")
        return Checkpoint(path, int(manifest["step"]), manifest["facts"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is incomplete: {Path(str(error.filename)).name} is missing") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def named_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that have their final name, the newest first."""
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def newest_whole(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest checkpoint in `folder` that is whole, and what is wrong with newer ones."""
    damaged: dict[Path, str] = {}
    for path in named_checkpoints(folder):
        try:
            return read_checkpoint(path), damaged
        except CheckpointError as error:
            damaged[path] = str(error)
    return None, damaged


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


def _fingerprint(file: Path) -> dict[str, Any]:
    known, size = hashlib.sha256(), 0
    with open(file, "rb") as opened:
        while part := opened.read(2**20):
            known.update(part)
            size += len(part)
    return {"bytes": size, "sha256": known.hexdigest()}


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


def _reason(error: BaseException) -> str:
    """What the operating system said, also where torch has wrapped it."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({_reason(cause) for cause, _ in error.failures.values()}))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
