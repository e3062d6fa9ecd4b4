"""Rows of jobs: views of evenly spaced ones and numbers of any address the same elements."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dilated_attention_pytorch.core.workspace import Workspace
from dilated_attention_pytorch.kernels.merge import merge_
from dilated_attention_pytorch.kernels.rows import FlatRows, Numbered, Rows, fold, split_box


def expand(values: list[int], axes: tuple[tuple[int, tuple[int, ...]], ...]) -> list[list[int]]:
    rows = [values]
    for size, step in axes:
        rows = [[x + i * y for x, y in zip(row, step, strict=True)] for row in rows for i in range(size)]
    return rows


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.tuples(st.integers(0, 9), st.integers(0, 9))), max_size=6),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4),
    st.integers(1, 30),
)
def test_boxes_hold_exactly_the_rows_that_they_were_folded_from(
    axes: list[tuple[int, tuple[int, int]]], odd: list[tuple[int, int]], at_most: int
) -> None:
    table = torch.tensor([*expand([1, 2], tuple(axes)), *(list(x) for x in odd)])
    boxes = list(fold(table))
    assert [row for box in boxes for row in expand(box.values, box.axes)] == table.tolist()
    assert all(min(step) >= 0 for box in boxes for _, step in box.axes)
    parts = [part for box in boxes for part in split_box(box, at_most)]
    assert [row for part in parts for row in expand(part.values, part.axes)] == table.tolist()
    assert all(part.size <= at_most for part in parts)
    assert [part.first for part in parts] == [sum(x.size for x in parts[:i]) for i in range(len(parts))]


INNER = ((2, (0, 0, 2)), (3, (0, 4, 0)))
EVEN = Rows((0, 1, 0), ((2, (1, 0, 0)), (2, (0, 13, 1))), INNER)
LISTED = Rows((0, 0, 0), (), INNER, EVEN.places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["dense", "transposed", "sliced", "odd"])
def test_views_and_numbers_are_the_same_rows(layout: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 23, 4, 6).to(dtype)
    if layout == "transposed":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "sliced":
        x = torch.randn(3, 25, 6, 6).to(dtype)[1:, 1:24, :4]
    elif layout == "odd":  # no rows without a copy
        x = torch.randn(2, 23, 4, 7).to(dtype)[..., 1:]
    expected = torch.stack(
        [
            x[b, t : t + 9 : 4, h : h + 3 : 2].transpose(0, 1)
            for b, t, h in [(0, 1, 0), (0, 14, 1), (1, 1, 0), (1, 14, 1)]
        ]
    )
    for rows in (EVEN, LISTED):
        assert rows.shape == (4, 2, 3)
        assert rows.places.tolist() == [[0, 1, 0], [0, 14, 1], [1, 1, 0], [1, 14, 1]]
        for wanted in (dtype, torch.float32):
            packed = rows.read("slot", x, Workspace(), wanted, Numbered())
            assert packed.is_contiguous()
            assert torch.equal(packed, expected.to(wanted))
    assert FlatRows.of(x).rows.data_ptr() == x.data_ptr() or layout == "odd"


@pytest.mark.parametrize("rows", [EVEN, LISTED], ids=["even", "listed"])
def test_rows_are_written_added_to_and_merged_from_an_origin_on(rows: Rows) -> None:
    block, origin = torch.randn(2, 22, 4, 6), (0, 1, 0)
    part = torch.randn(*rows.shape, 6)
    numbers = torch.arange(prod(block.shape[:3])).view(2, 22, 4, 1)
    where = rows.read("slot", numbers, Workspace(), torch.int64, Numbered(), origin).flatten()
    for adds in (False, True):
        target = block.clone()
        rows.write(target, part, origin, Numbered(), adds=adds)
        expected = block.clone().view(-1, 6)
        expected[where] = part.view(-1, 6) + (expected[where] if adds else 0)
        assert torch.equal(target.view(-1, 6), expected)
    lse, part_lse, target = torch.randn(2, 22, 4), torch.randn(*rows.shape), block.clone()
    out_rows, lse_rows = target.view(-1, 6)[where].clone(), lse.view(-1)[where].clone()
    merge_(out_rows, lse_rows, part.view(-1, 6), part_lse.view(-1))
    rows.merge(target, lse, part, part_lse, origin, Numbered())
    torch.testing.assert_close(target.view(-1, 6)[where], out_rows)
    torch.testing.assert_close(lse.view(-1)[where], lse_rows)
