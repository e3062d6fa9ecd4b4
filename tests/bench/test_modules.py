"""Comparison by name: every candidate is held against its definition, and heeds its options or says so."""

from __future__ import annotations

import importlib.machinery
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dilated_attention_pytorch
from dilated_attention_pytorch.bench import module_run
from dilated_attention_pytorch.bench.child import Measured
from dilated_attention_pytorch.bench.gate import WrongAnswerError
from dilated_attention_pytorch.bench.module_candidates import ENTRIES, Causal, entry_of, remarks
from dilated_attention_pytorch.bench.module_cases import CompareCase, ModuleConfig
from dilated_attention_pytorch.bench.module_gate import (
    check_candidate,
    make_inputs,
    rows_error,
    run_candidate,
)
from dilated_attention_pytorch.bench.module_run import run_compare
from dilated_attention_pytorch.bench.peers import window_mask
from dilated_attention_pytorch.bench.record import Record, from_json, make_result, to_json
from dilated_attention_pytorch.bench.tables import to_markdown
from dilated_attention_pytorch.cli.main import main
from dilated_attention_pytorch.modules.attention import AttentionModule
from dilated_attention_pytorch.reference import block_sparse_attention_reference
from support.wrong_answers import WRONG

CONFIG = ModuleConfig(2, 8, (64, 256), (1, 2), sparsity=0.5, block_size=32)
OWN = [name for name, entry in ENTRIES.items() if not entry.why_not(True)]


def case_of(*names: str, **changes: Any) -> CompareCase:
    return CompareCase("tiny", replace(CONFIG, **changes), 256, names, backward=True, repeats=2)


def test_every_attention_of_the_package_is_a_candidate() -> None:
    public = {name for name in dilated_attention_pytorch.__all__ if name.endswith("Attention")}
    public |= {f"ImprovedDilatedAttention{v}" for v in ("", "V2")}
    public |= {f"RingDilatedAttention{v}" for v in ("V2", "V3", "Production")}
    functions = {name for name in dilated_attention_pytorch.__all__ if name.endswith("_attention")}
    functions = {name for name in functions if not name.startswith(("create_", "choose_"))}
    assert public | functions <= set(ENTRIES)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", OWN)
def test_candidate_is_right(name: str, causal: bool) -> None:
    assert check_candidate(case_of(name, is_causal=causal), name) < 2e-5


@pytest.mark.parametrize("wrong", [wrong for wrong in WRONG if wrong != "lse"])  # modules return no lse
@pytest.mark.parametrize("name", ["DilatedAttention", "BlockSparseDilatedAttention"])
def test_gate_catches_a_wrong_candidate(wrong: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = AttentionModule.forward

    def forward(self: AttentionModule, *args: Any, **options: Any) -> Tensor:
        out = right(self, *args, **options)
        return WRONG[wrong](out, out)[0]

    monkeypatch.setattr(AttentionModule, "forward", forward)
    with pytest.raises(WrongAnswerError, match=f"tiny, {name}: the result is off"):
        check_candidate(case_of(name), name)


def test_a_wrong_candidate_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = AttentionModule.forward
    monkeypatch.setattr(AttentionModule, "forward", lambda *a, **k: right(*a, **k) + 1e-3)
    out = tmp_path / "record.json"
    sizes = ["--lengths", "256", "--heads", "2", "--head-dim", "8"]
    assert main(["bench", "DilatedAttention", *sizes, "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "wrong answer: forward at 256, DilatedAttention" in captured.err
    assert captured.out == ""
    assert not out.exists()


def test_rows_at_full_length_find_what_differs() -> None:
    for name in ("sdpa", "DilatedAttention", "BlockSparseDilatedAttention"):
        entry, rows = entry_of(name), [0, 63, 200]
        tensors = make_inputs(entry, CONFIG, 1, 256, backward=True, rows=rows)
        results = run_candidate(entry.make(CONFIG, 256), tensors, True)
        error = rows_error(entry, CONFIG, tensors, results, rows)
        assert error is not None
        assert error < 2e-5
        for which in range(len(results)):
            wrong = [x.clone() for x in results]
            wrong[which][0, 63] += 1e-3
            error = rows_error(entry, CONFIG, tensors, wrong, rows)
            assert error is not None
            assert error > 1e-4, (name, which)
    assert rows_error(entry_of("MultiheadDilatedAttention"), CONFIG, [], [], []) is None


def test_gradients_outside_of_the_rows_reach_count() -> None:
    entry, rows = entry_of("DilatedAttention"), [3]
    tensors = make_inputs(entry, CONFIG, 1, 1024, backward=True, rows=rows)
    results = run_candidate(entry.make(CONFIG, 1024), tensors, True)
    for value in (1.0, math.nan):
        results[2][0, 900] = value  # another segment
        error = rows_error(entry, CONFIG, tensors, results, rows)
        assert error is not None
        assert error >= 1.0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (False, False, True)),
        ({"memory": "fresh"}, (False, False, True)),
        ({"memory": "pool"}, (True, False, True)),
        ({"memory": "lightweight"}, (True, True, True)),
        ({"use_pattern_cache": False}, (False, False, False)),
    ],
)
def test_options_reach_the_modules(changes: dict[str, Any], expected: tuple[bool, ...]) -> None:
    config = replace(CONFIG, **changes)
    for name in ("DilatedAttention", "BlockSparseRingDilatedAttention", "MultiheadDilatedAttention"):
        made = entry_of(name).make(config, 256)
        assert isinstance(made, Causal)
        module: Any = made.module
        skin = module.attention if entry_of(name).projects else module
        assert (skin.enable_memory_pool, skin.lightweight_pool, skin.use_pattern_cache) == expected
        assert skin.spec.branches == CONFIG.spec.branches
    buffered: Any = entry_of("ImprovedDilatedAttentionV2").make(config, 256)
    assert (buffered.module.buffer_manager is None) == (config.memory == "fresh")


def test_what_a_candidate_cannot_heed_is_stated() -> None:
    pooled, uncached = replace(CONFIG, memory="pool"), replace(CONFIG, use_pattern_cache=False)
    assert remarks("sdpa", CONFIG) == "dense"
    assert remarks("sdpa", pooled) == "dense; not with memory pool: it has no pool"
    assert remarks("sdpa", uncached) == "dense; it has no pattern cache to turn off"
    assert remarks("DilatedAttention", pooled) == "dilated"
    production = remarks("RingDilatedAttentionProduction", replace(CONFIG, memory="fresh"))
    assert production == "dilated; not with memory fresh: its memory is always pooled"
    assert remarks("MultiheadDilatedAttention", uncached) == "dilated, with projections"


class FakeLocalAttention(nn.Module):
    """What the package local-attention computes, as its documentation says."""

    def __init__(self, window_size: int, *, causal: bool, look_backward: int) -> None:
        super().__init__()
        assert look_backward == 1
        self.window_size, self.causal = window_size, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = window_mask(q.shape[2], self.window_size, self.causal)
        by_row = [x.transpose(1, 2) for x in (q, k, v)]
        out = block_sparse_attention_reference(*by_row, mask)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)


def test_an_installed_peer_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entry_of("local_attention").why_not(False) == "the package local-attention is not installed"
    peer = ModuleType("local_attention")
    peer.LocalAttention = FakeLocalAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "local_attention", peer)
    assert check_candidate(case_of("local_attention"), "local_attention") < 2e-5
    monkeypatch.setattr(FakeLocalAttention, "forward", lambda self, q, k, v: v + 0 * (q + k))
    with pytest.raises(WrongAnswerError):
        check_candidate(case_of("local_attention"), "local_attention")


def test_a_peer_that_cannot_take_a_length_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = ModuleType("local_attention")
    peer.LocalAttention = FakeLocalAttention  # type: ignore[attr-defined]
    peer.__spec__ = importlib.machinery.ModuleSpec("local_attention", None)
    monkeypatch.setitem(sys.modules, "local_attention", peer)
    monkeypatch.setattr(module_run, "measure_in_child", lambda *_: Measured(why_not="not here"))
    case = replace(
        case_of("local_attention"), n=CONFIG.block_size + 1, candidates=("sdpa", "local_attention")
    )
    result = run_compare(case, 1, lambda _: None)
    assert set(result.seconds) == {"sdpa"}
    assert "takes multiples of its window" in result.notes["local_attention"]


def test_queries_that_no_branch_selects_are_right() -> None:
    config = replace(CONFIG, segment_lengths=(64, 256), dilation_rates=(2, 4))  # no branch of rate 1
    entry, rows = entry_of("DilatedAttention"), [0, 1, 2, 3, 511]
    tensors = make_inputs(entry, config, 1, 512, backward=True, rows=rows)
    results = run_candidate(entry.make(config, 512), tensors, True)
    error = rows_error(entry, config, tensors, results, rows)
    assert error is not None
    assert error < 2e-5


def test_windows_of_local_attention() -> None:
    seen = window_mask(9, 3, False)[0]
    assert seen[4].all()
    assert seen[0].tolist() == [True] * 6 + [False] * 3
    assert window_mask(9, 3, True)[0, 7].tolist() == [False] * 3 + [True] * 5 + [False]


def test_candidates_that_cannot_run_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(1e-6, {"peak_extra": 3 * 2**20, "peak_total": 2**30})
    monkeypatch.setattr(module_run, "measure_in_child", lambda *_: measured)
    case = case_of("flex_attention", "torchscale", "sdpa", "DilatedAttention", memory="pool")
    result = run_compare(case, 2, lambda _: None)
    assert list(result.seconds) == ["sdpa", "DilatedAttention"]
    assert [len(values) for values in result.seconds.values()] == [2, 2]
    record = Record({}, {}, (result,))
    assert from_json(to_json(record)) == record
    table = to_markdown(record)
    assert "| tiny, flex_attention |  |  |  |  | cannot run: FlexAttention has no backward pass" in table
    assert "| tiny, torchscale |  |  |  |  | cannot run: the package torchscale is not installed |" in table
    assert "| 3.0 | dense; not with memory pool: it has no pool |" in table


def test_a_child_s_wrong_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_run, "measure_in_child", lambda *_: Measured(0.1, {"peak_extra": 1}))
    with pytest.raises(WrongAnswerError, match="tiny, sdpa"):
        run_compare(case_of("sdpa"), 1, lambda _: None)


def test_speed_ups_and_tokens_a_second_follow_from_minima() -> None:
    seconds = {"sdpa": (4.0, 5.0, 3.0), "DilatedAttention": (2.0, 1.0, 3.0)}
    result = make_result(case_of("sdpa", "DilatedAttention"), 3, 0.0, seconds, {})
    assert [figure.value for figure in result.figures] == [3.0]
    row = "| tiny, DilatedAttention | 1000.0 (2000.0 ± 500.0) | 256 | 3.00 |  |  |"
    assert row in to_markdown(Record({}, {}, (result,)))


def test_comparison_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, html = tmp_path / "record.json", tmp_path / "page.html"
    sizes = ["--lengths", "256,4096", "--heads", "2", "--head-dim", "8", "--segments", "64,256"]
    what = ["--rates", "1,2", "--training", "--causal", "--threads", "1", "--repeats", "3", "--batch", "2"]
    threads = torch.get_num_threads()
    try:
        code = main(
            ["bench", "DilatedAttention", *sizes, *what, "--out", str(out), "--html", str(html), "--json"]
        )
    finally:
        torch.set_num_threads(threads)
    assert code == 0
    record = from_json(capsys.readouterr().out)
    assert record == from_json(out.read_text())
    assert record.machine["threads"] == 1
    config = ModuleConfig(2, 8, (64, 256), (1, 2), is_causal=True, block_size=64)
    for result, n in zip(record.results, (256, 4096), strict=True):
        assert result.case == CompareCase(
            f"training at {n}", config, n, ("DilatedAttention",), 2, True, None, 3
        )
        assert len(result.seconds["DilatedAttention"]) == 3
        assert result.counts["peak_total DilatedAttention"] > 2**20
        assert result.error is not None
        assert result.error < 2e-5
    results = 4 * (2 * 4096 * 2 * 8) * 4  # bytes of out and of three gradients
    assert result.counts["peak_extra DilatedAttention"] > 0.5 * results  # the rest fits into freed memory
    page = html.read_text()
    assert page.count("<svg") == 2
    assert "time, training" in page
    assert "memory, training" in page
    assert "training at 4096, DilatedAttention" in page
    assert main(["bench", "--render", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]


def test_nothing_to_measure_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "torchscale", "--lengths", "256"]) == 1
    assert "torchscale is not installed" in capsys.readouterr().out
