"""Ranks that disagree or err: a clear error on all of them, and the next call works."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import (
    BlockPattern,
    BlockSparseRingDilatedAttention,
    RingDilatedAttentionV2,
    RingMultiheadDilatedAttention,
    build_block_pattern,
    ring_block_sparse_attention,
    ring_dilated_attention,
    shard_positions,
    unshard_sequence,
)
from support.executions import ring, ring_blocks
from support.ranks import watch_ranks

X = torch.ones(1, 8, 2, 4)
WAIT = {"timeout": 20.0}
unshard, positions = partial(unshard_sequence, **WAIT), partial(shard_positions, **WAIT)


def join(x: Tensor) -> Tensor:
    return ring_dilated_attention(x, x, x, [8], [1], **WAIT)


def sparse(ratio: float) -> Tensor:
    config = {"pattern_type": "local_window", "sparsity_ratio": ratio, "block_size": 4}
    return BlockSparseRingDilatedAttention(sparse_config=config, **WAIT)(X, X, X)


def made(seed: int) -> Tensor:
    """Patterns of equally many blocks; none of the seed 0."""

    def pattern(n: int) -> Any:
        if not seed:
            raise ValueError(f"no pattern for {n}")
        config = {"pattern_type": "random", "sparsity_ratio": 0.5, "block_size": 2, "seed": int(seed)}
        return build_block_pattern(config, n, 2)

    return ring_block_sparse_attention(X, X, X, pattern, **WAIT)


def multihead(is_odd: bool) -> Tensor:
    torch.manual_seed(0)
    module = RingMultiheadDilatedAttention(8, 2, [8], [1], **WAIT)
    return module(torch.ones(1, 8, 8, dtype=torch.float64 if is_odd else torch.float32))[0]


def declared(is_odd: bool) -> Tensor:
    return RingDilatedAttentionV2([8], [1], dtype=torch.float64 if is_odd else None, **WAIT)(X, X, X)


@dataclass(frozen=True)
class Disagreement:
    """What rank 1 does otherwise, and the error: what its own message says, and that of the others."""

    name: str
    says: str
    others_say: str = ""  # the same, unless rank 1 alone is to blame
    options: dict[str, Any] = field(default_factory=dict)  # of rank 1
    common: dict[str, Any] = field(default_factory=dict)  # of all ranks
    shape: dict[str, int] = field(default_factory=dict)  # of rank 1
    change: Callable[[list[Tensor]], list[Tensor]] = list  # of q, k and v
    error: type[Exception] = ValueError
    call: Callable[[bool], Any] | None = None  # another function; whether this is rank 1


REFUSED = "rank 1.*refused"
LENGTHS = (8, 8, 8)
MASK = torch.ones(2, 8, dtype=torch.bool)
MASKED = {"key_mask": MASK}
OTHER_DOCUMENTS = {"cu_seqlens": torch.tensor([0, 7, 24])}
DOCUMENTS = {"cu_seqlens": torch.tensor([0, 5, 24])}


def whole_pattern(n: int, block_size: int) -> BlockPattern:
    size = -(-n // block_size)
    return BlockPattern.from_layout(torch.ones(size, size, dtype=torch.bool), n, block_size)


PATTERN = {"pattern": whole_pattern(24, 2)}  # block-sparse attention


def as_integers(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().long() for x in tensors]


DISAGREEMENTS = (
    Disagreement("causal", "is_causal", options={"is_causal": True}),
    Disagreement("segments", "segment_lengths", options={"segment_lengths": (12, 24)}),
    Disagreement("rates", "dilation_rates", options={"dilation_rates": (1, 3)}),
    Disagreement("branches", "segment_lengths", options={"segment_lengths": (8,), "dilation_rates": (1,)}),
    Disagreement("scale", "scale", options={"scale": 0.1}),
    Disagreement("mixing", "head_mixing", options={"head_mixing": "grouped"}),
    Disagreement("offsets", "head_offsets", options={"head_offsets": "blocked"}),
    Disagreement("tail", "tail", options={"tail": "phantom"}),
    Disagreement("detached", "detach_mixing", options={"detach_mixing": True}, common={"strategy": "auto"}),
    Disagreement("strategy", "strategy", options={"strategy": "ulysses"}, common={"strategy": "ring"}),
    Disagreement("dropout", "dropout_p", options={"dropout_p": 0.1}),
    Disagreement("steps", "steps", options={"steps": 2}, common={"strategy": "ring"}),
    Disagreement("batch", "batch|b ", shape={"b": 3}),
    Disagreement("heads", "head", shape={"h": 6}),
    Disagreement("key heads", "head", shape={"h_kv": 1}),
    Disagreement("features", "head_dim|features|d ", shape={"d": 5}),
    Disagreement("dtype", "dtype", change=lambda x: [y.double() for y in x]),
    Disagreement("gradients", "grad", change=lambda x: [y.detach() for y in x]),
    Disagreement("mask", "key_mask", options=MASKED),
    Disagreement("documents", "cu_seqlens", options=DOCUMENTS, common=OTHER_DOCUMENTS),
    Disagreement("documents of one rank", "cu_seqlens", options=DOCUMENTS),
    Disagreement("lengths that do not fit", "shard_lengths", f"shard_lengths|{REFUSED}",
                 common={"shard_lengths": (8, 9, 7)}),
    Disagreement("lengths of too few ranks", "shard_lengths", common={"shard_lengths": (8, 16)}),
    Disagreement("negative lengths", "shard_lengths", common={"shard_lengths": (-8, 24, 8)}),
    Disagreement("another length", "shard_lengths", f"shard_lengths|{REFUSED}", shape={"n": 9},
                 common={"shard_lengths": LENGTHS}),
    Disagreement("integers", "float16", REFUSED, change=as_integers, error=TypeError),
    Disagreement("three dimensions", "4 dimensions", REFUSED, change=lambda x: [x[0][0], *x[1:]]),
    Disagreement("a list", "tensor", REFUSED, change=lambda x: [[1.0], *x[1:]], error=TypeError),
    Disagreement("two dtypes", "dtype", REFUSED, change=lambda x: [x[0].double(), *x[1:]], error=TypeError),
    Disagreement("shapes of k and v", "shape", REFUSED, change=lambda x: [x[0], x[1][:, 1:], x[2]]),
    Disagreement("heads that do not divide", "heads", REFUSED, shape={"h_kv": 3}),
    Disagreement("negative segment", "segment_lengths", REFUSED, options={"segment_lengths": (8, -1)}),
    Disagreement("shape of the mask", "key_mask", REFUSED, options={"key_mask": MASK[:, 1:]}, common=MASKED),
    Disagreement("dtype of the mask", "key_mask", REFUSED, options={"key_mask": MASK.float()}, common=MASKED,
                 error=TypeError),
    Disagreement("memory", "memory", REFUSED, options={"memory": "cloud"}),
    Disagreement("unknown strategy", "strategy", REFUSED, options={"strategy": "star"}),
    Disagreement("steps below one", "steps", REFUSED, options={"steps": 0}),
    Disagreement("detached ring", "detach_mixing", common={"strategy": "ring", "detach_mixing": True}),
    Disagreement("patterns", "pattern", options={"pattern": whole_pattern(24, 3)}, common=PATTERN),
    Disagreement("length of the pattern", "pattern", options={"pattern": whole_pattern(26, 2)},
                 common=PATTERN),
    Disagreement("blocks: causal", "is_causal", options={"is_causal": True}, common=PATTERN),
    Disagreement("blocks: gradients", "grad", change=lambda x: [y.detach() for y in x], common=PATTERN),
    Disagreement("blocks: integers", "float16", REFUSED, change=as_integers, error=TypeError, common=PATTERN),
    Disagreement("lengths that differ", "shard_lengths", options={"shard_lengths": (7, 8, 9)},
                 common={"shard_lengths": LENGTHS}),
    Disagreement("timeout", "timeout", REFUSED, options={"timeout": -1.0}),
    Disagreement("long timeout", "timeout must be positive and below", REFUSED, options={"timeout": 1e300}),
    Disagreement("many steps", "steps must be below", REFUSED, options={"steps": 2**70}),
    Disagreement("no token", "position|token", call=lambda odd: join(X[:, :0])),
    Disagreement("patterns of modules", "agree on the pattern", call=lambda odd: sparse(0.9 if odd else 0.3)),
    Disagreement("made patterns", "agree on the pattern", call=lambda odd: made(2 if odd else 1)),
    Disagreement("no pattern", "no pattern for 24", REFUSED, call=lambda odd: made(0 if odd else 1)),
    Disagreement("dimensions", "agree on the other dim", call=lambda odd: unshard(X[0] if odd else X)),
    Disagreement("dtype of shards", "agree on the dtype", call=lambda odd: unshard(X.int() if odd else X)),
    Disagreement("dimension to join", "agree on dim: 1 on", call=lambda odd: unshard(X, 2 if odd else 1)),
    Disagreement("no dimension", "got 4 of", REFUSED, call=lambda odd: unshard(X, 4 if odd else 1)),
    Disagreement("functions", "agree on the function", call=lambda odd: unshard(X) if odd else join(X)),
    Disagreement("positions", "0 or more, got -1", REFUSED, call=lambda odd: positions(-1 if odd else 8)),
    Disagreement("dtype of weights", "dtype", f"dtype|{REFUSED}", call=multihead, error=TypeError),
    Disagreement("declared dtype", "made for torch.float64", REFUSED, call=declared, error=TypeError),
)  # fmt: skip


def call(rank: int, case: Disagreement) -> Any:
    is_odd = rank == 1
    if case.call is not None:
        return case.call(is_odd)
    b = 1 if "cu_seqlens" in {**case.options, **case.common} else 2
    shape = {"b": b, "n": 8, "h": 4, "h_kv": 2, "d": 4} | (case.shape if is_odd else {})
    b, n, h, h_kv, d = shape.values()
    tensors = [torch.randn(b, n, heads, d, requires_grad=True) for heads in (h, h_kv, h_kv)]
    tensors = case.change(tensors) if is_odd else tensors
    options = {**WAIT, **case.common, **(case.options if is_odd else {})}
    if "pattern" in options:
        return ring_blocks(*tensors, **options)
    return ring(*tensors, **{"segment_lengths": (8, 24), "dilation_rates": (1, 2), **options})


def disagree(rank: int) -> dict[str, tuple[str, str]]:
    """The type and message of the error of each case; after each of them the group still works."""
    errors = {}
    for case in DISAGREEMENTS:
        try:
            call(rank, case)
            errors[case.name] = "no error", ""
        except Exception as error:
            errors[case.name] = type(error).__name__, str(error)
        try:
            whole = ring_dilated_attention(X * (rank + 1), X, X, [24], [1], **WAIT)
            torch.testing.assert_close(whole, torch.ones_like(whole))
        except Exception as error:  # the ranks no longer match: no use to go on
            before = ": ".join(errors[case.name])
            errors[case.name] = "broken group", f"{before}; afterwards {error!r}"
            return errors
    return errors


def test_ranks_that_disagree_or_err_get_clear_errors_everywhere() -> None:
    wrong = []
    outcomes = watch_ranks(3, disagree, timeout=90)
    for outcome in outcomes:
        rank, errors = outcome.rank, outcome.value
        if errors is None:
            wrong.append(f"rank {rank}: exit code {outcome.exit_code} {outcome.error}")
            continue
        for case in DISAGREEMENTS:
            kind, message = errors.get(case.name, ("not reached", ""))
            says = case.says if rank == 1 or not case.others_say else case.others_say
            kinds = (case.error.__name__,) if rank == 1 else (case.error.__name__, "ValueError")
            if kind not in kinds or not re.search(says, message):
                wrong.append(f"{case.name}, rank {rank}: {kind}: {message!r}, not {kinds[0]}: {says}")
    assert not wrong, "\n" + "\n".join(wrong)
