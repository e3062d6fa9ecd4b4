"""The API reference: built without a warning, every public name with words and a signature, no dead link."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "dilated_attention_pytorch"
PLACES = re.compile(r"/(?:work|root|tmp|home)/")
BLANKS = re.compile(r"\s+")


class Page(HTMLParser):
    """Ids and links of one page, its members and those with a docstring, and the text of each section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sections: dict[str, str] = {}
        self.members: list[str] = []
        self.described: set[str] = set()
        self._section = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("href", "src") if name in values]
        if "id" in values and (tag == "section" or values.get("class") == "classattr"):
            self.members.append(values["id"])
            self._section = values["id"] if tag == "section" else self._section
        elif values.get("class") == "docstring" and self.members:
            self.described.add(self.members[-1])

    def handle_data(self, data: str) -> None:
        self.sections[self._section] = self.sections.get(self._section, "") + data


def dead_links(folder: Path, pages: dict[Path, Page]) -> list[str]:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):  # https:, data:
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.is_file() or (anchor and anchor not in pages[target].ids):
                dead.append(f"{path.relative_to(folder)}: {link}")
    return dead


def test_reference_is_built_whole(tmp_path: Path) -> None:
    folder = tmp_path / "reference"
    command = [sys.executable, str(ROOT / "docs" / "build_reference.py"), str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    pages = {path: Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    assert not dead_links(folder, pages)
    assert not [path.name for path in folder.rglob("*") if path.is_file() and PLACES.search(path.read_text())]
    shown = [name for page in pages.values() for name in page.members if name not in page.described]
    assert not [name for name in shown if not name.endswith(".__init__")]  # that is the class's docstring
    page = pages[folder / f"{PACKAGE}.html"]
    for name in import_module(PACKAGE).__all__:
        assert name in page.ids
        assert_described(getattr(import_module(PACKAGE), name), page.sections[name])
    assert {f"{PACKAGE}.html", f"{PACKAGE}/core.html"} <= set(pages[folder / "index.html"].links)
    # what a class inherits from the package's own bases is there as well
    assert {"DilatedAttention.forward", "LongNetLM.from_pretrained", "RingSchedule.sent_bytes"} <= {*page.ids}


def assert_described(value: object, section: str) -> None:
    """The first sentence of the docstring, and the names of the arguments."""
    written = BLANKS.sub(" ", section)
    words = re.findall(r"[A-Za-z]{2,}", (inspect.getdoc(value) or "").split("\n\n")[0])
    assert len(words) >= 4, f"the docstring of {value!r} says too little"
    assert all(word in written for word in words)
    if isinstance(value, type) and issubclass(value, Exception):
        return
    assert callable(value)
    missing = [name for name in inspect.signature(value).parameters if name not in written]
    assert not missing, f"{value!r} is shown without {missing}"
