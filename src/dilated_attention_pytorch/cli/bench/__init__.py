"""Compares attention on this machine: modules, functions and peers by name, side by side.

Without names the main modules and dense attention are compared. Each candidate is checked against the
definition first: a wrong answer is never reported. Times are taken in turn in one process, peak memory in a
process of its own for each. The table goes to standard output, progress to standard error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import DTYPES
from ..text import byte_count, int_list, positive_int, print_json

if TYPE_CHECKING:
    from .candidates import Config
    from .record import Record

DONE, FAILED = 0, 1
EPILOG = """\
exit codes: 0 measured; 1 a wrong answer, or nothing could be measured; 2 used wrongly; 130 interrupted, with
the cases measured so far in the file of --out.

examples:
  dilated-attention bench
  dilated-attention bench sdpa DilatedAttention --lengths 4k,16k,64k --dtype bfloat16 --html bench.html
  dilated-attention bench DilatedAttention --lengths 8192 --training --memory pool --out pool.json
  dilated-attention bench --compare before.json after.json
  dilated-attention bench --limit 8GiB --out limit.json
"""
MODES = ("list", "compare", "render", "limit")
PLACES = ("out", "markdown", "html", "json")
# What the modes that measure nothing take beside themselves.
TAKES = {"list": (), "compare": ("markdown", "json"), "render": PLACES}
DEFAULT_LENGTHS = (1024, 4096, 16384)
BLOCK_SIZE = 128
RATIO = 4  # of the branches that nobody named
DENSE_LENGTH = 8192  # beyond it dense attention takes part in one round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    number: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    add = parser.add_argument
    add("names", nargs="*", metavar="name", help="candidates; --list shows them")
    add("--repeats", help="rounds of timing (default: 5)", **number)
    add("--threads", help="of each process (default: as torch chooses)", **number)
    add = parser.add_argument_group("instead of comparing").add_argument
    add("--list", action="store_true", help="list candidates, measure nothing")
    longest = (
        "the longest sequence whose whole process stays within this memory (default: 8GiB), of the named "
        "candidates or of DilatedAttention, with and without gradients; bfloat16 by default"
    )
    add("--limit", type=byte_count, nargs="?", const=8 * 2**30, metavar="BYTES", help=longest)
    search = "with --limit: the most time for each search; what is confirmed by then is reported"
    add("--seconds", type=_seconds, metavar="S", help=search)
    ratios = "two records: ratios B / A of median times with 95%% confidence intervals, and of bytes"
    add("--compare", type=Path, nargs=2, metavar=("A", "B"), help=ratios)
    add("--render", type=Path, metavar="RECORD", help="take the figures from a JSON record")
    _add_sizes(parser.add_argument_group("what candidates are asked for"))
    add = parser.add_argument_group("where the figures go").add_argument
    add("--out", type=Path, metavar="FILE", help="the record as JSON, after each case")
    add("--markdown", type=Path, metavar="FILE", help="the table as Markdown")
    add("--html", type=Path, metavar="FILE", help="a page with charts over the length")
    add("--json", action="store_true", help="print JSON instead of the table")


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--lengths", "--length", type=int_list, metavar="N,...", help="tokens (default: 1024,4096,16384)")
    add("--batch", type=positive_int, metavar="B", help="sequences (default: 1)")
    add("--heads", type=positive_int, metavar="H", help="(default: 8)")
    add("--head-dim", type=positive_int, metavar="D", help="(default: 64)")
    add("--dtype", choices=DTYPES, help="(default: float32; with --limit bfloat16)")
    add("--forward", action="store_true", help="the forward pass (default; with --limit both passes)")
    add("--training", action="store_true", help="forward and backward")
    add("--causal", action="store_true", help="no token sees a later one")
    segments = (
        "segment lengths (default: 2048 times powers of 4 until one spans the longest sequence, rates alike; "
        "with --limit 1024,4096,16384 and 1,4,16)"
    )
    add("--segments", type=int_list, metavar="W,...", help=segments)
    add("--rates", type=int_list, metavar="R,...", help="dilation rates of the segments")
    add("--sparsity", type=float, metavar="X", help="share of blocks that block patterns keep (default: 0.1)")
    block_size = "of block patterns (default: 128, or the shortest segment if that is less)"
    add("--block-size", type=positive_int, metavar="N", help=block_size)
    memory = "where calls take memory from (default: each module's own way)"
    add("--memory", choices=("fresh", "pool", "lightweight"), help=memory)
    add("--no-pattern-cache", action="store_true", help="plan every call anew")


def run(options: argparse.Namespace) -> int:
    from .gate import WrongAnswerError
    from .record import check_places, read_record

    check_modes(options)
    check_places(options.out, options.markdown, options.html)
    if options.list:
        print(*_list_lines(), sep="\n")
        return DONE
    if options.compare:
        return _compare(options)
    if options.render:
        _publish(read_record(options.render), options)
        return DONE
    try:
        record = _measure(options)
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return FAILED
    _publish(record, options)
    return DONE if any(result.seconds for result in record.results) else FAILED


def check_modes(options: argparse.Namespace) -> None:
    """Every option that is given is used: a `ValueError` names one that would not be."""
    given = [name for name, value in vars(options).items() if value not in (None, False, [])]
    modes = [name for name in given if name in MODES]
    if len(modes) > 1:
        raise ValueError(f"one of these at a time, got {' and '.join(f'--{name}' for name in modes)}")
    mode = modes[0] if modes else ""
    if mode in TAKES:
        refused = [name for name in given if name not in (mode, *TAKES[mode])]
    else:
        refused = [name for name in given if name in (("lengths", "repeats") if mode else ("seconds",))]
    words = {"names": ", ".join(options.names), "seconds": "--seconds, the time of --limit,"}
    if unused := [words.get(name, f"--{name.replace('_', '-')}") for name in refused]:
        reason = (
            "looks for the length itself, once each" if mode == "limit" else "measures nothing of that kind"
        )
        raise ValueError(f"{f'--{mode}' if mode else 'a comparison'} {reason}, got {', '.join(unused)}")


def _measure(options: argparse.Namespace) -> Record:
    import torch

    from .cases import run_case
    from .limit import run_limit
    from .measure import kernel_facts
    from .record import measure_all

    cases = _cases(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    config = cases[0].config
    kernel = kernel_facts(torch.device("cpu"), getattr(torch, config.dtype), config.d)
    run_one = run_case if options.limit is None else run_limit
    return measure_all(cases, run_one, options.out, kernel=kernel)


def _cases(options: argparse.Namespace) -> list[Any]:
    """What is measured: each length, forward first, or with --limit each candidate."""
    from ...spec import branches_for
    from .candidates import MAIN, Config, entry_of
    from .cases import Case
    from .limit import CONFIG, LIMITED, limit_case

    is_limit = options.limit is not None
    lengths = tuple(dict.fromkeys(options.lengths or DEFAULT_LENGTHS))
    names = tuple(dict.fromkeys(options.names)) or ((LIMITED,) if is_limit else MAIN)
    _ = [entry_of(name) for name in names]
    asked = ((False, options.forward), (True, options.training))
    passes = [backward for backward, is_asked in asked if is_asked]
    base = CONFIG if is_limit else Config(8, 64, *branches_for(max(lengths), ratio=RATIO))
    config, b = make_config(options, base), options.batch or 1
    if is_limit:
        passes = passes or [False, True]
        more = {"b": b, "seconds": options.seconds}
        return [limit_case(config, name, options.limit, backward=x, **more) for name in names for x in passes]
    return [
        Case(
            *(f"{'training' if backward else 'forward'} at {n}", config, n, names, b, backward),
            dense_repeats=None if n <= DENSE_LENGTH else 1,
            repeats=options.repeats or Case.repeats,
        )
        for backward in passes or [False]
        for n in lengths
    ]


def make_config(options: argparse.Namespace, base: Config) -> Config:
    """`base` with what the command line says instead; checked as the library checks it."""
    from dataclasses import replace

    if (options.segments is None) != (options.rates is None):
        raise ValueError("--segments and --rates are given together, got one of them")
    values: dict[str, Any] = {
        "h": options.heads,
        "d": options.head_dim,
        "segment_lengths": options.segments,
        "dilation_rates": options.rates,
        "dtype": options.dtype,
        "sparsity": options.sparsity,
        "block_size": options.block_size or min(BLOCK_SIZE, *(options.segments or base.segment_lengths)),
        "memory": options.memory,
        "is_causal": options.causal,
        "use_pattern_cache": not options.no_pattern_cache,
    }
    config = replace(base, **{name: value for name, value in values.items() if value is not None})
    _ = config.spec, config.sparse_config  # which check their fields
    return config


def _list_lines() -> Iterator[str]:
    """Candidates and why one cannot run here."""
    from .candidates import ENTRIES, MAIN

    for name, entry in ENTRIES.items():
        main = ", compared by default" if name in MAIN else ""
        cannot = f"; cannot run here: {entry.why_not}" if entry.why_not else ""
        cannot += f"; forward only: {entry.why_no_backward}" if entry.why_no_backward else ""
        yield f"{name:<42}{entry.kind}{', with projections' if entry.projects else ''}{main}{cannot}"


def _publish(record: Record, options: argparse.Namespace) -> None:
    """Writes the files and prints the table, or the record as JSON."""
    from . import cases, limit
    from .record import to_json, to_markdown, to_page, write_text

    sections = {"compare": cases.SECTION, "limit": limit.SECTION}
    table = to_markdown(record, sections)
    print(to_json(record) if options.json else table, end="", flush=True)
    if options.out:
        write_text(options.out, to_json(record))
    if options.markdown:
        write_text(options.markdown, table)
    if options.html:
        write_text(options.html, to_page(record, sections, cases.draw_charts(record)))


def _compare(options: argparse.Namespace) -> int:
    from .compare import compare_records, comparison_markdown
    from .record import read_record, write_text

    if options.markdown and options.markdown.resolve() in [file.resolve() for file in options.compare]:
        raise ValueError(f"--markdown must not be a record that is compared, got {options.markdown}")
    comparison = compare_records(*map(read_record, options.compare))
    table = comparison_markdown(comparison)
    if options.markdown:
        write_text(options.markdown, table)
    if options.json:
        print_json(comparison)
    else:
        print(table, end="")
    return DONE


def _seconds(text: str) -> float:
    """For argparse: a positive number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a positive number of seconds is needed, got {text!r}")
    return seconds
