"""Engine against reference: forward, lse and all gradients, over random configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from torch import Tensor

from dilated_attention_pytorch import dilated_attention
from dilated_attention_pytorch.reference import dilated_attention_reference
from support.configurations import Configuration, configurations
from support.tolerances import assert_close


def check_against_reference(config: Configuration, dtype: torch.dtype, kernel: str = "auto") -> None:
    """Compares out, lse, dq, dk and dv with the float64 reference of the same inputs."""
    branches = (config.segment_lengths, config.dilation_rates)
    rng = torch.Generator().manual_seed(config.seed + 2)
    grad_out = torch.randn(config.b, config.n, config.h, config.d, generator=rng, dtype=torch.float64).to(
        dtype
    )
    grad_lse = torch.randn(config.b, config.h, config.n, generator=rng, dtype=torch.float64)
    if config.seed % 2:  # most callers never touch lse: its gradient then is absent, not zero
        grad_lse.zero_()

    def run(
        attention: Callable[..., tuple[Tensor, Tensor]],
        tensors: tuple[Tensor, ...],
        weight_lse: Callable[[Tensor], Tensor],
        **options: Any,
    ) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = attention(*leaves, *branches, return_lse=True, **config.options(), **options)
        loss, weight = (out * grad_out.to(out.dtype)).sum(), weight_lse(out.detach())
        if weight.any():
            loss = loss + torch.where(lse.isfinite(), lse, 0.0).mul(weight.to(lse.dtype)).sum()
        return [out, lse, *torch.autograd.grad(loss, leaves)]

    def after_rounding(out: Tensor) -> Tensor:
        """The weight of lse that makes an exact backward one that starts from the output as it was saved.

        Backward has dS = P * (dP - rowsum(grad_out * out) + grad_lse) of `out` in the dtype of q. That
        rounding is the dtype's, not the engine's, and dominates where a head has few features.
        """
        if dtype.itemsize > 2 or config.detach_mixing:
            return grad_lse
        lost = out - actual[0].detach().to(out.dtype)
        return grad_lse + (lost * grad_out.to(out.dtype)).sum(-1).transpose(1, 2)

    tensors = config.tensors(dtype)
    execution = {"workspace_bytes": config.workspace_bytes, "memory": config.memory}
    actual = run(dilated_attention, tensors, lambda _: grad_lse, kernel=kernel, **execution)
    doubles = tuple(x.to(torch.float64) for x in tensors)
    expected = run(dilated_attention_reference, doubles, after_rounding)
    assert actual[0].dtype == dtype
    assert actual[0].is_contiguous()
    assert actual[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        assert_close(got, want, dtype, name)


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
