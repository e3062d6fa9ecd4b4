"""Ranks against one process: out, lse, gradients and bytes, in worlds of 1 to 8; precision of many ranks."""

from __future__ import annotations

import traceback

import pytest
import torch

from ring.calls import (
    NAMES,
    attend_whole,
    backward_bytes,
    differentiate,
    expect_shard,
    forward_bytes,
    needed_rows,
    plan_of,
    run_shard,
)
from ring.configurations import CAUSAL, CONFIGURATIONS, WORLDS, Blocks, Dilated, Inputs, dilated, of_world
from support.ranks import run_ranks
from support.tolerances import assert_close

Bytes = list[int]  # received and sent in the forward pass, and in the backward pass


def check_configurations(rank: int, names: list[str]) -> tuple[list[str], dict[str, Bytes]]:
    """What is wrong on this rank, by configuration, and what was moved.

    An exception ends it: the ranks no longer match.
    """
    wrong, moved = [], {name: list[int]() for name in names}
    for name in names:
        config = CONFIGURATIONS[name]
        try:
            actual = run_shard(config, rank, moved[name])
            expected = expect_shard(config, rank, actual[0])
        except Exception:
            return [*wrong, f"{name}, rank {rank}: {traceback.format_exc()}"], moved
        accurate = torch.promote_types(config.dtype, torch.float32)
        dtypes = [config.dtype, accurate, config.dtype, config.dtype, config.dtype]
        for what, got, want, dtype in zip(NAMES, actual, expected, dtypes, strict=True):
            try:
                assert got.dtype == dtype, f"{what}: {got.dtype}, not {dtype}"
                assert_close(got, want, config.dtype, what)
            except AssertionError as error:
                wrong.append(f"{name}, rank {rank}: {error}")
    return wrong, moved


def wrong_bytes(config: Inputs, moved: list[Bytes]) -> str:
    """What differs from the schedule's prediction and from a count in the dense mask."""
    ranks = range(len(moved))
    if isinstance(config, Dilated):
        planned = [predict(config, strategy) for strategy in strategies_of(config)]
        if moved not in planned:
            return f"{config.name}: moved {moved}, planned {planned}"
        if "fits" in config.name and any(map(any, moved)):
            return f"{config.name}: moved {moved}, although all segments fit the shards"
    if isinstance(config, Blocks) or config.strategy == "ring":
        rows = needed_rows(config)
        needed = [[forward_bytes(config, rows, x), backward_bytes(config, rows, x)] for x in ranks]
        # The masks of what is needed travel besides, a byte each.
        if not config.hidden and [counts[::2] for counts in moved] != needed:
            return f"{config.name}: moved {moved}, needed {needed}"
        if config.is_causal and not torch.equal(rows, rows.tril()):
            return f"{config.name}: {rows} come from the future"
    return ""


def strategies_of(config: Dilated) -> tuple[str, ...]:
    """What "auto" may choose."""
    if config.strategy != "auto":
        return (config.strategy,)
    return ("ulysses",) if config.options.get("detach_mixing") else ("ring", "ulysses")


def predict(config: Dilated, strategy: str) -> list[Bytes]:
    """What the schedule says of each rank."""
    if not config.b:
        return [[0] * 4] * len(config.shards)
    plan, passes = plan_of(config, strategy), ("forward", "backward")
    counts = [(count, each) for each in passes for count in (plan.received_bytes, plan.sent_bytes)]
    return [[count(rank, each) for count, each in counts] for rank in range(len(config.shards))]


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
def test_ranks_compute_and_move_what_they_should(world: int, names: list[str]) -> None:
    """The numbers of one process, and exactly the bytes that are needed."""
    found = run_ranks(world, check_configurations, names)
    wrong = [line for part, _ in found for line in part]
    wrong += filter(None, (wrong_bytes(CONFIGURATIONS[name], [x[name] for _, x in found]) for name in names))
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_configurations_cover_what_they_promise() -> None:
    kinds = [[x for x in CONFIGURATIONS.values() if isinstance(x, kind)] for kind in (Dilated, Blocks)]
    assert len(kinds[0]) >= 70
    assert len(kinds[1]) >= 15
    assert all({len(config.shards) for config in configs} == set(WORLDS) for configs in kinds)
    assert {config.strategy for config in kinds[0]} == {"ring", "ulysses", "auto"}


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
