"""Pattern types: the density that was asked, and the blocks that the docstring of the config promises."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dilated_attention_pytorch import (
    BlockPattern,
    SparsePatternConfig,
    block_sparse_attention,
    build_block_pattern,
)
from dilated_attention_pytorch.cli.bench import measure
from dilated_attention_pytorch.plan.build_pattern import Budget, build_pattern, make_budget
from support.block_configurations import LEVELS

STRUCTURED = ("local_window", "dilated_sparse", "global_local", "strided", "hierarchical")
TYPES = (*STRUCTURED, "random", "adaptive")
RATIOS = (0.005, 0.01, 0.05, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
SIZES = ((1, 128), (100, 128), (129, 128), (1000, 16), (777, 8), (5000, 32), (61, 1), (300, 7))


def build(
    kind: str, n: int, ratio: float, block_size: int, *, is_causal: bool = False, h: int = 2, **fields: Any
) -> BlockPattern:
    content = {}
    if kind == "adaptive":
        content = {name: torch.randn(1, n, h, 4) for name in ("query", "key")}
    config = SparsePatternConfig(kind, ratio, block_size, **fields)  # type: ignore[arg-type]
    return build_block_pattern(config, n, h, is_causal=is_causal, **content)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_density_is_what_was_asked(kind: str, causal: bool) -> None:
    """Within a block a row, for every layout; and a row keeps its own block, whatever else."""
    others = ({"global_tokens": 40}, {"window_size": 100}, {"window_size": 60, "global_tokens": 9})
    cases: list[tuple[int, int, dict[str, int]]] = [(n, size, {}) for n, size in SIZES]
    cases += [(777, 8, fields) for fields in others]
    for (n, size, fields), ratio in product(cases, RATIOS):
        pattern = build(kind, n, ratio, size, is_causal=causal, **fields)
        rows, layouts = pattern.rows, len(pattern)
        total = rows * (rows + 1) // 2 if causal else rows * rows
        missing = ratio * total - pattern.counts.view(layouts, rows).sum(1)
        assert pattern.is_causal == causal
        assert missing.min() >= -rows, (n, size, ratio, fields)
        if kind not in ("local_window", "global_local") or "window_size" not in fields:
            assert missing.max() <= rows, (n, size, ratio, fields)
            assert ratio < 1.0 or pattern.density == 1.0
        if kind != "global_local" and not fields:
            assert pattern.counts.max() == pattern.counts.view(-1, rows)[:, -1].max()  # one budget
        assert pattern.to_layout().diagonal(dim1=1, dim2=2).all()


def nearest(row: int, columns: Iterable[int]) -> list[int]:
    """By distance; of two at the same distance the earlier one first."""
    return sorted(columns, key=lambda column: (abs(column - row), column > row))


def state_row(
    config: SparsePatternConfig,
    budget: Budget,
    row: int,
    rows: int,
    is_causal: bool,
    branches: tuple[tuple[int, int], ...],
) -> set[int]:
    """The docstring of `SparsePatternConfig` in plain Python: preferences in order, up to the budget."""
    there = range(row + 1) if is_causal else range(rows)
    if not is_causal and row < budget.num_global:
        return set(there)
    wishes = [row, *nearest(row, [column for column in there if column < budget.num_global])]
    window: list[int] = list(there)
    if config.window_size is not None:
        others = config.window_size // config.block_size - 1
        before = others if is_causal else math.ceil(others / 2)
        window = [column for column in there if row - before <= column <= row + others - before]
        wishes += nearest(row, window)
    match config.pattern_type:
        case "local_window" | "global_local":
            wishes += nearest(row, window)
        case "dilated_sparse":
            reached = set()
            for length, rate in branches:
                width = length // config.block_size
                own_segment = [column for column in there if column // width == row // width]
                reached |= {column for column in own_segment if (column - row) % rate == 0}
            wishes += nearest(row, reached)
        case "strided":
            step = math.ceil(rows / budget.per_row)  # as many as the budget has reach over the sequence
            wishes += nearest(row, [column for column in there if (column - row) % step == 0])
        case "hierarchical":
            for stride, share in config.levels:
                grid = [column for column in there if (column + 1) % stride == 0]
                wishes += nearest(row, grid)[: math.ceil(share * budget.per_row)]
    if config.pattern_type not in ("local_window", "global_local"):
        wishes += nearest(row, there)
    return set(list(dict.fromkeys(wishes))[: budget.per_row])


@st.composite
def structured(draw: st.DrawFn) -> tuple[SparsePatternConfig, int, tuple[tuple[int, int], ...], bool]:
    size = draw(st.sampled_from([1, 4, 16]))
    n = draw(st.integers(1, 45 * size))
    config = SparsePatternConfig(
        draw(st.sampled_from(STRUCTURED)),
        draw(st.one_of(st.sampled_from(RATIOS), st.floats(0.005, 1.0))),
        size,
        window_size=draw(st.one_of(st.none(), st.none(), st.integers(size, 12 * size))),
        global_tokens=draw(st.one_of(st.none(), st.none(), st.integers(0, 8 * size))),
        hierarchy=draw(st.sampled_from(LEVELS)),
    )
    branch = st.tuples(st.integers(size, 2 * n + size), st.integers(1, 9))
    return config, n, tuple(draw(st.lists(branch, min_size=1, max_size=4))), draw(st.booleans())


@settings(max_examples=300)
@given(structured())
def test_structured_types_are_their_statement(
    case: tuple[SparsePatternConfig, int, tuple[tuple[int, int], ...], bool],
) -> None:
    config, n, branches, is_causal = case
    pattern = build_pattern(config, n, 3, is_causal=is_causal, branches=branches)
    rows = pattern.rows
    budget = make_budget(config, rows, is_causal)
    assert len(pattern) == 1
    if config.hierarchy == "fine":
        assert config.levels == ((1, 0.75), (4, 0.25))
    for row in range(rows):
        kept = pattern.columns[pattern.starts[row] : pattern.starts[row + 1]].tolist()
        assert kept == sorted(state_row(config, budget, row, rows, is_causal, branches)), row


@pytest.mark.parametrize(
    ("kind", "n", "ratio", "size", "expected"),
    [
        ("dilated_sparse", 64, 0.25, 4, {0: [0, 2, 4, 5], 8: [3, 8, 10, 12], 7: [2, 3, 5, 7]}),
        # A segment of two blocks at rate 2 reaches the own block; the nearest others fill the row.
        ("dilated_sparse", 320, 0.1, 16, {0: [0, 1], 9: [8, 9]}),
        ("local_window", 100, 0.3, 10, {5: [4, 5, 6], 0: [0, 1, 2], 9: [7, 8, 9]}),
        ("global_local", 1000, 0.15, 50, {0: [*range(20)], 7: [0, 7], 19: [0, 19]}),
        ("strided", 640, 0.1, 40, {0: [0, 8], 5: [5, 13], 15: [7, 15]}),
        ("hierarchical", 160, 0.3, 10, {0: [0, 1, 2, 3, 7], 8: [7, 8, 9, 11, 15]}),
    ],
)
def test_types_by_hand(kind: Any, n: int, ratio: float, size: int, expected: dict[int, list[int]]) -> None:
    branches = {"segment_lengths": (32, 64), "dilation_rates": (2, 5)}
    layout = build_block_pattern(SparsePatternConfig(kind, ratio, size), n, 1, **branches).to_layout()[0]
    assert {row: layout[row].nonzero().flatten().tolist() for row in expected} == expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_global_tokens_are_attended_from_everywhere_and_attend_everywhere(kind: str, causal: bool) -> None:
    """Also where the budget is scarce: what is global is so for every row, nothing is global by half."""
    for ratio in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.6):
        for tokens in (1, 8, 9, 100):
            pattern = build(kind, 320, ratio, 8, is_causal=causal, h=1, global_tokens=tokens)
            num_global = make_budget(
                SparsePatternConfig(kind, ratio, 8, global_tokens=tokens), 40, causal
            ).num_global
            seen = torch.ones(40, 40, dtype=torch.bool)
            seen = seen.tril() if causal else seen
            layout = pattern.to_layout()[0]
            assert torch.equal(layout[:, :num_global], seen[:, :num_global]), (ratio, tokens)
            assert torch.equal(layout[:num_global], seen[:num_global]), (ratio, tokens)
            assert num_global <= ratio * 40 / 2 or causal  # half of the budget at most
            if ratio == 0.6:  # enough for all of them, or for half of the row
                assert num_global == -(-tokens // 8) or tokens == 100


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_a_window_is_kept_first(kind: str, causal: bool) -> None:
    layout = build(kind, 400, 0.3, 10, is_causal=causal, h=1, window_size=39).to_layout()[0]
    for row in range(40):  # 3 whole blocks fit into 39 tokens
        low, high = (row - 2, row) if causal else (row - 1, row + 1)
        assert layout[row, max(0, low) : high + 1].all()
        if kind == "local_window":
            assert layout[row].sum() == min(39, high) - max(0, low) + 1


def test_random_is_seeded_and_drawn_for_each_head() -> None:
    first = build("random", 1000, 0.2, 10, h=4, seed=5)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert first.key == build("random", 1000, 0.2, 10, h=4, seed=5).key
    assert torch.equal(torch.rand(1), expected)  # the global generator is left alone
    assert first.key != build("random", 1000, 0.2, 10, h=4, seed=6).key
    assert len({tuple(layout.flatten().tolist()) for layout in first.to_layout()}) == len(first) == 4


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.49, 0.51, 0.8, 1.0])
@pytest.mark.parametrize("causal", [False, True])
def test_random_fills_every_row_without_repeats(causal: bool, ratio: float) -> None:
    pattern = build("random", 500, ratio, 10, h=3, is_causal=causal, window_size=30)
    budget = make_budget(SparsePatternConfig("random", ratio, 10), 50, causal)
    expected = [min(budget.per_row, row + 1) if causal else budget.per_row for row in range(50)]
    # `to_layout` sets bits: a block kept twice would be missing there.
    assert pattern.to_layout().sum(-1).tolist() == [expected] * 3
    assert pattern.counts.view(3, 50).tolist() == [expected] * 3


def test_random_is_uniform() -> None:
    for ratio in (0.2, 0.7):  # drawn one by one, and by a random order
        pattern = build("random", 40, ratio, 1, h=300)
        off_diagonal = ~torch.eye(40, dtype=torch.bool)
        share = pattern.to_layout().double().mean(0)[off_diagonal]
        p = (40 * ratio - 1) / 39
        deviation = math.sqrt(p * (1 - p) / 300)
        assert (share - p).abs().max() < 5 * deviation
    causal = build("random", 40, 0.3, 1, h=300, is_causal=True).to_layout().double().mean(0)
    last = causal[39, :39]
    p = float(causal[39].sum() - 1) / 39
    assert (last - p).abs().max() < 5 * math.sqrt(p * (1 - p) / 300)


def best_blocks(query: Tensor, key: Tensor, size: int, per_row: int, is_causal: bool) -> list[set[int]]:
    """Of one head: for each row its own block and those whose mean keys suit its mean queries best.

    Under a causal mask the mean is of `size` queries that end with the first of the row.
    """
    parts = list(query.split(size))
    if is_causal:
        parts = [query[max(0, i * size - size + 1) : i * size + 1] for i in range(len(parts))]
    scores = torch.stack([x.mean(0) for x in parts]) @ torch.stack([x.mean(0) for x in key.split(size)]).T
    result = []
    for row, line in enumerate(scores.tolist()):
        there = row + 1 if is_causal else len(line)
        others = sorted((c for c in range(there) if c != row), key=lambda c: -line[c])
        result.append({row, *others[: per_row - 1]})
    return result


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 90, 97])
def test_adaptive_keeps_the_best_blocks_of_each_batch_and_head(n: int, causal: bool) -> None:
    query, key = torch.randn(2, n, 4, 3), torch.randn(2, n, 2, 3)
    config = SparsePatternConfig("adaptive", 0.3, 10)
    pattern = build_block_pattern(config, n, 4, is_causal=causal, query=query, key=key)
    per_row = make_budget(config, pattern.rows, causal).per_row
    assert len(pattern) == 8
    for batch in range(2):
        for head in range(4):
            expected = best_blocks(query[batch, :, head], key[batch, :, head // 2], 10, per_row, causal)
            layout = pattern.to_layout()[batch * 4 + head]
            assert [set(row.nonzero().flatten().tolist()) for row in layout] == expected


def test_adaptive_survives_what_is_not_finite_and_ignores_gradients() -> None:
    query, key = torch.randn(1, 80, 2, 4), torch.randn(1, 80, 2, 4, requires_grad=True)
    query[0, 13] = math.nan
    bad = key * torch.ones(80, 1, 1).index_fill(0, torch.tensor([50, 60]), math.inf)
    config = {"pattern_type": "adaptive", "sparsity_ratio": 0.3, "block_size": 8}
    pattern = build_block_pattern(config, 80, 2, query=query, key=bad)
    assert (pattern.counts == 3).all()
    assert not pattern.columns.requires_grad


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_default_device_and_dtype_do_not_matter(kind: str, causal: bool) -> None:
    content = {name: torch.randn(1, 200, 2, 4) for name in ("query", "key")} if kind == "adaptive" else {}
    config = SparsePatternConfig(kind, 0.7, 8)  # type: ignore[arg-type]
    expected = build_block_pattern(config, 200, 2, is_causal=causal, **content)
    with torch.device("meta"):
        assert build_block_pattern(config, 200, 2, is_causal=causal, **content).key == expected.key
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        actual = build_block_pattern(config, 200, 2, is_causal=causal, **content)
    finally:
        torch.set_default_dtype(before)
    assert actual.key == expected.key


@pytest.mark.parametrize("kind", TYPES)
def test_a_pattern_of_inference_mode_serves_training(kind: str) -> None:
    with torch.inference_mode():
        pattern = build(kind, 75, 0.4, 8)
        layout = BlockPattern.from_layout(torch.ones(10, 10, dtype=torch.bool), 75, 8)
    x = torch.randn(1, 75, 2, 4, requires_grad=True)
    for blocks in (pattern, pattern.causal(), layout):
        block_sparse_attention(x, x, x, blocks, is_causal=True).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", TYPES)
def test_any_window_stride_and_number_of_global_tokens_is_cut_to_the_sequence(kind: str) -> None:
    """Or refused in words: but an OverflowError of torch says nothing."""
    for fields in (
        {"window_size": 2**62},
        {"window_size": 10**30},
        {"global_tokens": 10**30},
        {"hierarchy": ((2**62, 0.5), (1, 0.5))},
        {"hierarchy": ((2**63, 1.0),)},
    ):
        answer = ""
        try:
            pattern = build(kind, 320, 0.3, 8, h=1, **fields)
        except ValueError as error:
            answer = str(error)
        if answer:
            assert next(iter(fields)) in answer
        else:
            assert abs(pattern.density - 0.3) <= 1 / 40


MILLION = """
import json, gc, torch
from dilated_attention_pytorch import SparsePatternConfig, build_block_pattern
from dilated_attention_pytorch.cli.bench.measure import read_status, reset_peak_memory
torch.set_num_threads(1)
kinds = ("local_window", "dilated_sparse", "global_local", "strided", "hierarchical", "random")
for kind in kinds:
    build_block_pattern(SparsePatternConfig(kind, 0.1, 128), 4096, 8)
base = reset_peak_memory()
for kind in kinds:
    for causal in (False, True) if kind in ("hierarchical", "random") else (False,):
        gc.collect()
        reset_peak_memory()
        pattern = build_block_pattern(SparsePatternConfig(kind, 0.01, 128), 1048576, 8, is_causal=causal)
        extra = read_status("VmHWM") - base
        print(json.dumps([kind, causal, extra, pattern.density, len(pattern)]))
        del pattern
"""


def test_a_million_tokens_take_less_than_200_megabytes() -> None:
    if not measure.CLEAR_REFS.exists():
        pytest.skip("this platform has no /proc/self/clear_refs")
    command = [sys.executable, "-W", "error", "-c", MILLION]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == 8
    for kind, causal, extra, density, layouts in lines:
        assert extra < 200e6, f"{kind}, causal {causal}: {extra / 1e6:.0f} MB"
        assert abs(density - 0.01) <= 1 / 8192 * (2 if causal else 1)
        assert layouts == (8 if kind == "random" else 1)
