"""The command line of the bench room."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from .cases import DEFAULT_SUITES, SUITES, Case, LongCase, PoolCase, describe
from .figures import Figure, show_value
from .gate import WrongAnswerError
from .machine import machine_facts, project_facts
from .model_cases import ModelCase, model_target
from .pictures import draw_patterns
from .quality_cases import QualityCase, quality_target
from .record import Record, Result, from_json, to_json
from .ring_cases import RingCase
from .ring_plans import plans_table
from .run import run_case
from .sparse_cases import SparseCase, sparse_targets
from .tables import BEGIN, END, PLAN_BEGIN, PLAN_END, replace_between_markers, to_markdown

DESCRIPTION = """\
Measures dilated attention on this machine: its time against the bare kernel it is built on, its peak memory
against the bytes of its results, and how both grow up to a million positions; in the suite `pool`, what
pooled memory saves or costs; in the suite `sparse`, how much faster than dense attention block-sparse
attention is, what memory it takes, and what its patterns cost to build; in the suite `ring`, what several
ranks on this machine cost against one process, in time and in memory; and in the suite `models`, decoding
steps late in a stream, and the memory of training and of encoding a slide.

Every case is checked against the definition; a wrong answer is never reported. Targets are shown next
to the figures as met or not met. The table goes to standard output, progress to standard error.
The record is written after each case, so that an interrupted run keeps what it has measured.
"""
EPILOG = """\
exit status: 0 measured, whether or not targets are met; 1 a wrong answer; 2 a usage error.

examples:
  python -m dilated_attention_pytorch.bench quick
  python -m dilated_attention_pytorch.bench speed --repeats 15 --out speed.json
  python -m dilated_attention_pytorch.bench sparse --out sparse.json
  python -m dilated_attention_pytorch.bench ring --out ring.json
  python -m dilated_attention_pytorch.bench --plan --update docs/distributed.md
  python -m dilated_attention_pytorch.bench --render speed.json --update README.md
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown:
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}")
    suites = [SUITES[name] for name in options.suites or DEFAULT_SUITES]
    cases = [case for suite in suites for case in suite if options.only in case.name]
    if not cases:
        parser.error(f"no case of these suites has {options.only!r} in its name; see --list")
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    if options.list:
        _print_suites()
        return 0
    try:
        _check_places(options)
        if options.draw:
            print(*draw_patterns(options.draw), sep="\n")
            return 0
        if options.plan:
            _publish_plan(options.update)
            return 0
        if options.render:
            record = from_json(options.render.read_text())
        else:
            record = _measure(cases, options.repeats, options.out)
        _publish(record, options)
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dilated_attention_pytorch.bench",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = ", ".join(DEFAULT_SUITES)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"what to measure (default: {default})")
    parser.add_argument("--list", action="store_true", help="list suites and cases, measure nothing")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in their name")
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="rounds of the cases that compare times, instead of their own number",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the record as JSON, after each case")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument(
        "--update",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="put the table between the bench markers of FILE; may be given more than once",
    )
    parser.add_argument(
        "--render", type=Path, metavar="RECORD", help="measure nothing, take the figures from a JSON record"
    )
    parser.add_argument(
        "--draw",
        type=Path,
        metavar="DIR",
        help="measure nothing, paint the block patterns of the documentation",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="measure nothing, show what rings of 8 to 1024 ranks would send and hold (--update: between "
        "the plan markers)",
    )
    return parser


def _print_suites() -> None:
    for suite, cases in SUITES.items():
        print(f"{suite}{'' if suite in DEFAULT_SUITES else ' (only when named)'}")
        for case in cases:
            print(f"  {case.name}{_targets(case)}\n    {describe(case)}")


def _targets(case: Case) -> str:
    if isinstance(case, SparseCase):
        return f"  [targets: {', '.join(found)}]" if (found := sparse_targets(case)) else ""
    if isinstance(case, RingCase):
        return "" if case.target is None else f"  [target: {case.target}]"
    if isinstance(case, ModelCase):
        return model_target(case)
    if isinstance(case, QualityCase):
        return quality_target(case)
    if isinstance(case, LongCase):
        memory = [f"{case.memory_target / 2**30:.1f} GiB"] if case.memory_target else []
        targets = [*memory, *([f"time {case.time_target}"] if case.time_target else [])]
        return f"  [targets: {', '.join(targets)}]" if targets else ""
    if isinstance(case, PoolCase):
        return f"  [targets: {case.target}, lightweight {case.lightweight_target}, peak {case.memory_target}]"
    return "" if case.target is None else f"  [target: {case.target}]"


def _check_places(options: argparse.Namespace) -> None:
    """Finds out before the measurement, not after it, that its result cannot be stored."""
    if options.render and options.suites:
        raise ValueError("--render takes the figures from a record: name no suites with it")
    if options.draw and (options.suites or options.render or not options.draw.is_dir()):
        raise ValueError("--draw takes a directory that is there, and neither suites nor a record")
    if options.plan and (options.suites or options.render or options.out or options.markdown):
        raise ValueError("--plan measures nothing: of the other options it takes --update only")
    markers = (PLAN_BEGIN, PLAN_END) if options.plan else (BEGIN, END)
    for file in filter(None, (options.out, options.markdown)):
        if not file.parent.is_dir():
            raise ValueError(f"{file} cannot be written: there is no directory {file.parent}")
    for file in options.update:
        replace_between_markers(file.read_text(), "", *markers)


def _measure(cases: Sequence[Case], repeats: int | None, out: Path | None) -> Record:
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
            out.write_text(to_json(record))
    return record


def _say(text: str, prefix: str = "") -> None:
    print(f"{prefix}{text}", file=sys.stderr, flush=True)


def _summary(result: Result) -> str:
    return "\n".join(f"    {_sentence(figure, result.why_not)}" for figure in result.figures)


def _sentence(figure: Figure, why_not: str | None) -> str:
    if figure.value is None:
        return f"{figure.name}: not measured, {why_not}"
    sentence = f"{figure.name}: {show_value(figure.value, figure.unit)}"
    if figure.target is None:
        return sentence
    target = f"{'at least ' if figure.at_least else ''}{show_value(figure.target, figure.unit)}"
    return f"{sentence}, target {target} {'met' if figure.met else 'not met'}"


def _publish_plan(pages: Sequence[Path]) -> None:
    table = plans_table()
    for file in pages:
        file.write_text(replace_between_markers(file.read_text(), table, PLAN_BEGIN, PLAN_END))
    print(table, end="")


def _publish(record: Record, options: argparse.Namespace) -> None:
    table = to_markdown(record)
    if options.out and options.render:
        options.out.write_text(to_json(record))
    if options.markdown:
        options.markdown.write_text(table)
    for file in options.update:
        file.write_text(replace_between_markers(file.read_text(), table))
    print(table, end="")


if __name__ == "__main__":
    sys.exit(main())
