"""The demo's judgement: what it times, when it stops, what it says."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from dilated_attention_pytorch import functional
from dilated_attention_pytorch.bench import demo, demo_view
from dilated_attention_pytorch.bench.demo import Row
from dilated_attention_pytorch.core.host_memory import Memory


class FakeMachine:
    """A clock and an attention whose dense cost is quadratic and dilated cost linear."""

    def __init__(self, dense: float = 1e-9, dilated: float = 1e-6) -> None:
        self.now, self.dense, self.dilated = 0.0, dense, dilated

    def clock(self) -> float:
        return self.now

    def measure(self, n: int, *, with_dense: bool, rounds: int) -> Row:
        dense = self.dense * n * n if with_dense else None
        self.now += (rounds + (rounds > 1)) * (self.dilated * n + (dense or 0.0))
        return Row(n, dense, self.dilated * n, 0.5)


def rows_of(budget: float, machine: FakeMachine) -> list[Row]:
    events = demo.doubling_rows(budget, machine.measure, machine.clock)
    return [event for event in events if isinstance(event, Row)]


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "host_memory", lambda: Memory(2**40, 2**40))


def test_ladder_spans_the_length() -> None:
    assert demo.ladder(1024) == ((2048,), (1,))
    assert demo.ladder(2049) == ((2048, 8192), (1, 4))
    assert demo.ladder(2**20) == ((2048, 8192, 32768, 131072, 524288, 2097152), (1, 4, 16, 64, 256, 1024))


def test_lengths_double_and_dense_gives_up_first() -> None:
    machine = FakeMachine()
    rows = rows_of(40.0, machine)
    assert [row.n for row in rows] == [1024 * 2**i for i in range(11)]
    dense = [row.n for row in rows if row.dense is not None]
    assert dense == [1024 * 2**i for i in range(7)]  # the next would take 17 s, over a third of the budget
    assert machine.now <= 40.0


@pytest.mark.parametrize("budget", [0.001, 0.1, 1.0, 5.0, 20.0])
def test_budget_is_kept_after_the_first_length(budget: float) -> None:
    machine = FakeMachine()
    rows = rows_of(budget, machine)
    assert rows[0].dense is not None
    assert len(rows) == 1 or machine.now <= budget


def test_memory_bounds_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "host_memory", lambda: Memory(2**30, 2**40))
    assert rows_of(1000.0, FakeMachine())[-1].n == 32768


def test_summary_holds_what_was_measured() -> None:
    rows = [Row(1024, 0.01, 0.01, 1.0), Row(2048, 2.0, 0.5, 0.25), Row(4096, None, 1.0, 0.1)]
    assert demo.summarize(rows) == (
        "At 2,048 tokens dense attention took 2.0 s and dilated attention 500.0 ms: 4.0 times as fast, "
        "with 25.0% of the pairs. Dilated attention went on to 4,096 tokens in 1.0 s, 4,096 tokens a second."
    )
    assert "went on" not in demo.summarize(rows[:2])
    assert demo.summarize([]) == "Nothing was timed."


def test_pair_share_is_that_of_the_definition() -> None:
    assert demo.pair_share(1024) == 1.0
    n, dense = 4096, 4096 * 4097 / 2
    expected = 2 * (2048 * 2049 / 2) + 1024 * 1025 / 2  # (2048, 1) twice, and every fourth of all
    assert demo.pair_share(n) == pytest.approx(expected / dense)


def test_inexact_library_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = functional.dilated_attention
    monkeypatch.setattr(functional, "dilated_attention", lambda *a, **k: right(*a, **k) * 1.000001)
    monkeypatch.setattr(demo, "time_in_view", lambda *_: pytest.fail("an inexact library was timed"))
    assert demo.main(["--seconds", "1"]) == demo.FAILED
    assert "WRONG" in capsys.readouterr().out


def test_interrupt_leaves_a_partial_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(view: Any, budget: float) -> tuple[list[Row], bool]:
        rows = [Row(1024, 0.01, 0.005, 1.0)]
        view.show_rows(rows)
        return rows, True

    monkeypatch.setattr(demo, "run_checks", lambda: iter(()))
    monkeypatch.setattr(demo, "time_in_view", interrupted)
    assert demo.main([]) == demo.INTERRUPTED
    text = capsys.readouterr().out
    assert "1,024" in text
    assert "Stopped early. At 1,024 tokens" in text


def test_interrupt_while_waiting_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class View(demo_view.PlainView):
        def show_rows(self, rows: Any) -> None:
            raise KeyboardInterrupt

    def rows(budget: float) -> Iterator[Row]:
        yield Row(1024, 0.01, 0.005, 1.0)

    monkeypatch.setattr(demo, "doubling_rows", rows)
    measured, interrupted = demo.time_in_view(View(1.0), 1.0)
    assert (len(measured), interrupted) == (1, True)


def test_failure_in_the_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(budget: float) -> Iterator[Row]:
        raise RuntimeError("broken")
        yield

    monkeypatch.setattr(demo, "doubling_rows", rows)
    with pytest.raises(RuntimeError, match="broken"):
        demo.time_in_view(demo_view.PlainView(1.0), 1.0)


def test_rich_view_draws_within_80_columns() -> None:
    console_module = pytest.importorskip("rich.console")
    from dilated_attention_pytorch.bench.demo_rich import RichView

    console = console_module.Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False)
    view = RichView(10.0, console)
    rows = [Row(1024, 0.0101, 0.01, 1.0), Row(1048576, 1234.5678, 12.3456, 0.012)]
    view.show_title("facts")
    with view.timing(demo.ladder):
        view.show_step("dense and dilated, 1,048,576 tokens")
        view.show_rows(rows)
        view.tick()
    view.show_end("The end.")
    text = console.file.getvalue()
    for shown in ("1,048,576", "1,234,568", "12,346", "100.0 x", "1.2%", "84,935", "The end."):
        assert shown in text
