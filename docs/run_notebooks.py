"""Runs notebooks and stores what their cells print and draw: `python docs/run_notebooks.py [file ...]`.

Cells are executed in one namespace, like the examples of the pages, and figures shown as Jupyter shows them.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "notebooks"


def run(notebook: Path) -> None:
    """Executes all cells, then writes the notebook with its outputs."""
    document = json.loads(notebook.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(document["cells"]):
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), namespace)
            text = [{"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(True)}]
            cell["outputs"] = (text if printed.getvalue() else []) + [*map(display, drawn_figures())]
    notebook.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def drawn_figures() -> list[bytes]:
    """Figures that a cell has made, which Jupyter shows below it, as PNG."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    from matplotlib import pyplot

    pictures = []
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, format="png", dpi=80, bbox_inches="tight")
        pictures.append(picture.getvalue())
    pyplot.close("all")
    return pictures


def display(picture: bytes) -> dict[str, Any]:
    data = {"image/png": base64.b64encode(picture).decode()}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        run(path)
        print(f"ran {path}")
