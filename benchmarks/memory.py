"""Pooled memory against fresh memory: time and peak memory of calls with each kind of memory.

python benchmarks/memory.py --out benchmarks/results/memory.json
python benchmarks/memory.py --render --update docs/memory.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import common
import torch
from common import Config, Say, main, make_call, reduced_error, run_case
from cpu import describe_calls, varied_calls

from dilated_attention_pytorch.cli.bench.gate import WrongAnswerError, accept
from dilated_attention_pytorch.cli.bench.measure import (
    Measured,
    interleave,
    measure_in_child,
    read_status,
    reset_peak_memory,
)
from dilated_attention_pytorch.cli.bench.record import Figure, Result, Section, Table
from dilated_attention_pytorch.core import AttentionBufferManager

LONGEST_CHECKED = 32768  # longer calls have their rows checked where their memory is measured


@dataclass(frozen=True)
class PoolCase:
    """Time and peak memory of calls (b, n) with pooled memory, of each kind, over those with fresh memory.

    Timed beside them, without a target: fresh memory without the pattern cache.
    """

    name: str
    config: Config
    calls: tuple[tuple[int, int], ...]
    backward: bool = False
    target: float | None = 1.03
    lightweight_target: float | None = 1.01
    memory_target: float | None = 1.10
    repeats: int = 9
    kind: ClassVar[str] = "pool"

    def run(self, say: Say) -> Measured:
        say(f"{self.name}: checking")
        manager = AttentionBufferManager()
        error = accept(self.name, check(self, manager))
        say(f"{self.name}: right within {error:.0e}, the same with each memory, timing {self.repeats} rounds")
        timings = interleave(candidates(self, manager), self.repeats)
        largest = max(b * n for b, n in self.calls)
        needed = 4 * largest * self.config.h * ((8 if self.backward else 4) * self.config.d + 1)
        found = {
            memory: measure_in_child(measure_pool, self, memory, needed=needed)
            for memory in ("fresh", "pool", "manager")
        }
        return replace(common.gather(self, found, error, "_"), seconds=timings)

    def figures(self, found: Measured) -> list[Figure]:
        """By kind of memory the ratio of minimal times to that with fresh memory; then of peak memory."""
        targets = {"pool": self.target, "lightweight": self.lightweight_target, "manager": self.target}
        minima = {name: min(values) for name, values in found.seconds.items()}
        return [
            *(
                Figure(f"time with {name}", minima[name] / minima["fresh"], target=targets.get(name))
                for name in (*targets, "no plan cache")
            ),
            *(
                Figure(
                    f"peak memory with {name}",
                    common.ratio(found.counts, f"peak_{name}", "peak_fresh"),
                    target=self.memory_target,
                )
                for name in ("pool", "manager")
            ),
        ]


def check(case: PoolCase, manager: AttentionBufferManager) -> float:
    """The largest error; a kind of memory that changes the result is a wrong answer."""
    errors = [reduced_error(case.config, max(n for _, n in case.calls), backward=case.backward)]
    for b, n in sorted({(b, min(n, LONGEST_CHECKED)) for b, n in case.calls}):
        call = make_call(case.config, b, n, backward=case.backward)
        fresh = call.run()
        errors.append(call.error(fresh))
        for memory in ("pool", "lightweight", manager.name) * 2:  # first new buffers, then used ones
            results = make_call(case.config, b, n, backward=case.backward, memory=memory).run()
            if not all(torch.equal(x, y) for x, y in zip(fresh, results, strict=True)):
                raise WrongAnswerError(f"{case.name}: memory={memory!r} changes the result: not measured")
    return max(errors)


def candidates(case: PoolCase, manager: AttentionBufferManager) -> dict[str, Callable[[], object]]:
    """The calls of a case with fresh memory and with each kind of pooled memory, on the same tensors."""
    calls = common.arena_calls(case.config, case.calls)
    candidate = partial(common.run_calls, case.config, calls, case.backward)
    names = {"fresh": "fresh", "pool": "pool", "lightweight": "lightweight", "manager": manager.name}
    pooled = {name: partial(candidate, memory=memory) for name, memory in names.items()}
    return {**pooled, "no plan cache": partial(candidate, use_pattern_cache=False)}


def measure_pool(case: PoolCase, memory: str) -> Measured:
    """Peak memory above the inputs' over a few calls, in which a pool fills and is used again."""
    manager = AttentionBufferManager()
    memory = manager.name if memory == "manager" else memory
    make_call(case.config, 1, common.WARMUP_LENGTH, backward=case.backward).run()
    largest = max(b for b, _ in case.calls), max(n for _, n in case.calls)
    call = make_call(case.config, *largest, backward=case.backward, memory=memory)
    before = reset_peak_memory()
    for b, n in (*case.calls, largest):
        grad_out = None if call.grad_out is None else call.grad_out[:b, :n]
        results = call._replace(inputs=[x[:b, :n] for x in call.inputs], grad_out=grad_out).run()
    peak = read_status("VmHWM")
    return Measured(call.error(results), {"peak": peak, "peak_extra": peak - before})


_POOL = Config(4, 64, (1024, 2048, 4096), (1, 2, 4))
CASES = tuple(
    PoolCase(f"{'training' if backward else 'inference'}, {name}", _POOL, calls, backward, repeats=repeats)
    for backward in (False, True)
    for name, calls, repeats in (
        ("n = 512", ((1, 512),) * 16, 41),
        ("varying n", varied_calls(64, (1, 4), (256, 2048)), 7),
        ("n = 4096", ((1, 4096),), 31),
        ("n = 32768", ((1, 32768),), 9),
        ("n = 262144", ((1, 262144),), 2),
    )
)
QUICK = (PoolCase("quick pool", common.QUICK_CONFIG, ((1, 2048), (2, 777)), True, *[None] * 3, repeats=3),)


def pool_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        cells = [f"**{x.number}**" if x.met is False else x.number for x in result.figures]
        peak = result.mebibytes("peak_extra_fresh")
        rows.append([result.name, result.times("fresh"), *cells[:4], peak, *cells[4:]])
    head = ["case", "fresh, ms", "pool", "lightweight", "manager", "no plan cache"]
    return Table([*head, "fresh, extra MiB", "peak, pool", "peak, manager"], rows)


TITLE = "**Pooled memory**: time and peak memory over those with fresh memory"
SECTIONS = {"pool": Section(TITLE, pool_table, describe_calls)}
run = run_case

if __name__ == "__main__":
    sys.exit(main("memory"))
