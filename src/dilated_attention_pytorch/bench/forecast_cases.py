"""WHAT is forecast and then measured: calls of many kinds. Plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from .module_cases import BASELINE, CompareCase, ModuleConfig

DILATED = "dilated_attention"


@dataclass(frozen=True)
class ForecastCase:
    """Time over dense attention and peak memory of a call: by what factor `plan` is off, either way."""

    name: str
    config: ModuleConfig
    n: int
    backward: bool = False
    time_target: float | None = 1.25
    memory_target: float | None = 1.10
    repeats: int = 3

    @property
    def compared(self) -> CompareCase:
        """The measurement that the forecast is held against."""
        return CompareCase(self.name, self.config, self.n, (BASELINE, DILATED), backward=self.backward)


def _case(
    name: str, n: int, h: int, d: int, branches: tuple[tuple[int, ...], tuple[int, ...]]
) -> ForecastCase:
    """Causal and with gradients if the name says so."""
    config = ModuleConfig(h, d, *branches, is_causal="causal" in name)
    return ForecastCase(name, config, n, "training" in name)


_TWO, _THREE, _NEAR = ((2048, 8192), (1, 4)), ((512, 2048, 8192), (1, 4, 16)), ((64, 256), (1, 4))
_DOUBLING = ((1024, 2048, 4096, 8192), (1, 2, 4, 8))

FORECAST_SUITE = (
    _case("two branches", 16384, 4, 64, _TWO),
    _case("two branches, causal", 16384, 4, 64, _TWO),
    _case("two branches, training", 16384, 4, 64, _TWO),
    _case("two branches, causal training", 16384, 4, 64, _TWO),
    _case("small heads, causal", 16384, 8, 32, _THREE),
    _case("small heads, causal training", 16384, 8, 32, _THREE),
    _case("large heads", 8192, 8, 128, _THREE),
    _case("large heads, doubling, training", 8192, 8, 128, _DOUBLING),
    _case("doubling", 16384, 4, 64, _DOUBLING),
    _case("doubling, causal", 16384, 4, 64, _DOUBLING),
    _case("short segments", 16384, 4, 64, _NEAR),
    _case("short segments, causal training", 16384, 4, 64, _NEAR),
    _case("longer sequence", 32768, 2, 64, ((2048, 8192, 32768), (1, 4, 16))),
    _case("many heads, causal", 8192, 16, 64, ((256, 1024, 4096, 16384), (1, 4, 16, 64))),
    _case("one segment, causal", 8192, 8, 64, ((8192,), (1,))),
)
_QUICK = ModuleConfig(2, 16, (32, 128), (1, 2))
FORECAST_QUICK = (ForecastCase("quick forecast", _QUICK, 256, False, None, None, repeats=2),)


def describe_forecast(case: ForecastCase) -> str:
    """The sizes of a case in a few words."""
    config = case.config
    branches = ", ".join(f"({w}, {r})" for w, r in config.spec.branches)
    return f"n = {case.n}, h = {config.h}, d = {config.d}, branches {branches}"


def forecast_target(case: ForecastCase) -> str:
    if case.time_target is None:
        return ""
    return f"  [targets: time {case.time_target}, memory {case.memory_target}]"
