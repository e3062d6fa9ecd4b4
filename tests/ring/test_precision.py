"""Gradients do not lose precision as the ring grows."""

from __future__ import annotations

import pytest
import torch

from ring.calls import NAMES, attend_whole, differentiate, run_shard
from ring.configurations import CAUSAL, Dilated, dilated
from support.ranks import run_ranks

N, RANKS = 576, 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def configuration(ranks: int, dtype: str, causal: bool, seed: int) -> Dilated:
    """Segments that span all ranks."""
    return dilated(
        "precision",
        (N // ranks,) * ranks,
        ((N, 1), (N, 2), (N // 2, 3)),
        b=2,
        h=4,
        h_kv=2,
        d=16,
        dtype=DTYPES[dtype],
        options=CAUSAL if causal else {},
        seed=seed,
    )


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
