"""Durations, their order and their ratios, by a clock that the test moves; and the peak of this process."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention_pytorch.bench import candidates, child, measure
from dilated_attention_pytorch.bench.cases import LongCase, MemoryCase, TimeCase
from dilated_attention_pytorch.bench.config import Config
from dilated_attention_pytorch.bench.measure import NotMeasurableError, Timing, interleave
from dilated_attention_pytorch.core.host_memory import Memory

CONFIG = Config(4, 8, (16, 40), (1, 2))


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CountPairs(TorchDispatchMode):
    """Counts the query-key pairs that flash kernels see, and calls of anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_pairs = self.backward_pairs = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.forward_pairs += args[0].shape[:3].numel() * args[1].shape[2]
        elif func == torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self.backward_pairs += args[1].shape[:3].numel() * args[2].shape[2]
        else:
            self.others += 1
        return func(*args, **(kwargs or {}))


def test_candidates_alternate_and_reverse_each_round() -> None:
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    timings = interleave(runs, 3, warmup=1)
    assert "".join(order) == "abbaabba"
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": 3, "b": 3}


def test_durations_are_those_of_the_clock_without_warmup() -> None:
    clock = FakeClock()
    durations = {"bare": iter([50.0, 2.0, 4.0, 3.0]), "dilated": iter([70.0, 3.0, 8.0, 6.0])}

    def runner(name: str) -> None:
        clock.now += next(durations[name])

    runs = {name: (lambda name=name: runner(name)) for name in durations}
    timings = interleave(runs, 3, clock=clock)
    assert timings == {"bare": Timing((2.0, 4.0, 3.0)), "dilated": Timing((3.0, 8.0, 6.0))}


def test_a_long_candidate_takes_part_in_some_rounds_spread_over_all() -> None:
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    timings = interleave(runs, 5, warmup=1, at_most={"b": 2})
    assert "".join(order) == "a" + "ba" + "a" + "a" + "ab" + "a"
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": 5, "b": 2}


def test_interleave_refuses_no_rounds() -> None:
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        interleave({}, 0)


def test_timing_statistics() -> None:
    timing = Timing((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (timing.minimum, timing.median, timing.spread) == (1.0, 3.0, 2.0)
    assert Timing((7.0,)).spread == 0.0


def test_arena_cuts_distinct_tensors_and_starts_over_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "ARENA_NUMEL", 10)
    arena = candidates.Arena([(2, 3), (4,), (5,), (6, 2)], seed=0)
    assert arena.memory.numel() == 12  # the largest tensor decides where the bound is too small for it
    starts = [arena.take(shape).storage_offset() for shape in [(2, 3), (4,), (5,), (6, 2)]]
    assert starts == [0, 6, 0, 0]
    assert arena.take((3, 4)).is_contiguous()


@pytest.mark.parametrize("backward", [False, True])
def test_bare_kernel_does_the_work_of_the_plan(backward: bool) -> None:
    case = TimeCase("tiny", CONFIG, ((2, 100), (1, 37)), backward=backward)
    run = candidates.bare_candidate(case)
    with CountPairs() as counter:
        run()
    assert counter.others == 0
    forward_pairs, backward_pairs = counter.forward_pairs, counter.backward_pairs
    assert (backward_pairs > 0) == backward
    assert 2 * CONFIG.d * (2 * forward_pairs + 5 * backward_pairs) == candidates.count_flops(case)


@pytest.mark.parametrize("backward", [False, True])
def test_dilated_candidate_makes_every_call(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = TimeCase("tiny", CONFIG, ((2, 20), (1, 37)), backward=backward, new_lengths=True)
    sizes = []
    real = candidates.attend
    monkeypatch.setattr(
        candidates, "attend", lambda c, q, k, v: sizes.append(tuple(q.shape)) or real(c, q, k, v)
    )
    candidates.dilated_candidate(case)()
    assert sizes == [(2, 20, 4, 8), (1, 37, 4, 8)]


def test_peak_is_seen_even_when_its_memory_is_gone() -> None:
    if not measure.CLEAR_REFS.exists():
        pytest.skip("this platform has no /proc/self/clear_refs")
    before = measure.reset_peak_memory()
    # Pages of its own, freed at once: a tensor might get memory that the process has kept from before.
    with mmap.mmap(-1, 64 * 2**20) as pages:
        for page in range(0, len(pages), mmap.PAGESIZE):
            pages[page] = 1
    extra = measure.read_status("VmHWM") - before
    assert 60 * 2**20 < extra < 80 * 2**20
    assert measure.reset_peak_memory() < before + 30 * 2**20


def test_platform_without_proc_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "STATUS", tmp_path / "missing" / "status")
    monkeypatch.setattr(measure, "CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    with pytest.raises(NotMeasurableError, match="which this platform lacks"):
        measure.read_status("VmHWM")
    with pytest.raises(NotMeasurableError, match="cannot be reset"):
        measure.reset_peak_memory()


def test_memory_case_counts_the_bytes_of_its_results() -> None:
    if not measure.CLEAR_REFS.exists():
        pytest.skip("this platform has no /proc/self/clear_refs")
    measured = child.measure_memory(MemoryCase("tiny", CONFIG, 200, backward=True))
    assert measured.nbytes["results"] == 4 * 200 * 4 * (4 * 8 + 1)
    assert measured.error is not None
    assert measured.error < 2e-5


def test_long_case_compares_equal_numbers_of_positions() -> None:
    measured = child.measure_long(LongCase("tiny", CONFIG, 400, 100), 2)
    assert {name: len(values) for name, values in measured.seconds.items()} == {"base": 2, "long": 2}
    assert measured.error is not None
    assert measured.error < 2e-5


def test_case_too_large_for_the_machine_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "host_memory", lambda: Memory(2**30, 2**40))
    measured = child.measure_in_child(MemoryCase("huge", Config(8, 64, (64,), (1,)), 2**20), 1)
    assert measured.why_not == "needs 8.0 GiB, 1.0 GiB are available"
