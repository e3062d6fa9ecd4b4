"""Engine against reference: forward, lse and all gradients, over random configurations."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import given, settings

from dilated_attention_pytorch import dilated_attention
from dilated_attention_pytorch.reference import dilated_attention_reference
from support.configurations import Configuration, configurations
from support.exactness import check_call


def check_against_reference(config: Configuration, dtype: torch.dtype, kernel: str = "auto") -> None:
    branches = {"segment_lengths": config.segment_lengths, "dilation_rates": config.dilation_rates}
    check_call(
        config,
        dtype,
        partial(dilated_attention, **branches),
        partial(dilated_attention_reference, **branches),
        saves_output=not config.detach_mixing,
        workspace_bytes=config.workspace_bytes,
        memory=config.memory,
        kernel=kernel,
        steps=config.steps,
    )


@settings(max_examples=300)
@given(configurations())
def test_float64(config: Configuration) -> None:
    check_against_reference(config, torch.float64)


@settings(max_examples=300)
@given(configurations())
def test_float32(config: Configuration) -> None:
    check_against_reference(config, torch.float32)


@settings(max_examples=80)
@given(configurations(max_n=200))
def test_bfloat16(config: Configuration) -> None:
    check_against_reference(config, torch.bfloat16)


@settings(max_examples=80)
@given(configurations(max_n=200))
def test_float16(config: Configuration) -> None:
    check_against_reference(config, torch.float16)


def test_float16_with_one_feature_a_head() -> None:
    config = Configuration(
        b=1,
        n=144,
        h=10,
        h_kv=5,
        d=1,
        branches=((105, 10), (90, 12), (65, 3), (137, 12), (121, 1)),
        is_causal=True,
        head_mixing="all",
        head_offsets="interleaved",
        tail="exact",
        detach_mixing=False,
        scale=None,
        masked=True,
        docs=None,
        layout="strided_features",
        workspace_bytes=2**25,
        memory="fresh",
        seed=33831,
    )
    check_against_reference(config, torch.float16)


@settings(max_examples=80)
@given(configurations(max_n=200))
def test_eager_kernel(config: Configuration) -> None:
    check_against_reference(config, torch.float64, kernel="eager")
