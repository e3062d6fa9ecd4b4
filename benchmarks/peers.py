"""The main modules and dense attention side by side, forward and training, by `dilated-attention bench`.

python benchmarks/peers.py --out benchmarks/results/peers.json
python benchmarks/peers.py --render --update docs/benchmarks.md --markers peers
"""

from __future__ import annotations

import sys

from common import main

from dilated_attention_pytorch.cli.bench.candidates import MAIN, Config
from dilated_attention_pytorch.cli.bench.cases import SECTION, Case, run_case
from dilated_attention_pytorch.spec import branches_for

_CONFIG = Config(4, 64, *branches_for(32768, ratio=4))
CASES = tuple(
    Case(
        f"{'training' if backward else 'forward'} at {n}",
        *(_CONFIG, n, MAIN),
        backward=backward,
        dense_repeats=None if n <= 8192 else 1,
        repeats=3,
    )
    for backward in (False, True)
    for n in (2048, 8192, 32768)
)
_SMALL = Config(2, 16, (32, 128), (1, 2), sparsity=0.5, block_size=32)
QUICK = (Case("quick modules", _SMALL, 256, ("sdpa", "DilatedAttention"), backward=True, repeats=2),)
SECTIONS = {"compare": SECTION}
run = run_case

if __name__ == "__main__":
    sys.exit(main("peers"))
