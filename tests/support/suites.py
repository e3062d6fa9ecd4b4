"""The programs of benchmarks/, which pytest's `pythonpath` makes importable by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SUITES = ("cpu", "native", "memory", "sparse", "ranks", "models", "peers", "lengths", "limit", "forecast")
SUITES += ("quality",)


def suite(name: str) -> Any:
    return import_module(name)
