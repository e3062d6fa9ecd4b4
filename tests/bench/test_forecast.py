"""Forecasts held against measurements: figures of known counts, and what a run compares."""

from __future__ import annotations

import pytest

from dilated_attention_pytorch.bench.cases import SUITES
from dilated_attention_pytorch.bench.figures import make_figures
from dilated_attention_pytorch.bench.forecast_cases import FORECAST_QUICK, FORECAST_SUITE, ForecastCase
from dilated_attention_pytorch.bench.measure import Timing
from dilated_attention_pytorch.bench.record import Record, from_json, make_result, to_json
from dilated_attention_pytorch.bench.run import run_case
from dilated_attention_pytorch.bench.tables import to_markdown

SECONDS = {"sdpa": (1.0, 1.5), "dilated_attention": (0.5, 0.25)}


def off_by(millionths: int, forecast: int, measured: int) -> list[float | None]:
    counts = {"time forecast, millionths": millionths, "peak forecast": forecast, "peak measured": measured}
    timings = {name: Timing(values) for name, values in SECONDS.items()}
    return [figure.value for figure in make_figures(FORECAST_SUITE[0], timings, counts)]


def test_errors_count_either_way() -> None:
    assert off_by(250_000, 100, 100) == [1.0, 1.0]
    assert off_by(200_000, 110, 100) == pytest.approx([1.25, 1.1])
    assert off_by(300_000, 100, 110) == pytest.approx([1.2, 1.1])


def test_the_suite_has_configurations_of_many_kinds() -> None:
    cases = [case for case in SUITES["forecast"] if isinstance(case, ForecastCase)]
    assert len(cases) >= 12
    assert len({case.name for case in cases}) == len(cases)
    assert {(case.backward, case.config.is_causal) for case in cases} == {
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    }
    assert len({(case.n, case.config.h, case.config.d) for case in cases}) >= 5
    assert all((case.time_target, case.memory_target) == (1.25, 1.10) for case in cases)


def test_table_shows_both_forecasts_with_verdicts() -> None:
    counts = {"time forecast, millionths": 400_000, "peak forecast": 2**20, "peak measured": 2**20}
    record = Record({}, {}, (make_result(FORECAST_SUITE[0], 2, 1e-7, SECONDS, counts),))
    assert to_markdown(from_json(to_json(record))) == to_markdown(record)
    row = "| two branches | 0.400 | 0.250 | 1.600 | 1.250, **not met** | 1.0 | 1.0 | 1.000 | 1.100, met |"
    assert row in to_markdown(record)


def test_a_run_measures_what_was_forecast() -> None:
    said: list[str] = []
    result = run_case(FORECAST_QUICK[0], 2, said.append)
    assert result.error is not None
    assert result.error < 1e-5
    assert set(result.seconds) == set(SECONDS)
    assert result.counts["peak measured"] > 0
    assert result.counts["time forecast, millionths"] > 0
    assert any("checking dilated_attention" in line for line in said)
