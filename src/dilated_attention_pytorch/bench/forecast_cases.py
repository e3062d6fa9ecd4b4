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
    n: int, h: int, d: int, segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...], how: str = ""
) -> ForecastCase:
    config = ModuleConfig(h, d, segment_lengths, dilation_rates, is_causal="causal" in how)
    name = f"n = {n}, h = {h}, d = {d}, {len(dilation_rates)} from {segment_lengths[0]}"
    return ForecastCase(f"{name}{how and f', {how}'}", config, n, "training" in how)


_TWO, _THREE, _NEAR = ((2048, 8192), (1, 4)), ((512, 2048, 8192), (1, 4, 16)), ((64, 256), (1, 4))
_DOUBLING = ((1024, 2048, 4096, 8192), (1, 2, 4, 8))

FORECAST_SUITE = (
    _case(16384, 4, 64, *_TWO),
    _case(16384, 4, 64, *_TWO, "causal"),
    _case(16384, 4, 64, *_TWO, "training"),
    _case(16384, 4, 64, *_TWO, "causal training"),
    _case(16384, 8, 32, *_THREE, "causal"),
    _case(16384, 8, 32, *_THREE, "causal training"),
    _case(8192, 8, 128, *_THREE),
    _case(8192, 8, 128, *_DOUBLING, "training"),
    _case(16384, 4, 64, *_DOUBLING),
    _case(16384, 4, 64, *_DOUBLING, "causal"),
    _case(16384, 4, 64, *_NEAR),
    _case(16384, 4, 64, *_NEAR, "causal training"),
    _case(32768, 2, 64, (2048, 8192, 32768), (1, 4, 16)),
    _case(8192, 16, 64, (256, 1024, 4096, 16384), (1, 4, 16, 64), "causal"),
    _case(8192, 8, 64, (8192,), (1,), "causal"),
)
_QUICK = ModuleConfig(2, 16, (32, 128), (1, 2))
FORECAST_QUICK = (ForecastCase("quick forecast", _QUICK, 256, False, None, None, repeats=2),)


def describe_forecast(case: ForecastCase) -> str:
    """What the name does not say: the branches."""
    return f"branches {', '.join(f'({w}, {r})' for w, r in case.config.spec.branches)}"


def forecast_target(case: ForecastCase) -> str:
    if case.time_target is None:
        return ""
    return f"  [targets: time {case.time_target}, memory {case.memory_target}]"
