"""The programs of benchmarks/, which pytest's `pythonpath` makes importable by name."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SUITES = ("cpu", "native", "memory", "sparse", "ranks", "models", "peers", "lengths", "limit", "forecast")
SUITES += ("slides", "reach", "language", "choice")
# The record of slides needs a checkout of torchscale; those of quality take hours and may be under way.
RARE = ("slides", "reach", "language", "choice")
RECORDED = tuple(name for name in SUITES if name not in RARE or (RESULTS / f"{name}.json").exists())


def suite(name: str) -> Any:
    return import_module(name)


def is_whole(name: str) -> bool:
    """Whether a record holds all cases of its suite; else `--resume` goes on, and no page shows it."""
    file = RESULTS / f"{name}.json"
    results = json.loads(file.read_text())["results"] if file.exists() else []
    return name not in RARE or sum(not x["why_not"] for x in results) == len(suite(name).CASES)
