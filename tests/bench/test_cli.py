"""The command line, end to end: the quick suite, rendering and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch import functional
from dilated_attention_pytorch.bench import session
from dilated_attention_pytorch.bench.cases import SUITES
from dilated_attention_pytorch.bench.record import from_json
from dilated_attention_pytorch.bench.tables import BEGIN, END
from dilated_attention_pytorch.cli.main import main


@pytest.fixture
def page(tmp_path: Path) -> Path:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{BEGIN}\n{END}\n\nThe end.\n")
    return page


def test_quick_suite_end_to_end(tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, markdown = tmp_path / "record.json", tmp_path / "table.md"
    files = ["--out", str(out), "--markdown", str(markdown)]
    assert main(["bench", "quick", "--repeats", "2", *files]) == 0
    table, progress = capsys.readouterr()
    record = from_json(out.read_text())
    assert [result.case for result in record.results] == list(SUITES["quick"])
    assert all(result.error is not None and result.error < 2e-5 for result in record.results)
    assert markdown.read_text() == table
    assert all(case.name in table and case.name in progress for case in SUITES["quick"])

    assert main(["bench", "--render", str(out), "--update", str(page)]) == 0
    assert capsys.readouterr().out == table
    text = page.read_text()
    assert table.strip() in text
    assert text.startswith("# Page")
    assert text.endswith("The end.\n")


def test_list_names_all_suites_and_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(case.name in text for cases in SUITES.values() for case in cases)
    assert "[targets: 9.5 GiB, time 1.15]" in text


def test_missed_target_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    impossible = replace(SUITES["quick"][0], target=1e-9)
    monkeypatch.setitem(SUITES, "quick", (impossible,))
    assert main(["bench", "quick", "--repeats", "1"]) == 0
    assert "not met" in capsys.readouterr().out


def test_wrong_answer_fails_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = functional.dilated_attention

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, lse = right(*args, **kwargs)
        return out + 1e-3, lse

    monkeypatch.setattr(functional, "dilated_attention", wrong)
    record = tmp_path / "record.json"
    assert main(["bench", "quick", "--out", str(record)]) == 1
    captured = capsys.readouterr()
    assert "wrong answer: quick forward" in captured.err
    assert captured.out == ""
    assert not record.exists()


def test_interrupted_run_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SUITES["quick"][:2]
    real = session.run_case

    def run_case(case: Any, *args: Any) -> Any:
        if case is second:
            raise KeyboardInterrupt
        return real(case, *args)

    monkeypatch.setattr(session, "run_case", run_case)
    record = tmp_path / "record.json"
    assert main(["bench", "quick", "--repeats", "1", "--out", str(record)]) == 130
    assert [result.case for result in from_json(record.read_text()).results] == [first]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["unheard-of"], 2, "there is no suite and no candidate 'unheard-of'"),
        (["dilatedattention"], 2, "Did you mean DilatedAttention"),
        (["spede"], 2, "Did you mean speed"),
        (["quick", "sdpa"], 2, "suites or candidates, not both, got quick, sdpa"),
        (["quick", "--lengths", "512"], 2, "suites have sizes of their own, got --lengths"),
        (["quick", "--limit", "1GiB"], 2, "--limit takes candidates, got the suite quick"),
        (["quick", "--only", "speed of light"], 2, "no case has 'speed of light'"),
        (["quick", "--repeats", "0"], 2, "a positive whole number is needed"),
        (["quick", "--out", "no/such/place.json"], 2, "there is no directory"),
        (["quick", "--update", "no-such-page.md"], 1, "no-such-page.md"),
        (["quick", "--markers", "limit"], 2, "--markers says where --update puts the table"),
        (["quick", "--render", "record.json"], 2, "--render measures nothing, got quick"),
        (["--render", "no-such-record.json"], 1, "no-such-record.json"),
        (["--render", "a.json", "--causal"], 2, "--render measures nothing, got --causal"),
        (["--compare", "a.json", "b.json", "--html", "c.html"], 2, "--compare has no use for --html"),
        (["--compare", "a.json", "b.json", "--list"], 2, "one of these at a time"),
        (["--draw", "no-such-directory"], 2, "--draw takes a directory that is there"),
        (["quick", "--draw", "."], 2, "--draw measures nothing, got quick"),
        (["sdpa", "--segments", "64"], 2, "--segments and --rates are given together"),
        (["sdpa", "--segments", "64", "--rates", "1,2"], 2, "segment_lengths"),
        (["sdpa", "--sparsity", "2"], 2, "sparsity_ratio"),
        (["sdpa", "--seconds", "5"], 2, "--seconds is the time of --limit"),
        (["--limit", "1GiB", "--lengths", "512"], 2, "--limit looks for the length itself"),
        (["--limit", "much"], 2, "a size is needed"),
    ],
)
def test_usage_errors_come_before_measuring(
    arguments: list[str],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(session, "run_case", lambda *_: pytest.fail("measured in spite of a usage error"))
    try:
        found = main(["bench", *arguments])
    except SystemExit as error:  # of the parser
        found = int(str(error.code))
    assert found == code
    assert message in capsys.readouterr().err
