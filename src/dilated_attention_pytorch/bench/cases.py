"""WHAT is measured: named suites of cases with their targets. Plain data, no tensors.

A target is what the project aims for. It stands next to the figure in every report as met or not met; missing
one is a fact about a machine and never an error.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from ..spec import branches_for
from .config import Config
from .forecast_cases import FORECAST_QUICK, FORECAST_SUITE, ForecastCase, describe_forecast
from .limit_cases import LIMIT_SUITE, LimitCase, describe_limit
from .model_cases import MODEL_KINDS, MODEL_QUICK, MODEL_SUITE, ModelCase, describe_model
from .module_cases import MODULE_QUICK, MODULE_SUITE, CompareCase, describe_compare, read_module_config
from .quality_cases import QUALITY_QUICK, QUALITY_SUITE, QualityCase, describe_quality
from .ring_cases import RING_KINDS, RING_QUICK, RING_SUITE, RingCase, RingConfig, describe_ring
from .sparse_cases import (
    SPARSE_KINDS,
    SPARSE_QUICK,
    SPARSE_SUITE,
    SparseCase,
    describe_sparse,
    read_config,
    read_entries,
)

GIB = 2**30


@dataclass(frozen=True)
class TimeCase:
    """Time of dilated attention over that of the bare kernel, summed over calls of the sizes (b, n)."""

    name: str
    config: Config
    calls: tuple[tuple[int, int], ...]
    backward: bool = False
    new_lengths: bool = False  # forget all plans before each round, as if no length had been seen before
    target: float | None = None
    repeats: int = 9


@dataclass(frozen=True)
class MemoryCase:
    """Peak memory that a call adds to its inputs, over the bytes of its results."""

    name: str
    config: Config
    n: int
    backward: bool = False
    target: float | None = None
    repeats: int = 1


@dataclass(frozen=True)
class LongCase:
    """One forward of `n` positions: peak memory in total, and time over that of `n / base_n` short calls."""

    name: str
    config: Config
    n: int
    base_n: int
    memory_target: int | None = None
    time_target: float | None = None
    repeats: int = 2


@dataclass(frozen=True)
class PoolCase:
    """Time and peak memory of calls (b, n) with pooled memory, of each kind, over those with fresh memory.

    Timed beside them, without a target: fresh memory without the pattern cache.
    """

    name: str
    config: Config
    calls: tuple[tuple[int, int], ...]
    backward: bool = False
    target: float | None = 1.03
    lightweight_target: float | None = 1.01
    memory_target: float | None = 1.10
    repeats: int = 9


DilatedCase = TimeCase | MemoryCase | LongCase | PoolCase
StudyCase = ForecastCase | QualityCase
Case = DilatedCase | SparseCase | RingCase | ModelCase | CompareCase | LimitCase | StudyCase
KINDS: dict[str, type[Case]] = {
    "time": TimeCase,
    "memory": MemoryCase,
    "long": LongCase,
    "pool": PoolCase,
    **SPARSE_KINDS,
    **RING_KINDS,
    **MODEL_KINDS,
    "compare": CompareCase,
    "limit": LimitCase,
    "forecast": ForecastCase,
    "quality": QualityCase,
}

_BRANCHES = ((2048, 4096, 8192), (1, 2, 4))
_SPEED = Config(12, 64, *_BRANCHES)
_SPEED_CAUSAL = Config(12, 64, *_BRANCHES, is_causal=True)
_SHORT = Config(8, 64, (256, 512, 1024), (1, 2, 4))
_MEMORY = Config(8, 64, *_BRANCHES)
_LONG = Config(8, 64, *branches_for(2**20, ratio=4))  # from the first position to the last
_POOL = Config(4, 64, (1024, 2048, 4096), (1, 2, 4))
_QUICK = Config(4, 16, (32, 64, 128), (1, 2, 4))
_QUICK_CAUSAL = Config(4, 16, (32, 64, 128), (1, 2, 4), is_causal=True)


def varied_calls(
    count: int, batch: tuple[int, int], length: tuple[int, int], seed: int = 0
) -> tuple[tuple[int, int], ...]:
    """`count` sizes (b, n), drawn evenly from inclusive ranges: odd lengths are as likely as even ones."""
    draw = random.Random(seed)
    return tuple((draw.randint(*batch), draw.randint(*length)) for _ in range(count))


_SHORT_CALLS = varied_calls(48, (1, 4), (256, 2048))
_ONE = ((1, 16384),)

SUITES: dict[str, tuple[Case, ...]] = {
    "speed": (
        TimeCase("forward", _SPEED, _ONE, target=1.10),
        TimeCase("causal forward", _SPEED_CAUSAL, _ONE, target=1.15),
        TimeCase("forward + backward", _SPEED, _ONE, backward=True, target=1.08),
        TimeCase("causal forward + backward", _SPEED_CAUSAL, _ONE, backward=True, target=1.08),
    ),
    "short": (
        TimeCase("short forward", _SHORT, _SHORT_CALLS, target=1.5),
        TimeCase("short forward, new lengths", _SHORT, _SHORT_CALLS, new_lengths=True, target=1.5),
        TimeCase("short forward + backward", _SHORT, _SHORT_CALLS, backward=True, target=1.5),
    ),
    "memory": (
        MemoryCase("memory of forward", _MEMORY, 131072, target=1.25),
        MemoryCase("memory of forward + backward", _MEMORY, 131072, backward=True, target=1.25),
        LongCase("a million positions", _LONG, 2**20, 2**16, memory_target=19 * GIB // 2, time_target=1.15),
    ),
    "pool": tuple(
        PoolCase(
            f"{'training' if backward else 'inference'}, {name}", _POOL, calls, backward, repeats=repeats
        )
        for backward in (False, True)
        for name, calls, repeats in (
            ("n = 512", ((1, 512),) * 16, 41),
            ("varying n", varied_calls(64, (1, 4), (256, 2048)), 7),
            ("n = 4096", ((1, 4096),), 31),
            ("n = 32768", ((1, 32768),), 9),
            ("n = 262144", ((1, 262144),), 2),
        )
    ),
    "sparse": SPARSE_SUITE,
    "ring": RING_SUITE,
    "models": MODEL_SUITE,
    "modules": MODULE_SUITE,
    "limit": LIMIT_SUITE,
    "forecast": FORECAST_SUITE,
    "quality": QUALITY_SUITE,
    # For tests and the curious: at these sizes overhead is most of what there is, so there are no targets.
    "quick": (
        TimeCase("quick forward", _QUICK, ((1, 512),), repeats=3),
        TimeCase("quick causal forward", _QUICK_CAUSAL, ((1, 512),), repeats=3),
        TimeCase("quick forward + backward", _QUICK, ((1, 512),), backward=True, repeats=3),
        TimeCase("quick short", _QUICK, varied_calls(6, (1, 4), (32, 256)), new_lengths=True, repeats=3),
        MemoryCase("quick memory", _QUICK, 16384, backward=True),
        LongCase("quick long", _QUICK, 16384, 4096, repeats=1),
        PoolCase("quick pool", _QUICK, ((1, 2048), (2, 777)), True, None, None, None, repeats=3),
        *SPARSE_QUICK,
        *RING_QUICK,
        *MODEL_QUICK,
        *MODULE_QUICK,
        *FORECAST_QUICK,
        *QUALITY_QUICK,
    ),
}


def describe(case: Case) -> str:
    """The sizes of a case in a few words."""
    if isinstance(case, SparseCase):
        return describe_sparse(case)
    if isinstance(case, RingCase):
        return describe_ring(case)
    if isinstance(case, ModelCase):
        return describe_model(case)
    if isinstance(case, CompareCase):
        return describe_compare(case)
    if isinstance(case, LimitCase):
        return describe_limit(case)
    if isinstance(case, ForecastCase):
        return describe_forecast(case)
    if isinstance(case, QualityCase):
        return describe_quality(case)
    config = case.config
    branches = ", ".join(f"({w}, {r})" for w, r in config.spec.branches)
    what = f"h = {config.h}, d = {config.d}, branches {branches}{', causal' if config.is_causal else ''}"
    if not isinstance(case, (TimeCase, PoolCase)):
        return f"n = {case.n}, {what}"
    if len(set(case.calls)) == 1:
        row = f"{len(case.calls)} calls in a row, " if len(case.calls) > 1 else ""
        return f"{row}b = {case.calls[0][0]}, n = {case.calls[0][1]}, {what}"
    b, n = zip(*case.calls, strict=True)
    return f"{len(case.calls)} calls, b = {min(b)} to {max(b)}, n = {min(n)} to {max(n)}, {what}"


def case_to_dict(case: Case) -> dict[str, Any]:
    """The case as JSON can hold it."""
    kind = next(name for name, cls in KINDS.items() if isinstance(case, cls))
    return {"kind": kind, **asdict(case)}


def case_from_dict(data: dict[str, Any]) -> Case:
    """The inverse of `case_to_dict`, also after JSON turned tuples into lists."""
    fields = dict(data)
    config = fields["config"]
    if fields["kind"] in SPARSE_KINDS:
        fields["config"] = read_config(config)
        if "patterns" in fields:
            fields["patterns"] = read_entries(fields["patterns"])
        return KINDS[fields.pop("kind")](**fields)
    if fields["kind"] in ("compare", "limit", "forecast"):
        fields["config"] = read_module_config(config)
        if "candidates" in fields:
            fields["candidates"] = tuple(fields["candidates"])
        return KINDS[fields.pop("kind")](**fields)
    branches = (tuple(config["segment_lengths"]), tuple(config["dilation_rates"]))
    if fields["kind"] in RING_KINDS:
        fields["config"] = RingConfig(
            config["h"], config["d"], *branches, config["dtype"], config["is_causal"]
        )
        for name in {"ranks", "ring_sizes"} & fields.keys():
            fields[name] = tuple(fields[name])
        return KINDS[fields.pop("kind")](**fields)
    fields["config"] = Config(config["h"], config["d"], *branches, config["is_causal"])
    if "calls" in fields:
        fields["calls"] = tuple((b, n) for b, n in fields["calls"])
    return KINDS[fields.pop("kind")](**fields)
