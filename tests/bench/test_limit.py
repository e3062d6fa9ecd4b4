"""The longest sequence within a budget: predicted from shorter ones, then run and checked."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.bench import limit_run
from dilated_attention_pytorch.bench.cases import SUITES
from dilated_attention_pytorch.bench.child import Measured
from dilated_attention_pytorch.bench.gate import WrongAnswerError
from dilated_attention_pytorch.bench.limit_cases import LIMIT_CONFIG, LimitCase, describe_limit, limit_case
from dilated_attention_pytorch.bench.limit_run import Run, expected_seconds, fit_line, predict, run_limit
from dilated_attention_pytorch.bench.measure import read_status
from dilated_attention_pytorch.bench.module_cases import CompareCase, ModuleConfig
from dilated_attention_pytorch.bench.record import Record, from_json
from dilated_attention_pytorch.bench.tables import to_markdown
from dilated_attention_pytorch.cli.main import main

TINY = ModuleConfig(2, 8, (64, 256), (1, 4), dtype="bfloat16")
CASE = limit_case(TINY, budget=2**20)


class FakeMachine:
    """Processes that take `base + slope n` bytes, or more from `bend` on, and `pace n` seconds."""

    def __init__(
        self, base: int, slope: int, bend: int = 2**60, pace: float = 1e-6, error: float = 1e-3
    ) -> None:
        self.base, self.slope, self.bend, self.pace, self.error = base, slope, bend, pace, error
        self.lengths: list[int] = []

    def measure(self, case: CompareCase, repeats: int, variant: str, timeout: float | None) -> Measured:
        n = case.n
        self.lengths.append(n)
        peak = self.base + self.slope * n + 2 * self.slope * max(0, n - self.bend)
        return Measured(self.error, {"peak_total": peak}, {"attention": (self.pace * n,)})

    def run(self, monkeypatch: pytest.MonkeyPatch, case: LimitCase) -> Any:
        monkeypatch.setattr(limit_run, "measure_in_child", self.measure)
        return run_limit(case, lambda _: None)


def test_the_line_leads_to_the_limit_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine(base=100_000, slope=200)
    result = machine.run(monkeypatch, CASE)
    assert len(machine.lengths) == 3
    longest = (2**20 - 100_000) // 200
    assert 0.98 * longest <= result.counts["confirmed"] <= longest
    assert result.counts["peak"] <= CASE.budget
    assert (result.counts["bytes a token"], result.counts["fixed"]) == (200, 100_000)
    assert result.figures[0].value == result.counts["confirmed"]


def test_a_length_that_does_not_fit_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine(base=100_000, slope=200, bend=3000)
    result = machine.run(monkeypatch, CASE)
    confirmed = result.counts["confirmed"]
    assert max(machine.lengths) > confirmed  # it was tried, and took too much
    assert 100_000 + 200 * confirmed + 400 * max(0, confirmed - 3000) == result.counts["peak"] <= CASE.budget
    assert confirmed in machine.lengths


def test_a_budget_below_the_process_itself_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    result = FakeMachine(base=2**21, slope=200).run(monkeypatch, CASE)
    assert result.counts == {}
    assert "even 512 tokens take" in result.why_not
    assert "not measured: even 512 tokens take" in to_markdown(Record({}, {}, (result,)))


def test_the_guard_of_time_keeps_what_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = limit_case(TINY, budget=2**20, seconds=60.0)
    machine = FakeMachine(base=100_000, slope=200, pace=0.02)  # about 95 s for the limit
    result = machine.run(monkeypatch, case)
    assert result.counts["confirmed"] == max(machine.lengths) == 1024
    assert "tokens would take about" in result.why_not
    assert "tokens would take about" in to_markdown(Record({}, {}, (result,)))


def test_wrong_rows_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongAnswerError, match="limit of DilatedAttention, forward, n = "):
        FakeMachine(base=0, slope=200, error=0.5).run(monkeypatch, CASE)


def test_a_length_that_does_not_end_is_followed_by_shorter_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine(base=100_000, slope=200)

    def measure(case: CompareCase, *rest: Any) -> Measured:
        if case.n > 3000:  # less memory than the budget says
            machine.lengths.append(case.n)
            return Measured(why_not="out of memory: no more")
        return machine.measure(case, *rest)

    monkeypatch.setattr(limit_run, "measure_in_child", measure)
    result = run_limit(CASE, lambda _: None)
    assert 1024 < result.counts["confirmed"] <= 3000
    assert result.counts["confirmed"] in machine.lengths
    assert "tokens were not run to their end: out of memory: no more" in str(result.why_not)
    assert len(machine.lengths) == len(set(machine.lengths))


def test_what_was_not_checked_or_heeded_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    measured = Measured(None, {"peak_total": 2**20}, {"attention": (1.0,)})
    monkeypatch.setattr(limit_run, "measure_in_child", lambda *_: measured)
    case = limit_case(replace(TINY, memory="pool"), "sdpa", budget=2**20)
    result = run_limit(case, said.append)
    assert any("rows not checked at this length" in line for line in said)
    table = to_markdown(Record({}, {}, (result,)))
    assert "checked at a reduced length only" in table
    assert "not with memory pool: it has no pool" in table
    assert "memory pool" in describe_limit(case)


def test_a_budget_of_a_token_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    case = limit_case(TINY, budget=2048)
    result = FakeMachine(base=0, slope=200).run(monkeypatch, case)
    assert 1 <= result.counts["confirmed"] <= 10


def test_lines_and_times_of_runs() -> None:
    runs = [Run(100, 1100, 1.0, 0.0), Run(200, 2100, 4.0, 0.0)]
    assert fit_line(runs) == (10.0, 100.0)
    assert predict(10_100, runs, 1) == math.floor((0.99 * 10_100 - 100) / 10)
    assert predict(10_100, runs, 20) == 200 + math.floor((0.99 * 10_100 - 2100) / 20)
    assert expected_seconds(runs, 400) == pytest.approx(16.0)  # grows with the square
    assert expected_seconds(runs[:1], 400) == pytest.approx(4.0)
    assert expected_seconds([], 400) == 0.0


def test_the_suite_has_the_documented_sizes_and_targets() -> None:
    forward, training = SUITES["limit"]
    assert isinstance(forward, LimitCase)
    assert isinstance(training, LimitCase)
    for case, backward, target in ((forward, False, 1_800_000), (training, True, 700_000)):
        assert (case.budget, case.backward, case.target) == (8 * 2**30, backward, target)
        assert (case.config.h, case.config.d, case.config.dtype) == (8, 64, "bfloat16")
    assert limit_case(LIMIT_CONFIG, budget=2**30).target is None  # which is for 8 GiB


def test_limit_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    budget = read_status("VmRSS") + 64 * 2**20  # this process has loaded what a child loads
    sizes = ["--heads", "2", "--head-dim", "16", "--segments", "64,256", "--rates", "1,4", "--training"]
    assert main(["bench", "--limit", str(budget), *sizes, "--seconds", "300", "--out", str(out)]) == 0
    (result,) = from_json(out.read_text()).results
    assert isinstance(result.case, LimitCase)
    assert (result.case.budget, result.case.backward) == (budget, True)
    confirmed, peak = result.counts["confirmed"], result.counts["peak"]
    assert 0.5 * budget < peak <= budget
    assert confirmed * 2 * 16 * 2 * 8 < peak  # q, k, v, out and their gradients alone
    assert result.error is not None
    assert result.error < 3e-2
    shown = capsys.readouterr().out
    assert f"| {confirmed:,} |" in shown
    assert " x |" not in shown  # the documents' figures are of other sizes
