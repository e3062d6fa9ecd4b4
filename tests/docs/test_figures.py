"""No figure without a record: tables of measurements are renderings of records, and prose repeats none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dilated_attention_pytorch.cli.bench.record import read_record, to_markdown
from support.suites import RESULTS, ROOT, is_whole, suite

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTION = re.compile(r"<!-- (\w+):begin -->\n(.*?)<!-- \1:end -->", re.DOTALL)
TABLE = re.compile(r"^\|.*\n\|[ :|-]+\n(?:\|.*\n)*", re.MULTILINE)
# What is shown as code is an example or a setting, what stands in quotation marks is somebody's claim.
ASIDE = re.compile(r"^```.*?^```$|^    .*$|`[^`\n]*`|\"[^\"\n]*\"", re.DOTALL | re.MULTILINE)
# A cell that is a number, perhaps with a unit or a spread; or a ratio or share anywhere in one.
CELL = re.compile(
    r"^\**\d[\d.,]*\**(?:$|[,( ]*(?:[(±,]|m?s\b|[KMGT]i?B\b|[GT]FLOP))|\d\.\d\d|\d ?(?:%|times\b|x\b)"
)
UNIT = r"(?:ms|µs|(?:micro|milli)?seconds|[GT]FLOP/s|tokens (?:a|per) second)\b"
THAN = r"(?:as (?:fast|slow|long|much)|faster|slower|less|more|longer|the (?:time|memory|peak|speed))\b"
SENTENCE = re.compile(rf"\d ?{UNIT}|\d ?(?:%|times|x) {THAN}|(?:takes|took) \d\.\d")
# Sections that are computed and not measured, and the tests that compare them.
COMPUTED = {
    "plan": "tests/cli/bench/test_suites.py",
    "triton": "tests/kernels/test_triton.py",
    "families": "tests/integrations/test_transformers_sweep.py",
}
# A record that one of those tests compares, with its own rendering.
COMPARED = {"transformers.json", "triton.json"}


def renderings(page: str) -> dict[str, list[str]]:
    """What the records that a page names render to."""
    names = set(re.findall(r"benchmarks/results/(\w+\.json)", page)) - COMPARED
    return {name: rendering(name) for name in sorted(names)}


def rendering(name: str) -> list[str]:
    """A record as the program of its name shows it: its tables, and its summary if it has one."""
    record, program = read_record(RESULTS / name), suite(name.removesuffix(".json"))
    short = [program.summary(record)] if hasattr(program, "summary") else []
    return [text.strip() for text in (to_markdown(record, program.SECTIONS), *short)]


def cells(table: str) -> list[str]:
    """Cells of a table's body, without code and quotations."""
    rows = ASIDE.sub("", table).splitlines()[2:]
    return [cell.strip() for row in rows for cell in row.strip("| ").split("|")]


def unrecorded_tables(text: str) -> list[str]:
    """First lines of tables outside of sections that hold figures."""
    outside = SECTION.sub("", text)
    return [
        table.partition("\n")[0]
        for table in TABLE.findall(outside)
        if any(CELL.search(cell) for cell in cells(table))
    ]


def unrecorded_sentences(text: str) -> list[str]:
    prose = ASIDE.sub("", TABLE.sub("", SECTION.sub("", text)))
    return [line for line in prose.splitlines() if SENTENCE.search(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_measured_sections_are_renderings_of_records_that_the_page_names(page: Path) -> None:
    text = page.read_text()
    known = renderings(text)
    for kind, section in SECTION.findall(text):
        if kind in COMPUTED:
            assert f"{kind.upper()}_BEGIN" in (ROOT / COMPUTED[kind]).read_text()
        else:
            shown = [text for texts in known.values() for text in texts]
            assert section.strip() in shown, f"{page.name} holds no rendering of {sorted(known)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_stand_in_measured_sections_alone(page: Path) -> None:
    text = page.read_text()
    assert len(SECTION.findall(text)) == text.count(":begin -->") == text.count(":end -->")
    assert not unrecorded_tables(text)
    assert not unrecorded_sentences(text)


def test_every_record_is_shown_somewhere() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    records = [path for path in RESULTS.glob("*.json") if path.name in COMPARED or is_whole(path.stem)]
    assert not [path.name for path in records if f"benchmarks/results/{path.name}" not in pages]


HEAD = "| case | result |\n|---|---|\n"


@pytest.mark.parametrize(
    ("rule", "text", "found"),
    [
        (unrecorded_tables, f"{HEAD}| forward | 12.5 ms |\n", True),
        (unrecorded_tables, f"{HEAD}| forward | **1.05**, met |\n", True),
        (unrecorded_tables, f"{HEAD}| forward | about 1.05 of it |\n", True),
        (unrecorded_tables, f"{HEAD}| forward | takes 20 % less |\n", True),
        (unrecorded_tables, f"{HEAD}| forward | 1,234 (1,300 ± 5) |\n", True),
        (unrecorded_tables, f"{HEAD}| forward | 7 |\n", True),
        (unrecorded_tables, f"{HEAD}| short | 48 calls in a row |\n", False),
        (unrecorded_tables, f"<!-- bench:begin -->\n{HEAD}| a | 12.5 ms |\n<!-- bench:end -->\n", False),
        (unrecorded_tables, f"{HEAD}| `workspace_bytes` | `33554432` |\n", False),
        (unrecorded_tables, f'{HEAD}| "3.5x as fast" | not here |\n', False),
        (unrecorded_tables, f"{HEAD}| a pool | keeps results of 32 MiB |\n", False),
        (unrecorded_sentences, "It takes 1.3 times as long.\n", True),
        (unrecorded_sentences, "A step is done in 12 ms.\n", True),
        (unrecorded_sentences, "It is 28 % faster.\n", True),
        (unrecorded_sentences, 'They say "28 % faster".\n', False),
        (unrecorded_sentences, "A key counts 2 times, and 32 MiB are set aside.\n", False),
        (unrecorded_sentences, "```console\n$ demo\ndone in 12 ms\n```\n", False),
    ],
)
def test_rules_see_figures_without_a_record(rule: Callable[[str], list[str]], text: str, found: bool) -> None:
    assert bool(rule(text)) == found
