"""Ranks against one process: out, lse and all gradients of every configuration, in worlds of 1 to 8 ranks."""

from __future__ import annotations

import traceback

import pytest
import torch

from ring.calls import NAMES, expect_shard, run_shard
from ring.configurations import CONFIGURATIONS, WORLDS, Blocks, Dilated, of_world
from support.ranks import run_ranks
from support.tolerances import assert_close


def check_configurations(rank: int, names: list[str]) -> list[str]:
    """What is wrong on this rank, by configuration. An exception ends it: the ranks no longer match."""
    wrong = []
    for name in names:
        config = CONFIGURATIONS[name]
        try:
            actual = run_shard(config, rank)
            expected = expect_shard(config, rank, actual[0])
        except Exception:
            return [*wrong, f"{name}, rank {rank}: {traceback.format_exc()}"]
        accurate = torch.promote_types(config.dtype, torch.float32)
        dtypes = [config.dtype, accurate, config.dtype, config.dtype, config.dtype]
        for what, got, want, dtype in zip(NAMES, actual, expected, dtypes, strict=True):
            try:
                assert got.dtype == dtype, f"{what}: {got.dtype}, not {dtype}"
                assert_close(got, want, config.dtype, what)
            except AssertionError as error:
                wrong.append(f"{name}, rank {rank}: {error}")
    return wrong


def in_groups(names: list[str], size: int = 36) -> list[list[str]]:
    return [names[start : start + size] for start in range(0, len(names), size)]


@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(world, names, id=f"{world} ranks, {names[0]} to {names[-1]}")
        for world in WORLDS
        for kind in (Dilated, Blocks)
        for names in in_groups(of_world(world, kind))
    ],
)
def test_ranks_compute_what_one_process_computes(world: int, names: list[str]) -> None:
    wrong = [line for part in run_ranks(world, check_configurations, names) for line in part]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_configurations_cover_what_they_promise() -> None:
    dilated = [config for config in CONFIGURATIONS.values() if isinstance(config, Dilated)]
    blocks = [config for config in CONFIGURATIONS.values() if isinstance(config, Blocks)]
    assert len(dilated) >= 70
    assert len(blocks) >= 15
    assert (
        {len(config.shards) for config in dilated} == {len(config.shards) for config in blocks} == set(WORLDS)
    )
    assert {config.strategy for config in dilated} == {"ring", "ulysses", "auto"}
    assert len(CONFIGURATIONS) == len(dilated) + len(blocks)  # no name twice
