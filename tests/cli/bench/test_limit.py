"""The longest sequence within a budget: predicted from shorter ones, then run and checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.cli.bench import limit
from dilated_attention_pytorch.cli.bench.candidates import Config
from dilated_attention_pytorch.cli.bench.cases import Case
from dilated_attention_pytorch.cli.bench.gate import WrongAnswerError
from dilated_attention_pytorch.cli.bench.limit import Run, expected_seconds, limit_case, predict, run_limit
from dilated_attention_pytorch.cli.bench.measure import Measured, read_status
from dilated_attention_pytorch.cli.bench.record import Record, Result, from_json, to_markdown
from dilated_attention_pytorch.cli.main import main

TINY = Config(2, 8, (64, 256), (1, 4), dtype="bfloat16")
CASE = limit_case(TINY, budget=2**20)
Search = Callable[..., tuple[Result, list[int]]]


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    def found(case: limit.LimitCase = CASE, said: Any = None, **how: Any) -> tuple[Result, list[int]]:
        lengths: list[int] = []
        monkeypatch.setattr(limit, "measure_in_child", partial(pretended, lengths, **how))
        result = run_limit(case, [].append if said is None else said.append)
        assert len(lengths) == len(set(lengths))
        assert result.counts.get("confirmed", lengths[0]) in lengths
        return result, lengths

    return found


def pretended(
    lengths: list[int],
    _: Any,
    at: Case,
    *__: Any,
    base: int = 100_000,
    slope: int = 200,
    bend: int = 2**60,
    end: int = 2**60,
    pace: float = 1e-6,
    error: float | None = 1e-3,
    **___: Any,
) -> Measured:
    """A process that takes `base + slope n` bytes, more from `bend` on, and fails from `end` on."""
    lengths.append(at.n)
    if at.n > end:
        return Measured(why_not="out of memory: no more")
    peak = base + slope * at.n + 2 * slope * max(0, at.n - bend)
    return Measured(error, {"peak_total": peak}, {"attention": (pace * at.n,)})


def test_the_line_leads_to_the_limit_in_one_run(search: Search) -> None:
    result, lengths = search()
    assert len(lengths) == 3
    longest = (2**20 - 100_000) // 200
    assert 0.98 * longest <= result.counts["confirmed"] <= longest
    assert result.counts["peak"] <= CASE.budget
    assert (result.counts["bytes a token"], result.counts["fixed"]) == (200, 100_000)
    assert result.figures[0].value == result.counts["confirmed"]


def test_a_length_that_does_not_fit_is_not_reported(search: Search) -> None:
    result, lengths = search(bend=3000)
    confirmed = result.counts["confirmed"]
    assert max(lengths) > confirmed  # it was tried, and took too much
    assert 100_000 + 200 * confirmed + 400 * max(0, confirmed - 3000) == result.counts["peak"] <= CASE.budget
    result, _ = search(end=3000)  # a length that does not end is followed by shorter ones
    assert 1024 < result.counts["confirmed"] <= 3000
    assert "tokens were not run to their end: out of memory: no more" in str(result.why_not)
    result, _ = search(limit_case(TINY, budget=2048), base=0)
    assert 1 <= result.counts["confirmed"] <= 10


POOLED = limit_case(replace(TINY, memory="pool"), "sdpa", budget=2**20)


@pytest.mark.parametrize(
    ("case", "how", "confirmed", "texts"),
    [
        (CASE, {"base": 2**21}, None, ["not measured: even 512 tokens take"]),
        # The limit would take about 95 s.
        (replace(CASE, seconds=60.0), {"pace": 0.02}, 1024, ["would take about", "at most 60 s of search"]),
        (
            *(POOLED, {"error": None}, 4690),
            [
                "checked at a reduced length only",
                "it has no pool and no pattern cache",
                "(256, 4), memory pool.",
            ],
        ),
    ],
    ids=["a budget below the process itself", "a guard of time", "not checked or heeded"],
)
def test_what_is_confirmed_and_what_is_not_is_said(
    case: limit.LimitCase, how: dict[str, Any], confirmed: int | None, texts: list[str], search: Search
) -> None:
    said: list[str] = []
    result, _ = search(case, said, **how)
    assert result.counts.get("confirmed") == confirmed
    table = to_markdown(Record({}, {}, (result,)), {"limit": limit.SECTION})
    assert all(text in table for text in texts)
    assert any("rows not checked at this length" in line for line in said) == (case is POOLED)


def test_wrong_rows_end_the_search(search: Search) -> None:
    with pytest.raises(WrongAnswerError, match="limit of DilatedAttention, forward, n = "):
        search(error=0.5)


def test_lengths_and_times_are_predicted_from_runs() -> None:
    runs = [Run(100, 1100, 1.0, 0.0), Run(200, 2100, 4.0, 0.0)]
    assert predict(10_100, runs, 1) == math.floor((0.99 * 10_100 - 100) / 10)
    assert predict(10_100, runs, 20) == 200 + math.floor((0.99 * 10_100 - 2100) / 20)
    assert expected_seconds(runs, 400) == pytest.approx(16.0)  # grows with the square
    assert expected_seconds(runs[:1], 400) == pytest.approx(4.0)
    assert expected_seconds([], 400) == 0.0


def test_limit_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "record.json"
    budget = read_status("VmRSS") + 64 * 2**20  # this process has loaded what a child loads
    sizes = ["--heads", "2", "--head-dim", "16", "--segments", "64,256", "--rates", "1,4", "--training"]
    assert main(["bench", "--limit", str(budget), *sizes, "--seconds", "300", "--out", str(out)]) == 0
    (result,) = from_json(out.read_text()).results
    assert (result.case["budget"], result.case["backward"]) == (budget, True)
    assert result.case["config"]["dtype"] == "bfloat16"
    confirmed, peak = result.counts["confirmed"], result.counts["peak"]
    assert 0.5 * budget < peak <= budget
    assert confirmed * 2 * 16 * 2 * 8 < peak  # q, k, v, out and their gradients alone
    assert result.error is not None
    assert result.error < 3e-2
    assert f"| {confirmed:,} |" in (shown := capsys.readouterr().out)
    assert " x |" not in shown  # the documents' figures are of other sizes
    monkeypatch.setattr(limit, "measure_in_child", partial(pretended, []))
    assert main(["bench", "--limit", str(2**22)]) == 0  # both passes of DilatedAttention
    assert "limit of DilatedAttention, training" in capsys.readouterr().out
