"""The suite of block-sparse attention: its targets, its gate, what it counts, and how it is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch import BlockPattern, block_sparse
from dilated_attention_pytorch.bench import child, measure, run, sparse_candidates, sparse_gate
from dilated_attention_pytorch.bench.cases import SUITES
from dilated_attention_pytorch.bench.child import Measured
from dilated_attention_pytorch.bench.gate import TOLERANCE, WrongAnswerError
from dilated_attention_pytorch.bench.record import Record, from_json, make_result, to_json
from dilated_attention_pytorch.bench.sparse_cases import (
    BASE,
    BUILT,
    RING,
    ModuleMemoryCase,
    PatternCase,
    SparseConfig,
    SparseEntry,
    SparseMemoryCase,
    SparseTimeCase,
)
from dilated_attention_pytorch.bench.tables import to_markdown
from support.wrong_answers import WRONG, perturbed, spoil_last_row

CONFIG = SparseConfig(2, 8, 8, "dilated_sparse", 0.3, (16, 64), (1, 2))
ENTRIES = (SparseEntry("dilated_sparse", 0.3, 2.0), SparseEntry("random", 0.2, 1.5))
CASE = SparseTimeCase("tiny", CONFIG, 101, ENTRIES, bare_n=32, backward=True, repeats=1)
MEMORY = SparseMemoryCase("tiny memory", CONFIG, 200)
BUILD = PatternCase("tiny build", CONFIG, 200, memory_target=200 * 10**6)
MODULES = ModuleMemoryCase("tiny ring", CONFIG, 200)


def patterns_of(case: SparseTimeCase) -> dict[str, BlockPattern]:
    configs = {entry.name: sparse_candidates.entry_config(case.config, entry) for entry in case.patterns}
    return {name: sparse_candidates.make_pattern(config, case.n) for name, config in configs.items()}


def test_sizes_and_targets_are_the_documented_ones() -> None:
    by_name = {case.name: case for case in SUITES["sparse"]}
    forward, both = by_name["sparse forward"], by_name["sparse forward + backward"]
    assert isinstance(forward, SparseTimeCase)
    assert isinstance(both, SparseTimeCase)
    for case in (forward, both):
        config = case.config
        assert (case.n, config.h, config.d, config.block_size, config.dtype) == (32768, 8, 64, 128, "float32")
        assert config.spec.branches == ((2048, 1), (4096, 2), (8192, 4))
    assert both.backward
    targets = {(e.pattern_type == "random", e.sparsity_ratio): e.target for e in forward.patterns}
    assert targets == {(False, 0.1): 5.0, (True, 0.1): 4.0, (False, 0.01): 25.0, (True, 0.01): 25.0}
    assert {(e.pattern_type == "random", e.target) for e in both.patterns} == {(False, 4.0), (True, 3.0)}
    assert {entry.pattern_type for entry in forward.patterns} == set(BUILT)

    memory = [case for case in by_name.values() if isinstance(case, SparseMemoryCase)]
    assert {(case.n, case.config.segment_lengths) for case in memory} == {
        (n, segments) for n in (131072, 1048576) for segments in ((2048,), (65536, 131072))
    }
    for memory_case in memory:
        config = memory_case.config
        assert (config.block_size, config.sparsity_ratio, config.dtype) == (256, 0.01, "bfloat16")
        assert (memory_case.target, memory_case.build_target) == (1.25, 0.05)
    builds = [case for case in by_name.values() if isinstance(case, PatternCase)]
    assert [case.config.pattern_type for case in builds] == list(BUILT)
    assert {(case.n, case.config.block_size, case.memory_target) for case in builds} == {
        (1048576, 128, 200 * 10**6)
    }
    ring = by_name["ring over base memory"]
    assert isinstance(ring, ModuleMemoryCase)
    assert (ring.module, ring.base, ring.target) == (RING, BASE, 1.05)


@pytest.mark.parametrize("is_causal", [False, True])
def test_right_answers_pass(is_causal: bool) -> None:
    case = replace(CASE, config=replace(CONFIG, is_causal=is_causal))
    assert sparse_gate.check_sparse_case(case, patterns_of(case)) < TOLERANCE


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_not_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        block_sparse, "block_sparse_attention", perturbed(block_sparse.block_sparse_attention, WRONG[name])
    )
    monkeypatch.setattr(run, "interleave", lambda *_, **__: pytest.fail("a wrong answer was timed"))
    with pytest.raises(WrongAnswerError, match="tiny: the result is off by"):
        run.run_case(CASE)


def test_error_at_full_length_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_gate, "reduced_sparse_error", lambda *_, **__: 0.0)
    monkeypatch.setattr(
        block_sparse, "block_sparse_attention", perturbed(block_sparse.block_sparse_attention, spoil_last_row)
    )
    with pytest.raises(WrongAnswerError, match="tiny: the result is off by"):
        sparse_gate.check_sparse_case(CASE, patterns_of(CASE))


def test_wrong_answer_in_the_child_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_in_child", lambda *_: Measured(error=0.5, nbytes={"peak_extra": 1}))
    for case in (MEMORY, MODULES):
        with pytest.raises(WrongAnswerError, match=r"off by 5\.0e-01"):
            run.run_case(case)


def test_wrong_density_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"peak_extra": 1, "pattern": 1, "layouts": 1, "blocks": 25 * 25}
    monkeypatch.setattr(run, "measure_in_child", lambda *_: Measured(nbytes=sizes))
    with pytest.raises(WrongAnswerError, match=r"tiny build: the density is 1\.0000 where 0\.3 was asked"):
        run.run_case(BUILD)
    denser = {name: BlockPattern.from_layout(torch.ones(13, 13).bool(), 101, 8) for name in patterns_of(CASE)}
    with pytest.raises(WrongAnswerError, match=r"tiny, dilated_sparse 0\.3: the density is"):
        sparse_gate.check_sparse_case(CASE, denser)


def test_low_precision_is_held_to_its_own_tolerance() -> None:
    case = replace(MEMORY, config=replace(CONFIG, dtype="bfloat16"))
    assert sparse_gate.accept_sparse(case, 2e-2) == 2e-2
    with pytest.raises(WrongAnswerError, match="more than 3e-02"):
        sparse_gate.accept_sparse(case, 4e-2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_visible_keys_are_those_of_the_dense_mask(is_causal: bool) -> None:
    config = replace(CONFIG, is_causal=is_causal, pattern_type="random")
    pattern = sparse_candidates.make_pattern(config, 101)
    dense = pattern.to_dense()
    for t in (0, 7, 8, 50, 100):
        for head in range(config.h):
            expected = dense[head, t].nonzero().flatten()
            assert torch.equal(sparse_gate.visible_keys(pattern, head, t), expected)


def test_flops_count_what_is_kept() -> None:
    patterns = patterns_of(CASE)
    flops = sparse_candidates.count_sparse_flops(replace(CASE, backward=False), patterns)
    assert flops["dense"] == 4 * 8 * 2 * 101**2
    assert flops["bare"] == 4 * 8 * 2 * 32**2
    assert flops["random 0.2"] == 4 * 8 * int(patterns["random 0.2"].to_dense().sum())
    assert sparse_candidates.count_sparse_flops(CASE, patterns)["dense"] == 7 * flops["dense"] // 2


def test_time_case_times_every_candidate() -> None:
    result = run.run_case(CASE, 3)
    rounds = {name: len(values) for name, values in result.seconds.items()}
    assert rounds == {"dense": 2, "bare": 3, "dilated_sparse 0.3": 3, "random 0.2": 3}
    assert [figure.target for figure in result.figures] == [2.0, None, 1.5, None]
    assert result.error is not None
    assert result.error < TOLERANCE


def test_children_measure_what_they_are_asked() -> None:
    if not measure.CLEAR_REFS.exists():
        pytest.skip("this platform has no /proc/self/clear_refs")
    measured = child.measure_sparse_memory(MEMORY)
    assert measured.nbytes["results"] == 4 * 200 * 2 * (8 + 1)
    assert measured.nbytes["pattern"] == sparse_candidates.make_pattern(CONFIG, 200).nbytes
    assert set(measured.seconds) == {"build", "attention"}
    assert measured.error is not None
    assert measured.error < TOLERANCE
    built = child.measure_build(BUILD, 2)
    assert (len(built.seconds["build"]), built.nbytes["layouts"]) == (2, 1)
    for name in (RING, BASE):
        module = child.measure_module(MODULES, name)
        assert module.nbytes["results"] == 4 * 200 * 2 * 8
        assert module.error is not None
        assert module.error < TOLERANCE


def test_memory_that_a_case_needs_follows_its_dtype() -> None:
    assert child.input_and_result_bytes(MEMORY) == 200 * 2 * (4 * 4 * 8 + 4)
    low = replace(MEMORY, config=replace(CONFIG, dtype="bfloat16"))
    assert child.input_and_result_bytes(low) == 200 * 2 * (4 * 2 * 8 + 4)
    assert child.input_and_result_bytes(BUILD) == 0


TIMES = {"dense": (6.0, 8.0), "bare": (1.0,), "dilated_sparse 0.3": (2.0, 4.0), "random 0.2": (5.0, 5.0)}
FLOPS = {"dense": 10 * 10**12, "bare": 2 * 10**12, "dilated_sparse 0.3": 3 * 10**12, "random 0.2": 2 * 10**12}
RESULTS = (
    make_result(CASE, 2, 1e-7, TIMES, {f"flops {name}": number for name, number in FLOPS.items()}),
    make_result(
        replace(MEMORY, config=replace(CONFIG, dtype="bfloat16")),
        1,
        1e-3,
        {"build": (0.5,), "attention": (5.0,)},
        {"peak_extra": 6 * 2**20, "results": 5 * 2**20, "pattern": 2**19, "build_peak_extra": 2**20},
    ),
    make_result(
        BUILD,
        3,
        1e-7,
        {"build": (0.25, 0.5, 0.5)},
        {"peak_extra": 2**28, "pattern": 2**20, "blocks": 9, "layouts": 1},
    ),
    make_result(
        MODULES,
        1,
        1e-7,
        {"module": (1.0,), "base": (1.0,)},
        {"peak_extra_module": 3 * 2**20, "peak_extra_base": 2 * 2**20},
    ),
    make_result(replace(MEMORY, name="elsewhere"), 1, 1e-7, {}, {}, "no /proc here"),
)
RECORD = Record(
    {"version": "1.2.3", "commit": None, "changed": False},
    {"cpu": "Some CPU", "cores": 2, "threads": 2, "torch": "9.9", "load": 0.25, "os": "Linux"},
    RESULTS,
)


def test_record_survives_json() -> None:
    assert from_json(to_json(RECORD)) == RECORD
    assert to_markdown(from_json(to_json(RECORD))) == to_markdown(RECORD)


def test_speed_ups_are_held_to_the_least_and_ratios_to_the_most() -> None:
    speed_up, share, by_chance, _ = RESULTS[0].figures
    assert (speed_up.value, speed_up.target, speed_up.met) == (3.0, 2.0, True)
    assert (share.value, share.met) == (0.75, None)
    assert (by_chance.value, by_chance.met) == (1.2, False)
    memory, build = RESULTS[1].figures
    assert (memory.value, memory.met, build.value, build.met) == (1.2, True, 0.1, False)
    assert RESULTS[2].figures[0].met is False
    assert (RESULTS[3].figures[0].value, RESULTS[3].figures[0].met) == (1.5, False)
    assert [figure.value for figure in RESULTS[4].figures] == [None, None]


def test_markdown_shows_figures_and_targets() -> None:
    text = to_markdown(RECORD)
    assert "| tiny, dense | 1.0000 | 6000.0 (7000.0 ± 500.0) | 1667 | 0.83 |  |  |" in text
    assert "| tiny, bare |  | 1000.0 | 2000 | 1.00 |  |  |" in text
    assert "| 1500 | 0.75 | 3.000 | at least 2.000, met |" in text
    assert "| 400 | 0.20 | 1.200 | at least 1.500, **not met** |" in text
    row = (
        "| tiny memory | 6.0 | 5.0 | 1.200 | 1.250, met | 0.5 | 0.500 | 5.000 | 0.100 | 0.050, **not met** |"
    )
    assert row in text
    assert "| elsewhere |  |  | not measured: no /proc here | 1.250 |" in text
    assert "| tiny build | 0.250 | 1.0 | 256.0 MiB | 190.7 MiB, **not met** |" in text
    assert "| tiny ring | 3.0 | 2.0 | 1.500 | 1.050, **not met** |" in text
    assert "float32 and bfloat16 on Some CPU" in text
    assert "blocks of 8, float32, branches (16, 1), (64, 2), the bare kernel with n = 32" in text
