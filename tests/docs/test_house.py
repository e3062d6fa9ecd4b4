"""What the pages say is there: every room, every module, every public name, and none else."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from support.aliases import ALIASES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "dilated_attention_pytorch"
SOURCE = ROOT / "src" / PACKAGE
README, CONTRIBUTING = (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))
REFERENCE = ROOT / "docs" / "reference.md"
TREE = re.compile(rf"^    src/{PACKAGE}/\n((?:      .*\n)+)", re.MULTILINE)
# Files of a room that the line of the room stands for.
PARTS = {"__init__", "__main__"}


def tree() -> str:
    found = TREE.search(CONTRIBUTING.read_text())
    assert found is not None, f"CONTRIBUTING shows no tree of src/{PACKAGE}"
    return found[1]


def rooms() -> set[str]:
    return {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def test_tree_shows_every_room_with_a_line_and_none_else() -> None:
    lines = re.findall(r"^      (\w+)/ +(\S.*)$", tree(), re.MULTILINE)
    assert sorted(room for room, _ in lines) == sorted(rooms())
    assert all(len(line.split()) >= 3 for _, line in lines)


def test_contributing_shows_every_module_beside_the_rooms() -> None:
    shown = set(re.findall(r"\b(\w+)\.py", tree()))
    modules = {path.stem for path in SOURCE.glob("*.py")} - PARTS - ALIASES
    assert not modules - shown
    assert not shown - {path.stem for path in SOURCE.rglob("*.py")}


def test_tables_of_names_hold_every_public_name_once() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", REFERENCE.read_text(), re.MULTILINE)
    names = [name for cell, _ in rows for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(names) == sorted(import_module(PACKAGE).__all__)
    assert all(len(line.split()) >= 3 for _, line in rows)


def test_readme_begins_with_two_commands_and_an_example_of_ten_lines() -> None:
    text = README.read_text()
    commands = re.findall(r"^make (\w+)", text.partition("```sh\n")[2].partition("```")[0], re.MULTILINE)
    assert len(commands) == 2
    example = text.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 10


def section(title: str) -> str:
    return README.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_readme_shows_six_public_names() -> None:
    names = re.findall(r"^\| `(\w+)` \|", section("Six names to know"), re.MULTILINE)
    assert len(names) == 6
    assert set(names) <= set(import_module(PACKAGE).__all__)
    assert "`branches_for`" in section("Six names to know")
    assert "branches_for(" in section("Use it").partition("```python\n")[2].partition("```")[0]


def test_readme_lists_every_extra_of_users() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", section("Install"), re.MULTILINE)
    declared = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    extras = re.findall(r"^(\w+) = \[", declared.partition("\n[")[0], re.MULTILINE)
    assert sorted([*listed, "dev"]) == sorted(extras)
