"""Runs of several ranks: the losses of one process, checkpoints for any number of ranks, killed workers."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cli.train.runs import (
    ENVIRONMENT,
    StopAfter,
    final_tensors,
    losses,
    small,
    train as train_alone,
    validations,
)
from dilated_attention_pytorch.cli.train import ConfigError, TrainConfig
from dilated_attention_pytorch.cli.train.loop import train
from dilated_attention_pytorch.cli.train.ranks import check_ranks
from support.ranks import run_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "ring": {},
    "ring, recomputed in parts": {"checkpoint_activations": True, "accumulation": 2},
    "ring, replicated": {"shard_parameters": False, "accumulation": 2},
    "two of one": {"ring": 1},
    "standard attention, replicated": {"kind": "standard", "shard_parameters": False},
}
STEPS = {"steps": 5, "checkpoint_every": 0}


def train_here(rank: int, values: dict[str, Any], out: Path, stop_after: int | None = None) -> None:
    """As the command does, or goes on; one of the ranks hears a signal after so many steps."""
    stop = StopAfter(stop_after if rank == 0 else None)
    with patch("dilated_attention_pytorch.cli.train.loop.StopWish", lambda: stop):
        train(TrainConfig.from_dict(values), out, resume=True)


def train_all(rank: int, values: dict[str, Any], folder: str) -> None:
    """What two ranks do: all variants, a run in two parts, and a turn at one that others began."""
    out = Path(folder)
    for name, variant in VARIANTS.items():
        train_here(rank, {**values, **variant}, out / name)
    noisy = {**values, "dropout": 0.2}
    train_here(rank, noisy, out / "whole")
    train_here(rank, noisy, out / "parts", stop_after=2)
    train_here(rank, noisy, out / "parts")
    take_turn(rank, values, folder)


def take_turn(rank: int, values: dict[str, Any], folder: str) -> None:
    train_here(rank, values, Path(folder, "turns"), stop_after=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs by 1, 2 and 3 ranks."""
    folder = tmp_path_factory.mktemp("runs")
    config = small(folder, **STEPS)
    train_alone(config, folder / "alone")
    train_alone(small(folder, **STEPS, kind="standard"), folder / "alone, standard")
    train_alone(config, folder / "turns", stop_after=1)
    run_ranks(2, train_all, asdict(config), str(folder), timeout=240.0)
    run_ranks(3, take_turn, asdict(config), str(folder))
    train_alone(config, folder / "turns", resume=True)
    return folder


def check_losses(out: Path, alone: Path) -> None:
    assert [step for step, _ in losses(out)] == [step for step, _ in losses(alone)]
    got, want = (torch.tensor([x for _, x in losses(path)]) for path in (out, alone))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5, msg=lambda text: f"{out.name}: {text}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_have_the_losses_of_one(runs: Path, variant: str) -> None:
    alone = runs / ("alone, standard" if variant.startswith("standard") else "alone")
    check_losses(runs / variant, alone)
    found, expected = validations(runs / variant), validations(alone)
    assert [step for step, _ in found] == [step for step, _ in expected] == [3, 5]
    for (_, mine), (_, other) in zip(found, expected, strict=True):
        assert mine["bits_per_byte"] == pytest.approx(other["bits_per_byte"], abs=1e-5)
        assert mine["by_context"] == pytest.approx(other["by_context"], abs=1e-5)


def test_two_ranks_go_on_bit_for_bit(runs: Path) -> None:
    assert len(losses(runs / "whole")) == 5
    assert losses(runs / "parts") == losses(runs / "whole")
    config = small(runs, **STEPS, dropout=0.2)
    parts, whole = (final_tensors(runs / name, config) for name in ("parts", "whole"))
    assert all(torch.equal(parts[name], x) for name, x in whole.items())


def test_another_number_of_ranks_goes_on(runs: Path) -> None:
    check_losses(runs / "turns", runs / "alone")


# A worker that kills itself in the midst of its sixth step, once, as the system does when memory is short.
PROGRAM = """
import os, signal, sys
from dilated_attention_pytorch.cli.main import main
from dilated_attention_pytorch.cli.train.loop import Run

step = Run._clip

def fragile(self):
    if self.step == 5 and self.ranks.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)

Run._clip = fragile
sys.exit(main())
"""


def test_a_killed_worker_leads_to_a_restart_and_a_finished_run(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    config, out = small(tmp_path, steps=8), tmp_path / "run"
    (tmp_path / "settings.json").write_text(config.to_json())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["train", "--config", str(tmp_path / "settings.json"), "--out", str(out)]
    command_line = [*launcher, "--max-restarts", "2", str(program), *arguments]
    done = subprocess.run(
        command_line, capture_output=True, text=True, timeout=150, env=ENVIRONMENT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "from step 4 of 8" in done.stderr  # the last checkpoint before the sixth step
    assert len(re.findall("done: 8 steps", done.stderr)) == 1
    train_alone(config, tmp_path / "alone")
    check_losses(out, tmp_path / "alone")


def test_ranks_that_cannot_share_the_work(tmp_path: Path) -> None:
    config = small(tmp_path, batch_size=4, accumulation=2)
    for size, ring, message in ((4, 3, "must divide the number of ranks"), (4, 1, "must divide batch_size")):
        with pytest.raises(ConfigError, match=message):
            check_ranks(config, size, ring)
    with pytest.raises(ConfigError, match="a byte of each sequence"):
        check_ranks(small(tmp_path, context_length=2), 3, 3)
