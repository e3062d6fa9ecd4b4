"""Plans: every connected pair exactly once, within the workspace and the grid limit, as printable data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dilated_attention_pytorch import DilatedSpec
from dilated_attention_pytorch.core import PatternCache
from dilated_attention_pytorch.kernels.batches import MAX_JOBS
from dilated_attention_pytorch.plan import Plan, Shape, Shard, plan_crossing, plan_dilated
from dilated_attention_pytorch.plan.dilated import MAX_ROWS, Head, branch_heads, branch_units
from dilated_attention_pytorch.plan.runs import COLUMN, bytes_a_row
from dilated_attention_pytorch.reference import multiplicity
from support.configurations import Configuration, configurations
from support.plans import batch_sizes, count_batched_pairs, count_pairs, jobs_of


def spec_of(config: Configuration) -> DilatedSpec:
    return DilatedSpec(
        config.segment_lengths,
        config.dilation_rates,
        config.is_causal,
        head_mixing=config.head_mixing,  # type: ignore[arg-type]
        head_offsets=config.head_offsets,  # type: ignore[arg-type]
        tail=config.tail,  # type: ignore[arg-type]
    )


def make_plan(config: Configuration, itemsize: int, direction: str) -> Plan:
    return plan_dilated(
        spec_of(config),
        Shape(config.b, config.n, config.h, config.h_kv, config.d),
        itemsize=itemsize,
        direction=direction,  # type: ignore[arg-type]
        docs=config.docs,
        workspace_bytes=config.workspace_bytes,
    )


def defined_pairs(config: Configuration) -> torch.Tensor:
    """(b, h, n, n), by the reference."""
    counts = multiplicity(
        config.n,
        config.h,
        config.segment_lengths,
        config.dilation_rates,
        is_causal=config.is_causal,
        cu_seqlens=None if config.docs is None else torch.tensor(config.docs),
        head_mixing=config.head_mixing,  # type: ignore[arg-type]
        head_offsets=config.head_offsets,  # type: ignore[arg-type]
    )
    return counts.expand(config.b, -1, -1, -1)


@settings(max_examples=80)
@given(configurations(max_n=90))
def test_jobs_connect_exactly_the_defined_pairs(config: Configuration) -> None:
    """The tables, and the batches that kernels make of them, give the reference's multiplicities."""
    expected = defined_pairs(config)
    for itemsize, direction in ((4, "forward"), (2, "backward")):
        plan = make_plan(config, itemsize, direction)
        assert torch.equal(count_pairs(plan), expected)
        assert torch.equal(count_batched_pairs(plan, itemsize), expected)
        assert plan.num_pairs == plan.num_defined_pairs == int(expected.sum())


@settings(max_examples=60)
@given(configurations(max_n=60), st.data())
def test_a_shard_meets_its_own_keys_and_those_before_and_behind(config: Configuration, data: Any) -> None:
    """The same pairs, whatever interval of positions the queries and the keys are restricted to."""
    lo = data.draw(st.integers(0, config.n - 1))
    hi = data.draw(st.integers(lo + 1, config.n))
    shape, whole = Shape(config.b, hi - lo, config.h, config.h_kv, config.d), (0, config.h_kv)
    shard, how = Shard(config.n, lo, config.h, 0), {"itemsize": 4, "docs": config.docs}
    plans = [plan_dilated(spec_of(config), shape, shard=shard, **how)]
    for keys in ((0, lo), (hi, config.n)):
        plans.append(plan_crossing(spec_of(config), shape, shard, keys, whole, **how))
    expected = defined_pairs(config)[:, :, lo:hi]
    total = torch.zeros_like(expected)
    for plan in plans:
        shifted = plan.jobs.clone()
        shifted[:, COLUMN["start"]] += lo
        runs = plan.runs.clone()
        runs[:, 0] += lo
        moved = Plan(shifted, runs, shape._replace(n=config.n), plan.regions)
        total += count_pairs(moved)[:, :, lo:hi]
    assert torch.equal(total, expected)


@settings(max_examples=80)
@given(configurations())
def test_regions_partition_the_output_and_stages_open_it_once(config: Configuration) -> None:
    plan = make_plan(config, 2, "backward")
    rows = torch.zeros(config.b, config.n, config.h_kv, dtype=torch.int64)
    for region in plan.regions:
        b, t, kv = (slice(first, first + num) for first, num in region)
        rows[b, t, kv] += 1
    assert (rows == 1).all()
    seen = torch.zeros(config.b, config.n, config.h, dtype=torch.bool)
    key_seen = torch.zeros(config.b, config.n, config.h_kv, dtype=torch.bool)
    order = [(job.region, job.stage) for job in jobs_of(plan)]
    assert order == sorted(order)
    for job in jobs_of(plan):
        queries = seen[
            job.batch,
            job.start : job.start + (job.count - 1) * job.step + 1 : job.step,
            job.head : job.head + (job.heads - 1) * job.head_step + 1 : job.head_step,
        ]
        start, step, count, _ = plan.runs[job.first_run].tolist()
        keys = key_seen[job.batch, start : start + (count - 1) * step + 1 : step, job.kv]
        assert not (job.opens_queries and queries.any())
        assert not (job.opens_keys and keys.any())
        assert job.opens_queries or not plan.covers_queries or queries.all()
        assert job.opens_keys or not plan.covers_keys or keys.all()
        queries[:] = keys[:] = True
    assert seen.all() or not plan.covers_queries
    assert key_seen.all() or not plan.covers_keys


def test_batches_are_cut_at_the_grid_limit() -> None:
    how: dict[str, int] = {"itemsize": 4, "workspace_bytes": 2**40}
    plan = plan_dilated(DilatedSpec((1, 16), (1, 2)), Shape(3, 100_000, 1, 1, 1), **how)
    sizes = batch_sizes(plan, 4)
    assert max(jobs for jobs, *_ in sizes) <= MAX_JOBS
    assert sum(jobs * rows for jobs, _, rows, _ in sizes if rows == 1) == 3 * 100_000
    wide = plan_dilated(DilatedSpec((4,), (1,)), Shape(1, 4, 70_000, 70_000, 1), **how)
    assert max(jobs for jobs, *_ in batch_sizes(wide, 4)) <= MAX_JOBS
    shared = plan_dilated(DilatedSpec((4,), (1,)), Shape(1, 4, 70_000, 1, 1), **how)
    assert max(heads for _, heads, *_ in batch_sizes(shared, 4)) <= MAX_JOBS


def test_long_segments_are_cut_into_rows() -> None:
    n = 2**20
    plan = plan_dilated(DilatedSpec((n,), (4,), is_causal=True), Shape(1, n, 4, 4, 64), itemsize=4)
    assert int(plan.column("count").max()) <= MAX_ROWS
    assert plan.num_pairs == 4 * (n // 4) * (n // 4 + 1) // 2
    first_key = plan.runs[plan.column("first_run"), 0]
    assert torch.equal(plan.column("causal") > 0, first_key == plan.column("start"))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_batches_fit_the_workspace(direction: Any) -> None:
    shape, spec = Shape(2, 16384, 12, 12, 64), DilatedSpec((2048, 4096, 8192), (1, 2, 4))
    plan = plan_dilated(spec, shape, itemsize=4, direction=direction, workspace_bytes=8 * 2**20)
    for jobs, heads, rows, keys in batch_sizes(plan, 4):
        assert bytes_a_row(64, 4) * jobs * (heads * rows + keys) <= 8 * 2**20


@pytest.mark.parametrize(
    ("options", "shape", "itemsize", "direction", "per_row"),
    [
        ({}, Shape(2, 65536, 8, 4, 64), 2, "forward", 2),
        ({}, Shape(2, 65536, 8, 4, 64), 2, "backward", 2 + 2),
        # Its backward holds the outputs of one branch, which must not grow with the sequence.
        ({"detach_mixing": True}, Shape(1, 131072, 8, 8, 64), 4, "backward", 1),
    ],
)
def test_sums_of_regions_fit_half_of_the_workspace(
    options: dict[str, Any], shape: Shape, itemsize: int, direction: Any, per_row: int
) -> None:
    spec, workspace = DilatedSpec((2048, 4096), (1, 2), **options), 32 * 2**20
    plan = plan_dilated(spec, shape, itemsize=itemsize, direction=direction, workspace_bytes=workspace)
    sizes = [region.batch[1] * region.time[1] * region.kv[1] for region in plan.regions]
    assert len(sizes) > 1
    assert 4 * max(sizes) * shape.d * per_row <= workspace // 2
    if options:
        assert len(plan_dilated(spec, shape, itemsize=4, workspace_bytes=workspace).regions) == 1


@pytest.mark.parametrize(
    ("h", "h_kv", "rate", "offsets"),
    [
        (8, 8, 4, "interleaved"),
        (12, 12, 4, "blocked"),
        (8, 8, 16, "interleaved"),
        (12, 3, 2, "interleaved"),
        (8, 4, 4, "interleaved"),
    ],
)
def test_one_branch_of_regular_heads_is_one_batch(h: int, h_kv: int, rate: int, offsets: Any) -> None:
    plan = plan_dilated(
        DilatedSpec((512,), (rate,), head_offsets=offsets), Shape(2, 2048, h, h_kv, 8), itemsize=4
    )
    [(jobs, heads, rows, keys)] = batch_sizes(plan, 4)
    assert (jobs * heads, rows, keys) == (8 * h, 512 // rate, 512 // rate)
    docs = tuple(range(0, 1001, 10))  # equal documents run together
    packed = plan_dilated(DilatedSpec((64,), (1,)), Shape(1, 1000, 1, 1, 8), itemsize=4, docs=docs)
    assert batch_sizes(packed, 4) == [(100, 1, 10, 10)]


def test_plans_are_cached_hashable_and_print_themselves() -> None:
    spec = DilatedSpec((16, 32), (1, 2))
    cache = PatternCache()
    plan = plan_dilated(spec, Shape(1, 100, 4, 2, 8), itemsize=4, cache=cache)
    assert plan is plan_dilated(spec, Shape(1, 100, 4, 2, 8), itemsize=4, cache=cache)
    again = plan_dilated(spec, Shape(1, 100, 4, 2, 8), itemsize=4)
    assert plan == again == plan.to("cpu")
    assert hash(plan) == hash(again)
    assert plan != plan_dilated(spec, Shape(1, 101, 4, 2, 8), itemsize=4)
    assert plan.to("meta").jobs.is_meta
    text = str(plan)
    assert "queries 0..30:2 x keys 0..30:2" in text
    assert "queries 0..15 x keys 0..15" in text
    assert len(text.splitlines()) == 2 + 20
    assert f"... and {len(plan) - 20} more" in text


def test_a_long_plan_is_small_and_quick_to_build() -> None:
    spec = DilatedSpec((2048, 8192, 32768), (1, 4, 16), is_causal=True)
    plan = plan_dilated(spec, Shape(1, 2**20, 12, 12, 64), itemsize=4)
    assert plan.nbytes < 16 * 2**20


def test_an_absurd_workspace_does_not_cut_single_rows() -> None:
    plan = plan_dilated(DilatedSpec((640,), (1,)), Shape(1, 640, 1, 1, 8), itemsize=4, workspace_bytes=1)
    assert len(plan) == 40 * 40


def test_query_heads_are_split_before_rows_get_short() -> None:
    plan = plan_dilated(DilatedSpec((16384,), (1,)), Shape(1, 16384, 128, 1, 128), itemsize=4)
    assert int(plan.column("count").min()) >= 512
    assert plan.num_pairs == 128 * 16384**2


def test_passes_share_a_plan_unless_their_scratch_differs() -> None:
    def both(itemsize: int, **options: bool) -> tuple[Plan, Plan]:
        spec, shape = DilatedSpec((16, 32), (1, 2), **options), Shape(1, 100, 4, 2, 8)
        cache = PatternCache()
        forward = plan_dilated(spec, shape, itemsize=itemsize, direction="forward", cache=cache)
        return forward, plan_dilated(spec, shape, itemsize=itemsize, direction="backward", cache=cache)

    assert len({id(plan) for plan in both(4)}) == 1
    assert len({id(plan) for plan in both(2)}) == 2
    assert len({id(plan) for plan in both(4, detach_mixing=True)}) == 2


def test_steps_bound_the_sums_of_a_forward_pass() -> None:
    """Where segments are as long as the sequence, a region is otherwise all of it."""
    how: dict[str, int] = {"itemsize": 2, "workspace_bytes": 2**12, "steps": 4}
    spec, shape = DilatedSpec([64], [1]), Shape(1, 64, 2, 2, 8)
    forward, backward = (plan_dilated(spec, shape, direction=d, **how) for d in ("forward", "backward"))  # type: ignore[arg-type]
    assert {region.time[1] for region in forward.regions} == {16}
    assert {region.time[1] for region in backward.regions} == {64}
    assert torch.equal(count_pairs(forward), count_pairs(backward))


@pytest.mark.parametrize("options", [{}, {"head_offsets": "blocked"}, {"head_mixing": "grouped"}])
def test_heads_of_a_shard_are_counted_without_the_others(options: dict[str, Any]) -> None:
    spec = DilatedSpec((8, 16, 32), (1, 2, 3), **options)
    for branch in range(3):
        whole = [x for x in branch_heads(spec, branch, 30, 10) if 9 <= x.head < 15]
        units = branch_units(spec, branch, Shape(1, 8, 6, 2, 4), Shard(8, 0, 30, 9))
        found = [
            Head(9 + head + i * units.head_step, offset, 3 + kv)
            for head, num, kv, offset in zip(*(x.tolist() for x in units[:4]), strict=True)
            for i in range(num)
        ]
        assert sorted(found) == whole
        total = 2**31 - 1  # nothing here may take time or memory of that size
        far = branch_units(spec, branch, Shape(1, 8, 4, 4, 4), Shard(8, 0, total, total - 4))
        assert int(far.heads.sum()) in (0, 4)
