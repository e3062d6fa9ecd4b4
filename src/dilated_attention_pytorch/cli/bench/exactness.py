"""The library against its definition, in float64, forward and gradients: for the demo and the doctor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import functional
from ...reference import dilated_attention_reference
from . import gate

TOLERANCE = gate.TOLERANCES["float64"]
LENGTH, HEADS, HEAD_DIM = 151, 4, 16  # a prime length: no segment fits evenly

_THREE: dict[str, Any] = {"segment_lengths": (16, 32, 64), "dilation_rates": (1, 2, 4)}
_TORCHSCALE = {"head_offsets": "blocked", "tail": "phantom", "detach_mixing": True}
_LAST_20_HIDDEN = torch.arange(LENGTH)[None] < LENGTH - 20
CONFIGURATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("three branches", _THREE),
    ("three branches, causal", {**_THREE, "is_causal": True}),
    ("grouped-query heads", {**_THREE, "is_causal": True, "num_kv_heads": 2}),
    ("uneven branches, gaps", {"segment_lengths": (23, 50), "dilation_rates": (3, 7)}),
    ("padding mask", {**_THREE, "key_mask": _LAST_20_HIDDEN}),
    ("packed documents", {**_THREE, "cu_seqlens": torch.tensor([0, 40, 97, LENGTH])}),
    ("a head group a branch", {**_THREE, "head_mixing": "grouped"}),
    ("as torchscale computes", {**_THREE, **_TORCHSCALE}),
)


@dataclass(frozen=True)
class Check:
    """The largest differences of a configuration from its oracle."""

    title: str
    forward_error: float
    gradient_error: float
    tolerance: float = TOLERANCE

    @property
    def passed(self) -> bool:
        return self.forward_error <= self.tolerance and self.gradient_error <= self.tolerance


def run_checks() -> Iterator[Check]:
    """One configuration after the other, the last one against PyTorch's own dense attention."""
    for title, options in CONFIGURATIONS:
        yield check_configuration(title, options)
    whole = {"segment_lengths": (LENGTH,), "dilation_rates": (1,), "is_causal": True}
    yield check_configuration("one segment is dense", whole, _dense)


def check_configuration(title: str, options: dict[str, Any], reference: Any = None) -> Check:
    """Dilated attention with these options against a reference, by default the definition with the same."""
    given = {name: value for name, value in options.items() if name != "num_kv_heads"}
    kv_heads = options.get("num_kv_heads", HEADS)
    generator = torch.Generator().manual_seed(0)
    *inputs, grad_out = (
        torch.randn(1, LENGTH, h, HEAD_DIM, dtype=torch.float64, generator=generator)
        for h in (HEADS, kv_heads, kv_heads, HEADS)
    )
    attend = partial(functional.dilated_attention, **given)
    reference = reference or partial(dilated_attention_reference, **given)
    forward, *gradients = gate.compare(attend, reference, inputs, grad_out)
    errors = (forward, max(gradients))
    return Check(title, *(math.nan if error == math.inf else error for error in errors))  # of lost numbers


def _dense(*tensors: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in tensors)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
