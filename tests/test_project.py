"""The project around the package: workflows, forms, and a wheel and sdist that install and work."""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.programs import ROOT, run_program

FOLDERS = (".github", "benchmarks", "docs", "examples", "src", "tests")
FILES = ("Makefile", "constraints.txt", "mkdocs.yml", "hatch_build.py", "pyproject.toml", "LICENSE")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PACKAGE = "dilated_attention_pytorch"
VERSION = import_module(PACKAGE).__version__
USE = """
import torch, dilated_attention_pytorch as package
q = torch.ones(1, 8, 1, 8)
out = package.dilated_attention(q, q, q, [4, 8], [1, 2], execution=package.Execution("{}"))
torch.testing.assert_close(out, q)
print(package.__file__)
"""


def run(*command: object, **options: Any) -> str:
    return run_program(*command, **options)[0]


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_contributors_run(path: Path) -> None:
    workflow = read_yaml(path)
    assert {"push", "pull_request"} <= set(workflow[True])  # YAML reads `on` as true
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    made = [target for step in steps for target in re.findall(r"\bmake (\S+)", step.get("run", ""))]
    assert set(made) <= TARGETS
    assert len(made) == sum("run" in step for step in steps)  # nothing else is run
    used = [step["uses"] for step in steps if "run" not in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)


def test_workflows_cover_systems_and_pythons() -> None:
    matrix = read_yaml(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["os"] == ["ubuntu-latest"]
    assert matrix["python"] == [f"3.{minor}" for minor in range(10, 15)]
    assert f'requires-python = ">={matrix["python"][0]}"' in (ROOT / "pyproject.toml").read_text()
    assert {each["os"].partition("-")[0] for each in matrix["include"]} == {"macos", "windows"}


def test_forms_hooks_and_citation_are_complete() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = read_yaml(path)
        assert {"name", "description", "body"} <= set(form)
        assert all(field["attributes"]["label"] for field in form["body"])
    [local] = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [hook["entry"].split()[:2] for hook in local["hooks"]] == [
        [".venv/bin/ruff", "check"],
        [".venv/bin/ruff", "format"],
    ]
    citation = read_yaml(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == VERSION


def shipped() -> set[str]:
    """What tests, documentation and builds read."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts and path.suffix != ".so"]
    return {*FILES, *(path.name for path in ROOT.glob("*.md")), *(str(x.relative_to(ROOT)) for x in files)}


def test_sdist_is_complete_and_its_wheel_works(tmp_path: Path) -> None:
    """As a release is made: sdist, a wheel built from it, the wheel in a new environment."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    name = f"dilated_attention-{VERSION}"
    with tarfile.open(tmp_path / f"{name}.tar.gz") as archive:
        assert not {f"{name}/{path}" for path in shipped()} - set(archive.getnames())
        archive.extractall(tmp_path, filter="data")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=tmp_path / name)
    [wheel] = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "new", cwd=tmp_path)
    python = tmp_path / "new" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=tmp_path)
    # Its torch is that of the tests. What .pth files add there, such as this source, is not seen by this way.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
    (Path(site.strip()) / "torch.pth").write_text(sysconfig.get_path("purelib"))
    kernel = "stock" if shutil.which("cc") is None or sys.platform == "win32" else "native"
    printed = run(python, "-c", USE.format(kernel), cwd=tmp_path, PYTHONPATH="")
    assert printed == f"{Path(site.strip()) / PACKAGE / '__init__.py'}\n"
    program = run(python.with_name("dilated-attention"), "--version", cwd=tmp_path, PYTHONPATH="")
    assert VERSION in program
