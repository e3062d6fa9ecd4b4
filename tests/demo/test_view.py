"""What the demo shows on terminals and in pipes."""

from __future__ import annotations

import io
import sys

import pytest

from dilated_attention_pytorch.bench.exactness import Check
from dilated_attention_pytorch.demo import command
from dilated_attention_pytorch.demo.scaling import Cost, Row
from dilated_attention_pytorch.demo.training import Training
from dilated_attention_pytorch.demo.view import HEADINGS, PlainView, View, cells

ROWS = [
    Row(1024, dict.fromkeys(("dense", "dilated", "block-sparse"), Cost(0.0101, 2**21, 1.0))),
    Row(
        1048576,
        {
            "dense": Cost(1234.5678, 2**34, 1.0),
            "dilated": Cost(12.3456, 2**31, 0.012),
            "block-sparse": Cost(0.5, None, 0.01),
        },
    ),
]
TRAINING = Training(
    files=3,
    parameters=1234567,
    context_length=1024,
    segment_lengths=(64, 256),
    dilation_rates=(1, 4),
    train_bytes=1000,
    validation_bytes=100,
    steps=40,
    steps_planned=40,
    seconds=9.0,
    losses=((20, 5.25), (40, 2.5)),
    validations=((40, 2.625),),
    is_interrupted=False,
    prompt="def ",
    sample="first(self):\n\n    return <1>" + 90 * "." + 9 * "\n...",
)


def tell_all(view: View) -> None:
    view.show_title("facts")
    view.show_check(Check("a check", 1e-16, 1.0))
    with view.timing(10.0):
        view.show_step("dense, dilated, block-sparse: 1,048,576 tokens")
        view.show_rows(ROWS[:1])
        view.show_rows(ROWS)
        view.tick()
    with view.training():
        view.show_loss(20, 40, 5.25, None)
        view.show_loss(40, 40, 2.5, 2.625)
    view.show_sample(TRAINING)
    view.show_end("The end.", "The report is in x.html")


def test_a_row_in_words() -> None:
    assert cells(ROWS[0]) == ("1,024", "10.1", "10.1", "10.1", "1.0 x", "2.0", "2.0", "2.0")
    assert cells(Row(8, {"dilated": Cost(1.0, None, 1.0)})) == ("8", "-", "1,000", "-", "-", "-", "-", "-")
    assert len(HEADINGS) == len(cells(ROWS[0]))


def test_both_views_tell_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    console_module = pytest.importorskip("rich.console")
    from dilated_attention_pytorch.demo.rich_view import RichView

    console = console_module.Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False)
    tell_all(RichView(console))
    tell_all(PlainView())
    drawn, printed = console.file.getvalue(), capsys.readouterr().out
    for text in (drawn, printed):
        shown = ["WRONG", "1,048,576", "1,234,568", "12,346", "100.0 x", "16,384", "1,234,567 parameters"]
        for each in (*shown, "def first(self):", "return <1>", "The end.", "The report is in x.html"):
            assert each in text, each
    assert max(map(len, printed.splitlines())) <= 80
    assert drawn.count("…") == 1  # rich shortens what does not fit: the sample's second line
    assert [text.splitlines().count("   | ...") for text in (drawn, printed)] == [0, 4]
    assert "█" in drawn


def test_pipes_get_lines_and_json_leaves_stdout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = command.choose_view(is_json=True)
    assert isinstance(plain, PlainView)
    assert plain.stream is sys.stderr
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(command.choose_view(is_json=False), PlainView)
    monkeypatch.undo()
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert type(command.choose_view(is_json=False)).__name__ == "RichView"
