"""Two records held against each other: known ratios, their intervals, and what stands in one only."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from dilated_attention_pytorch.cli.bench.compare import (
    FEWEST,
    bootstrap_ratio,
    compare_records,
    comparison_markdown,
)
from dilated_attention_pytorch.cli.bench.record import Record, Result, to_json
from dilated_attention_pytorch.cli.main import main

MACHINE: dict[str, str | int | float | None] = {"cpu": "Some CPU", "threads": 2, "kernel": "native"}
SPREADS = {"halved": 0.02, "longer": 0.02, "noisy": 0.5, "once": 0.0}
CASE = {"kind": "compare", "name": "forward", "n": 64, "repeats": 15, "patterns": [{"target": 5.0}]}


def noisy(median: float, spread: float, seed: int, rounds: int = 15) -> tuple[float, ...]:
    draw = random.Random(seed)
    return tuple(median * (1 + spread * draw.uniform(-1, 1)) for _ in range(rounds))


def compared(factors: tuple[float, ...], peak: int, seed: int, **changes: object) -> Result:
    """Times of all candidates around these medians; the last one ran once."""
    seconds = {
        name: noisy(factor, spread, seed + i, 1 if name == "once" else 15)
        for i, ((name, spread), factor) in enumerate(zip(SPREADS.items(), factors, strict=True))
    }
    return Result(CASE | changes, 15, 0.0, seconds, {"peak_extra halved": peak, "flops": 7})


BEFORE = compared((1.0,) * 4, 100 * 2**20, 0)
AFTER = compared((0.5, 1.3, 1.01, 2.0), 50 * 2**20, 100)
OLD, NEW = (Result({"kind": "time", "name": name}, 1, 0.0, {"x": (1.0,)}) for name in ("held", "timed"))
A = Record({}, MACHINE, (BEFORE, OLD))
B = Record({}, {**MACHINE, "threads": 1, "kernel": "stock"}, (AFTER, NEW))


def test_known_ratios_are_found_with_their_intervals() -> None:
    halved, longer, unclear, once = compare_records(A, B)["changes"]
    assert halved["ratio"] == pytest.approx(0.5, rel=0.03)
    assert longer["ratio"] == pytest.approx(1.3, rel=0.03)
    for change in (halved, longer, unclear):
        assert change["low"] <= change["ratio"] <= change["high"]
    verdicts = [change["verdict"] for change in (halved, longer, unclear, once)]
    assert verdicts == ["faster", "slower", "no difference shown", "no interval: fewer than 5 rounds"]
    assert (once["low"], once["high"], once["rounds"]) == (None, None, [1, 1])


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    bounds = [bootstrap_ratio(noisy(1.0, 0.2, 2 * seed), noisy(1.2, 0.2, 2 * seed + 1)) for seed in range(20)]
    assert sum(low <= 1.2 <= high for low, high in bounds) >= 17
    assert bounds[0] == bootstrap_ratio(noisy(1.0, 0.2, 0), noisy(1.2, 0.2, 1))  # it is seeded
    claims = 0
    for seed in range(200):  # equal sides seldom differ, even with the fewest rounds
        low, high = bootstrap_ratio(*(noisy(1.0, 0.3, 2 * seed + side, FEWEST) for side in (0, 1)))
        claims += high < 1.0 or low > 1.0
    assert claims <= 16  # 8 %: the interval is one of 95 % with many rounds only


def test_bytes_and_what_stands_in_one_only() -> None:
    comparison = compare_records(A, B)
    (change,) = comparison["count_changes"]  # flops are not of a run
    assert (change["what"], change["ratio"]) == ("peak_extra halved", 0.5)
    assert comparison["warnings"] == ["threads differs: 2 and 1", "kernel differs: native and stock"]
    fewer = replace(AFTER, seconds={"halved": AFTER.seconds["halved"]}, counts={"confirmed": 15000})
    comparison = compare_records(A, Record({}, MACHINE, (fewer, replace(fewer, case=OLD.case))))
    assert [change["candidate"] for change in comparison["changes"]] == ["halved"]
    missing = {"forward, longer", "forward, noisy", "forward, once", "held, x"}
    assert set(comparison["only_in_a"]) == missing
    both = [Record({}, MACHINE, (replace(fewer, counts={"confirmed": n}),)) for n in (10000, 15000)]
    assert "| forward, confirmed | 10,000 | 15,000 | 1.500 |" in comparison_markdown(compare_records(*both))


def test_other_sizes_are_not_compared_but_targets_and_rounds_are_no_sizes() -> None:
    other = replace(BEFORE, case=CASE | {"n": 128, "budget": 2**30})
    comparison = compare_records(A, Record({}, MACHINE, (other,)))
    assert comparison["changes"] == comparison["count_changes"] == []
    sizes = "not compared, it is another case: n 64 and 128; budget None and 1073741824"
    assert sizes in comparison["warnings"][0]
    assert "Nothing in common was measured." in comparison_markdown(comparison)
    judged = replace(BEFORE, case=CASE | {"repeats": 99, "patterns": [{"target": None}]})
    assert len(compare_records(A, Record({}, MACHINE, (judged,)))["changes"]) == len(SPREADS)


def test_compare_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, record in zip(files, (A, B), strict=True):
        file.write_text(to_json(record))
    compare, table = ["bench", "--compare", *map(str, files)], tmp_path / "table.md"
    assert main([*compare, "--markdown", str(table)]) == 0
    shown = capsys.readouterr().out
    assert shown == table.read_text()
    for text in (
        "| 15 and 15 | faster |",
        "**Warning**: threads differs: 2 and 1.",
        "**Warning**: kernel differs: native and stock.",
        "| forward, peak_extra halved | 100.0 MiB | 50.0 MiB | 0.500 |",
        "Only in A:\n\n- held",
        "Only in B:\n\n- timed",
    ):
        assert text in shown
    assert main([*compare, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == compare_records(A, B)
    assert main([*compare, "--markdown", str(files[0])]) == 2
    assert "must not be a record that is compared" in capsys.readouterr().err
    files[0].write_text("{}")
    assert main(compare) == 2
    assert "schema" in capsys.readouterr().err
