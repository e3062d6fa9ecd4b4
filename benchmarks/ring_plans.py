"""What rings of many ranks would send, compute and hold, from their schedules alone.

python benchmarks/ring_plans.py --update docs/distributed.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import update_page

from dilated_attention_pytorch.cli.bench.record import Table
from dilated_attention_pytorch.core.host_memory import describe_bytes
from dilated_attention_pytorch.ring import RingSchedule, plan_ring

RANKS = (8, 64, 256, 1024)
SHARD = 131072  # tokens of a rank
HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
# One branch within the shard, one as long as 4 of them, one over everything.
NEAR, FAR = (8192, 1), (4 * SHARD, 64)


def plans_table() -> str:
    """One row for each number of ranks and mask, and how the schedules were made."""
    rows = [_row(size, is_causal) for size in RANKS for is_causal in (False, True)]
    head = ["ranks", "mask", "tokens in all", "receives, forward", "in backward", "of all keys and values"]
    table = Table([*head, "TFLOPs, forward", "busiest over mean", "holds, forward"], rows)
    return f"{table}\n\n{_how()}\n"


def plan_of(size: int, is_causal: bool) -> RingSchedule:
    """A ring whose ranks have `SHARD` tokens each; the rate of the longest branch grows with the length."""
    n = size * SHARD
    branches = [NEAR, FAR, (n, size * SHARD // 4096)]
    segment_lengths, dilation_rates = zip(*branches, strict=True)
    return plan_ring(
        segment_lengths,
        dilation_rates,
        n,
        num_ranks=size,
        num_heads=HEADS,
        num_kv_heads=KEY_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        is_causal=is_causal,
    )


def _row(size: int, is_causal: bool) -> list[str]:
    schedule = plan_of(size, is_causal)
    # The pattern repeats every 4 ranks, but for the ends. What goes out is counted peer by peer.
    ranks = [*range(4), size // 2, *range(size - 4, size)]
    forward = max(schedule.received_bytes(rank) for rank in ranks)
    backward = max(schedule.received_bytes(rank, "backward") for rank in ranks)
    everything = schedule.shape.n * 2 * KEY_HEADS * HEAD_DIM * schedule.itemsize
    flops = max(schedule.flops(rank) for rank in ranks)
    return [
        str(size),
        "causal" if is_causal else "none",
        f"{schedule.shape.n:,}",
        describe_bytes(forward),
        describe_bytes(backward),
        f"{100 * forward / everything:.3f} %",
        f"{flops / 1e12:.1f}",
        f"{schedule.imbalance:.2f}",
        describe_bytes(max(schedule.memory_bytes(rank) for rank in ranks)),
    ]


def _how() -> str:
    return (
        f"The rank that receives, computes or holds most, of {SHARD:,} tokens a rank; b = 1, {HEADS} heads, "
        f"{KEY_HEADS} key heads, d = {HEAD_DIM}, bfloat16, strategy ring; branches {NEAR}, {FAR} and the "
        "whole sequence at the rate that leaves 4096 of its keys to a head. Holds: inputs, results, "
        "workspace and buffers of one layer."
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", type=Path, metavar="PAGE", help="put the table between the plan markers")
    options = parser.parse_args(arguments)
    table = plans_table()
    if options.update:
        update_page(options.update, table, "plan")
    print(table, end="")


if __name__ == "__main__":
    main()
