"""The demo's report in a browser: no complaint, no request, every plot, every figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.cli.bench.exactness import CONFIGURATIONS
from dilated_attention_pytorch.cli.bench.record import read_record, to_page
from support.browser import Tab
from support.suites import suite

PLOTS = {"time", "memory", "pattern-dilated", "pattern-blocks", "loss"}
BOXES = """() => Object.fromEntries([...document.querySelectorAll("svg")].map(svg => {
  const box = svg.getBoundingClientRect();
  return [svg.id, [box.width, box.height]];
}))"""
# Tables and drawings whose box would have to be scrolled sideways.
CUT_OFF = """() => [...document.querySelectorAll(".wide")].filter(x => x.scrollWidth > x.clientWidth)
  .map(x => x.innerText.slice(0, 60))"""
SCROLLS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
OTHERS = ("transformers", "triton")  # records of a sweep and of compilers
RECORDS = sorted(path for path in RESULTS.glob("*.json") if path.stem not in OTHERS)  # of the bench


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page and the JSON of a short run of the real command."""
    path = tmp_path_factory.mktemp("demo") / "report <1>.html"
    command = [sys.executable, "-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
    command += ["-m", "dilated_attention_pytorch", "demo", "--seconds", "0.1", "--steps", "2", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    result = subprocess.run([*command, "--out", str(path)], env=environment, **pipes)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(" ok\n") == len(CONFIGURATIONS) + 1
    assert str(path) in result.stderr
    return path, json.loads(result.stdout)


def test_json_holds_what_was_found(report: tuple[Path, dict[str, Any]]) -> None:
    path, found = report
    assert found["report"] == str(path)
    assert found["rows"][0]["n"] == 1024
    assert set(found["rows"][0]["seconds"]) == {"dense", "dilated", "block-sparse"}
    assert all(check["passed"] for check in found["checks"])
    training = found["training"]
    assert (training["steps"], found["is_interrupted"]) == (2, False)
    assert 0 < training["validations"][-1][1] < 9
    assert len(training["sample"]) > 100


def test_every_figure_is_on_the_page(report: tuple[Path, dict[str, Any]], browser: Any) -> None:
    path, found = report
    page = Tab(browser).open(path.as_uri())
    words = page.inner_text("body")
    shown = "\n".join([words, *page.locator("title").all_text_contents()])
    for figure in figures_of(found):
        assert figure in shown, figure
    sample = page.evaluate("document.querySelector('pre').textContent")
    assert sample.strip() == found["training"]["sample"].strip()
    assert words.index(found["summary"][:40]) < words.index("Machine")


def figures_of(found: dict[str, Any]) -> Iterator[str]:
    """All numbers of the JSON as people read them, and other facts."""
    yield found["summary"]
    yield from (str(found["machine"][name]) for name in ("cpu", "cores", "threads", "torch", "python", "os"))
    yield str(found["project"]["version"])
    for check in found["checks"]:
        yield check["title"]
        yield f"{check['forward_error']:.1e}"
        yield f"{check['gradient_error']:.1e}"
    for row in found["rows"]:
        yield f"{row['n']:,}"
        yield from (f"{x * 1e3:,.{int(x < 0.1)}f}" for x in row["seconds"].values())
        yield from (f"{x / 2**20:,.{int(x < 100 * 2**20)}f}" for x in row["peaks"].values())
    training = found["training"]
    yield training["model"]
    yield from (f"{training[name]:,}" for name in ("parameters", "steps", "steps_planned"))
    yield from (f"{step:,}\t{bits:.3f}" for step, bits in training["validations"])
    yield from (f"training: {step:,}, {bits:,.4g}" for step, bits in training["losses"])
    yield f"{training['seconds']:.0f} s"


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
def test_page_is_whole_and_quiet(
    report: tuple[Path, dict[str, Any]], browser: Any, width: int, scheme: str
) -> None:
    tab = Tab(browser, width, scheme)
    page = tab.open(report[0].as_uri())
    boxes = page.evaluate(BOXES)
    assert set(boxes) == PLOTS
    assert all(wide > 300 and high > 100 for wide, high in boxes.values()), boxes
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}[scheme]
    text = page.evaluate("[...document.querySelectorAll('#time text')].map(x => getComputedStyle(x).fill)")
    assert set(text) == {"light": {"rgb(29, 33, 37)"}, "dark": {"rgb(228, 231, 234)"}}[scheme]
    assert not page.evaluate(SCROLLS)
    assert width < 1200 or page.evaluate(CUT_OFF) == []
    assert tab.complaints == []
    assert set(tab.requests) - {"data:,"} == {report[0].as_uri()}


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_pages_of_the_bench_need_no_sideways_scroll(record: Path, browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "bench.html"
    path.write_text(to_page(read_record(record), suite(record.stem).SECTIONS), encoding="utf-8")
    page = Tab(browser).open(path.as_uri())
    assert page.locator("table").count() >= 1
    assert not page.evaluate(SCROLLS)
    assert page.evaluate(CUT_OFF) == []


def test_the_browser_would_tell(tmp_path: Path, browser: Any) -> None:
    """What the tests above do not find is there to be found."""
    path = tmp_path / "page.html"
    path.write_text('<img src="https://example.invalid/x.png"><script>console.warn("seen")</script>')
    tab = Tab(browser)
    tab.open(path.as_uri())
    assert any("seen" in complaint for complaint in tab.complaints)
    assert "https://example.invalid/x.png" in tab.requests
