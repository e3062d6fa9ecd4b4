"""The longest sequence within 8 GiB of memory, forward and training, by `dilated-attention bench --limit`.

python benchmarks/limit.py --out benchmarks/results/limit.json
python benchmarks/limit.py --render --update docs/benchmarks.md --markers limit
"""

from __future__ import annotations

import sys

from common import main

from dilated_attention_pytorch.cli.bench.candidates import Config
from dilated_attention_pytorch.cli.bench.limit import CONFIG, SECTION, limit_case, run_limit

CASES = tuple(limit_case(CONFIG, backward=backward) for backward in (False, True))
QUICK = (limit_case(Config(2, 16, (64, 256), (1, 4), dtype="bfloat16"), budget=2**29, seconds=300.0),)
SECTIONS = {"limit": SECTION}
run = run_limit

if __name__ == "__main__":
    sys.exit(main("limit"))
