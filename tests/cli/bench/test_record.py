"""The record round-trips and renders; those that are stored are of the suites, and as the pages show them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import common
import pytest
from cpu import SECTIONS, LongCase, MemoryCase, TimeCase

from dilated_attention_pytorch.cli.bench.measure import Measured
from dilated_attention_pytorch.cli.bench.record import (
    Record,
    Result,
    case_of,
    check_places,
    from_json,
    read_record,
    to_json,
    to_markdown,
    to_page,
    write_text,
)
from dilated_attention_pytorch.cli.main import main
from support.suites import RECORDED, RESULTS, is_whole, suite

CONFIG = common.Config(4, 8, (16, 40), (1, 2))
MIB = 2**20


def result_of(case: Any, *measured: Any) -> Result:
    found = Measured(1e-7, *measured)
    values = (found.error, found.seconds, found.counts, tuple(case.figures(found)), found.why_not)
    return Result(case_of(case), 3, *values)


TIMES = {"bare": (2.0, 4.0, 3.0), "dilated": (3.0, 8.0, 6.0)}
TIME = result_of(TimeCase("timed", CONFIG, ((1, 64),), target=1.4), {"flops": 6 * 10**9}, TIMES)
HELD = MemoryCase("held", CONFIG, 64, target=1.25)
MEMORY = result_of(HELD, {"peak_extra": 6 * MIB, "results": 5 * MIB})
LONG = result_of(
    LongCase("long", CONFIG, 640, 64, memory_target=2**31, time_target=1.15),
    {"peak_total": 3 * 2**30},
    {"base": (10.0, 11.0), "long": (11.0, 12.0)},
)
UNMEASURED = result_of(MemoryCase("elsewhere", CONFIG, 64, target=1.25), {}, {}, "no /proc here")
RECORD = Record(
    {"version": "1.2.3", "commit": "0123456789abcdef", "changed": True},
    {"cpu": "Some CPU", "cores": 2, "threads": 2, "torch": "9.9", "load": 0.25, "memory_bytes": None},
    (TIME, MEMORY, UNMEASURED, LONG),
)


def test_record_survives_json_and_renders_from_it_alone() -> None:
    text = to_json(RECORD)
    assert from_json(text) == RECORD
    document = json.loads(text)
    assert document["schema"] == 1
    assert document["results"][0]["figures"][0]["met"] is False
    text = to_markdown(from_json(text), SECTIONS)
    for row in (
        "| timed | 2000.0 (3000.0 ± 500.0) | 3000.0 (6000.0 ± 1250.0) | 2 | 1.500 | 2.000 |",
        "| 1.400, **not met** |",
        "| held | 6.0 | 5.0 | 1.200 | 1.250, met |",
        "| elsewhere |  |  | not measured: no /proc here | 1.250 |",
        "| long | 3.00 GiB | 2.00 GiB, **not met** | 10.00 s | 11.00 s | 1.100 | 1.150, met |",
        "Version 1.2.3, commit 0123456789ab with local changes; float32 on Some CPU, 2 cores",
        "- timed: b = 1, n = 64, h = 4, d = 8, branches (16, 1), (40, 2).",
    ):
        assert row in text
    assert "<td>1.400, not met</td>" in to_page(RECORD, SECTIONS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"seconds": [1]}, "not a complete record"),
        ({"seconds": {"bare": ["a"], "dilated": [1.0]}}, "durations must be positive"),
        ({"seconds": {"bare": [0.0], "dilated": [1.0]}}, "durations must be positive"),
        ({"seconds": {"bare": [math.nan], "dilated": [1.0]}}, "durations must be positive"),
        ({"counts": None}, "counts must be numbers by name"),
        ({"case": {}}, "not a complete record"),
    ],
)
def test_damaged_records_are_refused(damage: dict[str, Any], message: str, tmp_path: Path) -> None:
    document = json.loads(to_json(RECORD))
    document["results"][0] |= damage
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        read_record(file)
    assert main(["bench", "--render", str(file)]) == 2
    document["results"], document["machine"] = [], None
    for text in (json.dumps(document), '{"schema": 0}', "[]", '{"schema": 1, "project": {}}', "nonsense"):
        with pytest.raises(ValueError, match=r"facts by name|schema|complete|Expecting"):
            from_json(text)


def test_files_are_written_whole_in_utf_8_where_they_can_be(tmp_path: Path) -> None:
    file = tmp_path / "a"
    for text in ("±", "≤"):
        write_text(file, text)
        assert file.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [file]
    for places in ((file, file), (tmp_path,), (tmp_path / "none" / "a",)):
        with pytest.raises(ValueError, match=r"cannot be written|one twice"):
            check_places(*places)
    assert file.read_bytes() == text.encode()


def test_every_record_has_its_suite() -> None:
    others = {"transformers", "triton"}  # of a sweep, of compilers
    assert {path.stem for path in RESULTS.glob("*.json")} == {*RECORDED, *others}


@pytest.mark.parametrize("name", RECORDED)
def test_records_are_of_all_cases_of_their_suite(name: str) -> None:
    results, cases = read_record(RESULTS / f"{name}.json").results, suite(name).CASES
    if not is_whole(name):
        known = {result.name for result in results}
        cases = [case for case in cases if case.name in known]
    for result, case in zip(results, cases, strict=True):
        now = case_of(case)
        filled = now | result.case | {"config": now["config"] | result.case["config"]}
        assert filled == now  # older ones lack fields with their defaults
        assert result.error is None or result.error < 0.05
        found = Measured(result.error, result.counts, result.seconds, result.why_not)
        assert not hasattr(case, "figures") or tuple(case.figures(found)) == result.figures
    judged = [figure.met for result in results for figure in result.figures if figure.target is not None]
    assert all(judged) or name not in ("limit", "forecast")  # whose targets are promises


BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def test_tables_are_put_between_one_pair_of_markers() -> None:
    once = common.replace_between_markers(f"before\n{BEGIN}\nold\n{END}\nafter\n", "| new |\n", "bench")
    assert once == f"before\n{BEGIN}\n\n| new |\n\n{END}\nafter\n"
    assert common.replace_between_markers(once, "| new |", "bench") == once
    for text in ("", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"):
        with pytest.raises(ValueError, match="the text must hold one"):
            common.replace_between_markers(text, "table", "bench")
