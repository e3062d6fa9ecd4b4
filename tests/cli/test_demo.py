"""The command `demo`: what it measures and says, also when something is missing, wrong or interrupted."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dilated_attention_pytorch import functional
from dilated_attention_pytorch.cli import demo_costs as costs
from dilated_attention_pytorch.cli import demo_report, demo_story
from dilated_attention_pytorch.cli import demo_training as training
from dilated_attention_pytorch.cli.bench import exactness
from dilated_attention_pytorch.cli.bench.exactness import Check
from dilated_attention_pytorch.cli.demo_costs import Cost, Row
from dilated_attention_pytorch.cli.main import main
from dilated_attention_pytorch.cli.report import CHARTS_ADVICE
from dilated_attention_pytorch.core.host_memory import Memory
from dilated_attention_pytorch.spec import branches_for

LENGTHS = [1024 * 2**i for i in range(11)]
ROWS = [
    Row(1024, dict.fromkeys(costs.NAMES, Cost(0.0101, 2**21, 1.0))),
    Row(
        2048,
        {
            "dense": Cost(2.0, 2**34, 1.0),
            "dilated": Cost(0.5, 2**31, 0.25),
            "block-sparse": Cost(0.5, None, 0.1),
        },
    ),
    Row(4096, {"dilated": Cost(1.0, 2**21, 0.1)}),
]


class FakeMachine:
    """A clock, dense attention that costs the square of the length, and others that cost the length."""

    def __init__(self, blocks: float = 2e-6) -> None:
        self.now, self.linear = 0.0, {"dilated": 1e-6, "block-sparse": blocks}

    def measure(self, n: int, *, names: Collection[str], rounds: int) -> Row:
        seconds = {name: self.linear.get(name, 1e-9 * n) * n for name in names}
        self.now += (rounds + (rounds > 1)) * sum(seconds.values())
        return Row(n, {name: Cost(seconds[name], 2**20, 0.5) for name in names})

    def rows(self, budget: float) -> list[Row]:
        events = costs.doubling_rows(budget, self.measure, lambda: self.now)
        return [event for event in events if isinstance(event, Row)]


def lengths_of(rows: list[Row], name: str) -> list[int]:
    return [row.n for row in rows if name in row.costs]


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "host_memory", lambda: Memory(2**40, 2**40))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks and measurements that take no time."""
    monkeypatch.setattr(exactness, "run_checks", lambda: iter([Check("three branches", 1e-16, 2e-16)]))
    monkeypatch.setattr(costs, "doubling_rows", lambda budget: iter(ROWS))


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A text that is easy to learn, and a model that is small."""
    small = {"d_model": 16, "nhead": 2, "num_layers": 1, "dim_feedforward": 32, "context_length": 64}
    for name, value in {**small, "learning_rate": 0.03}.items():
        monkeypatch.setitem(training.SETTINGS, name, value)
    monkeypatch.setattr(training, "PROMPT", "abcdab")
    monkeypatch.setattr(training, "SAMPLE_BYTES", 60)
    (tmp_path / "a.py").write_text("abcd" * 5000)
    return [str(tmp_path / "a.py")]


def run_demo(out: Path, *arguments: str) -> tuple[int, str]:
    return main(["demo", *arguments, "--out", str(out)]), unescape(out.read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seconds 0", "--seconds must be positive, got 0.0"),
        ("--seconds inf", "--seconds must be positive, got inf"),
        ("--train-seconds -1", "--train-seconds must be 0 or more, got -1.0"),
        ("--out no/such/place.html", "--out must lie in a directory that is there, got no/such/place.html"),
        ("--out .", "--out must be a file, got the directory ."),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_story, "gather", lambda *_: pytest.fail("measured in spite of a mistake"))
    assert main(["demo", *arguments.split()]) == 2
    assert f"dilated-attention demo: error: {message}\n" == capsys.readouterr().err


def test_steps_and_seconds_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--steps", "5", "--train-seconds", "5"])
    assert "not allowed with" in capsys.readouterr().err


def test_inexact_library_is_neither_timed_nor_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = functional.dilated_attention
    monkeypatch.setattr(functional, "dilated_attention", lambda *a, **k: right(*a, **k) * 1.000001)
    monkeypatch.setattr(costs, "doubling_rows", lambda *_: pytest.fail("an inexact library was timed"))
    monkeypatch.setattr(training, "train_model", lambda *_: pytest.fail("it was trained with"))
    code, page = run_demo(tmp_path / "r.html")
    assert code == 1
    assert "WRONG" in capsys.readouterr().out
    for text in ("WRONG", "The library is not exact here: 9 of 9 checks fail.", "Nothing was measured."):
        assert text in page


def test_parts_that_are_missing_say_why(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(costs, "why_no_peaks", lambda: "this system keeps no books")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, page = run_demo(tmp_path / "r.html", "--train-seconds", "0", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (code, found["training"], found["why_no_peaks"]) == (0, None, "this system keeps no books")
    assert "The memory of calls is not shown: this system keeps no books." in page
    assert "No training was asked for." in page
    assert f"dilated-attention demo --seconds 60 --train-seconds 0 --out {tmp_path / 'r.html'}" in page
    assert page.count(CHARTS_ADVICE) == 1
    assert 'id="time"' not in page
    assert "2,000" in page  # the table is there without charts


def test_python_without_its_source_is_no_failure(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")  # as little as distributions of bytecode have
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    code, page = run_demo(tmp_path / "r.html")
    assert code == 0
    assert "This Python comes without the source of its library" in page


def test_a_training_that_fails_leaves_a_report_of_the_rest(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(training, "train_model", fail)
    code, page = run_demo(tmp_path / "r.html", "--steps", "1")
    assert code == 1
    for text in (" ".join(capsys.readouterr().out.split()), page):
        assert "The training failed: no space left" in text
    assert 'id="time"' in page


@pytest.mark.parametrize("where", ["run_checks", "doubling_rows", "write_sample"])
def test_interrupts_keep_what_was_found(
    where: str, quick: None, files: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    before: dict[str, tuple[Any, list[Any]]] = {
        "run_checks": (exactness, [Check("three branches", 1e-16, 2e-16)]),
        "doubling_rows": (costs, ROWS[:1]),
        "write_sample": (training, []),
    }
    module, found = before[where]

    def interrupted(*_: Any) -> Iterator[Any]:
        yield from found
        raise KeyboardInterrupt

    monkeypatch.setattr(module, where, interrupted if found else lambda model: next(interrupted()))
    monkeypatch.setattr(training, "source_files", lambda: files)
    code, page = run_demo(tmp_path / "r.html", "--steps", "1", "--json")
    told = json.loads(capsys.readouterr().out)
    assert (code, len(told["checks"])) == (130, 1)
    assert "Stopped early. 1 of 1 checks against the definition pass." in page
    assert len(told["rows"]) == {"run_checks": 0, "doubling_rows": 1, "write_sample": 3}[where]
    assert ("The demo was interrupted before." in page) == (where != "write_sample")
    assert ('id="loss"' in page) == (where == "write_sample")
    assert "What it writes" not in page


def test_ctrl_c_ends_it_with_a_report(tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    command = [sys.executable, "-m", "dilated_attention_pytorch", "demo", "--seconds", "500"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "--out", str(out)], env=environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("     1,024"):
                break
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read()
    assert (process.returncode, errors) == (130, "")
    assert "Stopped early. 9 of 9 checks against the definition pass. At " in rest
    assert f"The report is in {out}" in rest
    page = out.read_text()
    for text in ('id="time"', 'id="pattern-blocks"', "<td>1,024</td>"):
        assert text in page


@pytest.mark.parametrize("name", demo_report.PICTURES)
def test_pictures_are_those_of_show(name: str, tmp_path: Path) -> None:
    options, _ = demo_report.PICTURES[name]
    out, pixels = tmp_path / "p.svg", demo_report.PIXELS
    assert main(["show", *options.split(), "--pixels", str(pixels), "--out", str(out)]) == 0
    drawn = demo_report.svg_of(options, pixels, name)
    assert drawn == out.read_text().replace('id="pattern"', f'id="{name}"')


def test_with_and_without_rich_the_same_is_told(
    quick: None, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "source_files", lambda: files)
    told = []
    for make in (None, lambda stream: Console(file=stream, width=80, force_terminal=True)):
        stream = io.StringIO()
        demo_story.gather(demo_story.View(stream, make and make(stream)), 1.0, 0.0, 12)
        told.append(stream.getvalue())
    for text in told:
        for each in ("ok", "2,048", "2,000", "4.0 x", "16,384", "12/12", "parameters", "   | abcdab"):
            assert each in text, each
    assert max(map(len, told[0].splitlines())) <= 80
    assert "\x1b" not in told[0]
    assert "step 12/12, " in told[1]  # the line of progress
    assert demo_story.cells(ROWS[0]) == ("1,024", "10.1", "10.1", "10.1", "1.0 x", "2.0", "2.0", "2.0")
    assert demo_story.cells(ROWS[2]) == ("4,096", "-", "1,000", "-", "-", "-", "2.0", "-")


def test_pipes_get_lines_and_json_leaves_stdout_alone(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    plain = demo_story.choose_view(is_json=True)
    assert (plain.stream, plain.console) == (sys.stderr, None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rich.console", None)
        assert demo_story.choose_view(is_json=False).console is None
    assert "pip install 'dilated-attention[demo]'" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert demo_story.choose_view(is_json=False).console is not None


def test_branches_are_the_library_s_for_these_heads() -> None:
    assert costs.ladder(1024) == ((2048,), (1,))
    assert costs.ladder(16384) == branches_for(16384, costs.HEADS)
    longest = costs.ladder(2**20)  # without the warning, which is an error here
    with pytest.warns(UserWarning, match="8 heads"):
        assert longest == branches_for(2**20, costs.HEADS)
    assert max(costs.ladder(costs.EXAMPLE)[1]) <= costs.HEADS < max(costs.ladder(2 * costs.EXAMPLE)[1])


def test_lengths_double_and_the_slow_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine()
    rows = machine.rows(40.0)
    assert lengths_of(rows, "dilated") == lengths_of(rows, "block-sparse") == LENGTHS
    assert lengths_of(rows, "dense") == LENGTHS[:7]  # the next would take 17 s, over a quarter of the budget
    assert machine.now <= 40.0
    rows = FakeMachine(blocks=1e-4).rows(10.0)
    assert lengths_of(rows, "block-sparse") == LENGTHS[:5]  # the next may take 4.1 s, as growth is overrated
    assert lengths_of(rows, "dilated") == LENGTHS
    monkeypatch.setattr(costs, "host_memory", lambda: Memory(2**30, 2**40))
    assert FakeMachine().rows(1000.0)[-1].n == 32768  # memory bounds the length


@pytest.mark.parametrize("budget", [0.001, 0.1, 1.0, 5.0, 20.0])
def test_budget_is_kept_after_the_first_length(budget: float) -> None:
    machine = FakeMachine()
    rows = machine.rows(budget)
    assert set(rows[0].costs) == set(costs.NAMES)
    assert len(rows) == 1 or machine.now <= budget


def test_measured_are_those_that_were_asked_for() -> None:
    row = costs.measure_row(1024, names=("dilated", "block-sparse"), rounds=1)
    assert set(row.costs) == {"dilated", "block-sparse"}
    assert all(cost.seconds > 0 for cost in row.costs.values())
    if costs.why_no_peaks() is None:
        out = 4 * 1024 * costs.HEADS * costs.HEAD_DIM
        assert all(out <= (cost.peak_bytes or 0) <= 100 * out for cost in row.costs.values())


def test_peak_is_what_a_call_holds_at_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if (why := costs.why_no_peaks()) is not None:
        pytest.skip(why)
    size = 2**25
    assert costs.peak_of(lambda: None) == pytest.approx(0, abs=2**20)
    for _ in range(2):  # what the first call freed does not hide the second
        # The largest of a few: the system may take back pages of files meanwhile, and hide one.
        peaks = [costs.peak_of(lambda: bytearray(b"x") * size) or 0 for _ in range(5)]
        assert max(peaks) == pytest.approx(size, abs=2**21)
    monkeypatch.setattr("dilated_attention_pytorch.cli.bench.measure.CLEAR_REFS", tmp_path / "none" / "refs")
    assert "peak memory cannot be reset here" in (costs.why_no_peaks() or "")
    called: list[int] = []
    assert costs.peak_of(lambda: called.append(1)) is None
    assert called == [1]


def test_summary_holds_what_was_measured() -> None:
    assert costs.summarize(ROWS) == (
        "At 2,048 tokens dense attention took 2.0 s and dilated attention 500.0 ms: 4.0 times as fast, "
        "with 25.0% of the pairs. Dilated attention went on to 4,096 tokens in 1.0 s, 4,096 tokens a second."
    )
    assert "went on" not in costs.summarize(ROWS[:2])
    assert costs.summarize([]) == "Nothing was timed."


def test_pair_shares_are_those_of_the_definition() -> None:
    assert set(costs.pair_shares(1024, costs.block_pattern(1024)).values()) == {1.0}
    n, dense = 4096, 4096 * 4097 / 2
    pattern = costs.block_pattern(n)
    shares = costs.pair_shares(n, pattern)
    expected = 3 * (2048 * 2049 / 2)  # (2048, 1) twice, and every second of all
    assert shares["dilated"] == pytest.approx(expected / dense)
    assert shares["block-sparse"] == pytest.approx(pattern.to_dense().tril().sum().item() / dense)


def test_failure_in_the_thread_reaches_the_caller() -> None:
    def broken() -> Iterator[Row]:
        yield ROWS[0]
        raise RuntimeError("broken")

    events = demo_story.in_thread(broken())
    assert next(events) is ROWS[0]
    with pytest.raises(RuntimeError, match="broken"):
        next(events)


def test_the_model_learns_and_tells(files: list[str]) -> None:
    told: list[tuple[int, float, float | None]] = []
    found, model = training.train_model(files, 60, lambda *values: told.append(values))
    assert (found["steps"], found["steps_planned"], found["is_interrupted"]) == (60, 60, False)
    assert found["losses"][0][1] > 4
    assert [step for step, _ in found["losses"]] == [step for step, _, _ in told] == list(range(1, 61))
    assert [step for step, _ in found["validations"]] == [10, 20, 30, 40, 50, 60]
    assert found["validations"][-1][1] == told[-1][2]
    assert found["validations"][-1][1] < 1
    assert (found["train_bytes"], found["validation_bytes"]) == (19200, 800)
    sample = training.write_sample(model)
    assert sample == training.write_sample(model)
    assert len(sample.encode()) >= training.SAMPLE_BYTES
    assert sample.count("abcd") > 10


def test_training_ends_after_the_step_of_an_interrupt_or_when_late(files: list[str]) -> None:
    def interrupt(step: int, *_: object) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    found, _ = training.train_model(files, 50, interrupt)
    assert (found["steps"], found["is_interrupted"], found["validations"]) == (3, True, [])
    found, _ = training.train_model(files, 50, lambda *_: None, limit=0.0)
    assert (found["steps"], found["steps_planned"], found["is_interrupted"]) == (1, 50, False)


def test_steps_and_threads_are_chosen_for_the_time(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 100.0, 0.0, 0.1, 0.0, 0.9, 0.0, 0.5])  # the first step starts what all use
    run = training.start_run(files, training.PROBE_STEPS)
    with monkeypatch.context() as patch:
        patch.setattr(run, "take_step", lambda: None)
        patch.setattr(training, "start_run", lambda *_: run)
        patch.setattr(training.time, "perf_counter", lambda: next(ticks))
        assert training.step_seconds(files) == 0.5
    used = [7]
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1])
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    for alone, together, threads in ((0.5, 0.25, 7), (0.25, 4.0, 1)):
        seconds = {1: alone, 7: together}
        monkeypatch.setattr(training, "step_seconds", lambda _, seconds=seconds: seconds[used[-1]])
        assert training.plan_steps(10.0, files) == (36, threads)
        assert used[-1] == 7
    assert training.plan_steps(0.001, files)[0] == 1


def test_data_are_python_sources_in_order() -> None:
    files = training.source_files()
    assert files == sorted(files)
    assert any(name.endswith("argparse.py") for name in files)
    config = training.start_run(files, 400).config
    assert config.validate_every == 50
    assert config.segment_lengths[-1] == config.context_length
