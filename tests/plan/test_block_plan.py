"""Plans of block patterns: every kept block met once, tails and diagonals exact, batches in the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dilated_attention_pytorch import BlockPattern
from dilated_attention_pytorch.plan import Pass, Plan, Shape, block_sparse, plan_blocks
from dilated_attention_pytorch.plan.runs import COLUMN, bytes_a_row
from support.block_configurations import BlockConfiguration, block_configurations
from support.plans import batch_sizes, count_batched_pairs, count_pairs, jobs_of


def kept_pairs(pattern: BlockPattern, shape: Shape) -> torch.Tensor:
    """(b, h, n, n) of 0 and 1."""
    dense = pattern.to_dense().long()
    if pattern.is_causal:
        dense = dense.tril()
    b, n, h = shape[:3]
    return dense.view(b, h, n, n) if len(pattern) == b * h else dense.expand(b, h, n, n)


def check_plan(
    pattern: BlockPattern, shape: Shape, itemsize: int, workspace_bytes: int, direction: Pass
) -> Plan:
    """Counts every pair that is met, for each batch and query head, against the pattern."""
    expected, size = kept_pairs(pattern, shape), pattern.block_size
    how: dict[str, Any] = {"itemsize": itemsize, "workspace_bytes": workspace_bytes, "direction": direction}
    plan = plan_blocks(pattern, shape, **how)
    assert torch.equal(count_pairs(plan), expected)
    assert torch.equal(count_batched_pairs(plan, itemsize), expected)
    assert plan.num_pairs == int(expected.sum())
    for jobs, heads, rows, keys in batch_sizes(plan, itemsize):
        is_smallest = jobs == 1 and keys <= size
        packed = bytes_a_row(shape.d, itemsize) * jobs * (heads * rows + keys)
        assert packed <= plan.budget or is_smallest
    written = torch.zeros(shape.b, shape.n, shape.h, dtype=torch.bool)
    for job in jobs_of(plan):
        where = job.batch, slice(job.start, job.start + job.count), slice(job.head, job.head + job.heads)
        assert bool(written[where].any()) != bool(job.opens_queries)
        written[where] = True
    assert not plan.covers_queries or written.all()
    return plan


@settings(max_examples=100)
@given(block_configurations(max_n=150))
def test_jobs_meet_every_kept_block_once(config: BlockConfiguration) -> None:
    pattern = config.pattern
    pattern = pattern.causal() if config.is_causal else pattern
    shape = Shape(config.b, config.n, config.h, config.h_kv, config.d)
    for itemsize, direction in ((2, "forward"), (4, "forward"), (8, "backward")):
        check_plan(pattern, shape, itemsize, config.workspace_bytes, direction)  # type: ignore[arg-type]


@settings(max_examples=60)
@given(block_configurations(max_n=100), st.data())
def test_a_shard_meets_its_own_keys_and_those_before_and_behind(
    config: BlockConfiguration, data: Any
) -> None:
    pattern = config.pattern
    pattern = pattern.causal() if config.is_causal else pattern
    lo = data.draw(st.integers(0, config.n - 1))
    hi = data.draw(st.integers(lo + 1, config.n))
    shape = Shape(config.b, hi - lo, config.h, config.h_kv, config.d)
    expected = kept_pairs(pattern, shape._replace(n=config.n))[:, :, lo:hi]
    total = torch.zeros_like(expected)
    others = ((0, lo),) if config.is_causal else ((0, lo), (hi, config.n))
    for keys in ((lo, hi), *others):
        for kv in range(config.h_kv):
            plan = plan_blocks(
                pattern, shape, itemsize=4, workspace_bytes=2**14, queries=(lo, hi), keys=keys, kv=(kv, 1)
            )
            jobs, runs = plan.jobs.clone(), plan.runs.clone()
            jobs[:, COLUMN["start"]] += lo
            runs[:, 0] += lo
            moved = Plan(jobs, runs, shape._replace(n=config.n), plan.regions)
            total += count_pairs(moved)[:, :, lo:hi]
    assert torch.equal(total, expected)


def causal_band(n: int, size: int, width: int) -> BlockPattern:
    blocks = -(-n // size)
    layout = torch.ones(blocks, blocks, dtype=torch.bool).tril().triu(1 - width)
    return BlockPattern.from_layout(layout, n, size, is_causal=True)


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("workspace_bytes", [1, 2**10, 2**14, 2**16, 2**20])
def test_causal_bands_stay_in_the_budget(workspace_bytes: int, width: int) -> None:
    for h, h_kv in ((1, 1), (4, 4), (4, 1)):
        for n in (128, 121):
            check_plan(causal_band(n, 8, width), Shape(2, n, h, h_kv, 8), 4, workspace_bytes, "forward")


def batches_of(pattern: BlockPattern, shape: Shape, workspace_bytes: int = 2**20) -> list[Any]:
    plan = plan_blocks(pattern, shape, itemsize=4, workspace_bytes=workspace_bytes)
    assert bool(plan.column("causal").all()) == pattern.is_causal
    return sorted(batch_sizes(plan, 4))


def test_rows_of_equal_shape_run_together() -> None:
    """The diagonal block is attended causally, in its job; what a short last block cuts runs apart."""
    band = batches_of(causal_band(78, 8, 3), Shape(1, 78, 4, 2, 4))
    assert band == [(2, 2, 6, 16), (2, 2, 8, 8), (2, 2, 8, 8), (14, 2, 8, 16)]
    layout = torch.zeros(4, 4, dtype=torch.bool)
    layout[0, [0, 3]] = layout[1, [0, 1]] = layout[2, [2, 3]] = layout[3, [0, 3]] = True
    cut = batches_of(BlockPattern.from_layout(layout, 29, 8), Shape(1, 29, 1, 1, 4))
    assert cut == [(1, 1, 5, 13), (1, 1, 8, 16), (2, 1, 8, 13)]
    whole = batches_of(BlockPattern.from_layout(layout, 32, 8), Shape(1, 32, 1, 1, 4))
    assert whole == [(4, 1, 8, 16)]


def test_a_smaller_budget_makes_more_batches() -> None:
    pattern = BlockPattern.from_layout(torch.rand(16, 16) < 0.5, 128, 8)
    counts = [len(batches_of(pattern, Shape(1, 128, 2, 2, 8), size)) for size in (2**20, 2**14, 2**12, 1)]
    assert counts == sorted(counts)
    assert counts[0] == len(torch.unique(pattern.to_layout().sum(-1)))
    assert counts[-1] == 16 * 2


def test_gradients_of_keys_are_summed_in_regions_that_fit() -> None:
    pattern = causal_band(4096, 64, 3)
    shape, size = Shape(2, 4096, 8, 8, 64), 2**22
    plan = plan_blocks(pattern, shape, itemsize=4, direction="backward", workspace_bytes=size)
    assert len(plan.regions) > 2
    sums = [2 * 4 * shape.d * x.batch[1] * x.time[1] * x.kv[1] for x in plan.regions]
    assert max(sums) <= size


@pytest.mark.parametrize("workspace_bytes", [1, 2**12, 2**16, 2**22])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_neighbours_that_share_keys_meet_them_once(
    size: int, workspace_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small blocks with common columns, some rows with others besides, and a tail."""
    monkeypatch.setattr(block_sparse, "JOINED_ROWS", 128)
    blocks, n = 2 * (128 // size) + 3, 2 * 128 + 3 * size - size // 2
    layout = torch.zeros(blocks, blocks, dtype=torch.bool)
    layout[:, [0, 2]] = True
    layout[torch.arange(blocks), torch.arange(blocks)] = True
    for is_causal in (False, True):
        pattern = BlockPattern.from_layout(layout, n, size, is_causal=is_causal)
        plan = check_plan(pattern, Shape(1, n, 2, 1, 4), 4, workspace_bytes, "forward")
        assert (int(plan.column("count").max()) > size) == (size < 64)
