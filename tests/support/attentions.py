"""The functions of attention, dilated and over block patterns, as one: for what they all promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import BlockPattern, block_sparse_attention
from dilated_attention_pytorch.reference import multiplicity

from .executions import dilated, packed
from .tolerances import assert_close

N = 75
BRANCHES: dict[str, Any] = {"segment_lengths": (8, 14, 40), "dilation_rates": (1, 2, 5)}
CAUSAL = pytest.mark.parametrize("causal", [False, True])


def qkv(n: int = N, h: int = 4, h_kv: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, n, heads, 8, dtype=dtype) for heads in (h, h_kv, h_kv)]


def random_pattern(n: int = N, size: int = 8, layouts: int = 1, density: float = 0.4) -> BlockPattern:
    blocks, rng = -(-n // size), torch.Generator().manual_seed(n + layouts)
    return BlockPattern.from_layout(torch.rand(layouts, blocks, blocks, generator=rng) < density, n, size)


class Kind(NamedTuple):
    """A function of four heads, two batches and any length; `layouts` of its pattern, 0 if dilated."""

    layouts: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if not self.layouts:
            return dilated(q, k, v, **BRANCHES, **options)
        return block_sparse_attention(q, k, v, self.pattern(q.shape[1]), **packed(options))

    def pattern(self, n: int) -> BlockPattern:
        return random_pattern(n, layouts=self.layouts)

    def seen(self, causal: bool) -> Tensor:
        """(n, n): which keys a query of batch 1 and head 3 sees."""
        if not self.layouts:
            return multiplicity(N, 4, **BRANCHES, is_causal=causal)[3] > 0
        seen = self.pattern(N).to_dense()[self.layouts - 1]
        return seen.tril() if causal else seen


KINDS = {"dilated": Kind(0), "one layout": Kind(1), "layouts of heads": Kind(4), "of batches": Kind(8)}
EVERY = pytest.mark.parametrize("attend", KINDS.values(), ids=list(KINDS))
EACH = pytest.mark.parametrize("attend", [Kind(0), Kind(4)], ids=["dilated", "blocks"])


def with_gradients(attend: Callable[..., Any], tensors: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attend(*leaves, return_lse=True, **options)
    loss = out.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sin().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def assert_all_close(results: list[list[Tensor]], dtype: torch.dtype) -> None:
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_close(got, want, dtype)
