"""Measures attention on this machine: modules by name, side by side, or named suites of cases with targets.

Without names the main modules and dense attention are compared; with names of candidates, those; with names
of suites, their cases. Each candidate is checked against the definition first: a wrong answer is never
reported. Times are taken in turn in one process, peak memory in a process of its own for each.
The table goes to standard output, progress to standard error. A missed target is a fact, not an error."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .bench_options import add_arguments, check_modes
from .text import print_json

if TYPE_CHECKING:
    from ..bench.record import Record
    from ..bench.session import Places

__all__ = ["add_arguments", "run"]

DONE, FAILED = 0, 1


def run(options: argparse.Namespace) -> int:
    from ..bench.gate import WrongAnswerError

    check_modes(options)
    try:
        return _run_mode(options)
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return FAILED


def _run_mode(options: argparse.Namespace) -> int:
    from ..bench.selection import list_lines
    from ..bench.session import publish

    places = _places(options)
    places.check()
    if options.list:
        print(*list_lines(), sep="\n")
        return DONE
    if options.draw:
        from ..bench.pictures import draw_patterns

        print(*draw_patterns(options.draw), sep="\n")
        return DONE
    if options.plan:
        return _publish_plan(places)
    if options.compare:
        return _compare(options.compare, places)
    if options.render:
        publish(_read(options.render), places)
        return DONE
    return _measure(options, places)


def _measure(options: argparse.Namespace, places: Places) -> int:
    import torch

    from ..bench.selection import select_cases
    from ..bench.session import measure_cases, publish

    cases = select_cases(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    record = measure_cases(cases, options.repeats, options.out)
    publish(record, places)
    return DONE if any(result.seconds or result.counts for result in record.results) else FAILED


def _publish_plan(places: Places) -> int:
    from ..bench.ring_plans import plans_table
    from ..bench.session import update_pages

    table = plans_table()
    update_pages(table, places)
    print(table, end="")
    return DONE


def _compare(files: list[Path], places: Places) -> int:
    from ..bench.compare import as_dict, compare_records, comparison_markdown
    from ..bench.session import write_text

    if places.markdown and places.markdown.resolve() in [file.resolve() for file in files]:
        raise ValueError(f"--markdown must not be a record that is compared, got {places.markdown}")
    comparison = compare_records(*map(_read, files))
    table = comparison_markdown(comparison)
    if places.markdown:
        write_text(places.markdown, table)
    if places.json:
        print_json(as_dict(comparison))
    else:
        print(table, end="")
    return DONE


def _read(file: Path) -> Record:
    from ..bench.record import from_json

    try:
        return from_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be a record of the bench: {error}") from None


def _places(options: argparse.Namespace) -> Places:
    from ..bench.session import Places

    name = options.markers or ("plan" if options.plan else "bench")
    return Places(options.out, options.markdown, options.html, tuple(options.update), name, options.json)
