"""A first look at the library on this machine, written up as a page of HTML.

Checks the library against its definition; measures time and memory of dense, dilated and block-sparse
attention as the length doubles; trains a small language model on the source of Python's own library and lets
it write. It needs no network and about two and a half minutes on two cores. Ctrl-C ends it early; the report
then holds what was found until then.

    dilated-attention demo
    dilated-attention demo --seconds 20 --train-seconds 20 --out look.html
"""

from __future__ import annotations

import argparse
import io
import math
import os
import queue
import shlex
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .text import positive_int, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.exactness import Check
    from .demo_costs import Row
    from .demo_training import Training

DONE, FAILED, INTERRUPTED = 0, 1, 130
WIDTH = 78
TITLE = "dilated attention: exact, and its cost grows with length, not with its square"
# Times in milliseconds, then the speed-up of dilated over dense attention, then peaks of memory in MiB.
HEADINGS = ("tokens", "dense ms", "dilated", "blocks", "speed-up", "dense MiB", "dilated", "blocks")
WIDTHS = (10, 10, 9, 9, 10, 11, 9, 9)
SAMPLE_LINES = 6
SPARKS = "▁▂▃▄▅▆▇█"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    seconds: dict[str, Any] = {"type": float, "default": 60.0, "metavar": "S"}
    parser.add_argument("--seconds", help="time that the measurements may take (default: 60)", **seconds)
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--train-seconds", help="time that the training may take; 0 trains nothing (default: 60)", **seconds
    )
    length.add_argument(
        "--steps", type=positive_int, metavar="N", help="train so many steps, however long they take"
    )
    report = Path("dilated-attention-demo.html")
    parser.add_argument(
        "--out", type=Path, default=report, metavar="FILE", help=f"the report (default: {report})"
    )
    parser.add_argument(
        "--json", action="store_true", help="print what was found as JSON; progress goes to standard error"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the demo and writes its report; 1 if the library is not exact here, 130 after Ctrl-C."""
    check_options(options)
    from .demo_report import make_page

    view = choose_view(options.json)
    found = gather(view, options.seconds, options.train_seconds, options.steps)
    options.out.write_text(make_page(found, command_of(options)).render(), encoding="utf-8")
    view.say("", *textwrap.wrap(found.summary, WIDTH), "", style="bold")
    view.say(f"The report is in {options.out}", style="bold cyan")
    if options.json:
        print_json(found.to_json() | {"report": str(options.out)})
    if found.is_interrupted:
        return INTERRUPTED
    return DONE if found.is_exact and not found.has_failed else FAILED


def check_options(options: argparse.Namespace) -> None:
    """Refuses, before anything is measured, what could not be done or written."""
    if not 0 < options.seconds < math.inf:
        raise ValueError(f"--seconds must be positive, got {options.seconds}")
    if not 0 <= options.train_seconds < math.inf:
        raise ValueError(f"--train-seconds must be 0 or more, got {options.train_seconds}")
    folder = options.out.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"--out must lie in a directory that is there, got {options.out}")
    if options.out.is_dir():
        raise ValueError(f"--out must be a file, got the directory {options.out}")
    if not os.access(options.out if options.out.exists() else folder, os.W_OK):
        raise ValueError(f"--out must be a file that can be written, got {options.out}")


def command_of(options: argparse.Namespace) -> str:
    """The command line that does the same again."""
    words = ["dilated-attention", "demo", "--seconds", f"{options.seconds:g}"]
    if options.steps is not None:
        words += ["--steps", str(options.steps)]
    else:
        words += ["--train-seconds", f"{options.train_seconds:g}"]
    return shlex.join([*words, "--out", str(options.out)])


class View:
    """Lines, each when it is known; with a console of rich in colours, over a line of what is being done."""

    def __init__(self, stream: IO[str], console: Console | None = None) -> None:
        self.stream, self.console = stream, console

    def say(self, *lines: str, style: str = "") -> None:
        for line in lines:
            if self.console is None:
                print(line, file=self.stream, flush=True)
            else:
                self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def section(self, title: str, text: str = "", style: str = "dim") -> None:
        self.say("", title, style="bold cyan")
        self.say(*textwrap.wrap(text, WIDTH, initial_indent="   ", subsequent_indent="   "), style=style)

    @contextmanager
    def doing(self, text: str) -> Iterator[Callable[[str], None]]:
        """Yields what tells how far it is."""
        if self.console is None:
            yield lambda text: None
        else:
            with self.console.status(text) as status:
                yield status.update


def choose_view(is_json: bool) -> View:
    """With rich on a terminal that has it installed, plain lines everywhere else."""
    stream = sys.stderr if is_json else sys.stdout
    if isinstance(stream, io.TextIOWrapper):  # a model may write characters that a terminal does not know
        stream.reconfigure(errors="replace")
    if not stream.isatty():
        return View(stream)
    try:
        from rich.console import Console
    except ImportError:
        print("For a live view: pip install 'dilated-attention[demo]'\n", file=stream)
        return View(stream)
    return View(stream, Console(file=stream))


@dataclass
class Findings:
    """All that the report says; an interrupted demo found a part of it.

    `why_no_peaks` and `why_no_training` say why these are missing, where it was not for an interruption.
    """

    machine: dict[str, Any]
    project: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    why_no_peaks: str | None = None
    training: Training | None = None
    why_no_training: str | None = None
    seconds: float = 0.0
    is_interrupted: bool = False
    has_failed: bool = False  # an error ended the training, and `why_no_training` names it

    @property
    def is_exact(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def summary(self) -> str:
        """The result in a few sentences that hold measured figures only."""
        from .demo_costs import summarize

        sentences = ["Stopped early."] if self.is_interrupted else []
        passed, total = sum(check.passed for check in self.checks), len(self.checks)
        if not self.is_exact:
            failing = f"{total - passed} of {total} checks fail."
            return " ".join([*sentences, f"The library is not exact here: {failing}"])
        sentences += [f"{passed} of {total} checks against the definition pass.", summarize(self.rows)]
        training = self.training
        if training is not None and training.validations:
            sentences.append(
                f"In {training.seconds:.0f} s a model of {training.parameters:,} parameters learned to "
                f"predict Python source to {training.validations[-1][1]:.2f} bits per byte."
            )
        return " ".join([*sentences, *([self.why_no_training or ""] if self.has_failed else [])])

    def to_json(self) -> dict[str, Any]:
        """The findings as JSON has them."""
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        return {"summary": self.summary, **asdict(self), "checks": checks}


def gather(view: View, seconds: float, train_seconds: float, steps: int | None) -> Findings:
    """Checks, measures and trains, as long as Ctrl-C does not end it; `steps` goes before `train_seconds`."""
    from ..bench.machine import machine_facts, project_facts
    from . import demo_costs, demo_training

    begin = time.perf_counter()
    found = Findings(machine_facts(), project_facts())  # first: they hold the load of others
    found.why_no_peaks = demo_costs.why_no_peaks()
    try:
        check(view, found)
        if found.is_exact:
            measure(view, found, seconds)
        files = demo_training.source_files()
        if not found.is_exact:
            found.why_no_training = "The library is not exact here, so nothing was trained."
        elif train_seconds == 0 and steps is None:
            found.why_no_training = "No training was asked for."
        elif not files:
            found.why_no_training = "This Python comes without the source of its library."
        else:
            learn(view, found, files, train_seconds, steps)
    except KeyboardInterrupt:
        found.is_interrupted = True
    found.seconds = time.perf_counter() - begin
    return found


def check(view: View, found: Findings) -> None:
    import torch

    from ..bench import exactness
    from .demo_costs import HEAD_DIM, HEADS

    threads = f"{torch.get_num_threads()} CPU threads"
    view.say(TITLE, style="bold")
    view.say(f"torch {torch.__version__}, {threads}, float32, {HEADS} heads of {HEAD_DIM}", style="dim")
    limit = f"(float64, limit {exactness.TOLERANCE:.0e})"
    view.section(f"1. Exactness: largest difference from the definition {limit}")
    view.say(f"   {'':<26}{'forward':>9}{'gradients':>12}", style="dim")
    for each in exactness.run_checks():
        found.checks.append(each)
        errors = f"{each.forward_error:>9.1e}{each.gradient_error:>12.1e}"
        verdict, style = ("ok", "green") if each.passed else ("WRONG", "bold red")
        view.say(f"   {each.title:<26}{errors}  {verdict}", style=style)


def measure(view: View, found: Findings, budget: float) -> None:
    from . import demo_costs

    title = "2. Time and memory: causal attention, one forward call, fastest of several"
    view.section(title, f"About {budget:.0f} s. {demo_costs.explain_calls()}")
    view.say("", line_of(HEADINGS), style="bold")
    with view.doing("measuring") as tell:
        for event in in_thread(demo_costs.doubling_rows(budget)):
            if isinstance(event, str):
                tell(event)
            else:
                found.rows.append(event)
                view.say(line_of(cells(event)))


def learn(view: View, found: Findings, files: Sequence[str], seconds: float, steps: int | None) -> None:
    """Trains for about so many seconds, unless the steps are given, and lets the model write."""
    import torch

    from . import demo_training

    view.section("3. A language model of bytes learns from Python's own library")
    view.say(f"{'step':>12}{'training':>14}{'validation':>14}   bits per byte", style="bold")
    threads, limit = torch.get_num_threads(), math.inf
    try:
        with view.doing("measuring a few steps") as tell:
            if steps is None:
                steps, threads = demo_training.plan_steps(seconds, files)
                limit = demo_training.OVERTIME * seconds

            def told(step: int, loss: float, validation: float | None) -> None:
                tell(f"step {step}/{steps}, {loss:.3f} bits per byte")
                if validation is not None:
                    view.say(f"{f'{step}/{steps}':>12}{loss:>14.3f}{validation:>14.3f}")

            with demo_training.use_threads(threads):
                training, model = demo_training.train_model(files, steps, told, limit=limit)
                found.training, found.is_interrupted = training, training.is_interrupted
                if not training.is_interrupted:
                    training.sample = demo_training.write_sample(model)
    except Exception as error:  # what was measured is worth its report all the same
        found.why_no_training, found.has_failed = f"The training failed: {error}", True
        return
    view.say(f"   {sparks([loss for _, loss in training.losses])}", style="green")
    view.say(*textwrap.wrap(training.describe(), WIDTH, initial_indent="   ", subsequent_indent="   "), "")
    view.say(*sample_lines(training.prompt, training.sample), style="yellow")


def in_thread(events: Iterator[Any]) -> Iterator[Any]:
    """The same events, made in a thread, so that Ctrl-C is heard while a long call runs.

    The thread may then still be inside the call.
    """
    made: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        try:
            for event in events:
                made.put(event)
            made.put(None)
        except BaseException as error:
            made.put(error)

    threading.Thread(target=work, daemon=True).start()
    while (event := made.get()) is not None:
        if isinstance(event, BaseException):
            raise event
        yield event


def line_of(texts: Sequence[str]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(texts, WIDTHS, strict=True))


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a row, in the order of HEADINGS."""
    from .demo_costs import NAMES

    costs = [row.costs.get(name) for name in NAMES]
    times = ["-" if cost is None else milliseconds(cost.seconds) for cost in costs]
    peaks = ["-" if cost is None or cost.peak_bytes is None else mebibytes(cost.peak_bytes) for cost in costs]
    speedup = "-" if row.speedup is None else f"{row.speedup:.1f} x"
    return f"{row.n:,}", *times, speedup, *peaks


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f}" if nbytes < 100 * 2**20 else f"{nbytes / 2**20:,.0f}"


def sample_lines(prompt: str, sample: str | None) -> list[str]:
    """The beginning of what the model wrote, without empty lines."""
    written = "" if sample is None else (prompt + sample).expandtabs(4)
    shown = [line for line in written.splitlines() if line.strip()][:SAMPLE_LINES]
    return [f"   | {line[: WIDTH - 5]}" for line in shown]


def sparks(values: Sequence[float]) -> str:
    """A curve in a line of characters."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(SPARKS) - 1) / ((high - low) or 1.0)
    return "".join(SPARKS[round((value - low) * scale)] for value in values)
