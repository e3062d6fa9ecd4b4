"""Builds the API reference from the docstrings: `python docs/build_reference.py [folder]`, or `make docs`.

Any warning ends it, such as an annotation that cannot be resolved or a name of `__all__` that is not there.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
import warnings
from importlib import import_module
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = "dilated_attention_pytorch"
# What users import from; all other modules are the library's own affair.
MODULES = (
    PACKAGE,
    f"{PACKAGE}.core",
    f"{PACKAGE}.core.attention_buffer_manager",
    f"{PACKAGE}.integrations.deepspeed",
    f"{PACKAGE}.integrations.gigapath",
    f"{PACKAGE}.integrations.torchscale",
    f"{PACKAGE}.integrations.torchtitan",
    f"{PACKAGE}.integrations.transformers",
    f"{PACKAGE}.reference",
    f"{PACKAGE}.ring",
)


def build(folder: Path) -> None:
    """Writes index.html, a page for each of MODULES and the search index into `folder`."""
    import pdoc

    package = import_module(PACKAGE)
    for name in package.__all__:
        resolve_fields(getattr(package, name))  # which imports the name: pdoc looks for those that are there
    pdoc.render.configure(
        docformat="google",
        show_source=False,
        template_directory=DOCS / "reference",
        footer_text=f"version {package.__version__}",
    )
    pdoc.pdoc(*MODULES, output_directory=folder)


def resolve_fields(value: object) -> None:
    """Resolves annotations of a dataclass: those of a base hold in the module of the base."""
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        hints = typing.get_type_hints(value)
        names = value.__init__.__annotations__
        names.update({name: hints[name] for name in names if name in hints})


if __name__ == "__main__":
    warnings.simplefilter("error")
    # torch's remark, not that of a docstring
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS.parent / "build" / "reference"
    build(target)
    print(f"wrote {target / 'index.html'}")
