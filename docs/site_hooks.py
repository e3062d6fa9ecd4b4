"""What the site has beside the pages of docs/: README as its home, the reference, and notebooks as pages.

MkDocs calls `on_config` and `on_files`; `make docs` builds the site.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dilated_attention_pytorch"
# Pages of the site that lie beside docs/.
BESIDE = {"README.md": "index.md"}
BESIDE |= {f"{name.upper()}.md": f"{name}.md" for name in ("changelog", "contributing", "security")}
NAME = re.compile(r"`([\w.]+)`")


def on_config(config: Any) -> Any:
    """Puts the pages of the reference below its table of names."""
    [pages] = [entry["Reference"] for entry in config.nav if "Reference" in entry]
    pages += [path for path, _ in reference_pages()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds what is made from other files."""
    for path, text in [*pages_beside(), *reference_pages(), *notebook_pages()]:
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return with_links(markdown) if page.file.src_uri == "reference.md" else markdown


def pages_beside() -> Iterator[tuple[str, str]]:
    """Pages that lie beside docs/, with links as they are within it."""
    for name, path in BESIDE.items():
        text = re.sub(r"(\]\(|src=\")docs/", r"\1", (ROOT / name).read_text(encoding="utf-8"))
        for other, target in BESIDE.items():
            text = text.replace(f"]({other}", f"]({target}")
        yield path, f"---\nhide: [navigation]\n---\n{text}" if path == "index.md" else text


def sections() -> Iterator[tuple[str, str, list[str]]]:
    """Title, page and names of each section of reference.md, names in the order of its table."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        path = f"reference/{title.lower().replace(' ', '_').replace('-', '_')}.md"
        yield title, path, [name for cell in cells for name in NAME.findall(cell)]


def reference_pages() -> Iterator[tuple[str, str]]:
    """A page for each section, which mkdocstrings fills from signatures and docstrings."""
    for title, path, names in sections():
        yield path, "\n\n".join([f"# {title}", *(f"::: {PACKAGE}.{name}" for name in names)])


def with_links(text: str) -> str:
    """The table of names, in which each leads to its place in the reference."""
    places = {name: path for _, path, names in sections() for name in names}

    def link(name: re.Match[str]) -> str:
        place = places.get(name[1])
        return f"[{name[0]}]({place}#{PACKAGE}.{name[1]})" if place else name[0]

    return re.sub(r"^\| `.*? \|", lambda cell: NAME.sub(link, cell[0]), text, flags=re.MULTILINE)


def notebook_pages() -> Iterator[tuple[str, str]]:
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        download = f"[Download this notebook]({notebook.name})"
        yield f"notebooks/{notebook.stem}.md", "\n\n".join([*map(cell_text, cells), download])


def cell_text(cell: dict[str, Any]) -> str:
    """A cell as Markdown, with what it printed and drew."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            parts.append(f"```text\n{''.join(output['text'])}\n```")
        elif picture := output.get("data", {}).get("image/png"):
            parts.append(f'<img src="data:image/png;base64,{picture.strip()}" alt="what the cell draws">')
    return "\n\n".join(parts)
