"""What a run tells: a line of JSON a step, lines of progress, and events for TensorBoard if asked for."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from ..checks import parse_json
from .config import ConfigError, TrainConfig

METRICS_FILE = "metrics.jsonl"


class Metrics:
    """Writes metrics.jsonl in the folder of a run, and progress to `stream`; only the first rank has one.

    When a run goes on from `step`, what an earlier process told of later steps is forgotten, so that the file
    has each step once. On a terminal the line of progress is drawn over the one before.
    """

    def __init__(self, folder: Path, config: TrainConfig, step: int, stream: IO[str] | None = None) -> None:
        self.config, self.stream = config, sys.stderr if stream is None else stream
        self.events = _open_tensorboard(folder, step) if config.tensorboard else None
        path = folder / METRICS_FILE
        _forget_after(path, step)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - it lives as long as the run
        self.is_live = self.stream.isatty()
        self.begin, self.tokens = time.perf_counter(), 0

    def tell_step(self, step: int, loss: float, rate: float, norm: float, seconds: float) -> None:
        """After optimiser step `step`, counted from 1, which took `seconds`."""
        config = self.config
        tokens = config.batch_size * config.context_length
        self.tokens += tokens
        line = {"step": step, "loss": loss, "learning_rate": rate, "gradient_norm": norm}
        self._write({**line, "seconds": seconds, "tokens_per_second": tokens / seconds})
        if self.events is not None:
            for name in ("loss", "learning_rate", "gradient_norm"):
                self.events.add_scalar(f"train/{name}", line[name], step)
        if step % config.log_every == 0 or step == config.steps or self.is_live:
            speed = self.tokens / (time.perf_counter() - self.begin)
            left = (config.steps - step) * tokens / speed
            text = f"step {step}/{config.steps}  loss {loss:.4f}  {speed:,.0f} tokens/s  {_clock(left)} left"
            # Drawn over the line before: one line for all, which messages then push up.
            self.stream.write(f"\r\033[K{text}" if self.is_live else f"{text}\n")
            self.stream.flush()

    def tell_validation(self, step: int, result: dict[str, Any]) -> None:
        self._write({"step": step, "validation": result})
        if self.events is not None:
            self.events.add_scalar("validation/bits_per_byte", result["bits_per_byte"], step)
        classes = ", ".join(f"{name}: {bits:.3f}" for name, bits in result["by_context"].items())
        self.say(
            f"step {step}: validation {result['bits_per_byte']:.4f} bits per byte (by context {classes})"
        )

    def say(self, text: str) -> None:
        """A message that stays."""
        self.stream.write(f"\r\033[K{text}\n" if self.is_live else f"{text}\n")
        self.stream.flush()

    def sync(self) -> None:
        """Before a checkpoint is written: the lines that lead to it are on the disk."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
        if self.events is not None:
            self.events.close()
        if self.is_live:
            self.stream.write("\n")

    def _write(self, values: dict[str, Any]) -> None:
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; one that was cut off by the end of its process is left out."""
    path, lines = folder / METRICS_FILE, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(parse_json(line))
        except ValueError:
            continue
    return lines


def _forget_after(path: Path, step: int) -> None:
    kept = [line for line in read_metrics(path.parent) if line["step"] <= step]
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)


def _open_tensorboard(folder: Path, step: int) -> Any:
    check_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


def check_tensorboard() -> None:
    """Raises unless TensorBoard is installed."""
    try:
        from torch.utils import tensorboard  # noqa: F401
    except ImportError:
        advice = "pip install 'dilated-attention[train]'"
        raise ConfigError(f"tensorboard needs the package tensorboard, which is missing: {advice}") from None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
