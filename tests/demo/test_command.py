"""The command `demo`: what it refuses, what it writes when something is missing, wrong or interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch import functional
from dilated_attention_pytorch.bench.exactness import Check
from dilated_attention_pytorch.cli.main import main
from dilated_attention_pytorch.demo import report, story
from dilated_attention_pytorch.demo.scaling import Cost, Row

CHECKS = (Check("three branches", 1e-16, 2e-16),)
ROWS = [
    Row(1024, dict.fromkeys(("dense", "dilated", "block-sparse"), Cost(0.25, 2**20, 1.0))),
    Row(2048, {"dilated": Cost(0.5, 0, 1.0)}),
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks and measurements that take no time."""
    monkeypatch.setattr(story, "run_checks", lambda: iter(CHECKS))
    monkeypatch.setattr(story, "doubling_rows", lambda budget: iter(ROWS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "--seconds must be positive, got 0.0"),
        (["--seconds", "inf"], "--seconds must be positive, got inf"),
        (["--train-seconds", "-1"], "--train-seconds must be 0 or more, got -1.0"),
        (
            ["--out", "no/such/place.html"],
            "--out must lie in a directory that is there, got no/such/place.html",
        ),
        (["--out", "."], "--out must be a file, got the directory ."),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(story, "gather", lambda *_: pytest.fail("measured in spite of a mistake"))
    assert main(["demo", *arguments]) == 2
    assert f"dilated-attention demo: error: {message}\n" == capsys.readouterr().err


def test_steps_and_seconds_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--steps", "5", "--train-seconds", "5"])
    assert caught.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_inexact_library_is_neither_timed_nor_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = functional.dilated_attention
    monkeypatch.setattr(functional, "dilated_attention", lambda *a, **k: right(*a, **k) * 1.000001)
    monkeypatch.setattr(story, "time_in_view", lambda *_: pytest.fail("an inexact library was timed"))
    monkeypatch.setattr(story, "train_model", lambda *_: pytest.fail("an inexact library was trained with"))
    out = tmp_path / "r.html"
    assert main(["demo", "--out", str(out)]) == 1
    assert "WRONG" in capsys.readouterr().out
    page = out.read_text()
    assert "WRONG" in page
    assert "The library is not exact here: 9 of 9 checks fail." in page
    assert "Nothing was measured." in page


def test_parts_that_are_missing_say_why(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(story, "why_no_peaks", lambda: "this system keeps no books")
    out = tmp_path / "r.html"
    assert main(["demo", "--train-seconds", "0", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["training"], found["why_no_peaks"]) == (None, "this system keeps no books")
    page = unescape(out.read_text())
    assert "The memory of calls is not shown: this system keeps no books." in page
    assert "No training was asked for." in page
    assert 'id="time"' in page
    assert 'id="memory"' not in page
    assert f"dilated-attention demo --seconds 60 --train-seconds 0 --out {out}" in page


def test_python_without_its_source_is_no_failure(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(story, "source_files", list)
    assert main(["demo", "--out", str(tmp_path / "r.html")]) == 0
    assert "This Python comes without the source of its library" in (tmp_path / "r.html").read_text()


def test_a_training_that_fails_leaves_a_report_of_the_rest(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(story, "train_model", fail)
    assert main(["demo", "--steps", "1", "--out", str(tmp_path / "r.html")]) == 1
    assert "The training failed: no space left" in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "r.html").read_text()
    assert "The training failed: no space left" in page
    assert 'id="time"' in page


def test_interrupt_among_the_checks_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted() -> Iterator[Check]:
        yield CHECKS[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(story, "run_checks", interrupted)
    assert main(["demo", "--out", str(tmp_path / "r.html")]) == 130
    page = (tmp_path / "r.html").read_text()
    assert "Stopped early. 1 of 1 checks against the definition pass. Nothing was timed." in page
    assert "The demo was interrupted before." in page


def test_interrupt_while_it_writes_keeps_the_training(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(model: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(story, "write_sample", interrupt)
    assert main(["demo", "--steps", "1", "--out", str(tmp_path / "r.html"), "--json"]) == 130
    training = json.loads(capsys.readouterr().out)["training"]
    assert (training["steps"], training["sample"]) == (1, None)
    page = (tmp_path / "r.html").read_text()
    assert 'id="loss"' in page
    assert "What it writes" not in page


def test_ctrl_c_ends_it_with_a_report(tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    command = [
        sys.executable,
        "-m",
        "dilated_attention_pytorch",
        "demo",
        "--seconds",
        "500",
        "--out",
        str(out),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("     1,024"):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (130, "")
    assert "Stopped early. 9 of 9 checks against the definition pass. At " in rest
    assert f"The report is in {out}" in rest
    page = out.read_text()
    assert 'id="time"' in page
    assert 'id="pattern-blocks"' in page
    assert "<td>1,024</td>" in page


@pytest.mark.parametrize("name", report.PICTURES)
def test_pictures_are_those_of_show(name: str, tmp_path: Path) -> None:
    options, _ = report.PICTURES[name]
    out = tmp_path / "p.svg"
    assert main(["show", *options.split(), "--pixels", str(report.PIXELS), "--out", str(out)]) == 0
    assert report.draw_pattern(name, options) == out.read_text().replace('id="pattern"', f'id="{name}"')
