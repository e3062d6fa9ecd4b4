"""Settings: from files and flags, what is unknown or impossible is named; and the learning rates."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.cli import train as command
from dilated_attention_pytorch.cli.train.config import (
    ConfigError,
    TrainConfig,
    changed_settings,
    default_branches,
)
from dilated_attention_pytorch.cli.train.loop import learning_rate


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def test_a_config_survives_json() -> None:
    config = TrainConfig(
        data=("a",), num_kv_heads=2, attention_options={"head_offsets": "blocked"}, dropout=0
    )
    again = TrainConfig.from_dict(json.loads(config.to_json()))
    assert again == config
    assert changed_settings(config, again) == []
    assert config.model_settings()["num_kv_heads"] == 2


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
    file.write_text(json.dumps({"steps": 5, "d_model": 64, "data": ["x"], "tensorboard": True}))
    flags = ["--steps", "9", "--no-tensorboard", "--segments", "8,32", "--rates", "1,4"]
    flags += ["--context-length", "4k", "--seed", "-1"]
    flags += ["--attention-options", '{"head_offsets": "blocked"}', "--num-kv-heads", "2"]
    config = command.read_config(parse("a", "b", "--out", str(tmp_path), "--config", str(file), *flags))
    assert (config.steps, config.d_model, config.data, config.tensorboard) == (9, 64, ("a", "b"), False)
    assert (config.segment_lengths, config.dilation_rates) == ((8, 32), (1, 4))
    assert (config.context_length, config.seed) == (4096, -1)
    assert (config.attention_options, config.num_kv_heads) == ({"head_offsets": "blocked"}, 2)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    for text, message in (("{", "must be JSON"), ("[]", "must be a JSON object"), ('{"a": 1}', "got a$")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            command.read_config(parse("x", "--out", "y", "--config", str(file)))
    with pytest.raises(ConfigError, match="can be read"):
        command.read_config(parse("x", "--out", "y", "--config", str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="got none"):
        command.read_config(parse("--out", "y"))


def test_branches_reach_across_the_context() -> None:
    for length in (2, 64, 65, 1000, 1024, 4096, 100_000):
        lengths, rates = default_branches(length)
        assert lengths[-1] >= length
        assert rates[0] == 1
        assert all(b == 4 * a for a, b in pairwise(rates))


def test_the_rate_rises_and_falls() -> None:
    config = TrainConfig(learning_rate=2.0, steps=20, warmup_steps=5, final_share=0.1)
    rates = [learning_rate(config, step) for step in range(20)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates[5] == 2.0
    assert all(a > b for a, b in pairwise(rates[5:]))
    assert rates[-1] == pytest.approx(0.2, abs=1e-15)
    assert learning_rate(TrainConfig(learning_rate=1.0, steps=1, warmup_steps=0), 0) == 1.0


def test_the_flags_need_no_torch() -> None:
    program = """
import argparse, sys
from dilated_attention_pytorch.cli import generate, train
for each in (train, generate):
    each.add_arguments(argparse.ArgumentParser())
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
