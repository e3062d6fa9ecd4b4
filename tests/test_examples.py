"""The examples run as their documentation says, on this machine, with several ranks."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def launch(num_ranks: int, example: str, *arguments: str) -> str:
    """What an example prints; an error, or a warning that is not torch's own, is a failure."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    result = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / example), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)$", text, re.MULTILINE)]


def test_two_ranks_equal_one_process_and_receive_what_was_planned() -> None:
    text = launch(2, "ring_two_ranks.py", "--length", "1201", "--causal")
    found = re.search(r"out (\S+), gradients (\S+)$", text, re.MULTILINE)
    assert found is not None
    assert all(float(error) < 2e-5 for error in found.groups())
    line = re.compile(r"^rank (\d): (\d+) tokens, received (\d+) bytes, planned (\d+)$", re.MULTILINE)
    ranks = line.findall(text)
    assert sorted((rank, tokens) for rank, tokens, _, _ in ranks) == [("0", "601"), ("1", "600")]
    assert all(received == planned for _, _, received, planned in ranks)


def test_training_on_a_mesh_learns() -> None:
    first, *_, last = losses(launch(4, "train_ring_ddp.py", "--steps", "21", "--length", "16"))
    assert last < first - 0.2


def test_training_on_two_ranks_with_sharded_parameters_is_that_of_one_process() -> None:
    sharded = losses(launch(2, "train_ring_ddp.py", "--steps", "3", "--fsdp"))
    alone = losses(launch(1, "train_ring_ddp.py", "--steps", "3", "--ring", "1"))
    assert len(alone) == 2
    assert sharded == pytest.approx(alone, abs=2e-3)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_explains_itself(
    example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(example), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(example), run_name="__main__")
    assert end.value.code == 0
    assert f"examples/{example.name}" in capsys.readouterr().out
    assert any(f"examples/{example.name}" in page.read_text() for page in (ROOT / "docs").glob("*.md"))
