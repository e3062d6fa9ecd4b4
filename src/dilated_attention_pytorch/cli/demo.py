"""`demo`: checks, measures and trains, tells what it finds as it finds it, and writes a report of it."""

from __future__ import annotations

import io
import math
import shlex
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from . import demo_parts
from .bench import exactness
from .bench.exactness import Check
from .bench.measure import machine_facts, project_facts
from .bench.record import check_places, write_text
from .demo_parts import HEAD_DIM, HEADS, PROMPT, SAMPLING, Row, Training, branches_at
from .report import Page, Series, line_chart
from .show import svg_of
from .text import paint, print_json, show_bytes, show_seconds, wants_colours

DONE, FAILED, INTERRUPTED = 0, 1, 130
INTERRUPTION = "The demo was interrupted before this was done."
FAILURES = (MemoryError, OSError, RuntimeError, ValueError)  # of a part, after which the others go on
WIDTH = 78
NAMES = ("dense", "dilated", "block-sparse")
# Times in milliseconds, then the speed-up of dilated over dense attention, then peaks of memory in MiB.
HEADINGS = ("tokens", "dense ms", "dilated", "blocks", "speed-up", "dense MiB", "dilated", "blocks")
WIDTHS = (10, 10, 9, 9, 10, 11, 9, 9)
EXAMPLE = 2**17  # tokens whose branches are named: the most that these heads serve wholly
BRANCHES = ", ".join(f"{w}/{r}" for w, r in zip(*branches_at(EXAMPLE), strict=True))
CALLS = f"""\
One causal forward call in float32, {HEADS} heads of {HEAD_DIM}, the fastest of several. Branches for
{EXAMPLE:,} tokens, as segment length / dilation rate: {BRANCHES}. Beyond, rates exceed
the heads, and some positions reach further only through several layers. Block-sparse attention keeps the
nearest blocks that the branches reach, about 1,024 keys a query. Memory is the peak beyond the inputs; that
of PyTorch's dense attention on CPUs grows with the length as well. A dash stands for what would take too long
or cannot be measured here."""
CHECKS = """\
The largest difference from the definition, a dense computation of every pair, in float64. The last check
compares one segment over everything with PyTorch's own dense attention."""
SAMPLE_LINES = 6
PIXELS = 150  # of a panel of a picture
# What is drawn, by the id of the picture: options of the command `show`, and what they show.
PICTURES = {
    "pattern-dilated": (
        "--length 54 --segments 18,54 --rates 1,3 --heads 3 --causal",
        "Dilated attention: each head sees all of its short segment, and every third position of the long "
        "one, from an offset of its own.",
    ),
    "pattern-blocks": (
        "--length 1024 --segments 128,1024 --rates 1,4 --pattern dilated_sparse --density 0.2 "
        "--block-size 32 --causal --layers 4",
        "Block-sparse attention: a few blocks near each row in one layer, and what several layers reach.",
    ),
}


@dataclass
class Findings:
    """All that was found so far. `missing` says by part why it is not whole, empty where it is."""

    machine: dict[str, Any]
    project: dict[str, Any]
    missing: dict[str, str]
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    training: Training | None = None
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    is_interrupted: bool = False

    @property
    def is_exact(self) -> bool:
        return "check" not in self.failed and all(check.passed for check in self.checks)

    @property
    def summary(self) -> str:
        """The result in a few sentences that hold measured figures only."""
        sentences = ["Stopped early."] if self.is_interrupted else []
        passed, total = sum(check.passed for check in self.checks), len(self.checks)
        if passed < total:
            sentences.append(f"The library is not exact here: {total - passed} of {total} checks fail.")
        else:
            sentences += [f"{passed} of {total} checks against the definition pass.", summarize(self.rows)]
        if (run := self.training) is not None and run.validations:
            learned = f"learned to predict Python source to {run.validations[-1][1]:.2f} bits per byte."
            sentences.append(f"In {run.seconds:.0f} s a model of {run.parameters:,} parameters {learned}")
        return " ".join([*sentences, *(self.missing[name] for name in self.failed)])


class Screen:
    """Lines, each when it is known; on a terminal over a line of what is being done."""

    def __init__(self, stream: IO[str]) -> None:
        if isinstance(stream, io.TextIOWrapper):  # a model may write characters that a terminal does not know
            stream.reconfigure(errors="replace")
        self.stream = stream

    def say(self, *lines: str, colour: str = "") -> None:
        self.tell("")
        for line in lines:
            print(paint(line, colour, self.stream) if colour else line, file=self.stream, flush=True)

    def tell(self, text: str) -> None:
        """Replaces the line of progress, which only a terminal has."""
        if wants_colours(self.stream):
            print(f"\r\x1b[2K{text[:WIDTH]}", end="", file=self.stream, flush=True)


def run(options: Namespace) -> int:
    """Runs the demo and writes its report; 1 if the library is not exact here, 130 after Ctrl-C."""
    if not 0 < options.seconds < math.inf:
        raise ValueError(f"--seconds must be positive, got {options.seconds}")
    if not 0 <= options.train_seconds < math.inf:
        raise ValueError(f"--train-seconds must be 0 or more, got {options.train_seconds}")
    check_places(options.out)
    screen = Screen(sys.stderr if options.json else sys.stdout)
    found = gather(screen, options)
    write_text(options.out, make_page(found, options).render())
    screen.say("", *textwrap.wrap(found.summary, WIDTH), "", colour="bold")
    screen.say(f"The report is in {options.out}", colour="cyan")
    if options.json:
        checks = [{**asdict(check), "passed": check.passed} for check in found.checks]
        shown = {"summary": found.summary, **asdict(found), "checks": checks}
        print_json({**shown, "report": str(options.out)})
    if found.is_interrupted:
        return INTERRUPTED
    return DONE if found.is_exact and not found.failed else FAILED


def gather(screen: Screen, options: Namespace) -> Findings:
    """Checks, measures and trains, as long as Ctrl-C does not end it. A part that fails leaves the others."""
    begin = time.perf_counter()
    # The facts come first: they hold the load of others.
    found = Findings(machine_facts(), project_facts(), dict.fromkeys(PARTS, INTERRUPTION))
    try:
        for name, part in PARTS.items():
            try:
                why = part(screen, found, options) if found.is_exact else "The library is not exact here."
            except FAILURES as error:
                why = f"The {name} failed: {error}"
                found.failed.append(name)
                screen.say(why, colour="red")
            found.missing[name] = why
    except KeyboardInterrupt:
        found.is_interrupted = True
    found.seconds = time.perf_counter() - begin
    return found


def check(screen: Screen, found: Findings, _: Namespace) -> str:
    screen.say("dilated attention: exact, and its cost grows with length, not with its square", colour="bold")
    limit = f"(float64, limit {exactness.TOLERANCE:.0e})"
    screen.say("", f"1. Exactness: largest difference from the definition {limit}", colour="cyan")
    screen.say(f"   {'':<26}{'forward':>9}{'gradients':>12}", colour="dim")
    for each in exactness.run_checks():
        found.checks.append(each)
        title, forward, gradients, _limit, verdict = check_cells(each)
        colour = "green" if each.passed else "red"
        screen.say(f"   {title:<26}{forward:>9}{gradients:>12}  {verdict}", colour=colour)
    return ""


def check_cells(each: Check) -> tuple[str, ...]:
    errors = (f"{each.forward_error:.1e}", f"{each.gradient_error:.1e}", f"{each.tolerance:.0e}")
    return each.title, *errors, "ok" if each.passed else "WRONG"


def measure(screen: Screen, found: Findings, options: Namespace) -> str:
    """Rows come from a thread, so that Ctrl-C is heard during a long call; it may then still be in it."""
    title = f"2. Time and memory as the length doubles, for about {options.seconds:.0f} s"
    screen.say("", title, colour="cyan")
    screen.say(*textwrap.wrap(CALLS, WIDTH), "", colour="dim")
    screen.say(line_of(HEADINGS), colour="bold")
    rows, pool = demo_parts.measure_costs(options.seconds, screen.tell), ThreadPoolExecutor(1)
    try:
        while (row := pool.submit(next, rows, None).result()) is not None:
            found.rows.append(row)
            screen.say(line_of(row_cells(row)))
    finally:
        pool.shutdown(wait=False)
    return ""


def line_of(texts: Sequence[str]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(texts, WIDTHS, strict=True))


def row_cells(row: Row) -> tuple[str, ...]:
    """The texts of a row, in the order of HEADINGS."""

    def shown(values: dict[str, Any], unit: float) -> Iterator[str]:
        for value in map(values.get, NAMES):
            yield "-" if value is None else f"{value / unit:,.{1 if value < 100 * unit else 0}f}"

    speedup = "-" if row.speedup is None else f"{row.speedup:.1f} x"
    return f"{row.n:,}", *shown(row.seconds, 1e-3), speedup, *shown(row.peaks, 2**20)


def learn(screen: Screen, found: Findings, options: Namespace) -> str:
    """Trains for about so many seconds, unless the steps are given, and lets the model write."""
    files, seconds, steps = demo_parts.source_files(), options.train_seconds, options.steps
    if seconds == 0 and steps is None:
        return "No training was asked for."
    if not files:
        return "This Python comes without the source of its library."
    screen.say("", "3. A language model of bytes learns from Python's own library", colour="cyan")
    screen.say(f"{'step':>12}{'training':>14}{'validation':>14}   bits per byte", colour="bold")
    screen.tell("measuring a few steps")
    limit = math.inf if steps is not None else demo_parts.OVERTIME * seconds
    steps = demo_parts.plan_steps(files, seconds) if steps is None else steps
    for training in demo_parts.train_model(files, steps, limit):
        found.training, (step, loss) = training, training.losses[-1]
        screen.tell(f"step {step}/{steps}, {loss:.3f} bits per byte")
        if training.sample is None and training.validations and training.validations[-1][0] == step:
            screen.say(f"{f'{step}/{steps}':>12}{loss:>14.3f}{training.validations[-1][1]:>14.3f}")
    screen.say("", *textwrap.wrap(training.model, WIDTH), colour="dim")
    lines = [line for line in (training.sample or "").expandtabs(4).splitlines() if line.strip()]
    screen.say("", *(f"   | {line[: WIDTH - 5]}" for line in lines[:SAMPLE_LINES]), colour="yellow")
    return ""


PARTS = {"check": check, "measurement": measure, "training": learn}


def summarize(rows: Sequence[Row]) -> str:
    """One or two sentences that hold measured figures only."""
    sentences, last = [], 0
    for row in [row for row in rows if row.speedup is not None][-1:]:
        last, (dense, dilated) = row.n, (show_seconds(row.seconds[name]) for name in NAMES[:2])
        times = f"dense attention took {dense} and dilated attention {dilated}"
        sentences.append(f"At {row.n:,} tokens {times}: {row.speedup:.1f} times as fast.")
    for row in [row for row in rows if "dilated" in row.seconds and row.n > last][-1:]:
        seconds = row.seconds["dilated"]
        reached = f"{row.n:,} tokens in {show_seconds(seconds)}, {row.n / seconds:,.0f} tokens a second"
        sentences.append(f"Dilated attention went on to {reached}.")
    return " ".join(sentences) or "Nothing was timed."


def make_page(found: Findings, options: Namespace) -> Page:
    """All sections; of what was not found, why."""
    page = Page("Dilated attention on this machine", found.summary)
    page.heading("Machine")
    facts = {**found.machine, **found.project, "memory_bytes": show_bytes(found.machine["memory_bytes"] or 0)}
    rows = [(name.replace("_", " "), str(value)) for name, value in facts.items()]
    page.table(("", ""), rows, is_numbers=False)
    page.heading("Exactness")
    page.paragraph(CHECKS)
    head = ("configuration", "forward", "gradients", "limit", "")
    page.table(head, [check_cells(each) for each in found.checks])
    page.paragraph(found.missing["check"])
    page.heading("Time and memory as the length doubles")
    if found.rows:
        add_costs(page, found.rows)
    page.paragraph(found.missing["measurement"])
    page.heading("What attends to what")
    for name, (words, caption) in PICTURES.items():
        page.figure(svg_of(words, PIXELS, name), f"{caption} Drawn by: dilated-attention show {words}")
    page.heading("A language model learns from Python's own library")
    if found.training is not None:
        add_training(page, found.training)
    page.paragraph(found.missing["training"])
    page.heading("How this was made")
    page.paragraph(f"In {found.seconds:.0f} seconds, by this command:")
    training = ["--train-seconds", f"{options.train_seconds:g}"]
    training = training if options.steps is None else ["--steps", str(options.steps)]
    command = ["dilated-attention", "demo", "--seconds", f"{options.seconds:g}", *training]
    page.preformatted(shlex.join([*command, "--out", str(options.out)]))
    return page


def add_costs(page: Page, rows: Sequence[Row]) -> None:
    page.paragraph(CALLS)
    page.table(HEADINGS, [row_cells(row) for row in rows])
    values: dict[str, tuple[str, Callable[[Row], dict[str, Any]], float]] = {
        "time": ("milliseconds", lambda row: row.seconds, 1e-3),
        "memory": ("MiB", lambda row: row.peaks, 2**20),
    }
    for what, (unit, of_row, size) in values.items():
        points = {name: [(row.n, (of_row(row).get(name) or 0) / size) for row in rows] for name in NAMES}
        # A logarithmic axis has no zero.
        series = [Series(name, tuple(p for p in points[name] if p[1] > 0)) for name in NAMES]
        if drawn := [each for each in series if each.points]:
            title = f"{what.capitalize()} of a call"
            chart = line_chart(drawn, title=title, x_label="tokens", y_label=unit, chart_id=what)
            page.figure(chart, "A line of slope 1 grows with the length, one of slope 2 with its square.")


def add_training(page: Page, training: Training) -> None:
    steps = f"{training.steps:,} of {training.steps_planned:,} steps in {training.seconds:.0f} s"
    page.paragraph(f"A LongNetLM of bytes with dilated attention: {training.model} Trained {steps}.")
    curves = {"training": training.losses, "validation": training.validations}
    series = [Series(name, tuple(points)) for name, points in curves.items() if points]
    labels: dict[str, Any] = {"title": "Loss", "x_label": "step", "y_label": "bits per byte"}
    chart = line_chart(series, log_x=False, log_y=False, chart_id="loss", **labels)
    page.figure(chart, "Training: means of the last steps. Validation: the end of the text, unseen.")
    if training.validations:
        rows = [(f"{step:,}", f"{bits:.3f}") for step, bits in training.validations]
        page.table(("step", "validation, bits per byte"), rows)
    if training.sample is not None:
        how = f"temperature {SAMPLING['temperature']}, top_p {SAMPLING['top_p']}"
        page.paragraph(f"What it writes after {PROMPT!r} ({how}): expect the look of Python only.")
        page.preformatted(training.sample)
