"""Every planner and kernel against the reference: forward, lse and all gradients of random calls."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dilated_attention_pytorch import DilatedSpec, Execution, block_sparse_attention, dilated_attention
from dilated_attention_pytorch.core import get_global_pattern_cache
from dilated_attention_pytorch.kernels import batches
from dilated_attention_pytorch.plan import Shape, block_sparse, plan_dilated
from dilated_attention_pytorch.reference import block_sparse_attention_reference, dilated_attention_reference
from support.block_configurations import BlockConfiguration, block_configurations
from support.configurations import Configuration, configurations
from support.exactness import check_call
from support.executions import FUSED, dilated


@st.composite
def many_documents(draw: st.DrawFn) -> Configuration:
    """Documents that are grouped by length: many, and short."""
    config = draw(configurations(max_n=30))
    rng = torch.Generator().manual_seed(config.seed)
    lengths = torch.randint(0, draw(st.sampled_from([3, 9, 14])), (90,), generator=rng)
    docs = (0, *lengths.cumsum(0).tolist(), int(lengths.sum()) + 1)
    changes = {"b": 1, "n": docs[-1], "docs": docs, "d": draw(st.sampled_from([3, 8]))}
    return replace(config, **changes, workspace_bytes=draw(st.sampled_from([1, 2**16, 2**25])))


def check_dilated(config: Configuration, dtype: torch.dtype, kernel: str = "auto") -> None:
    branches = {"segment_lengths": config.segment_lengths, "dilation_rates": config.dilation_rates}
    how: dict[str, Any] = {"workspace_bytes": config.workspace_bytes, "memory": config.memory}
    check_call(
        config,
        dtype,
        partial(dilated, **branches),
        partial(dilated_attention_reference, **branches),
        saves_output=not config.detach_mixing,
        kernel=kernel,
        steps=config.steps,
        **how,
    )


def check_blocks(config: BlockConfiguration, dtype: torch.dtype, kernel: str = "auto") -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sparse, "JOINED_ROWS", 48)  # joined at the lengths that the search draws, too
        check_call(
            config,
            dtype,
            partial(block_sparse_attention, pattern=config.pattern),
            partial(block_sparse_attention_reference, mask=config.pattern.to_dense()),
            execution=Execution(kernel, config.workspace_bytes, config.memory),
        )


HALVES = (torch.bfloat16, torch.float16)
SEARCHES: list[tuple[Any, torch.dtype, str, int, int]] = [  # examples, and the longest sequence
    (check_dilated, torch.float64, "auto", 300, 600),
    *((check_dilated, torch.float32, kernel, 200, 600) for kernel in FUSED),
    *((check_dilated, dtype, kernel, 60, 200) for kernel in FUSED for dtype in HALVES),
    (check_dilated, torch.float64, "eager", 80, 200),
    (check_blocks, torch.float64, "auto", 250, 500),
    (check_blocks, torch.float32, "auto", 150, 500),
    *((check_blocks, dtype, "auto", 60, 200) for dtype in HALVES),
    (check_blocks, torch.float64, "eager", 40, 200),
]


@pytest.mark.parametrize(("check", "dtype", "kernel", "examples", "max_n"), SEARCHES)
def test_equals_the_definition(
    check: Any, dtype: torch.dtype, kernel: str, examples: int, max_n: int
) -> None:
    drawn = configurations(max_n) if check is check_dilated else block_configurations(max_n, tiles=True)

    @settings(max_examples=examples)
    @given(drawn)
    def search(config: Any) -> None:
        check(config, dtype, kernel)

    search()


def test_float16_with_one_feature_a_head() -> None:
    sizes: dict[str, Any] = {"b": 1, "n": 144, "h": 10, "h_kv": 5, "d": 1, "seed": 33831, "docs": None}
    mixing = {"head_mixing": "all", "head_offsets": "interleaved", "tail": "exact", "detach_mixing": False}
    options = {"is_causal": True, "scale": None, "masked": True, "layout": "strided_features"}
    branches = ((105, 10), (90, 12), (65, 3), (137, 12), (121, 1))
    memory: dict[str, Any] = {"workspace_bytes": 2**25, "memory": "fresh"}
    check_dilated(Configuration(**sizes, branches=branches, **options, **mixing, **memory), torch.float16)


@settings(max_examples=40)
@given(many_documents(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_many_documents(config: Configuration, dtype: torch.dtype) -> None:
    """Wherever shapes differ they are padded to common ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "MANY_SHAPES", 1)
        patch.setattr(batches, "LEAST_GAIN", 1)
        get_global_pattern_cache().clear()  # plans keep their batches
        check_dilated(config, dtype)
    get_global_pattern_cache().clear()


def test_short_documents_of_many_lengths_run_together_and_others_as_they_lie() -> None:
    def batches_of(bounds: tuple[int, ...]) -> list[batches.Batch]:
        spec, shape = DilatedSpec([64, 128], [1, 2]), Shape(1, bounds[-1], 4, 4, 8)
        plan = plan_dilated(spec, shape, itemsize=4, docs=bounds)
        return [batch for _, each in batches.batches_of(plan, 4) for batch in each]

    for bounds in ((0, 5, 9, 20), tuple(range(0, 2001, 10)), tuple(accumulate([0, 900, 1400] * 20))):
        assert all(batch.queries.counts is None for batch in batches_of(bounds))
    lengths = torch.randint(1, 120, (500,), generator=torch.Generator().manual_seed(0))
    found = batches_of((0, *lengths.cumsum(0).tolist()))
    assert len(found) < 60
    for batch in found:
        if batch.queries.counts is not None:  # at most a quarter is padding, or a few rows
            real = batch.queries.counts
            assert (batch.queries.shape[2] - real <= (real // 4).clamp(min=3)).all()


def test_grouped_documents_repeat_their_dropout_and_hold_their_nan() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(1, 12, (80,))
    bounds = [0, *lengths.cumsum(0).tolist()]
    q, k, v = (torch.randn(1, bounds[-1], 2, 4, dtype=torch.float64) for _ in range(3))
    attend = partial(dilated_attention, segment_lengths=[8, 16], dilation_rates=[1, 2])
    packed = partial(attend, cu_seqlens=torch.tensor(bounds))

    def dropped(v: Tensor) -> Tensor:
        torch.manual_seed(1)
        return packed(q, k, v, dropout_p=0.4)

    assert torch.autograd.gradcheck(dropped, v.requires_grad_(), fast_mode=True)
    assert not torch.equal(packed(q, k, v, dropout_p=0.4), packed(q, k, v, dropout_p=0.4))
    assert (dropped(torch.ones_like(v)) - 1).abs().max() > 0.1
    v = v.detach()
    whole = packed(q, k, v)
    lo, hi = bounds[30], bounds[31]
    k[:, hi - 1] = float("nan")
    for causal in (False, True):
        out = packed(q, k, v, is_causal=causal)
        given = {"cu_seqlens": torch.tensor(bounds), "is_causal": causal}
        expected = dilated_attention_reference(q, k, v, [8, 16], [1, 2], **given)
        assert torch.equal(out.isnan(), expected.isnan())
        assert out[:, lo:hi].isnan().any()
    assert not whole.isnan().any()
