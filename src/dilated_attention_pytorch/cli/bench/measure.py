"""HOW it is measured: interleaved timing, the kernel's books of memory, child processes, the machine."""

from __future__ import annotations

import gc
import os
import platform
import re
import statistics
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import Pipe, get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from ...core.host_memory import host_memory, is_out_of_memory
from ...kernels import Request, choose_kernel, triton
from ...kernels.triton import tuned

PACKAGE = Path(__file__).resolve().parents[2]
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
_STARTING = threading.Lock()


class Timing(tuple[float, ...]):
    """Every measured duration of a candidate, in seconds and in order."""

    @property
    def minimum(self) -> float:
        return min(self)

    @property
    def median(self) -> float:
        return statistics.median(self)

    @property
    def spread(self) -> float:
        """The distance between the quartiles; 0 for a single measurement."""
        if len(self) < 2:
            return 0.0
        lower, _, upper = statistics.quantiles(self, n=4, method="inclusive")
        return upper - lower


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    warmup: int = 1,
    at_most: Mapping[str, int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Runs all candidates once a round, in alternating order, and times each run.

    What else the machine does then falls on all of them alike, and each runs as often right after itself as
    right after another. `warmup` rounds before the first are not timed. Candidates of `at_most` take part in
    that many rounds, spread over all of them, and in no warmup.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order, limits = list(candidates), at_most or {}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would fall on whichever candidate happens to run
    try:
        for number in range(-warmup, repeats):
            for name in order:
                if name in limits and (number < 0 or number * limits[name] % repeats >= limits[name]):
                    continue
                start = clock()
                candidates[name]()
                elapsed = clock() - start
                if number >= 0:
                    seconds[name].append(elapsed)
            order.reverse()
    finally:
        if was_enabled:
            gc.enable()
    return {name: Timing(values) for name, values in seconds.items()}


class NotMeasurableError(Exception):
    """This platform or machine cannot provide the figure; the message says why."""


def reset_peak_memory() -> int:
    """Lowers the process's peak resident memory to its present one, and returns that in bytes."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError as error:
        raise NotMeasurableError(f"peak memory cannot be reset here: {error}") from error
    return read_status("VmRSS")


def read_status(field: str) -> int:
    """`VmRSS` or `VmHWM` (the peak) of this process, in bytes."""
    try:
        text = STATUS.read_text()
    except OSError as error:
        raise NotMeasurableError("peak memory is read from /proc, which this platform lacks") from error
    if found := re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE):
        return 1024 * int(found[1])
    raise NotMeasurableError(f"{STATUS} has no {field}")


@dataclass(frozen=True)
class Measured:
    """What a process found: the error of what it measured, counts by name, seconds by candidate.

    `error` is None where nothing could be compared, and `why_not` says why nothing was measured.
    """

    error: float | None = None
    counts: dict[str, int] = field(default_factory=dict)
    seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    why_not: str | None = None


def why_too_large(needed: int) -> str | None:
    """Why so many bytes of tensors do not fit this machine; None if they do."""
    now = host_memory()
    if now is None or needed <= 0.9 * now.available:
        return None
    return f"needs {needed / 2**30:.1f} GiB, {now.available / 2**30:.1f} GiB are available"


def measure_in_child(
    measure: Callable[..., Measured], *arguments: Any, needed: int = 0, timeout: float | None = None
) -> Measured:
    """What `measure` finds in a process of its own, which is ended after `timeout` seconds.

    Peak memory is a property of a process, and a new one has no freed memory to hide in. It is not started
    where `needed` bytes are not to be had.
    """
    if why_not := why_too_large(needed):
        return Measured(why_not=why_not)
    receiver, sender = Pipe(duplex=False)
    process = start_process(torch.get_num_threads(), _answer, sender, measure, *arguments)
    sender.close()
    try:
        if not receiver.poll(timeout):
            return Measured(why_not=f"it was ended after {timeout:.0f} s")
        found: Measured = receiver.recv()
        return found
    except EOFError:
        process.join()
        if (code := process.exitcode or 0) >= 0:  # its error stands on standard error
            raise RuntimeError(f"measuring in a process of its own failed with status {code}") from None
        return Measured(why_not=f"the process was ended by signal {-code}, likely out of memory")
    finally:
        process.kill()
        process.join()


def start_process(threads: int, target: Callable[..., None], *arguments: Any) -> SpawnProcess:
    """A new interpreter that calls `target`, with so many threads from its beginning."""
    process = get_context("spawn").Process(target=target, args=arguments)
    with _STARTING:  # the environment is one for all threads
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(threads)
        try:
            process.start()
        finally:
            del os.environ["OMP_NUM_THREADS"]
            os.environ |= {} if before is None else {"OMP_NUM_THREADS": before}
    return process


def _answer(sender: Connection, measure: Callable[..., Measured], *arguments: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")  # the parent's gate has shown them
    torch.manual_seed(0)
    try:
        found = measure(*arguments)
    except NotMeasurableError as error:
        found = Measured(why_not=str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        found = Measured(why_not=f"out of memory: {error}")
    sender.send(found)


def _end_with_parent() -> None:
    """A parent that was killed can end nobody."""
    if (parent := parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)


def machine_facts() -> dict[str, str | int | float | None]:
    """Of this machine, for the record; what cannot be found is None."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": _or_none(lambda: round(os.getloadavg()[0], 2)),
        "memory_bytes": _or_none(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def kernel_facts(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The kernel that "auto" takes; of triton the queries x keys, warps and stages of each pass as well."""
    name = choose_kernel(Request(device, dtype, head_dim=head_dim)).name
    if name != "triton":
        return name
    found = {which: triton.blocks_of(device, which, dtype, head_dim) for which in tuned.PASSES}
    words = [f"{which} {x.blocks} {'tuned here' if x.is_tuned else 'shipped'}" for which, x in found.items()]
    return f"{name} ({'; '.join(words)})"


def _or_none(read: Callable[[], float]) -> float | None:
    try:
        return read()
    except (AttributeError, OSError, ValueError):  # of systems that do not tell
        return None


def project_facts() -> dict[str, str | bool | None]:
    """The version, and the commit if the package runs from a checkout of its own repository."""
    try:
        number = version("dilated-attention")
    except PackageNotFoundError:
        number = None
    root = _git("rev-parse", "--show-toplevel")
    # A package installed below some other project's checkout must not report that project's commit.
    is_own = root is not None and (Path(root) / "src" / PACKAGE.name).resolve() == PACKAGE
    commit = _git("rev-parse", "--verify", "HEAD") if is_own else None
    measured = (str(PACKAGE), str(PACKAGE.parents[1] / "benchmarks" / "**.py"))
    changes = _git("status", "--porcelain", "--", *measured) if commit else None
    return {"version": number, "commit": commit, "changed": bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu_model() -> str | None:
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: *(.*)$", file.read_text(), re.MULTILINE) if file.is_file() else None
    return found[1].strip() if found else platform.processor() or platform.machine() or None
