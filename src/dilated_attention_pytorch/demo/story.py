"""The demo from beginning to end: what is done one after the other, and what was found."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..bench.exactness import Check, run_checks
from ..bench.machine import machine_facts, project_facts
from ..modules import LongNetLM
from .memory import why_no_peaks
from .scaling import HEAD_DIM, HEADS, Row, doubling_rows, summarize
from .training import (
    OVERTIME,
    Training,
    plan_steps,
    source_files,
    train_model,
    use_threads,
    write_sample,
)
from .view import View

Event = str | Row | BaseException | None  # what is being done, a result, a failure, or the end


@dataclass(frozen=True)
class Findings:
    """All that the report says; an interrupted demo found a part of it.

    `why_no_peaks` and `why_no_training` say why these are missing, where it was not for an interruption.
    """

    machine: dict[str, Any]
    project: dict[str, Any]
    checks: tuple[Check, ...]
    rows: tuple[Row, ...]
    why_no_peaks: str | None
    training: Training | None
    why_no_training: str | None
    seconds: float
    is_interrupted: bool
    has_failed: bool = False  # an error ended the training, and `why_no_training` names it

    @property
    def is_exact(self) -> bool:
        return all(check.passed for check in self.checks)


def gather(view: View, seconds: float, train_seconds: float, steps: int | None) -> Findings:
    """Checks, measures and trains, as long as Ctrl-C does not end it; `steps` goes before `train_seconds`."""
    begin, machine = time.perf_counter(), machine_facts()  # first: it holds the load of others
    checks: list[Check] = []
    rows: list[Row] = []
    training: Training | None = None
    why_no_training = None
    is_interrupted = has_failed = False
    try:
        view.show_title(
            f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads, float32, "
            f"{HEADS} heads of {HEAD_DIM}"
        )
        for check in run_checks():
            checks.append(check)
            view.show_check(check)
        is_exact = all(check.passed for check in checks)
        if is_exact:
            with view.timing(seconds):
                is_interrupted = time_in_view(view, seconds, rows)
        files = source_files()
        why_no_training = _why_no_training(is_exact, files, train_seconds if steps is None else math.inf)
        if why_no_training is None and not is_interrupted:
            try:
                training = train_in_view(view, files, train_seconds, steps)
                is_interrupted = training.is_interrupted
            except Exception as error:  # what was measured is worth its report all the same
                why_no_training, has_failed = f"The training failed: {error}", True
    except KeyboardInterrupt:
        is_interrupted = True
    return Findings(
        machine=machine,
        project=project_facts(),
        checks=tuple(checks),
        rows=tuple(rows),
        why_no_peaks=why_no_peaks(),
        training=training,
        why_no_training=why_no_training,
        seconds=time.perf_counter() - begin,
        is_interrupted=is_interrupted,
        has_failed=has_failed,
    )


def train_in_view(view: View, files: Sequence[str], seconds: float, steps: int | None) -> Training:
    """Trains for about so many seconds, unless the steps are given, and lets the model write."""
    with view.training():
        threads, limit = torch.get_num_threads(), math.inf
        if steps is None:
            steps, threads = plan_steps(seconds, files)
            limit = OVERTIME * seconds
        with use_threads(threads):
            training, model = train_model(files, steps, view.show_loss, limit=limit)
            if not training.is_interrupted:
                training = _with_sample(training, model)
    view.show_sample(training)
    return training


def _with_sample(training: Training, model: LongNetLM) -> Training:
    try:
        return replace(training, sample=write_sample(model))
    except KeyboardInterrupt:  # what was learned is kept
        return replace(training, is_interrupted=True)


def _why_no_training(is_exact: bool, files: Sequence[str], seconds: float) -> str | None:
    if not is_exact:
        return "The library is not exact here, so nothing was measured and nothing trained."
    if seconds == 0:
        return "No training was asked for."
    return None if files else "This Python comes without the source of its library, so there was no text."


def time_in_view(view: View, budget: float, rows: list[Row]) -> bool:
    """Measures in a thread, so that the view moves and Ctrl-C works while a long call runs.

    Appends to `rows`, and returns whether it was interrupted; then the thread may still be inside a call.
    """
    events: queue.Queue[Event] = queue.Queue()

    def work() -> None:
        try:
            for event in doubling_rows(budget):
                events.put(event)
            events.put(None)
        except BaseException as error:
            events.put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            try:
                event = events.get(timeout=0.1)
            except queue.Empty:
                view.tick()
                continue
            if event is None:
                return False
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Row):
                rows.append(event)
                view.show_rows(rows)
            else:
                view.show_step(event)
    except KeyboardInterrupt:
        return True


def summarize_all(findings: Findings) -> str:
    """The result in a few sentences that hold measured figures only."""
    sentences = ["Stopped early."] if findings.is_interrupted else []
    passed, total = sum(check.passed for check in findings.checks), len(findings.checks)
    if not findings.is_exact:
        return " ".join(
            [*sentences, f"The library is not exact here: {total - passed} of {total} checks fail."]
        )
    sentences.append(f"{passed} of {total} checks against the definition pass.")
    sentences.append(summarize(findings.rows))
    training = findings.training
    if training is not None and training.validations:
        sentences.append(
            f"In {training.seconds:.0f} s a model of {training.parameters:,} parameters learned to predict "
            f"Python source to {training.validations[-1][1]:.2f} bits per byte."
        )
    if findings.has_failed and findings.why_no_training:
        sentences.append(findings.why_no_training)
    return " ".join(sentences)


def to_json(findings: Findings) -> dict[str, Any]:
    """The findings as JSON has them."""
    values = asdict(findings)
    for check, known in zip(values["checks"], findings.checks, strict=True):
        check["passed"] = known.passed
    return {"summary": summarize_all(findings), **values}
