"""The package as a whole: one-way imports, a quiet import, complete exports, no machine in the text."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

import pytest

from support.aliases import ALIASES

PACKAGE = "dilated_attention_pytorch"
ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / PACKAGE

# Lower floors know nothing of higher ones, and a room of its floor only those to its left.
FLOORS = [
    ["checks", "spec"],
    ["reference", "core", "plan"],
    ["kernels"],
    ["ops", "functional", "block_sparse"],
    ["attention_maps", "decode", "ring"],
    ["modules", "integrations", "factory", *sorted(ALIASES), "__init__"],
    ["cli", "__main__"],
]
# What a room may import beyond torch, inside the functions that use it.
EXTRAS = {
    "cli": {"matplotlib"},
    "kernels": {"triton"},
    "plan": {"matplotlib"},
    "modules": {"safetensors", "huggingface_hub"},
    "integrations": {"transformers"},
}
PLACE = {room: place for place, room in enumerate(room for floor in FLOORS for room in floor)}
MODULES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    if path.name == "__main__.py":
        return "__main__"  # a program, whichever room it is started in
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_modules(path: Path, source: str) -> set[str]:
    """Absolute names of everything imported anywhere in a module, also inside functions and type checking."""
    parents = (PACKAGE, *path.relative_to(SOURCE).parent.parts)
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) + 1 - node.level] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            # `from package import room` names a module in its alias
            names.update(f"{module}.{alias.name}" if module == PACKAGE else module for alias in node.names)
    return names


def imported_rooms(path: Path, source: str) -> set[str]:
    """Rooms of this package that a module imports; `__init__` stands for names of the package root."""
    rooms = set()
    for name in imported_modules(path, source):
        first, _, rest = name.partition(".")
        if first == PACKAGE:
            room = rest.partition(".")[0]
            rooms.add(room if room in PLACE else "__init__")
    return rooms


def misplaced_imports(path: Path, source: str) -> set[str]:
    room = room_of(path)
    if room == "__init__":
        return set()
    below = {other for other in PLACE if PLACE[other] < PLACE[room]}
    if room != "cli":
        below.discard("reference")  # an oracle that the engine called would prove nothing
    return imported_rooms(path, source) - below - {room}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    source = path.read_text()
    assert room_of(path) in PLACE, f"{path.name} is in no room: give it a place in FLOORS"
    assert not misplaced_imports(path, source)
    outside = {name.partition(".")[0] for name in imported_modules(path, source)} - {PACKAGE, "torch"}
    assert outside <= sys.stdlib_module_names | EXTRAS.get(room_of(path), set())


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_alias_modules_hold_no_logic(alias: str) -> None:
    docstring, *imports, names = ast.parse((SOURCE / f"{alias}.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    assert isinstance(names, ast.Assign)
    exported = import_module(f"{PACKAGE}.{alias}").__all__
    assert all(getattr(import_module(PACKAGE), name) for name in exported)


@pytest.mark.parametrize(
    ("module", "source", "misplaced"),
    [
        ("spec.py", "from .plan import dilated", {"plan"}),
        ("plan/dilated.py", "from ..spec import DilatedSpec\nfrom .runs import Plan", set()),
        ("plan/dilated.py", "def f():\n    from .. import functional", {"functional"}),
        ("plan/runs.py", f"import {PACKAGE}.kernels.eager", {"kernels"}),
        ("functional.py", "from .reference import dilated_attention_reference", {"reference"}),
        ("functional.py", f"from {PACKAGE} import DilatedAttention", {"__init__"}),
        ("cli/bench/cases.py", "from ...reference import dilated_attention_reference", set()),
        ("__init__.py", "from .functional import dilated_attention", set()),
    ],
)
def test_import_rule_sees_a_breach(module: str, source: str, misplaced: set[str]) -> None:
    assert misplaced_imports(SOURCE / module, source) == misplaced


def assert_runs_silently(code: str) -> None:
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout + result.stderr == ""


# Not triton: builds of torch for GPUs bring it along, and torch's flop counter imports it there.
OPTIONAL = ("hypothesis", "matplotlib", "mkdocs", "numpy", "psutil", "safetensors", "transformers")


# None in sys.modules makes an import fail as if the package were not installed.
WITHOUT_OPTIONAL = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL}))"
FIRST_USES = [
    f"from {PACKAGE} import *",
    f"import {PACKAGE}; {PACKAGE}.core.get_global_pattern_cache()",
    f"import {PACKAGE}; {PACKAGE}.DilatedSpec((4,), (1,))",
]


@pytest.mark.parametrize("first_use", FIRST_USES)
def test_first_use_needs_torch_alone_and_is_silent(first_use: str) -> None:
    assert_runs_silently(f"{WITHOUT_OPTIONAL}\n{first_use}")


def test_import_alone_takes_no_torch_and_no_time() -> None:
    assert_runs_silently(
        f"import sys, {PACKAGE} as package; assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert set(package.__all__) <= set(dir(package)) and 'torch' not in sys.modules\n"
        "import dilated_attention_pytorch.cli.main; assert 'torch' not in sys.modules"
    )


def test_import_after_torch_registers_operators_loads_nothing_optional_and_changes_no_setting() -> None:
    assert_runs_silently(
        f"""
import logging, sys, warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
import torch

def settings():
    return dict(
        dtype=torch.get_default_dtype(),
        device=torch.get_default_device(),
        threads=(torch.get_num_threads(), torch.get_num_interop_threads()),
        grad=torch.is_grad_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        random=torch.get_rng_state().tolist(),
        warnings=list(warnings.filters),
        log=(logging.root.level, list(logging.root.handlers)),
    )

before, loaded = settings(), set(sys.modules)
import {PACKAGE} as package
torch.ops.{PACKAGE}.attention, torch.ops.{PACKAGE}.attention_backward  # exported programs call them
assert [getattr(package, name) for name in package.__all__]
after = settings()
assert before == after, [name for name in before if before[name] != after[name]]
optional = (set(sys.modules) - loaded) & {{*{OPTIONAL}, "torch._dynamo"}}  # the compiler takes seconds
assert not optional, optional
"""
    )


def test_all_is_what_the_package_offers() -> None:
    package = import_module(PACKAGE)
    exported = package.__all__
    assert len(set(exported)) == len(exported)
    assert all(hasattr(package, name) for name in exported)  # from here on they are all there
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    # Dunders such as __version__ may be exported as well; the order is the linter's business.
    assert {name for name in exported if not name.startswith("_")} == public
    assert set(exported) <= set(dir(package))


def test_imports_of_type_checkers_are_those_of_first_use() -> None:
    package = import_module(PACKAGE)
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    checked = next(x for x in tree.body if isinstance(x, ast.If) and "TYPE_CHECKING" in ast.unparse(x.test))
    seen = {
        str(node.module): " ".join(alias.name for alias in node.names)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
    }
    assert seen == package._MODULES
    assert sorted(" ".join(seen.values()).split()) == package.__all__


def test_names_that_do_not_exist_are_refused() -> None:
    package = import_module(PACKAGE)
    with pytest.raises(AttributeError, match=f"module '{PACKAGE}' has no attribute 'DilatedAttentoin'"):
        _ = package.DilatedAttentoin
    with pytest.raises(ImportError, match="cannot import name 'DilatedAttentoin'"):
        exec(f"from {PACKAGE} import DilatedAttentoin")


def test_version_is_the_installed_one() -> None:
    assert import_module(PACKAGE).__version__ == metadata.version("dilated-attention")


def test_text_names_no_place_of_a_machine() -> None:
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *MODULES):
        found = [place for place in ("/work/", "/root/", "/tmp/", "/home/") if place in path.read_text()]
        assert not found, path
