"""The longest sequence within 8 GiB of memory, forward and training, by `dilated-attention bench --limit`.

python benchmarks/limit.py --out benchmarks/results/limit.json
python benchmarks/limit.py --render --update docs/benchmarks.md --markers limit
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from common import main

from dilated_attention_pytorch.cli.bench.candidates import Config
from dilated_attention_pytorch.cli.bench.limit import CONFIG, SECTION, limit_case, make_table, run_limit
from dilated_attention_pytorch.cli.bench.record import Result, Table

# What the requirement documents report for a GTX 1080 with 8 GB.
DOCUMENTED = {"`ImprovedDilatedAttention` with a memory pool": 65_536, "base block-sparse attention": 131_072}
TARGETS = {False: 1_800_000, True: 700_000}  # by whether it trains
CASES = tuple(limit_case(CONFIG, backward=backward, target=n) for backward, n in TARGETS.items())
QUICK = (limit_case(Config(2, 16, (64, 256), (1, 4), dtype="bfloat16"), budget=2**29, seconds=300.0),)


def documented_table(results: Sequence[Result]) -> Table:
    """The table of the command, with the lengths over those that the documents report before the remarks."""
    head, rows = make_table(results)
    head[-1:-1] = [f"over {n:,} ({what})" for what, n in DOCUMENTED.items()]
    for result, row in zip(results, rows, strict=True):
        found = result.counts.get("confirmed") if result.case["target"] else None
        row[-1:-1] = ["" if found is None else f"{found / n:.1f} x" for n in DOCUMENTED.values()]
    return Table(head, rows)


SECTIONS = {"limit": replace(SECTION, table=documented_table)}
run = run_limit

if __name__ == "__main__":
    sys.exit(main("limit"))
