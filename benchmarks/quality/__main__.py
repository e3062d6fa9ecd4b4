"""Quality of attention, measured by small models that are trained from scratch, several seeds each.

    python benchmarks/quality reach       what is found, by its distance, in sequences longer than trained
    python benchmarks/quality language    bits per byte of source code, by context, at equal bytes and time
    python benchmarks/quality choice      segments, ratio, offsets and head mixing of dilated attention

Each command trains as many models at a time as there are cores, shows its progress, and goes on after an
interruption with --resume. COMMAND --help lists the options.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

COMMANDS = ("reach", "language", "choice")


def run(arguments: list[str]) -> int:
    """The program of one of the suites beside this file."""
    name, *others = arguments or [""]
    if name not in COMMANDS:
        is_help = name in ("-h", "--help")
        print(__doc__, file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    # Models are trained in processes that keep freed memory, where they heed this: fresh pages cost time.
    for what, size in (("MMAP", 2**25), ("TRIM", 2**33)):
        os.environ.setdefault(f"MALLOC_{what}_THRESHOLD_", str(size))
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where common.py lies
    from common import main

    return main(name, others, prog=f"benchmarks/quality {name}")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
