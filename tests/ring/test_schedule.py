"""The schedule: against brute force, and at sizes nobody has; `test_exactness` has what ranks exchange."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dilated_attention_pytorch.ring import even_shards, plan_ring
from ring.calls import backward_bytes, forward_bytes, needed_rows, pair_counts, plan_of
from ring.configurations import Dilated, dilated
from support.configurations import segment_and_rate

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@st.composite
def specs(draw: st.DrawFn) -> Dilated:
    """Small calls over 1 to 9 ranks: unequal shards, some of them empty."""
    world = draw(st.integers(1, 9))
    shards = draw(st.lists(st.integers(0, 14), min_size=world, max_size=world))
    shards[draw(st.integers(0, world - 1))] += 1
    if draw(st.booleans()):
        shards = list(even_shards(sum(shards), world))
    n = sum(shards)
    h_kv, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (6, 1)]))
    branch = segment_and_rate(n + n // 4 + 2, 7)
    cuts = draw(st.lists(st.integers(0, n), max_size=3)) if draw(st.integers(0, 3)) == 0 else None
    return dilated(
        "random",
        tuple(shards),
        tuple(draw(st.lists(branch, min_size=1, max_size=4))),
        b=1 if cuts is not None else draw(st.integers(1, 3)),
        h=h_kv * group,
        h_kv=h_kv,
        d=draw(st.sampled_from([1, 4])),
        dtype=draw(st.sampled_from(DTYPES)),
        docs=None if cuts is None else (0, *sorted(cuts), n),
        options={
            "is_causal": draw(st.booleans()),
            "head_mixing": draw(st.sampled_from(["all", "grouped"])),
            "head_offsets": draw(st.sampled_from(["interleaved", "blocked"])),
        },
    )


@settings(max_examples=150)
@given(specs())
def test_bytes_and_flops_are_those_of_the_dense_mask(config: Dilated) -> None:
    schedule, rows, counts = plan_of(config), needed_rows(config), pair_counts(config)
    flops, row_bytes = [], 2 * config.d * config.dtype.itemsize
    for rank in range(len(config.shards)):
        low, high = config.bounds(rank)
        flops.append(int(counts[:, low:high].sum()) * config.b * 4 * config.d)
        assert schedule.flops(rank) == flops[-1]
        assert schedule.received_bytes(rank) == forward_bytes(config, rows, rank)
        assert schedule.received_bytes(rank, "backward") == backward_bytes(config, rows, rank)
        assert schedule.sent_bytes(rank) == int(rows[:, rank].sum()) * row_bytes
    assert schedule.imbalance == pytest.approx(max(flops) * len(flops) / sum(flops) if sum(flops) else 1.0)


@settings(max_examples=60)
@given(specs(), st.sampled_from(["ring", "ulysses"]))
def test_what_is_sent_is_received(config: Dilated, strategy: str) -> None:
    schedule, ranks = plan_of(config, strategy), range(len(config.shards))
    assert (schedule.num_ranks, tuple(schedule.shard_lengths)) == (len(ranks), config.shards)
    for direction in ("forward", "backward"):
        received = [schedule.received_bytes(rank, direction) for rank in ranks]
        assert sum(received) == sum(schedule.sent_bytes(rank, direction) for rank in ranks)
        assert min(received) >= 0


def test_zero_bytes_where_segments_fit() -> None:
    schedule = plan_ring((2048, 4096, 8192), (1, 2, 4), 2**20, num_ranks=128, num_heads=8, head_dim=64)
    assert all(schedule.received_bytes(rank) == 0 for rank in range(128))
    assert schedule.imbalance == 1.0


@pytest.mark.parametrize("causal", [False, True])
def test_a_thousand_ranks_and_a_billion_tokens(causal: bool) -> None:
    lengths = [2**k for k in (11, 14, 17, 20, 24, 30)]
    rates, sizes = [1, 4, 16, 64, 1024, 65536], {"num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
    how = {"dtype": torch.bfloat16, "is_causal": causal}
    schedule = plan_ring(lengths, rates, 10**9, num_ranks=1000, **sizes, **how)
    some = (*range(0, 1000, 50), 499, 999)
    received = [schedule.received_bytes(rank) for rank in some]
    sent = [schedule.sent_bytes(rank) for rank in (0, 499, 999)]
    assert sum(schedule.shard_lengths) == 10**9
    assert min(schedule.flops(rank) for rank in some) > 0
    assert schedule.imbalance >= 1.0
    assert schedule.memory_bytes(999) > 0
    if causal:
        assert received[0] == sent[2] == 0
    else:
        assert min(*received, *sent) > 0


def test_a_billion_tokens_receive_a_rate_th_of_them() -> None:
    """One segment over everything at rate r: every rank needs what the others hold, 1/r of it a head."""
    n, ranks, rate, heads, d = 10**9, 1000, 1000, 8, 128
    schedule = plan_ring([n], [rate], n, num_ranks=ranks, num_heads=heads, head_dim=d, dtype=torch.bfloat16)
    for rank in (0, 500, 999):
        assert schedule.received_bytes(rank) == (n - n // ranks) // rate * heads * 2 * d * 2


def test_it_can_be_read() -> None:
    schedule = plan_of(dilated("printed", (40, 40, 0, 33), ((16, 1), (96, 2), (200, 3)), h=4, h_kv=2))
    text = str(schedule)
    assert len(text.splitlines()) >= 5  # a head and a line for each rank
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "rank" in text.lower()
    many = plan_ring([2**20], [64], 2**24, num_ranks=1024, num_heads=8, head_dim=64)
    assert len(str(many).splitlines()) < 2000
    assert len(schedule.steps(0)) >= 1


def test_even_shards_and_chunks() -> None:
    assert even_shards(10, 4) == (3, 3, 2, 2)
    assert even_shards(2, 4) == (1, 1, 0, 0)
    assert even_shards(8, 1) == (8,)
    # Steps beyond the tokens cost nothing.
    assert plan_ring([8], [1], 8, num_ranks=2, num_heads=2, head_dim=4, steps=10**9).num_chunks == 4


EVEN = {"n": 8, "num_ranks": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 10}, "num_ranks|shard_lengths"),
        ({"num_ranks": 2}, "n |n must|length"),
        ({"n": 10, "num_ranks": 0}, "num_ranks"),
        ({"n": 10, "shard_lengths": (4, 4)}, "shard_lengths"),
        ({"shard_lengths": (4, -1)}, "shard_lengths"),
        ({"shard_lengths": (0, 0)}, "shard_lengths|position|token|n must"),
        ({"shard_lengths": (True, 7)}, "shard_lengths must be integers"),
        ({"shard_lengths": (4, 4), "num_kv_heads": 3}, "heads"),
        ({"shard_lengths": (4, 4), "strategy": "star"}, "strategy"),
        ({"shard_lengths": (4, 4), "cu_seqlens": (0, 5)}, "cu_seqlens"),
        ({**EVEN, "cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens must run from 0"),
        ({**EVEN, "workspace_bytes": 0}, "workspace_bytes must be a positive integer, got 0"),
        ({**EVEN, "steps": 0}, "steps must be a positive integer, got 0"),
        ({**EVEN, "dtype": torch.int32}, "dtype must be a floating-point torch.dtype, got torch.int32"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict, message: str) -> None:
    error = TypeError if "dtype" in options else ValueError
    with pytest.raises(error, match=message):
        plan_ring([8], [1], **{"num_heads": 4, "head_dim": 8, **options})


def test_documents_are_planned_whatever_the_default_device() -> None:
    with torch.device("meta"):
        found = plan_ring([4, 8], [1, 2], 8, num_heads=2, head_dim=4, num_ranks=2, cu_seqlens=[0, 3, 8])
    assert found.received_bytes(0) >= 0
