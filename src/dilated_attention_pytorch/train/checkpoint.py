"""Checkpoints of a run: written whole or not at all, checked when read, the previous one kept.

Tensors are in the files of torch.distributed.checkpoint, for any number of ranks. Its index is JSON here:
torch's own is a pickle, and reading one runs whatever it says.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as about
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from ..checks import parse_json
from .ranks import Ranks

MANIFEST, FORMAT = "manifest.json", 1
INDEX_FILE = "index.json"  # which part of which tensor is where
CHECKPOINTS = "checkpoints"  # the folder of them in that of a run
MALFORMED = (OSError, ValueError, KeyError, AttributeError, TypeError)  # what files of others may lead to


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; the message says which, why and what is left."""


class _Writer(FileSystemWriter):
    def finish(self, metadata: about.Metadata, results: list[list[Any]]) -> None:
        places = {written.index: written.storage_data for each in results for written in each}
        index: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, about.TensorStorageMetadata), f"{name} is no tensor"
            chunks = []
            for chunk in entry.chunks:
                place = places[about.MetadataIndex(name, chunk.offsets)]
                where = {"file": place.relative_path, "start": place.offset, "length": place.length}
                chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **where})
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            index[name] = {"dtype": dtype, "size": list(entry.size), "chunks": chunks}
        _write_json(Path(self.path, INDEX_FILE), index)


class _Reader(FileSystemReader):
    def read_metadata(self) -> about.Metadata:
        """What is where; names of files outside of the folder, and types that are none, are errors."""
        tensors: dict[str, Any] = {}
        places = {}
        for name, entry in parse_json(Path(self.path, INDEX_FILE).read_text(encoding="utf-8")).items():
            chunks, dtype = [], getattr(torch, entry["dtype"], None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"a tensor must have a dtype of torch, got {entry['dtype']!r}")
            for chunk in entry["chunks"]:
                file = chunk["file"]
                if Path(file).name != file:
                    raise ValueError(f"the files of a checkpoint must be in its folder, got {file!r}")
                sizes = torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
                chunks.append(about.ChunkStorageMetadata(*sizes))
                place = _StorageInfo(file, chunk["start"], chunk["length"])
                places[about.MetadataIndex(name, chunk["offsets"])] = place
            properties = about.TensorProperties(dtype=dtype)
            tensors[name] = about.TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
        return about.Metadata(tensors, None, places, about.StorageMeta(load_id=self.load_id))


@dataclass(frozen=True)
class Checkpoint:
    """One that was read and found whole. `facts` are what the run wrote beside its tensors."""

    path: Path
    step: int
    facts: Mapping[str, Any]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills `tensors`, which must be in the checkpoint under their names and with their sizes.

        All ranks must call it, for any parts of what any number of ranks wrote.
        """
        reader = _Reader(self.path)
        try:
            stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
        except MALFORMED as error:
            raise CheckpointError(f"{self.path} could not be read: {error}") from None
        for name, tensor in tensors.items():
            size = tuple(stored[name].size) if name in stored else "absent"
            if size != tuple(tensor.shape):
                fact = f"{name}: {size}"
                raise CheckpointError(f"{self.path} must hold {name} of {tuple(tensor.shape)}, got {fact}")
        try:
            with _quiet():
                load_parts(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
        except (OSError, CheckpointException) as error:
            raise CheckpointError(f"{self.path} could not be read: {_reason(error)}") from error


def save_checkpoint(
    folder: Path, ranks: Ranks, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], keep: int
) -> None:
    """Writes `step-00000100` and so on into `folder` and deletes the oldest. All ranks must call it.

    Files are complete and on the disk before they get their name. If anything goes wrong, what was
    written is deleted, the checkpoints before stay as they were, and a CheckpointError says so.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".{final.name}.partial"

    def write() -> None:
        with _quiet():
            save_parts(dict(tensors), storage_writer=_Writer(temporary), no_dist=not dist.is_initialized())

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
        problem = _problem(write)
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
    _write_json(folder / MANIFEST, {**manifest, "digest": _digest(manifest)})
    _sync_folder(folder)


def _fingerprint(file: Path) -> dict[str, Any]:
    known = hashlib.sha256()
    with open(file, "rb") as opened:
        while part := opened.read(2**20):
            known.update(part)
        return {"bytes": opened.tell(), "sha256": known.hexdigest()}


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())


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
    except (OSError, CheckpointException, RuntimeError) as error:
        return _reason(error)
    return None


def _reason(error: BaseException) -> str:
    """What the operating system said, also where torch has wrapped it."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({_reason(cause) for cause, _ in error.failures.values()}))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # One process needs no group, and says so by `no_dist`.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # How torch copies tensors into its own files.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield
