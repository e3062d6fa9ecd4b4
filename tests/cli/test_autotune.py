"""`autotune`: rehearsed in Triton's interpreter; what it stores, and what fails or is interrupted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.cli import autotune, doctor
from dilated_attention_pytorch.cli.bench import measure
from dilated_attention_pytorch.cli.bench.measure import Timing
from dilated_attention_pytorch.cli.main import INTERRUPTED, main
from dilated_attention_pytorch.kernels import TRITON, Request, choose_kernel
from dilated_attention_pytorch.kernels.triton import tuned
from dilated_attention_pytorch.kernels.triton.tuning import Blocks

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
CPU = torch.device("cpu")
SHIPPED, OTHER = Blocks(32, 32, 1, 1), Blocks(32, 16, 1, 1)


@needs_triton
def test_a_rehearsal_tunes_every_pass_and_stores_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dilated_attention_pytorch", "autotune", "--head-dims", "16"]
    variables = os.environ | {"TRITON_INTERPRET": "1", tuned.VARIABLE: "deep/tuning.json"}
    result = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[3/3] key_gradients, float32, head size 16" in result.stdout
    assert result.stdout.count(str(OTHER)) >= 3  # it ran, and was right
    assert "3 of 3 settings tuned, stored in deep/tuning.json" in result.stdout
    found = tuned.read_results(tuned.read_document(tmp_path / "deep/tuning.json"), "interpreter")
    assert [x[:3] for x in found] == [(which, "float32", 16) for which in tuned.PASSES]


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["autotune"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "autotune needs a GPU, and torch finds none; TRITON_INTERPRET=1 rehearses it" in line


@pytest.fixture
def rehearse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Any]]:
    """Runs the command with calls that only say which blocks they have: the exit code and what it printed.

    Gives the file, too. The second candidate takes `ratio` of the time of the shipped blocks.
    """
    file = tmp_path / "tuning.json"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv(tuned.VARIABLE, str(file))

    def run(answer: Callable[[Blocks], float], ratio: float = 0.5) -> tuple[int, str, Path]:
        def make_call(_device: Any, which: Any, _dtype: str, _d: int) -> Callable[[], list[Tensor]]:
            return lambda: [torch.full((3,), answer(tuned._tried[which]))]

        def time(runs: dict[str, Any], _rounds: int) -> dict[str, Timing]:
            return {name: Timing((1.0 if name == str(SHIPPED) else ratio,)) for name in runs}

        monkeypatch.setattr(autotune, "_make_call", make_call)
        monkeypatch.setattr(autotune, "interleave", time)
        tuned._stored.cache_clear()
        return main(["autotune", "--head-dims", "64"]), capsys.readouterr().out, file

    yield run
    tuned._stored.cache_clear()


def best(file: Path) -> list[Blocks]:
    return [x.blocks for x in tuned.read_results(tuned.read_document(file), "interpreter")]


@needs_triton
def test_the_fastest_is_stored_and_shown(
    rehearse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text, file = rehearse(lambda _: 1.0)
    assert code == 0
    assert best(file) == [OTHER] * 3
    assert "32 x 32, 1, 1        1000.000 ms, shipped" in text
    facts = doctor.collect_facts()
    triton = {"device": "cpu", "dtype": "float32", "kernel": "triton", "chosen": False, "why_not": None}
    assert triton in facts["kernels"]
    (lines,) = doctor._describe_blocks(facts["blocks"]).values()
    rest = "32 80 96 128 256: 32 x 32, 1, 1 shipped"
    assert f"attend           cpu, float32: {rest}; 64: 32 x 16, 1, 1 tuned here" in lines
    sizes = "32 64 80 96 128 256"
    assert f"key_gradients    cpu, bfloat16 float16: {sizes}: 32 x 32, 1, 1 shipped" in lines
    assert measure.kernel_facts(CPU, torch.float32, 64) == choose_kernel(Request(CPU, torch.float32)).name
    monkeypatch.setattr(measure, "choose_kernel", lambda _: TRITON)
    words = "; ".join(f"{which} 32 x 16, 1, 1 tuned here" for which in tuned.PASSES)
    assert measure.kernel_facts(CPU, torch.float32, 64) == f"triton ({words})"


@needs_triton
def test_what_is_hardly_faster_is_not_taken(rehearse: Callable[..., Any]) -> None:
    assert best(rehearse(lambda _: 1.0, ratio=0.99)[2]) == [SHIPPED] * 3


@needs_triton
def test_a_candidate_that_fails_or_is_wrong_is_told_and_left_out(rehearse: Callable[..., Any]) -> None:
    def fail(blocks: Blocks) -> float:
        if blocks == OTHER:
            raise RuntimeError("out of resource: shared memory\nand more")
        return 1.0

    code, text, file = rehearse(fail)
    assert (code, best(file)) == (0, [SHIPPED] * 3)
    assert text.count("32 x 16, 1, 1        RuntimeError: out of resource: shared memory\n") == 3
    for wrong, off in ((1.5, "5.0e-01"), (math.nan, "inf")):
        code, text, file = rehearse(lambda blocks, x=wrong: x if blocks == OTHER else 1.0)
        assert (code, best(file)) == (0, [SHIPPED] * 3)
        assert text.count(f"32 x 16, 1, 1        off by {off}, more than 2e-05: not timed") == 3


@needs_triton
def test_where_the_shipped_blocks_fail_nothing_is_stored(rehearse: Callable[..., Any]) -> None:
    def fail(_: Blocks) -> float:
        raise RuntimeError("no such thing")

    code, text, file = rehearse(fail)
    assert (code, file.exists()) == (1, False)
    assert "0 of 3 settings tuned" in text


@needs_triton
def test_an_interruption_keeps_what_was_found(rehearse: Callable[..., Any]) -> None:
    calls = iter(range(100))

    def stop(_: Blocks) -> float:
        if next(calls) == 3:  # in the second setting
            raise KeyboardInterrupt
        return 1.0

    code, text, file = rehearse(stop)
    assert (code, best(file)) == (INTERRUPTED, [OTHER])
    assert "1 of 3 settings tuned, stored in" in text


@needs_triton
def test_a_file_keeps_other_devices_and_loses_what_is_out_of_date(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    file.write_text("damaged")
    first, second = (tuned.Result("attend", "float16", d, SHIPPED, 1.0, 1.0) for d in (64, 128))
    autotune.store(file, "a", first)
    autotune.store(file, "b", first)
    autotune.store(file, "a", second)
    autotune.store(file, "a", first._replace(blocks=OTHER))
    document = tuned.read_document(file)
    assert tuned.read_results(document, "a") == [second, first._replace(blocks=OTHER)]
    assert tuned.read_results(document, "b") == [first]
    document["a"]["made_with"]["triton"] = "0"
    file.write_text(json.dumps({"format": tuned.FORMAT, "devices": document}))
    autotune.store(file, "a", second)
    assert tuned.read_results(tuned.read_document(file), "a") == [second]


@needs_triton
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dtypes float64", "dtypes are of float32, bfloat16, float16, got 'float64'"),
        ("--head-dims 512", "the triton kernel can run none of what is asked for: it takes heads of up to"),
    ],
)
def test_what_it_cannot_tune_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    try:
        code: object = main(["autotune", *words.split()])
    except SystemExit as error:  # of the parser
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
