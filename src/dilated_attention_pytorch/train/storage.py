"""Tensors in files by torch.distributed.checkpoint, for any number of ranks, without pickled metadata."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from ..checks import parse_json

INDEX_FILE = "index.json"  # which part of which tensor is where


class _Writer(FileSystemWriter):
    """Writes the index as JSON: torch's own is a pickle, and reading one runs whatever it says."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {written.index: written.storage_data for each in results for written in each}
        index = {name: _describe(name, each, places) for name, each in metadata.state_dict_metadata.items()}
        with open(Path(self.path, INDEX_FILE), "w", encoding="utf-8") as file:
            json.dump(index, file)
            file.flush()
            os.fsync(file.fileno())


class _Reader(FileSystemReader):
    def read_metadata(self) -> Metadata:  # one for all ranks
        metadata = read_index(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read_index(folder: Path) -> Metadata:
    """What is where in a folder; names of files outside of it, and types that are none, are errors."""
    index = parse_json((folder / INDEX_FILE).read_text(encoding="utf-8"))
    tensors: dict[str, Any] = {}
    places = {}
    for name, entry in index.items():
        chunks = []
        for chunk in entry["chunks"]:
            chunks.append(ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])))
            place = _StorageInfo(_plain_name(chunk["file"]), chunk["start"], chunk["length"])
            places[MetadataIndex(name, chunk["offsets"])] = place
        properties = TensorProperties(dtype=_dtype(entry["dtype"]))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    return Metadata(tensors, storage_data=places)


def _describe(name: str, entry: Any, places: Mapping[MetadataIndex, Any]) -> dict[str, Any]:
    if not isinstance(entry, TensorStorageMetadata):
        raise TypeError(f"a checkpoint must hold tensors only, got {name}")
    chunks = []
    for chunk in entry.chunks:
        place = places[MetadataIndex(name, chunk.offsets)]
        where = {"file": place.relative_path, "start": place.offset, "length": place.length}
        chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **where})
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "size": list(entry.size), "chunks": chunks}


def _plain_name(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"the files of a checkpoint must be in its folder, got {name!r}")
    return name


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a tensor of a checkpoint must have a dtype of torch, got {name!r}")
    return found


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes `tensors` into `folder`, which exists. All ranks must call it; each writes its part."""
    with _alone_in_peace():
        save(dict(tensors), storage_writer=_Writer(folder), no_dist=not dist.is_initialized())


def read_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills `tensors` from what any number of ranks wrote. All ranks must call it, for any parts."""
    with _alone_in_peace():
        load(dict(tensors), storage_reader=_Reader(folder), no_dist=not dist.is_initialized())


def stored_sizes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The names and sizes of the tensors in a folder."""
    entries = read_index(folder).state_dict_metadata
    return {name: tuple(x.size) for name, x in entries.items() if isinstance(x, TensorStorageMetadata)}


@contextmanager
def _alone_in_peace() -> Iterator[None]:
    with warnings.catch_warnings():
        # One process needs no group, and says so by `no_dist`.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # How torch copies tensors into its own files.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield
