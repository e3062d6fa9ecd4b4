"""`train` and `generate`: signals, exact continuation, full disks, exit codes, and what they write."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.train.runs import ENVIRONMENT, SMALL, losses, small, train, write_text
from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.cli.main import main
from dilated_attention_pytorch.cli.train import TrainConfig
from dilated_attention_pytorch.cli.train.folder import read_metrics
from dilated_attention_pytorch.cli.train.loop import load_model

PROGRAM = [sys.executable, "-W", "error", "-m", "dilated_attention_pytorch"]


def flags(**settings: Any) -> list[str]:
    words: list[str] = []
    spelled = {"segment_lengths": "--segments", "dilation_rates": "--rates"}
    for name, value in {**SMALL, **settings}.items():
        flag = spelled.get(name, "--" + name.replace("_", "-"))
        words += [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return words


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*PROGRAM, *arguments], env=ENVIRONMENT, **pipes, **options)


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=100)
    return process.returncode, out, error


def wait_for_steps(out: Path, steps: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while len([line for line in read_metrics(out) if "loss" in line]) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_c_saves_and_the_run_goes_on_exactly(tmp_path: Path) -> None:
    """Interrupted by SIGINT and then by SIGTERM wherever it was: the losses of a run in one piece."""
    out, settings = tmp_path / "run", {"steps": 3000, "dropout": 0.1, "accumulation": 2}
    settings |= {"checkpoint_every": 0, "validate_every": 0}
    process = start("train", write_text(tmp_path), "--out", str(out), *flags(**settings), "--json")
    wait_for_steps(out, 5, process)
    process.send_signal(signal.SIGINT)
    code, shown, error = end(process)
    assert code == 130, error
    first = losses(out)[-1][0]
    assert f"interrupted and saved after step {first}; --resume goes on" in error
    summary = json.loads(shown)
    assert (summary["step"], summary["is_interrupted"]) == (first, True)
    assert [x.name for x in (out / "checkpoints").iterdir()] == [f"step-{first:08d}.pt"]
    process = start("train", "--out", str(out), "--resume")  # with the settings that it finds there
    wait_for_steps(out, first + 5, process)
    process.terminate()
    code, _, error = end(process)
    assert code == 130, error
    assert f"from step {first} of 3000" in error
    last = losses(out)[-1][0]
    config = TrainConfig.from_dict(json.loads((out / "config.json").read_text()))
    assert config == small(tmp_path, **settings)
    train(config, tmp_path / "whole", stop_after=last)
    assert losses(out) == losses(tmp_path / "whole")


def test_a_disk_that_is_full_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    """The system refuses to let files grow beyond a limit: metrics fit into it, the tensors do not."""
    out, config = tmp_path / "run", small(tmp_path, steps=400, checkpoint_every=0)
    train(config, out, stop_after=3)
    (out / "config.json").write_text(config.to_json())
    (kept,) = (out / "checkpoints").iterdir()
    limited = ["train", "--out", str(out), "--resume", "--checkpoint-every", "5"]
    code, _, error = end(start(*limited, preexec_fn=limit_files))
    assert code == 1, error
    assert "step-00000005.pt could not be written: File too large; the last one is" in error
    assert kept.name in error
    assert "Traceback" not in error
    assert list((out / "checkpoints").iterdir()) == [kept]
    summary = train(config, out, resume=True, stop_after=4)  # with room again, it goes on from there
    assert [step for step, _ in losses(out)] == list(range(1, 8))
    assert summary.step == 7


def limit_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


def test_a_damaged_checkpoint_is_said_and_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = write_text(tmp_path), str(tmp_path / "run")
    assert main(["train", text, "--out", out, *flags(steps=4)]) == 0
    newest = tmp_path / "run" / "checkpoints" / "step-00000004.pt"
    os.truncate(newest, 1000)
    assert main(["generate", out, "--tokens", "3"]) == 0
    assert "step-00000004.pt is damaged" in capsys.readouterr().err
    before = losses(tmp_path / "run")
    assert main(["train", "--out", out, "--resume"]) == 0
    assert "it was set aside, and an older checkpoint is used" in capsys.readouterr().err
    assert losses(tmp_path / "run") == before
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_text("{}")
    assert main(["train", "--out", out, "--resume"]) == 1
    assert main(["generate", out]) == 1
    assert "whole" in capsys.readouterr().err


def test_mistakes_are_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = write_text(tmp_path), str(tmp_path / "run")
    cases = {
        f"train --out {out}": "got none",
        f"train {tmp_path}/nowhere --out {out}": "files or folders that exist",
        f"train {text} --out {out} --nhead 3": "multiple of nhead",
        f"train {text} --out {out} --device abacus": "device must be one that torch knows",
        f"train {text} --out {out} --context-length 100000": "two sequences",
        f"train {text} --out {out} --ring 2": "ring must divide the number of ranks",
        f"train {text} --out {out} --segments 4 --rates 8": "must not exceed",
        f"train {text} --out {out} --kind abacus": "abacus",
        f"train {text} --out {out} --resume --nhead 3": "multiple of nhead",
        f"train {text} --out {text}": "out must be a folder, got the file",
        f"generate {tmp_path}/nowhere": "MODEL must be the folder",
        f"generate {out} --temperature 2": "need --sample",
        f"generate {out} --tokens 0": "at least 1",
        f"generate {out} --stop ab": "one byte",
    }
    for words, message in cases.items():
        assert main(words.split()) == 2, words
        assert message in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == [Path(text).name], words
    assert main(["train", text, "--out", out, *flags(steps=1)]) == 0
    assert main(["train", text, "--out", out, *flags(steps=1)]) == 2
    assert "unless --resume" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--steps", "many"])
    assert stopped.value.code == 2


def test_tensorboard_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    code = main(["train", text, "--out", str(out), *flags(steps=2), "--tensorboard"])
    if find_spec("tensorboard") is None:
        assert (code, out.exists()) == (2, False)
        assert "pip install 'dilated-attention[train]'" in capsys.readouterr().err
    else:
        assert code == 0
        assert list((out / "tensorboard").glob("events*"))


def test_generate_writes_what_the_model_says(tmp_path: Path, capsysbinary: Any) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    assert main(["train", text, "--out", str(out), *flags(steps=25, learning_rate=1e-2)]) == 0
    model = load_model(out)
    prompt = torch.tensor([list(b"the quick")])
    expected = bytes(model.generate(prompt, 12)[0].tolist())
    capsysbinary.readouterr()
    assert main(["generate", str(out), "--prompt", "the quick", "--tokens", "12"]) == 0
    assert capsysbinary.readouterr().out == expected.decode(errors="replace").encode() + b"\n"
    sampled = ["--sample", "--seed", "3", "--temperature", "0.7", "--top-k", "9", "--top-p", "0.9", "--json"]
    start_file = tmp_path / "start.txt"
    start_file.write_bytes(b"the quick")
    for source in (["--prompt", "the quick"], ["--prompt-file", str(start_file)]):
        assert main(["generate", str(out), *source, "--tokens", "30", *sampled]) == 0
        shown = json.loads(capsysbinary.readouterr().out)
        how = {"do_sample": True, "seed": 3, "temperature": 0.7, "top_k": 9, "top_p": 0.9}
        assert shown["bytes"] == model.generate(prompt, 30, **how)[0, 9:].tolist()
        assert shown["prompt"] == "the quick"
    stop = expected[9 + 5 : 9 + 6].decode()
    assert main(["generate", str(out), "--prompt", "the quick", "--stop", stop, "--json"]) == 0
    short = json.loads(capsysbinary.readouterr().out)["bytes"]
    assert bytes(short) == expected[9 : expected.index(stop.encode(), 9) + 1]
    # The same model for others, and from one checkpoint.
    model.save_pretrained(tmp_path / "model")
    assert isinstance(LongNetLM.from_pretrained(tmp_path / "model"), LongNetLM)
    for folder in (tmp_path / "model", out / "checkpoints" / "step-00000025.pt"):
        assert main(["generate", str(folder), "--prompt", "the quick", "--tokens", "12", "--json"]) == 0
        assert bytes(json.loads(capsysbinary.readouterr().out)["bytes"]) == expected[9:]
