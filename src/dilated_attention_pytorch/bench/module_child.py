"""Memory of one candidate of a comparison, in a process of its own."""

from __future__ import annotations

import time

from .measure import read_status, reset_peak_memory
from .module_candidates import entry_of
from .module_cases import CompareCase
from .module_gate import choose_rows, make_inputs, rows_error, run_candidate

WARMUP_LENGTH = 1024


def measure_candidate(
    case: CompareCase, name: str
) -> tuple[float | None, dict[str, int], dict[str, tuple[float, ...]]]:
    """The error of its rows; bytes of one call above its inputs, and of the whole process; its time."""
    entry, config, backward = entry_of(name), case.config, case.backward
    # Short, so that what it frees is too little for the measured call to hide in.
    short = min(case.n // 4, WARMUP_LENGTH)
    short = max(1, short // config.block_size) * config.block_size  # some take whole blocks only
    warmup = make_inputs(entry, config, 1, short, backward=backward)
    run_candidate(entry.make(config, short), warmup, backward)
    rows = choose_rows(config, case.n)
    attend = entry.make(config, case.n)
    tensors = make_inputs(entry, config, case.b, case.n, backward=backward, rows=rows)
    peak_before = read_status("VmHWM")
    before = reset_peak_memory()
    start = time.perf_counter()
    results = run_candidate(attend, tensors, backward)
    seconds = time.perf_counter() - start
    peak = read_status("VmHWM")
    nbytes = {"peak_extra": peak - before, "peak_total": max(peak_before, peak)}
    return rows_error(entry, config, tensors, results, rows), nbytes, {"attention": (seconds,)}
