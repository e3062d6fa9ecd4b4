"""Several ranks against one process, in time and memory; and one process in steps against the base module.

    python benchmarks/ranks.py --out benchmarks/results/ranks.json
    python benchmarks/ranks.py --render --update docs/distributed.md

Ranks are processes that do what their parent says, and sleep while others are measured.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import common
import torch
import torch.distributed as dist
from common import Config, Say, main, reduced_error as definition_error, run_case, show_branches
from torch import Tensor, nn

from dilated_attention_pytorch import DilatedAttention, RingDilatedAttentionV2
from dilated_attention_pytorch.cli.bench import gate
from dilated_attention_pytorch.cli.bench.measure import (
    Measured,
    NotMeasurableError,
    interleave,
    measure_in_child,
    start_process,
    why_too_large,
)
from dilated_attention_pytorch.cli.bench.record import Figure, Result, Section, Table
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.ring import plan_ring, ring_dilated_attention, ring_traffic, shard_bounds

STRATEGIES = ("ring", "ulysses")
REDUCED_LENGTH = 1024
REDUCED_EXTRA = 37  # so that shards are uneven and end within segments
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class RingTimeCase:
    """Time of `num_ranks` ranks of one thread each over that of one process with as many threads.

    The same global work; the target is for every strategy.
    """

    name: str
    config: Config
    n: int
    num_ranks: int = 2
    backward: bool = False
    target: float | None = None
    repeats: int = 5
    kind: ClassVar[str] = "ring time"

    def run(self, say: Say) -> Measured:
        error = check(self, say)
        if why_not := too_large(self, 3 * self.num_ranks + 1):
            return Measured(error, why_not=why_not)
        with start_group(self, 1, self.num_ranks) as alone, start_group(self, self.num_ranks, 1) as ranks:
            error = max(error, check_ranks(self, ranks, *reduced(self)))
            error = max(error, check_ranks(self, ranks, self.config, self.n))
            say(f"{self.name}: right within {error:.0e} with each strategy, timing {self.repeats} rounds")
            for group in (alone, ranks):
                group.ask("prepare")
            candidates = {"alone": partial(alone.ask, "run", strategy="")}
            candidates |= {strategy: partial(ranks.ask, "run", strategy=strategy) for strategy in STRATEGIES}
            timings = interleave(candidates, self.repeats)
            counts = {
                f"received {strategy}": max(ranks.ask("run", strategy=strategy)) for strategy in STRATEGIES
            }
        return Measured(error, counts, timings)

    def figures(self, found: Measured) -> list[Figure]:
        """By strategy the ratios of minima and of medians to one process."""
        return [
            replace(figure, name=f"{strategy}: {figure.name}")
            for strategy in STRATEGIES
            for figure in common.time_figures(found, strategy, "alone", self.target)
        ]


@dataclass(frozen=True)
class RingMemoryCase:
    """Peak memory of the rank that needs most, times the number of ranks, over that of one rank alone.

    Inputs, results and scratch: all that a process adds to what it had before it made its tensors.
    """

    name: str
    config: Config
    n: int
    ranks: tuple[int, ...] = (1, 2, 4)
    backward: bool = False
    target: float | None = None
    repeats: int = 1
    kind: ClassVar[str] = "ring memory"

    def run(self, say: Say) -> Measured:
        error = check(self, say)
        counts: dict[str, int] = {}
        if why_not := too_large(self, 1):
            return Measured(error, why_not=why_not)
        for size in self.ranks:
            # Their peaks are properties of processes: each number of ranks gets new ones.
            with start_group(self, size, 1) as group:
                error = max(error, check_ranks(self, group, *reduced(self)))
                say(f"{self.name}: right within {error:.0e} when reduced, measuring {size} ranks")
                answers = group.ask("measure_memory", strategy="ring")
            if isinstance(answers[0], str):
                return Measured(error, why_not=answers[0])
            counts |= {f"{name} {size}": max(answer[name] for answer in answers) for name in answers[0]}
        return Measured(error, counts)

    def figures(self, found: Measured) -> list[Figure]:
        """By number of ranks the memory of all of them over that of the first number."""
        first, *others = self.ranks
        figures = []
        for size in others:
            over = common.ratio(found.counts, f"peak {size}", f"peak {first}")
            scaled = None if over is None else over * size / first
            label = f"{size} ranks: memory of all over that of {first}"
            figures.append(Figure(label, scaled, target=self.target))
        return figures


@dataclass(frozen=True)
class RingStepsCase:
    """One process: `RingDilatedAttentionV2` of each ring size over `DilatedAttention`.

    The target is for the peak memory that a call adds to its inputs; time stands beside it.
    """

    name: str
    config: Config
    n: int
    ring_sizes: tuple[int, ...] = (1, 2, 4, 8)
    backward: bool = False
    target: float | None = None
    repeats: int = 3
    kind: ClassVar[str] = "ring steps"

    @property
    def variants(self) -> list[str]:
        return ["base", *map(str, self.ring_sizes)]

    def run(self, say: Say) -> Measured:
        error, found = check(self, say), {}
        say(f"{self.name}: right within {error:.0e} when reduced, measuring in processes of their own")
        for variant in self.variants:
            found[variant] = measure_in_child(measure_module, self, variant, needed=tensor_bytes(self))
            if found[variant].error is None:
                return Measured(error, why_not=found[variant].why_not)
        gathered = common.gather(self, found, error)
        timed = measure_in_child(time_modules, self, needed=tensor_bytes(self))
        return Measured(gathered.error, gathered.counts, timed.seconds, timed.why_not)

    def figures(self, found: Measured) -> list[Figure]:
        """By ring size the ratio of peak memory to the base, then of minimal times."""
        minima = {name: min(values) for name, values in found.seconds.items()}
        figures = []
        for size in self.variants[1:]:
            over = common.ratio(found.counts, f"peak_extra {size}", "peak_extra base")
            label = f"ring_size {size}: peak extra memory over the base"
            figures.append(Figure(label, over, target=self.target))
            figures.append(
                Figure(f"ring_size {size}: time over the base", common.ratio(minima, size, "base"))
            )
        return figures


def check(case: Any, say: Say) -> float:
    """Of one process, against the reference: ranks are then held to one process."""
    say(f"{case.name}: checking")
    config = Config(case.config.h, case.config.d, *case.config.branches, case.config.is_causal)
    error = definition_error(config, case.n, backward=case.backward)
    return gate.accept(case.name, error)


def reduced(case: Any) -> tuple[Config, int]:
    """A short copy of a case, with shards that are uneven and end within segments."""
    factor = max(1, case.n // REDUCED_LENGTH)
    segments = tuple(max(r, w // factor) for w, r in case.config.spec.branches)
    return replace(case.config, segment_lengths=segments), case.n // factor + REDUCED_EXTRA


def check_ranks(case: Any, group: Group, config: Config, n: int) -> float:
    """The largest error of any rank and strategy against one process."""
    errors = [group.ask("check", config=config, n=n, strategy=strategy) for strategy in STRATEGIES]
    return gate.accept(case.name, max(map(max, errors)), config.dtype)


def tensor_bytes(case: Any) -> int:
    itemsize: int = getattr(torch, case.config.dtype).itemsize
    return (8 if case.backward else 5) * case.n * case.config.h * case.config.d * itemsize


def too_large(case: Any, times: int) -> str | None:
    """Why the tensors of a case, held so many times, do not fit this machine."""
    return why_too_large(times * tensor_bytes(case))


class Rank:
    """This process, its shard of the sequence and what it measures there. Alone, it holds all of it."""

    def __init__(self, case: RingTimeCase | RingMemoryCase, rank: int, size: int) -> None:
        self.case, self.rank, self.size = case, rank, size
        self.tensors: list[Tensor] = []

    def check(self, config: Config, n: int, strategy: str) -> float:
        """The error of this shard, out and gradients, against one process that has all tokens."""
        whole = make_tensors(config, n)
        own = slice(*shard_bounds(n))
        ring_traffic().reset()
        results = attend(config, [x[:, own].clone() for x in whole], self.case.backward, strategy)
        self.check_traffic(config, n, strategy)
        expected = attend(config, whole, self.case.backward)
        return max(gate.largest_error(x, y[:, own]) for x, y in zip(results, expected, strict=True))

    def check_traffic(self, config: Config, n: int, strategy: str) -> None:
        """The bytes that were received must be those of the schedule."""
        schedule = plan_ring(
            *(*config.branches, n),
            num_ranks=self.size,
            num_heads=config.h,
            head_dim=config.d,
            dtype=getattr(torch, config.dtype),
            is_causal=config.is_causal,
            strategy="ulysses" if strategy == "ulysses" else "ring",
        )
        planned = schedule.received_bytes(self.rank)
        if self.case.backward:
            planned += schedule.received_bytes(self.rank, "backward")
        received = ring_traffic().received_bytes
        if self.size > 1 and received != planned:
            raise RuntimeError(f"rank {self.rank} received {received} bytes where {planned} were planned")

    def prepare(self) -> None:
        """Makes the tensors that are timed."""
        own = slice(*shard_bounds(self.case.n))
        self.tensors = [x[:, own].clone() for x in make_tensors(self.case.config, self.case.n)]

    def run(self, strategy: str) -> int:
        """The bytes that this rank received in a call."""
        ring_traffic().reset()
        attend(self.case.config, self.tensors, self.case.backward, strategy if self.size > 1 else None)
        return ring_traffic().received_bytes

    def measure_memory(self, strategy: str) -> dict[str, int] | str:
        """Peak memory of tensors, results and scratch. What libraries set up once is in place already."""
        start, stop = shard_bounds(self.case.n)
        count = 4 if self.case.backward else 3

        def work() -> int:
            tensors = make_tensors(self.case.config, stop - start, count, seed=self.rank)
            results = attend(self.case.config, tensors, self.case.backward, strategy)
            return sum(x.nbytes for x in (*tensors, *results))

        try:
            held, counts, _ = common.measure_once(work)
        except NotMeasurableError as error:
            return str(error)
        return {"peak": counts["peak_extra"], "tensors": held, "received": ring_traffic().received_bytes}


def make_tensors(config: Config, n: int, count: int = 4, seed: int = 0) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    return gate.make_inputs((1, n, config.h, config.d), config.dtype, count=count, seed=seed)[0]


def attend(
    config: Config, tensors: list[Tensor], backward: bool, strategy: str | None = None
) -> list[Tensor]:
    """out, and with `backward` the gradients of q, k and v; with a strategy, of this rank's shard."""
    function: Any = dilated_attention
    if strategy is not None:
        function = partial(ring_dilated_attention, strategy=strategy)
    spec = config.spec
    return gate.call(lambda *qkv: function(*qkv, spec), tensors[:3], tensors[3] if backward else None)


def serve(connection: Connection, case: Any, rank: int, size: int, store: str) -> None:
    """A rank: answers requests until there are none."""
    if size > 1:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        where = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
        dist.init_process_group("gloo", timeout=TIMEOUT, **where)
    this = Rank(case, rank, size)
    while (request := connection.recv()) is not None:
        do, options = request
        connection.send(getattr(this, do)(**options))
    if size > 1:
        dist.destroy_process_group()


class Group:
    """Processes that all do what they are told, at the same time."""

    def __init__(self) -> None:
        self.ranks: list[tuple[Any, Connection]] = []

    def ask(self, do: str, **options: Any) -> list[Any]:
        """The answers of all, in order."""
        for _, connection in self.ranks:
            connection.send((do, options))
        return [self._read(process, connection) for process, connection in self.ranks]

    def _read(self, process: Any, connection: Connection) -> Any:
        try:
            return connection.recv()
        except EOFError:
            process.join()  # its error stands on standard error
            raise RuntimeError(f"a rank ended with status {process.exitcode}") from None


@contextmanager
def start_group(case: Any, size: int, threads: int) -> Iterator[Group]:
    """`size` ranks on this machine, or one process alone; they end with the context."""
    group = Group()
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder:
        try:
            for rank in range(size):
                ours, theirs = Pipe()
                process = start_process(threads, serve, theirs, case, rank, size, f"{folder}/store")
                theirs.close()
                group.ranks.append((process, ours))
            yield group
            for _, connection in group.ranks:
                connection.send(None)
            for process, _ in group.ranks:
                process.join(60)
        finally:
            for process, connection in group.ranks:
                process.kill()
                process.join()
                connection.close()


def make_module(config: Config, variant: str) -> nn.Module:
    """`DilatedAttention` for "base", or a ring of so many steps in this process."""
    if variant == "base":
        return DilatedAttention(*config.branches)
    return RingDilatedAttentionV2(*config.branches, ring_size=int(variant))


def run_module(module: nn.Module, tensors: list[Tensor], backward: bool) -> list[Tensor]:
    """out, and with `backward` the gradients of q, k and v."""
    return gate.call(module, tensors[:3], tensors[3] if backward else None)


def measure_module(case: RingStepsCase, variant: str) -> Measured:
    """Peak memory above that of the inputs in one call of a module; its error against the function."""
    module = make_module(case.config, variant)
    run_module(module, make_tensors(case.config, common.WARMUP_LENGTH), case.backward)
    tensors = make_tensors(case.config, case.n)
    results, counts, _ = common.measure_once(lambda: run_module(module, tensors, case.backward))
    pairs = zip(results, attend(case.config, tensors, case.backward), strict=True)
    error = max(gate.largest_error(*pair) for pair in pairs)
    return Measured(error, {**counts, "results": sum(x.nbytes for x in results)})


def time_modules(case: RingStepsCase) -> Measured:
    """Time of a call of each module, interleaved."""
    tensors = make_tensors(case.config, case.n)
    modules = {name: make_module(case.config, name) for name in case.variants}
    calls = {name: partial(run_module, module, tensors, case.backward) for name, module in modules.items()}
    timings = interleave(calls, case.repeats)
    return Measured(None, {}, timings)


# The longest segments are longer than a shard, so that keys travel between all ranks.
_SPEED = Config(8, 64, (2048, 16384, 65536), (1, 4, 16))
_LONG = Config(8, 64, (2048, 16384, 262144), (1, 4, 64))
_STEPS = Config(8, 64, (2048, 4096, 8192), (1, 2, 4))
_LONG_LOW, _STEPS_LOW = (replace(config, dtype="bfloat16") for config in (_LONG, _STEPS))
_HELD = "ranks, memory of forward"
CASES = (
    RingTimeCase("two ranks, forward", _SPEED, 65536),
    RingTimeCase("two ranks, forward + backward", _SPEED, 65536, backward=True, target=1.15),
    RingMemoryCase(_HELD, _LONG, 262144, target=1.15),
    RingMemoryCase(f"{_HELD} + backward", _LONG, 262144, backward=True, target=1.15),
    RingMemoryCase(f"{_HELD} + backward in bfloat16", _LONG_LOW, 262144, backward=True, target=1.15),
    RingStepsCase("steps, forward", _STEPS, 131072, target=1.05),
    RingStepsCase("steps, forward in bfloat16", _STEPS_LOW, 65536, target=1.05),
    RingStepsCase("steps, forward + backward", _STEPS, 65536, backward=True, target=1.05, repeats=2),
)
_SMALL = Config(4, 16, (32, 128, 1024), (1, 2, 4))
QUICK = (RingTimeCase("quick two ranks", _SMALL, 1024, backward=True, repeats=2),)


def describe(case: dict[str, Any], more: str = "") -> str:
    config = case["config"]
    sizes = f"b = 1, n = {case['n']} in all, h = {config['h']}, d = {config['d']}, {config['dtype']}"
    return f"{sizes}{more}, {show_branches(config)}{', causal' if config['is_causal'] else ''}"


def describe_ranks(case: dict[str, Any]) -> str:
    size = case["num_ranks"]
    return describe(case, f", {size} ranks of 1 thread against 1 process of {size} threads")


def time_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        alone = result.times("alone")
        pairs = zip(STRATEGIES, result.figures[::2], result.figures[1::2], strict=True)
        for strategy, minimum, median in pairs:
            ratios = [result.shown(minimum)[0], median.number, minimum.verdict]
            received = result.mebibytes(f"received {strategy}")
            times = [alone, result.times(strategy)]
            rows.append([f"{result.name}, {strategy}", *times, *ratios, received])
    head = ["case and strategy", "one process, ms", "ranks, ms", "ratio of minima", "of medians", "target"]
    return Table([*head, "received by a rank, MiB"], rows)


def memory_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        figures = [Figure("", 1.0 if result.counts else None), *result.figures]
        for size, figure in zip(result.case["ranks"], figures, strict=True):
            cells = [result.mebibytes(f"{name} {size}") for name in ("peak", "tensors", "received")]
            label = f"{result.name}, {size} rank{'' if size == 1 else 's'}"
            rows.append([label, *cells, *result.shown(figure)])
    head = ["case", "peak of a rank, MiB", "its tensors, MiB", "it receives, MiB", "times ranks, over one"]
    return Table([*head, "target"], rows)


def steps_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        peak, times = result.mebibytes("peak_extra base"), result.times("base")
        rows.append([f"{result.name}, base", peak, "", "", times, ""])
        pairs = zip(result.case["ring_sizes"], result.figures[::2], result.figures[1::2], strict=True)
        for size, memory, time in pairs:
            cells = [result.mebibytes(f"peak_extra {size}"), *result.shown(memory)]
            label = f"{result.name}, ring_size {size}"
            rows.append([label, *cells, result.times(str(size)), time.number])
    return Table(["case", "peak extra, MiB", "ratio", "target", "ms", "ratio of minima"], rows)


SECTIONS = {
    "ring time": Section(
        "**Several ranks, time** over one process with as many threads", time_table, describe_ranks
    ),
    "ring memory": Section(
        "**Several ranks, memory**: that of all ranks over that of one",
        memory_table,
        partial(describe, more=", ranks of 1 thread"),
    ),
    "ring steps": Section(
        "**One process in steps**: `RingDilatedAttentionV2` over the base", steps_table, describe
    ),
}
run = run_case

if __name__ == "__main__":
    sys.exit(main("ranks"))
