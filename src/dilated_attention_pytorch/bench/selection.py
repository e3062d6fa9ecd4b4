"""Which cases a command line asks for, and the list of what it may ask for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ..checks import did_you_mean
from ..spec import branches_for
from .cases import SUITES, Case, LongCase, PoolCase, describe
from .forecast_cases import ForecastCase, forecast_target
from .limit_cases import LIMIT_CONFIG, LIMITED, LimitCase, limit_case, limit_target
from .model_cases import ModelCase, model_target
from .module_candidates import ENTRIES
from .module_cases import MAIN_CANDIDATES, RATIO, CompareCase, ModuleConfig, compare_cases
from .quality_cases import QualityCase, quality_target
from .ring_cases import RingCase
from .run import TIMED
from .sparse_cases import SparseCase, sparse_targets

DEFAULT_LENGTHS = (1024, 4096, 16384)
BLOCK_SIZE = 128
# Options of the command line that suites, whose sizes are their own, do not take.
SIZES = (
    "lengths",
    "dtype",
    "forward",
    "training",
    "causal",
    "heads",
    "head_dim",
    "batch",
    "segments",
    "rates",
    "sparsity",
    "block_size",
    "memory",
    "no_pattern_cache",
)


def select_cases(options: argparse.Namespace) -> tuple[Case, ...]:
    """The cases of a command line; a `ValueError` says what is wrong with it."""
    names = tuple(dict.fromkeys(options.names))
    unknown = [name for name in names if name not in SUITES and name not in ENTRIES]
    if unknown:
        hint = did_you_mean(unknown[0], (*SUITES, *ENTRIES)) + " See --list."
        raise ValueError(f"there is no suite and no candidate {unknown[0]!r}.{hint}")
    suites = [name for name in names if name in SUITES]
    if suites and len(suites) < len(names):
        raise ValueError(f"names are suites or candidates, not both, got {', '.join(names)}")
    cases = _cases(options, names, bool(suites))
    chosen = tuple(case for case in cases if options.only in case.name)
    if not chosen:
        raise ValueError(f"no case has {options.only!r} in its name; see --list")
    if options.repeats is not None and not any(isinstance(case, TIMED) for case in chosen):
        raise ValueError(f"--repeats is for cases that are timed in rounds, got {', '.join(names)}")
    return chosen


def _cases(options: argparse.Namespace, names: tuple[str, ...], are_suites: bool) -> tuple[Case, ...]:
    if are_suites:
        if options.limit is not None:
            raise ValueError(f"--limit takes candidates, got the suite {names[0]}; `limit` is a suite too")
        if given := given_sizes(options):
            raise ValueError(f"suites have sizes of their own, got {', '.join(given)} with {names[0]}")
        return tuple(case for name in names for case in SUITES[name])
    if options.limit is not None:
        return _limit_cases(options, names or (LIMITED,))
    lengths = tuple(dict.fromkeys(options.lengths or DEFAULT_LENGTHS))
    base = ModuleConfig(8, 64, *branches_for(max(lengths), ratio=RATIO))
    passes = tuple(p for p, asked in ((False, options.forward), (True, options.training)) if asked)
    repeats = {} if options.repeats is None else {"repeats": options.repeats}
    return compare_cases(
        make_config(options, base),
        lengths,
        names or MAIN_CANDIDATES,
        passes=passes or (False,),
        b=options.batch or 1,
        **repeats,
    )


def _limit_cases(options: argparse.Namespace, names: tuple[str, ...]) -> tuple[Case, ...]:
    if options.lengths:
        raise ValueError("--limit looks for the length itself, got --lengths")
    if options.repeats is not None:
        raise ValueError("--limit runs each length once, got --repeats")
    both = options.forward == options.training
    passes = [p for p, asked in ((False, options.forward), (True, options.training)) if asked or both]
    config = make_config(options, LIMIT_CONFIG)
    more = {"b": options.batch or 1, "seconds": options.seconds}
    return tuple(
        limit_case(config, name, options.limit, backward=backward, **more)
        for name in names
        for backward in passes
    )


def given_sizes(options: argparse.Namespace) -> list[str]:
    """The options of `SIZES` that were given, as they are written."""
    values = {name: getattr(options, name) for name in SIZES}
    given = (name for name, value in values.items() if value is not None and value is not False)
    return [f"--{name.replace('_', '-')}" for name in given]


def make_config(options: argparse.Namespace, base: ModuleConfig) -> ModuleConfig:
    """`base` with what the command line says instead; checked as the library checks it."""
    if (options.segments is None) != (options.rates is None):
        raise ValueError("--segments and --rates are given together, got one of them")
    segments = options.segments or base.segment_lengths
    values: dict[str, Any] = {
        "h": options.heads,
        "d": options.head_dim,
        "segment_lengths": options.segments,
        "dilation_rates": options.rates,
        "dtype": options.dtype,
        "sparsity": options.sparsity,
        "block_size": options.block_size or min(BLOCK_SIZE, *segments),
        "memory": options.memory,
    }
    config = ModuleConfig(
        **{
            **base.__dict__,
            **{name: value for name, value in values.items() if value is not None},
            "is_causal": options.causal,
            "use_pattern_cache": not options.no_pattern_cache,
        }
    )
    _ = config.spec, config.sparse_config  # which check their fields
    return config


def list_lines() -> Iterator[str]:
    """Suites with their cases and targets, then candidates and why one cannot run here."""
    yield "suites"
    for suite, cases in SUITES.items():
        yield f"  {suite}"
        for case in cases:
            yield f"    {case.name}{case_targets(case)}"
            yield f"      {describe(case)}"
    yield "candidates"
    for name, entry in ENTRIES.items():
        main = ", compared by default" if name in MAIN_CANDIDATES else ""
        kind = f"{entry.kind}{', with projections' if entry.projects else ''}{main}"
        reasons = entry.why_not(False), entry.why_not(True)
        cannot = f"; cannot run here: {reasons[0]}" if reasons[0] else ""
        if reasons[1] and not reasons[0]:
            cannot = f"; forward only: {reasons[1]}"
        yield f"  {name:<42}{kind}{cannot}"


def case_targets(case: Case) -> str:
    """The targets of a case in brackets; empty if it has none."""
    if isinstance(case, SparseCase):
        return f"  [targets: {', '.join(found)}]" if (found := sparse_targets(case)) else ""
    if isinstance(case, RingCase):
        return "" if case.target is None else f"  [target: {case.target}]"
    if isinstance(case, ModelCase):
        return model_target(case)
    if isinstance(case, ForecastCase):
        return forecast_target(case)
    if isinstance(case, QualityCase):
        return quality_target(case)
    if isinstance(case, LimitCase):
        return limit_target(case)
    if isinstance(case, CompareCase):
        return ""
    if isinstance(case, LongCase):
        memory = [f"{case.memory_target / 2**30:.1f} GiB"] if case.memory_target else []
        targets = [*memory, *([f"time {case.time_target}"] if case.time_target else [])]
        return f"  [targets: {', '.join(targets)}]" if targets else ""
    if isinstance(case, PoolCase):
        return f"  [targets: {case.target}, lightweight {case.lightweight_target}, peak {case.memory_target}]"
    return "" if case.target is None else f"  [target: {case.target}]"
