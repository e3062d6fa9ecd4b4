"""The command `demo`: what it measures and says, also when something is missing, wrong or interrupted."""

from __future__ import annotations

import io
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch import functional
from dilated_attention_pytorch.cli import demo, demo_parts as parts
from dilated_attention_pytorch.cli.bench import exactness
from dilated_attention_pytorch.cli.bench.exactness import Check
from dilated_attention_pytorch.cli.demo_parts import Row
from dilated_attention_pytorch.cli.main import main, make_parser
from dilated_attention_pytorch.cli.report import CHARTS_ADVICE
from dilated_attention_pytorch.core.host_memory import Memory
from dilated_attention_pytorch.spec import branches_for

LENGTHS = [1024 * 2**i for i in range(11)]
CHECKED = Check("three branches", 1e-16, 2e-16)
ROWS = [
    Row(1024, dict.fromkeys(demo.NAMES, 0.0101), dict.fromkeys(demo.NAMES, 2**21)),
    Row(2048, {"dense": 2.0, "dilated": 0.5, "block-sparse": 0.5}, {"dense": 2**34, "dilated": 2**31}),
    Row(4096, {"dilated": 1.0}, {"dilated": 2**21}),
]


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "host_memory", lambda: Memory(2**40, 2**40))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Checks and measurements that take no time, a text that is easy to learn, and a model that is small."""
    monkeypatch.setattr(exactness, "run_checks", lambda: iter([CHECKED]))
    monkeypatch.setattr(parts, "measure_costs", lambda *_: iter(ROWS))
    small = {"d_model": 16, "nhead": 2, "num_layers": 1, "dim_feedforward": 32, "context_length": 64}
    for name, value in {**small, "learning_rate": 0.03}.items():
        monkeypatch.setitem(parts.SETTINGS, name, value)
    monkeypatch.setattr(parts, "PROMPT", "abcdab")
    monkeypatch.setattr(parts, "SAMPLE_BYTES", 60)
    (tmp_path / "a.py").write_text("abcd" * 5000)
    files = [str(tmp_path / "a.py")]
    monkeypatch.setattr(parts, "source_files", lambda: files)
    return files


def run_demo(out: Path, *arguments: str) -> tuple[int, str]:
    return main(["demo", *arguments, "--out", str(out)]), unescape(out.read_text())


def test_inexact_library_is_neither_timed_nor_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = functional.dilated_attention
    monkeypatch.setattr(functional, "dilated_attention", lambda *a, **k: right(*a, **k) * 1.000001)
    monkeypatch.setattr(parts, "measure_costs", lambda *_: pytest.fail("an inexact library was timed"))
    monkeypatch.setattr(parts, "train_model", lambda *_: pytest.fail("it was trained with"))
    code, page = run_demo(tmp_path / "r.html")
    assert code == 1
    assert "WRONG" in capsys.readouterr().out
    for text in (
        "WRONG",
        "The library is not exact here: 9 of 9 checks fail.",
        "<p>The library is not exact",
    ):
        assert text in page


def test_parts_that_are_missing_say_why(
    quick: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, page = run_demo(tmp_path / "r.html", "--train-seconds", "0", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (code, found["training"]) == (0, None)
    assert found["missing"] == {"check": "", "measurement": "", "training": "No training was asked for."}
    assert "No training was asked for." in page
    assert f"dilated-attention demo --seconds 60 --train-seconds 0 --out {tmp_path / 'r.html'}" in page
    assert page.count(CHARTS_ADVICE) == 1
    assert 'id="time"' not in page
    assert "2,000" in page  # the table is there without charts
    monkeypatch.setattr(parts, "source_files", list)
    code, page = run_demo(tmp_path / "r.html")
    assert code == 0
    assert "This Python comes without the source of its library" in page


@pytest.mark.parametrize("is_failure", [True, False])
@pytest.mark.parametrize(
    ("part", "owner", "name", "rows", "plots"),
    [
        ("check", exactness, "run_checks", 0, []),
        ("measurement", parts, "measure_costs", 1, ["time", "memory"]),
        ("training", parts, "train_model", 3, ["time", "memory", "loss"]),
    ],
)
def test_failures_and_interrupts_keep_what_was_found(
    part: str,
    owner: Any,
    name: str,
    rows: int,
    plots: list[str],
    is_failure: bool,
    quick: object,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = getattr(owner, name)

    def broken(*arguments: Any) -> Iterator[Any]:
        yield next(real(*arguments))
        raise RuntimeError("no space left") if is_failure else KeyboardInterrupt

    monkeypatch.setattr(owner, name, broken)
    code, page = run_demo(tmp_path / "r.html", "--steps", "1", "--json")
    told = json.loads(capsys.readouterr().out)
    assert (code, told["is_interrupted"]) == ((1, False) if is_failure else (130, True))
    assert (len(told["checks"]), len(told["rows"])) == (1, rows)
    goes_on = ["loss"] if is_failure and part == "measurement" else []
    assert [plot for plot in ("time", "memory", "loss") if f'id="{plot}"' in page] == plots + goes_on
    reason = f"The {part} failed: no space left" if is_failure else demo.INTERRUPTION
    assert reason == told["missing"][part]
    assert f"<p>{reason}</p>" in page
    stopped = "" if is_failure else "Stopped early. "
    assert f"{stopped}1 of 1 checks against the definition pass." in told["summary"]
    assert (reason in told["summary"]) == is_failure
    assert ("What it writes" in page) == bool(goes_on)
    assert 'id="pattern-blocks"' in page


def test_ctrl_c_ends_it_with_a_report(tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    command = [sys.executable, "-m", "dilated_attention_pytorch", "demo", "--seconds", "500"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # A test run in the background of a shell ignores the signal, and so would its children.
    pipes["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
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


@pytest.mark.parametrize("name", demo.PICTURES)
def test_pictures_are_those_of_show(name: str, tmp_path: Path) -> None:
    words, _ = demo.PICTURES[name]
    out, pixels = tmp_path / "p.svg", demo.PIXELS
    assert main(["show", *words.split(), "--pixels", str(pixels), "--out", str(out)]) == 0
    assert demo.svg_of(words, pixels, name) == out.read_text().replace('id="pattern"', f'id="{name}"')


def test_terminals_and_files_are_told_the_same(quick: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    options = make_parser("demo").parse_args(["--steps", "12"])
    told = []
    for is_terminal in (False, True):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        demo.gather(demo.Screen(stream), options)
        told.append(stream.getvalue())
    for text in told:
        for each in ("ok", "2,048", "2,000", "4.0 x", "16,384", "12/12", "parameters", "   | abcdab"):
            assert each in text, each
    assert max(map(len, told[0].splitlines())) <= 80
    assert "\x1b" not in told[0]
    assert "step 12/12, " in told[1]  # the line of progress


def test_words_hold_what_was_measured() -> None:
    assert demo.row_cells(ROWS[0]) == ("1,024", "10.1", "10.1", "10.1", "1.0 x", "2.0", "2.0", "2.0")
    assert demo.row_cells(ROWS[2]) == ("4,096", "-", "1,000", "-", "-", "-", "2.0", "-")
    assert demo.summarize(ROWS) == (
        "At 2,048 tokens dense attention took 2.0 s and dilated attention 500.0 ms: 4.0 times as fast. "
        "Dilated attention went on to 4,096 tokens in 1.0 s, 4,096 tokens a second."
    )
    assert "went on" not in demo.summarize(ROWS[:2])
    assert demo.summarize([]) == "Nothing was timed."
    longest = parts.branches_at(2**20)  # without the warning, which is an error here
    with pytest.warns(UserWarning, match="8 heads"):
        assert longest == branches_for(2**20, parts.HEADS)
    rates, beyond = (parts.branches_at(n)[1] for n in (demo.EXAMPLE, 2 * demo.EXAMPLE))
    assert max(rates) <= parts.HEADS < max(beyond)


class FakeMachine:
    """A clock, dense attention that costs the square of the length, and others that cost the length."""

    def __init__(self, blocks: float = 2e-6) -> None:
        self.now, self.linear = 0.0, {"dilated": 1e-6, "block-sparse": blocks}

    def measure(self, n: int, *, names: Collection[str], rounds: int) -> Row:
        seconds = {name: self.linear.get(name, 1e-9 * n) * n for name in names}
        self.now += (rounds + (rounds > 1)) * sum(seconds.values())
        return Row(n, seconds, dict.fromkeys(names, 2**20))

    def lengths(self, budget: float) -> dict[str, list[int]]:
        """Those that each was measured at."""
        told: list[str] = []
        rows = list(parts.measure_costs(budget, told.append, self.measure, lambda: self.now))
        assert told == [f"{', '.join(row.seconds)}: {row.n:,} tokens" for row in rows]
        return {name: [row.n for row in rows if name in row.seconds] for name in parts.GROWTH}


def test_lengths_double_and_the_slow_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine()
    lengths = machine.lengths(40.0)
    assert lengths["dilated"] == lengths["block-sparse"] == LENGTHS
    assert lengths["dense"] == LENGTHS[:7]  # the next would take 17 s, over a quarter of the time
    assert machine.now <= 40.0
    lengths = FakeMachine(blocks=1e-4).lengths(10.0)
    assert lengths["block-sparse"] == LENGTHS[:4]  # the next may take 2 s, as growth is overrated
    assert lengths["dilated"] == LENGTHS
    monkeypatch.setattr(parts, "host_memory", lambda: Memory(2**30, 2**40))
    assert FakeMachine().lengths(1000.0)["dilated"][-1] == 32768  # memory bounds the length


@pytest.mark.parametrize("budget", [0.001, 0.1, 1.0, 5.0, 20.0])
def test_budget_is_kept_after_the_first_length(budget: float) -> None:
    machine = FakeMachine()
    lengths = machine.lengths(budget)
    assert all(each[0] == 1024 for each in lengths.values())
    assert max(map(len, lengths.values())) == 1 or machine.now <= budget


def touch(size: int) -> None:
    """Takes memory from the system; that of `bytearray` may be what earlier tests freed."""
    with mmap.mmap(-1, size) as memory:
        memory[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)


def test_calls_that_were_asked_for_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = parts.measure_row(1024, names=("dilated", "block-sparse"), rounds=1)
    assert set(row.seconds) == set(row.peaks) == {"dilated", "block-sparse"}
    assert all(seconds > 0 for seconds in row.seconds.values())
    if parts.peak_of(lambda: None) is None:
        pytest.skip("the peak of a process is read from /proc, and reset there")
    out, size = 4 * 1024 * parts.HEADS * parts.HEAD_DIM, 2**25
    assert all(out <= (peak or 0) <= 100 * out for peak in row.peaks.values())
    assert parts.peak_of(lambda: None) == pytest.approx(0, abs=2**20)
    for _ in range(2):  # what the first call freed does not hide the second
        # The largest of a few: the system may take back pages of files meanwhile, and hide one.
        peaks = [parts.peak_of(partial(touch, size)) or 0 for _ in range(5)]
        assert max(peaks) == pytest.approx(size, abs=2**21)
    monkeypatch.setattr("dilated_attention_pytorch.cli.bench.measure.CLEAR_REFS", tmp_path / "none" / "refs")
    called: list[int] = []
    assert parts.peak_of(lambda: called.append(1)) is None
    assert called == [1]


def test_the_model_learns_and_writes(quick: list[str]) -> None:
    steps = [(x.steps, x.losses[-1], x.sample) for x in parts.train_model(quick, 60)]
    assert [step for step, _, _ in steps] == [*range(1, 61), 60]
    assert [sample is None for _, _, sample in steps] == [True] * 60 + [False]
    *_, found = parts.train_model(quick, 60)
    assert found.losses[0][1] > 4
    assert found.losses == [loss for _, loss, _ in steps[:-1]]
    assert [step for step, _ in found.validations] == [10, 20, 30, 40, 50, 60]
    assert found.validations[-1][1] < 1
    assert found.sample == steps[-1][2]
    assert (found.sample or "").count("abcd") > 10
    assert "19,200 bytes of 1 files to learn from, 800 bytes kept for validation" in found.model
    *_, late = parts.train_model(quick, 50, limit=0.0)
    assert (late.steps, late.steps_planned, late.validations) == (1, 50, [])


def test_steps_are_planned_for_the_time(quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = parts.start_run(quick, parts.PROBE_STEPS)
    monkeypatch.setattr(run, "take_step", lambda: None)
    monkeypatch.setattr(parts, "start_run", lambda *_: run)
    for seconds, steps in ((10.0, 18), (0.001, 1)):
        ticks = iter([0.0, 100.0, 0.0, 0.6, 0.0, 0.9, 0.0, 0.5])  # the first step starts what all use
        monkeypatch.setattr(parts.time, "perf_counter", lambda ticks=ticks: next(ticks))
        assert parts.plan_steps(quick, seconds) == steps


def test_data_are_python_sources_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = parts.source_files()
    assert files == sorted(files)
    assert any(name.endswith("argparse.py") for name in files)
    config = parts.start_run(files, 400).config
    assert config.validate_every == 50
    assert config.segment_lengths[-1] == config.context_length
    (tmp_path / "a.py").write_text("x = 1\n")  # as little as distributions of bytecode have
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert parts.source_files() == []
