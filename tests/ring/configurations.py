"""The calls that ranks must compute like one process: named, by world, dilated and block-sparse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import BlockPattern, build_block_pattern


@dataclass(frozen=True)
class Inputs:
    """What the tensors of a call look like; the ranks hold `shards` tokens of them."""

    name: str
    shards: tuple[int, ...]
    b: int = 1
    h: int = 2
    h_kv: int = 2
    d: int = 4
    dtype: torch.dtype = torch.float64
    hidden: str = ""  # keys that key_mask hides: "some", "a row" of the batch, "a shard", "all"
    layout: str = "bnhd"
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # of the call, on one process and on many
    execution: dict[str, Any] = field(default_factory=dict)  # of the call on many ranks only
    has_lse_gradient: bool = True

    @property
    def n(self) -> int:
        return sum(self.shards)

    @property
    def is_causal(self) -> bool:
        return bool(self.options.get("is_causal", False))

    def bounds(self, rank: int) -> tuple[int, int]:
        return sum(self.shards[:rank]), sum(self.shards[: rank + 1])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the whole sequence, the same on every rank."""
        rng, heads = torch.Generator().manual_seed(self.seed), (self.h, self.h_kv, self.h_kv)
        shapes = [(self.b, self.n, number, self.d) for number in heads]
        q, k, v = (torch.randn(x, generator=rng, dtype=torch.float64).to(self.dtype) for x in shapes)
        return q, k, v

    def shard(self, x: Tensor, rank: int) -> Tensor:
        """The rank's positions of a tensor (b, n, h, d), in the memory layout of the configuration."""
        low, high = self.bounds(rank)
        x = x[:, low:high].detach()
        if self.layout == "bhnd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.stack([x, x.neg()], -1).flatten(-2)[..., ::2] if self.layout == "strided" else x.clone()

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of out (b, n, h, d) and of lse (b, h, n)."""
        rng = torch.Generator().manual_seed(self.seed + 1)
        grad_out = torch.randn(self.b, self.n, self.h, self.d, generator=rng, dtype=torch.float64)
        grad_lse = torch.randn(self.b, self.h, self.n, generator=rng, dtype=torch.float64)
        return grad_out.to(self.dtype), grad_lse * self.has_lse_gradient

    def key_mask(self) -> Tensor | None:
        """(b, n) bool, or none."""
        if not self.hidden:
            return None
        rng = torch.Generator().manual_seed(self.seed + 2)
        mask, everything = torch.rand(self.b, self.n, generator=rng) > 0.4, slice(None)
        shard = everything, slice(*self.bounds(len(self.shards) // 2))
        where = {"some": slice(0), "a row": slice(-1, None), "a shard": shard, "all": everything}
        mask[where[self.hidden]] = False
        return mask


@dataclass(frozen=True)
class Dilated(Inputs):
    """A call of `dilated_attention`, and of `ring_dilated_attention` with `strategy`."""

    branches: tuple[tuple[int, int], ...] = ((8, 1),)
    strategy: str = "ring"
    docs: tuple[int, ...] | None = None

    @property
    def lists(self) -> tuple[tuple[int, ...], ...]:
        """Segment lengths and dilation rates."""
        return tuple(zip(*self.branches, strict=True))

    def cu_seqlens(self) -> Tensor | None:
        return None if self.docs is None else torch.tensor(self.docs, dtype=torch.int32)


@dataclass(frozen=True)
class Blocks(Inputs):
    """A call of `block_sparse_attention`, and of `ring_block_sparse_attention`."""

    pattern: Callable[[Blocks], BlockPattern] | None = None


DOUBLE, FLOAT, BF16, HALF = torch.float64, torch.float32, torch.bfloat16, torch.float16
CAUSAL = {"is_causal": True}
PHANTOM = {"tail": "phantom"}
DETACHED = {"detach_mixing": True}
BLOCKED = {"head_offsets": "blocked"}
GQA = {"h": 6, "h_kv": 2}
NESTED = ((8, 1), (16, 2), (32, 4))
SPANNING = ((16, 1), (40, 2), (96, 3))
SMALL = {"workspace_bytes": 2_000}  # jobs of a few rows


def dilated(
    name: str, shards: tuple[int, ...], branches: tuple[tuple[int, int], ...], **settings: Any
) -> Dilated:
    settings.setdefault("seed", sum(map(ord, name)))
    return Dilated(name=name, shards=shards, branches=branches, **settings)


DILATED = (
    # One rank.
    dilated("one rank", (40,), NESTED),
    dilated("one rank causal gqa", (37,), SPANNING, **GQA, options=CAUSAL),
    dilated("one rank ulysses", (40,), NESTED, strategy="ulysses"),
    dilated("one rank float32", (65,), SPANNING, dtype=FLOAT, strategy="auto", b=2),
    dilated("one rank bfloat16", (65,), SPANNING, dtype=BF16, d=16, options=CAUSAL),
    dilated("one rank one token", (1,), NESTED),
    dilated("one rank masked in steps", (50,), SPANNING, hidden="some", execution={"steps": 3}),
    dilated("one rank detached mixing", (40,), NESTED, strategy="ring", options=DETACHED),
    # Two ranks: where segments lie.
    dilated("segments below the shard", (32, 32), ((8, 1), (16, 2))),
    dilated("segments equal the shard", (32, 32), ((32, 1), (32, 2))),
    dilated("segments above the shard", (32, 32), ((64, 1), (64, 2))),
    dilated("segments not aligned", (32, 32), ((24, 1), (40, 2))),
    dilated("segments not aligned causal", (32, 32), ((24, 1), (40, 2)), options=CAUSAL),
    dilated("segments longer than the sequence", (20, 20), ((1000, 1), (2000, 3))),
    dilated("rates not nested", (30, 30), ((12, 2), (60, 3)), h=6, h_kv=6),
    dilated("rates not nested causal", (30, 30), ((12, 2), (60, 3)), h=6, h_kv=3, options=CAUSAL),
    dilated("rate above the shard", (6, 6), ((12, 8), (5, 1)), h=9, h_kv=9),
    dilated("rate equal to the segment", (20, 21), ((9, 9), (41, 13)), h=4, h_kv=4),
    dilated("rate without a head's offset", (20, 20), ((40, 7),), h=2, h_kv=2),
    dilated("many branches", (33, 32), ((3, 1), (7, 2), (13, 3), (29, 5), (65, 4))),
    dilated("a branch twice", (24, 24), ((32, 2), (32, 2), (16, 1))),
    # Two ranks: shards.
    dilated("not divisible", (32, 31), NESTED, execution={"shard_lengths": (32, 31)}),
    dilated("unequal shards", (9, 48), SPANNING, options=CAUSAL),
    dilated("first rank without a token", (0, 40), SPANNING),
    dilated("last rank without a token", (40, 0), SPANNING, options=CAUSAL),
    dilated("one token on two ranks", (1, 0), NESTED),
    dilated("one token each", (1, 1), ((2, 1),), options=CAUSAL),
    # Two ranks: options.
    dilated("gqa", (30, 34), SPANNING, **GQA),
    dilated("gqa of one key head", (30, 34), SPANNING, h=5, h_kv=1, options=CAUSAL),
    dilated("batch of two", (30, 34), SPANNING, b=2, options=CAUSAL),
    dilated("empty batch", (30, 34), SPANNING, b=0),
    dilated("masked", (30, 34), SPANNING, b=2, hidden="some"),
    dilated("masked causal gqa", (30, 34), SPANNING, b=2, **GQA, hidden="some", options=CAUSAL),
    dilated("a hidden row", (30, 34), SPANNING, b=2, hidden="a row"),
    dilated("a hidden shard", (30, 34), SPANNING, hidden="a shard"),
    dilated("everything hidden", (30, 34), SPANNING, hidden="all"),
    dilated("documents", (30, 34), ((8, 1), (24, 2)), docs=(0, 11, 11, 37, 64)),
    dilated("documents causal masked", (30, 34), SPANNING, docs=(0, 45, 64), hidden="some", options=CAUSAL),
    dilated("grouped heads", (30, 34), SPANNING, h=7, h_kv=7, options={"head_mixing": "grouped"}),
    dilated("grouped heads gqa", (30, 34), SPANNING, **GQA, options={"head_mixing": "grouped", **CAUSAL}),
    dilated("fewer heads than branches", (30, 34), SPANNING, h=2, options={"head_mixing": "grouped"}),
    dilated("blocked offsets", (30, 34), SPANNING, h=6, h_kv=6, options=BLOCKED),
    dilated("phantom tail", (30, 31), SPANNING, options=PHANTOM),
    dilated("phantom tail documents", (30, 31), SPANNING, docs=(0, 40, 61), options=PHANTOM),
    dilated("scale", (30, 34), SPANNING, options={"scale": 0.3}),
    dilated("negative scale", (30, 34), SPANNING, options={"scale": -0.5}),
    dilated("no gradient of lse", (30, 34), SPANNING, has_lse_gradient=False),
    # Two ranks: how it runs.
    dilated("steps", (64, 60), SPANNING, execution={"steps": 4}),
    dilated("more steps than keys", (5, 6), ((11, 2),), execution={"steps": 16}, options=CAUSAL),
    dilated("small workspace", (64, 60), SPANNING, h=4, h_kv=4, execution=SMALL, options=CAUSAL),
    dilated("small workspace gqa masked", (64, 60), SPANNING, **GQA, execution=SMALL, hidden="some", b=2),
    dilated("eager kernel", (30, 34), SPANNING, execution={"kernel": "eager"}, options=CAUSAL),
    dilated("pool", (30, 34), SPANNING, execution={"memory": "pool"}, **GQA),
    dilated("no cache", (30, 34), SPANNING, execution={"use_pattern_cache": False}),
    dilated("heads before time", (30, 34), SPANNING, layout="bhnd", b=2, options=CAUSAL),
    dilated("strided features", (30, 34), SPANNING, layout="strided"),
    dilated("one feature", (30, 34), SPANNING, d=1),
    dilated("large head", (64, 64), ((64, 1), (128, 2)), d=64, dtype=FLOAT, options=CAUSAL),
    dilated("auto", (30, 34), SPANNING, strategy="auto", h=4, h_kv=4),
    dilated("ulysses", (30, 34), SPANNING, strategy="ulysses", h=4, h_kv=4),
    dilated("ulysses gqa causal", (34, 30), SPANNING, strategy="ulysses", **GQA, options=CAUSAL),
    dilated("ulysses masked", (30, 34), SPANNING, strategy="ulysses", b=2, hidden="some"),
    dilated("ulysses documents", (30, 34), SPANNING, strategy="ulysses", docs=(0, 20, 64)),
    dilated("ulysses blocked grouped", (30, 34), SPANNING, strategy="ulysses", h=8, h_kv=4,
            options={**BLOCKED, "head_mixing": "grouped"}),
    dilated("detached mixing", (30, 34), SPANNING, strategy="auto", options=DETACHED),
    dilated("detached mixing phantom", (34, 30), SPANNING, strategy="ulysses", options=DETACHED | PHANTOM),
    dilated("float32", (60, 64), SPANNING, dtype=FLOAT, d=16, b=2),
    dilated("float32 causal gqa", (60, 64), SPANNING, dtype=FLOAT, d=16, **GQA, options=CAUSAL),
    dilated("float32 ulysses", (60, 64), SPANNING, dtype=FLOAT, d=16, strategy="ulysses"),
    dilated("bfloat16", (60, 64), SPANNING, dtype=BF16, d=16),
    dilated("bfloat16 causal gqa masked", (60, 64), SPANNING, dtype=BF16, d=16, **GQA, hidden="some"),
    dilated("bfloat16 ulysses", (60, 64), SPANNING, dtype=BF16, d=16, strategy="ulysses", options=CAUSAL),
    dilated("float16", (60, 64), SPANNING, dtype=HALF, d=16, options=CAUSAL, execution=SMALL),
    # Three ranks.
    dilated("three: nested", (32, 32, 32), NESTED),
    dilated("three: spanning causal", (22, 21, 21), SPANNING, options=CAUSAL),
    dilated("three: a segment over two of them", (20, 20, 20), ((40, 1), (15, 2)), options=CAUSAL),
    dilated("three: nobody in the middle", (20, 0, 21), SPANNING, **GQA),
    dilated("three: unequal masked", (3, 40, 14), SPANNING, b=2, hidden="a shard", options=CAUSAL),
    dilated("three: ulysses", (20, 15, 25), SPANNING, strategy="ulysses", h=6, h_kv=3),
    dilated("three: auto", (20, 15, 25), SPANNING, strategy="auto", h=4, h_kv=2),
    dilated("three: steps in a small workspace", (50, 50, 49), SPANNING, execution={"steps": 3, **SMALL}),
    dilated("three: float32", (50, 50, 49), SPANNING, dtype=FLOAT, d=16, options=CAUSAL),
    dilated("three: documents", (20, 20, 20), ((7, 1), (30, 2)), docs=(0, 33, 60), options=CAUSAL),
    dilated("three: one token", (0, 1, 0), NESTED),
    dilated("three: fits", (32, 32, 32), ((16, 1), (32, 2), (8, 3))),
    dilated("three: fits causal gqa", (48, 24, 24), ((8, 1), (24, 2)), **GQA, options=CAUSAL),
    dilated("three: fits auto", (32, 32, 32), ((16, 1), (32, 2)), strategy="auto"),
    dilated("three: fits documents", (20, 20, 20), ((99, 1),), docs=(0, 7, 20, 40, 60), strategy="auto"),
    # Four ranks.
    dilated("four: nested", (16, 16, 16, 16), NESTED, options=CAUSAL),
    dilated("four: spanning", (16, 16, 16, 15), SPANNING, h=4, h_kv=4, b=2),
    dilated("four: rates 2 and 3 gqa", (15, 15, 15, 15), ((30, 2), (45, 3)), h=12, h_kv=4),
    dilated("four: two without a token", (0, 33, 0, 30), SPANNING, options=CAUSAL, hidden="some"),
    dilated("four: ulysses", (17, 16, 16, 16), SPANNING, strategy="ulysses", h=8, h_kv=4, options=CAUSAL),
    dilated("four: detached", (16, 16, 16, 16), NESTED, strategy="auto", h=4, h_kv=4, options=DETACHED),
    dilated("four: blocked phantom", (16, 16, 16, 13), SPANNING, h=6, h_kv=6, options=BLOCKED | PHANTOM),
    dilated("four: bfloat16", (32, 32, 32, 30), SPANNING, dtype=BF16, d=16, **GQA, options=CAUSAL),
    dilated("four: float32 steps", (32, 32, 32, 30), SPANNING, dtype=FLOAT, d=16, execution={"steps": 2}),
    # Eight ranks.
    dilated("eight: one segment over all", (9, 9, 9, 9, 9, 9, 9, 9), ((72, 1), (72, 2))),
    dilated("eight: nested causal", (8, 8, 8, 8, 8, 8, 8, 8), NESTED, options=CAUSAL, **GQA),
    dilated("eight: odd length", (9, 9, 9, 9, 9, 9, 9, 8), SPANNING, b=2, hidden="some"),
    dilated("eight: fewer tokens than ranks", (1, 1, 1, 1, 1, 0, 0, 0), ((5, 1), (3, 2)), options=CAUSAL),
    dilated("eight: uneven", (30, 1, 0, 7, 12, 3, 0, 11), SPANNING, h=3, h_kv=3, options=CAUSAL),
    dilated("eight: ulysses", (9, 9, 9, 9, 9, 9, 9, 8), SPANNING, strategy="ulysses", h=8, h_kv=8),
    dilated("eight: float32", (20, 20, 20, 20, 20, 20, 20, 19), SPANNING, dtype=FLOAT, d=16, options=CAUSAL),
    dilated("eight: bfloat16", (20, 20, 20, 20, 20, 20, 20, 19), SPANNING, dtype=BF16, d=16),
    dilated("eight: auto", (9, 9, 9, 9, 9, 9, 9, 8), NESTED, strategy="auto", h=8, h_kv=8),
)  # fmt: skip


def built(
    kind: str, block_size: int, ratio: float = 0.3, **settings: Any
) -> Callable[[Blocks], BlockPattern]:
    """A pattern of the library's own types."""

    def build(config: Blocks) -> BlockPattern:
        fields = {"pattern_type": kind, "block_size": block_size, "sparsity_ratio": ratio, **settings}
        segments = {"segment_lengths": (16, 48), "dilation_rates": (1, 2)} if kind == "dilated_sparse" else {}
        return build_block_pattern(fields, config.n, config.h, is_causal=config.is_causal, **segments)

    return build


def drawn(
    block_size: int, layouts: str = "one", density: float = 0.4, causal: bool = False
) -> Callable[[Blocks], BlockPattern]:
    """Blocks at random, in some rows none; `layouts`: "one", "head" or "batch" for each batch and head."""

    def build(config: Blocks) -> BlockPattern:
        rng = torch.Generator().manual_seed(config.seed)
        number = {"one": 1, "head": config.h, "batch": config.b * config.h}[layouts]
        blocks = -(-config.n // block_size)
        layout = torch.rand(number, blocks, blocks, generator=rng) < density
        layout &= torch.rand(number, blocks, 1, generator=rng) < 0.8
        return BlockPattern.from_layout(layout, config.n, block_size, is_causal=causal)

    return build


def diagonal(config: Blocks) -> BlockPattern:
    return BlockPattern.from_layout(torch.eye(-(-config.n // 8), dtype=torch.bool), config.n, 8)


def blocks(
    name: str, shards: tuple[int, ...], pattern: Callable[[Blocks], BlockPattern], **settings: Any
) -> Blocks:
    settings.setdefault("seed", sum(map(ord, name)))
    return Blocks(name=f"blocks: {name}", shards=shards, pattern=pattern, **settings)


BLOCKS = (
    blocks("one rank", (50,), built("local_window", 8)),
    blocks("one rank random causal", (50,), built("random", 8), options=CAUSAL, **GQA),
    blocks("window", (32, 32), built("local_window", 8)),
    blocks("window causal", (32, 32), built("local_window", 8), options=CAUSAL),
    blocks("window across an odd boundary", (29, 35), built("local_window", 8), options=CAUSAL, b=2),
    blocks("dilated", (32, 32), built("dilated_sparse", 8)),
    blocks("dilated causal gqa", (30, 33), built("dilated_sparse", 5), options=CAUSAL, **GQA),
    blocks("global", (32, 33), built("global_local", 8)),
    blocks("global causal", (33, 32), built("global_local", 7), options=CAUSAL),
    blocks("strided", (32, 32), built("strided", 8)),
    blocks("random, a layout a head", (30, 34), built("random", 8), h=4, h_kv=4),
    blocks("random gqa causal", (30, 34), built("random", 8), **GQA, options=CAUSAL),
    blocks("hierarchical", (60, 64), built("hierarchical", 4)),
    blocks("custom", (30, 34), drawn(6)),
    blocks("custom under a causal mask", (30, 34), drawn(6), options=CAUSAL),
    blocks("custom causal", (30, 34), drawn(6, causal=True), options=CAUSAL),
    blocks("custom a head, gqa", (30, 34), drawn(7, "head"), **GQA),
    blocks("custom for batches and heads", (30, 34), drawn(7, "batch"), b=2, h=4, h_kv=2),
    blocks("custom for batches and heads causal", (30, 34), drawn(7, "batch"), b=3, options=CAUSAL),
    blocks("masked", (30, 34), drawn(6), b=2, hidden="some"),
    blocks("masked causal gqa", (30, 34), drawn(6, "head"), b=2, **GQA, hidden="some", options=CAUSAL),
    blocks("a hidden row", (30, 34), drawn(6), b=2, hidden="a row"),
    blocks("no block", (20, 20), drawn(8, density=0.0)),
    blocks("diagonal", (20, 20), diagonal, options=CAUSAL),
    blocks("a rank without a token", (0, 50), drawn(6), options=CAUSAL),
    blocks("one token", (1, 0), drawn(6, density=1.0)),
    blocks("a block over everything", (10, 12), drawn(64, density=1.0), options=CAUSAL),
    blocks("blocks of one token", (10, 12), drawn(1)),
    blocks("steps", (30, 34), drawn(6), execution={"steps": 3}, options=CAUSAL),
    blocks("small workspace", (60, 64), drawn(6, "head"), execution=SMALL, **GQA),
    blocks("scale", (30, 34), drawn(6), options={"scale": 0.3}),
    blocks("float32", (60, 64), built("global_local", 16), dtype=FLOAT, d=16, options=CAUSAL),
    blocks("bfloat16", (60, 64), built("random", 16, 0.5), dtype=BF16, d=16, **GQA),
    blocks("three: custom", (20, 21, 22), drawn(6), execution={"shard_lengths": (20, 21, 22)}),
    blocks("three: nobody in the middle", (20, 0, 22), drawn(6), b=2, hidden="some"),
    blocks("four: dilated", (16, 16, 16, 16), built("dilated_sparse", 8), options=CAUSAL),
    blocks("four: random", (17, 16, 3, 20), built("random", 5), **GQA),
    blocks("four: float32", (40, 40, 40, 39), drawn(16, "head"), dtype=FLOAT, d=16),
    blocks("eight: window", (9, 9, 9, 9, 9, 9, 9, 8), built("local_window", 4), options=CAUSAL),
    blocks("eight: global", (9, 9, 9, 9, 9, 9, 9, 8), built("global_local", 6), **GQA),
    blocks("eight: blocks above the shard", (9, 9, 9, 9, 9, 9, 9, 8), drawn(20, "batch", 0.6), b=2),
)  # fmt: skip

CONFIGURATIONS: dict[str, Inputs] = {config.name: config for config in (*DILATED, *BLOCKS)}
assert len(CONFIGURATIONS) == len(DILATED) + len(BLOCKS)  # no name twice
WORLDS = (1, 2, 3, 4, 8)


def of_world(world: int, kind: type[Inputs] = Inputs) -> list[str]:
    """The names of the configurations of so many ranks."""
    return [x.name for x in CONFIGURATIONS.values() if len(x.shards) == world and isinstance(x, kind)]
