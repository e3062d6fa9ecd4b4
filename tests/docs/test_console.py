"""What pages print below `show` and `plan`, which need no files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dilated_attention_pytorch.cli.forecast import Call
from dilated_attention_pytorch.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```console\n\$ (dilated-attention (?:show|plan) .*)\n((?:.+\n|\n)+?)```$", re.MULTILINE)
SHOWN = [
    pytest.param(command, output, id=f"{page.stem}-{number}")
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, (command, output) in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_page_shows_what_a_command_prints(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(
        Call, "is_native", property(lambda call: call.device.type == "cpu")
    )  # with a compiler
    assert main(shlex.split(command)[1:]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed.rstrip() == output.rstrip()


def test_every_block_of_the_command_line_is_among_them() -> None:
    page = (ROOT / "docs" / "command_line.md").read_text()
    assert len(BLOCK.findall(page)) == page.count("```console") >= 3


def test_concepts_have_pictures() -> None:
    assert sum(case.id is not None and case.id.startswith("concepts-") for case in SHOWN) >= 3
