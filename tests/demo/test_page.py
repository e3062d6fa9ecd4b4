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

from dilated_attention_pytorch.bench.exactness import CONFIGURATIONS
from dilated_attention_pytorch.bench.record import read_record, to_page
from support.chromium import ADVICE, Browser, Tab, find_chromium, start_chromium
from support.suites import suite

PLOTS = {"time", "memory", "pattern-dilated", "pattern-blocks", "loss"}
BOXES = """Object.fromEntries([...document.querySelectorAll("svg")].map(svg => {
  const box = svg.getBoundingClientRect();
  return [svg.id, [box.width, box.height]];
}))"""
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
# Tables and drawings whose box would have to be scrolled sideways.
CUT_OFF = """[...document.querySelectorAll(".wide")].filter(x => x.scrollWidth > x.clientWidth)
  .map(x => x.innerText.slice(0, 60))"""
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
RECORDS = sorted(path for path in RESULTS.glob("*.json") if path.stem != "transformers")  # of the bench
SCROLLS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page and the JSON of a short run of the real command."""
    path = tmp_path_factory.mktemp("demo") / "report <1>.html"
    command = [sys.executable, "-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
    command += ["-m", "dilated_attention_pytorch", "demo", "--seconds", "0.1", "--steps", "2", "--json"]
    result = subprocess.run(
        [*command, "--out", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(" ok\n") == len(CONFIGURATIONS) + 1
    assert str(path) in result.stderr
    return path, json.loads(result.stdout)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip(ADVICE)
    with start_chromium(program) as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    tab = Tab(browser)
    yield tab
    tab.close()


def test_json_holds_what_was_found(report: tuple[Path, dict[str, Any]]) -> None:
    path, found = report
    assert found["report"] == str(path)
    assert found["rows"][0]["n"] == 1024
    assert set(found["rows"][0]["costs"]) == {"dense", "dilated", "block-sparse"}
    assert all(check["passed"] for check in found["checks"])
    training = found["training"]
    assert (training["steps"], training["is_interrupted"]) == (2, False)
    assert 0 < training["validations"][-1][1] < 9
    assert len(training["sample"]) > 100


def test_every_figure_is_on_the_page(report: tuple[Path, dict[str, Any]], tab: Tab) -> None:
    path, found = report
    tab.open(path.as_uri())
    words = tab.ask("document.body.innerText")
    shown = words + "\n".join(tab.ask("[...document.querySelectorAll('title')].map(x => x.textContent)"))
    for figure in figures_of(found):
        assert figure in shown, figure
    sample = tab.ask("[...document.querySelectorAll('pre')][0].textContent")
    assert sample.strip() == (found["training"]["prompt"] + found["training"]["sample"]).strip()
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
        for cost in row["costs"].values():
            yield f"{cost['seconds'] * 1e3:,.{int(cost['seconds'] < 0.1)}f}"
            yield f"{cost['peak_bytes'] / 2**20:,.{int(cost['peak_bytes'] < 100 * 2**20)}f}"
            yield f"{cost['pair_share']:.1%}"
    training = found["training"]
    for name in ("parameters", "context_length", "train_bytes", "validation_bytes", "steps", "steps_planned"):
        yield f"{training[name]:,}"
    yield from (f"{step:,}\t{bits:.3f}" for step, bits in training["validations"])
    yield from (f"training: {step:,}, {bits:,.4g}" for step, bits in training["losses"])
    yield f"{training['seconds']:.0f} s"


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
def test_page_is_whole_and_quiet(
    report: tuple[Path, dict[str, Any]], tab: Tab, width: int, scheme: str
) -> None:
    path, _ = report
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.open(path.as_uri())
    boxes = tab.ask(BOXES)
    assert set(boxes) == PLOTS
    assert all(wide > 300 and high > 100 for wide, high in boxes.values()), boxes
    assert tab.ask(BACKGROUND) == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}[scheme]
    assert not tab.ask(SCROLLS)
    if width == 1200:
        assert tab.ask("document.documentElement.scrollWidth") <= 1200
        assert tab.ask(CUT_OFF) == []
    assert tab.complaints() == []
    assert set(tab.requests()) - {"data:,"} == {path.as_uri()}


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_pages_of_the_bench_need_no_sideways_scroll(record: Path, tab: Tab, tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    page.write_text(to_page(read_record(record), suite(record.stem).SECTIONS), encoding="utf-8")
    tab.call("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
    tab.open(page.as_uri())
    assert tab.ask("document.querySelectorAll('table').length") >= 1
    assert tab.ask("document.documentElement.scrollWidth") <= 1200
    assert tab.ask(CUT_OFF) == []


def test_the_browser_would_tell(tmp_path: Path, tab: Tab) -> None:
    """What the test above does not find is there to be found."""
    page = tmp_path / "page.html"
    page.write_text('<img src="https://example.invalid/x.png"><script>console.warn("seen")</script>')
    tab.open(page.as_uri())
    assert any("seen" in complaint for complaint in tab.complaints())
    assert "https://example.invalid/x.png" in tab.requests()
