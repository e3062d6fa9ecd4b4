"""Random block-sparse calls: every type of pattern, layouts a head or a batch, odd sizes, memory layouts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from hypothesis import strategies as st

from dilated_attention_pytorch import BlockPattern, SparsePatternConfig, build_block_pattern
from dilated_attention_pytorch.spec import HIERARCHIES, PatternType

from .configurations import LAYOUTS, Configuration

BLOCK_SIZES = (1, 2, 3, 5, 8, 16, 31, 32, 64, 100, 128)
KINDS = (*get_args(PatternType), "custom", "custom")
LEVELS = (*HIERARCHIES, ((1, 1.0),), ((3, 0.5),), ((2, 0.3), (5, 0.7)))
RATIOS = st.one_of(st.sampled_from([0.005, 0.1, 0.5, 1.0]), st.floats(0.005, 1.0))


@dataclass(frozen=True, kw_only=True)
class BlockConfiguration(Configuration):
    """One call over a pattern; `config` is what the pattern was built from, None for a random layout."""

    pattern: BlockPattern
    config: SparsePatternConfig | None

    def options(self) -> dict[str, Any]:
        options = super().options()
        return {name: options[name] for name in ("is_causal", "scale", "key_mask")}


@st.composite
def block_configurations(draw: st.DrawFn, max_n: int = 500, tiles: bool = False) -> BlockConfiguration:
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
    call = Configuration(
        b=b,
        n=n,
        h=h,
        h_kv=h_kv,
        d=d,
        branches=tuple(draw(st.lists(segment, min_size=1, max_size=3))),
        is_causal=draw(st.booleans()),
        head_mixing="all",
        head_offsets="interleaved",
        tail="exact",
        detach_mixing=False,
        scale=draw(st.sampled_from([None, None, None, 0.3, -0.5, 0.0])),
        masked=draw(st.sampled_from([False, False, True])),
        docs=None,
        layout=draw(st.sampled_from(LAYOUTS)),
        # From jobs of a single block up to everything at once.
        workspace_bytes=max(least, draw(st.sampled_from([1, 2**10, 2**14, 2**18, 2**23]))),
        memory=draw(st.sampled_from(["fresh", "pool"])),
        seed=draw(st.integers(0, 2**16)),
    )
    kind, ratio = draw(st.sampled_from(KINDS)), draw(RATIOS)
    if kind == "custom":
        layouts, causal = draw(st.sampled_from([1, h, b * h])), draw(st.booleans())
        pattern = custom(call, size, ratio, layouts, tiles and draw(st.booleans()))
        pattern = pattern.causal() if call.is_causal and causal else pattern
        return BlockConfiguration(**asdict(call), pattern=pattern, config=None)
    config = SparsePatternConfig(
        kind,  # type: ignore[arg-type]
        ratio,
        size,
        window_size=draw(st.one_of(st.none(), st.none(), st.integers(size, 5 * size))),
        global_tokens=draw(st.one_of(st.none(), st.none(), st.integers(0, 3 * size))),
        hierarchy=draw(st.sampled_from(LEVELS)),
        seed=call.seed,
    )
    options: dict[str, Any] = {"is_causal": call.is_causal}
    options |= {"segment_lengths": call.segment_lengths, "dilation_rates": call.dilation_rates}
    if kind == "adaptive":
        options |= dict(zip(("query", "key"), call.tensors(torch.float32), strict=False))
    pattern = build_block_pattern(config, n, h, **options)
    return BlockConfiguration(**asdict(call), pattern=pattern, config=config)


def custom(call: Configuration, size: int, ratio: float, layouts: int, tiled: bool) -> BlockPattern:
    """Blocks at random, in some rows none; `tiled`: and pairs at random in some of the blocks."""
    rng = torch.Generator().manual_seed(call.seed)
    blocks = -(-call.n // size)
    layout = torch.rand(layouts, blocks, blocks, generator=rng) < ratio
    layout &= torch.rand(layouts, blocks, 1, generator=rng) < 0.8
    layout = layout[0] if layouts == 1 and call.seed % 2 else layout
    pattern = BlockPattern.from_layout(layout, call.n, size)
    if not tiled:
        return pattern
    shown = torch.tensor([0.1, 0.5, 0.9])[:, None, None]
    tiles = torch.rand(3, size, size, generator=rng) < shown
    tile_of = torch.randint(-1, 3, pattern.columns.shape, generator=rng, dtype=torch.int32)
    return BlockPattern(call.n, size, pattern.starts, pattern.columns, False, tiles, tile_of)
