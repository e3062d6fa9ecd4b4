"""Programs of their own: what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_NUMPY = "ignore:Failed to initialize NumPy:UserWarning"  # torch's remark, not the program's


def run_program(*command: object, cwd: Path = ROOT, **environment: str) -> tuple[str, str]:
    """What a program prints, and its remarks; a failure is one of the test."""
    result = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, result.stderr


def run_python(*arguments: object, **options: Any) -> str:
    """What this Python prints on one core, as tests run on each; a warning or a remark is a failure too."""
    command = (sys.executable, "-W", "error", "-W", WITHOUT_NUMPY, *arguments)
    printed, remarks = run_program(*command, OMP_NUM_THREADS="1", **options)
    assert remarks == ""
    return printed
