"""The report of the demo: a page with every figure that was found, drawn and in tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..report import Page, Series, line_chart
from .demo import mebibytes, milliseconds
from .demo_costs import HEAD_DIM, HEADS, NAMES, Cost, Row, explain_calls
from .demo_training import TEMPERATURE, TOP_P, Training
from .show import svg_of
from .text import show_bytes

if TYPE_CHECKING:
    from .demo import Findings

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
PIXELS = 150  # of a panel


def make_page(findings: Findings, command: str) -> Page:
    """All sections; of what was not found, why."""
    page = Page("Dilated attention on this machine", findings.summary)
    page.heading("Machine")
    page.table(("", ""), list(_facts(findings)), is_numbers=False)
    page.heading("Exactness")
    page.paragraph(
        "The largest difference from the definition, a dense computation of every pair, in float64. The last "
        "check compares one segment over everything with PyTorch's own dense attention."
    )
    verdicts = []
    for check in findings.checks:
        errors = (f"{check.forward_error:.1e}", f"{check.gradient_error:.1e}", f"{check.tolerance:.0e}")
        verdicts.append((check.title, *errors, "ok" if check.passed else "WRONG"))
    page.table(("configuration", "forward", "gradients", "limit", ""), verdicts)
    _add_costs(page, findings)
    page.heading("What attends to what")
    for name, (options, caption) in PICTURES.items():
        picture = svg_of(options, PIXELS, name)
        page.figure(picture, f"{caption} Drawn by: dilated-attention show {options}")
    page.heading("A language model learns from Python's own library")
    if findings.training is None:
        page.paragraph(findings.why_no_training or "The demo was interrupted before.")
    else:
        _add_training(page, findings.training)
    page.heading("How this was made")
    page.paragraph(f"In {findings.seconds:.0f} seconds, by this command:")
    page.preformatted(command)
    return page


def _facts(findings: Findings) -> Iterator[tuple[str, str]]:
    machine, project = findings.machine, findings.project
    yield "processor", f"{machine['cpu']}, {machine['cpu_capability']}"
    yield "cores and threads", f"{machine['cores']} cores, of which torch uses {machine['threads']}"
    if machine["load"] is not None:
        yield "load", f"{machine['load']:g} processes wanted to run in the last minute"
    if machine["memory_bytes"] is not None:
        yield "memory", show_bytes(machine["memory_bytes"])
    yield "system", f"{machine['os']}, Python {machine['python']}, torch {machine['torch']}"
    commit = f", commit {project['commit'][:12]}" if project["commit"] else ""
    yield "this library", f"{project['version']}{commit}{', changed' if project['changed'] else ''}"


def _add_costs(page: Page, findings: Findings) -> None:
    page.heading("Time and memory as the length doubles")
    rows = findings.rows
    if not rows:
        exact = findings.is_exact
        missing = "The demo was interrupted before." if exact else "The library is not exact here."
        page.paragraph(f"Nothing was measured. {missing}")
        return
    page.paragraph(
        f"One causal forward call in float32, batch 1, {HEADS} heads of {HEAD_DIM}. Calls take turns, and "
        f"the fastest of several counts. {explain_calls()}"
    )
    page.figure(
        _cost_chart(rows, "time", "Time of a call", "milliseconds", lambda cost: 1e3 * cost.seconds),
        "Both axes are logarithmic: a line of slope 1 grows with the length, one of slope 2 with its square.",
    )
    speedups = ["-" if row.speedup is None else f"{row.speedup:.1f} x" for row in rows]
    _add_table(page, rows, "ms", lambda cost: milliseconds(cost.seconds), ["speed-up of dilated", *speedups])
    if findings.why_no_peaks is None:
        page.figure(
            _cost_chart(
                rows, "memory", "Peak memory of a call", "MiB", lambda x: (x.peak_bytes or 0) / 2**20
            ),
            "Beyond the inputs; the output, which is as large as the queries, counts. On CPUs PyTorch's "
            "dense attention holds only a few scores at a time, so its memory grows with the length as well.",
        )
        _add_table(page, rows, "MiB", lambda cost: mebibytes(cost.peak_bytes or 0))
    else:
        page.paragraph(f"The memory of calls is not shown: {findings.why_no_peaks}.")
    page.paragraph("Pairs of a query and a key that are scored, over those of dense causal attention:")
    _add_table(page, rows, "pairs", lambda cost: f"{cost.pair_share:.1%}")


def _cost_chart(
    rows: list[Row], name: str, title: str, unit: str, value: Callable[[Cost], float]
) -> str | None:
    series = []
    for each in NAMES:
        known = [(float(row.n), value(row.costs[each])) for row in rows if each in row.costs]
        points = tuple(point for point in known if point[1] > 0)  # a logarithmic axis has no zero
        series += [Series(each, points)] if points else []
    if not series:
        return None
    return line_chart(series, title=title, x_label="tokens", y_label=unit, x_text=_length, chart_id=name)


def _add_table(
    page: Page, rows: list[Row], unit: str, text: Callable[[Cost], str], more: list[str] | None = None
) -> None:
    """A row a length, a column a name, and one of `more`, which begins with its heading."""
    lines = [["tokens", *(f"{name}, {unit}" for name in NAMES)]]
    for row in rows:
        lines.append([f"{row.n:,}", *(text(row.costs[x]) if x in row.costs else "-" for x in NAMES)])
    if more is not None:
        lines = [[*line, cell] for line, cell in zip(lines, more, strict=True)]
    page.table(lines[0], lines[1:])


def _length(n: float) -> str:
    """1k for 1,024 and 1M for 1,048,576, as the command line has them."""
    for factor, letter in ((2**20, "M"), (2**10, "k")):
        if n >= factor:
            return f"{n / factor:g}{letter}"
    return f"{n:g}"


def _add_training(page: Page, training: Training) -> None:
    fewer = ", when it was interrupted" if training.is_interrupted else ", when its time was up"
    page.paragraph(
        f"A LongNetLM of bytes with dilated attention: {training.describe()} Trained in "
        f"{training.seconds:.0f} s, {training.steps:,} of {training.steps_planned:,} steps"
        f"{fewer if training.steps < training.steps_planned else ''}."
    )
    curves = {"training": training.losses, "validation": training.validations}
    series = [Series(name, tuple(points)) for name, points in curves.items() if points]
    names: dict[str, Any] = {"title": "Loss", "x_label": "step", "y_label": "bits per byte"}
    page.figure(
        line_chart(series, log_x=False, log_y=False, chart_id="loss", **names),
        "Training: means over equal spans of steps. Validation: the end of the text, unseen.",
    )
    validated = [(f"{step:,}", f"{bits:.3f}") for step, bits in training.validations]
    if validated:
        page.table(("step", "validation, bits per byte"), validated)
    if training.sample is not None:
        page.paragraph(
            f"What it writes after {training.prompt!r}, with temperature {TEMPERATURE} among the likeliest "
            f"bytes of probability {TOP_P}. A small model after {training.seconds:.0f} s: expect the look of "
            "Python only."
        )
        page.preformatted(training.prompt + training.sample)
