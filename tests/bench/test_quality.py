"""The experiment on quality: models that differ in their attention alone, and the figures of known counts."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.bench.cases import SUITES
from dilated_attention_pytorch.bench.config import Config
from dilated_attention_pytorch.bench.figures import Figure
from dilated_attention_pytorch.bench.quality_cases import (
    ATTENTIONS,
    QUALITY_QUICK,
    QUALITY_SUITE,
    QualityCase,
)
from dilated_attention_pytorch.bench.quality_run import run_quality, start_runs, train_config
from dilated_attention_pytorch.bench.record import Record, Result, from_json, make_result, to_json
from dilated_attention_pytorch.bench.tables import to_markdown
from dilated_attention_pytorch.train.config import TrainConfig

SECONDS = {"dense": (3.0, 1.0), "dilated": (1.0, 1.0), "block-sparse": (2.5, 2.5)}
COUNTS = {"bits dense": 200, "bits dilated": 203, "bits block-sparse": 210, "validation bytes": 100}


@pytest.fixture(scope="module")
def measured() -> Result:
    return run_quality(QUALITY_QUICK[0], lambda _: None)


def as_figures(result: Result) -> dict[str, Figure]:
    return {figure.name: figure for figure in result.figures}


def settings_that_differ(case: QualityCase, one: str, other: str) -> set[str]:
    configs = train_config(case, one), train_config(case, other)
    values: list[dict[str, Any]] = [
        {x.name: getattr(c, x.name) for x in fields(TrainConfig)} for c in configs
    ]
    return {name for name in values[0] if values[0][name] != values[1][name]}


@pytest.mark.parametrize("case", QUALITY_SUITE, ids=lambda case: case.name)
def test_models_differ_in_their_attention_alone(case: QualityCase) -> None:
    assert settings_that_differ(case, "dense", "dilated") == {"segment_lengths", "dilation_rates"}
    assert settings_that_differ(case, "dilated", "block-sparse") == {"kind", "attention_options"}


def test_all_begin_with_the_same_weights() -> None:
    """With weights alike, models whose attentions see everything give the same logits."""
    case = replace(QUALITY_QUICK[0], kept=1.0, config=Config(2, 16, (128,), (1,), is_causal=True))
    runs = start_runs(case, Path())
    tokens = torch.randint(256, (2, case.n), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        dense, *others = (run.model.eval()(tokens) for run in runs.values())
    for logits in others:
        torch.testing.assert_close(logits, dense, rtol=0, atol=1e-5)
    assert dense.std() > 0.01


def test_the_suite_is_of_two_contexts_and_has_the_targets_at_the_longer() -> None:
    short, long = SUITES["quality"]
    assert isinstance(short, QualityCase)
    assert isinstance(long, QualityCase)
    assert short.n < long.n
    assert short.batch_tokens * short.steps == long.batch_tokens * long.steps
    assert (long.quality_target, long.time_target) == (1.02, 1.0)


def test_figures_of_known_counts() -> None:
    figures = as_figures(make_result(QUALITY_SUITE[1], 1, 1e-7, SECONDS, COUNTS))
    assert figures["dense: bits per byte"].value == 2.0
    assert figures["dilated: bits over dense"].value == pytest.approx(1.015)
    assert figures["dilated: bits over dense"].met
    assert figures["dilated: time over dense"].value == 0.5
    assert figures["block-sparse: time over dense"].value == 1.25
    assert figures["block-sparse: time over dense"].met is None
    worse = make_result(QUALITY_SUITE[1], 1, 1e-7, SECONDS, {**COUNTS, "bits dilated": 205})
    assert as_figures(worse)["dilated: bits over dense"].met is False


def test_table_shows_each_attention_with_its_verdict() -> None:
    result = make_result(QUALITY_SUITE[1], 1, 1e-7, SECONDS, {**COUNTS, "bits dilated": 205})
    record = Record({"version": "1"}, {"cpu": "x"}, (result,))
    assert to_markdown(from_json(to_json(record))) == to_markdown(record)
    rows = [line for line in to_markdown(record).splitlines() if line.startswith("| context")]
    assert [row.split(" | ")[0] for row in rows] == [f"| context 8192, {name}" for name in ATTENTIONS]
    assert "2.050 | 1.025 | 1.020, **not met** | 2 | 0.500 | 1.000, met" in rows[1]


def test_a_run_trains_and_validates_all(measured: Result) -> None:
    case = measured.case
    assert isinstance(case, QualityCase)
    assert measured.error is not None
    assert measured.error < 1e-5
    assert set(measured.seconds) == set(ATTENTIONS)
    assert all(len(steps) == case.steps and min(steps) > 0 for steps in measured.seconds.values())
    bits = [as_figures(measured)[f"{name}: bits per byte"].value for name in ATTENTIONS]
    assert all(value is not None and 4.0 < value < 8.0 for value in bits)  # 8 bits know nothing
    assert len(set(bits)) == len(ATTENTIONS)  # three attentions, not thrice the same


def test_runs_repeat(measured: Result) -> None:
    again = run_quality(QUALITY_QUICK[0], lambda _: None)
    assert again.counts == measured.counts
