"""The one tolerance table: the largest error allowed, relative to the largest reference value (at least 1).

float64 and float32 are the library's promise; half precision is judged against the float64 reference
of the same (already rounded) inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "values") -> None:
    """`actual` (computed in `dtype`) equals the float64 `expected`, infinities included."""
    actual = actual.detach().to(torch.float64)
    expected = expected.detach().to(torch.float64)
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite), f"{what}: finite and infinite entries differ"
    assert torch.equal(actual[~finite], expected[~finite]), f"{what}: infinities differ"
    if finite.any():
        error = (actual - expected)[finite].abs().max().item() / max(1.0, expected[finite].abs().max().item())
        assert error < TOLERANCES[dtype], f"{what}: error {error:.3e} in {dtype}"


def assert_same_gradients(
    actual: Tensor, expected: Tensor, leaves: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """A random loss over two equal outputs has the same gradients through either."""
    weight = torch.randn_like(expected)
    got = torch.autograd.grad((actual * weight).sum(), leaves)
    want = torch.autograd.grad((expected * weight).sum(), leaves)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, dtype, "gradient")
