"""Scores beyond the range of their dtype: finite inputs whose products overflow, and queries that are NaN.

Expected is what the reference gives in the same dtype, whatever the tiles, steps, workspace, cache or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import DilatedKVCache, Execution, block_sparse_attention, dilated_attention
from dilated_attention_pytorch.attention_maps import attention_rows
from dilated_attention_pytorch.decode import attend_last
from dilated_attention_pytorch.plan import BlockPattern
from dilated_attention_pytorch.reference import block_sparse_attention_reference, dilated_attention_reference
from dilated_attention_pytorch.ring import ring_block_sparse_attention, ring_dilated_attention
from support.executions import dilated, packed
from support.ranks import run_ranks
from support.tolerances import assert_close

N, H, H_KV, D = 40, 4, 2, 6
BRANCHES = (8, 16, 64), (1, 2, 4)
ROWS = slice(3, None, 5)  # queries whose scores with marked keys overflow; to all others keys are ordinary
MARKED = {"all": slice(None), "near": slice(16), "far": slice(16, None), "one": slice(7, 8)}
CASES = ["-all", "-near", "-far", "-one", "+one", "+all", "-all +one", "nan", "nan -all"]
CAUSAL: dict[str, Any] = {"is_causal": True, "return_lse": True}


def tensors(case: str) -> list[Tensor]:
    """q, k and v; one feature gives the queries of ROWS scores of -inf or +inf with marked keys."""
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, N, h, D, generator=rng) for h in (H, H_KV, H_KV))
    q[..., 0], k[..., 0] = 0.0, 0.0
    q[:, ROWS, :, 0] = math.nan if "nan" in case else 1e30
    for mark in case.removeprefix("nan").split():
        k[:, MARKED[mark[1:]], :, 0] = float(mark[0] + "1e30")
    return [q, k, v]


def results(attend: Callable[..., Any], inputs: list[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse = attend(*leaves, *args, **options)
    loss = (out * torch.linspace(-1, 1, out.shape[-1])).sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert_same_values(got[0], want[0])
    assert_same_values(got[1], want[1])
    assert torch.equal(got[2].isnan().any(-1), want[2].isnan().any(-1))  # the rows of dq
    for a, b in zip(got[2:], want[2:], strict=True):
        # The reference's dense products carry NaN further, to keys that its queries do not see.
        assert b[a.isnan()].isnan().all()
        for features in (slice(1), slice(1, None)):  # that of the huge feature is huge
            real = ~b[..., features].isnan()
            assert_close(a[..., features][real], b[..., features][real], torch.float32, "gradient")


def assert_same_values(got: Tensor, want: Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    assert_close(got[~got.isnan()], want[~want.isnan()], dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_dilated(case: str, causal: bool) -> None:
    inputs, mask = tensors(case), torch.rand(2, N) > 0.3
    for given in ({}, {"key_mask": mask}, {"tail": "phantom", "detach_mixing": True}, {"scale": -0.5}):
        options = {"is_causal": causal, "return_lse": True, **given}
        want = results(dilated_attention_reference, inputs, *BRANCHES, **options)
        for how in ({}, {"workspace_bytes": 2048, "steps": 2}, {"kernel": "eager"}):
            assert_same(results(dilated, inputs, *BRANCHES, **options, **how), want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_block_sparse(case: str, causal: bool) -> None:
    inputs, mask = tensors(case), torch.rand(2, N) > 0.3
    pattern = BlockPattern.from_layout(torch.rand(1, 5, 5) > 0.4, N, 8)
    for given in ({}, {"key_mask": mask}):
        options = {"is_causal": causal, "return_lse": True, **given}
        want = results(block_sparse_attention_reference, inputs, pattern.to_dense(), **options)
        for how in ({}, {"workspace_bytes": 2048}, {"kernel": "eager"}):
            assert_same(results(block_sparse_attention, inputs, pattern, **packed({**options, **how})), want)


def test_rows_without_a_finite_score_are_zeros() -> None:
    """What the reference gives, in numbers."""
    inputs = tensors("-all")
    out, lse, dq, dk, dv = results(dilated_attention, inputs, *BRANCHES, return_lse=True)
    assert not out[:, ROWS].any()
    assert not dq[:, ROWS].any()
    assert (lse[..., ROWS] == -math.inf).all()
    assert dk.isfinite().all()
    assert dv.isfinite().all()


@pytest.mark.parametrize("case", CASES)
def test_half_precision(case: str) -> None:
    inputs = [x.bfloat16() for x in tensors(case)]
    execution = Execution(workspace_bytes=4096)
    out, lse = dilated_attention(*inputs, *BRANCHES, return_lse=True, execution=execution)
    want, want_lse = dilated_attention_reference(*inputs, *BRANCHES, return_lse=True)
    assert_same_values(out, want, torch.bfloat16)
    assert_same_values(lse, want_lse)


@pytest.mark.parametrize("case", CASES)
def test_decoding(case: str) -> None:
    inputs = tensors(case)
    want = dilated_attention_reference(*inputs, *BRANCHES, is_causal=True)
    how = {"execution": Execution(workspace_bytes=1)}
    outs = [attend_last(inputs[0][:, -m:], *inputs[1:], *BRANCHES, **how) for m in (1, 30)]
    for chunk in (1, 7, N):
        cache = DilatedKVCache(*BRANCHES, batch_size=2, num_kv_heads=H_KV, head_dim=D, num_heads=H)
        parts = zip(*(x.split(chunk, 1) for x in inputs), strict=True)
        outs.append(torch.cat([cache.attend(*part) for part in parts], 1))
    for out in outs:
        assert_same_values(out, want[:, -out.shape[1] :])


@pytest.mark.parametrize("case", CASES)
def test_attention_maps(case: str) -> None:
    q, k, v = tensors(case)
    for options in ({}, {"is_causal": True}, {"tail": "phantom"}):
        want = dilated_attention_reference(q, k, v, *BRANCHES, **options)
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        weights = attention_rows(*leaves, range(N), *BRANCHES, **options)
        assert_same_values((weights @ v.repeat_interleave(2, 2).transpose(1, 2)).transpose(1, 2), want)
        if not want.isnan().any():
            for gradient in torch.autograd.grad(weights.square().sum(), leaves):
                assert gradient.isfinite().all()


def on_ranks(rank: int, world: int) -> list[list[Tensor]]:
    """For each case the shards of out, lse, dq, dk and dv, of dilated and of block-sparse attention."""
    here = slice(N * rank // world, N * (rank + 1) // world)
    pattern = BlockPattern.from_layout(torch.ones(1, 5, 5, dtype=torch.bool), N, 8)
    found = []
    for case in CASES:
        shards, how = [x[:, here] for x in tensors(case)], packed({**CAUSAL, "workspace_bytes": 4096})
        found.append(results(ring_dilated_attention, shards, *BRANCHES, **how))
        found.append(results(ring_block_sparse_attention, shards, pattern, **how))
    return found


def test_ranks() -> None:
    everything = torch.ones(1, N, N, dtype=torch.bool)
    want = []
    for case in CASES:
        want.append(results(dilated_attention_reference, tensors(case), *BRANCHES, **CAUSAL))
        want.append(results(block_sparse_attention_reference, tensors(case), everything, **CAUSAL))
    for expected, *shards in zip(want, *run_ranks(2, on_ranks, 2), strict=True):
        joined = [torch.cat(parts, 2 if i == 1 else 1) for i, parts in enumerate(zip(*shards, strict=True))]
        assert_same(joined, expected)
