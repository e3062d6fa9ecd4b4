"""What the suites share: the call under test, its gate, the bare kernel, the command line of a suite.

A suite is a module with `CASES` and `QUICK` (dataclasses with a `kind`), `run` (a case to its result) and
`SECTIONS` (how a kind is shown), perhaps with `draw` (a record to an SVG). Timing, child processes, records
and tables are those of the package.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch import functional
from dilated_attention_pytorch.cli.bench import gate
from dilated_attention_pytorch.cli.bench.cases import show_branches
from dilated_attention_pytorch.cli.bench.gate import WrongAnswerError
from dilated_attention_pytorch.cli.bench.measure import (
    Measured,
    read_status,
    reset_peak_memory,
)
from dilated_attention_pytorch.cli.bench.record import (
    Figure,
    Record,
    Result,
    Say,
    case_of,
    check_places,
    measure_all,
    read_record,
    say,
    to_markdown,
    write_text,
)
from dilated_attention_pytorch.cli.report import Series, line_chart
from dilated_attention_pytorch.reference import dilated_attention_reference
from dilated_attention_pytorch.spec import DilatedSpec, Execution

RESULTS = Path(__file__).resolve().parent / "results"
REDUCED_LENGTH = 256
WARMUP_LENGTH = 1024
INK, PAPER = "#1d2125", "#ffffff"
NO_CHARTS = "the picture is drawn by matplotlib: pip install 'dilated-attention[charts]'"
# Tensors of a candidate lie one after the other in memory and start over beyond this many elements: enough to
# leave every cache between two uses of a row, and little enough to fit beside the other candidate.
ARENA_NUMEL = 2**25
FORWARD_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclasses.dataclass(frozen=True)
class Config:
    """Dilated attention of a case: heads, head size, branches and dtype.

    One branch has rate 1, so that every position attends to something.
    """

    h: int
    d: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    is_causal: bool = False
    dtype: str = "float32"

    @property
    def spec(self) -> DilatedSpec:
        return DilatedSpec(self.segment_lengths, self.dilation_rates, self.is_causal)

    @property
    def branches(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.segment_lengths, self.dilation_rates

    def keys(self, n: int, t: int) -> gate.Keys:
        return gate.dilated_keys(self.spec, self.h, n, t)


QUICK_CONFIG = Config(4, 16, (32, 64, 128), (1, 2, 4))


def attend(
    config: Any, q: Tensor, k: Tensor, v: Tensor, *, memory: str = "fresh", use_pattern_cache: bool = True
) -> Any:
    """out and lse of the library under test: the one call that is checked and measured."""
    how = Execution(memory=memory, use_pattern_cache=use_pattern_cache)
    return functional.dilated_attention(q, k, v, config.spec, return_lse=True, execution=how)


class Call(NamedTuple):
    """One call: what gives out and lse, its inputs (b, n, h, d), and the query rows that are checked."""

    attend: Callable[..., Any]
    inputs: list[Tensor]
    grad_out: Tensor | None
    rows: Mapping[int, gate.Keys]

    def run(self) -> list[Tensor]:
        """out and lse, and the gradients of the inputs if the call has a `grad_out`."""
        return gate.call(self.attend, self.inputs, self.grad_out)

    def error(self, results: Sequence[Tensor], has_lse: bool = True) -> float:
        return gate.compare_rows(self.inputs, self.grad_out, results, self.rows, has_lse)


def make_call(config: Config, b: int, n: int, *, backward: bool = False, seed: int = 0, **how: Any) -> Call:
    rows = gate.choose_rows(config.segment_lengths[0], n, seed)
    shape = (b, n, config.h, config.d)
    inputs, grad_out = gate.make_inputs(shape, config.dtype, backward=backward, rows=rows, seed=seed)
    keys = {t: config.keys(n, t) for t in rows}
    return Call(lambda *qkv: attend(config, *qkv, **how), inputs, grad_out, keys)


def reduced_error(config: Any, n: int, *, backward: bool) -> float:
    """Error against the dense reference, everything about `n / REDUCED_LENGTH` times shorter."""
    factor = max(1, n // REDUCED_LENGTH)
    segment_lengths = tuple(max(r, w // factor) for w, r in config.spec.branches)
    config = dataclasses.replace(config, segment_lengths=segment_lengths)
    n = (n // factor + 36) | 1  # odd and past a boundary, so that no branch fits evenly
    inputs, grad_out = gate.make_inputs((1, n, config.h, config.d), config.dtype, backward=backward)
    reference = partial(dilated_attention_reference, segment_lengths=config.spec, return_lse=True)
    return max(gate.compare(partial(attend, config), reference, inputs, grad_out))


class Arena:
    """Random memory from which contiguous tensors are cut, one after the other."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], seed: int, dtype: str = "float32") -> None:
        sizes = [math.prod(shape) for shape in shapes]
        numel = min(sum(sizes), max([ARENA_NUMEL, *sizes]))
        generator = torch.Generator().manual_seed(seed)
        self.memory = torch.randn(numel, generator=generator, dtype=getattr(torch, dtype))
        self.position = 0

    def take(self, shape: tuple[int, ...]) -> Tensor:
        numel = math.prod(shape)
        if self.position + numel > self.memory.numel():
            self.position = 0
        start, self.position = self.position, self.position + numel
        return self.memory[start : start + numel].view(shape)


def arena_calls(config: Config, calls: Sequence[tuple[int, int]]) -> list[list[Tensor]]:
    """q, k, v and the gradient of out of every call (b, n)."""
    shapes = [(b, n, config.h, config.d) for b, n in calls]
    arenas = [Arena(shapes, seed, config.dtype) for seed in range(4)]
    return [[arena.take(shape) for arena in arenas] for shape in shapes]


def run_calls(config: Config, calls: Sequence[Sequence[Tensor]], backward: bool, **how: Any) -> None:
    """All calls through the public function; with `backward` the gradients of q, k and v."""
    for q, k, v, grad_out in calls:
        leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
        out, _ = attend(config, *leaves, **how)
        if backward:
            torch.autograd.grad(out, leaves, grad_out)


def measure_once(function: Callable[[], Any]) -> tuple[Any, dict[str, int], float]:
    """What a function gives, the peak memory that it adds to what is there, and its seconds."""
    before, start = reset_peak_memory(), time.perf_counter()
    found = function()
    seconds = time.perf_counter() - start
    return found, {"peak_extra": read_status("VmHWM") - before}, seconds


def ratio(counts: Mapping[str, float], over: str, under: str) -> float | None:
    return counts[over] / counts[under] if counts.keys() >= {over, under} else None


def time_figures(found: Measured, name: str, base: str, target: float | None = None) -> list[Figure]:
    """Ratios of minima, which the target is for, and of medians."""
    result = Result({}, 0, None, found.seconds)
    one, other = result.timing(name), result.timing(base)
    minima = one.minimum / other.minimum if one and other else None
    medians = one.median / other.median if one and other else None
    return [Figure("time ratio of minima", minima, target=target), Figure("time ratio of medians", medians)]


def run_case(case: Any, say: Say) -> Result:
    """The result of a case that measures itself, with its figures."""
    found: Measured = case.run(say)
    measured = (found.error, found.seconds, found.counts, tuple(case.figures(found)), found.why_not)
    return Result(case_of(case), case.repeats, *measured)


def gather(
    case: Any, parts: Mapping[str, Measured], error: float | None = None, separator: str = " "
) -> Measured:
    """What several processes measured, counts and times with their part's name; refuses wrong answers."""
    counts, seconds, why_not = {}, {}, None
    for part, found in parts.items():
        end = f"{separator}{part}" if part else ""
        counts |= {f"{name}{end}": count for name, count in found.counts.items()}
        seconds |= {f"{name}{end}": values for name, values in found.seconds.items()}
        why_not = why_not or found.why_not
        if found.error is not None:
            dtype = getattr(case.config, "dtype", "float32")
            error = max(error or 0.0, gate.accept(case.name, found.error, dtype))
    return Measured(error, counts, seconds, why_not)


def show_config(config: dict[str, Any]) -> str:
    causal = ", causal" if config["is_causal"] else ""
    dtype = config.get("dtype", "float32")  # which older records leave out
    precision = "" if dtype == "float32" else f", {dtype}"
    return f"h = {config['h']}, d = {config['d']}, {show_branches(config)}{causal}{precision}"


def picture(series: Sequence[Series], **how: Any) -> str:
    """A line chart as a file of its own."""
    svg = line_chart(series, **how)
    if svg is None:
        raise ValueError(NO_CHARTS)
    return as_file(svg)


def as_file(svg: str) -> str:
    """An `<svg>` on paper: as a file it has no page around it, whose colours it could take."""
    head, rest = svg.split(">", 1)
    return f'{head}><rect width="100%" height="100%" fill="{PAPER}"/>{rest}\n'.replace("currentColor", INK)


def replace_between_markers(text: str, table: str, name: str) -> str:
    """The text with everything between the markers of a name replaced by the table."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text must hold one {begin} and after it one {end}")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{table.strip()}\n\n{end}{after}"


def update_page(page: Path, table: str, name: str = "bench") -> None:
    write_text(page, replace_between_markers(page.read_text(encoding="utf-8"), table, name))


def main(name: str, arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """The program of a suite; 1 for a wrong answer, 2 for a wrong command line."""
    suite: Any = import_module(name)  # by its name, so that child processes find its functions
    record_file = RESULTS / f"{name}.json"
    parser = argparse.ArgumentParser(
        prog=prog or f"benchmarks/{name}.py",
        description=suite.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small cases without targets, in seconds")
    add("--only", default="", metavar="TEXT", help="only cases with TEXT in their name")
    add("--list", action="store_true", help="list the cases, measure nothing")
    add("--repeats", type=int, metavar="N", help="rounds of the cases that are timed in rounds")
    add("--out", type=Path, metavar="FILE", help="write the record as JSON, after each case")
    add("--resume", action="store_true", help="measure only what the record of --out lacks")
    if hasattr(suite, "WORKERS"):
        text = f"cases at a time, in processes of one thread (default: {suite.WORKERS})"
        add("--workers", type=int, default=suite.WORKERS, metavar="N", help=text)
    else:
        add("--threads", type=int, metavar="N", help="of each process (default: as torch chooses)")
    stored = f"measure nothing, take the figures from a record (default: results/{name}.json)"
    add("--render", type=Path, nargs="?", const=record_file, metavar="RECORD", help=stored)
    pages = "put the table between the markers of PAGE; may be given more than once"
    add("--update", type=Path, action="append", default=[], metavar="PAGE", help=pages)
    add("--markers", default="bench", metavar="NAME", help="<!-- NAME:begin --> and end (default: bench)")
    if hasattr(suite, "draw"):
        add("--picture", type=Path, metavar="FILE", help="draw the record into FILE, an SVG")
    if hasattr(suite, "summary"):
        add(
            "--summary",
            action="store_true",
            help="what the record says in a sentence, in place of its tables",
        )
    options = parser.parse_args(arguments)
    picture = getattr(options, "picture", None)
    every = suite.QUICK if options.quick else suite.CASES
    if options.repeats is not None:
        repeats = options.repeats
        every = [dataclasses.replace(x, repeats=repeats) if x.repeats > 1 else x for x in every]
    cases = [case for case in every if options.only in case.name]
    if not cases:
        parser.error(f"no case has {options.only!r} in its name; see --list")
    if options.resume and not options.out:
        parser.error("--resume goes on with the record of --out, got none")
    try:
        check_places(options.out, picture, *options.update)
        for page in options.update:
            replace_between_markers(page.read_text(encoding="utf-8"), "", options.markers)
        if options.list:
            for case in cases:
                print(f"{case.name}: {suite.SECTIONS[case.kind].describe(case_of(case))}")
            return 0
        record = read_record(options.render) if options.render else _measure(suite, every, cases, options)
        is_short = getattr(options, "summary", False)
        table = suite.summary(record) if is_short else to_markdown(record, suite.SECTIONS)
        if picture:
            write_text(picture, suite.draw(record))
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(table, end="")
    for page in options.update:
        update_page(page, table, options.markers)
    return 0


def _measure(suite: Any, every: Sequence[Any], cases: Sequence[Any], options: argparse.Namespace) -> Record:
    workers = getattr(options, "workers", 1)
    threads = 1 if hasattr(options, "workers") else options.threads
    before = torch.get_num_threads()

    def run(case: Any, say_of_case: Say) -> Result:
        result: Result = suite.run(case, say_of_case)
        for figure in result.figures:
            say(f"    {figure.name}: {', target '.join(filter(None, result.shown(figure)))}")
        return result

    known = read_record(options.out) if options.resume and options.out.exists() else None
    torch.set_num_threads(before if threads is None else threads)
    try:
        return measure_all(cases, run, options.out, known=known, every=every, workers=workers)
    finally:
        torch.set_num_threads(before)
