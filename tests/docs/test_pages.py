"""Pages and notebooks run, print what they show, and their links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.cli.forecast import Call
from dilated_attention_pytorch.cli.main import main
from support.programs import ROOT, run_python

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
KEYS = {"markdown": {"cell_type", "id", "metadata", "source"}}
KEYS["code"] = KEYS["markdown"] | {"execution_count", "outputs"}
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Of `show` and `plan`, which need no files.
CONSOLE = re.compile(
    r"^```console\n\$ (dilated-attention (?:show|plan) .*)\n((?:.+\n|\n)+?)```$", re.MULTILINE
)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
# Runs the blocks of one page in one namespace. Each is padded with empty lines to where the page has it, so
# that a traceback names the page's own line.
RUNNER = """
import re, sys
from pathlib import Path
page, pattern = Path(sys.argv[1]), sys.argv[2]
text, namespace = page.read_text(), {"__name__": "__main__"}
blocks = [*re.finditer(pattern, text, re.DOTALL | re.MULTILINE)]
for block in blocks:
    padding = chr(10) * text.count(chr(10), 0, block.start(1))
    exec(compile(padding + block[1], str(page), "exec"), namespace)
print(len(blocks), "blocks ran")
"""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON.search(page.read_text())], ids=name_of)
def test_page_runs_as_printed(page: Path, tmp_path: Path) -> None:
    printed = run_python("-c", RUNNER, page, PYTHON.pattern, cwd=tmp_path)
    assert printed.endswith(f"{len(PYTHON.findall(page.read_text()))} blocks ran\n")


def test_every_block_is_closed_and_commands_of_the_readme_are_there() -> None:
    for page in PAGES:
        assert len(PYTHON.findall(page.read_text())) == page.read_text().count("```python"), page.name
    readme = (ROOT / "README.md").read_text()
    assert PYTHON.search(readme)
    for command in ("demo", "test"):
        assert f"make {command}" in readme
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def contents(notebook: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return cells


def outputs(notebook: Path) -> list[list[str]]:
    """By cell what it printed, but for the digits, and which pictures it drew."""
    return [
        [re.sub(r"[\d.,]+", "#", "".join(x.get("text", x.get("data", ())))) for x in cell.get("outputs", ())]
        for cell in contents(notebook)
    ]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_notebook_runs_and_holds_what_it_gives(notebook: Path, tmp_path: Path) -> None:
    document, cells = json.loads(notebook.read_text()), contents(notebook)
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert all(set(cell) == KEYS[cell["cell_type"]] for cell in cells)
    assert len({cell["id"] for cell in cells}) == len(cells)
    copy = Path(shutil.copy(notebook, tmp_path))
    run_python(ROOT / "docs" / "run_notebooks.py", copy, cwd=tmp_path, MPLBACKEND="agg")
    assert outputs(copy) == outputs(notebook), "python docs/run_notebooks.py"


SHOWN = [
    pytest.param(command, output, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (command, output) in enumerate(CONSOLE.findall(page.read_text()))
]


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_page_shows_what_a_command_prints(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    is_native = property(lambda call: call.device.type == "cpu")  # as with a compiler
    monkeypatch.setattr(Call, "is_native", is_native)
    assert main(shlex.split(command)[1:]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed.rstrip() == output.rstrip()


def test_every_block_of_the_command_line_is_among_them() -> None:
    page = (ROOT / "docs" / "command_line.md").read_text()
    assert len(CONSOLE.findall(page)) == page.count("```console") >= 3
    assert len(CONSOLE.findall((ROOT / "docs" / "concepts.md").read_text())) >= 3


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them: letters, digits and hyphens of the text."""
    headings = re.findall(r"^#+ +(.*?) *$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for found in LINK.finditer(FENCE.sub("", text)):
        link = found[1] or found[2]
        if re.match(r"[a-z]+:", link):  # https:, mailto:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


def test_links_lead_somewhere_and_every_page_is_reached_from_the_readme() -> None:
    assert not {page.name: dead for page in PAGES if (dead := dead_links(page, page.read_text()))}
    readme = (ROOT / "README.md").read_text()
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in readme]


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("[a](docs/models.md#measured) and [b](https://example.org/none)", []),
        ("[a](docs/none.md)", ["docs/none.md"]),
        ("[a](docs/models.md#none)", ["docs/models.md#none"]),
        ('<img src="docs/images/none.png">', ["docs/images/none.png"]),
        ("```text\n[a](docs/none.md)\n```\n", []),
    ],
)
def test_rule_sees_a_dead_link(text: str, dead: list[str]) -> None:
    assert dead_links(ROOT / "README.md", text) == dead
