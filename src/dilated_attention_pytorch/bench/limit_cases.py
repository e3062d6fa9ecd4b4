"""WHAT is measured of limits: the longest sequence within a budget of memory. Plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import branches_for
from .module_cases import ModuleConfig

BUDGET = 8 * 2**30
LIMITED = "DilatedAttention"
TARGETS = {False: 1_800_000, True: 700_000}  # of BUDGET with the sizes of LIMIT_CONFIG, by whether it trains
# What the requirement documents report for a GTX 1080 with 8 GB.
DOCUMENTED = {"`ImprovedDilatedAttention` with a memory pool": 65_536, "base block-sparse attention": 131_072}


@dataclass(frozen=True)
class LimitCase:
    """The longest sequence of a module whose whole process stays within `budget` bytes: run, not predicted.

    `target` is in tokens. `seconds` is the most time that the search may take.
    """

    name: str
    config: ModuleConfig
    module: str = LIMITED
    budget: int = BUDGET
    b: int = 1
    backward: bool = False
    target: int | None = None
    seconds: float | None = None
    repeats: int = 1


# Cheap branches, of which the last spans whatever fits: the limit is one of memory.
LIMIT_CONFIG = ModuleConfig(8, 64, *branches_for(2**21, first=1024, ratio=4), dtype="bfloat16")


def limit_case(
    config: ModuleConfig,
    module: str = LIMITED,
    budget: int = BUDGET,
    *,
    backward: bool = False,
    b: int = 1,
    seconds: float | None = None,
) -> LimitCase:
    """The case with its name, and with its target where its sizes are those that the target is for."""
    name = f"limit of {module}, {'training' if backward else 'forward'}"
    is_aimed = (config, module, budget, b) == (LIMIT_CONFIG, LIMITED, BUDGET, 1)
    target = TARGETS[backward] if is_aimed else None
    return LimitCase(name, config, module, budget, b, backward, target, seconds)


LIMIT_SUITE = tuple(limit_case(LIMIT_CONFIG, backward=backward) for backward in (False, True))


def describe_limit(case: LimitCase) -> str:
    """The sizes of a case in a few words."""
    config = case.config
    branches = ", ".join(f"({w}, {r})" for w, r in config.spec.branches)
    causal = ", causal" if config.is_causal else ""
    guard = "" if case.seconds is None else f", at most {case.seconds:g} s of search"
    how = "" if config.memory is None else f", memory {config.memory}"
    how += "" if config.use_pattern_cache else ", no pattern cache"
    sizes = f"b = {case.b}, h = {config.h}, d = {config.d}, {config.dtype}{causal}, branches {branches}"
    return f"{case.budget / 2**30:g} GiB, {sizes}{how}{guard}"


def limit_target(case: LimitCase) -> str:
    return "" if case.target is None else f"  [target: at least {case.target:,} tokens]"
