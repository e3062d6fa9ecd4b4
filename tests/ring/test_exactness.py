"""Ranks against one process: out, lse and gradients, in worlds of 1 to 8; precision of many ranks."""

from __future__ import annotations

import traceback

import pytest
import torch

from ring.calls import NAMES, attend_whole, differentiate, expect_shard, run_shard
from ring.configurations import (
    BLOCKS,
    CAUSAL,
    CONFIGURATIONS,
    DILATED,
    WORLDS,
    Blocks,
    Dilated,
    dilated,
    of_world,
)
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
    kinds = [[x for x in CONFIGURATIONS.values() if isinstance(x, kind)] for kind in (Dilated, Blocks)]
    assert len(kinds[0]) >= 70
    assert len(kinds[1]) >= 15
    assert all({len(config.shards) for config in configs} == set(WORLDS) for configs in kinds)
    assert {config.strategy for config in kinds[0]} == {"ring", "ulysses", "auto"}
    assert len(CONFIGURATIONS) == len(DILATED) + len(BLOCKS)  # no name twice


N, RANKS = 576, 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def configuration(ranks: int, dtype: str, causal: bool, seed: int) -> Dilated:
    """Segments that span all ranks."""
    sizes = {"b": 2, "h": 4, "h_kv": 2, "d": 16, "dtype": DTYPES[dtype], "seed": seed}
    branches, options = ((N, 1), (N, 2), (N // 2, 3)), CAUSAL if causal else {}
    return dilated("precision", (N // ranks,) * ranks, branches, options=options, **sizes)


def shards(rank: int, ranks: int, cases: list[tuple[str, bool, int]]) -> list[list[torch.Tensor]]:
    return [[x.detach().double() for x in run_shard(configuration(ranks, *case), rank)] for case in cases]


def root_mean_square_errors(parts: list[list[torch.Tensor]], case: tuple[str, bool, int]) -> dict[str, float]:
    """Against float64 on the same inputs."""
    config = configuration(1, *case)
    grad_out, grad_lse = config.gradients()
    tensors = tuple(x.double() for x in config.tensors())
    whole = differentiate(lambda leaves: attend_whole(config, leaves), tensors, grad_out, grad_lse)
    errors = {}
    for i, (name, want) in enumerate(zip(NAMES, whole, strict=True)):
        got = torch.cat([part[i] for part in parts], 2 if name == "lse" else 1)
        errors[name] = (got - want.detach()).square().mean().sqrt().item()
    return errors


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_ranks_are_as_precise_as_one(dtype: str) -> None:
    cases = [(dtype, causal, seed) for causal in (False, True) for seed in (0,)]
    alone, together = run_ranks(1, shards, 1, cases), run_ranks(RANKS, shards, RANKS, cases)
    for i, case in enumerate(cases):
        one = root_mean_square_errors([part[i] for part in alone], case)
        eight = root_mean_square_errors([part[i] for part in together], case)
        for name in ("out", "dq", "dk", "dv"):
            assert eight[name] <= 1.5 * one[name], (
                f"{name} of {case}: {eight[name]:.3e} against {one[name]:.3e}"
            )
