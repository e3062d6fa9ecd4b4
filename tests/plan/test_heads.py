"""Head boxes hold exactly the heads they were folded from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch.plan.heads import Head, branch_heads, even_parts, fold_heads
from dilated_attention_pytorch.spec import DilatedSpec


@settings(max_examples=300)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 20),
    st.sampled_from(["interleaved", "blocked"]),
    st.integers(1, 9),
)
def test_folding_and_splitting_keep_every_head_once(
    h_kv: int, group: int, rate: int, offsets: str, units: int
) -> None:
    spec = DilatedSpec((64,), (rate,), head_offsets=offsets)  # type: ignore[arg-type]
    heads = branch_heads(spec, 0, h_kv * group, h_kv)
    boxes = fold_heads(tuple(heads))
    assert sorted(head for box in boxes for head in box) == heads
    assert all(min(axis.head, axis.row, axis.kv) >= 0 for box in boxes for axis in box.axes)
    parts = [part for box in boxes for part in box.split(units)]
    assert sorted(head for part in parts for head in part) == heads
    assert all(part.num_units <= units and len(list(part)) == part.num_heads for part in parts)


def test_no_two_boxes_share_a_key_row() -> None:
    """Key gradients of a branch are written once: a second box on the same rows would overwrite them."""
    for h_kv, group, rate in [(1, 12, 5), (2, 6, 4), (3, 4, 3), (4, 3, 2)]:
        heads = branch_heads(DilatedSpec((64,), (rate,)), 0, h_kv * group, h_kv)
        keys = [{(head.kv, head.row) for head in box} for box in fold_heads(tuple(heads))]
        assert sum(map(len, keys)) == len(set().union(*keys))


@pytest.mark.parametrize(
    ("h", "h_kv", "rate", "offsets"),
    [
        (12, 12, 4, "interleaved"),
        (12, 12, 4, "blocked"),
        (8, 8, 16, "interleaved"),
        (12, 3, 2, "interleaved"),
        (8, 4, 4, "interleaved"),
    ],
)
def test_regular_heads_are_one_box(h: int, h_kv: int, rate: int, offsets: str) -> None:
    spec = DilatedSpec((64,), (rate,), head_offsets=offsets)  # type: ignore[arg-type]
    assert len(fold_heads(tuple(branch_heads(spec, 0, h, h_kv)))) == 1


def test_grouped_heads_take_the_remainder_first() -> None:
    spec = DilatedSpec((8, 8, 8), (1, 2, 4), head_mixing="grouped")
    assert [branch_heads(spec, i, 8, 8) for i in range(3)] == [
        [Head(0, 0, 0), Head(1, 0, 1), Head(2, 0, 2)],
        [Head(3, 1, 3), Head(4, 1, 4), Head(5, 1, 5)],
        [Head(6, 2, 6), Head(7, 2, 7)],
    ]
    assert branch_heads(spec, 2, 2, 2) == []


@given(st.integers(1, 1000), st.integers(1, 100))
def test_even_parts_cover_evenly(total: int, at_most: int) -> None:
    parts = list(even_parts(total, at_most))
    assert [i for start, count in parts for i in range(start, start + count)] == list(range(total))
    assert len(parts) == -(-total // at_most)
    assert max(count for _, count in parts) <= at_most


@pytest.mark.parametrize("options", [{}, {"head_offsets": "blocked"}, {"head_mixing": "grouped"}])
def test_heads_of_a_part_are_counted_without_the_others(options: dict[str, Any]) -> None:
    spec = DilatedSpec((8, 16, 32), (1, 2, 3), **options)
    for branch in range(3):
        whole = branch_heads(spec, branch, 30, 10)
        assert branch_heads(spec, branch, 30, 10, range(9, 15)) == [x for x in whole if 9 <= x.head < 15]
        total = 2**31 - 1  # nothing here may take time or memory of that size
        assert len(branch_heads(spec, branch, total, total, range(total - 4, total))) in (0, 4)
