"""`gpu-check` rehearsed: in Triton's interpreter, where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dilated_attention_pytorch.cli.main import main


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_rehearsal_checks_and_reports(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dilated_attention_pytorch",
        "gpu-check",
        "--quick",
        "--out",
        "report.json",
    ]
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["repeats"]
    assert len(report["checks"]) == 4
    assert all(check["passed"] and check["forward_error"] > 0 for check in report["checks"])
    assert all(check["gradient_error"] > 0 for check in report["checks"][:2])  # new tokens have none
    assert "nothing is timed without a GPU" in result.stdout


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["gpu-check"]) == 2
    assert "TRITON_INTERPRET=1 rehearses it" in capsys.readouterr().err
