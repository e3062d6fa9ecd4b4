"""A measurement in a process of its own: the case as JSON on stdin, what was measured as JSON on stdout.

Peak memory is a property of a process. A fresh one has no freed memory of earlier cases to hide in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..core import AttentionBufferManager
from ..core.host_memory import host_memory, is_out_of_memory
from ..modules import DilatedAttention, RingDilatedAttentionV2
from .candidates import attend
from .cases import Case, LongCase, MemoryCase, PoolCase, case_from_dict, case_to_dict
from .config import Config
from .gate import largest_error, make_call, rows_error, run_call
from .measure import NotMeasurableError, interleave, read_status, reset_peak_memory
from .model_cases import ModelCase
from .model_child import measure_model
from .module_cases import CompareCase
from .module_child import measure_candidate
from .peers import CannotRunError
from .ring_cases import RingConfig, RingStepsCase
from .ring_child import attend as ring_attend
from .ring_child import make_tensors
from .sparse_candidates import make_module, make_pattern
from .sparse_cases import ModuleMemoryCase, PatternCase, SparseConfig, SparseMemoryCase
from .sparse_gate import make_sparse_call, run_sparse_call, sparse_rows_error

WARMUP_LENGTH = 1024
WARMUP_BLOCKS = 4


@dataclass(frozen=True)
class Measured:
    """What the child found: bytes by name, seconds by candidate, the error of the measured results."""

    error: float | None = None
    nbytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, tuple[float, ...]] = field(default_factory=dict)
    why_not: str | None = None


def measure_in_child(case: Case, repeats: int, variant: str = "", timeout: float | None = None) -> Measured:
    """Measures a case in a fresh interpreter, which is ended after `timeout` seconds.

    `variant` is the memory of a pool case, and the module of a case that compares modules.
    """
    needed, memory_now = input_and_result_bytes(case), host_memory()
    if memory_now is not None and needed > 0.9 * memory_now.available:
        there = f"{memory_now.available / 2**30:.1f} GiB are available"
        return Measured(why_not=f"needs {needed / 2**30:.1f} GiB, {there}")
    try:
        result = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps({"case": case_to_dict(case), "repeats": repeats, "variant": variant}),
            env=child_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return Measured(why_not=f"it was ended after {timeout:.0f} s")
    if result.returncode < 0:
        return Measured(why_not=f"the process was ended by signal {-result.returncode}, likely out of memory")
    if result.returncode:
        last = result.stderr.strip().rpartition("\n")[2]
        if is_out_of_memory(RuntimeError(last)) or last.startswith("MemoryError"):
            return Measured(why_not=f"out of memory: {last}")
        raise RuntimeError(f"measuring {case.name} failed:\n{result.stderr}")
    answer = json.loads(result.stdout)
    answer["seconds"] = {name: tuple(values) for name, values in answer["seconds"].items()}
    return Measured(**answer)


def child_environment() -> dict[str, str]:
    """The environment of this process, in which a child finds this very package and has as many threads."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads())}


def measure_memory(case: MemoryCase) -> Measured:
    """Peak memory above the inputs', which are in place, as is all that the libraries set up once."""
    _warm_up(case.config, case.backward)
    call = make_call(case.config, 1, case.n, backward=case.backward)
    before = reset_peak_memory()
    results = run_call(call)
    peak = read_status("VmHWM")
    tensors = (results.out, results.lse, *results.gradients)
    nbytes = {"peak_extra": peak - before, "results": sum(x.nbytes for x in tensors)}
    return Measured(rows_error(call, results), nbytes)


def measure_pool(case: PoolCase, memory: str) -> Measured:
    """Peak memory above the inputs' over a few calls, in which a pool fills and is used again."""
    manager = AttentionBufferManager()
    memory = manager.name if memory == "manager" else memory
    _warm_up(case.config, case.backward)
    largest = max(b for b, _ in case.calls), max(n for _, n in case.calls)
    call = make_call(case.config, *largest, backward=case.backward)
    before = reset_peak_memory()
    for b, n in (*case.calls, largest):
        tensors = {name: getattr(call, name)[:b, :n] for name in ("q", "k", "v")}
        grad_out = None if call.grad_out is None else call.grad_out[:b, :n]
        results = run_call(replace(call, **tensors, grad_out=grad_out), memory)
    peak = read_status("VmHWM")
    return Measured(rows_error(call, results), {"peak": peak, "peak_extra": peak - before})


def measure_long(case: LongCase, repeats: int) -> Measured:
    """Time of one long call against as many short ones as give its length; peak memory of the process."""
    _warm_up(case.config, backward=False)
    call = make_call(case.config, 1, case.n)
    q, k, v = call.q, call.k, call.v
    starts = range(0, case.n, case.base_n)
    pieces = [[x[:, start : start + case.base_n] for x in (q, k, v)] for start in starts]
    attend(case.config, *pieces[0])

    def run_base() -> None:
        for piece in pieces:
            attend(case.config, *piece)

    candidates = {"base": run_base, "long": lambda: attend(case.config, q, k, v)}
    timings = interleave(candidates, repeats, warmup=0)
    results = run_call(call)
    peak = read_status("VmHWM")
    seconds = {name: timing.seconds for name, timing in timings.items()}
    return Measured(rows_error(call, results), {"peak_total": peak}, seconds)


def measure_sparse_memory(case: SparseMemoryCase) -> Measured:
    """Time of the pattern's build and of the call; peak memory above that of the inputs and the pattern."""
    _warm_up_sparse(case.config)
    before = reset_peak_memory()
    start = time.perf_counter()
    pattern = make_pattern(case.config, case.n)
    build_seconds = time.perf_counter() - start
    build_peak = read_status("VmHWM") - before
    call = make_sparse_call(case.config, case.n, pattern)
    before = reset_peak_memory()
    start = time.perf_counter()
    results = run_sparse_call(call)
    seconds = time.perf_counter() - start
    peak = read_status("VmHWM")
    nbytes = {
        "peak_extra": peak - before,
        "results": results.out.nbytes + results.lse.nbytes,
        "pattern": pattern.nbytes,
        "build_peak_extra": build_peak,
    }
    error = sparse_rows_error(call, results.out, results.lse)
    return Measured(error, nbytes, {"build": (build_seconds,), "attention": (seconds,)})


def measure_module(case: ModuleMemoryCase, name: str) -> Measured:
    """Peak memory above that of the inputs in one forward of a module, which builds its pattern itself."""
    attention = make_module(case.config, name)
    call = make_sparse_call(case.config, case.n, make_pattern(case.config, case.n))
    with torch.no_grad():
        short = WARMUP_BLOCKS * case.config.block_size
        attention(*(x[:, :short] for x in (call.q, call.k, call.v)), is_causal=case.config.is_causal)
        before = reset_peak_memory()
        start = time.perf_counter()
        out = attention(call.q, call.k, call.v, is_causal=case.config.is_causal)
        seconds = time.perf_counter() - start
    peak = read_status("VmHWM")
    nbytes = {"peak_extra": peak - before, "results": out.nbytes}
    return Measured(sparse_rows_error(call, out, None), nbytes, {"attention": (seconds,)})


def measure_build(case: PatternCase, repeats: int) -> Measured:
    """Time and peak memory of the build alone. `error` is None: there is no result to check."""
    _warm_up_sparse(case.config)
    seconds = []
    before = reset_peak_memory()
    for _ in range(repeats):
        start = time.perf_counter()
        pattern = make_pattern(case.config, case.n)
        seconds.append(time.perf_counter() - start)
        sizes = {"pattern": pattern.nbytes, "blocks": pattern.columns.numel(), "layouts": len(pattern)}
        del pattern  # or the next build would find it in its way
    return Measured(None, {"peak_extra": read_status("VmHWM") - before, **sizes}, {"build": tuple(seconds)})


def measure_ring_module(case: RingStepsCase, variant: str) -> Measured:
    """Peak memory above that of the inputs in one call of a module; its error against the function."""
    module = make_ring_module(case.config, variant)
    run_module(module, make_tensors(case.config, WARMUP_LENGTH), case.backward)
    tensors = make_tensors(case.config, case.n)
    before = reset_peak_memory()
    results = run_module(module, tensors, case.backward)
    peak = read_status("VmHWM")
    nbytes = {"peak_extra": peak - before, "results": sum(x.nbytes for x in results)}
    pairs = zip(results, ring_attend(case.config, tensors, case.backward), strict=True)
    return Measured(max(largest_error(*pair) for pair in pairs), nbytes)


def time_ring_modules(case: RingStepsCase, repeats: int) -> Measured:
    """Time of a call of each module, interleaved."""
    tensors = make_tensors(case.config, case.n)
    candidates = {
        name: partial(run_module, make_ring_module(case.config, name), tensors, case.backward)
        for name in ("base", *map(str, case.ring_sizes))
    }
    timings = interleave(candidates, repeats)
    return Measured(None, {}, {name: timing.seconds for name, timing in timings.items()})


def make_ring_module(config: RingConfig, variant: str) -> torch.nn.Module:
    """`DilatedAttention` for "base", or a ring of so many steps in this process."""
    branches = (config.segment_lengths, config.dilation_rates)
    if variant == "base":
        return DilatedAttention(*branches)
    return RingDilatedAttentionV2(*branches, ring_size=int(variant))


def run_module(module: torch.nn.Module, tensors: list[Tensor], backward: bool) -> list[Tensor]:
    """out, and with `backward` the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_(backward) for x in tensors[:3]]
    out = module(*leaves)
    return [out.detach(), *(torch.autograd.grad(out, leaves, tensors[3]) if backward else ())]


def input_and_result_bytes(case: Case) -> int:
    """Bytes of all tensors that a case in a process of its own holds at once."""
    if isinstance(case, (PatternCase, ModelCase)):
        return 0  # no tensors, or few: a pattern is small
    itemsize: int
    if isinstance(case, (SparseMemoryCase, ModuleMemoryCase)):
        itemsize = getattr(torch, case.config.dtype).itemsize
        return case.n * case.config.h * (4 * itemsize * case.config.d + 4)
    if isinstance(case, CompareCase):
        itemsize = getattr(torch, case.config.dtype).itemsize
        return case.b * case.n * case.config.h * case.config.d * itemsize * (8 if case.backward else 4)
    if isinstance(case, RingStepsCase):
        itemsize = getattr(torch, case.config.dtype).itemsize
        return case.n * case.config.h * (8 if case.backward else 5) * itemsize * case.config.d
    assert isinstance(case, (MemoryCase, LongCase, PoolCase))
    tensors = 8 if not isinstance(case, LongCase) and case.backward else 4
    positions = max(b * n for b, n in case.calls) if isinstance(case, PoolCase) else case.n
    return 4 * positions * case.config.h * (tensors * case.config.d + 1)


def _warm_up(config: Config, backward: bool) -> None:
    """Thread pools, code and tables that are loaded once must not be charged to the measured call."""
    run_call(make_call(config, 1, WARMUP_LENGTH, backward=backward))


def _warm_up_sparse(config: SparseConfig) -> None:
    n = WARMUP_BLOCKS * config.block_size
    run_sparse_call(make_sparse_call(config, n, make_pattern(config, n)))


def main() -> None:
    request = json.load(sys.stdin)
    case = case_from_dict(request["case"])
    try:
        if isinstance(case, MemoryCase):
            measured = measure_memory(case)
        elif isinstance(case, PoolCase):
            measured = measure_pool(case, request["variant"])
        elif isinstance(case, SparseMemoryCase):
            measured = measure_sparse_memory(case)
        elif isinstance(case, ModuleMemoryCase):
            measured = measure_module(case, request["variant"])
        elif isinstance(case, CompareCase):
            measured = Measured(*measure_candidate(case, request["variant"]))
        elif isinstance(case, RingStepsCase):
            measured = (
                time_ring_modules(case, request["repeats"])
                if request["variant"] == "time"
                else measure_ring_module(case, request["variant"])
            )
        elif isinstance(case, ModelCase):
            measured = Measured(*measure_model(case, request["repeats"], request["variant"]))
        elif isinstance(case, PatternCase):
            measured = measure_build(case, request["repeats"])
        else:
            assert isinstance(case, LongCase)
            measured = measure_long(case, request["repeats"])
    except (NotMeasurableError, CannotRunError) as error:
        measured = Measured(why_not=str(error))
    print(json.dumps(measured.__dict__))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
