"""The command line, end to end: the quick suite, rendering and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch import functional
from dilated_attention_pytorch.bench import __main__ as bench
from dilated_attention_pytorch.bench.cases import SUITES
from dilated_attention_pytorch.bench.record import from_json
from dilated_attention_pytorch.bench.tables import BEGIN, END


@pytest.fixture
def page(tmp_path: Path) -> Path:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{BEGIN}\n{END}\n\nThe end.\n")
    return page


def test_quick_suite_end_to_end(tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, markdown = tmp_path / "record.json", tmp_path / "table.md"
    files = ["--out", str(out), "--markdown", str(markdown)]
    assert bench.main(["quick", "--repeats", "2", *files]) == 0
    table, progress = capsys.readouterr()
    record = from_json(out.read_text())
    assert [result.case for result in record.results] == list(SUITES["quick"])
    assert all(result.error is not None and result.error < 2e-5 for result in record.results)
    assert markdown.read_text() == table
    assert all(case.name in table and case.name in progress for case in SUITES["quick"])

    assert bench.main(["--render", str(out), "--update", str(page)]) == 0
    assert capsys.readouterr().out == table
    text = page.read_text()
    assert table.strip() in text
    assert text.startswith("# Page")
    assert text.endswith("The end.\n")


def test_list_names_all_suites_and_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert all(case.name in text for cases in SUITES.values() for case in cases)
    assert "[targets: 9.5 GiB, time 1.15]" in text


def test_missed_target_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    impossible = replace(SUITES["quick"][0], target=1e-9)
    monkeypatch.setitem(bench.SUITES, "quick", (impossible,))
    assert bench.main(["quick", "--repeats", "1"]) == 0
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
    assert bench.main(["quick", "--out", str(record)]) == 1
    captured = capsys.readouterr()
    assert "wrong answer: quick forward" in captured.err
    assert captured.out == ""
    assert not record.exists()


def test_interrupted_run_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SUITES["quick"][:2]
    real = bench.run_case

    def run_case(case: Any, *args: Any) -> Any:
        if case is second:
            raise KeyboardInterrupt
        return real(case, *args)

    monkeypatch.setattr(bench, "run_case", run_case)
    record = tmp_path / "record.json"
    with pytest.raises(KeyboardInterrupt):
        bench.main(["quick", "--repeats", "1", "--out", str(record)])
    assert [result.case for result in from_json(record.read_text()).results] == [first]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["unheard-of"], "no suite unheard-of"),
        (["quick", "--only", "speed of light"], "no case of these suites has 'speed of light'"),
        (["quick", "--repeats", "0"], "--repeats must be at least 1"),
        (["quick", "--out", "no/such/place.json"], "there is no directory"),
        (["quick", "--update", "no-such-page.md"], "no-such-page.md"),
        (["quick", "--render", "record.json"], "name no suites with it"),
        (["--render", "no-such-record.json"], "no-such-record.json"),
        (["--draw", "no-such-directory"], "--draw takes a directory that is there"),
        (["quick", "--draw", "."], "neither suites nor a record"),
    ],
)
def test_usage_errors_come_before_measuring(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "run_case", lambda *_: pytest.fail("measured in spite of a usage error"))
    with pytest.raises(SystemExit) as error:
        bench.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
