"""The record of a run: JSON that holds everything measured, and Markdown rendered from it alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .cases import Case, LongCase, MemoryCase, PoolCase, TimeCase, case_from_dict, case_to_dict, describe
from .measure import Timing

SCHEMA = 1
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


@dataclass(frozen=True)
class Figure:
    """One number that a case stands for; `value` is None where it could not be measured."""

    name: str
    value: float | None
    unit: Literal["x", "bytes"] = "x"
    target: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.value is None or self.target is None else self.value <= self.target


@dataclass(frozen=True)
class Result:
    """A measured case: the error its gate saw, all durations and byte counts, and the figures from them."""

    case: Case
    repeats: int
    error: float | None
    seconds: dict[str, tuple[float, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()
    why_not: str | None = None


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
) -> Result:
    """The result with the figures that the case's kind and targets call for."""
    timings = {name: Timing(values) for name, values in seconds.items()}
    figures: tuple[Figure, ...]
    if isinstance(case, TimeCase):
        figures = _time_figures(timings.get("dilated"), timings.get("bare"), case.target)
    elif isinstance(case, MemoryCase):
        ratio = counts["peak_extra"] / counts["results"] if counts else None
        figures = (Figure("peak extra memory over bytes of results", ratio, target=case.target),)
    elif isinstance(case, PoolCase):
        figures = tuple(_pool_figures(case, timings, counts))
    else:
        peak = Figure("peak memory", counts.get("peak_total"), "bytes", case.memory_target)
        figures = (peak, *_time_figures(timings.get("long"), timings.get("base"), case.time_target))
    return Result(case, repeats, error, seconds, counts, figures, why_not)


def _pool_figures(case: PoolCase, timings: dict[str, Timing], counts: dict[str, int]) -> Iterator[Figure]:
    """By kind of memory the ratio of minimal times to that with fresh memory; then of peak memory."""
    fresh = timings["fresh"].minimum
    targets = {"pool": case.target, "lightweight": case.lightweight_target, "manager": case.target}
    for name, target in targets.items():
        yield Figure(f"time with {name}", timings[name].minimum / fresh, target=target)
    yield Figure("time with no plan cache", timings["no plan cache"].minimum / fresh)
    for name in ("pool", "manager"):
        measured = counts.keys() >= {"peak_fresh", f"peak_{name}"}
        ratio = counts[f"peak_{name}"] / counts["peak_fresh"] if measured else None
        yield Figure(f"peak memory with {name}", ratio, target=case.memory_target)


def _time_figures(
    measured: Timing | None, baseline: Timing | None, target: float | None
) -> tuple[Figure, Figure]:
    """Ratios of minima, which the target is for, and of medians."""
    if measured is None or baseline is None:
        return Figure("time ratio of minima", None, target=target), Figure("time ratio of medians", None)
    minima, medians = measured.minimum / baseline.minimum, measured.median / baseline.median
    return Figure("time ratio of minima", minima, target=target), Figure("time ratio of medians", medians)


def to_json(record: Record) -> str:
    results = []
    for result in record.results:
        figures = [{**asdict(figure), "met": figure.met} for figure in result.figures]
        results.append({**asdict(result), "case": case_to_dict(result.case), "figures": figures})
    document = {"schema": SCHEMA, "project": record.project, "machine": record.machine, "results": results}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> Record:
    """The inverse of `to_json`. A `ValueError` says why a text is not such a record."""
    document = json.loads(text)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"a record must have schema {SCHEMA}, got {schema}")
    try:
        results = tuple(map(_read_result, document["results"]))
        return Record(document["project"], document["machine"], results)
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is not a complete record: {error!r}") from error


def _read_result(data: dict[str, Any]) -> Result:
    figures = tuple(Figure(f["name"], f["value"], f["unit"], f["target"]) for f in data["figures"])
    seconds = {name: tuple(values) for name, values in data["seconds"].items()}
    case = case_from_dict(data["case"])
    return Result(case, data["repeats"], data["error"], seconds, data["counts"], figures, data["why_not"])


def to_markdown(record: Record) -> str:
    """Tables by kind of case, and the sentence that says where they come from."""
    kinds = [
        ("**Time** over that of the bare kernel on ready-made tiles", TimeCase, _time_table),
        ("**Memory** that a call adds to its inputs", MemoryCase, _memory_table),
        ("**Pooled memory**: time and peak memory over those with fresh memory", PoolCase, _pool_table),
        ("**Long**: one call against as many short ones as give its length", LongCase, _long_table),
    ]
    parts = []
    for title, kind, table in kinds:
        results = [result for result in record.results if isinstance(result.case, kind)]
        if results:
            parts += [title, table(results), _descriptions(results)]
    return "\n\n".join([*parts, _origin(record)]) + "\n"


def replace_between_markers(text: str, table: str) -> str:
    """The text with everything between the two bench markers replaced by the table."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text must hold one {BEGIN} and after it one {END}")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table.strip()}\n\n{END}{after}"


def _time_table(results: Iterable[Result]) -> str:
    rows = []
    for result in results:
        bare, dilated = (Timing(result.seconds[name]) for name in ("bare", "dilated"))
        minimum, median = result.figures
        speed = f"{result.counts['flops'] / dilated.minimum / 1e9:.0f}"
        times = [_milliseconds(bare), _milliseconds(dilated)]
        rows.append([result.case.name, *times, speed, _number(minimum), _number(median), _verdict(minimum)])
    head = ["case", "bare, ms", "dilated, ms", "GFLOP/s", "ratio of minima", "of medians", "target"]
    return _table(head, rows)


def _memory_table(results: Iterable[Result]) -> str:
    rows = []
    for result in results:
        peak, nbytes = (_mebibytes(result.counts.get(name)) for name in ("peak_extra", "results"))
        rows.append([result.case.name, peak, nbytes, *_shown(result, result.figures[0])])
    return _table(["case", "peak extra, MiB", "results, MiB", "ratio", "target"], rows)


def _long_table(results: Iterable[Result]) -> str:
    rows = []
    for result in results:
        seconds = {name: f"{Timing(values).minimum:.2f} s" for name, values in result.seconds.items()}
        peak, minimum, _ = result.figures
        times = [seconds.get("base", ""), seconds.get("long", "")]
        rows.append([result.case.name, *_shown(result, peak), *times, *_shown(result, minimum)])
    head = ["case", "peak memory", "target", "short calls", "long call", "ratio of minima", "target"]
    return _table(head, rows)


def _pool_table(results: Iterable[Result]) -> str:
    rows = []
    for result in results:
        milliseconds = _milliseconds(Timing(result.seconds["fresh"]))
        cells = [_pool_cell(figure) for figure in result.figures]
        peak = _mebibytes(result.counts.get("peak_extra_fresh"))
        rows.append([result.case.name, milliseconds, *cells[:4], peak, *cells[4:]])
    head = ["case", "fresh, ms", "pool", "lightweight", "manager", "no plan cache"]
    return _table([*head, "fresh, extra MiB", "peak, pool", "peak, manager"], rows)


def _pool_cell(figure: Figure) -> str:
    return f"**{_number(figure)}**" if figure.met is False else _number(figure)


def _shown(result: Result, figure: Figure) -> list[str]:
    if figure.value is None and result.why_not:
        return [f"not measured: {result.why_not}", _verdict(figure)]
    return [_number(figure), _verdict(figure)]


def _table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def _verdict(figure: Figure) -> str:
    if figure.target is None:
        return ""
    words = {None: "", True: ", met", False: ", **not met**"}[figure.met]
    return f"{_number(Figure('', figure.target, figure.unit))}{words}"


def _number(figure: Figure) -> str:
    if figure.value is None:
        return "not measured"
    return f"{figure.value / 2**30:.2f} GiB" if figure.unit == "bytes" else f"{figure.value:.3f}"


def _milliseconds(timing: Timing) -> str:
    """Minimum, then median and quartile distance."""
    minimum, median, spread = (1e3 * value for value in (timing.minimum, timing.median, timing.spread))
    return f"{minimum:.1f} ({median:.1f} ± {spread / 2:.1f})"


def _mebibytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:.1f}"


def _descriptions(results: Iterable[Result]) -> str:
    """Sizes of the cases, each stated once with the cases that share them."""
    names: dict[str, list[str]] = {}
    for result in results:
        names.setdefault(describe(result.case), []).append(result.case.name)
    return "\n".join(f"- {', '.join(shared)}: {sizes}." for sizes, shared in names.items())


def _origin(record: Record) -> str:
    project, machine = record.project, record.machine
    commit = f", commit {str(project['commit'])[:12]}" if project.get("commit") else ""
    changed = " with local changes" if project.get("changed") else ""
    repeats = sorted({result.repeats for result in record.results if result.seconds})
    rounds = f", {' or '.join(map(str, repeats))} rounds" if repeats else ""
    legend = " Times: minimum (median ± half the quartile distance)." if repeats else ""
    load = machine.get("load")
    busy = "" if load is None else f", load average {load} before the run"
    return (
        f"Version {project.get('version') or 'unknown'}{commit}{changed}; float32 on {machine.get('cpu')}, "
        f"{machine.get('cores')} cores, {machine.get('threads')} threads; torch {machine.get('torch')}, "
        f"{machine.get('os')}{rounds}{busy}.{legend}"
    )
