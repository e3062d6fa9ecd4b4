"""Source code to train on: packages of the registry, by version and hash, or Python's own library."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dilated_attention_pytorch.cli.bench.record import say
from dilated_attention_pytorch.cli.train.data import standard_library_files

DATA = Path(__file__).resolve().parents[2] / "build" / "quality-data"
PACKAGES = {
    "Django==5.2": "91ceed4e3a6db5aedced65e3c8f963118ea9ba753fc620831c77074e620e7d83",
    "SQLAlchemy==2.0.41": "57df5dc6fdb5ed1a88a1ed2195fd31927e705cad62dedd86b46972752a80f576",
    "ansible-core==2.18.6": "12a34749a7b20f0f1536bd3e3b2e137341867e4642e351273e96647161f595c0",
    "networkx==3.4.2": "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
    "celery==5.5.2": "54425a067afdc88b57cd8d94ed4af2ffaf13ab8c7680041ac2c4ac44357bdf4c",
}
_OPENING = threading.Lock()


class Sources(NamedTuple):
    """Paths to train on and to validate on, and of how many packages they are: of none it is the library."""

    training: tuple[str, ...]
    validation: tuple[str, ...]
    packages: int


def open_sources(packages: tuple[str, ...]) -> Sources:
    """The packages, of which the last is to validate on; downloads what is missing.

    Without any, or where the registry cannot be reached, all is of the standard library: the last modules by
    name are to validate on. All calls of a process find the same.
    """
    with _OPENING:
        return _open(packages)


@cache
def _open(packages: tuple[str, ...]) -> Sources:
    try:
        paths = tuple(str(fetch(package, PACKAGES[package])) for package in packages)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"the packages cannot be downloaded ({error}): training on Python's standard library")
        paths = ()
    if paths:
        return Sources(paths[:-1], paths[-1:], len(paths))
    files = tuple(standard_library_files())
    edge = len(files) * 9 // 10
    return Sources(files[:edge], files[edge:], 0)


def fetch(package: str, digest: str) -> Path:
    """The folder with a package's modules. A wheel with another hash is an error; nothing of it is run."""
    folder = DATA / package.replace("==", "-")
    if folder.is_dir():
        return folder
    say(f"downloading {package}")
    DATA.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=DATA))
    try:
        _download(package, digest, place)
        place.rename(folder)  # of several processes the first one wins
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return folder


def _download(package: str, digest: str, place: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
    pip += ["--only-binary", ":all:", "--platform", "any", "--implementation", "py", "--abi", "none"]
    subprocess.run([*pip, "--dest", str(place), package], check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != digest:
        raise ValueError(f"{package} must have the SHA-256 {digest}, got {found}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place, [name for name in archive.namelist() if name.endswith(".py")])
    wheel.unlink()
