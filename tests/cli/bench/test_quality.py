"""The suites of quality: their tasks have one answer, their reach is that of the definition, models learn."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attentions
import choice
import common
import corpus
import language
import pytest
import reach
import torch
from hypothesis import given, settings, strategies as st

from dilated_attention_pytorch import dilated_attention
from dilated_attention_pytorch.cli.bench import record
from dilated_attention_pytorch.cli.bench.measure import Measured
from dilated_attention_pytorch.cli.bench.record import Result, case_of, read_record
from dilated_attention_pytorch.reference import multiplicity
from support.suites import RESULTS, ROOT, is_whole

CONFIG = common.Config(8, 4, (32,), (1,), is_causal=True)
SECONDS = {"training": (3.0,), "tests": (1.0,), "wall": (2.0,)}
NEEDLES = {f"needles {n}": 3 for n in (8192, 16384, 32768, 65536)}


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(list(reach.SLOTS)), st.integers(1, 3), st.integers(8, 200), st.integers(0, 2**31))
def test_every_query_has_one_answer_before_it(task: str, rows: int, n: int, seed: int) -> None:
    tokens, answers, distances = reach.make_rows(task, rows, n, torch.Generator().manual_seed(seed))
    slots = reach.SLOTS[task]
    needle = reach.NOISE + slots
    for row in range(rows):
        found = (tokens[row] >= needle).nonzero()[:, 0].tolist()
        by_slot = {(int(tokens[row, p]) - needle) // reach.VALUES: p for p in found}
        assert sorted(by_slot) == list(range(slots))
        for t in range(n):
            is_query = reach.NOISE <= tokens[row, t] < needle
            assert is_query == (answers[row, t] >= 0)
            if is_query:
                p = by_slot[int(tokens[row, t]) - reach.NOISE]
                assert p == t - distances[row, t] < t
                assert answers[row, t] == (tokens[row, p] - needle) % reach.VALUES
    vocabulary = replace(reach.QUICK[0], task=task).sizes["vocab_size"]
    assert tokens.max() < vocabulary == needle + slots * reach.VALUES


@pytest.mark.parametrize("n", [128, 200])
@pytest.mark.parametrize(
    "name", [*attentions.WORDS, "first 512, ratio 4", "blocked offsets, ratio 2", "grouped heads, ratio 4"]
)
def test_reach_is_that_of_the_definition(name: str, n: int) -> None:
    blocks, see = attentions.sparse_of(name, n, CONFIG), attentions.attend(name, n, CONFIG)
    config: common.Config = CONFIG
    if name in choice.SETTINGS:
        config = choice.attention_of(name, 128)
        see = partial(dilated_attention, segment_lengths=config.spec)
        options: Any = dict(config.options)
        sees = multiplicity(n, config.h, *config.branches, is_causal=True, **options).gt(0).any(0)
    elif blocks is not None:
        sees = blocks.make_pattern(n).to_dense().any(0).tril()
    else:
        sees = multiplicity(n, 8, *attentions.branches_of(name, n, 8), is_causal=True).gt(0).any(0)
    keys, step = torch.tensor([0, 3, n // 2, n - 1]), (sees | torch.eye(n).bool()).float()
    expected, found = torch.eye(n), attentions.reached_from(see, keys, n, config.h)
    for _ in range(3):
        expected = (step @ expected > 0).float()
        assert torch.equal(next(found), expected[:, keys].T.bool())


def test_what_is_compared_costs_the_same_and_what_is_isolated_never_meets() -> None:
    for n in (128, 8192, 32768):
        dilated = attentions.branches_of("dilated", n, 8)
        assert dilated[0][0] == (2048 if n >= 8192 else n // 16)
        assert dilated[0][-1] >= n
        assert attentions.branches_of("isolated", n, 8) == (dilated[0][:1], (1,))
    config = language.Attention(8, 4, *attentions.branches_of("dilated", 8192, 8), is_causal=True)
    counted = language.count_pairs(language.Stage("", 8192, config, 1, 1, 1), 0)
    for name in attentions.PATTERNS:
        blocks = attentions.sparse_of(name, 8192, CONFIG)
        assert blocks is not None
        pairs = blocks.make_pattern(8192).num_pairs
        assert pairs * 8 == pytest.approx(counted["pairs"], rel=0.06)  # whole blocks
    assert 0.9 * counted["later"] < counted["reached 2"] <= counted["reached 3"] <= counted["later"]
    assert counted["reached 1"] < 0.5 * counted["later"]
    with pytest.raises(UserWarning, match="serves 2 of every"):
        attentions.branches_of("dilated", 8192, 2)


@pytest.mark.parametrize("name", ["dilated", "window"])
def test_models_begin_with_the_same_weights_and_keep_them_at_other_lengths(name: str) -> None:
    sizes = reach.QUICK[0].sizes
    dense, model = (attentions.make_model(x, 64, CONFIG, 7, **sizes) for x in ("dense", name))
    again = attentions.make_model(name, 64, CONFIG, 8, **sizes)
    assert not torch.equal(*(next(x.parameters()) for x in (model, again)))
    again.load_state_dict(dense.state_dict())  # which fuses projections where a kind does
    weights, expected = model.state_dict(), again.state_dict()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    longer = attentions.for_length(model, name, 256, CONFIG, **sizes)
    pairs = list(zip(model.parameters(), longer.parameters(), strict=True))
    assert pairs
    assert all(one is other for one, other in pairs)
    assert longer.config.segment_lengths != model.config.segment_lengths


def test_answers_are_counted_by_length_and_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(reach.QUICK[0], lengths=(4096,), test_rows=3, test_tokens=2**20, layers=2)

    def make(right: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        def answer(tokens: torch.Tensor) -> torch.Tensor:
            """Knows the only needle, and answers where `right` is true for its distance."""
            place = int((tokens[0] >= reach.NOISE + 1).nonzero())
            value = (tokens[0, place] - reach.NOISE - 1) % reach.VALUES
            is_right = right(torch.arange(tokens.shape[1]) - place)
            given = torch.where(is_right, value, (value + 1) % reach.VALUES)
            return torch.nn.functional.one_hot(given, reach.VALUES)[None].float()

        return lambda *_, **__: SimpleNamespace(eval=lambda: answer)

    for right, expected in ((lambda x: x > 0, [1, 1, 1]), (lambda x: x > 2048, [0, 0, 1])):
        monkeypatch.setattr(reach, "for_length", make(right))
        counts = reach.test(case, None, 4096)
        assert [reach.accuracy([counts], 4096, bound) for bound in reach.distance_classes(4096)] == expected
        assert all(counts[f"asked 4096 {bound}"] > 20 for bound in (1024, 2048, 4096))
        assert reach.reached([counts], 4096) > 0.95  # of two layers
        assert counts["needles 4096"] == 3
    assert reach.accuracy([{}], 4096) is None


@pytest.mark.parametrize(("attention", "least"), [("dense", 0.95), ("dilated", 0.8), ("isolated", 0.0)])
def test_models_learn_what_is_in_their_reach(
    attention: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needles of sequences of 32 tokens, in segments of 8."""
    monkeypatch.setattr(attentions, "FIRST_PART", 4)
    more = {"layers": 2, "batch_tokens": 2048, "batch_rows": 64, "dim_feedforward": 64, "test_rows": 64}
    config = replace(CONFIG, d=8)
    case = replace(
        reach.QUICK[0], attention=attention, config=config, stages=((32, 150),), lengths=(32,), **more
    )
    model = reach.train(case)
    with torch.no_grad():
        counts = reach.test(case, model, 32)
    found, reached = reach.accuracy([counts], 32), reach.reached([counts], 32)
    assert found >= least
    assert found <= reached + 0.1  # 1 of 16 values is guessed
    assert (reached > 0.9) == (attention != "isolated")


def test_language_models_differ_in_their_attention_alone() -> None:
    sources = corpus.Sources(("a",), ("b",), 2)

    def differ(one: Any, other: Any) -> set[str]:
        return {x.name for x in fields(one) if getattr(one, x.name) != getattr(other, x.name)}

    by_name = {case.name: case for case in language.CASES}
    assert len(by_name) == 2 * 3
    for seed in language.SEEDS:
        case, other = (by_name[f"{attention}, seed {seed}"] for attention in language.ATTENTIONS)
        for one, two in zip((case.first, *case.stages), (other.first, *other.stages), strict=True):
            dense, dilated = (language.train_config(x, y, sources) for x, y in ((case, one), (other, two)))
            assert differ(dense, dilated) == {"segment_lengths", "dilation_rates"}
            assert dense.batch_size * dense.context_length == one.batch_bytes
            assert dense.final_share == 1.0
            assert dense.steps == case.first.steps + (0 if one == case.first else one.steps)
        contexts = {"context_length", "batch_size", "segment_lengths"}
        configs = [language.train_config(case, stage, sources) for stage in case.stages]
        assert differ(configs[0], configs[-1]) == contexts


def test_settings_are_compared_that_go_on_from_the_same_model() -> None:
    sources = corpus.Sources(("a",), ("b",), 2)
    assert {case.kind for case in choice.CASES} == set(choice.SECTIONS) == {"choice"}
    for seed in language.SEEDS:
        cases = [case for case in choice.CASES if case.seed == seed]
        assert {case.first for case in cases} == {language.make_case("dense", seed).first}
        stages = [stage for case in cases for stage in case.stages]
        assert sorted(stage.name for stage in stages) == sorted(choice.SETTINGS)
        assert {(x.context, x.total_bytes, x.batch_bytes) for x in stages} == {(8192, 2 * 2**20, 16384)}
        assert len({stage.config for stage in stages}) == len(stages)
        for stage in stages:
            first, ratio, given = choice.SETTINGS[stage.name]
            assert stage.config.segment_lengths[:2] == (first, first * ratio)
            assert stage.config.segment_lengths[-1] >= stage.context
            options = dict(given)
            assert language.train_config(cases[0], stage, sources).attention_options == options
            assert {name: getattr(stage.config.spec, name) for name in options} == options


def test_a_stage_goes_on_where_the_first_has_ended() -> None:
    """With the same stage in two parts, a model and its average are those of a run without a break."""
    case, sources = language.QUICK[1], corpus.open_sources(())
    whole = language.start_run(case, replace(case.first, total_bytes=8 * 512), sources)
    first, then = (language.start_run(case, case.first, sources) for _ in range(2))
    averages = [language.average_of(run) for run in (whole, first)]
    for run, average, steps in ((whole, averages[0], 8), (first, averages[1], 4)):
        for _ in range(steps):
            run.take_step()
            average.update_parameters(run.model)
    average = language.go_on(then, first, averages[1])
    assert then.step == 4
    for _ in range(4):
        then.take_step()
        average.update_parameters(then.model)
    for one, other in zip(average.parameters(), averages[0].parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(*(next(x.parameters()) for x in (average, then.model)))
    for name, tensor in whole.tensors().items():
        assert torch.equal(then.tensors()[name], tensor), name


def test_a_first_stage_is_trained_once_by_those_that_begin_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, project = language.QUICK[0], {"commit": "f" * 40, "changed": False}
    sources = corpus.open_sources(())
    monkeypatch.setattr(language, "project_facts", lambda: project)
    monkeypatch.setattr(corpus, "DATA", tmp_path)
    run = language.start_run(case, case.first, sources)
    assert language.kept_folder(case, run) is None
    case = replace(case, packages=("p==1",))
    other = replace(case, stages=(replace(case.stages[-1], name="other", config=case.first.config),))

    def measure(case: language.LanguageCase) -> tuple[int, Measured]:
        """The number of points of the curve that were trained, and what was found."""
        said: list[str] = []
        monkeypatch.setattr(language, "tell", said.append)
        found = language.measure(case, sources)
        return sum("bits per byte" in text for text in said), found

    points, before = measure(case)
    assert points == 2 * 3
    points, again = measure(case)
    assert points == 2 * 2
    assert again.counts == before.counts
    assert again.seconds[language.FIRST] == before.seconds[language.FIRST]
    assert again.seconds["wall"][0] == before.seconds["wall"][0]
    points, found = measure(other)
    assert points == 2
    assert found.counts.items() >= {x: n for x, n in before.counts.items() if language.FIRST in x}.items()
    folder = language.kept_folder(case, run)
    assert folder is not None
    for changed in ({"seed": 1}, {"layers": 2}, {"first": replace(case.first, batch_bytes=256)}):
        changed_case = replace(case, **changed)
        changed_run = language.start_run(changed_case, changed_case.first, sources)
        assert language.kept_folder(changed_case, changed_run) not in (None, folder)
    with monkeypatch.context() as other:
        other.setattr(language, "kernel_facts", lambda *_: "another")
        assert language.kept_folder(case, run) not in (None, folder)
        other.setattr(run, "train_data", run.validation_data)
        assert language.kept_folder(case, run) not in (None, folder)
        other.setattr(language, "PACKAGE", tmp_path / "src" / "package")  # the benchmarks are another's
        assert language.kept_folder(case, run) is None
    for facts in ({"changed": True}, {"commit": None}):
        monkeypatch.setattr(language, "project_facts", lambda facts=facts: {**project, **facts})
        assert language.kept_folder(case, run) is None


@pytest.mark.parametrize("broken", [b"", b"nonsense", None])
def test_a_kept_stage_that_cannot_be_read_or_written_is_trained_anew(
    broken: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, said = language.QUICK[0], []
    folder = tmp_path / "first"
    monkeypatch.setattr(language, "kept_folder", lambda *_: folder)
    monkeypatch.setattr(language, "tell", said.append)
    expected = language.measure(case, corpus.open_sources(())).counts
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for cut in [broken] if broken is not None else [whole[: len(whole) // 2], whole[:-100]]:
        file.write_bytes(cut)
        assert language.measure(case, corpus.open_sources(())).counts == expected
        assert sum("cannot be read" in text for text in said) == 1
        assert len(file.read_bytes()) == len(whole)
        said.clear()
    file.unlink()
    monkeypatch.setattr(torch, "save", _fail)
    assert language.measure(case, corpus.open_sources(())).counts == expected
    (told,) = [text for text in said if "not kept" in text]
    assert f"not kept (checkpoint {file} could not be written: No space left;" in told
    assert list(folder.iterdir()) == []


def _fail(*_: Any) -> None:
    raise OSError("No space left")


def test_bytes_are_embedded_with_those_before_them() -> None:
    torch.manual_seed(0)
    embed, tokens = language.LastBytes(32), torch.randint(1, 256, (2, 9))
    found = embed(tokens).unflatten(-1, (language.LAST_BYTES, -1))
    for t in range(9):
        for before in range(language.LAST_BYTES):
            token = tokens[:, t - before] if before <= t else torch.zeros(2, dtype=torch.long)
            assert torch.equal(found[:, t, before], embed.weight[token])


def test_the_same_bytes_are_predicted_whatever_the_context() -> None:
    windows = torch.stack([torch.arange(65), torch.arange(100, 165)])
    for context in (8, 32, 64):
        cut = language.in_contexts(windows, context)
        assert cut.shape == (128 // context, context + 1)
        assert torch.equal(cut[:, 1:].flatten(), windows[:, 1:].flatten())
        assert torch.equal(cut[:, 0].sort().values, windows[:, :-1:context].flatten().sort().values)


def test_bits_are_those_of_the_next_byte() -> None:
    class Model(torch.nn.Module):
        """Expects each byte to be the one before it plus one: certain, but wrong where it is not."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return 2.0 * torch.nn.functional.one_hot((tokens + 1) % 256, 256).float()

    windows = torch.arange(9).repeat(2, 1)
    windows[1, 4] = 77  # neither it nor the byte after it follows the one before
    model: Any = Model()
    bits = language.bits_of(model, windows)
    other = torch.tensor(255 + torch.e**2).log2()
    expected = torch.full((2, 8), other - 2.0 / torch.tensor(2.0).log())
    expected[1, 3:5] = other
    torch.testing.assert_close(bits.float(), expected)
    counted = language.count("x", bits)
    assert counted == {"bits x": round(expected.sum().item()), "bytes x": 16}


LONG = "context 256"


def made_result(bits: list[float], seconds: list[float], **counts: int) -> Result:
    """With one point in the first stage."""
    for place, value in enumerate(bits, 1):
        name = f"{LONG if place > 1 else language.FIRST}: after {place * 100}"
        counts |= {f"bits {name}": round(value * 1000), f"bytes {name}": 1000}
    times = {language.FIRST: tuple(seconds[:1]), LONG: tuple(seconds[1:]), "wall": (1.0, 2.0, 4.0)}
    counts[f"{LONG}: pairs"] = 256 * 257 // 2  # of two heads
    case = case_of(language.QUICK[0])
    case["stages"][-1]["total_bytes"] = 400
    return Result(case, 1, 0.0, times, counts)


def test_curves_are_read_at_equal_time_and_judged_by_their_last_quarter() -> None:
    result = made_result([4.0, 3.0, 2.5, 2.0], [10.0, 10.0, 10.0, 20.0])
    assert language.curve(result.counts, language.FIRST) == [(100, 4.0)]
    assert language.curve(result.counts, LONG) == [(200, 3.0), (300, 2.5), (400, 2.0)]
    times = {5.0: None, 10.0: 3.0, 15.0: 2.75, 20.0: 2.5, 30.0: 2.25, 40.0: 2.0, 99.0: 2.0}
    assert {at: language.bits_at(result, at, LONG) for at in times} == times
    assert language.last_quarter(result, LONG) == pytest.approx(0.25)
    worse = made_result([2.0, 1.9, 1.9, 2.0], [1.0] * 4)
    assert language.end_cells([(LONG, worse)], {0: 4.0})[-1] == "-5.0"
    flat = made_result([3.0, 2.0, 2.0, 1.99], [1.0] * 4)
    assert language.last_quarter(flat, LONG) < language.FLAT
    assert language.walls_of([(LONG, flat)]) == [4.0]
    cells = language.end_cells([(LONG, result)], {0: 4.0})
    assert cells == ["50.0", "2.000", "", "40", "25.0"]
    assert language.end_cells([(LONG, flat)], {0: 2.5}) == ["50.0", "1.990", "1.995", "3", "0.5, flat"]
    assert language.end_cells([(LONG, flat)], {0: 3.0}) == ["50.0", "1.990", "1.990", "3", "0.5, flat"]


def test_equal_time_is_that_of_each_seed() -> None:
    """What ends first keeps its last bits for every seed; the other's curve is read at the same seconds."""
    groups = {}
    for name, factor in (("fast", 1.0), ("slow", 2.0)):
        made = [made_result([4.0, 3.0, 2.0], [1.0, t * factor, t * factor]) for t in (10.0, 14.0)]
        seeds = [{**result.case, "seed": seed} for seed, result in enumerate(made)]
        groups[name] = [(LONG, replace(x, case=case)) for x, case in zip(made, seeds, strict=True)]
    least = language.least_seconds(groups.values())
    assert least == {0: 20.0, 1: 28.0}
    cells = {name: language.end_cells(runs, least)[1:4] for name, runs in groups.items()}
    assert cells["fast"] == ["2.000 ± 0.000", "2.000 ± 0.000", "24 ± 4"]
    assert cells["slow"] == ["2.000 ± 0.000", "3.000 ± 0.000", "48 ± 8"]


def test_language_models_repeat_and_know_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "KEPT", 0.5)  # of so few steps
    case = language.QUICK[1]
    first, *stages = (replace(stage, total_bytes=16 * 512) for stage in (case.first, *case.stages))
    case = replace(case, first=first, stages=tuple(stages))
    first, second = (language.measure(case, corpus.open_sources(())).counts for _ in range(2))
    assert first == second
    for context in (128, 256):
        stages = (language.FIRST, f"context {context}")
        points = [bits for stage in stages for _, bits in language.curve(first, stage)]
        assert points == sorted(points, reverse=True)
        assert 3.0 < points[-1] < 6.0  # 8 bits know nothing
    assert first[f"bytes {LONG}: last 256"] == first[f"bytes {LONG}: last 128"] * 2 == 2 * 256
    parts = sum(count for name, count in first.items() if name.startswith(f"bits {LONG}: at "))
    assert parts == pytest.approx(first[f"bits {LONG}: last 256"], abs=4)


def test_packages_are_known_by_their_hash_or_the_library_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "DATA", tmp_path / "data")

    def download(command: list[str], **_: Any) -> None:
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1], "p-1-py3-none-any.whl"), "w") as file:
            file.writestr(zipfile.ZipInfo("p/a.py"), "a = 1\n")
            file.writestr(zipfile.ZipInfo("p/b.so"), "\0")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ValueError, match=r"p==1 must have the SHA-256 0+, got [0-9a-f]{64}"):
        corpus.fetch("p==1", 64 * "0")
    assert not (tmp_path / "data" / "p-1").exists()
    download(["--dest", str(tmp_path)])
    digest = corpus.hashlib.sha256((tmp_path / "p-1-py3-none-any.whl").read_bytes()).hexdigest()
    folder = corpus.fetch("p==1", digest)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["a.py"]

    def fail(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail)
    assert corpus.fetch("p==1", digest) == folder  # once is enough
    monkeypatch.setattr(corpus, "PACKAGES", {"p==1": digest, "p==2": digest})
    assert corpus.open_sources(("p==1", "p==1")) == ((str(folder),), (str(folder),), 2)
    training, validation, packages = corpus.open_sources(("p==1", "p==2"))
    assert packages == 0
    assert "cannot be downloaded" in capsys.readouterr().err
    assert len(training) > 5 * len(validation) > 0
    assert not set(training) & set(validation)


def test_a_record_goes_on_with_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, measured = tmp_path / "record.json", []

    def run(case: Any, say: Any) -> Result:
        measured.append(case.name)
        if len(measured) == 3:
            raise RuntimeError("interrupted")
        return Result(case_of(case), 1, 0.0, {"wall": (1.0,)})

    cases = [replace(reach.QUICK[0], name=str(number)) for number in range(4)]
    with pytest.raises(RuntimeError, match="interrupted"):
        record.measure_all(cases, run, out)
    assert [result.name for result in read_record(out).results] == ["0", "1"]
    monkeypatch.setattr(record, "project_facts", lambda: {"version": "1", "commit": "f" * 40})
    changed = [cases[0], replace(cases[1], seed=9), *cases[2:]]
    found = record.measure_all(changed, run, out, known=read_record(out), workers=2)
    assert sorted(measured[3:]) == ["1", "2", "3"]  # and what was measured with other settings
    assert [result.name for result in found.results] == ["0", "1", "2", "3"]
    assert read_record(out).results == found.results
    assert list(found.results[0].notes) == ["commit"]
    shown = record.origin(found, reach.SECTIONS)
    assert f"commit ffffffffffff, 1 case at {found.results[0].notes['commit'][:12]}" in shown
    other = replace(found, machine={**found.machine, "torch": "0.0"})
    with pytest.raises(ValueError, match=r"begun with, got torch 0\.0, now"):
        record.measure_all(cases, run, out, known=other)
    with pytest.raises(ValueError, match=r"cases of its own suite, got one of 0, 1$"):
        record.measure_all(cases[2:], run, out, known=found)  # which would drop them


@pytest.mark.parametrize(
    ("project", "told"),
    [
        ({"commit": "e" * 40, "changed": False}, "eeeeeeeeeeee"),
        ({"commit": "f" * 40, "changed": True}, "ffffffffffff with local changes"),
        ({"commit": None, "changed": False}, "an unknown commit"),
        ({"commit": "f" * 40, "changed": False}, None),
    ],
)
def test_what_is_taken_over_says_of_which_code_it_is(
    project: dict[str, Any], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "project_facts", lambda: {"version": "1", "commit": "f" * 40})
    case = reach.QUICK[0]
    known = record.measure_all([case], lambda case, _: Result(case_of(case), 1, 0.0))
    found = record.measure_all([case], lambda *_: pytest.fail("again"), known=replace(known, project=project))
    shown = record.origin(found, reach.SECTIONS)
    assert ("case" in shown) == (told is not None)
    assert told is None or f", 1 case at {told};" in shown


def test_an_error_keeps_what_is_under_way_and_begins_nothing(tmp_path: Path) -> None:
    begun, failed = [], threading.Event()

    def run(case: Any, say: Any) -> Result:
        begun.append(case.name)
        if case.name == "1":
            failed.set()
            raise RuntimeError("broken")
        failed.wait()
        time.sleep(0.2)
        return Result(case_of(case), 1, 0.0, why_not="too large" if case.name == "0" else None)

    cases = [replace(reach.QUICK[0], name=str(number)) for number in range(9)]
    with pytest.raises(RuntimeError, match="broken"):
        record.measure_all(cases, run, tmp_path / "record.json", workers=2)
    found = read_record(tmp_path / "record.json")
    assert "0" in {result.name for result in found.results}
    assert len(found.results) == len(begun) - 1 < 5
    with pytest.raises(RuntimeError, match="broken"):  # what could not be measured is tried again
        record.measure_all(cases[:2], run, known=found, every=cases)
    assert begun[-2:] == ["0", "1"]


def test_a_part_of_the_cases_keeps_what_is_known_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = reach.QUICK
    measured = []

    def run(case: Any, say: Any) -> Result:
        measured.append(case.name)
        return Result(case_of(case), 1, 0.0, SECONDS, {f"needles {n}": 1 for n in case.lengths})

    monkeypatch.setattr(reach, "run", run)
    arguments = ["--quick", "--workers", "1", "--out", str(tmp_path / "record.json"), "--only"]
    for only, more in ((second.name, []), (first.name, ["--resume"]), (second.name, ["--resume"])):
        assert common.main("reach", [*arguments, only, *more]) == 0
    assert measured == [second.name, first.name]
    stored = read_record(tmp_path / "record.json").results
    assert [result.name for result in stored] == [first.name, second.name]
    slow = tuple(replace(case, repeats=5) for case in reach.QUICK)
    monkeypatch.setattr(reach, "QUICK", slow)
    for _ in range(2):
        assert common.main("reach", [*arguments, "", "--repeats", "3", "--resume"]) == 0
    assert measured[2:] == [first.name, second.name]
    with pytest.raises(SystemExit):
        common.main("reach", ["--quick", "--resume"])
    assert "--resume goes on with the record of --out, got none" in capsys.readouterr().err


def test_commands_are_listed_and_explained() -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "quality")]
    for arguments, code in ((["--help"], 0), ([], 2), (["nonsense"], 2)):
        done = subprocess.run([*program, *arguments], capture_output=True, text=True)
        assert done.returncode == code
        assert "python benchmarks/quality reach" in done.stdout + done.stderr
    done = subprocess.run([*program, "choice", "--help"], capture_output=True, text=True, check=True)
    assert "usage: benchmarks/quality choice" in done.stdout
    assert "--workers N" in done.stdout


@pytest.mark.parametrize("module", [reach, language, choice])
def test_what_was_not_measured_is_said(module: Any) -> None:
    results = tuple(Result(case_of(case), 1, 0.0, why_not="too large") for case in module.CASES)
    shown = record.to_markdown(record.Record({}, {}, results), module.SECTIONS)
    assert shown.count("not measured: too large") == len(results)


def test_tables_are_means_over_seeds_with_their_range() -> None:
    assert reach.share([0.5, 1.0, 0.75]) == "75 (50-100)"
    assert reach.share([1.0, 1.0]) == "100"
    assert reach.share([None]) == ""
    assert language.spread([1.0, 2.0]) == "1.500 ± 0.500"
    results = [
        Result(case_of(case), 1, 0.0, SECONDS, {**NEEDLES, **counts})
        for case, counts in zip(
            reach.CASES[3:5],
            ({"asked 8192 1024": 10, "found 8192 1024": 5, "reached 8192 1024": 8, "pairs 8192 1024": 10},)
            * 2,
            strict=True,
        )
    ]
    results.append(Result(case_of(reach.CASES[5]), 1, 0.0, why_not="out of memory"))
    table = reach.make_table(results)
    assert table.rows[0][:3] == ["dilated, 8,192 tokens", "50", "50"]
    assert table.rows[0][-5:] == ["80", "", "6", "4", "2"]
    assert table.rows[-1][:2] == ["needle, dilated, seed 2", "not measured: out of memory"]
    assert len(table.rows[-1]) == len(table.head)


def test_summaries_are_means_over_seeds() -> None:
    results = []
    for task, share in (("needle", 90), ("copy", 40)):
        for seed in (0, 1):
            case = next(x for x in reach.CASES if (x.task, x.attention, x.seed) == (task, "window", seed))
            counts = {"asked 32768 1024": 100, "found 32768 1024": share + 2 * seed}
            results.append(Result(case_of(case), 1, 0.0, SECONDS, counts))
    found = reach.summary(record.Record({}, {}, tuple(results)))
    assert "Trained on 8,192 tokens and tested on 32,768," in found
    assert found.endswith("**one needle** with window 91 %; **the right one of 4** with window 41 %.\n")
    for few in ([], results[:2], [replace(x, counts={}) for x in results]):
        with pytest.raises(ValueError, match="a summary needs all attentions of"):
            reach.summary(record.Record({}, {}, tuple(few)))
    with pytest.raises(ValueError, match=r"two contexts at least, got a record of \[\]"):
        language.summary(record.Record({}, {}, ()))
    made = made_result([4.0, 3.0, 2.5, 2.0], [10.0, 10.0, 10.0, 20.0])
    lasts = {f"{x} {LONG}: last {n}": y for n in (128, 256) for x, y in (("bits", n), ("bytes", 100))}
    made = replace(made, counts={**made.counts, **lasts})
    found = language.summary(record.Record({}, {}, (made,)))
    assert "at a context of 256 bytes: dense 2.000 after 40 core seconds (2.000 at equal time)" in found
    assert found.endswith("and the last 1,024 bytes 1.280 with 128 and 2.560 with 256.\n")


@pytest.mark.parametrize(
    ("values", "words"),
    [((0.97, 0.96, 1.0), "met"), ((0.94, 1.0, 1.0), "**not met** (2 of 3 seeds do)")],
)
def test_a_target_is_for_every_seed(values: tuple[float, ...], words: str) -> None:
    case, results = reach.CASES[3], []
    for value in values:
        counts = {**NEEDLES, "asked 32768 1024": 100, "found 32768 1024": round(100 * value)}
        figures = tuple(case.figures(Measured(None, counts)))
        assert [figure.target for figure in figures] == [None, None, 0.95, None]
        results.append(Result(case_of(case), 1, 0.0, SECONDS, counts, figures))
    shown = [row[-4] for row in reach.make_table(results).rows]
    assert shown == ["", "", f"every seed at least 95, {words}", ""]


@pytest.mark.skipif(not is_whole("reach"), reason="the record is under way")
def test_heat_maps_show_their_record(tmp_path: Path) -> None:
    drawn, shown = tmp_path / "reach.svg", ROOT / "docs" / "images" / "reach.svg"
    assert common.main("reach", ["--render", "--picture", str(drawn)]) == 0
    texts = [_texts(path) for path in (drawn, shown)]
    assert texts[0] == texts[1]
    stored = read_record(RESULTS / "reach.json").results
    asked = {
        (x.case["task"], x.case["attention"], key[6:])
        for x in stored
        for key in x.counts
        if key[:6] == "asked "
    }
    assert sum(text.isdigit() for text in texts[0]) == len(asked)


def _texts(path: Path) -> list[str]:
    from xml.etree import ElementTree

    return [x.text or "" for x in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_a_measured_case_keeps_what_its_process_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, case in ((reach, reach.QUICK[1]), (language, language.QUICK[1]), (language, choice.QUICK[0])):
        assert all(figure.value is None for figure in case.figures(Measured(why_not="why")))
        monkeypatch.setattr(module, "measure_in_child", lambda *_: Measured(None, {"a": 1}, {}, "why"))
        found = case.run(lambda _: None)
        assert (found.counts, found.why_not) == ({"a": 1}, "why")
        assert found.error is not None
        assert found.error < 2e-5
