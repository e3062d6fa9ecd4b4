"""The cases are what the documentation says is measured."""

from __future__ import annotations

import json

import pytest

from dilated_attention_pytorch.bench.cases import (
    GIB,
    SUITES,
    Case,
    LongCase,
    MemoryCase,
    PoolCase,
    TimeCase,
    case_from_dict,
    case_to_dict,
    describe,
    varied_calls,
)
from dilated_attention_pytorch.bench.module_candidates import ENTRIES

CASES = [case for cases in SUITES.values() for case in cases]
BY_NAME = {case.name: case for case in CASES}


def test_names_are_unique_and_no_suite_is_called_like_a_candidate() -> None:
    assert len(BY_NAME) == len(CASES)
    assert not set(SUITES) & set(ENTRIES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_survives_json_and_describes_itself(case: Case) -> None:
    assert case_from_dict(json.loads(json.dumps(case_to_dict(case)))) == case
    assert f"h = {case.config.h}" in describe(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_position_attends_to_something(case: Case) -> None:
    assert 1 in case.config.dilation_rates


def test_targets_stand_in_the_cases() -> None:
    targets = {
        case.name: case.target for case in CASES if isinstance(case, (TimeCase, MemoryCase)) and case.target
    }
    assert targets == {
        "forward": 1.10,
        "causal forward": 1.15,
        "forward + backward": 1.08,
        "causal forward + backward": 1.08,
        "short forward": 1.5,
        "short forward, new lengths": 1.5,
        "short forward + backward": 1.5,
        "memory of forward": 1.25,
        "memory of forward + backward": 1.25,
    }
    long = BY_NAME["a million positions"]
    assert isinstance(long, LongCase)
    assert (long.n, long.base_n) == (1048576, 65536)
    assert (long.memory_target, long.time_target) == (9.5 * GIB, 1.15)


def test_sizes_are_the_documented_ones() -> None:
    for case in SUITES["speed"]:
        assert isinstance(case, TimeCase)
        assert (case.calls, case.config.h, case.config.d) == (((1, 16384),), 12, 64)
        assert case.config.spec.branches == ((2048, 1), (4096, 2), (8192, 4))
    for case in SUITES["short"]:
        assert isinstance(case, TimeCase)
        assert (case.config.h, case.config.d) == (8, 64)
        assert case.config.spec.branches == ((256, 1), (512, 2), (1024, 4))
    for case in SUITES["memory"]:
        assert isinstance(case, (MemoryCase, LongCase))
        assert (case.config.h, case.config.d) == (8, 64)


def test_pooled_memory_is_measured_from_short_to_long() -> None:
    cases = SUITES["pool"]
    lengths = {n for case in cases if isinstance(case, PoolCase) for _, n in case.calls}
    assert lengths >= {512, 4096, 32768, 262144}
    assert {case.backward for case in cases if isinstance(case, PoolCase)} == {False, True}
    for case in cases:
        assert isinstance(case, PoolCase)
        assert (case.target, case.lightweight_target, case.memory_target) == (1.03, 1.01, 1.10)


def test_varied_calls_are_seeded_and_span_the_ranges() -> None:
    calls = varied_calls(48, (1, 4), (256, 2048))
    assert calls == varied_calls(48, (1, 4), (256, 2048))
    assert calls != varied_calls(48, (1, 4), (256, 2048), seed=1)
    batches, lengths = zip(*calls, strict=True)
    assert set(batches) == {1, 2, 3, 4}
    assert min(lengths) >= 256
    assert max(lengths) <= 2048
    assert len(set(lengths)) > 40
    assert {n % 2 for n in lengths} == {0, 1}
