"""The documentation runs: every python block as printed, and the commands that the README names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Runs the blocks of one page in one namespace. Each is padded with empty lines to where the page has it, so
# that a traceback names the page's own line.
RUNNER = """
import sys
from pathlib import Path
page, pattern = Path(sys.argv[1]), sys.argv[2]
import re
text, namespace = page.read_text(), {"__name__": "__main__"}
for block in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
    padding = chr(10) * text.count(chr(10), 0, block.start(1))
    exec(compile(padding + block[1], str(page), "exec"), namespace)
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs_as_printed(page: Path, tmp_path: Path) -> None:
    without_numpy = "ignore:Failed to initialize NumPy:UserWarning"  # torch's remark, not the page's
    result = subprocess.run(
        [sys.executable, "-W", "error", "-W", without_numpy, "-c", RUNNER, str(page), BLOCK.pattern],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_readme_has_examples_and_every_block_is_closed() -> None:
    assert BLOCK.search((ROOT / "README.md").read_text())
    for page in PAGES:
        text = page.read_text()
        assert len(BLOCK.findall(text)) == text.count("```python"), page.name


@pytest.mark.parametrize("command", ["demo", "test"])
def test_readme_command_is_a_make_target(command: str) -> None:
    assert f"make {command}" in (ROOT / "README.md").read_text()
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
