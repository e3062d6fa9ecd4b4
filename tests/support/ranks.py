"""Real processes for tests of several ranks: gloo on this machine, one thread each, nothing left behind."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parents[1]
# Ranks are forked from a server that has imported all but the tests: a start costs milliseconds. What torch
# imports at first use is named here, too; each rank would take more than a second for it.
PRELOADED = [
    "pytest",
    "torch._dynamo.backends.debugging",
    "torch._functorch.aot_autograd",
    "torch._inductor.config",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "dilated_attention_pytorch.modules",
    "dilated_attention_pytorch.ring",
]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOADED)

RankFunction = Callable[..., Any]  # (rank, *args), at the top level of a file below tests/


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: with a value, with an error's traceback, or with neither if it was killed."""

    rank: int
    exit_code: int | None  # None: still running at the time limit, then killed
    value: Any = None
    error: str | None = None  # of a rank that was still running: where it was

    @property
    def is_well(self) -> bool:
        return self.exit_code == 0 and self.error is None


def run_ranks(world_size: int, function: RankFunction, *args: Any, timeout: float = 120.0) -> list[Any]:
    """`function(rank, *args)` in `world_size` processes of one default group; their results by rank.

    Raises with the tracebacks of all ranks if one of them fails; after `timeout` seconds all are killed.
    """
    outcomes = watch_ranks(world_size, function, *args, timeout=timeout)
    if failed := [x for x in outcomes if not x.is_well]:
        lines = [f"rank {x.rank}: exit code {x.exit_code}, {x.error}" for x in failed]
        raise AssertionError("\n".join([*lines, f"(exit code None: killed after {timeout} s)"]))
    return [outcome.value for outcome in outcomes]


def watch_ranks(world_size: int, function: RankFunction, *args: Any, timeout: float = 120.0) -> list[Outcome]:
    """As `run_ranks`, for ranks that may fail: how each of them ended."""
    module = ".".join(Path(inspect.getfile(function)).resolve().relative_to(TESTS).with_suffix("").parts)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [
            _CONTEXT.Process(
                target=_rank, args=(rank, world_size, folder, timeout, module, function.__qualname__, args)
            )
            for rank in range(world_size)
        ]
        try:
            for rank in ranks:
                rank.start()
            deadline = time.monotonic() + timeout
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
            codes = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                if rank.pid is not None and rank.exitcode is None:
                    rank.kill()
                    rank.join()
        return [_read_outcome(Path(folder), rank, code) for rank, code in enumerate(codes)]


def _read_outcome(folder: Path, rank: int, exit_code: int | None) -> Outcome:
    file, stack = folder / f"rank-{rank}", folder / f"stack-{rank}"
    if file.exists():
        return Outcome(rank, exit_code, *pickle.loads(file.read_bytes()))
    return Outcome(rank, exit_code, error=stack.read_text() if stack.exists() and exit_code is None else None)


def _rank(
    rank: int, world_size: int, folder: str, timeout: float, module: str, function: str, args: tuple[Any, ...]
) -> None:
    """The life of one rank, in its own process."""
    with Path(folder, f"stack-{rank}").open("w") as stack:
        faulthandler.dump_traceback_later(0.95 * timeout, file=stack)
        value, error = None, None
        try:
            _settle()
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            value = getattr(importlib.import_module(module), function)(rank, *args)
        except BaseException:
            error = traceback.format_exc()
        partial = Path(folder, f"partial-{rank}")
        partial.write_bytes(pickle.dumps((value, error)))
        partial.rename(Path(folder, f"rank-{rank}"))
        if error is None:
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def _settle() -> None:
    """The settings of tests/conftest.py and pyproject.toml for this process."""
    gc.freeze()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    warnings.simplefilter("error")
    for message in (*TORCH_WARNINGS, ".* tokens exceed the longest segment"):
        warnings.filterwarnings("ignore", message)


# What torch says about itself.
TORCH_WARNINGS = (
    "Failed to initialize NumPy",
    "`torch.jit.script(_method)?` is deprecated",
    "The given buffer is not writable",
)
