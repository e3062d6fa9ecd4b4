"""Plans: every connected pair exactly once, within the workspace and the grid limit, as printable data."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from dilated_attention_pytorch import DilatedSpec
from dilated_attention_pytorch.core import PatternCache
from dilated_attention_pytorch.plan import Plan, Shape, plan_dilated
from dilated_attention_pytorch.plan.tile_builder import MAX_GRID, MAX_ROWS
from dilated_attention_pytorch.reference import multiplicity
from support.configurations import Configuration, configurations


def make_plan(config: Configuration, itemsize: int, direction: str) -> Plan:
    spec = DilatedSpec(
        config.segment_lengths,
        config.dilation_rates,
        config.is_causal,
        head_mixing=config.head_mixing,  # type: ignore[arg-type]
        head_offsets=config.head_offsets,  # type: ignore[arg-type]
        tail=config.tail,  # type: ignore[arg-type]
    )
    return plan_dilated(
        spec,
        Shape(config.b, config.n, config.h, config.h_kv, config.d),
        itemsize=itemsize,
        direction=direction,  # type: ignore[arg-type]
        docs=config.docs,
        workspace_bytes=config.workspace_bytes,
    )


@settings(max_examples=80)
@given(configurations(max_n=90))
def test_tiles_connect_exactly_the_defined_pairs(config: Configuration) -> None:
    """Counting the pairs of all tiles through their own views gives the reference's multiplicities."""
    expected = multiplicity(
        config.n,
        config.h,
        config.segment_lengths,
        config.dilation_rates,
        is_causal=config.is_causal,
        cu_seqlens=None if config.docs is None else torch.tensor(config.docs),
        head_mixing=config.head_mixing,  # type: ignore[arg-type]
        head_offsets=config.head_offsets,  # type: ignore[arg-type]
    )
    for itemsize, direction in ((4, "forward"), (2, "backward")):
        plan = make_plan(config, itemsize, direction)
        counts = torch.zeros(config.b, config.h, config.n, config.n, dtype=torch.int64)
        rows = torch.arange(config.b * config.n * config.h).view(config.b, config.n, config.h)
        keys = torch.arange(config.b * config.n * config.h_kv).view(config.b, config.n, config.h_kv)
        for tile in plan.tiles:
            q = tile.query_view(rows).reshape(tile.q_shape(1)[:3])
            k = tile.key_view(keys).reshape(tile.k_shape(1)[:3]).repeat_interleave(tile.heads.group, 1)
            query, key = q.unsqueeze(-1).expand(*q.shape, k.shape[-1]), k.unsqueeze(-2)
            batch, head, i = query // config.h // config.n, query % config.h, query // config.h % config.n
            assert (key // config.h_kv // config.n == batch).all()
            assert (key % config.h_kv == head // (config.h // config.h_kv)).all()
            j = (key // config.h_kv % config.n).expand_as(i)
            seen = torch.ones_like(i).tril() if tile.is_causal else torch.ones_like(i)
            counts.index_put_((batch, head, i, j), seen, accumulate=True)
        assert torch.equal(counts, expected.expand_as(counts))
        assert plan.num_pairs == int(counts.sum())


@settings(max_examples=80)
@given(configurations())
def test_panels_partition_the_output(config: Configuration) -> None:
    plan = make_plan(config, 2, "backward")
    written = torch.zeros(config.b, config.n, config.h, dtype=torch.int64)
    keys = torch.zeros(config.b, config.n, config.h_kv, dtype=torch.int64)
    for panel in plan.panels:
        panel.query_block(written).add_(1)
        panel.key_block(keys).add_(1)
        for tile in panel.tiles:  # a tile stays inside its panel
            assert tile.query_view(panel.query_block(written).contiguous(), panel.origin).min() == 1
            assert tile.key_view(panel.key_block(keys).contiguous(), panel.kv_origin).min() == 1
    assert written.min() == written.max() == keys.min() == keys.max() == 1


def test_batch_times_segments_is_cut_at_the_grid_limit() -> None:
    spec = DilatedSpec((1, 16), (1, 2))
    plan = plan_dilated(spec, Shape(3, 100_000, 1, 1, 1), itemsize=4, workspace_bytes=2**40)
    shapes = [tile.q_shape(1) for tile in plan.tiles]
    assert max(batch for batch, *_ in shapes) <= MAX_GRID
    assert sum(batch * rows for batch, _, rows, _ in shapes if rows == 1) == 3 * 100_000
    together = plan_dilated(
        DilatedSpec((1,), (1,)), Shape(3, 30_000, 1, 1, 1), itemsize=4, workspace_bytes=2**40
    )
    assert [tile.q_shape(1)[0] for tile in together.tiles] == [60_000, 30_000]
    wide = plan_dilated(
        DilatedSpec((4,), (1,)), Shape(1, 4, 70_000, 70_000, 1), itemsize=4, workspace_bytes=2**40
    )
    assert max(tile.q_shape(1)[1] for tile in wide.tiles) <= MAX_GRID


def test_long_segments_are_cut_into_rows() -> None:
    n = 2**20
    plan = plan_dilated(DilatedSpec((n,), (4,), is_causal=True), Shape(1, n, 4, 4, 64), itemsize=4)
    assert max(tile.q_count for tile in plan.tiles) <= MAX_ROWS
    assert plan.num_pairs == 4 * (n // 4) * (n // 4 + 1) // 2
    assert all(tile.is_causal == (tile.q_first == tile.k_first) for tile in plan.tiles)


def test_tiles_fit_the_workspace() -> None:
    shape = Shape(2, 16384, 12, 12, 64)
    for direction in ("forward", "backward"):
        plan = plan_dilated(
            DilatedSpec((2048, 4096, 8192), (1, 2, 4)),
            shape,
            itemsize=4,
            direction=direction,  # type: ignore[arg-type]
            workspace_bytes=8 * 2**20,
        )
        for tile in plan.tiles:
            batch, heads, rows, d = tile.q_shape(shape.d)
            assert 8 * 4 * batch * heads * rows * d <= 8 * 2**20  # q, k, v, out and their gradients


def test_half_precision_panels_fit_their_half_of_the_workspace() -> None:
    shape, workspace = Shape(2, 65536, 8, 4, 64), 32 * 2**20
    spec = DilatedSpec((2048, 4096), (1, 2))
    for direction, per_row in (
        ("forward", lambda p: p.heads),
        ("backward", lambda p: p.heads + 2 * p.kv_heads),
    ):
        plan = plan_dilated(
            spec,
            shape,
            itemsize=2,
            direction=direction,  # type: ignore[arg-type]
            workspace_bytes=workspace,
        )
        assert len(plan.panels) > 1
        for panel in plan.panels:
            assert 4 * panel.batch * panel.time * shape.d * per_row(panel) <= workspace // 2


def test_detached_mixing_is_cut_into_panels_too() -> None:
    """Its backward holds the outputs of one branch, which must not grow with the sequence."""
    spec, workspace = DilatedSpec((2048, 4096), (1, 2), detach_mixing=True), 32 * 2**20
    shape = Shape(1, 131072, 8, 8, 64)
    assert len(plan_dilated(spec, shape, itemsize=4, workspace_bytes=workspace).panels) == 1
    plan = plan_dilated(spec, shape, itemsize=4, direction="backward", workspace_bytes=workspace)
    assert max(4 * p.batch * p.time * p.heads * shape.d for p in plan.panels) <= workspace // 2


def test_one_branch_of_regular_heads_is_one_tile() -> None:
    plan = plan_dilated(DilatedSpec((512,), (4,)), Shape(2, 2048, 8, 8, 8), itemsize=4)
    assert [tile.q_shape(8) for tile in plan.tiles] == [(8, 8, 128, 8)]


def test_plans_are_cached_hashable_and_print_themselves() -> None:
    spec = DilatedSpec((16, 32), (1, 2))
    cache = PatternCache()
    plan = plan_dilated(spec, Shape(1, 100, 4, 2, 8), itemsize=4, cache=cache)
    assert plan is plan_dilated(spec, Shape(1, 100, 4, 2, 8), itemsize=4, cache=cache)
    assert plan == plan_dilated(spec, Shape(1, 100, 4, 2, 8), itemsize=4)
    assert hash(plan) == hash(plan)
    text = str(plan)
    assert "rate 2" in text
    assert "queries 0+16 x keys 0+16" in text
    assert len(text.splitlines()) == 3 + len(plan.tiles)


def test_an_absurd_workspace_does_not_cut_single_rows() -> None:
    plan = plan_dilated(DilatedSpec((640,), (1,)), Shape(1, 640, 1, 1, 8), itemsize=4, workspace_bytes=1)
    assert len(plan.tiles) == 40 * 40


def test_query_heads_are_split_before_rows_get_short() -> None:
    plan = plan_dilated(DilatedSpec((16384,), (1,)), Shape(1, 16384, 128, 1, 128), itemsize=4)
    assert min(tile.q_count for tile in plan.tiles) >= 512
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


def test_equal_documents_run_together() -> None:
    docs = tuple(range(0, 1001, 10))
    plan = plan_dilated(DilatedSpec((64,), (1,)), Shape(1, 1000, 1, 1, 8), itemsize=4, docs=docs)
    assert [tile.segments for tile in plan.tiles] == [100]
