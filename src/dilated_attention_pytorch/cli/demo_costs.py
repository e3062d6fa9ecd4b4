"""How time and memory of attention grow as the length doubles: dense, dilated and block-sparse."""

from __future__ import annotations

import ctypes
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from .. import functional
from ..block_sparse import block_sparse_attention, build_block_pattern
from ..core.host_memory import host_memory
from ..plan import BlockPattern
from ..ring import plan_ring
from ..spec import Branches, SparsePatternConfig, branches_for
from .bench.measure import NotMeasurableError, interleave, read_status, reset_peak_memory

HEADS, HEAD_DIM = 8, 64
FIRST_LENGTH, LAST_LENGTH = 1024, 2**20
EXAMPLE = 2**17  # tokens whose branches are named: the most that these heads serve wholly
BLOCK, KEPT = 128, 1024  # tokens of a block, and keys that a query keeps
MEMORY_SHARE = 0.4  # of the available memory, that inputs and output may take
ROUND_SECONDS = 0.8  # short calls are repeated about this long, and the fastest counts
# Time at twice the length over time at the length, from above, and the share of the budget that one call may
# take. The first in this order are the last to be given up.
GROWTH = {"dilated": (3.0, 1.0), "block-sparse": (2.5, 0.25), "dense": (4.0, 0.25)}
NAMES = ("dense", "dilated", "block-sparse")  # as they are shown


@dataclass(frozen=True)
class Cost:
    """Of one call: seconds, bytes at the peak beyond the inputs (None: not measurable), and the pairs scored
    over those of dense causal attention."""

    seconds: float
    peak_bytes: int | None
    pair_share: float


@dataclass(frozen=True)
class Row:
    """What was measured at a length, by name; what would have taken too long is not there."""

    n: int
    costs: Mapping[str, Cost]

    @property
    def speedup(self) -> float | None:
        """Of dilated over dense attention, where both were measured."""
        if not {"dense", "dilated"} <= self.costs.keys():
            return None
        return self.costs["dense"].seconds / self.costs["dilated"].seconds


@cache
def ladder(n: int) -> Branches:
    """Segment lengths and rates for a length, as the library chooses them; `explain_calls` warns of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return branches_for(n, HEADS)


def explain_calls() -> str:
    """What is measured, and how the branches are chosen, by example."""
    steps = ", ".join(f"{w}/{r}" for w, r in zip(*ladder(EXAMPLE), strict=True))
    return (
        f"Branches for {EXAMPLE:,} tokens, as segment length / dilation rate: {steps}. Each reaches further "
        "than the one before, and none costs more than the first. For more tokens rates exceed the "
        f"{HEADS} heads, and some positions reach further only through several layers. Block-sparse "
        "attention keeps the nearest blocks that the branches reach, about 1,024 keys a query. Memory is the "
        "peak beyond the inputs. A dash stands for what would take too long."
    )


def block_pattern(n: int) -> BlockPattern:
    """The nearest blocks that the branches of the ladder reach, about KEPT keys a query."""
    config = SparsePatternConfig("dilated_sparse", min(1.0, 2 * KEPT / n), BLOCK)
    segment_lengths, dilation_rates = ladder(n)
    branches: dict[str, Any] = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    return build_block_pattern(config, n, HEADS, is_causal=True, **branches)


def pair_shares(n: int, pattern: BlockPattern) -> dict[str, float]:
    """Pairs of a query and a key that each scores, over those of dense causal attention."""
    schedule = plan_ring(*ladder(n), n, num_heads=HEADS, head_dim=HEAD_DIM, num_ranks=1, is_causal=True)
    dense = n * (n + 1) / 2
    sparse = pattern.num_pairs / (len(pattern) * dense)
    return {"dense": 1.0, "dilated": schedule.num_pairs(0) / (HEADS * dense), "block-sparse": sparse}


def measure_row(n: int, *, names: Collection[str], rounds: int) -> Row:
    """One causal forward call after the other on the same numbers; the fastest round counts.

    The first call of each gives its memory; it is timed only if it is to be the only one.
    """
    pattern = block_pattern(n)
    shares = pair_shares(n, pattern)
    calls = {name: call for name, call in _calls(n, pattern).items() if name in names}
    seconds, peaks = {}, {}
    with torch.no_grad():
        if n == FIRST_LENGTH:  # what is loaded and started once is no cost of a call
            for call in calls.values():
                call()
        for name, call in calls.items():
            start = time.perf_counter()
            peaks[name] = peak_of(call)
            seconds[name] = time.perf_counter() - start
        if rounds > 1:
            timings = interleave(calls, rounds, warmup=0)
            seconds = {name: timing.minimum for name, timing in timings.items()}
    return Row(n, {name: Cost(seconds[name], peaks[name], shares[name]) for name in calls})


def _calls(n: int, pattern: BlockPattern) -> dict[str, Callable[[], object]]:
    period = min(n, 16384)  # beyond this length random rows repeat, which spares their drawing
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, period, HEADS, HEAD_DIM, generator=generator) for _ in range(3)]
    q, k, v = (x.repeat(1, n // period, 1, 1) for x in rows)
    # Dense attention gets the layout it likes best. The numbers do not matter here, so the memory is shared.
    q_bhnd, k_bhnd, v_bhnd = (x.view(1, HEADS, n, HEAD_DIM) for x in (q, k, v))
    return {
        "dense": lambda: F.scaled_dot_product_attention(q_bhnd, k_bhnd, v_bhnd, is_causal=True),
        "dilated": lambda: functional.dilated_attention(q, k, v, *ladder(n), is_causal=True),
        "block-sparse": lambda: block_sparse_attention(q, k, v, pattern, is_causal=True),
    }


def why_no_peaks() -> str | None:
    """Why peaks cannot be measured here; None if they can."""
    try:
        reset_peak_memory()
        read_status("VmHWM")
    except NotMeasurableError as error:
        return str(error)
    return None


def peak_of(call: Callable[[], object]) -> int | None:
    """Runs a call; the bytes that it held at most, beyond what was there before. None: not measurable."""
    # Freed memory that the C library keeps would count as there before, and hide what is taken from it.
    with suppress(AttributeError, OSError, TypeError):  # of glibc alone; other libraries keep little
        ctypes.CDLL(None).malloc_trim(0)
    try:
        before = reset_peak_memory()
    except NotMeasurableError:
        call()
        return None
    call()
    return max(0, read_status("VmHWM") - before)


def doubling_rows(
    budget: float, measure: Callable[..., Row] = measure_row, clock: Callable[[], float] = time.perf_counter
) -> Iterator[str | Row]:
    """Says what comes next, then yields its row, for doubling lengths while time and memory last.

    Dense attention takes four times as long at each step and the others about twice; nothing is begun that is
    expected to end after the budget. What was left out once is left out at all greater lengths.
    """
    start, n, last = clock(), FIRST_LENGTH, None
    while n <= LAST_LENGTH and _fits_memory(n):
        left = budget - (clock() - start)
        expected = dict.fromkeys(GROWTH, 0.0) if last is None else _affordable(last, budget, left)
        if not expected:
            return
        # One round more than these is run first.
        rounds = 3 if last is None else min(9, int(min(ROUND_SECONDS, left) / sum(expected.values())) - 1)
        names = [name for name in NAMES if name in expected]
        yield f"{', '.join(names)}: {n:,} tokens"
        last = measure(n, names=names, rounds=max(1, rounds))
        yield last
        n *= 2


def _affordable(last: Row, budget: float, left: float) -> dict[str, float]:
    """Those of the last row that fit into the time left at twice its length, with what they may take."""
    expected: dict[str, float] = {}
    for name, (growth, share) in GROWTH.items():
        seconds = growth * last.costs[name].seconds if name in last.costs else math.inf
        if seconds <= share * budget and seconds + sum(expected.values()) <= left:
            expected[name] = seconds
    return expected


def _fits_memory(n: int) -> bool:
    memory = host_memory()
    needed = 4 * 4 * n * HEADS * HEAD_DIM
    return needed < (MEMORY_SHARE * memory.available if memory is not None else 2**31)


def summarize(rows: Sequence[Row]) -> str:
    """One or two sentences that hold measured figures only."""
    compared = [row for row in rows if row.speedup is not None]
    sentences, last = [], 0
    for row in compared[-1:]:
        last, dense, dilated = row.n, row.costs["dense"], row.costs["dilated"]
        sentences.append(
            f"At {row.n:,} tokens dense attention took {show_seconds(dense.seconds)} and dilated attention "
            f"{show_seconds(dilated.seconds)}: {row.speedup:.1f} times as fast, with "
            f"{dilated.pair_share:.1%} of the pairs."
        )
    for name in ("dilated", "block-sparse"):
        for row in [row for row in rows if name in row.costs and row.n > last][-1:]:
            seconds = row.costs[name].seconds
            sentences.append(
                f"{name.capitalize()} attention went on to {row.n:,} tokens in {show_seconds(seconds)}, "
                f"{row.n / seconds:,.0f} tokens a second."
            )
    return " ".join(sentences) or "Nothing was timed."


def show_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
