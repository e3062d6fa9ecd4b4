"""Dense, dilated and block-sparse attention over the length of a sequence: the picture of the README.

python benchmarks/lengths.py --out benchmarks/results/lengths.json
python benchmarks/lengths.py --render --update docs/benchmarks.md --markers lengths
python benchmarks/lengths.py --render --picture docs/images/lengths.svg
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from common import main, picture

from dilated_attention_pytorch.cli.bench.candidates import Config
from dilated_attention_pytorch.cli.bench.cases import SECTION, Case, run_case
from dilated_attention_pytorch.cli.bench.record import Record
from dilated_attention_pytorch.cli.report import Series
from dilated_attention_pytorch.spec import branches_for

NAMES = {"sdpa": "dense (SDPA)", "dilated_attention": "dilated", "block_sparse_attention": "block-sparse"}
HEADS, HEAD_DIM, KEYS = 8, 64, 2048
LONGEST_DENSE = 32768  # twice as long takes four times the time, a minute a call on two cores


def make_case(n: int) -> Case:
    """The branches that `branches_for` gives, and blocks that keep `KEYS` keys of each query."""
    config = Config(HEADS, HEAD_DIM, *branches_for(n, num_heads=HEADS), sparsity=min(1.0, KEYS / n))
    candidates = tuple(NAMES)[n > LONGEST_DENSE :]
    return Case(f"{n:,} tokens", config, n, candidates, dense_repeats=None if n <= 8192 else 1)


CASES = tuple(make_case(2**power) for power in range(10, 18))
_SMALL = Config(2, 16, (32, 128), (1, 2), sparsity=0.5, block_size=32)
QUICK = (Case("quick lengths", _SMALL, 256, tuple(NAMES), repeats=2),)
run = run_case


def describe(case: dict[str, Any]) -> str:
    """What all lengths share."""
    config = case["config"]
    h, block = config["h"], config["block_size"]
    sizes = f"forward, b = 1, h = {h}, d = {config['d']}, {config['dtype']}"
    dilated = f"branches of `branches_for(n, num_heads={h})`"
    kept = f"{KEYS:,} keys of each query in blocks of {block}"
    return f"{sizes}, {dilated}, {kept}, dense attention beyond 8,192 tokens in 1 round"


SECTIONS = {"compare": replace(SECTION, title="**Time over length**", describe=describe)}


def draw(record: Record) -> str:
    """The least time of a call over the length, as an SVG of its own."""
    series = []
    for name, label in NAMES.items():
        timings = [(result.case["n"], result.timing(name)) for result in record.results]
        points = tuple((n, 1e3 * timing.minimum) for n, timing in timings if timing)
        series += [Series(label, points)] if points else []
    title = f"Time of one call on {record.machine['cores']} CPU cores"
    how = {"x_label": "tokens", "y_label": "milliseconds", "chart_id": "lengths", "y_text": "{:,.0f}".format}
    return picture(series, title=title, **how)


if __name__ == "__main__":
    sys.exit(main("lengths"))
