"""Holds the forecasts of a call against what it takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..forecast import Call, predict_memory, relative_time
from ..plan import Shape
from .forecast_cases import DILATED, ForecastCase
from .module_run import run_compare
from .record import Result, make_result


def run_forecast(case: ForecastCase, repeats: int, say: Callable[[str], None]) -> Result:
    """Forecasts first, then measures as `bench` compares."""
    config = case.config
    shape = Shape(1, case.n, config.h, config.h, config.d)
    call = Call(shape, getattr(torch, config.dtype), config.spec, case.backward)
    memory, time = predict_memory(call), relative_time(call)
    assert time is not None  # this is a CPU
    measured = run_compare(case.compared, repeats, say)
    counts = {"time forecast, millionths": round(1e6 * time), "peak forecast": memory.peak}
    extra = measured.counts.get(f"peak_extra {DILATED}")
    if extra is not None:
        counts["peak measured"] = memory.inputs + extra
    return make_result(case, repeats, measured.error, measured.seconds, counts, measured.why_not)
