"""`doctor`: facts that are true here, kernels with reasons, a self-check that can fail."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import __version__, functional
from dilated_attention_pytorch.cli import doctor
from dilated_attention_pytorch.cli.main import main
from dilated_attention_pytorch.kernels import cpu_flash
from support.executions import FUSED


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What `doctor --json` prints here."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["doctor", "--json"]) == 0
    found: dict[str, Any] = json.loads(output.getvalue())
    return found


def test_facts_are_those_of_this_process(report: dict[str, Any]) -> None:
    assert report["versions"]["dilated_attention_pytorch"] == __version__
    assert report["versions"]["torch"] == torch.__version__
    machine = report["machine"]
    assert machine["threads"] == torch.get_num_threads()
    assert 1 <= machine["usable_cores"] <= machine["cores"]
    assert machine["numa_nodes"] >= 1
    if machine["memory_limit"] is not None:
        assert 0 < machine["memory_available"] <= machine["memory_limit"]
    assert report["packages"]["safetensors"]["version"] is not None
    assert ("gloo" in report["distributed"]["backends"]) == torch.distributed.is_gloo_available()


def test_every_kernel_runs_or_says_why_not(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = [entry for entry in report["kernels"] if entry["device"] == "cpu"]
    assert {entry["dtype"] for entry in on_cpu} == {"float64", "float32", "bfloat16", "float16"}
    for entry in on_cpu:
        assert entry["chosen"] == (entry["kernel"] == ("stock" if entry["dtype"] == "float64" else FUSED[0]))
    assert {entry["kernel"] for entry in on_cpu} == {"native", "stock", "eager"}
    monkeypatch.setattr(cpu_flash, "_DTYPES", (torch.float32,))
    text = "\n".join(doctor._describe_kernels(doctor._kernels()))
    assert "stock            cpu, float64: cannot: it takes torch.float32, and the tensors are" in text


def test_self_check_covers_options_kernels_and_dtypes(report: dict[str, Any]) -> None:
    titles = [check["title"] for check in report["self_check"]]
    assert len(titles) == len(set(titles))
    assert {"three branches, causal", "pooled memory", "block-sparse pattern"} <= set(titles)
    kernels = [entry for entry in report["kernels"] if entry["why_not"] is None]
    assert {f"{x['kernel']}, {x['dtype']} on {x['device']}" for x in kernels} <= set(titles)
    assert report["passed"]
    for check in report["self_check"]:
        assert check["passed"]
        assert 0 <= check["forward_error"] <= check["tolerance"]
    # errors that are all 0 would mean that something was compared with itself
    assert max(check["gradient_error"] for check in report["self_check"]) > 0


def test_text_names_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch            {torch.__version__}".split() == next(
        line.split() for line in text.splitlines() if line.split()[:1] == ["torch"]
    )
    assert "stock            cpu, float64" in text
    assert f"{FUSED[0]:<16} cpu, " in text
    assert "bfloat16 float16: taken by auto" in text
    assert "eager            cpu, float64 float32 bfloat16 float16: can run when named" in text
    assert "checks passed." in text
    assert "\x1b" not in text  # no colours: this is no terminal


@pytest.mark.parametrize("factor", [1.1, torch.nan])
def test_wrong_and_lost_results_turn_it_red(
    factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right: Callable[..., Any] = functional.dilated_attention
    monkeypatch.setattr(functional, "dilated_attention", lambda *a, **options: right(*a, **options) * factor)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "FAIL three branches" in text
    assert "checks failed: do not trust results on this machine." in text
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # JSON has no NaN
    assert not found["passed"]
    assert (found["self_check"][0]["forward_error"] is None) == (factor != factor)
