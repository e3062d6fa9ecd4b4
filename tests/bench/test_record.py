"""The record round-trips, its figures follow from what was measured, and it renders."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.bench.cases import SUITES, LongCase, MemoryCase, TimeCase
from dilated_attention_pytorch.bench.config import Config
from dilated_attention_pytorch.bench.machine import machine_facts, project_facts
from dilated_attention_pytorch.bench.record import Record, from_json, make_result, to_json
from dilated_attention_pytorch.bench.session import Places, write_text
from dilated_attention_pytorch.bench.tables import BEGIN, END, replace_between_markers, to_markdown
from dilated_attention_pytorch.cli.main import main

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
CONFIG = Config(4, 8, (16, 40), (1, 2))
TIME = make_result(
    TimeCase("timed", CONFIG, ((1, 64),), target=1.4),
    3,
    1e-7,
    {"bare": (2.0, 4.0, 3.0), "dilated": (3.0, 8.0, 6.0)},
    {"flops": 6 * 10**9},
)
MEMORY = make_result(
    MemoryCase("held", CONFIG, 64, target=1.25), 1, 1e-7, {}, {"peak_extra": 6 * 2**20, "results": 5 * 2**20}
)
LONG = make_result(
    LongCase("long", CONFIG, 640, 64, memory_target=2**31, time_target=1.15),
    2,
    1e-7,
    {"base": (10.0, 11.0), "long": (11.0, 12.0)},
    {"peak_total": 3 * 2**30},
)
UNMEASURED = make_result(MemoryCase("elsewhere", CONFIG, 64, target=1.25), 1, 1e-7, {}, {}, "no /proc here")
RECORD = Record(
    {"version": "1.2.3", "commit": "0123456789abcdef", "changed": True},
    {
        "cpu": "Some CPU",
        "cores": 2,
        "threads": 2,
        "torch": "9.9",
        "load": 0.25,
        "os": "Linux",
        "memory_bytes": None,
    },
    (TIME, MEMORY, UNMEASURED, LONG),
)


def test_figures_follow_from_what_was_measured() -> None:
    minima, medians = TIME.figures
    assert (minima.value, minima.target, minima.met) == (1.5, 1.4, False)
    assert (medians.value, medians.met) == (2.0, None)
    assert (MEMORY.figures[0].value, MEMORY.figures[0].met) == (1.2, True)
    peak, growth, _ = LONG.figures
    assert (peak.value, peak.unit, peak.met) == (3 * 2**30, "bytes", False)
    assert (growth.value, growth.met) == (1.1, True)
    assert (UNMEASURED.figures[0].value, UNMEASURED.figures[0].met) == (None, None)


def test_record_survives_json() -> None:
    text = to_json(RECORD)
    assert from_json(text) == RECORD
    document = json.loads(text)
    assert document["schema"] == 1
    assert document["results"][0]["figures"][0]["met"] is False


@pytest.mark.parametrize("text", ['{"schema": 0}', "[]", '{"schema": 1, "project": {}}', "nonsense"])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"schema|complete|Expecting"):
        from_json(text)


def test_markdown_shows_figures_targets_and_origin() -> None:
    text = to_markdown(RECORD)
    assert "| timed | 2000.0 (3000.0 ± 500.0) | 3000.0 (6000.0 ± 1250.0) | 2 | 1.500 | 2.000 |" in text
    assert "| 1.400, **not met** |" in text
    assert "| held | 6.0 | 5.0 | 1.200 | 1.250, met |" in text
    assert "| elsewhere |  |  | not measured: no /proc here | 1.250 |" in text
    assert "| long | 3.00 GiB | 2.00 GiB, **not met** | 10.00 s | 11.00 s | 1.100 | 1.150, met |" in text
    assert "Version 1.2.3, commit 0123456789ab with local changes; float32 on Some CPU, 2 cores" in text
    assert "- timed: b = 1, n = 64, h = 4, d = 8, branches (16, 1), (40, 2)." in text


def test_markdown_comes_from_the_json_alone() -> None:
    assert to_markdown(from_json(to_json(RECORD))) == to_markdown(RECORD)


RECORDED = {
    "cpu": ("speed", "short", "memory"),
    "memory": ("pool",),
    **{name: (name,) for name in ("sparse", "ring", "models", "modules", "limit", "forecast", "quality")},
}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"seconds": [1]}, "not a complete record"),
        ({"seconds": {"bare": ["a"], "dilated": [1.0]}}, "durations must be positive"),
        ({"seconds": {"bare": [0.0], "dilated": [1.0]}}, "durations must be positive"),
        ({"seconds": {"bare": [math.nan], "dilated": [1.0]}}, "durations must be positive"),
        ({"counts": None}, "counts must be numbers by name"),
    ],
)
def test_damaged_records_are_named(damage: dict[str, Any], message: str, tmp_path: Path) -> None:
    document = json.loads(to_json(RECORD))
    document["results"][0] |= damage
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        from_json(file.read_text())
    assert main(["bench", "--render", str(file)]) == 2
    document["results"], document["machine"] = [], None
    with pytest.raises(ValueError, match="facts by name"):
        from_json(json.dumps(document))


def test_places_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("kept")
    for places in (
        Places(tmp_path / "a", tmp_path / "a"),
        Places(tmp_path),
        Places(tmp_path / "none" / "a"),
        Places(html=tmp_path / "a", update=(tmp_path / "a",)),
    ):
        with pytest.raises(ValueError, match=r"cannot be written|one twice"):
            places.check()
    assert (tmp_path / "a").read_text() == "kept"


def test_files_are_written_whole_in_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "a"
    for text in ("±", "≤"):
        write_text(file, text)
        assert file.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [file]


def test_every_record_has_its_suites() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} == {*RECORDED, "transformers"}  # of a program's own


@pytest.mark.parametrize("name", RECORDED)
def test_records_are_of_all_cases_of_their_suites(name: str) -> None:
    record = from_json((RESULTS / f"{name}.json").read_text())
    assert [result.case for result in record.results] == [
        x for suite in RECORDED[name] for x in SUITES[suite]
    ]
    assert all(result.error is None or result.error < 0.05 for result in record.results)


@pytest.mark.parametrize("name", ["limit", "forecast", "quality"])
def test_what_these_records_promise_is_met(name: str) -> None:
    record = from_json((RESULTS / f"{name}.json").read_text())
    judged = [
        figure.met for result in record.results for figure in result.figures if figure.target is not None
    ]
    assert judged
    assert all(judged)


def test_replace_between_markers_keeps_the_rest_and_is_idempotent() -> None:
    once = replace_between_markers(f"before\n{BEGIN}\nold\n{END}\nafter\n", "| new |\n")
    assert once == f"before\n{BEGIN}\n\n| new |\n\n{END}\nafter\n"
    assert replace_between_markers(once, "| new |") == once


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_replace_between_markers_wants_one_pair(text: str) -> None:
    with pytest.raises(ValueError, match="the text must hold one"):
        replace_between_markers(text, "table")


def test_facts_fit_a_record() -> None:
    record = Record(project_facts(), machine_facts(), ())
    assert from_json(to_json(record)) == record
    assert set(record.project) == {"version", "commit", "changed"}
    assert isinstance(record.machine["threads"], int)
