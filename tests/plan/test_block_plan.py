"""Schedules of block patterns: every kept block met once, tails and diagonals exact, panels in the budget."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dilated_attention_pytorch import BlockPattern
from dilated_attention_pytorch.plan import Shape, block_sparse, plan_blocks
from dilated_attention_pytorch.plan.block_sparse import BlockPlan, Lane, Panel
from dilated_attention_pytorch.plan.shape import Pass
from support.block_configurations import BlockConfiguration, block_configurations


def rows_of(panel: Panel) -> list[int]:
    return [first + i for first, count in panel.runs for i in range(count)]


def panels_of(
    plan: BlockPlan, shape: Shape, itemsize: int, workspace_bytes: int, direction: Pass
) -> Iterator[tuple[Lane, Panel]]:
    for lane in plan.lanes(shape, itemsize, workspace_bytes, direction):
        for panel in lane.panels:
            yield lane, panel


def check_plan(
    pattern: BlockPattern, shape: Shape, itemsize: int, workspace_bytes: int, direction: Pass
) -> None:
    """Counts every block that a tile meets, for each batch and query head, against the pattern."""
    b, n, h, h_kv, d = shape
    rows, size = pattern.rows, pattern.block_size
    lengths = torch.full((rows,), size)
    lengths[-1] = n - (rows - 1) * size
    met = torch.zeros(b, h, rows, rows, dtype=torch.int64)
    written = torch.zeros(b, h, rows, dtype=torch.int64)
    indices = []
    tensors = 2 if direction == "forward" else 4
    for lane, panel in panels_of(plan_blocks(pattern), shape, itemsize, workspace_bytes, direction):
        which = rows_of(panel)
        heads = range(panel.head, panel.head + panel.num_kv * panel.group)
        indices.append(panel.index)
        assert (panel.batch, panel.kv, panel.num_kv) == (lane.batch, lane.kv, lane.num_kv)
        assert [head // (h // h_kv) for head in heads] == [
            panel.kv + i for i in range(panel.num_kv) for _ in range(panel.group)
        ]
        assert len(which) == panel.num_rows
        assert (lengths[which] == panel.q_len).all()
        written[panel.batch, heads[0] : heads[-1] + 1, which] += 1
        gathered, least = 0, 1
        row = torch.tensor(which)[:, None]
        for tile in panel.tiles:
            assert tile.columns.shape[0] * tile.join == panel.num_rows
            columns = tile.columns.repeat_interleave(tile.join, 0)
            # Only a row's last column may be short, so that the first k_len tokens are those that exist.
            assert (lengths[columns].sum(1) == tile.k_len).all()
            assert (lengths[columns[:, :-1]] == size).all()
            if pattern.is_causal:
                assert (columns == row if tile.is_causal else columns < row).all()
            else:
                assert not tile.is_causal
            met[panel.batch, heads[0] : heads[-1] + 1, row, columns] += 1
            gathered, least = max(gathered, tile.columns.numel()), max(least, tile.join)
        block_bytes = tensors * size * d * itemsize * panel.num_kv
        is_smallest = panel.num_rows == least and panel.num_kv == 1 and gathered <= panel.num_rows
        assert block_bytes * (panel.num_rows * panel.group + gathered) <= workspace_bytes or is_smallest
    layout = pattern.to_layout()
    layout = layout.view(b, h, rows, rows) if len(pattern) == b * h else layout.expand(b, h, rows, rows)
    assert torch.equal(met, layout.long())
    assert (written == 1).all()
    assert len(set(indices)) == len(indices)


@settings(max_examples=100)
@given(block_configurations(max_n=150))
def test_tiles_meet_every_kept_block_once(config: BlockConfiguration) -> None:
    pattern = config.pattern()
    pattern = pattern.causal() if config.is_causal else pattern
    shape = Shape(config.b, config.n, config.h, config.h_kv, config.d)
    for itemsize, direction in ((4, "forward"), (8, "backward")):
        check_plan(pattern, shape, itemsize, config.workspace_bytes, direction)  # type: ignore[arg-type]


def causal_band(n: int, size: int, width: int) -> BlockPattern:
    blocks = -(-n // size)
    layout = torch.ones(blocks, blocks, dtype=torch.bool).tril().triu(1 - width)
    return BlockPattern.from_layout(layout, n, size, is_causal=True)


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("workspace_bytes", [1, 2**10, 2**14, 2**16, 2**20])
def test_panels_of_causal_bands_stay_in_the_budget(workspace_bytes: int, width: int) -> None:
    for h, h_kv in ((1, 1), (4, 4), (4, 1)):
        for n in (128, 121):
            check_plan(causal_band(n, 8, width), Shape(2, n, h, h_kv, 8), 4, workspace_bytes, "forward")


def test_the_diagonal_is_a_causal_tile_of_its_own() -> None:
    plan = plan_blocks(causal_band(30, 8, 2))
    panels = [panel for _, panel in panels_of(plan, Shape(1, 30, 1, 1, 4), 4, 2**20, "forward")]
    assert {panel.runs: panel.q_len for panel in panels} == {((0, 1),): 8, ((1, 2),): 8, ((3, 1),): 6}
    for panel in panels:
        first, *others = panel.tiles
        assert first.is_causal
        assert first.columns.flatten().tolist() == rows_of(panel)
        assert first.k_len == panel.q_len
        assert len(others) == (0 if panel.runs[0][0] == 0 else 1)
        assert not any(tile.is_causal for tile in others)


def test_rows_that_keep_a_short_last_block_run_apart() -> None:
    layout = torch.zeros(4, 4, dtype=torch.bool)
    layout[0, [0, 3]] = layout[1, [0, 1]] = layout[2, [2, 3]] = layout[3, [0, 3]] = True
    plan = plan_blocks(BlockPattern.from_layout(layout, 29, 8))
    groups = {
        tuple(group.rows.tolist()): (group.num_blocks, group.q_len, group.k_len) for group in plan.groups[0]
    }
    assert groups == {(0, 2): (2, 8, 13), (1,): (2, 8, 16), (3,): (2, 5, 13)}
    whole = plan_blocks(BlockPattern.from_layout(layout, 32, 8))
    assert [group.rows.tolist() for group in whole.groups[0]] == [[0, 1, 2, 3]]


def test_rows_with_as_many_blocks_run_together() -> None:
    plan = plan_blocks(causal_band(80, 8, 3))
    panels = [panel for _, panel in panels_of(plan, Shape(1, 80, 4, 2, 4), 4, 2**20, "forward")]
    assert [panel.runs for panel in panels] == [((0, 1),), ((1, 1),), ((2, 8),)]
    assert all((panel.num_kv, panel.group) == (2, 2) for panel in panels)


def test_runs_are_neighbours_in_time() -> None:
    layout = torch.zeros(10, 10, dtype=torch.bool)
    layout[[0, 1, 4, 5, 6, 9], 3] = True
    plan = plan_blocks(BlockPattern.from_layout(layout, 80, 8))
    runs = {panel.runs for _, panel in panels_of(plan, Shape(1, 80, 1, 1, 4), 4, 2**20, "forward")}
    assert runs == {((0, 2), (4, 3), (9, 1)), ((2, 2), (7, 2))}


def test_a_smaller_budget_makes_more_panels() -> None:
    pattern = BlockPattern.from_layout(torch.rand(16, 16) < 0.5, 128, 8)
    plan, shape = plan_blocks(pattern), Shape(1, 128, 2, 2, 8)
    counts = [
        sum(1 for _ in panels_of(plan, shape, 4, workspace_bytes, "forward"))
        for workspace_bytes in (2**20, 2**14, 2**12, 1)
    ]
    assert counts == sorted(counts)
    assert counts[0] == len(plan.groups[0])
    assert counts[-1] == 16 * 2


def test_bytes_are_those_of_the_pattern_and_its_groups() -> None:
    pattern = BlockPattern.from_layout(torch.rand(3, 16, 16) < 0.5, 128, 8)
    plan = plan_blocks(pattern)
    groups = [group for layout in plan.groups for group in layout]
    assert sum(group.rows.numel() for group in groups) == 48
    tensors = [x for group in groups for x in vars(group).values() if isinstance(x, Tensor)]
    assert plan.nbytes == pattern.nbytes + sum(x.nbytes for x in tensors)


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
        assert any(group.join > 1 for group in plan_blocks(pattern).groups[0]) == (size < 64)
        check_plan(pattern, Shape(1, n, 2, 1, 4), 4, workspace_bytes, "forward")
