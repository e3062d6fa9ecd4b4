"""The demo's judgement: what it measures, when it stops, what it says."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest

from dilated_attention_pytorch.core.host_memory import Memory
from dilated_attention_pytorch.demo import memory, scaling, story, view
from dilated_attention_pytorch.demo.scaling import Cost, Row
from dilated_attention_pytorch.demo.view import PlainView
from dilated_attention_pytorch.spec import branches_for

LENGTHS = [1024 * 2**i for i in range(11)]


class FakeMachine:
    """A clock, dense attention that costs the square of the length, and others that cost the length."""

    def __init__(self, dense: float = 1e-9, dilated: float = 1e-6, blocks: float = 2e-6) -> None:
        self.now, self.dense, self.linear = 0.0, dense, {"dilated": dilated, "block-sparse": blocks}

    def clock(self) -> float:
        return self.now

    def measure(self, n: int, *, names: Collection[str], rounds: int) -> Row:
        seconds = {
            name: self.linear[name] * n if name in self.linear else self.dense * n * n for name in names
        }
        self.now += (rounds + (rounds > 1)) * sum(seconds.values())
        return Row(n, {name: Cost(seconds[name], 2**20, 0.5) for name in names})


def rows_of(budget: float, machine: FakeMachine) -> list[Row]:
    events = scaling.doubling_rows(budget, machine.measure, machine.clock)
    return [event for event in events if isinstance(event, Row)]


def lengths_of(rows: list[Row], name: str) -> list[int]:
    return [row.n for row in rows if name in row.costs]


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "host_memory", lambda: Memory(2**40, 2**40))


def test_branches_are_the_library_s_for_these_heads() -> None:
    assert scaling.ladder(1024) == ((2048,), (1,))
    assert scaling.ladder(16384) == branches_for(16384, scaling.HEADS)
    longest = scaling.ladder(2**20)  # without the warning, which is an error here
    with pytest.warns(UserWarning, match="8 heads"):
        assert longest == branches_for(2**20, scaling.HEADS)
    assert max(scaling.ladder(view.EXAMPLE)[1]) <= scaling.HEADS < max(scaling.ladder(2 * view.EXAMPLE)[1])


def test_lengths_double_and_dense_gives_up_first() -> None:
    machine = FakeMachine()
    rows = rows_of(40.0, machine)
    assert lengths_of(rows, "dilated") == lengths_of(rows, "block-sparse") == LENGTHS
    assert lengths_of(rows, "dense") == LENGTHS[:7]  # the next would take 17 s, over a quarter of the budget
    assert machine.now <= 40.0


def test_a_slow_candidate_is_left_out_and_dilated_goes_on() -> None:
    rows = rows_of(10.0, FakeMachine(blocks=1e-4))
    assert lengths_of(rows, "block-sparse") == LENGTHS[:5]  # the next may take 4.1 s, as growth is overrated
    assert lengths_of(rows, "dilated") == LENGTHS


@pytest.mark.parametrize("budget", [0.001, 0.1, 1.0, 5.0, 20.0])
def test_budget_is_kept_after_the_first_length(budget: float) -> None:
    machine = FakeMachine()
    rows = rows_of(budget, machine)
    assert set(rows[0].costs) == set(scaling.NAMES)
    assert len(rows) == 1 or machine.now <= budget


def test_memory_bounds_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "host_memory", lambda: Memory(2**30, 2**40))
    assert rows_of(1000.0, FakeMachine())[-1].n == 32768


def test_measured_are_those_that_were_asked_for() -> None:
    row = scaling.measure_row(1024, names=("dilated", "block-sparse"), rounds=1)
    assert set(row.costs) == {"dilated", "block-sparse"}
    assert all(cost.seconds > 0 for cost in row.costs.values())
    if memory.why_no_peaks() is None:
        out = 4 * 1024 * scaling.HEADS * scaling.HEAD_DIM
        assert all(
            out <= cost.peak_bytes <= 100 * out for cost in row.costs.values() if cost.peak_bytes is not None
        )


def test_peak_is_what_a_call_holds_at_most() -> None:
    if (why := memory.why_no_peaks()) is not None:
        pytest.skip(why)
    size = 2**25
    assert memory.peak_of(lambda: None) == pytest.approx(0, abs=2**20)
    for _ in range(2):  # what the first call freed does not hide the second
        # The larger of two: the system may take back pages of files meanwhile, and hide one.
        peaks = [memory.peak_of(lambda: bytearray(b"x") * size) or 0 for _ in range(2)]
        assert max(peaks) == pytest.approx(size, abs=2**21)


def test_platforms_without_books_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(
        "dilated_attention_pytorch.bench.measure.CLEAR_REFS", tmp_path / "none" / "clear_refs"
    )
    assert "peak memory cannot be reset here" in (memory.why_no_peaks() or "")
    called: list[int] = []
    assert memory.peak_of(lambda: called.append(1)) is None
    assert called == [1]


def rows_of_three() -> list[Row]:
    first, second = Cost(0.01, 2**20, 1.0), Cost(0.5, 2**20, 0.25)
    return [
        Row(1024, {"dense": first, "dilated": first, "block-sparse": first}),
        Row(2048, {"dense": Cost(2.0, None, 1.0), "dilated": second, "block-sparse": second}),
        Row(4096, {"dilated": Cost(1.0, 2**21, 0.1)}),
    ]


def test_summary_holds_what_was_measured() -> None:
    rows = rows_of_three()
    assert scaling.summarize(rows) == (
        "At 2,048 tokens dense attention took 2.0 s and dilated attention 500.0 ms: 4.0 times as fast, "
        "with 25.0% of the pairs. Dilated attention went on to 4,096 tokens in 1.0 s, 4,096 tokens a second."
    )
    assert "went on" not in scaling.summarize(rows[:2])
    assert scaling.summarize([]) == "Nothing was timed."


def test_pair_shares_are_those_of_the_definition() -> None:
    shares = scaling.pair_shares(1024, scaling.block_pattern(1024))
    assert shares == {"dense": 1.0, "dilated": 1.0, "block-sparse": 1.0}
    n, dense = 4096, 4096 * 4097 / 2
    pattern = scaling.block_pattern(n)
    expected = 3 * (2048 * 2049 / 2)  # (2048, 1) twice, and every second of all
    shares = scaling.pair_shares(n, pattern)
    assert shares["dilated"] == pytest.approx(expected / dense)
    assert shares["block-sparse"] == pytest.approx(pattern.to_dense().tril().sum().item() / dense)


def test_interrupt_while_waiting_keeps_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class View(PlainView):
        def show_rows(self, rows: Any) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(story, "doubling_rows", lambda budget: iter(rows_of_three()))
    rows: list[Row] = []
    assert story.time_in_view(View(), 1.0, rows)
    assert len(rows) == 1


def test_failure_in_the_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(budget: float) -> Iterator[Row]:
        raise RuntimeError("broken")
        yield

    monkeypatch.setattr(story, "doubling_rows", broken)
    with pytest.raises(RuntimeError, match="broken"):
        story.time_in_view(PlainView(), 1.0, [])
