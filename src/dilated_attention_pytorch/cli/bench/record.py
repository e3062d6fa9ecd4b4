"""The record of a run: JSON that holds everything measured, and tables and pages rendered from it alone."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...checks import parse_json
from ..report import Page
from .measure import Timing, machine_facts, project_facts

SCHEMA = 1
Say = Callable[[str], None]


@dataclass(frozen=True)
class Figure:
    """One number that a case stands for; `value` is None where it could not be measured.

    `target` is the most that it should be, or with `at_least` the least. A missed one is a fact about a
    machine and never an error. The unit is "x", "bytes", "tokens" or "us".
    """

    name: str
    value: float | None
    unit: str = "x"
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.value is None or self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def number(self) -> str:
        return "not measured" if self.value is None else show_value(self.value, self.unit)

    @property
    def verdict(self) -> str:
        """The target and whether it is met."""
        if self.target is None:
            return ""
        words = {None: "", True: ", met", False: ", **not met**"}[self.met]
        return f"{'at least ' if self.at_least else ''}{show_value(self.target, self.unit)}{words}"


@dataclass(frozen=True)
class Result:
    """A measured case: its kind, name and sizes, the error its gate saw, all durations and counts, figures.

    `notes` says by candidate why one was not measured, or which options it did not heed.
    """

    case: dict[str, Any]
    repeats: int
    error: float | None
    seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()
    why_not: str | None = None
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.case["name"])

    def timing(self, name: str) -> Timing | None:
        return Timing(self.seconds[name]) if self.seconds.get(name) else None

    def shown(self, figure: Figure) -> list[str]:
        """The figure, or why there is none, and its target."""
        missing = figure.value is None and self.why_not
        return [f"not measured: {self.why_not}" if missing else figure.number, figure.verdict]

    def times(self, name: str, unit: str = "ms") -> str:
        """Minimum, then median and half the quartile distance; a single duration is all there is to say."""
        if (timing := self.timing(name)) is None:
            return ""
        factor = {"ms": 1e3, "µs": 1e6}[unit]
        values = (timing.minimum, timing.median, timing.spread / 2)
        minimum, median, spread = (f"{factor * value:.1f}" for value in values)
        return minimum if len(timing) == 1 else f"{minimum} ({median} ± {spread})"

    def mebibytes(self, name: str) -> str:
        return f"{self.counts[name] / 2**20:.1f}" if name in self.counts else ""


@dataclass(frozen=True)
class Record:
    """`project` and `machine` are facts by name; None stands for a fact that could not be found."""

    project: dict[str, str | bool | None]
    machine: dict[str, str | int | float | None]
    results: tuple[Result, ...]


class Table(NamedTuple):
    """A head and rows of text. As a string it is Markdown, with numbers on the right of the first column."""

    head: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        rule = ["---", *["---:"] * (len(self.head) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in [self.head, rule, *self.rows])


@dataclass(frozen=True)
class Section:
    """How results of one kind are shown: a title, a table, and the sizes of a case in a few words.

    `more` are further tables of the same results, by title.
    """

    title: str
    table: Callable[[Sequence[Result]], Table]
    describe: Callable[[dict[str, Any]], str]
    has_rounds: bool = True
    has_spread: bool = True
    more: Mapping[str, Callable[[Sequence[Result]], Table]] = field(default_factory=dict)


def measure_all(
    cases: Sequence[Any],
    measure: Callable[[Any, Say], Result],
    out: Path | None = None,
    *,
    known: Record | None = None,
    every: Sequence[Any] = (),
    workers: int = 1,
    **facts: str,
) -> Record:
    """The record of all cases, in their order, stored after each: an interrupted run keeps what it has.

    What a `known` record holds of the same cases is taken from it, and of `every` other case of the suite. Of
    `workers` that many measure at a time; `measure` then has to start a process of its own.
    """
    record = Record(project_facts(), {**machine_facts(), **facts}, ())  # before measuring raises the load
    load, cores = record.machine["load"], record.machine["cores"]
    if isinstance(load, float) and isinstance(cores, int) and load > cores / 4:
        say(f"other processes keep this machine busy (load average {load}): the figures will be noisy")
    every = every or cases
    places = {case.name: place for place, case in enumerate(every)}
    found = {} if known is None else _take_over(known, record, {x.name: case_of(x) for x in every})

    def measure_one(case: Any) -> Result:
        number = f"[{places[case.name] + 1}/{len(every)}]"
        return measure(case, lambda text: say(f"{number} {text}"))

    for result in _in_turn(measure_one, [case for case in cases if case.name not in found], workers):
        found[result.name] = result
        record = replace(record, results=tuple(sorted(found.values(), key=lambda x: places[x.name])))
        if out:
            write_text(out, to_json(record))
    return replace(record, results=tuple(found[case.name] for case in every if case.name in found))


def _in_turn(measure: Callable[[Any], Result], cases: Sequence[Any], workers: int) -> Iterable[Result]:
    """Results as they come. After an error nothing more is begun, and what is under way still comes."""
    if workers == 1:
        yield from map(measure, cases)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting, error = [pool.submit(measure, case) for case in cases], None
        try:
            for each in as_completed(waiting):
                if each.cancelled():
                    continue
                if found := each.exception():
                    error = error or found
                    for other in waiting:
                        other.cancel()  # which wakes this loop, unlike a shutdown
                else:
                    yield each.result()
        finally:
            pool.shutdown(cancel_futures=True)
    if error:
        raise error


# Facts of a machine that durations of one record have in common.
SAME = ("cpu", "cpu_capability", "torch", "threads")


def _take_over(known: Record, now: Record, wanted: Mapping[str, dict[str, Any]]) -> dict[str, Result]:
    """What was measured of the same cases, each with the commit that it is of if that is another."""
    if other := [x for x in SAME if known.machine.get(x) != now.machine.get(x)]:
        facts = ", ".join(f"{x} {known.machine.get(x)}, now {now.machine.get(x)}" for x in other)
        raise ValueError(f"a record must go on with what it was begun with, got {facts}")
    if unknown := [x.name for x in known.results if x.name not in wanted]:
        raise ValueError(f"a record must go on with cases of its own suite, got one of {', '.join(unknown)}")
    same = [x for x in known.results if wanted.get(x.name) == x.case and not x.why_not]
    commit, is_changed = known.project.get("commit"), known.project.get("changed")
    is_other = is_changed or commit != now.project.get("commit")
    told = f"{commit or 'an unknown commit'}{' with local changes' if is_changed else ''}"
    notes = {"commit": told} if is_other else {}
    return {result.name: replace(result, notes={**notes, **result.notes}) for result in same}


def say(text: str) -> None:
    """Progress, beside the table on standard output."""
    print(text, file=sys.stderr, flush=True)


def case_of(case: Any) -> dict[str, Any]:
    """A case, a dataclass with a `kind`, as a record holds it."""
    found: dict[str, Any] = json.loads(json.dumps({"kind": case.kind, **asdict(case)}))
    return found


def show_value(value: float, unit: str) -> str:
    """A value with its unit: bytes in GiB, or in MiB below one."""
    if unit == "bytes":
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
    return f"{value:.3f}" if unit == "x" else f"{value:,.0f}"


def to_json(record: Record) -> str:
    document = {"schema": SCHEMA, **asdict(record)}
    for result, written in zip(record.results, document["results"], strict=True):
        written["figures"] = [{**asdict(figure), "met": figure.met} for figure in result.figures]
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> Record:
    """The inverse of `to_json`. A `ValueError` says why a text is not such a record."""
    document = parse_json(text)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"a record must have schema {SCHEMA}, got {schema}")
    try:
        facts = document["project"], document["machine"]
        if not all(isinstance(each, dict) for each in facts):
            raise TypeError("project and machine must be facts by name")
        return Record(*facts, tuple(map(_read_result, document["results"])))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is not a complete record: {error!r}") from error


def _read_result(data: dict[str, Any]) -> Result:
    seconds = {name: tuple(values) for name, values in data["seconds"].items()}
    durations = [value for values in seconds.values() for value in values]
    if not all(isinstance(value, (int, float)) and 0.0 < value < math.inf for value in durations):
        raise TypeError("durations must be positive numbers")
    if not isinstance(data["counts"], dict):
        raise TypeError("counts must be numbers by name")
    _ = data["case"]["kind"], data["case"]["name"]
    figures = [{name: value for name, value in figure.items() if name != "met"} for figure in data["figures"]]
    return Result(**{**data, "seconds": seconds, "figures": tuple(Figure(**figure) for figure in figures)})


def read_record(file: Path) -> Record:
    try:
        return from_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be a record of the bench: {error}") from None


def to_markdown(record: Record, sections: Mapping[str, Section]) -> str:
    """Tables by kind of case, and the sentence that says where they come from."""
    parts = []
    for title, table, sizes in _tables(record, sections):
        parts += [title, str(table), *(["\n".join(f"- {sentence}" for sentence in sizes)] if sizes else [])]
    return "\n\n".join([*parts, origin(record, sections)]) + "\n"


def to_page(
    record: Record, sections: Mapping[str, Section], charts: Sequence[tuple[str | None, str]] = ()
) -> str:
    """The tables as an HTML page, below charts, each an SVG and its caption."""
    lead = "Every figure was measured after its candidate had given the right answer."
    page = Page("Attention, measured", lead)
    for svg, caption in charts:
        page.figure(svg, caption)
    for title, table, sizes in _tables(record, sections):
        title, *head = (re.sub(r"\*\*|`", "", text) for text in (title, *table.head))  # Markdown's marks
        page.heading(title)
        page.table(head, [[re.sub(r"\*\*|`", "", cell) for cell in row] for row in table.rows])
        for sentence in sizes:
            page.paragraph(sentence)
    page.paragraph(origin(record, sections))
    return page.render()


def _tables(record: Record, sections: Mapping[str, Section]) -> Iterator[tuple[str, Table, list[str]]]:
    """By kind its title, its table, and the sizes of its cases, each stated once for all that share them."""
    if unknown := {result.case["kind"] for result in record.results} - sections.keys():
        kinds = f"{', '.join(sorted(unknown))}; it holds {', '.join(sections)}"
        raise ValueError(f"this table holds no {kinds}: a record of benchmarks/ is rendered by its program")
    for kind, section in sections.items():
        if results := [result for result in record.results if result.case["kind"] == kind]:
            names: dict[str, list[str]] = {}
            for result in results:
                names.setdefault(section.describe(result.case), []).append(result.name)
            sizes = [f"{', '.join(of)}: {words}." for words, of in names.items()]
            yield section.title, section.table(results), sizes
            for title, table in section.more.items():
                yield title, table(results), []


def origin(record: Record, sections: Mapping[str, Section]) -> str:
    """Where the figures come from: version, machine and rounds."""
    project, machine = record.project, record.machine
    commit = f", commit {_short(str(project['commit']))}" if project.get("commit") else ""
    changed = " with local changes" if project.get("changed") else ""
    older = [result.notes["commit"] for result in record.results if "commit" in result.notes]
    changed += "".join(f", {_plural(older.count(x), 'case')} at {_short(x)}" for x in dict.fromkeys(older))
    dtypes = {result.case["config"].get("dtype", "float32") for result in record.results} or {"float32"}
    timed = [x for x in record.results if x.seconds and sections[x.case["kind"]].has_rounds]
    repeats = sorted({result.repeats for result in timed})
    rounds = f", {_plural(' or '.join(map(str, repeats)), 'round')}" if repeats else ""
    has_spread = any(sections[result.case["kind"]].has_spread for result in timed)
    legend = " Times: minimum (median ± half the quartile distance)." if has_spread else ""
    kernel = f", kernel {machine['kernel']}" if machine.get("kernel") else ""
    load = machine.get("load")
    threads = _plural(machine.get("threads"), "thread")
    busy = "" if load is None else f", load average {load} before the run"
    return (
        f"Version {project.get('version') or 'unknown'}{commit}{changed}; "
        f"{' and '.join(sorted(dtypes, reverse=True))} on "
        f"{machine.get('cpu')}, {machine.get('cores')} cores, {threads}{kernel}; "
        f"torch {machine.get('torch')}, {machine.get('os')}{rounds}{busy}.{legend}"
    )


def _short(text: str) -> str:
    """With hashes of commits cut to what tells them apart."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]+\b", r"\1", text)


def _plural(count: Any, noun: str) -> str:
    return f"{count} {noun}{'' if str(count) == '1' else 's'}"


def check_places(*files: Path | None) -> None:
    """Finds out before the measurement, not after it, that its result cannot be stored."""
    given = [file for file in files if file]
    if len({file.resolve() for file in given}) < len(given):
        raise ValueError(f"every file takes one thing, got one twice in {', '.join(map(str, given))}")
    for file in given:
        if not file.parent.is_dir():
            raise ValueError(f"{file} cannot be written: there is no directory {file.parent}")
        if file.is_dir():
            raise ValueError(f"{file} cannot be written: it is a directory")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ValueError(f"{file} cannot be written: it is read-only")


def write_text(file: Path, text: str) -> None:
    """Writes a file whole or not at all: a full disk leaves what was there."""
    if file.exists() and not file.is_file():  # a device such as /dev/stdout
        file.write_text(text, encoding="utf-8")
        return
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
