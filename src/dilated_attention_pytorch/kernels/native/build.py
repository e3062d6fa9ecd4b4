"""Compiles the native kernel: `python -m dilated_attention_pytorch.kernels.native.build`.

The package's build hook calls `build` when the package is installed; nothing is compiled at import or use.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "native.so"
# Products and sums may be contracted to one instruction; nothing else is allowed that changes results.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-ffp-contract=fast", "-fno-math-errno")
# One compilation of kernel.c for each instruction set; which one runs is chosen when it is loaded.
SETS: dict[str, tuple[str, ...]] = {"portable": ()}
if platform.machine().lower() in ("x86_64", "amd64"):
    avx2 = ("-mavx2", "-mfma", "-mf16c")
    SETS |= {"avx2": avx2, "avx512": (*avx2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")}


class BuildError(RuntimeError):
    """Why there is no library."""


def build(library: Path = LIBRARY, *flags: str) -> Path:
    """Compiles the library with the system's C compiler, or $CC; `flags` are for the compiler."""
    if sys.platform == "win32":
        raise BuildError("the native kernel is not built on Windows")
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"there is no C compiler: {compiler[0]!r} was not found")
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for name, options in SETS.items():
            made.append(f"{folder}/{name}.o")
            source = f"-DNAME=dap_{name}", "-c", FOLDER / "kernel.c", "-o", made[-1]
            _run(compiler, *FLAGS, *options, *flags, *source)
        made.append(f"{folder}/dispatch.o")
        _run(compiler, *FLAGS, *flags, "-c", FOLDER / "dispatch.c", "-o", made[-1])
        whole = Path(folder) / "native.so"
        _run(compiler, *flags, "-shared", *made, "-o", whole, "-lm", "-lpthread")
        # A process that has loaded the old file keeps it.
        new = library.with_suffix(".new")
        shutil.copyfile(whole, new)
        new.replace(library)
    return library


def _run(compiler: list[str], *arguments: object) -> None:
    command = [*compiler, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{result.stderr.strip()}")


if __name__ == "__main__":
    print(build())
