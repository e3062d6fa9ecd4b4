"""Comparison by name: candidates heed their options or say so, and are reported as they were measured."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dilated_attention_pytorch
from dilated_attention_pytorch.cli.bench import cases as run
from dilated_attention_pytorch.cli.bench.candidates import ENTRIES, Config, entry_of, remarks, window_mask
from dilated_attention_pytorch.cli.bench.cases import Case, check_candidate, run_case, speed_ups
from dilated_attention_pytorch.cli.bench.gate import WrongAnswerError
from dilated_attention_pytorch.cli.bench.measure import Measured
from dilated_attention_pytorch.cli.bench.record import (
    Record,
    Result,
    case_of,
    from_json,
    to_json,
    to_markdown,
)
from dilated_attention_pytorch.cli.main import main
from dilated_attention_pytorch.modules.attention import AttentionModule
from dilated_attention_pytorch.reference import block_sparse_attention_reference

CONFIG = Config(2, 8, (64, 256), (1, 2), sparsity=0.5, block_size=32)
SECTIONS = {"compare": run.SECTION}


def case_with(*names: str, n: int = 256, **changes: Any) -> Case:
    return Case("tiny", replace(CONFIG, **changes), n, names, backward=True, repeats=2)


def test_every_attention_of_the_package_is_a_candidate() -> None:
    public = {name for name in dilated_attention_pytorch.__all__ if name.lower().endswith("attention")}
    public |= {f"ImprovedDilatedAttention{v}" for v in ("", "V2")}
    public |= {f"RingDilatedAttention{v}" for v in ("V2", "V3", "Production")}
    assert {name for name in public if not name.startswith(("create_", "choose_"))} <= set(ENTRIES)


@pytest.mark.parametrize("memory", [None, "fresh", "pool", "lightweight"])
@pytest.mark.parametrize("cached", [False, True])
def test_options_reach_the_modules(memory: str | None, cached: bool) -> None:
    config = replace(CONFIG, memory=memory, use_pattern_cache=cached)
    expected = (memory in ("pool", "lightweight"), memory == "lightweight", cached)
    for name in ("DilatedAttention", "BlockSparseRingDilatedAttention", "MultiheadDilatedAttention"):
        module: Any = entry_of(name).make(config, 256).module
        attention = module.attention if entry_of(name).projects else module
        options = (attention.enable_memory_pool, attention.lightweight_pool, attention.use_pattern_cache)
        assert options == expected
        assert attention.spec.branches == CONFIG.spec.branches
    buffered: Any = entry_of("ImprovedDilatedAttentionV2").make(config, 256)
    assert (buffered.module.buffer_manager is None) == (memory == "fresh")


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("sdpa", {}, "dense"),
        ("sdpa", {"memory": "pool"}, "dense; it has no pool and no pattern cache"),
        ("sdpa", {"use_pattern_cache": False}, "dense; it has no pool and no pattern cache"),
        ("DilatedAttention", {"memory": "pool"}, "dilated"),
        ("RingDilatedAttentionProduction", {"memory": "fresh"}, "dilated; its memory is always pooled"),
        ("MultiheadDilatedAttention", {"use_pattern_cache": False}, "dilated, with projections"),
    ],
)
def test_what_a_candidate_cannot_heed_is_stated(name: str, changes: dict[str, Any], expected: str) -> None:
    assert remarks(name, replace(CONFIG, **changes)) == expected


class FakeLocalAttention(nn.Module):
    """What the package local-attention computes, as its documentation says."""

    def __init__(self, window_size: int, *, causal: bool, look_backward: int) -> None:
        super().__init__()
        assert look_backward == 1
        self.window_size, self.causal = window_size, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = window_mask(q.shape[2], self.window_size, self.causal)
        out = block_sparse_attention_reference(*(x.transpose(1, 2) for x in (q, k, v)), mask)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)


def test_an_installed_peer_is_checked_too_and_says_which_lengths_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert entry_of("local_attention").reason(False) == "the package local-attention is not installed"
    peer = ModuleType("local_attention")
    peer.LocalAttention = FakeLocalAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "local_attention", peer)
    monkeypatch.setitem(ENTRIES, "local_attention", replace(ENTRIES["local_attention"], why_not=None))
    assert check_candidate(case_with("local_attention"), "local_attention") < 2e-5
    monkeypatch.setattr(run, "measure_in_child", lambda *_, **__: Measured(why_not="not here"))
    result = run_case(case_with("sdpa", "local_attention", n=CONFIG.block_size + 1), lambda _: None)
    assert set(result.seconds) == {"sdpa"}
    assert "takes multiples of its window" in result.notes["local_attention"]
    monkeypatch.setattr(FakeLocalAttention, "forward", lambda self, q, k, v: v + 0 * (q + k))
    with pytest.raises(WrongAnswerError):
        check_candidate(case_with("local_attention"), "local_attention")


def test_windows_of_local_attention() -> None:
    seen = window_mask(9, 3, False)[0]
    assert seen[4].all()
    assert seen[0].tolist() == [True] * 6 + [False] * 3
    assert window_mask(9, 3, True)[0, 7].tolist() == [False] * 3 + [True] * 5 + [False]


def test_candidates_that_cannot_run_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(1e-6, {"peak_extra": 3 * 2**20, "peak_total": 2**30})
    monkeypatch.setattr(run, "measure_in_child", lambda *_, **__: measured)
    case = case_with("flex_attention", "torchscale", "sdpa", "DilatedAttention", memory="pool")
    result = run_case(case, lambda _: None)
    assert list(result.seconds) == ["sdpa", "DilatedAttention"]
    assert [len(values) for values in result.seconds.values()] == [2, 2]
    record = Record({}, {}, (result,))
    assert from_json(to_json(record)) == record
    table = to_markdown(record, SECTIONS)
    assert "| tiny, flex_attention |  |  |  |  | cannot run: FlexAttention has no backward pass" in table
    assert "| tiny, torchscale |  |  |  |  | cannot run: the package torchscale is not installed |" in table
    assert "| 3.0 | dense; it has no pool and no pattern cache |" in table
    assert "blocks of 32 with density 0.5, memory pool" in table
    monkeypatch.setattr(run, "measure_in_child", lambda *_, **__: Measured(0.1, {"peak_extra": 1}))
    with pytest.raises(WrongAnswerError, match="tiny, sdpa"):
        run_case(case_with("sdpa"), lambda _: None)


def test_speed_ups_and_tokens_a_second_follow_from_minima() -> None:
    seconds = {"sdpa": (4.0, 5.0, 3.0), "DilatedAttention": (2.0, 1.0, 3.0)}
    figures = speed_ups(seconds)
    assert [figure.value for figure in figures] == [3.0]
    result = Result(case_of(case_with("sdpa", "DilatedAttention")), 3, 0.0, seconds, {}, figures)
    row = "| tiny, DilatedAttention | 1000.0 (2000.0 ± 500.0) | 256 | 3.00 |  |  |"
    assert row in to_markdown(Record({}, {}, (result,)), SECTIONS)


def test_comparison_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, html, markdown = (tmp_path / name for name in ("record.json", "page.html", "table.md"))
    sizes = ["--lengths", "256,4096", "--heads", "2", "--head-dim", "8", "--segments", "64,256"]
    what = ["--rates", "1,2", "--training", "--causal", "--threads", "1", "--repeats", "3", "--batch", "2"]
    places = ["--out", str(out), "--html", str(html), "--json"]
    threads = torch.get_num_threads()
    try:
        assert main(["bench", "DilatedAttention", *sizes, *what, *places]) == 0
    finally:
        torch.set_num_threads(threads)
    record = from_json(capsys.readouterr().out)
    assert record == from_json(out.read_text())
    assert record.machine["threads"] == 1
    config = Config(2, 8, (64, 256), (1, 2), is_causal=True, block_size=64)
    for result, n in zip(record.results, (256, 4096), strict=True):
        case = Case(f"training at {n}", config, n, ("DilatedAttention",), 2, True, None, 3)
        assert result.case == case_of(case)
        assert len(result.seconds["DilatedAttention"]) == 3
        assert result.counts["peak_total DilatedAttention"] > 2**20
        assert result.error is not None
        assert result.error < 2e-5
    results = 4 * (2 * 4096 * 2 * 8) * 4  # bytes of out and of three gradients
    assert result.counts["peak_extra DilatedAttention"] > 0.5 * results  # the rest fits into freed memory
    page = html.read_text()
    assert page.count("<svg") == 2
    for text in ("time, training", "memory, training", "training at 4096, DilatedAttention"):
        assert text in page
    assert main(["bench", "--render", str(out), "--markdown", str(markdown)]) == 0
    assert capsys.readouterr().out == markdown.read_text()
    assert main(["bench", "--render", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]


def test_a_wrong_candidate_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = AttentionModule.forward
    monkeypatch.setattr(AttentionModule, "forward", lambda *a, **k: right(*a, **k) + 1e-3)
    out = tmp_path / "record.json"
    assert main(["bench", "DilatedAttention", "--lengths", "256", "--heads", "2", "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "wrong answer: forward at 256, DilatedAttention" in captured.err
    assert captured.out == ""
    assert not out.exists()


def test_interrupted_run_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_first(case: Case, say: Any) -> Result:
        if case.n == 512:
            raise KeyboardInterrupt
        return Result(case_of(case), 1, 0.0, {"sdpa": (1.0,)})

    monkeypatch.setattr(run, "run_case", run_first)
    record = tmp_path / "record.json"
    assert main(["bench", "sdpa", "--lengths", "256,512", "--out", str(record)]) == 130
    assert [result.name for result in from_json(record.read_text()).results] == ["forward at 256"]


def test_candidates_are_listed_and_to_measure_none_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "torchscale", "--lengths", "256"]) == 1
    assert "torchscale is not installed" in capsys.readouterr().out
    assert main(["bench", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ENTRIES)
    assert "forward only: FlexAttention has no backward pass" in text
    assert "cannot run here: the package torchscale" in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["unheard-of"], 2, "there is no candidate 'unheard-of'"),
        (["dilatedattention"], 2, "Did you mean DilatedAttention"),
        (["sdpa", "--repeats", "0"], 2, "a positive whole number is needed"),
        (["sdpa", "--out", "no/such/place.json"], 2, "there is no directory"),
        (["sdpa", "--out", "a", "--html", "a"], 2, "every file takes one thing"),
        (["sdpa", "--render", "record.json"], 2, "--render measures nothing of that kind, got sdpa"),
        (["--render", "no-such-record.json"], 1, "no-such-record.json"),
        (["--render", "a.json", "--causal"], 2, "--render measures nothing of that kind, got --causal"),
        (["--compare", "a.json", "b.json", "--html", "c.html"], 2, "got --html"),
        (["--compare", "a.json", "b.json", "--list"], 2, "one of these at a time"),
        (["sdpa", "--segments", "64"], 2, "--segments and --rates are given together"),
        (["sdpa", "--segments", "64", "--rates", "1,2"], 2, "segment_lengths"),
        (["sdpa", "--sparsity", "2"], 2, "sparsity_ratio"),
        (["sdpa", "--seconds", "5"], 2, "--seconds, the time of --limit"),
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
    monkeypatch.setattr(run, "run_case", lambda *_: pytest.fail("measured in spite of a usage error"))
    try:
        found = main(["bench", *arguments])
    except SystemExit as error:  # of the parser
        found = int(str(error.code))
    assert found == code
    assert message in capsys.readouterr().err
