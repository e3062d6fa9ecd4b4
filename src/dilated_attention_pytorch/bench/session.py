"""A run of the bench: cases measured one by one, and the record published."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .cases import Case
from .figures import Figure, show_value
from .machine import machine_facts, project_facts
from .pages import to_page
from .record import Record, Result, to_json
from .run import run_case
from .tables import replace_between_markers, to_markdown


@dataclass(frozen=True)
class Places:
    """Where a record goes: files, pages with the markers `name`, and standard output as table or JSON."""

    out: Path | None = None
    markdown: Path | None = None
    html: Path | None = None
    update: tuple[Path, ...] = ()
    name: str = "bench"
    json: bool = False

    @property
    def markers(self) -> tuple[str, str]:
        return f"<!-- {self.name}:begin -->", f"<!-- {self.name}:end -->"

    def check(self) -> None:
        """Finds out before the measurement, not after it, that its result cannot be stored."""
        files = [file for file in (self.out, self.markdown, self.html, *self.update) if file]
        if len({file.resolve() for file in files}) < len(files):
            raise ValueError(f"every file takes one thing, got one twice in {', '.join(map(str, files))}")
        for file in files:
            if not file.parent.is_dir():
                raise ValueError(f"{file} cannot be written: there is no directory {file.parent}")
            if file.is_dir():
                raise ValueError(f"{file} cannot be written: it is a directory")
            if not os.access(file if file.exists() else file.parent, os.W_OK):
                raise ValueError(f"{file} cannot be written: it is read-only")
        for file in self.update:
            replace_between_markers(file.read_text(encoding="utf-8"), "", *self.markers)


def measure_cases(cases: Sequence[Case], repeats: int | None, out: Path | None) -> Record:
    """Measures all cases; the record is written after each, so that an interrupted run keeps what it has."""
    project = project_facts()
    machine = machine_facts()  # before the measurement itself raises the load
    load, cores = machine["load"], machine["cores"]
    if isinstance(load, float) and isinstance(cores, int) and load > cores / 4:
        _say(f"other processes keep this machine busy (load average {load}): the figures will be noisy")
    results = []
    for number, case in enumerate(cases, 1):
        result = run_case(case, repeats, partial(_say, prefix=f"[{number}/{len(cases)}] "))
        _say(_summary(result))
        results.append(result)
        record = Record(project, machine, tuple(results))
        if out:
            write_text(out, to_json(record))
    return record


def publish(record: Record, places: Places) -> None:
    """Writes the files and prints the table, or the record as JSON."""
    table = to_markdown(record)
    print(to_json(record) if places.json else table, end="", flush=True)
    if places.out:
        write_text(places.out, to_json(record))
    if places.markdown:
        write_text(places.markdown, table)
    if places.html:
        write_text(places.html, to_page(record))
    update_pages(table, places)


def update_pages(table: str, places: Places) -> None:
    for file in places.update:
        write_text(file, replace_between_markers(file.read_text(encoding="utf-8"), table, *places.markers))


def write_text(file: Path, text: str) -> None:
    """Writes a file whole or not at all: a full disk leaves what was there."""
    if not file.is_file():  # new, or a device such as /dev/stdout
        file.write_text(text, encoding="utf-8")
        return
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def _say(text: str, prefix: str = "") -> None:
    print(f"{prefix}{text}", file=sys.stderr, flush=True)


def _summary(result: Result) -> str:
    lines = [_sentence(figure, result.why_not) for figure in result.figures]
    lines += [f"{name}: {note}" for name, note in result.notes.items() if name not in result.seconds]
    return "\n".join(f"    {line}" for line in lines)


def _sentence(figure: Figure, why_not: str | None) -> str:
    if figure.value is None:
        return f"{figure.name}: not measured, {why_not}"
    sentence = f"{figure.name}: {show_value(figure.value, figure.unit)}"
    if figure.target is None:
        return sentence
    target = f"{'at least ' if figure.at_least else ''}{show_value(figure.target, figure.unit)}"
    return f"{sentence}, target {target} {'met' if figure.met else 'not met'}"
