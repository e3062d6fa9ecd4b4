"""Durations, their order and their ratios, by a clock that the test moves; peaks; processes of their own."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.cli.bench import measure
from dilated_attention_pytorch.cli.bench.measure import NotMeasurableError, Timing, interleave
from dilated_attention_pytorch.core.host_memory import Memory
from support.child import child
from support.programs import ROOT


@pytest.mark.parametrize(
    ("rounds", "at_most", "expected"),
    [(3, {}, "abbaabba"), (5, {"b": 2}, "a" + "ba" + "a" + "a" + "ab" + "a")],
)
def test_candidates_alternate_and_long_ones_take_part_in_some_rounds(
    rounds: int, at_most: dict[str, int], expected: str
) -> None:
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    timings = interleave(runs, rounds, warmup=1, at_most=at_most)
    assert "".join(order) == expected
    counted = {name: len(timing) for name, timing in timings.items()}
    assert counted == {"a": rounds, "b": at_most.get("b", rounds)}


def test_durations_are_those_of_the_clock_without_warmup() -> None:
    durations = {"bare": iter([50.0, 2.0, 4.0, 3.0]), "dilated": iter([70.0, 3.0, 8.0, 6.0])}
    passed = [0.0]
    runs = {name: (lambda each=each: passed.append(next(each))) for name, each in durations.items()}
    timings = interleave(runs, 3, clock=lambda: sum(passed))
    assert timings == {"bare": Timing((2.0, 4.0, 3.0)), "dilated": Timing((3.0, 8.0, 6.0))}
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        interleave({}, 0)
    timing = Timing((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (timing.minimum, timing.median, timing.spread) == (1.0, 3.0, 2.0)
    assert Timing((7.0,)).spread == 0.0


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


@pytest.mark.parametrize(
    ("what", "why_not"),
    [
        ("threads", None),
        ("platform", "no /proc here"),
        ("memory", "out of memory: no more"),
        ("signal", "the process was ended by signal 9, likely out of memory"),
        ("sleep", "it was ended after 1 s"),
    ],
)
def test_a_child_tells_what_it_found_or_why_it_could_not(what: str, why_not: str | None) -> None:
    found = measure.measure_in_child(child, what, timeout=1 if what == "sleep" else 60)
    assert found.why_not == why_not
    if why_not is None:
        assert found.counts["threads"] == torch.get_num_threads()
        assert found.counts["pid"] != os.getpid()


def test_a_child_ends_with_its_parent_even_if_that_was_killed() -> None:
    script = "from support.child import child; from dilated_attention_pytorch.cli.bench import measure; "
    script += "measure.measure_in_child(child, 'announce')"
    where = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=where) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"announce\n"
        parent.kill()
        parent.communicate(timeout=30)  # which waits for all that could still write


def test_a_call_too_large_for_the_machine_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "host_memory", lambda: Memory(2**30, 2**40))
    found = measure.measure_in_child(lambda: pytest.fail("started"), needed=2**33)
    assert found.why_not == "needs 8.0 GiB, 1.0 GiB are available"


def test_facts_fit_a_record() -> None:
    assert set(measure.project_facts()) == {"version", "commit", "changed"}
    assert isinstance(measure.machine_facts()["threads"], int)
