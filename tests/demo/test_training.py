"""The demo's model: that it learns, that it can be interrupted, and on what it learns."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.demo import training
from dilated_attention_pytorch.demo.training import Training, train_model

SMALL = {"d_model": 16, "nhead": 2, "num_layers": 1, "dim_feedforward": 32, "context_length": 64}


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A text that is easy to learn, and a model that is small."""
    for name, value in SMALL.items():
        monkeypatch.setitem(training.SETTINGS, name, value)
    monkeypatch.setitem(training.SETTINGS, "learning_rate", 0.03)
    monkeypatch.setattr(training, "PROMPT", "abcdab")
    monkeypatch.setattr(training, "SAMPLE_BYTES", 60)
    (tmp_path / "a.py").write_text("abcd" * 5000)
    return [str(tmp_path / "a.py")]


def test_it_learns_and_tells(files: list[str]) -> None:
    told: list[tuple[int, int, float, float | None]] = []
    found, model = train_model(files, 60, lambda *values: told.append(values))
    assert isinstance(found, Training)
    assert (found.steps, found.steps_planned, found.is_interrupted) == (60, 60, False)
    assert found.losses[0][1] > 4
    assert found.validations[-1][0] == 60
    assert found.validations[-1][1] < 1
    assert [step for step, _ in found.validations] == [10, 20, 30, 40, 50, 60]
    assert len(found.losses) <= training.CURVE_POINTS
    assert found.losses[-1][0] == 60
    assert (found.train_bytes, found.validation_bytes) == (19200, 800)
    assert [step for step, steps, _, validation in told if validation is None] == list(range(1, 61))
    assert told[-1][3] == found.validations[-1][1]
    sample = training.write_sample(model)
    assert sample == training.write_sample(model)
    assert len(sample.encode()) >= training.SAMPLE_BYTES
    assert sample.count("abcd") > 10


def test_interrupt_ends_it_after_the_step(files: list[str]) -> None:
    def interrupt(step: int, *_: object) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    found, _ = train_model(files, 50, interrupt)
    assert (found.steps, found.is_interrupted) == (3, True)
    assert [step for step, _ in found.losses] == [1, 2, 3]
    assert found.validations == ()


def test_a_late_run_is_ended_and_not_called_interrupted(files: list[str]) -> None:
    found, _ = train_model(files, 50, lambda *_: None, limit=0.0)
    assert (found.steps, found.steps_planned, found.is_interrupted) == (1, 50, False)


def test_steps_are_chosen_for_the_time(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [100.0, 0.1, 0.9, 0.5]  # the first step starts what all use
    lines = [{"step": i, "loss": 1.0, "seconds": x} for i, x in enumerate(taken)]
    monkeypatch.setattr(training, "read_metrics", lambda _: lines)
    before = torch.get_num_threads()
    assert training.step_seconds(files, 1) == 0.5
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("alone", "together", "chosen"), [(0.5, 0.25, (36, 7)), (0.25, 4.0, (36, 1))])
def test_threads_are_those_that_are_faster(
    alone: float, together: float, chosen: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(training, "step_seconds", lambda _, threads: alone if threads == 1 else together)
    assert training.plan_steps(10.0, []) == chosen
    assert training.plan_steps(0.001, [])[0] == 1


def test_curve_is_of_means() -> None:
    losses = [(i + 1, float(i)) for i in range(100)]
    means = training._means(losses)
    assert means[:3] == ((2, 0.5), (5, 3.0), (7, 5.5))
    assert means[-1] == (100, 98.0)
    assert len(means) == training.CURVE_POINTS
    assert training._means(losses[:2]) == tuple(losses[:2])
    assert training._means([]) == ()


def test_a_library_without_source_gives_no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert training.source_files() == []


def test_data_are_python_sources_in_order() -> None:
    files = training.source_files()
    assert files == sorted(files)
    assert any(name.endswith("argparse.py") for name in files)
    config = training.make_config(files, 400)
    assert config.validate_every == 50
    assert math.isclose(config.segment_lengths[-1], config.context_length)
