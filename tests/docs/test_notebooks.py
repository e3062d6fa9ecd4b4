"""The notebooks run, warnings as errors, and hold what they print and draw."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
WITHOUT_NUMPY = "ignore:Failed to initialize NumPy:UserWarning"  # torch's remark, not the notebook's
KEYS = {"markdown": {"cell_type", "id", "metadata", "source"}}
KEYS["code"] = KEYS["markdown"] | {"execution_count", "outputs"}


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return found


def outputs(notebook: Path) -> list[list[str]]:
    """By cell what it printed, but for the digits, and which pictures it drew."""
    return [
        [re.sub(r"[\d.,]+", "#", "".join(x.get("text", x.get("data", ())))) for x in cell.get("outputs", ())]
        for cell in cells(notebook)
    ]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_holds_what_it_gives(notebook: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(notebook, tmp_path))
    command = [sys.executable, "-W", "error", "-W", WITHOUT_NUMPY, str(ROOT / "docs" / "run_notebooks.py")]
    result = subprocess.run(
        [*command, str(copy)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert len(outputs(copy)) == len(outputs(notebook))
    for number, (got, stored) in enumerate(zip(outputs(copy), outputs(notebook), strict=True)):
        assert got == stored, f"cell {number}: python docs/run_notebooks.py"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_one_of_format_4_5(notebook: Path) -> None:
    document = json.loads(notebook.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert all(set(cell) == KEYS[cell["cell_type"]] for cell in document["cells"])
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
