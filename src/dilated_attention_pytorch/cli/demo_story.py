"""The demo from beginning to end: what is done one after the other, what it shows, and what was found."""

from __future__ import annotations

import io
import math
import queue
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any

import torch

from . import demo_costs, demo_training
from .bench import exactness
from .bench.exactness import Check
from .bench.machine import machine_facts, project_facts
from .demo_costs import HEAD_DIM, HEADS, NAMES, Cost, Row
from .demo_training import Training

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 78
TITLE = "dilated attention: exact, and its cost grows with length, not with its square"
# Times in milliseconds, then the speed-up of dilated over dense attention, then peaks of memory in MiB.
HEADINGS = ("tokens", "dense ms", "dilated", "blocks", "speed-up", "dense MiB", "dilated", "blocks")
WIDTHS = (10, 10, 9, 9, 10, 11, 9, 9)
SAMPLE_LINES = 6


@dataclass
class Findings:
    """All that was found; an interrupted demo found a part of it.

    `why_no_peaks` and `why_no_training` say why these are missing, where it was not for an interruption.
    """

    machine: dict[str, Any]
    project: dict[str, Any]
    why_no_peaks: str | None
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
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
        sentences = ["Stopped early."] if self.is_interrupted else []
        passed, total = sum(check.passed for check in self.checks), len(self.checks)
        if not self.is_exact:
            failing = f"{total - passed} of {total} checks fail."
            return " ".join([*sentences, f"The library is not exact here: {failing}"])
        sentences += [f"{passed} of {total} checks against the definition pass."]
        sentences += [demo_costs.summarize(self.rows)]
        training = self.training or {}
        if training.get("validations"):
            sentences.append(
                f"In {training['seconds']:.0f} s a model of {training['parameters']:,} parameters learned to "
                f"predict Python source to {training['validations'][-1][1]:.2f} bits per byte."
            )
        return " ".join([*sentences, *([self.why_no_training or ""] if self.has_failed else [])])

    def to_json(self) -> dict[str, Any]:
        """The findings as JSON has them."""
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        return {"summary": self.summary, **asdict(self), "checks": checks}


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

    def section(self, title: str, text: str = "") -> None:
        self.say("", title, style="bold cyan")
        self.explain(text)

    def explain(self, text: str) -> None:
        self.say(*textwrap.wrap(text, WIDTH, initial_indent="   ", subsequent_indent="   "), style="dim")

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


def gather(view: View, seconds: float, train_seconds: float, steps: int | None) -> Findings:
    """Checks, measures and trains, as long as Ctrl-C does not end it; `steps` goes before `train_seconds`."""
    begin = time.perf_counter()
    # First the machine: it holds the load of others.
    found = Findings(machine_facts(), project_facts(), demo_costs.why_no_peaks())
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
    threads = f"{torch.get_num_threads()} CPU threads"
    view.say(TITLE, style="bold")
    view.say(f"torch {torch.__version__}, {threads}, float32, {HEADS} heads of {HEAD_DIM}", style="dim")
    limit = f"(float64, limit {exactness.TOLERANCE:.0e})"
    view.section(f"1. Exactness: largest difference from the definition {limit}")
    view.say(f"   {'':<26}{'forward':>9}{'gradients':>12}", style="dim")
    for each in exactness.run_checks():
        found.checks.append(each)
        title, forward, gradients, _, verdict = check_cells(each)
        style = "green" if each.passed else "bold red"
        view.say(f"   {title:<26}{forward:>9}{gradients:>12}  {verdict}", style=style)


def check_cells(each: Check) -> tuple[str, ...]:
    errors = (f"{each.forward_error:.1e}", f"{each.gradient_error:.1e}", f"{each.tolerance:.0e}")
    return each.title, *errors, "ok" if each.passed else "WRONG"


def measure(view: View, found: Findings, budget: float) -> None:
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

    def shown(value: Callable[[Cost], float | None], limit: float) -> Iterator[str]:
        for cost in map(row.costs.get, NAMES):
            number = None if cost is None else value(cost)
            yield "-" if number is None else f"{number:,.1f}" if number < limit else f"{number:,.0f}"

    times = shown(lambda cost: 1e3 * cost.seconds, 100)
    peaks = shown(lambda cost: None if cost.peak_bytes is None else cost.peak_bytes / 2**20, 100)
    speedup = "-" if row.speedup is None else f"{row.speedup:.1f} x"
    return f"{row.n:,}", *times, speedup, *peaks


def learn(view: View, found: Findings, files: Sequence[str], seconds: float, steps: int | None) -> None:
    """Trains for about so many seconds, unless the steps are given, and lets the model write."""
    view.section("3. A language model of bytes learns from Python's own library")
    view.say(f"{'step':>12}{'training':>14}{'validation':>14}   bits per byte", style="bold")
    threads, limit = torch.get_num_threads(), math.inf
    try:
        with view.doing("measuring a few steps") as tell:
            if steps is None:
                steps, fastest = demo_training.plan_steps(seconds, files)
                limit = demo_training.OVERTIME * seconds
                torch.set_num_threads(fastest)

            def told(step: int, loss: float, validation: float | None) -> None:
                tell(f"step {step}/{steps}, {loss:.3f} bits per byte")
                if validation is not None:
                    view.say(f"{f'{step}/{steps}':>12}{loss:>14.3f}{validation:>14.3f}")

            training, model = demo_training.train_model(files, steps, told, limit)
            found.training, found.is_interrupted = training, training["is_interrupted"]
            if not training["is_interrupted"]:
                training["sample"] = demo_training.write_sample(model)
    except Exception as error:  # what was measured is worth its report all the same
        found.why_no_training, found.has_failed = f"The training failed: {error}", True
        return
    finally:
        torch.set_num_threads(threads)
    view.explain(demo_training.describe(training))
    written = (training["prompt"] + (training["sample"] or "")).expandtabs(4).splitlines()
    shown = [line for line in written if line.strip()][:SAMPLE_LINES] if training["sample"] else []
    view.say("", *(f"   | {line[: WIDTH - 5]}" for line in shown), style="yellow")
