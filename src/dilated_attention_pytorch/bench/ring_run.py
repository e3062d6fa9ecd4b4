"""Runs the cases of several ranks: starts processes, checks what they compute, then has them measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from ..core.host_memory import host_memory
from .cases import case_to_dict
from .child import child_environment, measure_in_child
from .config import Config
from .gate import TOLERANCES, accept, reduced_error
from .measure import interleave
from .record import Result, make_result
from .ring_cases import STRATEGIES, RingCase, RingConfig, RingMemoryCase, RingStepsCase, RingTimeCase

REDUCED_LENGTH = 1024
REDUCED_EXTRA = 37  # so that shards are uneven and end within segments
CHILD = f"{__package__}.ring_child"


class Group:
    """Processes that all do what they are told, at the same time."""

    def __init__(self, processes: list[subprocess.Popen[str]], errors: list[IO[str]]) -> None:
        self.processes, self.errors = processes, errors

    def ask(self, do: str, **request: Any) -> list[dict[str, Any]]:
        """The answers of all, in order."""
        for process in self.processes:
            self._write(process, {"do": do, **request})
        return [
            self._read(process, error) for process, error in zip(self.processes, self.errors, strict=True)
        ]

    def _write(self, process: subprocess.Popen[str], request: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()

    def _read(self, process: subprocess.Popen[str], error: IO[str]) -> dict[str, Any]:
        assert process.stdout is not None
        if line := process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        status = process.wait()
        error.seek(0)
        raise RuntimeError(f"a rank ended with status {status}:\n{error.read()}")


@contextmanager
def start_group(case: RingCase, size: int, threads: int) -> Iterator[Group]:
    """`size` ranks on this machine, or one process alone; they end with the context."""
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder:
        group = Group([], [])
        try:
            for rank in range(size):
                error = Path(folder, f"stderr-{rank}").open("w+")  # noqa: SIM115 - closed below, with the rank
                group.errors.append(error)
                process = subprocess.Popen(
                    [sys.executable, "-m", CHILD],
                    env={**child_environment(), "OMP_NUM_THREADS": str(threads)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=error,
                    text=True,
                )
                group.processes.append(process)
                settings = {"rank": rank, "size": size, "threads": threads, "store": f"{folder}/store"}
                group._write(process, {"case": case_to_dict(case), **settings})
            yield group
            for process in group.processes:
                assert process.stdin is not None
                process.stdin.close()
            for process in group.processes:
                process.wait(60)
        finally:
            for process in group.processes:
                process.kill()
                process.wait()
                for pipe in filter(None, (process.stdin, process.stdout)):
                    _close(pipe)
            for file in group.errors:
                file.close()


def _close(pipe: IO[str]) -> None:
    with suppress(BrokenPipeError):  # what was not yet written is for a process that is gone
        pipe.close()


def run_ring(case: RingCase, repeats: int, say: Callable[[str], None]) -> Result:
    say(f"{case.name}: checking")
    error = accept(case.name, _definition_error(case), TOLERANCES[case.config.dtype])
    match case:
        case RingTimeCase():
            return _run_time(case, repeats, error, say)
        case RingMemoryCase():
            return _run_memory(case, repeats, error, say)
        case RingStepsCase():
            return _run_steps(case, repeats, error, say)


def _definition_error(case: RingCase) -> float:
    """Of one process, against the reference: ranks are then held to one process."""
    config = case.config
    plain = Config(config.h, config.d, config.segment_lengths, config.dilation_rates, config.is_causal)
    return reduced_error(plain, case.n, backward=case.backward)


def _check_ranks(case: RingTimeCase | RingMemoryCase, group: Group, config: RingConfig, n: int) -> float:
    """The largest error of any rank and strategy against one process."""
    errors = []
    for strategy in STRATEGIES:
        answers = group.ask("check", config=asdict(config), n=n, strategy=strategy)
        errors += [answer["error"] for answer in answers]
    return accept(case.name, max(errors), TOLERANCES[config.dtype])


def reduced(case: RingCase) -> tuple[RingConfig, int]:
    """A short copy of a case, with shards that are uneven and end within segments."""
    factor = max(1, case.n // REDUCED_LENGTH)
    segments = tuple(max(r, w // factor) for w, r in case.config.spec.branches)
    return replace(case.config, segment_lengths=segments), case.n // factor + REDUCED_EXTRA


def _run_time(case: RingTimeCase, repeats: int, error: float, say: Callable[[str], None]) -> Result:
    if why_not := _too_large(case, 3 * case.num_ranks + 1):
        return make_result(case, repeats, error, {}, {}, why_not)
    with start_group(case, 1, case.num_ranks) as alone, start_group(case, case.num_ranks, 1) as ranks:
        error = max(error, _check_ranks(case, ranks, *reduced(case)))
        error = max(error, _check_ranks(case, ranks, case.config, case.n))
        say(f"{case.name}: right within {error:.0e} with each strategy, timing {repeats} rounds")
        for group in (alone, ranks):
            group.ask("prepare")
        candidates: dict[str, Callable[[], object]] = {"alone": partial(alone.ask, "run", strategy="")}
        for strategy in STRATEGIES:
            candidates[strategy] = partial(ranks.ask, "run", strategy=strategy)
        timings = interleave(candidates, repeats)
        counts = {}
        for strategy in STRATEGIES:
            answers = ranks.ask("run", strategy=strategy)
            counts[f"received {strategy}"] = max(answer["received"] for answer in answers)
    seconds = {name: timing.seconds for name, timing in timings.items()}
    return make_result(case, repeats, error, seconds, counts)


def _run_memory(case: RingMemoryCase, repeats: int, error: float, say: Callable[[str], None]) -> Result:
    counts: dict[str, int] = {}
    if why_not := _too_large(case, 1):
        return make_result(case, repeats, error, {}, {}, why_not)
    for size in case.ranks:
        # Their peaks are properties of processes: each number of ranks gets new ones.
        with start_group(case, size, 1) as group:
            error = max(error, _check_ranks(case, group, *reduced(case)))
            say(f"{case.name}: right within {error:.0e} when reduced, measuring {size} ranks")
            answers = group.ask("measure_memory", strategy="ring")
        if "why_not" in answers[0]:
            return make_result(case, repeats, error, {}, {}, answers[0]["why_not"])
        for name in ("peak", "tensors", "received"):
            counts[f"{name} {size}"] = max(answer[name] for answer in answers)
    return make_result(case, repeats, error, {}, counts)


def _run_steps(case: RingStepsCase, repeats: int, error: float, say: Callable[[str], None]) -> Result:
    say(f"{case.name}: right within {error:.0e} when reduced, measuring in processes of their own")
    counts: dict[str, int] = {}
    for variant in ("base", *map(str, case.ring_sizes)):
        measured = measure_in_child(case, 1, variant)
        if measured.error is None:
            return make_result(case, repeats, error, {}, {}, measured.why_not)
        error = max(error, accept(case.name, measured.error, TOLERANCES[case.config.dtype]))
        counts |= {f"{name} {variant}": nbytes for name, nbytes in measured.nbytes.items()}
    timed = measure_in_child(case, repeats, "time")
    return make_result(case, repeats, error, timed.seconds, counts, timed.why_not)


def _too_large(case: RingTimeCase | RingMemoryCase, times: int) -> str | None:
    """Whether the tensors of a case, held so many times, do not fit this machine."""
    itemsize: int = getattr(torch, case.config.dtype).itemsize
    tensors = 8 if case.backward else 4
    needed, now = times * tensors * case.n * case.config.h * case.config.d * itemsize, host_memory()
    if now is None or needed <= 0.9 * now.available:
        return None
    return f"needs {needed / 2**30:.1f} GiB, {now.available / 2**30:.1f} GiB are available"
