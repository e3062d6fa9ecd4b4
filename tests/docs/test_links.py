"""Relative links of the documentation lead somewhere: to files that are there, and to headings in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page, page.read_text())


def test_every_page_is_reached_from_the_readme() -> None:
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
