"""The examples run as their documentation says, on this machine, with several ranks."""

from __future__ import annotations

import os
import re
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


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_two_ranks_equal_one_process_and_receive_what_was_planned(strategy: str) -> None:
    text = launch(2, "ring_two_ranks.py", "--length", "1201", "--causal", "--strategy", strategy)
    found = re.search(r"out (\S+), gradients (\S+)$", text, re.MULTILINE)
    assert found is not None
    assert all(float(error) < 2e-5 for error in found.groups())
    received = re.findall(
        r"^rank (\d): (\d+) tokens, received (\d+) bytes, planned (\d+)$", text, re.MULTILINE
    )
    assert sorted((rank, tokens) for rank, tokens, _, _ in received) == [("0", "601"), ("1", "600")]
    assert all(bytes_received == planned for _, _, bytes_received, planned in received)


@pytest.mark.parametrize("switch", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_training_on_a_mesh_learns(switch: list[str]) -> None:
    text = launch(4, "train_ring_ddp.py", "--steps", "21", "--length", "16", *switch)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)$", text, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.2


def test_both_ways_to_train_are_the_same_training() -> None:
    runs = [launch(2, "train_ring_ddp.py", "--steps", "3", *switch) for switch in ([], ["--fsdp"])]
    runs.append(launch(1, "train_ring_ddp.py", "--steps", "3", "--ring", "1"))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_explains_itself(example: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(example), "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert f"examples/{example.name}" in result.stdout
    assert f"examples/{example.name}" in (ROOT / "docs" / "distributed.md").read_text()
