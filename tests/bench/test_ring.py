"""Several ranks: the documented cases, their figures, wrong answers refused, and plans as printed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.bench import child, measure, ring_child, ring_plans, ring_run, run
from dilated_attention_pytorch.bench.cases import SUITES
from dilated_attention_pytorch.bench.gate import TOLERANCE, WrongAnswerError
from dilated_attention_pytorch.bench.record import Record, from_json, make_result, to_json
from dilated_attention_pytorch.bench.ring_cases import (
    RING_SUITE,
    RingConfig,
    RingMemoryCase,
    RingStepsCase,
    RingTimeCase,
)
from dilated_attention_pytorch.bench.ring_plans import RANKS, plans_table
from dilated_attention_pytorch.bench.tables import PLAN_BEGIN, PLAN_END, to_markdown
from dilated_attention_pytorch.cli.main import main
from dilated_attention_pytorch.core.host_memory import Memory

ROOT = Path(__file__).resolve().parents[2]
CONFIG = RingConfig(4, 8, (16, 40, 200), (1, 2, 4))
TIME = RingTimeCase("tiny ranks", CONFIG, 200, backward=True, target=1.15)
MEMORY = RingMemoryCase("tiny memory", CONFIG, 200, backward=True, target=1.15)
STEPS = RingStepsCase("tiny steps", CONFIG, 200, (2, 8), target=1.05)


def test_cases_and_targets_are_the_documented_ones() -> None:
    assert SUITES["ring"] == RING_SUITE
    by_kind: dict[type, list[Any]] = {}
    for case in RING_SUITE:
        by_kind.setdefault(type(case), []).append(case)
        assert (case.config.h, case.config.d) == (8, 64)
    times = by_kind[RingTimeCase]
    assert {(case.n, case.num_ranks) for case in times} == {(65536, 2)}
    assert {case.backward: case.target for case in times} == {False: None, True: 1.15}
    assert all(case.repeats >= 5 for case in times)
    assert all(max(case.config.segment_lengths) > case.n // case.num_ranks for case in times)
    memory = by_kind[RingMemoryCase]
    assert {(case.n, case.ranks, case.target) for case in memory} == {(262144, (1, 2, 4), 1.15)}
    assert {case.backward for case in memory} == {False, True}
    assert {case.config.dtype for case in memory} == {"float32", "bfloat16"}
    steps = by_kind[RingStepsCase]
    assert {(case.ring_sizes, case.target) for case in steps} == {((1, 2, 4, 8), 1.05)}
    assert {case.n for case in steps} == {65536, 131072}
    assert {case.backward for case in steps} == {False, True}
    assert {case.config.dtype for case in steps} == {"float32", "bfloat16"}


def test_reduced_cases_cut_segments_with_uneven_shards() -> None:
    for case in RING_SUITE:
        config, n = ring_run.reduced(case)
        assert n % 2 == 1
        assert config.dilation_rates == case.config.dilation_rates
        assert min(config.segment_lengths) < n // 4


class FakeGroup:
    """Ranks that answer at once."""

    def __init__(self, **answer: Any) -> None:
        self.answer = answer

    def ask(self, do: str, **_: Any) -> list[dict[str, Any]]:
        if do == "run":
            pytest.fail("a wrong answer was timed")
        return [{"error": 0.0}, self.answer]


@pytest.mark.parametrize("error", [0.5, float("inf")])
def test_wrong_ranks_are_not_timed(error: float) -> None:
    group: Any = FakeGroup(error=error)
    with pytest.raises(WrongAnswerError, match="tiny ranks: the result is off by"):
        ring_run._check_ranks(TIME, group, CONFIG, 200)
    right: Any = FakeGroup(error=1e-6)
    assert ring_run._check_ranks(TIME, right, CONFIG, 200) == 1e-6


def test_a_rank_checks_itself_against_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = ring_child.Rank(TIME, 0, 1)
    assert rank.check(CONFIG, 200, "ring")["error"] < TOLERANCE
    right = ring_child.ring_dilated_attention
    monkeypatch.setattr(
        ring_child, "ring_dilated_attention", lambda *args, **options: right(*args, **options) + 1e-3
    )
    assert rank.check(CONFIG, 200, "ring")["error"] > TOLERANCE


def test_a_rank_that_receives_what_was_not_planned_fails() -> None:
    rank = ring_child.Rank(TIME, 0, 2)  # two ranks by name, and no transfer at all
    ring_child.ring_traffic().reset()
    with pytest.raises(RuntimeError, match=r"rank 0 received 0 bytes where \d+ were planned"):
        rank._check_traffic(CONFIG, 200, "ring")


def test_a_rank_measures_all_that_it_holds() -> None:
    if not measure.CLEAR_REFS.exists():
        pytest.skip("this platform has no /proc/self/clear_refs")
    answer = ring_child.Rank(MEMORY, 0, 1).measure_memory("ring")
    assert answer["tensors"] == 8 * 4 * 200 * 4 * 8  # four inputs and four results
    assert answer["received"] == 0


def test_ranks_that_fail_say_why() -> None:
    with (
        pytest.raises(RuntimeError, match=r"a rank ended with status 1:(.|\n)*no request"),
        ring_run.start_group(TIME, 1, 1) as group,
    ):
        group.ask("nonsense")


def test_modules_are_measured_and_timed() -> None:
    if not measure.CLEAR_REFS.exists():
        pytest.skip("this platform has no /proc/self/clear_refs")
    for variant in ("base", "2", "8"):
        measured = child.measure_ring_module(STEPS, variant)
        assert measured.nbytes["results"] == 4 * 200 * 4 * 8
        assert measured.error is not None
        assert measured.error < TOLERANCE
    timed = child.time_ring_modules(replace(STEPS, backward=True), 2)
    assert {name: len(values) for name, values in timed.seconds.items()} == {"base": 2, "2": 2, "8": 2}
    module = child.make_ring_module(CONFIG, "8")
    assert module.ring_size == 8


def test_case_too_large_for_the_machine_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_run, "host_memory", lambda: Memory(2**20, 2**40))
    monkeypatch.setattr(ring_run, "start_group", lambda *_: pytest.fail("started"))
    for case in (replace(TIME, n=2**16), replace(MEMORY, n=2**16)):
        monkeypatch.setattr(ring_run, "_definition_error", lambda _: 0.0)
        result = run.run_case(case)
        assert result.why_not is not None
        assert all(figure.value is None for figure in result.figures)
        assert "not measured: needs" in to_markdown(Record({}, {}, (result,)))


MIB = 2**20
SECONDS = {"alone": (2.0, 4.0, 3.0), "ring": (2.2, 3.0, 3.0), "ulysses": (3.0, 6.0, 9.0)}
RESULTS = (
    make_result(TIME, 3, 1e-7, SECONDS, {"received ring": 8 * MIB, "received ulysses": 128 * MIB}),
    make_result(
        MEMORY,
        1,
        1e-7,
        {},
        {
            f"{name} {size}": value * MIB
            for size, peak in ((1, 100), (2, 55), (4, 30))
            for name, value in (("peak", peak), ("tensors", peak - 5), ("received", size))
        },
    ),
    make_result(
        STEPS,
        2,
        1e-7,
        {"base": (1.0, 2.0), "2": (1.5, 2.0), "8": (1.25, 2.0)},
        {"peak_extra base": 100 * MIB, "peak_extra 2": 104 * MIB, "peak_extra 8": 110 * MIB},
    ),
)
RECORD = Record(
    {"version": "1.2.3", "commit": None, "changed": False},
    {"cpu": "Some CPU", "cores": 2, "threads": 2, "torch": "9.9", "load": 0.25, "os": "Linux"},
    RESULTS,
)


def test_figures_follow_from_what_was_measured() -> None:
    ring, ring_median, ulysses, _ = RESULTS[0].figures
    assert (ring.value, ring.met) == (pytest.approx(1.1), True)
    assert (ring_median.value, ring_median.met) == (1.0, None)
    assert (ulysses.value, ulysses.met) == (1.5, False)
    assert [(f.value, f.met) for f in RESULTS[1].figures] == [
        (pytest.approx(1.1), True),
        (pytest.approx(1.2), False),
    ]
    memory, time, large, _ = RESULTS[2].figures
    assert (memory.value, memory.met, time.value, time.met) == (1.04, True, 1.5, None)
    assert (large.value, large.met) == (1.1, False)


def test_record_survives_json_and_renders() -> None:
    assert from_json(to_json(RECORD)) == RECORD
    text = to_markdown(RECORD)
    assert to_markdown(from_json(to_json(RECORD))) == text
    assert "| tiny ranks, ring | 2000.0 (3000.0 ± 500.0) | 2200.0 (3000.0 ± 200.0) | 1.100 | 1.000 |" in text
    assert "| 1.500 | 2.000 | 1.150, **not met** | 128.0 |" in text
    assert "| tiny memory, 1 rank | 100.0 | 95.0 | 1.0 | 1.000 |  |" in text
    assert "| tiny memory, 4 ranks | 30.0 | 25.0 | 4.0 | 1.200 | 1.150, **not met** |" in text
    assert (
        "| tiny steps, ring_size 2 | 104.0 | 1.040 | 1.050, met | 1500.0 (1750.0 ± 125.0) | 1.500 |" in text
    )
    assert "2 ranks of 1 thread against 1 process of 2 threads, branches (16, 1), (40, 2), (200, 4)" in text


def test_plans_in_the_documentation_are_those_of_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    documented = (ROOT / "docs" / "distributed.md").read_text()
    table = documented.partition(PLAN_BEGIN)[2].partition(PLAN_END)[0]
    planned = plans_table()
    assert table.strip() == planned.strip()
    assert [line.split()[1] for line in table.strip().splitlines()[2:10:2]] == list(map(str, RANKS))
    monkeypatch.setattr(ring_plans, "plans_table", lambda: planned)  # which takes some seconds
    page = tmp_path / "page.md"
    page.write_text(f"before\n{PLAN_BEGIN}\n{PLAN_END}\nafter\n")
    assert main(["bench", "--plan", "--update", str(page)]) == 0
    assert table.strip() in page.read_text()
    assert table.strip() in capsys.readouterr().out
    assert main(["bench", "ring", "--plan"]) == 2
    assert "--plan measures nothing" in capsys.readouterr().err


def test_tensors_of_ranks_differ() -> None:
    first, second = (ring_child.make_tensors(CONFIG, 10, seed=seed) for seed in (0, 1))
    assert len(first) == 4
    assert not torch.equal(first[0], second[0])
