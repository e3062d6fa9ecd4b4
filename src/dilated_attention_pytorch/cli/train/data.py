"""Bytes of text files as one sequence, read in parts where needed, in an order that a seed decides."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from . import ConfigError, TrainConfig

SNIFFED = 4096  # bytes at either end of a file, by which it is recognised


@dataclass(frozen=True)
class Corpus:
    """Files joined end to end, of which the bytes [start, stop) are meant. No file is held in memory."""

    files: tuple[Path, ...]
    ends: tuple[int, ...]  # where each file ends in the sequence of all
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on."""
        first, last, parts = self.start + offset, self.start + offset + count, []
        index = bisect_right(self.ends, first)
        while first < last:
            begin = self.ends[index - 1] if index else 0
            want = min(last, self.ends[index]) - first
            parts.append(_read_part(self.files[index], first - begin, want))
            first, index = first + want, index + 1
        return b"".join(parts)

    def rows(self, offsets: Iterable[int], length: int) -> Tensor:
        """(rows, length) int64: the bytes from each offset on."""
        read = [torch.frombuffer(bytearray(self.read(x, length)), dtype=torch.uint8) for x in offsets]
        return torch.stack(read).long()

    def digest(self) -> str:
        """Tells whether two corpora are the same: sizes, and the first and last bytes of all files."""
        known = hashlib.sha256(f"{self.start} {self.stop}".encode())
        for path, begin, end in zip(self.files, (0, *self.ends), self.ends, strict=False):
            size = end - begin
            known.update(f" {size} ".encode())
            for offset in (0, max(0, size - SNIFFED)):
                known.update(_read_part(path, offset, min(SNIFFED, size)))
        return known.hexdigest()


def _read_part(path: Path, offset: int, count: int, *, short: bool = False) -> bytes:
    """So many bytes of a file, or fewer if it may be `short`."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            read = file.read(count)
    except OSError as error:
        raise ConfigError(f"data must be files that can be read, got {path}: {error.strerror}") from None
    if len(read) != count and not short:
        raise ConfigError(f"files of data must not shrink while they are used, got {path}")
    return read


def open_corpus(paths: Sequence[str], suffixes: Sequence[str] = ()) -> Corpus:
    """The files of `paths`, and of folders in it all text files in the order of their names.

    Of a folder those files are text that have one of `suffixes` or, without any, no zero among their first
    bytes. Hidden files and folders are left out.
    """
    files = [file for path in paths for file in _files_of(Path(path), suffixes) if file.stat().st_size]
    if not files:
        raise ConfigError(f"data must be files of text, or folders of them, got {', '.join(paths) or 'none'}")
    ends = tuple(accumulate(file.stat().st_size for file in files))
    return Corpus(tuple(files), ends, 0, ends[-1])


def standard_library_files() -> list[str]:
    """The standard library's modules that are single files, by name; none where only bytecode is there."""
    return sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))


def _files_of(path: Path, suffixes: Sequence[str]) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"data must be files or folders that exist, got {path}")
    found = []
    for folder, names, files in os.walk(path):
        names[:] = [name for name in names if not name.startswith((".", "__pycache__"))]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    kept = [file for file in found if file.is_file() and (not suffixes or file.suffix in suffixes)]
    return sorted(file for file in kept if suffixes or b"\0" not in _read_part(file, 0, SNIFFED, short=True))


def split_corpus(config: TrainConfig) -> tuple[Corpus, Corpus]:
    """Training and validation data; both must have at least one sequence and the byte after it."""
    corpus, needed = open_corpus(config.data, config.suffixes), config.context_length + 1
    if config.validation:
        train, validation = corpus, open_corpus(config.validation, config.suffixes)
    else:
        edge = len(corpus) - max(round(config.validation_share * len(corpus)), needed)
        if edge < needed:
            rule = f"data must have two sequences of context_length + 1 = {needed} bytes at least"
            raise ConfigError(f"{rule}, one to train on and one to validate, got {len(corpus)} bytes")
        train, validation = replace(corpus, stop=edge), replace(corpus, start=edge)
    for name, part in (("data", train), ("validation", validation)):
        if len(part) < needed:
            raise ConfigError(f"{name} must have context_length + 1 = {needed} bytes, got {len(part)}")
    return train, validation


def batch_at(corpus: Corpus, step: int, config: TrainConfig) -> Tensor:
    """(batch_size, context_length + 1) bytes: a function of step and seed alone, so that runs can go on."""
    generator = torch.Generator().manual_seed(mix_seed(config.seed, "data", step))
    starts = torch.randint(len(corpus) - config.context_length, (config.batch_size,), generator=generator)
    return corpus.rows(starts.tolist(), config.context_length + 1)


def windows_of(corpus: Corpus, count: int, length: int) -> Tensor:
    """(at most count, length + 1) bytes, evenly spread over the corpus; their targets do not overlap."""
    count = max(1, min(count, (len(corpus) - 1) // length))
    space = len(corpus) - length - 1
    starts = [space * i // max(1, count - 1) for i in range(count)]
    return corpus.rows(starts, length + 1)


def mix_seed(*parts: object) -> int:
    """A seed of 63 bits of all parts, so that neighbouring steps share no random numbers."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
