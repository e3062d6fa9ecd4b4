"""The repository that `hub-kernel` writes, loaded by `kernels` beside the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dilated_attention_pytorch.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_loads_what_the_package_computes_before_and_after_it(tmp_path: Path) -> None:
    assert main(["hub-kernel", "--out", str(tmp_path / "hub")]) == 0
    result = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            str(Path(__file__).with_name("loaded_kernel.py")),
            str(tmp_path / "hub"),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_variants_differ_by_name_alone_and_a_full_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hub-kernel", "--out", str(tmp_path)]) == 0
    variants = sorted((tmp_path / "build").iterdir())
    assert [variant.name for variant in variants] == ["torch-cpu", "torch-cuda", "torch-metal", "torch-rocm"]
    metadata = [json.loads((variant / "metadata.json").read_text()) for variant in variants]
    assert len({each["id"] for each in metadata}) == len(variants)
    assert all(each["id"].isidentifier() and each["digest"] == metadata[0]["digest"] for each in metadata)
    files = {path.relative_to(variants[0]).parts[1:] for path in variants[0].rglob("*") if path.is_file()}
    source = ROOT / "src" / "dilated_attention_pytorch"
    expected = {path.relative_to(source).parts for path in source.rglob("*.py")}
    left_out = {parts for parts in expected if parts[0] in ("cli", "__main__.py")}
    data = {("py.typed",), ("kernels", "triton", "tuning.csv")}
    assert files == expected - left_out | data | {()}
    assert main(["hub-kernel", "--out", str(tmp_path)]) == 2
    assert "must be a folder that is new or empty, got" in capsys.readouterr().err
