"""Runs of one process: they learn, go on bit for bit, and their figures are what they say."""

from __future__ import annotations

import io
import math
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from cli.train.runs import final_tensors, losses, small, train, validations
from dilated_attention_pytorch.cli.train import ConfigError
from dilated_attention_pytorch.cli.train.data import split_corpus, windows_of
from dilated_attention_pytorch.cli.train.folder import METRICS_FILE, Metrics, read_metrics
from dilated_attention_pytorch.cli.train.loop import DivergedError, StopWish, context_classes, load_model

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout and parts": {"dropout": 0.2, "accumulation": 2},
    "bfloat16, recomputed": {"precision": "bfloat16", "checkpoint_activations": True, "dropout": 0.1},
    "standard attention": {"kind": "standard", "checkpoint_every": 0, "clip_norm": 0.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Path, variant: str) -> None:
    config = small(tmp_path, **VARIANTS[variant])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert not train(config, whole).is_interrupted
    for stop_after in (1, 2, 3, None):  # after steps 1, 3 (where a validation is due), and 6
        summary = train(config, parts, resume=True, stop_after=stop_after)
        torch.manual_seed(stop_after or 0)  # what else happens in a process makes no difference
        torch.rand(3)
        assert summary.is_interrupted == (stop_after is not None)
    assert [step for step, _ in losses(whole)] == list(range(1, 8))
    assert losses(parts) == losses(whole)
    assert sorted(validations(parts), key=lambda x: x[0]) == validations(whole)
    assert [step for step, _ in validations(whole)] == [3, 6, 7]
    expected = final_tensors(whole, config)
    assert all(torch.equal(x, expected[name]) for name, x in final_tensors(parts, config).items())


def test_a_run_that_died_repeats_what_it_lost(tmp_path: Path) -> None:
    config = small(tmp_path, checkpoint_every=3, steps=6)
    train(config, tmp_path / "run", stop_after=4)
    newest = tmp_path / "run" / "checkpoints" / "step-00000004.pt"
    newest.unlink()  # as if it had died while it wrote
    before = losses(tmp_path / "run")
    with open(tmp_path / "run" / METRICS_FILE, "a") as file:
        file.write('{"step": 5, "lo')
    train(config, tmp_path / "run", resume=True)
    after = losses(tmp_path / "run")
    assert after[:4] == before
    assert [step for step, _ in after] == [1, 2, 3, 4, 5, 6]


def test_it_learns_and_says_how_well(tmp_path: Path) -> None:
    config = small(tmp_path, steps=40, checkpoint_every=0, validate_every=0, learning_rate=1e-2)
    summary = train(config, tmp_path / "run")
    found = losses(tmp_path / "run")
    assert found[0][1] > 5.0
    assert summary.loss == found[-1][1] < 2.8
    ((step, result),) = validations(tmp_path / "run")
    assert (step, result) == (40, summary.validation)
    model = load_model(tmp_path / "run")
    windows = windows_of(split_corpus(config)[1], 3, 61)
    with torch.no_grad():
        logits = model(windows[:, :-1])
    bits = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none") / math.log(2)
    bits = bits.view(-1, 61)
    assert result["bits_per_byte"] == pytest.approx(bits.mean().item(), rel=1e-5)
    assert list(result["by_context"]) == ["1-61"]
    assert context_classes(300) == [(0, 64), (64, 128), (128, 256), (256, 300)]


def test_parts_of_a_batch_and_recomputing_change_nothing(tmp_path: Path) -> None:
    train(small(tmp_path), tmp_path / "one")
    train(small(tmp_path, accumulation=4, checkpoint_activations=True), tmp_path / "four")
    one, four = (torch.tensor([x for _, x in losses(tmp_path / name)]) for name in ("one", "four"))
    torch.testing.assert_close(one, four, rtol=1e-5, atol=1e-5)


def test_what_must_not_change(tmp_path: Path) -> None:
    config = small(tmp_path, steps=4)
    train(config, tmp_path / "run", stop_after=2)
    with pytest.raises(ConfigError, match=r"changes of dropout: 0\.0, now 0\.5"):
        train(small(tmp_path, steps=4, dropout=0.5), tmp_path / "run", resume=True)
    train(small(tmp_path, steps=4, checkpoint_every=1, log_every=1), tmp_path / "run", resume=True)
    Path(config.data[0]).write_text("other text " * 50)
    with pytest.raises(ConfigError, match="must go on with its data"):
        train(config, tmp_path / "run", resume=True)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    config = small(tmp_path, learning_rate=1e30, steps=20, clip_norm=0.0, warmup_steps=0)
    with pytest.raises(DivergedError, match=r"finite numbers, got loss .* at step"):
        train(config, tmp_path / "run")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_lines_elsewhere(tmp_path: Path) -> None:
    config = small(tmp_path, log_every=2, steps=4)
    shown = {}
    for stream in (Terminal(), io.StringIO()):
        metrics = Metrics(tmp_path, config, 0, stream)
        for step in (1, 2, 3):
            metrics.tell_step(step, 2.5, 1e-3, 1.0, 0.5)
        metrics.say("a message")
        metrics.close()
        shown[stream.isatty()] = stream.getvalue()
        assert read_metrics(tmp_path)[1]["tokens_per_second"] == 4 * 61 / 0.5
    assert re.fullmatch(r"step 2/4  loss 2\.5000  [\d,]+ tokens/s  \d+:\d\d left\na message\n", shown[False])
    assert shown[True].count("\r\033[Kstep") == 3
    assert shown[True].endswith("\r\033[Ka message\n\n")


def test_signals_are_wishes_only_while_a_run_lasts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopWish() as stop:
        assert not stop.is_made
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_made
        with pytest.raises(KeyboardInterrupt):  # asked for twice
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    thread = ThreadPoolExecutor(1)  # which can hear none
    assert not thread.submit(lambda: StopWish().__enter__().is_made).result()
