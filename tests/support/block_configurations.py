"""Random block-sparse calls: every type of pattern, layouts a head or a batch, odd sizes, memory layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import BlockPattern, SparsePatternConfig, build_block_pattern
from dilated_attention_pytorch.spec import HIERARCHIES, PatternType

from .configurations import LAYOUTS, Configuration

BLOCK_SIZES = (1, 2, 3, 5, 8, 16, 31, 32, 64, 100, 128)
KINDS = (*get_args(PatternType), "custom", "custom")
LEVELS = (*HIERARCHIES, ((1, 1.0),), ((3, 0.5),), ((2, 0.3), (5, 0.7)))


@dataclass(frozen=True)
class BlockConfiguration:
    """One call: `tensors` makes its inputs, `pattern` its pattern, `options` the other keywords."""

    b: int
    n: int
    h: int
    h_kv: int
    d: int
    block_size: int
    kind: str
    ratio: float
    window_size: int | None
    global_tokens: int | None
    hierarchy: str | tuple[tuple[int, float], ...]
    branches: tuple[tuple[int, int], ...]
    layouts: int  # of a custom pattern
    is_causal: bool
    causal_pattern: bool  # of a custom pattern under a causal mask
    scale: float | None
    masked: bool
    layout: str
    workspace_bytes: int
    memory: str
    seed: int

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the configuration's memory layout, rounded to `dtype`."""
        return Configuration(
            **{name: getattr(self, name) for name in ("b", "n", "h", "h_kv", "d", "layout", "seed")},
            branches=(),
            is_causal=self.is_causal,
            head_mixing="all",
            head_offsets="interleaved",
            tail="exact",
            detach_mixing=False,
            scale=self.scale,
            masked=self.masked,
            docs=None,
            workspace_bytes=self.workspace_bytes,
            memory=self.memory,
        ).tensors(dtype)

    def pattern(self) -> BlockPattern:
        if self.kind == "custom":
            return self._custom()
        config = SparsePatternConfig(
            self.kind,  # type: ignore[arg-type]
            self.ratio,
            self.block_size,
            self.window_size,
            self.global_tokens,
            self.hierarchy,
            self.seed,
        )
        content = {}
        if self.kind == "adaptive":
            query, key, _ = self.tensors(torch.float32)
            content = {"query": query, "key": key}
        return build_block_pattern(
            config,
            self.n,
            self.h,
            is_causal=self.is_causal,
            segment_lengths=[length for length, _ in self.branches],
            dilation_rates=[rate for _, rate in self.branches],
            **content,
        )

    def _custom(self) -> BlockPattern:
        """Blocks at random, in some rows none."""
        rng = torch.Generator().manual_seed(self.seed)
        blocks = -(-self.n // self.block_size)
        layout = torch.rand(self.layouts, blocks, blocks, generator=rng) < self.ratio
        layout &= torch.rand(self.layouts, blocks, 1, generator=rng) < 0.8
        if self.layouts == 1 and self.seed % 2:
            layout = layout[0]
        causal = self.is_causal and self.causal_pattern
        return BlockPattern.from_layout(layout, self.n, self.block_size, is_causal=causal)

    def options(self) -> dict[str, Any]:
        """What engine and reference take alike."""
        rng = torch.Generator().manual_seed(self.seed + 1)
        return {
            "is_causal": self.is_causal,
            "scale": self.scale,
            "key_mask": torch.rand(self.b, self.n, generator=rng) > 0.4 if self.masked else None,
        }


@st.composite
def block_configurations(draw: st.DrawFn, max_n: int = 500) -> BlockConfiguration:
    size = draw(st.sampled_from(BLOCK_SIZES))
    h_kv, group = draw(st.sampled_from([(a, g) for a in range(1, 13) for g in range(1, 13) if a * g <= 12]))
    b, h = draw(st.integers(1, 3)), h_kv * group
    # Dense scores, rows of blocks and gathered blocks are bounded, or a few configurations take all the time.
    longest = min(max_n, math.isqrt(600_000 // (b * h)), size * max(4, 200 // (b * h)))
    n = draw(st.one_of(st.integers(1, min(longest, 5 * size)), st.integers(1, longest)))
    d = draw(st.sampled_from([1, 3, 8, 16]))
    pairs = b * h * (n // size + 1) ** 2
    least = 1 if pairs <= 100 else 32 * size * d * pairs // 100
    segment = st.tuples(st.integers(size, max(size, n + n // 4)), st.integers(1, 6)).map(
        lambda pair: (pair[0], min(pair))
    )
    return BlockConfiguration(
        b=b,
        n=n,
        h=h,
        h_kv=h_kv,
        d=d,
        block_size=size,
        kind=draw(st.sampled_from(KINDS)),
        ratio=draw(st.one_of(st.sampled_from([0.005, 0.1, 0.5, 1.0]), st.floats(0.005, 1.0))),
        window_size=draw(st.one_of(st.none(), st.none(), st.integers(size, 5 * size))),
        global_tokens=draw(st.one_of(st.none(), st.none(), st.integers(0, 3 * size))),
        hierarchy=draw(st.sampled_from(LEVELS)),
        branches=tuple(draw(st.lists(segment, min_size=1, max_size=3))),
        layouts=draw(st.sampled_from([1, h, b * h])),
        is_causal=draw(st.booleans()),
        causal_pattern=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, None, 0.3, -0.5, 0.0])),
        masked=draw(st.sampled_from([False, False, True])),
        layout=draw(st.sampled_from(LAYOUTS)),
        # From panels of a single block up to everything at once.
        workspace_bytes=max(least, draw(st.sampled_from([1, 2**10, 2**14, 2**18, 2**23]))),
        memory=draw(st.sampled_from(["fresh", "pool"])),
        seed=draw(st.integers(0, 2**16)),
    )
