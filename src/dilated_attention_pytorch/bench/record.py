"""The record of a run: JSON that holds everything measured."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ..checks import parse_json
from .cases import Case, case_from_dict, case_to_dict
from .figures import Figure, make_figures
from .measure import Timing

SCHEMA = 1


@dataclass(frozen=True)
class Result:
    """A measured case: the error its gate saw, all durations and byte counts, and the figures from them.

    `notes` says by candidate why one was not measured, or which options it did not heed.
    """

    case: Case
    repeats: int
    error: float | None
    seconds: dict[str, tuple[float, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()
    why_not: str | None = None
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """`project` and `machine` are facts by name; None stands for a fact that could not be found."""

    project: dict[str, str | bool | None]
    machine: dict[str, str | int | float | None]
    results: tuple[Result, ...]


def make_result(
    case: Case,
    repeats: int,
    error: float | None,
    seconds: dict[str, tuple[float, ...]],
    counts: dict[str, int],
    why_not: str | None = None,
    notes: dict[str, str] | None = None,
) -> Result:
    """The result with the figures that the case's kind and targets call for."""
    timings = {name: Timing(values) for name, values in seconds.items()}
    figures = make_figures(case, timings, counts)
    return Result(case, repeats, error, seconds, counts, figures, why_not, notes or {})


def to_json(record: Record) -> str:
    results = []
    for result in record.results:
        figures = [{**asdict(figure), "met": figure.met} for figure in result.figures]
        results.append({**asdict(result), "case": case_to_dict(result.case), "figures": figures})
    document = {"schema": SCHEMA, "project": record.project, "machine": record.machine, "results": results}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> Record:
    """The inverse of `to_json`. A `ValueError` says why a text is not such a record."""
    document = parse_json(text)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"a record must have schema {SCHEMA}, got {schema}")
    try:
        results = tuple(map(_read_result, document["results"]))
        facts = document["project"], document["machine"]
        if not all(isinstance(each, dict) for each in facts):
            raise TypeError("project and machine must be facts by name")
        return Record(*facts, results)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is not a complete record: {error!r}") from error


def _read_result(data: dict[str, Any]) -> Result:
    figures = tuple(_read_figure(f) for f in data["figures"])
    seconds = {name: tuple(values) for name, values in data["seconds"].items()}
    durations = [value for values in seconds.values() for value in values]
    if not all(isinstance(value, (int, float)) and 0.0 < value < math.inf for value in durations):
        raise TypeError("durations must be positive numbers")
    if not isinstance(data["counts"], dict):
        raise TypeError("counts must be numbers by name")
    case = case_from_dict(data["case"])
    measured = (data["repeats"], data["error"], seconds, data["counts"])
    return Result(case, *measured, figures, data["why_not"], data.get("notes", {}))


def _read_figure(data: dict[str, Any]) -> Figure:
    return Figure(data["name"], data["value"], data["unit"], data["target"], data.get("at_least", False))
