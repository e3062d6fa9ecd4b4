"""Facts about this machine and this copy of the project, for the record. What cannot be found is None."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGE = Path(__file__).resolve().parents[2]


def machine_facts() -> dict[str, str | int | float | None]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load_average(),
        "memory_bytes": _memory_bytes(),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def load_average() -> float | None:
    """How many processes wanted to run in the last minute, where the system says so."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def project_facts() -> dict[str, str | bool | None]:
    """The version, and the commit if the package runs from a checkout of its own repository."""
    try:
        number = version("dilated-attention")
    except PackageNotFoundError:
        number = None
    root = _git("rev-parse", "--show-toplevel")
    # A package installed below some other project's checkout must not report that project's commit.
    is_own = root is not None and (Path(root) / "src" / PACKAGE.name).resolve() == PACKAGE
    commit = _git("rev-parse", "--verify", "HEAD") if is_own else None
    changes = _git("status", "--porcelain", "--", str(PACKAGE)) if commit else None
    return {"version": number, "commit": commit, "changed": bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
