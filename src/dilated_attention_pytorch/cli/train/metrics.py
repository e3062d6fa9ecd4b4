"""What a run tells: a line of JSON a step, lines of progress, and events for TensorBoard if asked for."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from ...checks import parse_json
from .config import ConfigError, TrainConfig

METRICS_FILE = "metrics.jsonl"


class Metrics:
    """Writes metrics.jsonl in the folder of a run, and progress to `stream`; only the first rank has one.

    When a run goes on from `step`, what an earlier process told of later steps is forgotten, so that the file
    has each step once. On a terminal the line of progress is drawn over the one before.
    """

    def __init__(self, folder: Path, config: TrainConfig, step: int, stream: IO[str] | None = None) -> None:
        self.config, self.stream = config, sys.stderr if stream is None else stream
        self.events: Any = None
        if config.tensorboard:
            check_tensorboard()
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        kept = [json.dumps(line) + "\n" for line in read_metrics(folder) if line["step"] <= step]
        replace_file(folder / METRICS_FILE, "".join(kept))
        self.file = open(folder / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115 - it lives as long as the run
        self.is_live = self.stream.isatty()
        self.begin, self.tokens = time.perf_counter(), 0

    def tell_step(self, step: int, loss: float, rate: float, norm: float, seconds: float) -> None:
        """After optimiser step `step`, counted from 1, which took `seconds`."""
        config = self.config
        tokens = config.batch_size * config.context_length
        self.tokens += tokens
        figures = {"loss": loss, "learning_rate": rate, "gradient_norm": norm}
        self._write({"step": step, **figures, "seconds": seconds, "tokens_per_second": tokens / seconds})
        self._tell_tensorboard(step, {f"train/{name}": value for name, value in figures.items()})
        if step % config.log_every == 0 or step == config.steps or self.is_live:
            speed = self.tokens / (time.perf_counter() - self.begin)
            left = timedelta(seconds=round((config.steps - step) * tokens / speed))
            clock = str(left).removeprefix("0:").removeprefix("0")
            text = f"step {step}/{config.steps}  loss {loss:.4f}  {speed:,.0f} tokens/s  {clock} left"
            # Drawn over the line before: one line for all, which messages then push up.
            self.stream.write(f"\r\033[K{text}" if self.is_live else f"{text}\n")
            self.stream.flush()

    def tell_validation(self, step: int, result: dict[str, Any]) -> None:
        self._write({"step": step, "validation": result})
        self._tell_tensorboard(step, {"validation/bits_per_byte": result["bits_per_byte"]})
        classes = ", ".join(f"{name}: {bits:.3f}" for name, bits in result["by_context"].items())
        bits = f"{result['bits_per_byte']:.4f} bits per byte"
        self.say(f"step {step}: validation {bits} (by context {classes})")

    def say(self, *texts: str) -> None:
        """Messages that stay."""
        for text in texts:
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

    def _tell_tensorboard(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items() if self.events is not None else ():
            self.events.add_scalar(name, value, step)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; one that was cut off by the end of its process is left out."""
    path, lines = folder / METRICS_FILE, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(parse_json(line))
        except ValueError:
            continue
    return lines


def replace_file(path: Path, text: str) -> None:
    """Writes a file as a whole: what was there before stays until then."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def check_tensorboard() -> None:
    """Raises unless TensorBoard is installed."""
    try:
        from torch.utils import tensorboard  # noqa: F401
    except ImportError:
        advice = "pip install 'dilated-attention[train]'"
        raise ConfigError(f"tensorboard needs the package tensorboard, which is missing: {advice}") from None
