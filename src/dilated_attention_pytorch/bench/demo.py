"""A first look: `python -m dilated_attention_pytorch.bench.demo`.

Checks the library against its definition, then times dense and dilated attention on this machine at doubling
lengths until a time budget is spent. Ctrl-C ends it early and keeps what was measured.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..core.host_memory import host_memory
from ..plan import Shape, plan_dilated
from ..spec import DilatedSpec, geometric_branches
from .demo_checks import Check, run_checks
from .demo_view import PlainView, View
from .measure import interleave

HEADS, HEAD_DIM = 8, 64
FIRST_LENGTH, LAST_LENGTH = 1024, 2**20
FIRST_SEGMENT, STEP = 2048, 4
DENSE_SHARE = 0.35  # of the budget, that a single dense call may be expected to take
MEMORY_SHARE = 0.4  # of the available memory, that inputs and output may take
ROUND_SECONDS = 0.8  # short calls are repeated about this long, and the fastest counts
FAILED, INTERRUPTED = 1, 130


@dataclass(frozen=True)
class Row:
    """Measured at one length: seconds of each attention, and the share of all causal pairs that is scored."""

    n: int
    dense: float | None
    dilated: float
    pair_share: float

    @property
    def speedup(self) -> float | None:
        return None if self.dense is None else self.dense / self.dilated

    @property
    def tokens_per_second(self) -> float:
        return self.n / self.dilated


Event = str | Row | BaseException | None  # what is being done, a result, a failure, or the end


def ladder(n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Segment lengths and rates for a length: both grow fourfold until a segment spans it all."""
    return geometric_branches(n, FIRST_SEGMENT, STEP)


def measure_row(n: int, *, with_dense: bool, rounds: int) -> Row:
    """Times causal attention over `n` positions, dense and dilated in turn; the fastest round counts."""
    segment_lengths, dilation_rates = ladder(n)
    q, k, v = (_random(n, seed) for seed in range(3))
    # Dense attention gets the layout it likes best. The numbers do not matter here, so the memory is shared.
    q_bhnd, k_bhnd, v_bhnd = (x.view(1, HEADS, n, HEAD_DIM) for x in (q, k, v))
    candidates: dict[str, Callable[[], object]] = {
        "dilated": lambda: functional.dilated_attention(
            q, k, v, segment_lengths, dilation_rates, is_causal=True
        )
    }
    if with_dense:
        candidates["dense"] = lambda: F.scaled_dot_product_attention(q_bhnd, k_bhnd, v_bhnd, is_causal=True)
    with torch.no_grad():
        timings = interleave(candidates, rounds, warmup=1 if rounds > 1 else 0)
    dense = timings["dense"].minimum if with_dense else None
    return Row(n, dense, timings["dilated"].minimum, pair_share(n))


def pair_share(n: int) -> float:
    """Pairs of a query and a key that dilated attention scores, over those of dense causal attention."""
    spec = DilatedSpec(*ladder(n), is_causal=True)
    plan = plan_dilated(spec, Shape(1, n, HEADS, HEADS, HEAD_DIM), itemsize=4, direction="forward")
    return plan.num_pairs / (HEADS * n * (n + 1) / 2)


def _random(n: int, seed: int) -> Tensor:
    """(1, n, HEADS, HEAD_DIM) of random rows; beyond some length they repeat, which spares their drawing."""
    period = min(n, 16384)
    rows = torch.randn(1, period, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    return rows.repeat(1, n // period, 1, 1)


def doubling_rows(
    budget: float, measure: Callable[..., Row] = measure_row, clock: Callable[[], float] = time.perf_counter
) -> Iterator[str | Row]:
    """Says what comes next, then yields its row, for doubling lengths while time and memory last.

    Dense attention takes four times as long at each step and dilated attention about twice; nothing is begun
    that is expected to end after the budget.
    """
    start, n, last = clock(), FIRST_LENGTH, Row(0, 0.0, 0.0, 1.0)
    while n <= LAST_LENGTH and _fits_memory(n):
        left = budget - (clock() - start)
        dense = None if last.dense is None else 4.0 * last.dense
        dilated = 2.5 * last.dilated
        if dense is not None and dense > min(DENSE_SHARE * budget, left - dilated):
            dense = None
        expected = dilated + (dense or 0.0)
        if last.n and expected > left:
            return
        # One round more than these is run to warm up.
        rounds = max(1, min(9, int(min(ROUND_SECONDS, left) / expected) - 1)) if last.n else 3
        names = "dilated" if dense is None else "dense and dilated"
        yield f"{names}, {n:,} tokens"
        last = measure(n, with_dense=dense is not None, rounds=rounds)
        yield last
        n *= 2


def _fits_memory(n: int) -> bool:
    memory = host_memory()
    needed = 4 * 4 * n * HEADS * HEAD_DIM
    return needed < (MEMORY_SHARE * memory.available if memory is not None else 2**31)


def summarize(rows: Sequence[Row]) -> str:
    """One or two sentences that hold measured figures only."""
    sentences = []
    compared = [(row, row.dense, row.speedup) for row in rows if row.dense and row.speedup]
    if compared:
        row, dense, speedup = compared[-1]
        sentences.append(
            f"At {row.n:,} tokens dense attention took {_duration(dense)} and dilated attention "
            f"{_duration(row.dilated)}: {speedup:.1f} times as fast, with {row.pair_share:.1%} of the pairs."
        )
    if rows and rows[-1].dense is None:
        row = rows[-1]
        sentences.append(
            f"Dilated attention went on to {row.n:,} tokens in {_duration(row.dilated)}, "
            f"{row.tokens_per_second:,.0f} tokens a second."
        )
    return " ".join(sentences) or "Nothing was timed."


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def time_in_view(view: View, budget: float) -> tuple[list[Row], bool]:
    """Measures in a thread, so that the view moves and Ctrl-C works while a long call runs.

    Returns the rows and whether they were interrupted; then the thread may still be inside a call.
    """
    events: queue.Queue[Event] = queue.Queue()

    def work() -> None:
        try:
            for event in doubling_rows(budget):
                events.put(event)
            events.put(None)
        except BaseException as error:
            events.put(error)

    rows: list[Row] = []
    threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            try:
                event = events.get(timeout=0.1)
            except queue.Empty:
                view.tick()
                continue
            if event is None:
                return rows, False
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Row):
                rows.append(event)
                view.show_rows(rows)
            else:
                view.show_step(event)
    except KeyboardInterrupt:
        return rows, True


def choose_view(budget: float) -> View:
    """The live view on a terminal with rich installed, plain lines everywhere else."""
    if not sys.stdout.isatty():
        return PlainView(budget)
    try:
        from .demo_rich import RichView
    except ImportError:
        print("For a live view: pip install 'dilated-attention[demo]'\n")
        return PlainView(budget)
    return RichView(budget)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo and returns the exit status: 1 if the library is not exact, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m dilated_attention_pytorch.bench.demo",
        description="Checks exactness, then times dense and dilated attention at doubling lengths.",
    )
    parser.add_argument(
        "--seconds", type=float, default=75.0, help="time budget of the timings (default: 75)"
    )
    options = parser.parse_args(arguments)
    if not 0 < options.seconds < float("inf"):
        parser.error(f"--seconds must be positive, got {options.seconds}")
    view = choose_view(options.seconds)
    try:
        view.show_title(
            f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads, float32, "
            f"{HEADS} heads of {HEAD_DIM}"
        )
        checks: list[Check] = []
        for check in run_checks():
            checks.append(check)
            view.show_check(check)
    except KeyboardInterrupt:
        return INTERRUPTED
    if not all(check.passed for check in checks):
        view.show_end("The library is not exact here, so nothing was timed.")
        return FAILED
    with view.timing(ladder):
        rows, interrupted = time_in_view(view, options.seconds)
    view.show_end(("Stopped early. " if interrupted else "") + summarize(rows))
    return INTERRUPTED if interrupted else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if status == INTERRUPTED:
        os._exit(status)  # a thread may be deep in a kernel; waiting for it is what Ctrl-C asked not to do
    sys.exit(status)
