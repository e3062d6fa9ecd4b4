"""What travels between ranks: exactly what the queries of a rank need, and what the schedule predicts."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.ring import ring_traffic
from ring.calls import attend_shard, plan_of
from ring.configurations import CAUSAL, CONFIGURATIONS, WORLDS, Blocks, Dilated, Inputs, dilated, of_world
from ring.counting import backward_bytes, forward_bytes, needed_rows
from support.ranks import run_ranks

Received = dict[str, tuple[int, int, int, int]]  # forward received and sent, backward received and sent


def measure(rank: int, configs: list[Inputs]) -> Received:
    """The bytes of one forward and one backward of every configuration."""
    received = {}
    for config in configs:
        leaves = tuple(config.shard(x, rank).requires_grad_() for x in config.tensors())
        traffic = ring_traffic()
        traffic.reset()
        out, lse = attend_shard(config, rank, leaves)
        forward = ring_traffic().received_bytes, ring_traffic().sent_bytes
        traffic.reset()
        (out.sum() + torch.where(lse.isfinite(), lse, 0.0).sum()).backward()
        received[config.name] = (*forward, ring_traffic().received_bytes, ring_traffic().sent_bytes)
        traffic.reset()
    return received


def measure_named(rank: int, names: list[str]) -> Received:
    return measure(rank, [CONFIGURATIONS[name] for name in names])


@pytest.mark.parametrize("kind", [Dilated, Blocks])
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_receive_exactly_what_they_need(world: int, kind: type[Inputs]) -> None:
    """Measured bytes against the schedule's prediction and against a count in the dense mask."""
    names = of_world(world, kind)
    measured = run_ranks(world, measure_named, names)
    wrong = []
    for name in names:
        config, moved = CONFIGURATIONS[name], [part[name] for part in measured]
        if isinstance(config, Dilated):
            planned = [predict(config, strategy) for strategy in strategies_of(config)]
            if moved not in planned:
                wrong.append(f"{name}: moved {moved}, planned {planned}")
        if isinstance(config, Blocks) or config.strategy == "ring":
            received = [(counts[0], counts[2]) for counts in moved]
            rows = needed_rows(config)
            needed = [
                (forward_bytes(config, rows, rank), backward_bytes(config, rows, rank))
                for rank in range(world)
            ]
            # The masks of what is needed travel besides, a byte each.
            if not config.hidden and received != needed:
                wrong.append(f"{name}: received {received}, needed {needed}")
    assert not wrong, "\n" + "\n".join(wrong)


def strategies_of(config: Dilated) -> tuple[str, ...]:
    """What "auto" may choose."""
    if config.strategy != "auto":
        return (config.strategy,)
    return ("ulysses",) if config.options.get("detach_mixing") else ("ring", "ulysses")


def predict(config: Dilated, strategy: str) -> list[tuple[int, int, int, int]]:
    """What the schedule says of each rank."""
    if not config.b:
        return [(0, 0, 0, 0)] * len(config.shards)
    schedule = plan_of(config, strategy)
    return [
        tuple(
            count(rank, direction)
            for direction in ("forward", "backward")
            for count in (schedule.received_bytes, schedule.sent_bytes)
        )
        for rank in range(len(config.shards))
    ]


LOCAL = (
    dilated("fits", (32, 32, 32), ((16, 1), (32, 2), (8, 3))),
    dilated("fits causal gqa", (48, 24, 24), ((8, 1), (24, 2)), h=6, h_kv=2, options=CAUSAL),
    dilated("fits auto", (32, 32, 32), ((16, 1), (32, 2)), strategy="auto"),
    dilated("documents fit", (20, 20, 20), ((1000, 1),), docs=(0, 7, 20, 40, 60), strategy="auto"),
)


def measure_local(rank: int) -> Received:
    return measure(rank, list(LOCAL))


def test_nothing_travels_when_all_segments_fit_the_shards() -> None:
    for received in run_ranks(3, measure_local):
        for name, counts in received.items():
            assert counts == (0, 0, 0, 0), name


FUTURE = dilated("future", (16, 16, 16, 16), ((64, 1), (64, 2)), options=CAUSAL)


def measure_future(rank: int) -> Received:
    return measure(rank, [FUTURE])


def test_nothing_comes_from_the_future() -> None:
    rows = needed_rows(FUTURE)
    assert torch.equal(rows, rows.tril())
    received = [part["future"] for part in run_ranks(4, measure_future)]
    assert received[0][0] == 0  # the first rank attends to itself alone
    assert received[3][1] == 0  # and nobody needs the last one
    assert [counts[0] for counts in received] == [forward_bytes(FUTURE, rows, rank) for rank in range(4)]
