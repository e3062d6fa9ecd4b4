"""Bytes of files: as if they were one, split, drawn by step and seed, and recognised again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.cli.train.config import ConfigError, TrainConfig
from dilated_attention_pytorch.cli.train.data import (
    batch_at,
    mix_seed,
    open_corpus,
    split_corpus,
    windows_of,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "a.txt").write_bytes(bytes(range(1, 101)))
    (root / "b" / "c.md").write_bytes(b"x" * 7)
    (root / "b" / "empty.txt").write_bytes(b"")
    (root / "b" / "d.txt").write_bytes(b"yz" * 30)
    (root / "b" / "image.bin").write_bytes(b"\0\1\2")
    (root / ".hidden" / "e.txt").write_bytes(b"never")
    return root


def test_files_are_one_sequence(folder: Path) -> None:
    corpus = open_corpus([str(folder)])
    whole = bytes(range(1, 101)) + b"x" * 7 + b"yz" * 30
    assert corpus.read(0, len(corpus)) == whole
    for start in range(0, len(whole) + 1, 3):
        for stop in range(start, len(whole) + 1, 5):
            assert corpus.read(start, stop - start) == whole[start:stop]
    part = corpus.cut(95, 150).cut(3, 30)
    assert part.read(0, len(part)) == whole[98:125]
    assert open_corpus([str(folder)], [".txt"]).read(0, 160) == bytes(range(1, 101)) + b"yz" * 30
    # A file that is named is data, whatever it is.
    assert open_corpus([str(folder / "b" / "image.bin")]).read(0, 3) == b"\0\1\2"
    with pytest.raises(ValueError, match=r"0 \.\. 167, got 160 \.\. 170"):
        corpus.read(160, 10)


def test_batches_are_a_function_of_step_and_seed(folder: Path) -> None:
    corpus = open_corpus([str(folder)])
    whole = torch.tensor(list(corpus.read(0, len(corpus))))
    few, many = (TrainConfig(batch_size=b, context_length=n, seed=1) for b, n in ((3, 10), (400, 150)))
    known = {len(batch_at(corpus, s, few).unique()) for s in range(20)}
    assert len(known) > 3
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
    whole = open_corpus([str(folder)])
    assert train.read(0, 134) + validation.read(0, 33) == whole.read(0, 167)
    windows = windows_of(validation, 9, 10)
    assert windows.shape == (3, 11)
    assert bytes(windows[0].tolist()) == validation.read(0, 11)
    assert bytes(windows[-1].tolist()) == validation.read(22, 11)
    other = tmp_path / "other.txt"
    other.write_bytes(b"o" * 30)
    config = TrainConfig(data=(str(folder),), validation=(str(other),), context_length=20)
    train, validation = split_corpus(config)
    assert (len(train), validation.read(0, 30)) == (167, b"o" * 30)


def test_data_is_recognised(folder: Path) -> None:
    before = open_corpus([str(folder)])
    known = before.digest()
    assert known == open_corpus([str(folder)]).digest()
    assert known != before.cut(0, 100).digest()
    (folder / "b" / "c.md").write_bytes(b"x" * 6 + b"y")
    assert known != open_corpus([str(folder)]).digest()
    (folder / "b" / "c.md").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"must not shrink.*c\.md"):
        before.read(0, 110)


def test_data_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"files or folders that exist, got .*none"):
        open_corpus([str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="files of text"):
        open_corpus([str(folder / "b" / "empty.txt")])
    with pytest.raises(ConfigError, match="two sequences of context_length"):
        split_corpus(TrainConfig(data=(str(folder),), context_length=100))
    other = tmp_path / "other.txt"
    other.write_bytes(b"o" * 30)
    with pytest.raises(ConfigError, match="validation must have context_length"):
        split_corpus(TrainConfig(data=(str(folder),), validation=(str(other),), context_length=40))
