"""The report of the demo: a page with every figure that was found, drawn and in tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import demo_costs, demo_training
from .demo_costs import HEAD_DIM, HEADS, NAMES, Cost, Row
from .demo_story import HEADINGS, Findings, cells, check_cells
from .demo_training import TEMPERATURE, TOP_P
from .report import Page, Series, line_chart
from .show import svg_of
from .text import show_bytes

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


def make_page(found: Findings, command: str) -> Page:
    """All sections; of what was not found, why."""
    page = Page("Dilated attention on this machine", found.summary)
    add_machine(page, found)
    add_checks(page, found)
    add_costs(page, found)
    page.heading("What attends to what")
    for name, (options, caption) in PICTURES.items():
        page.figure(svg_of(options, PIXELS, name), f"{caption} Drawn by: dilated-attention show {options}")
    add_training(page, found)
    page.heading("How this was made")
    page.paragraph(f"In {found.seconds:.0f} seconds, by this command:")
    page.preformatted(command)
    return page


def add_machine(page: Page, found: Findings) -> None:
    machine, project = found.machine, found.project
    commit = f", commit {project['commit'][:12]}" if project["commit"] else ""
    facts = {
        "processor": f"{machine['cpu']}, {machine['cpu_capability']}",
        "cores and threads": f"{machine['cores']} cores, of which torch uses {machine['threads']}",
        "load": f"{machine['load'] or 0:g} processes wanted to run in the last minute",
        "memory": "unknown" if machine["memory_bytes"] is None else show_bytes(machine["memory_bytes"]),
        "system": f"{machine['os']}, Python {machine['python']}, torch {machine['torch']}",
        "this library": f"{project['version']}{commit}{', changed' if project['changed'] else ''}",
    }
    page.heading("Machine")
    page.table(("", ""), list(facts.items()), is_numbers=False)


def add_checks(page: Page, found: Findings) -> None:
    page.heading("Exactness")
    page.paragraph(
        "The largest difference from the definition, a dense computation of every pair, in float64. The last "
        "check compares one segment over everything with PyTorch's own dense attention."
    )
    head = ("configuration", "forward", "gradients", "limit", "")
    page.table(head, [check_cells(each) for each in found.checks])


def add_costs(page: Page, found: Findings) -> None:
    page.heading("Time and memory as the length doubles")
    if not found.rows:
        why = "The demo was interrupted before." if found.is_exact else "The library is not exact here."
        page.paragraph(f"Nothing was measured. {why}")
        return
    page.paragraph(
        f"One causal forward call in float32, batch 1, {HEADS} heads of {HEAD_DIM}. Calls take turns, and "
        f"the fastest of several counts. {demo_costs.explain_calls()} Pairs of a query and a key that are "
        "scored are given over those of dense causal attention."
    )
    pairs = [
        [f"{row.costs[x].pair_share:.1%}" if x in row.costs else "-" for x in NAMES] for row in found.rows
    ]
    rows = [[*cells(row), *shares[1:]] for row, shares in zip(found.rows, pairs, strict=True)]
    page.table([*HEADINGS, "dilated pairs", "blocks"], rows)
    add_cost_chart(page, found, "time", "milliseconds", lambda cost: 1e3 * cost.seconds)
    if found.why_no_peaks is not None:
        page.paragraph(f"The memory of calls is not shown: {found.why_no_peaks}.")
        return
    add_cost_chart(page, found, "memory", "MiB", lambda cost: (cost.peak_bytes or 0) / 2**20)
    page.paragraph(
        "Memory is beyond the inputs; the output, which is as large as the queries, counts. On CPUs "
        "PyTorch's dense attention holds only a few scores at a time, so its memory grows with the length "
        "as well."
    )


def _pair_shares(row: Row) -> list[str]:
    return [f"{row.costs[x].pair_share:.1%}" if x in row.costs else "-" for x in NAMES[1:]]


def add_cost_chart(page: Page, found: Findings, what: str, unit: str, value: Callable[[Cost], float]) -> None:
    series = []
    for name in NAMES:
        known = [(float(row.n), value(row.costs[name])) for row in found.rows if name in row.costs]
        points = tuple(point for point in known if point[1] > 0)  # a logarithmic axis has no zero
        series += [Series(name, points)] if points else []
    if series:
        title = f"{what.capitalize()} of a call"
        chart = line_chart(series, title=title, x_label="tokens", y_label=unit, chart_id=what)
        page.figure(chart, "A line of slope 1 grows with the length, one of slope 2 with its square.")


def add_training(page: Page, found: Findings) -> None:
    page.heading("A language model learns from Python's own library")
    training = found.training
    if training is None or not training["losses"]:
        page.paragraph(found.why_no_training or "The demo was interrupted before.")
        return
    fewer = ", when it was interrupted" if training["is_interrupted"] else ", when its time was up"
    page.paragraph(
        f"A LongNetLM of bytes with dilated attention: {demo_training.describe(training)} Trained in "
        f"{training['seconds']:.0f} s, {training['steps']:,} of {training['steps_planned']:,} steps"
        f"{fewer if training['steps'] < training['steps_planned'] else ''}."
    )
    curves = {"training": training["losses"], "validation": training["validations"]}
    series = [Series(name, tuple(points)) for name, points in curves.items() if points]
    labels: dict[str, Any] = {"title": "Loss", "x_label": "step", "y_label": "bits per byte"}
    chart = line_chart(series, log_x=False, log_y=False, chart_id="loss", **labels)
    page.figure(chart, "Training: means of the last steps. Validation: the end of the text, unseen.")
    if training["validations"]:
        rows = [(f"{step:,}", f"{bits:.3f}") for step, bits in training["validations"]]
        page.table(("step", "validation, bits per byte"), rows)
    if training["sample"] is not None:
        page.paragraph(
            f"What it writes after {training['prompt']!r}, with temperature {TEMPERATURE} among the "
            f"likeliest bytes of probability {TOP_P}. A small model after {training['seconds']:.0f} s: "
            "expect the look of Python only."
        )
        page.preformatted(training["prompt"] + training["sample"])
