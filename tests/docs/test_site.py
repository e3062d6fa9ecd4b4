"""The site: built without a warning, whole, every public name described, and search works in a browser."""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
from collections.abc import Iterator
from functools import cached_property, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from filelock import FileLock

from support.browser import Tab
from support.programs import ROOT, run_program

PACKAGE = "dilated_attention_pytorch"
PLACES = re.compile(r"/(?:work|root|tmp|home)/")
BLANKS = re.compile(r"\s+")
FOUND = "a.md-search-result__link"


class Page(HTMLParser):
    """Ids and links of one page, what it loads, and the text below each name of the reference."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.sections: dict[str, str] = {}
        self._section = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("href", "src") if name in values]
        if tag in ("img", "link", "script"):
            self.loaded += [values[name] for name in ("href", "src") if name in values]
        if tag == "h2":
            self._section = values.get("id", "").removeprefix(f"{PACKAGE}.")

    def handle_data(self, data: str) -> None:
        self.sections[self._section] = self.sections.get(self._section, "") + data


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it; once, by whichever worker of pytest-xdist comes first."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with FileLock(shared / "site.lock"):
        if not (shared / "site").exists():
            build = ("-m", "mkdocs", "build", "--strict", "--site-dir", shared / "unfinished")
            run_program(sys.executable, *build, NO_MKDOCS_2_WARNING="1")
            (shared / "unfinished").rename(shared / "site")
    return shared / "site"


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site on a server of this machine."""
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def dead_links(folder: Path, pages: dict[Path, Page]) -> list[str]:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link) or path.name == "404.html":  # whose links are those of a server
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.is_file() or (anchor and anchor != "__skip" and anchor not in pages[target].ids):
                dead.append(f"{path.relative_to(folder)}: {link}")
    return dead


def test_site_is_whole_and_needs_no_network(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    assert not dead_links(site, pages)
    assert not [link for page in pages.values() for link in page.loaded if re.match(r"https?:|//", link)]
    texts = [path for path in site.rglob("*") if path.suffix in (".css", ".html", ".js", ".json")]
    assert not [path.name for path in texts if PLACES.search(path.read_text())]
    guides = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    assert guides <= {*pages[site / "index.html"].links}
    shown: dict[str, str] = {}
    for path in (site / "reference").glob("*.html"):
        shown |= pages[path].sections
    for name in import_module(PACKAGE).__all__:
        assert_described(getattr(import_module(PACKAGE), name), shown[name])
    # what a class inherits from the package's own bases is there as well
    ids = {name for page in pages.values() for name in page.ids}
    inherited = ("DilatedAttention.forward", "LongNetLM.from_pretrained", "core.MemoryPool.get_stats")
    assert {f"{PACKAGE}.{name}" for name in inherited} <= ids


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


def test_every_public_method_has_a_docstring() -> None:
    package = import_module(PACKAGE)
    classes = [value for name in package.__all__ if isinstance(value := getattr(package, name), type)]
    silent = {
        f"{each.__name__}.{name}"
        for each in classes
        for base in each.__mro__
        if base.__module__.startswith(PACKAGE)
        for name, member in vars(base).items()
        if not name.startswith("_") and name != "extra_repr"
        if isinstance(member, (cached_property, classmethod, property, staticmethod))
        or inspect.isfunction(member)
        if not inspect.getdoc(getattr(each, name))
    }
    assert not silent


@pytest.mark.parametrize("source", ["server", "files"])
def test_search_finds_a_name(source: str, site: Path, address: str, browser: Any) -> None:
    start = address if source == "server" else site.as_uri()
    tab = Tab(browser)
    page = tab.open(f"{start}/index.html")
    page.click("input[name=query]")
    page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for()  # with its index
    page.keyboard.type("branches_for")
    page.locator(FOUND, has_text="branches_for").first.click()
    page.wait_for_url(f"{start}/reference/functions.html*")
    heading = page.locator(f"[id='{PACKAGE}.branches_for']")
    assert heading.inner_text().startswith("branches_for")
    assert 0 <= heading.bounding_box()["y"] < 900  # on the screen
    assert tab.complaints == []
    assert all(request.startswith((start, "data:", "blob:")) for request in tab.requests), tab.requests
