"""Writes this package as a repository of the Hugging Face Hub for the `kernels` package to load.

    dilated-attention hub-kernel --out hub

The folder gets a variant for each backend, a card and the metadata that `kernels` reads: what a repository
holds on the branch of its version, which is the package's major version. The variants are pure Python and
alike: the Triton kernel is among the sources, the compiled kernel for CPUs and the command line are not.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
from pathlib import Path

from .. import __version__

NAME = "dilated-attention-pytorch"
BACKENDS = ("cpu", "cuda", "rocm", "metal")
KERNELS = "0.17.2"  # the release of `kernels` that the layout is tested with
MAJOR = int(__version__.partition(".")[0])
SOURCE = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns("cli", "__main__.py", "__pycache__", "*.so", "*.c", "*.h")
INIT = f'''"""Attention over sequences too long for dense attention, version {__version__}."""

from .{SOURCE.name} import *  # noqa: F403
from .{SOURCE.name}.integrations import transformers as transformers
'''
CARD = f"""---
library_name: kernels
license: mit
tags:
- kernel
---
# {NAME}

Attention over sequences too long for dense attention: exact dilated (LongNet) and block-sparse attention,
forward and backward. Version {__version__}, pure Python, with a Triton kernel for GPUs.

```python
from kernels import get_kernel

kernel = get_kernel("<owner>/{NAME}", version={MAJOR}, trust_remote_code=True)
out = kernel.dilated_attention(q, k, v, [2048, 8192], [1, 4], is_causal=True)  # (b, n, h, d)
kernel.transformers.use_dilated_attention(model, {{"max_length": 32768}})
```
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hub-kernel`."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder, new or empty")


def run(options: argparse.Namespace) -> int:
    """Writes the repository and says what it holds."""
    out: Path = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out must be a folder that is new or empty, got {out}")
    for backend in BACKENDS:
        variant = out / "build" / f"torch-{backend}"
        shutil.copytree(SOURCE, variant / SOURCE.name, ignore=LEFT_OUT)
        (variant / "__init__.py").write_text(INIT)
        (variant / "metadata.json").write_text(json.dumps(_metadata(variant, backend), indent=2) + "\n")
        print(variant)
    (out / "README.md").write_text(CARD)
    return 0


def _metadata(variant: Path, backend: str) -> dict[str, object]:
    """What `kernels` asks for; the id, under which the package is imported, is one of these files alone."""
    files = sorted(path for path in variant.rglob("*") if path.is_file())
    hashes = {
        path.relative_to(variant).as_posix(): hashlib.sha256(path.read_bytes()).digest() for path in files
    }
    together = hashlib.sha256(repr(hashes).encode()).hexdigest()
    digests = {name: base64.b64encode(digest).decode() for name, digest in hashes.items()}
    return {
        "name": NAME,
        "id": f"_{NAME.replace('-', '_')}_{backend}_{together[:12]}",
        "version": MAJOR,
        "license": "MIT",
        "kernels-minver": KERNELS,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }
