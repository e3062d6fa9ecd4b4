"""Random attention calls: every option of `dilated_attention`, over odd sizes and memory layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import DilatedSpec
from dilated_attention_pytorch.plan import Shape

LAYOUTS = ("bnhd", "bhnd", "fused", "time_slice", "strided_features", "expanded_batch")


@dataclass(frozen=True)
class Configuration:
    """One call; `tensors` makes its inputs and `options` its keywords for engine and reference alike."""

    b: int
    n: int
    h: int
    h_kv: int
    d: int
    branches: tuple[tuple[int, int], ...]
    is_causal: bool
    head_mixing: str
    head_offsets: str
    tail: str
    detach_mixing: bool
    scale: float | None
    masked: bool
    docs: tuple[int, ...] | None
    layout: str
    workspace_bytes: int
    memory: str
    seed: int
    steps: int = 1

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        return tuple(w for w, _ in self.branches)

    @property
    def dilation_rates(self) -> tuple[int, ...]:
        return tuple(r for _, r in self.branches)

    @property
    def spec(self) -> DilatedSpec:
        """Without scale and dropout."""
        mixing: Any = (self.head_mixing, self.head_offsets, self.tail, self.detach_mixing)
        return DilatedSpec(self.segment_lengths, self.dilation_rates, self.is_causal, None, 0.0, *mixing)

    @property
    def shape(self) -> Shape:
        return Shape(self.b, self.n, self.h, self.h_kv, self.d)

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the configuration's layout, rounded to `dtype`."""
        rng = torch.Generator().manual_seed(self.seed)
        if self.layout == "fused" and self.h == self.h_kv:
            fused = torch.randn(self.b, self.n, 3, self.h, self.d, generator=rng, dtype=torch.float64).to(
                dtype
            )
            q, k, v = fused.unbind(2)
            return q, k, v
        q, k, v = (self._tensor(heads, rng, dtype) for heads in (self.h, self.h_kv, self.h_kv))
        return q, k, v

    def _tensor(self, heads: int, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
        b, n, d = self.b, self.n, self.d

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

        match self.layout:
            case "bhnd":
                return randn(b, heads, n, d).transpose(1, 2)
            case "time_slice":
                return randn(b, n + 3, heads, d)[:, 2:-1]
            case "strided_features":
                return randn(b, n, heads, 2 * d)[..., ::2]
            case "expanded_batch":
                return randn(1, n, heads, d).expand(b, -1, -1, -1)
            case _:
                return randn(b, n, heads, d)

    def options(self) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(self.seed + 1)
        hidden = (0.4, 0.96)[self.seed % 2]  # the share of the keys
        return {
            "is_causal": self.is_causal,
            "head_mixing": self.head_mixing,
            "head_offsets": self.head_offsets,
            "tail": self.tail,
            "detach_mixing": self.detach_mixing,
            "scale": self.scale,
            "key_mask": torch.rand(self.b, self.n, generator=rng) > hidden if self.masked else None,
            "cu_seqlens": None if self.docs is None else torch.tensor(self.docs, dtype=torch.int32),
        }


def segment_and_rate(longest: int, largest_rate: int) -> st.SearchStrategy[tuple[int, int]]:
    """(segment length, dilation rate), the rate no larger than its segment."""
    pairs = st.tuples(st.integers(1, longest), st.integers(1, largest_rate))
    return pairs.map(lambda pair: (pair[0], min(pair)))


@st.composite
def configurations(draw: st.DrawFn, max_n: int = 600) -> Configuration:
    n = draw(st.one_of(st.integers(1, 64), st.integers(1, max_n)))
    h_kv, group = draw(st.sampled_from([(a, g) for a in range(1, 13) for g in range(1, 13) if a * g <= 12]))
    packed = draw(st.integers(0, 3)) == 0
    cuts = draw(st.lists(st.integers(0, n), max_size=4)) if packed else []
    d = draw(st.sampled_from([1, 3, 8, 40, 64]))
    branch = segment_and_rate(max(2, n + n // 4), 16)
    return Configuration(
        b=1 if packed else draw(st.integers(1, 3)),
        n=n,
        h=h_kv * group,
        h_kv=h_kv,
        d=d,
        branches=tuple(draw(st.lists(branch, min_size=1, max_size=5))),
        is_causal=draw(st.booleans()),
        head_mixing=draw(st.sampled_from(["all", "all", "grouped"])),
        head_offsets=draw(st.sampled_from(["interleaved", "blocked"])),
        tail=draw(st.sampled_from(["exact", "exact", "phantom"])),
        detach_mixing=draw(st.sampled_from([False, False, True])),
        scale=draw(st.sampled_from([None, None, None, 0.3, -0.5, 0.0])),
        masked=draw(st.sampled_from([False, False, True])),
        docs=(0, *sorted(cuts), n) if packed else None,
        layout=draw(st.sampled_from(LAYOUTS)),
        # From tiles of a few rows of one head up to everything at once.
        workspace_bytes=draw(st.sampled_from([16 * group * d * max(8, n // 8), 64 * group * d * n, 2**25])),
        memory=draw(st.sampled_from(["fresh", "pool", "lightweight"])),
        seed=draw(st.integers(0, 2**16)),
        steps=draw(st.sampled_from([1, 2, 5])),
    )
