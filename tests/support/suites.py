"""The programs of benchmarks/, importable by name."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS, RESULTS = ROOT / "benchmarks", ROOT / "benchmarks" / "results"
SUITES = ("cpu", "memory", "sparse", "ring", "models", "modules", "limit", "forecast", "quality")
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))


def suite(name: str) -> Any:
    return import_module(name)
