"""The report of the demo: a page with every figure that was found, drawn and in tables."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from ..cli import show
from ..cli.show_files import make_panels, svg_text
from ..cli.show_numbers import make_picture
from ..cli.text import show_bytes
from ..report import Page, Series, line_chart
from .scaling import HEAD_DIM, HEADS, NAMES, Cost
from .story import Findings, summarize_all
from .training import TEMPERATURE, TOP_P, Training
from .view import describe_model, explain_calls, mebibytes, milliseconds

TITLE = "Dilated attention on this machine"
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


def write_report(findings: Findings, command: str, path: Path) -> None:
    path.write_text(make_page(findings, command).render(), encoding="utf-8")


def make_page(findings: Findings, command: str) -> Page:
    """All sections; of what was not found, why."""
    page = Page(TITLE, summarize_all(findings))
    page.heading("Machine")
    page.table(("", ""), list(_facts(findings)), is_numbers=False)
    _add_checks(page, findings)
    _add_scaling(page, findings)
    _add_pictures(page)
    _add_training(page, findings)
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


def _add_checks(page: Page, findings: Findings) -> None:
    page.heading("Exactness")
    page.paragraph(
        "The largest difference from the definition, a dense computation of every pair, in float64. The last "
        "check compares one segment over everything with PyTorch's own dense attention."
    )
    rows = [
        (
            check.title,
            f"{check.forward_error:.1e}",
            f"{check.gradient_error:.1e}",
            f"{check.tolerance:.0e}",
            "ok" if check.passed else "WRONG",
        )
        for check in findings.checks
    ]
    page.table(("configuration", "forward", "gradients", "limit", ""), rows)


def _add_scaling(page: Page, findings: Findings) -> None:
    page.heading("Time and memory as the length doubles")
    if not findings.rows:
        missing = (
            "The demo was interrupted before." if findings.is_exact else "The library is not exact here."
        )
        page.paragraph(f"Nothing was measured. {missing}")
        return
    page.paragraph(
        f"One causal forward call in float32, batch 1, {HEADS} heads of {HEAD_DIM}. Calls take turns, and "
        f"the fastest of several counts. {explain_calls()}"
    )
    page.figure(
        _cost_chart(findings, "time", "Time of a call", "milliseconds", lambda cost: 1e3 * cost.seconds),
        "Both axes are logarithmic: a line of slope 1 grows with the length, one of slope 2 with its square.",
    )
    page.table(*_cost_table(findings, "ms", lambda cost: milliseconds(cost.seconds)))
    if findings.why_no_peaks is None:
        page.figure(
            _cost_chart(findings, "memory", "Peak memory of a call", "MiB", _mebibytes),
            "Beyond the inputs; the output, which is as large as the queries, counts. On CPUs PyTorch's "
            "dense attention holds only a few scores at a time, so its memory grows with the length as well.",
        )
        page.table(*_cost_table(findings, "MiB", lambda cost: mebibytes(cost.peak_bytes or 0)))
    else:
        page.paragraph(f"The memory of calls is not shown: {findings.why_no_peaks}.")
    page.paragraph("Pairs of a query and a key that are scored, over those of dense causal attention:")
    page.table(*_cost_table(findings, "pairs", lambda cost: f"{cost.pair_share:.1%}"))


def _mebibytes(cost: Cost) -> float:
    return (cost.peak_bytes or 0) / 2**20


def _cost_chart(findings: Findings, name: str, title: str, unit: str, value: Callable[[Cost], float]) -> str:
    series = []
    for each in NAMES:
        known = [(float(row.n), value(row.costs[each])) for row in findings.rows if each in row.costs]
        points = tuple(point for point in known if point[1] > 0)  # a logarithmic axis has no zero
        series += [Series(each, points)] if points else []
    return line_chart(series, title=title, x_label="tokens", y_label=unit, x_text=_length, chart_id=name)


def _length(n: float) -> str:
    """1k for 1,024 and 1M for 1,048,576, as the command line has them."""
    for factor, letter in ((2**20, "M"), (2**10, "k")):
        if n >= factor:
            return f"{n / factor:g}{letter}"
    return f"{n:g}"


def _cost_table(
    findings: Findings, unit: str, text: Callable[[Cost], str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows; that of the times has the speed-up of dilated over dense attention too."""
    head = ("tokens", *(f"{name}, {unit}" for name in NAMES))
    rows = [
        (f"{row.n:,}", *(text(row.costs[name]) if name in row.costs else "-" for name in NAMES))
        for row in findings.rows
    ]
    if unit == "ms":
        speedups = ["-" if row.speedup is None else f"{row.speedup:.1f} x" for row in findings.rows]
        rows = [(*row, speedup) for row, speedup in zip(rows, speedups, strict=True)]
        head = (*head, "speed-up of dilated")
    return head, rows


def _add_pictures(page: Page) -> None:
    page.heading("What attends to what")
    for name, (options, caption) in PICTURES.items():
        page.figure(draw_pattern(name, options), f"{caption} Drawn by: dilated-attention show {options}")


def draw_pattern(name: str, options: str) -> str:
    """The picture that the command `show` draws with these options."""
    parser = argparse.ArgumentParser()
    show.add_arguments(parser)
    chosen = parser.parse_args(shlex.split(options))
    picture = make_picture(chosen)
    return svg_text(picture, make_panels(picture, chosen.layers), PIXELS, svg_id=name)


def _add_training(page: Page, findings: Findings) -> None:
    page.heading("A language model learns from Python's own library")
    training = findings.training
    if training is None or not training.losses:
        page.paragraph(findings.why_no_training or "The demo was interrupted before.")
        return
    page.paragraph(
        f"A LongNetLM of bytes with dilated attention: {describe_model(training)} Trained in "
        f"{training.seconds:.0f} s, {training.steps:,} of {training.steps_planned:,} steps"
        f"{_why_fewer(training)}."
    )
    page.figure(
        _loss_chart(training),
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


def _why_fewer(training: Training) -> str:
    if training.steps == training.steps_planned:
        return ""
    return ", when it was interrupted" if training.is_interrupted else ", when its time was up"


def _loss_chart(training: Training) -> str:
    curves = {"training": training.losses, "validation": training.validations}
    return line_chart(
        [
            Series(name, tuple((float(step), bits) for step, bits in curve))
            for name, curve in curves.items()
            if curve
        ],
        title="Loss",
        x_label="step",
        y_label="bits per byte",
        log_x=False,
        log_y=False,
        chart_id="loss",
    )
