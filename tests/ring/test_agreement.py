"""Ranks that disagree, outside of `ring_dilated_attention` too: an error on all, and the next call works."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import (
    BlockSparseRingDilatedAttention,
    RingDilatedAttentionV2,
    RingMultiheadDilatedAttention,
    build_block_pattern,
    plan_ring,
    ring_block_sparse_attention,
    ring_dilated_attention,
    shard_positions,
    unshard_sequence,
)
from support.executions import ring
from support.ranks import run_ranks

X = torch.ones(1, 8, 2, 4)
WAIT = {"timeout": 20.0}


def sparse(ratio: float) -> Tensor:
    config = {"pattern_type": "local_window", "sparsity_ratio": ratio, "block_size": 4}
    return BlockSparseRingDilatedAttention(sparse_config=config, **WAIT)(X, X, X)


def made(window: int) -> Tensor:
    """Two patterns of equally many blocks."""

    def pattern(n: int) -> Any:
        config = {"pattern_type": "random", "sparsity_ratio": 0.5, "block_size": 2, "seed": window}
        return build_block_pattern(config, n, 2)

    return ring_block_sparse_attention(X, X, X, pattern, **WAIT)


def fails(is_bad: bool) -> Tensor:
    def pattern(n: int) -> Any:
        if is_bad:
            raise ValueError(f"no pattern for {n}")
        return build_block_pattern({"pattern_type": "local_window", "block_size": 4}, n, 2)

    return ring_block_sparse_attention(X, X, X, pattern, **WAIT)


def multihead(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    module = RingMultiheadDilatedAttention(8, 2, [8], [1], **WAIT)
    return module(torch.ones(1, 8, 8, dtype=dtype))[0]


def either(is_unshard: bool) -> Tensor:
    return unshard_sequence(X, **WAIT) if is_unshard else ring_dilated_attention(X, X, X, [8], [1], **WAIT)


class Case(NamedTuple):
    name: str
    call: Callable[[bool], Any]  # whether this is the rank that differs
    says: str


CASES = (
    Case("patterns of modules", lambda odd: sparse(0.9 if odd else 0.3), "agree on the pattern"),
    Case("made patterns", lambda odd: made(2 if odd else 1), "agree on the pattern"),
    Case("a pattern that cannot be made", fails, "no pattern for 16|refused its arguments"),
    Case("dimensions", lambda odd: unshard_sequence(X[0] if odd else X, **WAIT), "agree on the other dim"),
    Case("dtype of parts", lambda odd: unshard_sequence(X.int() if odd else X, **WAIT), "agree on the dtype"),
    Case("dimension to join", lambda odd: unshard_sequence(X, 2 if odd else 1, **WAIT), "agree on dim: 1 on"),
    Case("no dimension", lambda odd: unshard_sequence(X, 4 if odd else 1, **WAIT), "got 4 of|refused"),
    Case("functions", either, "agree on the function"),
    Case("positions", lambda odd: shard_positions(-1 if odd else 8, **WAIT), "0 or more, got -1|refused"),
    Case("dtype of weights", lambda odd: multihead(torch.float64 if odd else torch.float32), "dtype|refused"),
    Case(
        "declared dtype",
        lambda odd: RingDilatedAttentionV2([8], [1], dtype=torch.float64 if odd else None, **WAIT)(X, X, X),
        "made for torch.float64|refused",
    ),
    Case(
        "many steps",
        lambda odd: ring(X, X, X, [8], [1], steps=2**70 if odd else 1, **WAIT),
        "steps must be below|refused",
    ),
    Case(
        "long timeout",
        lambda odd: ring_dilated_attention(X, X, X, [8], [1], timeout=1e300 if odd else 20.0),
        "timeout must be positive and below|refused",
    ),
)


def collect(rank: int) -> dict[str, str]:
    errors = {}
    for case in CASES:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            case.call(rank == 1)
        errors[case.name] = str(caught.value)
        out = ring_dilated_attention(X * (rank + 1), X, X, [16], [1], **WAIT)
        assert torch.equal(out, torch.ones_like(out)), f"after {case.name}"
    return errors


def test_all_ranks_get_an_error_and_go_on() -> None:
    for errors in run_ranks(2, collect):
        for case in CASES:
            assert re.search(case.says, errors[case.name]), case.name


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"workspace_bytes": 0}, ValueError, "workspace_bytes must be a positive integer, got 0"),
        ({"dtype": torch.int32}, TypeError, "dtype must be a floating-point torch.dtype, got torch.int32"),
        ({"cu_seqlens": torch.tensor([0, 9])}, ValueError, "cu_seqlens must run from 0"),
        ({"steps": 0}, ValueError, "steps must be a positive integer, got 0"),
        ({"shard_lengths": (True, 7)}, ValueError, "shard_lengths must be integers"),
    ],
)
def test_a_schedule_refuses_what_a_call_refuses(
    changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        plan_ring([8], [1], 8, **{"num_ranks": 2, "num_heads": 2, "head_dim": 4} | changes)


def test_steps_beyond_the_tokens_cost_nothing() -> None:
    schedule = plan_ring([8], [1], 8, num_ranks=2, num_heads=2, head_dim=4, steps=10**9)
    assert schedule.num_chunks == 4
