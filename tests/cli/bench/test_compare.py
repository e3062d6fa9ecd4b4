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

MACHINE: dict[str, str | int | float | None] = {"cpu": "Some CPU", "cores": 2, "threads": 2, "torch": "9.9"}
NAMES = ("halved", "longer", "noisy", "once")
CASE = {
    "kind": "compare",
    "name": "forward",
    "n": 64,
    "repeats": 15,
    "patterns": [{"keep": 1, "target": 5.0}],
}


def noisy(median: float, spread: float, seed: int, rounds: int = 15) -> tuple[float, ...]:
    draw = random.Random(seed)
    return tuple(median * (1 + spread * draw.uniform(-1, 1)) for _ in range(rounds))


def compared(factors: dict[str, float], peak: int, seed: int, **changes: object) -> Result:
    spreads = {"halved": 0.02, "longer": 0.02, "noisy": 0.5, "once": 0.0}
    seconds = {
        name: noisy(factor, spreads[name], seed + i, 1 if name == "once" else 15)
        for i, (name, factor) in enumerate(factors.items())
    }
    return Result(CASE | changes, 15, 0.0, seconds, {"peak_extra halved": peak, "flops": 7})


BEFORE = compared(dict.fromkeys(NAMES, 1.0), 100 * 2**20, 0)
AFTER = compared({"halved": 0.5, "longer": 1.3, "noisy": 1.01, "once": 2.0}, 50 * 2**20, 100)
OLD, NEW = (Result({"kind": "time", "name": name}, 1, 0.0, {"x": (1.0,)}) for name in ("held", "timed"))
A, B = Record({}, MACHINE, (BEFORE, OLD)), Record({}, {**MACHINE, "threads": 1}, (AFTER, NEW))


def test_known_ratios_are_found_with_their_intervals() -> None:
    changes = {change["candidate"]: change for change in compare_records(A, B)["changes"]}
    halved, longer, unclear, once = (changes[name] for name in NAMES)
    assert halved["ratio"] == pytest.approx(0.5, rel=0.03)
    assert longer["ratio"] == pytest.approx(1.3, rel=0.03)
    for change in (halved, longer, unclear):
        assert change["low"] <= change["ratio"] <= change["high"]
    verdicts = [change["verdict"] for change in (halved, longer, unclear, once)]
    assert verdicts == ["faster", "slower", "no difference shown", "no interval: fewer than 5 rounds"]
    assert (once["low"], once["high"], once["rounds"]) == (None, None, [1, 1])


def test_the_interval_is_seeded_and_covers_the_truth_about_as_often_as_it_says() -> None:
    a, b = noisy(1.0, 0.1, 1), noisy(1.2, 0.1, 2)
    assert bootstrap_ratio(a, b) == bootstrap_ratio(a, b)
    covered = 0
    for seed in range(20):
        low, high = bootstrap_ratio(noisy(1.0, 0.2, 2 * seed), noisy(1.2, 0.2, 2 * seed + 1))
        covered += low <= 1.2 <= high
    assert covered >= 17


def test_equal_sides_seldom_differ_even_with_the_fewest_rounds() -> None:
    claims = 0
    for seed in range(200):
        sides = (noisy(1.0, 0.3, 2 * seed, FEWEST), noisy(1.0, 0.3, 2 * seed + 1, FEWEST))
        low, high = bootstrap_ratio(*sides)
        claims += high < 1.0 or low > 1.0
    assert claims <= 16  # 8 %: the interval is one of 95 % with many rounds only


def test_bytes_and_what_stands_in_one_only() -> None:
    comparison = compare_records(A, B)
    (change,) = comparison["count_changes"]  # flops are not of a run
    assert (change["what"], change["ratio"]) == ("peak_extra halved", 0.5)
    assert (comparison["only_in_a"], comparison["only_in_b"]) == (["held"], ["timed"])
    assert comparison["warnings"] == ["threads differs: 2 and 1"]
    text = comparison_markdown(comparison)
    assert "**Warning**: threads differs: 2 and 1." in text
    assert "| forward, peak_extra halved | 100.0 MiB | 50.0 MiB | 0.500 |" in text
    assert "Only in A:\n\n- held" in text
    assert "Only in B:\n\n- timed" in text
    fewer = replace(AFTER, seconds={"halved": AFTER.seconds["halved"]}, counts={"confirmed": 15000})
    comparison = compare_records(A, Record({}, MACHINE, (fewer, replace(fewer, case=OLD.case))))
    assert [change["candidate"] for change in comparison["changes"]] == ["halved"]
    missing = {"forward, longer", "forward, noisy", "forward, once", "held, x"}
    assert set(comparison["only_in_a"]) == missing
    both = [Record({}, MACHINE, (replace(fewer, counts={"confirmed": n}),)) for n in (10000, 15000)]
    assert "| forward, confirmed | 10,000 | 15,000 | 1.500 |" in comparison_markdown(compare_records(*both))


def test_other_sizes_are_not_compared_but_targets_and_rounds_are_no_sizes() -> None:
    other = compared(dict.fromkeys(NAMES, 1.0), 1, 0, n=128, budget=2**30)
    comparison = compare_records(A, Record({}, MACHINE, (other,)))
    assert comparison["changes"] == comparison["count_changes"] == []
    sizes = "not compared, it is another case: n 64 and 128; budget None and 1073741824"
    assert sizes in comparison["warnings"][0]
    assert "Nothing in common was measured." in comparison_markdown(comparison)
    judged = replace(BEFORE, case=CASE | {"repeats": 99, "patterns": [{"keep": 1, "target": None}]})
    assert len(compare_records(A, Record({}, MACHINE, (judged,)))["changes"]) == len(NAMES)


def test_compare_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, record in zip(files, (A, B), strict=True):
        file.write_text(to_json(record))
    table = tmp_path / "table.md"
    assert main(["bench", "--compare", *map(str, files), "--markdown", str(table)]) == 0
    shown = capsys.readouterr().out
    assert shown == table.read_text()
    row = next(line for line in shown.splitlines() if line.startswith("| forward, halved |"))
    assert row.endswith("| 15 and 15 | faster |")
    assert main(["bench", "--compare", *map(str, files), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["changes"][0]["verdict"] == "faster"
    assert document["changes"][0]["ratio"] == pytest.approx(0.5, rel=0.03)
    assert document["only_in_b"] == ["timed"]
    files[0].write_text("{}")
    assert main(["bench", "--compare", *map(str, files)]) == 2
    assert "schema" in capsys.readouterr().err
