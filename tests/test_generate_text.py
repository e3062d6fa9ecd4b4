"""The example that trains a model of bytes and lets it write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "generate_text.py"), *arguments]
    result = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def written(output: str) -> str:
    found = re.search(r"\n(when the Rabbit.*)\n\n\d+ bytes a second\n$", output, re.DOTALL)
    assert found is not None, output
    return found[1]


def test_example_learns_writes_and_writes_the_same_from_its_files(tmp_path: Path) -> None:
    writing = ("--tokens", "30", "--prompt", "when the Rabbit", "--sample", "--seed", "1")
    training = ("--batch", "2", "--length", "64", "--steps", "26", "--checkpoint")
    trained = run(*training, *writing, "--save", str(tmp_path / "model"))
    first, last = (float(loss) for loss in re.findall(r"loss (\S+)$", trained, re.MULTILINE))
    assert last < first - 2
    assert written(run("--load", str(tmp_path / "model"), *writing)) == written(trained)
