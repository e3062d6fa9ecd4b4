"""The cases of models: what they check, what they count, how they are shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilated_attention_pytorch.bench.cases import SUITES, case_from_dict, case_to_dict
from dilated_attention_pytorch.bench.gate import TOLERANCE
from dilated_attention_pytorch.bench.model_cases import (
    MODEL_QUICK,
    DecodeCase,
    ModelCase,
    SlideCase,
    TrainCase,
)
from dilated_attention_pytorch.bench.model_child import (
    _filled_cache,
    _scaled_error,
    _step_error,
    make_model,
    measure_model,
)
from dilated_attention_pytorch.bench.record import Record, make_result
from dilated_attention_pytorch.bench.run import run_case
from dilated_attention_pytorch.bench.tables import to_markdown

DECODE, TRAIN, SLIDE = MODEL_QUICK
assert isinstance(DECODE, DecodeCase)
assert isinstance(TRAIN, TrainCase)


def test_the_suite_asks_for_what_is_promised() -> None:
    decode, train, slide = SUITES["models"]
    assert isinstance(decode, DecodeCase)
    assert (decode.early, decode.late, decode.target) == (20_000, 1_000_000, 1.15)
    assert max(decode.config.segment_lengths) == 16384
    assert isinstance(train, TrainCase)
    assert (train.layers, train.n) == (12, 32768)
    assert isinstance(slide, SlideCase)
    assert (slide.tiles, slide.memory_target) == (10_000, 4 * 10**9)


def test_segments_are_filled_alike_at_the_third_position() -> None:
    positions = DECODE.positions
    period = max(DECODE.config.segment_lengths)
    assert positions["alike"] >= positions["late"] > positions["early"]
    assert positions["alike"] % period == positions["early"] % period


@pytest.mark.parametrize("n", [0, 1, 127, 128, 300])
def test_a_step_is_held_to_the_definition(n: int) -> None:
    cache = _filled_cache(DECODE.config, n)
    assert _step_error(DECODE.config, cache) < TOLERANCE
    assert cache.num_tokens == n + 1


def test_a_cache_with_a_wrong_key_is_noticed() -> None:
    cache = _filled_cache(DECODE.config, 300)
    for buffer in cache._buffers.values():
        buffer[0, :, :, 0] += 1.0
    assert _step_error(DECODE.config, cache) > 100 * TOLERANCE


def test_a_gradient_that_is_missing_or_wrong_is_noticed() -> None:
    weight = next(make_model(TRAIN, False).parameters()).detach()
    assert _scaled_error(None, weight) == float("inf")
    assert _scaled_error(weight * 1.001, weight * 1.0) > 10 * TOLERANCE
    assert _scaled_error(weight * 1e-9, weight * 1e-9) < 1e-6


@pytest.mark.parametrize("case", MODEL_QUICK, ids=lambda case: case.name)
def test_cases_survive_json_and_are_measured(case: ModelCase) -> None:
    assert case_from_dict(case_to_dict(case)) == case
    error, counts, seconds = measure_model(case, 1, "checkpointed")
    assert error < TOLERANCE
    assert all(count > 0 for count in counts.values())
    assert all(second > 0 for values in seconds.values() for second in values)


def test_a_training_case_compares_with_and_without_checkpoints() -> None:
    result = run_case(replace(TRAIN, n=512))
    plain, spared, ratio = (figure.value for figure in result.figures)
    assert plain is not None
    assert spared is not None
    assert ratio == pytest.approx(spared / plain)
    table = to_markdown(Record({}, {}, (result,)))
    assert "quick training, plain" in table
    assert "quick training, checkpointed" in table


def test_figures_of_decoding_are_ratios_to_the_early_step() -> None:
    seconds = {"early": (2.0, 3.0), "late": (2.2, 4.0), "alike": (1.8, 1.9)}
    counts = {"cache early": 100, "cache late": 100, "cache alike": 100}
    result = make_result(replace(DECODE, target=1.15), 2, 0.0, seconds, counts)
    late, alike, memory = result.figures
    assert (late.value, late.met) == (pytest.approx(1.1), True)
    assert (alike.value, memory.value, memory.met) == (pytest.approx(0.9), 1.0, True)
    assert "at 3,000" in to_markdown(Record({}, {}, (result,)))
