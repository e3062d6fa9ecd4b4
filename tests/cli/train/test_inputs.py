"""Settings from files and flags, learning rates, and bytes of files, drawn by step and seed."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.cli import train as command
from dilated_attention_pytorch.cli.train import ConfigError, TrainConfig
from dilated_attention_pytorch.cli.train.data import (
    batch_at,
    mix_seed,
    open_corpus,
    split_corpus,
    windows_of,
)
from dilated_attention_pytorch.cli.train.loop import learning_rate


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rte": 1.0, "stepz": 3}, "known settings only, got learning_rte, stepz"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": True}, "steps must be of type int, got True"),
        ({"steps": 2.5}, "steps must be of type int, got 2.5"),
        ({"learning_rate": "fast"}, "learning_rate must be of type float"),
        ({"learning_rate": float("inf")}, "learning_rate must be finite"),
        ({"learning_rate": -1}, "learning_rate must be positive"),
        ({"data": "file"}, "data must be a list, got 'file'"),
        ({"segment_lengths": [16, "x"]}, "segment_lengths must be a list of int, got 'x'"),
        ({"attention_options": 3}, "attention_options must be a mapping"),
        ({"tensorboard": 1}, "tensorboard must be of type bool"),
        ({"precision": "float16"}, "precision must be one of"),
        ({"accumulation": 3}, "accumulation must divide batch_size, got 8 and 3"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"keep_checkpoints": 1}, "keep_checkpoints must be at least 2"),
        ({"ring": 2, "kind": "standard"}, "ring needs a kind of"),
        ({"final_share": 2}, "final_share must be from 0 to 1"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_dict(settings)


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"steps": 5, "d_model": 64, "data": ["x"], "tensorboard": True, "dropout": 0}))
    flags = ["--steps", "9", "--no-tensorboard", "--segments", "8,32", "--rates", "1,4"]
    flags += ["--context-length", "4k", "--seed", "-1"]
    flags += ["--attention-options", '{"head_offsets": "blocked"}', "--num-kv-heads", "2"]
    config = command.read_config(parse("a", "b", "--out", str(tmp_path), "--config", str(file), *flags))
    assert (config.steps, config.d_model, config.data, config.tensorboard) == (9, 64, ("a", "b"), False)
    assert (config.segment_lengths, config.dilation_rates) == ((8, 32), (1, 4))
    assert (config.context_length, config.seed) == (4096, -1)
    assert config.attention_options == {"head_offsets": "blocked"}
    assert config.model_settings()["num_kv_heads"] == 2
    assert TrainConfig.from_dict(json.loads(config.to_json())) == config


def test_files_that_are_no_config(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    for text, message in (("{", "must be JSON"), ("[]", "must be a JSON object"), ('{"a": 1}', "got a$")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            command.read_config(parse("x", "--out", "y", "--config", str(file)))
    with pytest.raises(ConfigError, match="can be read"):
        command.read_config(parse("x", "--out", "y", "--config", str(tmp_path / "none")))


def test_branches_reach_across_the_context() -> None:
    for length in (2, 64, 65, 1000, 1024, 4096, 100_000):
        config = TrainConfig(context_length=length)
        assert config.segment_lengths[-1] >= length
        assert config.dilation_rates[0] == 1
        assert all(b == 4 * a for a, b in pairwise(config.dilation_rates))


def test_the_rate_rises_and_falls() -> None:
    config = TrainConfig(learning_rate=2.0, steps=20, warmup_steps=5, final_share=0.1)
    rates = [learning_rate(config, step) for step in range(20)]
    assert rates[:6] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])
    assert all(a > b for a, b in pairwise(rates[5:]))
    assert rates[-1] == pytest.approx(0.2, abs=1e-15)
    assert learning_rate(TrainConfig(learning_rate=1.0, steps=1, warmup_steps=0), 0) == 1.0


WHOLE = bytes(range(1, 101)) + b"x" * 7 + b"yz" * 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "a.txt").write_bytes(WHOLE[:100])
    (root / "b" / "c.md").write_bytes(WHOLE[100:107])
    (root / "b" / "empty.txt").write_bytes(b"")
    (root / "b" / "d.txt").write_bytes(WHOLE[107:])
    (root / "b" / "image.bin").write_bytes(b"\0\1\2")
    (root / ".hidden" / "e.txt").write_bytes(b"never")
    (tmp_path / "other.txt").write_bytes(b"o" * 30)
    return root


def test_files_are_one_sequence(folder: Path) -> None:
    corpus = open_corpus([str(folder)])
    assert corpus.read(0, len(corpus)) == WHOLE
    for start in range(0, len(WHOLE) + 1, 3):
        for stop in range(start, len(WHOLE) + 1, 5):
            assert corpus.read(start, stop - start) == WHOLE[start:stop]
    assert open_corpus([str(folder)], [".txt"]).read(0, 160) == WHOLE[:100] + b"yz" * 30
    # A file that is named is data, whatever it is.
    assert open_corpus([str(folder / "b" / "image.bin")]).read(0, 3) == b"\0\1\2"


def test_batches_are_a_function_of_step_and_seed(folder: Path) -> None:
    corpus, whole = open_corpus([str(folder)]), torch.tensor(list(WHOLE))
    few, many = (TrainConfig(batch_size=b, context_length=n, seed=1) for b, n in ((3, 10), (400, 150)))
    assert len({len(batch_at(corpus, step, few).unique()) for step in range(20)}) > 3
    first = batch_at(corpus, 4, many)
    assert torch.equal(first, batch_at(corpus, 4, many))
    assert not torch.equal(first, batch_at(corpus, 5, many))
    assert not torch.equal(first, batch_at(corpus, 4, replace(many, seed=2)))
    possible = whole.unfold(0, 151, 1)
    assert first.shape == (400, 151)
    assert all((row == possible).all(1).any() for row in first)
    assert len(first.unique(dim=0)) == len(possible)  # all of them can be drawn
    assert len({mix_seed(0, "step", i, r) for i in range(100) for r in range(4)}) == 400


def test_the_split_shares_no_byte(folder: Path, tmp_path: Path) -> None:
    config = TrainConfig(data=(str(folder),), validation_share=0.2, context_length=20)
    train, validation = split_corpus(config)
    assert (len(train), len(validation)) == (134, 33)
    assert train.read(0, 134) + validation.read(0, 33) == WHOLE
    windows = windows_of(validation, 9, 10)
    assert windows.shape == (3, 11)
    assert bytes(windows[0].tolist()) == validation.read(0, 11)
    assert bytes(windows[-1].tolist()) == validation.read(22, 11)
    train, validation = split_corpus(replace(config, validation=(str(tmp_path / "other.txt"),)))
    assert (len(train), validation.read(0, 30)) == (167, b"o" * 30)


def test_data_is_recognised(folder: Path) -> None:
    before = open_corpus([str(folder)])
    known = before.digest()
    assert known == open_corpus([str(folder)]).digest()
    assert known != replace(before, stop=100).digest()
    (folder / "b" / "c.md").write_bytes(b"x" * 6 + b"y")
    assert known != open_corpus([str(folder)]).digest()
    (folder / "b" / "c.md").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"must not shrink.*c\.md"):
        before.read(0, 110)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": ("none",)}, "files or folders that exist, got none"),
        ({"data": ("texts/b/empty.txt",)}, "files of text"),
        ({"context_length": 100}, "two sequences of context_length"),
        ({"validation": ("other.txt",), "context_length": 40}, "validation must have context_length"),
    ],
)
def test_data_that_cannot_be_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ConfigError, match=message):
        split_corpus(TrainConfig(**{"data": ("texts",), **settings}))
