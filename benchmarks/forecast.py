"""Forecasts of `dilated-attention plan` against what is measured: time over dense attention, peak memory.

python benchmarks/forecast.py --out benchmarks/results/forecast.json
python benchmarks/forecast.py --render --update docs/command_line.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from common import Say, main, ratio, run_case, show_branches

from dilated_attention_pytorch.cli.bench.candidates import BASELINE, Config
from dilated_attention_pytorch.cli.bench.cases import Case, run_case as compare
from dilated_attention_pytorch.cli.bench.measure import Measured
from dilated_attention_pytorch.cli.bench.record import Figure, Result, Section, Table
from dilated_attention_pytorch.cli.forecast import Call, predict_memory, relative_time
from dilated_attention_pytorch.plan import Shape

DILATED = "dilated_attention"


@dataclass(frozen=True)
class ForecastCase:
    """Time over dense attention and peak memory of a call: by what factor `plan` is off, either way."""

    name: str
    config: Config
    n: int
    backward: bool = False
    time_target: float | None = 1.25
    memory_target: float | None = 1.10
    repeats: int = 3
    kind: ClassVar[str] = "forecast"

    def run(self, say: Say) -> Measured:
        """Forecasts first, then measures as `dilated-attention bench` compares."""
        config = self.config
        shape = Shape(1, self.n, config.h, config.h, config.d)
        call = Call(shape, getattr(torch, config.dtype), config.spec, self.backward)
        memory, time = predict_memory(call), relative_time(call)
        assert time is not None  # this is a CPU
        names = (BASELINE, DILATED)
        found = compare(
            Case(self.name, config, self.n, names, backward=self.backward, repeats=self.repeats), say
        )
        counts = {"time forecast, millionths": round(1e6 * time), "peak forecast": memory.peak}
        if (extra := found.counts.get(f"peak_extra {DILATED}")) is not None:
            counts["peak measured"] = memory.inputs + extra
        return Measured(found.error, counts, found.seconds, found.why_not)

    def figures(self, found: Measured) -> list[Figure]:
        """By what factors the forecasts are off, whichever way."""
        measured = min(found.seconds[DILATED]) / min(found.seconds[BASELINE])
        time = found.counts["time forecast, millionths"] / 1e6 / measured
        memory = ratio(found.counts, "peak forecast", "peak measured")
        off = None if memory is None else max(memory, 1 / memory)
        return [
            Figure("forecast of time, off by", max(time, 1 / time), target=self.time_target),
            Figure("forecast of memory, off by", off, target=self.memory_target),
        ]


_TWO, _THREE, _NEAR = ((2048, 8192), (1, 4)), ((512, 2048, 8192), (1, 4, 16)), ((64, 256), (1, 4))
_DOUBLING = ((1024, 2048, 4096, 8192), (1, 2, 4, 8))
# Causal and with gradients if the name says so.
CASES = tuple(
    ForecastCase(name, Config(h, d, *branches, is_causal="causal" in name), n, "training" in name)
    for name, n, h, d, branches in (
        ("two branches", 16384, 4, 64, _TWO),
        ("two branches, causal", 16384, 4, 64, _TWO),
        ("two branches, training", 16384, 4, 64, _TWO),
        ("two branches, causal training", 16384, 4, 64, _TWO),
        ("small heads, causal", 16384, 8, 32, _THREE),
        ("small heads, causal training", 16384, 8, 32, _THREE),
        ("large heads", 8192, 8, 128, _THREE),
        ("large heads, doubling, training", 8192, 8, 128, _DOUBLING),
        ("doubling", 16384, 4, 64, _DOUBLING),
        ("doubling, causal", 16384, 4, 64, _DOUBLING),
        ("short segments", 16384, 4, 64, _NEAR),
        ("short segments, causal training", 16384, 4, 64, _NEAR),
        ("longer sequence", 32768, 2, 64, ((2048, 8192, 32768), (1, 4, 16))),
        ("many heads, causal", 8192, 16, 64, ((256, 1024, 4096, 16384), (1, 4, 16, 64))),
        ("one segment, causal", 8192, 8, 64, ((8192,), (1,))),
    )
)
QUICK = (ForecastCase("quick forecast", Config(2, 16, (32, 128), (1, 2)), 256, False, None, None, repeats=2),)


def describe(case: dict[str, Any]) -> str:
    config = case["config"]
    return f"n = {case['n']}, h = {config['h']}, d = {config['d']}, {show_branches(config)}"


def make_table(results: Sequence[Result]) -> Table:
    """What was forecast and measured, and by what factor it was off."""
    rows = []
    for result in results:
        time, memory = result.figures
        measured = min(result.seconds[DILATED]) / min(result.seconds[BASELINE])
        times = [f"{result.counts['time forecast, millionths'] / 1e6:.3f}", f"{measured:.3f}"]
        peaks = [result.mebibytes(f"peak {name}") for name in ("forecast", "measured")]
        cells = [*times, time.number, time.verdict, *peaks, memory.number, memory.verdict]
        rows.append([result.name, *cells])
    head = ["case", "time over dense, forecast", "measured", "off by", "target"]
    return Table([*head, "peak, forecast, MiB", "measured, MiB", "off by", "target"], rows)


TITLE = "**Forecasts** of `plan` against what was measured"
SECTIONS = {"forecast": Section(TITLE, make_table, describe, has_spread=False)}
run = run_case

if __name__ == "__main__":
    sys.exit(main("forecast"))
