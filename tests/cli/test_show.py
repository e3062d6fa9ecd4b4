"""`show`: its numbers against the definition, its pictures read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from dilated_attention_pytorch import SparsePatternConfig, build_block_pattern
from dilated_attention_pytorch.cli.arguments import PATTERNS
from dilated_attention_pytorch.cli.main import main
from dilated_attention_pytorch.cli.show import receptive_fields, shrink
from dilated_attention_pytorch.reference import multiplicity
from support.pictures import find_maps, has_ink, read_png, read_svg_maps

SVG = "{http://www.w3.org/2000/svg}"


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def numbers(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(show(capsys, *arguments, "--json"))
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("mixing", "offsets"), [("all", "interleaved"), ("all", "blocked"), ("grouped", "interleaved")]
)
def test_numbers_are_those_of_the_definition(
    mixing: Any, offsets: Any, causal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    n, heads, segments, rates = 53, 5, (7, 20, 64), (1, 3, 4)
    sizes = f"--length 53 --heads 5 --segments 7,20,64 --rates 1,3,4 --mixing {mixing} --offsets {offsets}"
    found = numbers(capsys, *sizes.split(), *(["--causal"] if causal else []))
    options: dict[str, Any] = {"is_causal": causal, "head_mixing": mixing, "head_offsets": offsets}
    counts = multiplicity(n, heads, segments, rates, **options)
    allowed = torch.arange(1, n + 1) if causal else torch.full((n,), n)
    assert found["defined_pairs"] == int(counts.sum())
    assert found["multiplicity"] == {
        str(times): int((counts == times).sum()) for times in (1, 2, 3) if (counts == times).any()
    }
    share = (counts > 0).any(0).sum(-1) / allowed.double()
    assert found["coverage"]["mean"] == pytest.approx(share.mean().item())
    assert found["coverage"]["last_position"] == pytest.approx(share[-1].item())
    assert found["positions_without_keys"] == ((counts > 0).sum(-1) == 0).sum(-1).tolist()
    for head, of_head in enumerate(found["offsets"]):
        for branch, offset in enumerate(of_head):
            w, r = segments[branch], rates[branch]
            alone: dict[str, Any] = {"head_mixing": "all", "head_offsets": offsets}
            selects = [t for t in range(n) if offset is not None and t % w % r == offset]
            if mixing == "all":
                diagonal = multiplicity(n, heads, (w,), (r,), **alone)[head].diagonal()
                assert selects == diagonal.nonzero().flatten().tolist()
            elif offset is not None:
                assert all(counts[head, t, t] for t in selects)


def test_layers_reach_what_paths_reach(capsys: pytest.CaptureFixture[str]) -> None:
    found = numbers(capsys, "--length", "40", "--segments", "8,40", "--rates", "1,5", "--layers", "3")
    edges = (multiplicity(40, 4, (8, 40), (1, 5)) > 0).any(0)
    reached = [{key for key in range(40) if edges[query, key]} | {query} for query in range(40)]
    first = [set(each) for each in reached]
    for layer in found["layers"]:
        assert layer["mean"] == pytest.approx(sum(map(len, reached)) / 1600)
        assert layer["least"] == pytest.approx(min(map(len, reached)) / 40)
        reached = [set().union(*(first[key] for key in each)) for each in reached]
    assert len(found["layers"]) == 3


def test_the_future_stays_unreached() -> None:
    edges = (multiplicity(30, 2, (6, 30), (1, 4), is_causal=True) > 0).any(0)
    assert not any(field.triu(1).any() for field in receptive_fields(edges, 4))


def test_text_counts_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--length 12 --segments 4,12 --rates 1,3 --heads 3 --head 1 --causal"
    text = show(capsys, *sizes.split())
    assert "head 1: query down, key across; the number is how often a pair meets" in text
    lines = [line.split() for line in text.splitlines() if line.strip() and set(line.split()) <= {*"·123"}]
    counts = multiplicity(12, 3, (4, 12), (1, 3), is_causal=True)[1]
    expected = [[str(c) if c else "·" for c in row[: y + 1]] for y, row in enumerate(counts.tolist())]
    assert lines == expected
    assert "branch 12 / 3     offset of each head: 0 1 2" in text
    assert "\x1b" not in text


def test_long_sequences_are_shaded(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "--length", "256", "--segments", "32,256", "--rates", "1,8", "--layers", "2")
    assert "each cell stands for 8 x 8 positions" in text
    assert "reached after 2 layers" in text
    assert "█" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "adaptive"])
def test_block_patterns_are_the_library_s(name: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--length", "90", "--block-size", "8", "--density", "0.3", "--causal", "--pattern", name]
    found = numbers(capsys, *arguments, "--segments", "16,90", "--rates", "1,2", "--heads", "2")
    branches: dict[str, Any] = {"segment_lengths": (16, 90), "dilation_rates": (1, 2)}
    pattern = build_block_pattern(SparsePatternConfig(name, 0.3, 8), 90, 2, is_causal=True, **branches)
    assert found["density"] == pytest.approx(pattern.density)
    pairs = pattern.to_dense().tril().sum().item() * (2 if len(pattern) == 1 else 1)
    assert found["defined_pairs"] == pairs
    assert found["multiplicity"] == {"1": pairs}


def test_png_shows_the_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pairs.png"
    sizes = "--length 24 --segments 6,24 --rates 1,4 --pixels 24"
    text = show(capsys, *sizes.split(), "--out", str(file))
    assert f"5 panels written to {file}" in text  # all heads, and four heads with offsets 0 to 3
    image = read_png(file)
    counts = multiplicity(24, 4, (6, 24), (1, 4))
    maps = find_maps(image, 24)
    for painted, of_panel in zip(maps, [counts.sum(0), *counts], strict=True):
        cells = painted.sum(-1, dtype=torch.int64)
        assert torch.equal(cells < 3 * 255, of_panel > 0)
        darkest = cells == cells.min()
        assert torch.equal(darkest, of_panel == of_panel.max())
    assert has_ink(image[:40])  # the title
    assert has_ink(image[-40:])  # the legend
    assert has_ink(image[:, :30])  # the axis of queries


def test_svg_names_and_draws_the_panels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pairs.svg"
    arguments = ["--length", "24", "--segments", "6,24", "--rates", "1,4", "--heads", "2", "--layers", "2"]
    show(capsys, *arguments, "--out", str(file))
    root = ElementTree.parse(file).getroot()
    texts = [text.text for text in root.iter(f"{SVG}text")]
    title = "Dilated attention: segments of 6 at rate 1, segments of 24 at rate 4; 24 positions, 2 head(s)"
    assert root.attrib["aria-label"] == title
    assert title in texts
    panels = ["all heads", "head 0", "head 1", "after 2 layers"]
    assert [text for text in texts if text in panels] == panels
    assert texts.count("query position") == texts.count("key position") == 4
    assert {"0", "6", "12", "18", "24"} <= set(texts)
    legend = ["query attends to key: the darker, the more often", "reached through layers", "not attended"]
    assert texts[-3:] == legend
    counts = multiplicity(24, 2, (6, 24), (1, 4))
    step = (counts > 0).any(0)
    reached = [step, *(counts > 0), step.long() @ step.long() > 0]
    for painted, expected in zip(read_svg_maps(root), reached, strict=True):
        assert torch.equal((painted != 255).any(-1), expected)


def test_long_titles_and_names_stay_in_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--length 128 --segments 4,8,16,32,64,128 --rates 1,2,4,8,8,8 --heads 24 --causal --pixels 60"
    for suffix in (".png", ".svg"):
        show(capsys, *sizes.split(), "--out", str(tmp_path / f"p{suffix}"))
    image = read_png(tmp_path / "p.png")
    for edge in (image[:4], image[-4:], image[:, :4], image[:, -4:]):
        assert (edge == 255).all()  # what is cut off would touch it
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    assert sum("segments of" in (text.text or "") for text in root.iter(f"{SVG}text")) > 1  # several lines


def test_shrunk_maps_keep_their_mean() -> None:
    counts = multiplicity(50, 1, (10, 50), (1, 2))[0]
    cells = shrink(counts, 7)
    assert cells.shape == (7, 7)
    sizes = (torch.arange(8) * 50 // 7).diff().double()
    assert (cells * sizes[:, None] * sizes).sum().item() == pytest.approx(counts.sum().item())
    assert torch.equal(shrink(counts, 64), counts.double())


def test_a_picture_that_cannot_be_written_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "--out", str(tmp_path / "missing" / "x.png")]) == 1
    assert "No such file or directory" in capsys.readouterr().err
