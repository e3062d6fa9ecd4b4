"""What a run keeps in its folder: metrics, a line of JSON a step, and checkpoints, a file each.

A checkpoint is written whole or not at all, checked when it is read, and the one before is kept. Its file is
what `torch.save` writes: an archive with a checksum for each of its parts. The first rank writes it, and any
number of ranks reads it, with `weights_only`: no code of a file is run.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from lzma import LZMAError
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ...checks import parse_json
from ...modules.pretrained import replacing
from ..bench.record import write_text
from . import TrainConfig
from .ranks import Ranks

FORMAT = 2
CHECKPOINTS = "checkpoints"  # the folder of them in that of a run
METRICS_FILE = "metrics.jsonl"
TENSORBOARD = "torch.utils.tensorboard"  # which needs the package tensorboard, an extra
_OF_ARCHIVES = (UnpicklingError, BadZipFile, EOFError, LZMAError, zlib.error)
# What files of others may lead to.
MALFORMED = (OSError, ValueError, LookupError, AttributeError, TypeError, RuntimeError, *_OF_ARCHIVES)


class CheckpointError(Exception):
    """A checkpoint that could not be written or read; the message says which, why and what is left."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was read and found whole. `facts` are what the run wrote beside its tensors."""

    path: Path
    step: int
    facts: Mapping[str, Any]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills `tensors`, which must be in the checkpoint under their names and with their sizes."""
        stored = _read(self.path)["tensors"]
        for name, x in tensors.items():
            size = tuple(stored[name].shape) if name in stored else "absent"
            if size != tuple(x.shape):
                rule = f"must hold {name} of {tuple(x.shape)}"
                raise CheckpointError(f"{self.path} {rule}, got {name}: {size}")
            value = stored[name].to(x.device)
            if isinstance(x, DTensor):  # of which this rank holds a shard
                value = distribute_tensor(value, x.device_mesh, x.placements, src_data_rank=None)
            x.copy_(value)


def save_checkpoint(
    folder: Path, ranks: Ranks, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], keep: int
) -> None:
    """Writes `step-00000100.pt` and so on into `folder` and deletes the oldest. All ranks must call it.

    A file is complete and on the disk before it gets its name. If anything goes wrong, what was written is
    deleted, the checkpoints before stay as they were, and a CheckpointError says so.
    """
    path, whole = folder / f"step-{step:08d}.pt", {}
    for name, x in tensors.items():
        joined = x.full_tensor() if isinstance(x, DTensor) else x  # by all ranks
        if ranks.is_first:
            whole[name] = joined.detach().cpu().contiguous()
    problem = None
    if ranks.is_first:
        try:
            _write(path, {"format": FORMAT, "step": step, "facts": json.dumps(facts), "tensors": whole})
            for old in named_checkpoints(folder)[keep:]:
                old.unlink()
        except (OSError, RuntimeError) as error:
            problem = _reason(error)
    if (problem := ranks.told(problem)) is not None:
        before = named_checkpoints(folder)
        left = f"the last one is {before[0]}" if before else "there is none before it"
        raise CheckpointError(f"checkpoint {path} could not be written: {problem}; {left}")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(".step-*"):  # of a run that was killed while it wrote
        left.unlink()
    with replacing(path) as new, open(new, "wb") as file:
        torch.save(content, file)
    if os.name != "nt":  # where folders cannot be opened
        opened = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(opened)  # the name is on the disk, too
        finally:
            os.close(opened)


def latest_checkpoint(folder: Path, ranks: Ranks) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and what is wrong with newer ones, which are set aside. For all ranks.

    Raises CheckpointError if there are checkpoints and none of them is whole.
    """
    checkpoint, damaged = newest_whole(folder) if ranks.is_first else (None, {})
    for path in damaged if checkpoint is not None else ():  # they count no more, and can be looked at
        os.replace(path, path.with_name(f"{path.name}.damaged"))
    checkpoint, problems = ranks.told((checkpoint, list(damaged.values())))
    if checkpoint is None and problems:
        raise CheckpointError(f"no checkpoint in {folder} is whole: " + "; ".join(problems))
    return checkpoint, problems


def find_checkpoint(path: Path) -> tuple[Checkpoint, list[str]]:
    """A checkpoint, or of the run in a folder the newest whole one, and what is wrong with newer.

    Nothing is changed, so that it can be asked while the run goes on.
    """
    if path.is_file():
        return read_checkpoint(path), []
    checkpoint, damaged = newest_whole(path / CHECKPOINTS)
    problems = list(damaged.values())
    if checkpoint is None:
        raise CheckpointError("; ".join([f"{path} must hold a whole checkpoint, got none", *problems]))
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
    """The checkpoints in `folder` that have their final name, the newest first.

    Folders of that name, which older versions wrote, are among them, so that their run is not begun anew.
    """
    named = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}(\.pt)?", path.name)]
    return sorted(named, key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a file; every part of it is compared with its checksum."""
    try:
        with ZipFile(path) as archive:
            if (part := archive.testzip()) is not None:
                raise CheckpointError(f"{path} is damaged: the checksum of {part} is another")
        stored = _read(path)
        if stored["format"] != FORMAT:
            raise CheckpointError(f"{path} must have format {FORMAT}, got {stored['format']}")
        return Checkpoint(path, int(stored["step"]), parse_json(stored["facts"]))
    except MALFORMED as error:
        raise CheckpointError(f"{path} is damaged: {_reason(error)}") from error


def _read(path: Path) -> Any:
    try:
        return torch.load(path, mmap=True, weights_only=True)
    except MALFORMED as error:
        raise CheckpointError(f"{path} could not be read: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """What the operating system said, or the first line of an error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class Metrics:
    """Writes metrics.jsonl in the folder of a run, and progress to `stream`; only the first rank has one.

    When a run goes on from `step`, what an earlier process told of later steps is forgotten, so that the file
    has each step once. On a terminal the line of progress is drawn over the one before.
    """

    def __init__(self, folder: Path, config: TrainConfig, step: int, stream: IO[str] | None = None) -> None:
        self.config, self.stream = config, sys.stderr if stream is None else stream
        self.is_live = self.stream.isatty()
        self.events: Any = None
        if config.tensorboard:
            writer = import_module(TENSORBOARD).SummaryWriter
            self.events = writer(str(folder / "tensorboard"), purge_step=step + 1)
        kept = [json.dumps(line) + "\n" for line in read_metrics(folder) if line["step"] <= step]
        write_text(folder / METRICS_FILE, "".join(kept))
        self.file = open(folder / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115 - it lives as long as the run
        self.begin, self.tokens = time.perf_counter(), 0

    def tell_step(self, step: int, loss: float, rate: float, norm: float, seconds: float) -> None:
        """After optimiser step `step`, counted from 1, which took `seconds`."""
        config = self.config
        tokens = config.batch_size * config.context_length
        self.tokens += tokens
        figures = {"loss": loss, "learning_rate": rate, "gradient_norm": norm}
        speed = {"seconds": seconds, "tokens_per_second": tokens / seconds}
        self._write({"step": step, **figures, **speed}, {f"train/{name}": x for name, x in figures.items()})
        if step % config.log_every == 0 or step == config.steps or self.is_live:
            pace = self.tokens / (time.perf_counter() - self.begin)
            left = timedelta(seconds=round((config.steps - step) * tokens / pace))
            clock = str(left).removeprefix("0:").removeprefix("0")
            text = f"step {step}/{config.steps}  loss {loss:.4f}  {pace:,.0f} tokens/s  {clock} left"
            self.say(text, end="" if self.is_live else "\n")  # messages push the one live line up

    def tell_validation(self, step: int, result: dict[str, Any]) -> None:
        bits = result["bits_per_byte"]
        self._write({"step": step, "validation": result}, {"validation/bits_per_byte": bits})
        classes = ", ".join(f"{name}: {value:.3f}" for name, value in result["by_context"].items())
        self.say(f"step {step}: validation {bits:.4f} bits per byte (by context {classes})")

    def say(self, text: str, end: str = "\n") -> None:
        print(f"\r\033[K{text}" if self.is_live else text, end=end, file=self.stream, flush=True)

    def sync(self) -> None:
        """Before a checkpoint is written: the lines that lead to it are on the disk."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
        if self.events is not None:
            self.events.close()
        if self.is_live:
            self.stream.write("\n")

    def _write(self, line: dict[str, Any], scalars: dict[str, float]) -> None:
        print(json.dumps(line), file=self.file, flush=True)
        for name, value in scalars.items() if self.events is not None else ():
            self.events.add_scalar(name, value, line["step"])


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; one that was cut off by the end of its process is left out."""
    path, lines = folder / METRICS_FILE, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(parse_json(line))
        except ValueError:
            continue
    return lines
