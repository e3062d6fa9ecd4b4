"""The examples run as their documentation says, on this machine, with several ranks."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from support.programs import ROOT, run_program, run_python

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def launch(num_ranks: int, example: str, *arguments: str) -> str:
    """What an example of several ranks prints."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks)
    how = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return run_program(sys.executable, *launcher, ROOT / "examples" / example, *arguments, **how)[0]


def run_example(example: str, *arguments: str) -> str:
    """What an example of one process prints."""
    return run_python(ROOT / "examples" / example, *arguments)


def figure(pattern: str, text: str) -> str:
    """The one group of a pattern that a line of the text must have."""
    [found] = re.findall(pattern, text, re.MULTILINE)
    return str(found)


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)$", text, re.MULTILINE)]


def test_two_ranks_equal_one_process_and_receive_what_was_planned() -> None:
    text = launch(2, "ring_two_ranks.py", "--length", "1201", "--causal")
    [errors] = re.findall(r"out (\S+), gradients (\S+)$", text, re.MULTILINE)
    assert all(float(error) < 2e-5 for error in errors)
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


def test_a_model_of_bytes_learns_writes_and_writes_the_same_from_its_files(tmp_path: Path) -> None:
    writing = ("--tokens", "30", "--prompt", "when the Rabbit", "--sample", "--seed", "1")
    training = ("--batch", "2", "--length", "64", "--steps", "26", "--checkpoint")
    trained = run_example("generate_text.py", *training, *writing, "--save", str(tmp_path / "model"))
    loaded = run_example("generate_text.py", "--load", str(tmp_path / "model"), *writing)
    first, last = losses(trained)
    assert last < first - 2
    texts = [
        re.findall(r"\n(when the Rabbit.*)\n\n\d+ bytes a second\n$", x, re.S) for x in (trained, loaded)
    ]
    assert texts[0] == texts[1] != []


def test_a_large_slide_is_encoded_from_a_file_of_weights_in_little_memory() -> None:
    """One layer of the full width: further layers add their weights, 28 MB each, and reuse the rest."""
    text = run_example("encode_slide.py", "--depth", "1", "--global-pool")
    assert "8,279,808 parameters, 1 layers" in text
    assert "10000 tiles in" in text
    assert "embedding (1, 768)" in text
    assert 0.1 < float(figure(r"^peak memory (\S+) GB$", text)) + 11 * 0.03 < 4.0


def test_slides_are_told_apart_by_a_patch_that_the_heat_map_shows(tmp_path: Path) -> None:
    picture = tmp_path / "map.png"
    text = run_example("finetune_slides.py", "--heat-map", str(picture))
    frozen, tuned = (float(each) for each in re.findall(r"^\S+: epoch \d+, test AUC (\S+)$", text, re.M))
    assert frozen < tuned
    assert tuned > 0.95
    assert float(figure(r"^attention of the patch: (\S+) times its share", text)) > 5
    cells = json.loads(figure(r"the patch is at cells (.*)$", text))
    brightness = torch.from_numpy(imread(picture)).sum(-1)
    side = brightness.shape[0] // 12  # pixels of a cell
    cell = brightness[side // 2 :: side, side // 2 :: side]
    planted = torch.zeros_like(cell, dtype=torch.bool)
    for x, y in cells:
        planted[y, x] = True
    others = ~planted & (cell < 3)  # white is no tile
    assert cell[planted].mean() > 1.3 * cell[others].mean()


def test_a_model_of_transformers_learns_and_goes_on_from_padded_prompts() -> None:
    sizes = ("--steps", "30", "--length", "64", "--batch", "2", "--new-tokens", "10")
    text = run_example("huggingface_llama.py", *sizes)
    first, last = losses(text)
    assert last < first - 2
    assert len(re.findall(r"^'.+'$", text, re.MULTILINE)) == 3


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


def test_packed_documents_are_checked_and_timed() -> None:
    sizes = ("--documents", "60", "--length", "600", "--rounds", "1")
    text = run_example("../benchmarks/packed_documents.py", *sizes)
    assert len(re.findall(r"one document .*: \d+\.\d\d \((?:not )?met: 1\.5\); right within \de-", text)) == 4
