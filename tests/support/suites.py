"""The programs of benchmarks/, which pytest's `pythonpath` makes importable by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SUITES = ("cpu", "native", "memory", "sparse", "ranks", "models", "peers", "lengths", "limit", "forecast")
SUITES += ("quality", "slides")
# The record of slides needs a checkout of torchscale, and may be missing.
RECORDED = tuple(name for name in SUITES if name != "slides" or (RESULTS / "slides.json").exists())


def suite(name: str) -> Any:
    return import_module(name)
