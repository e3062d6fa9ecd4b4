"""WHAT a block-sparse call keeps: the static description of a block pattern, validated once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .spec import finite_float, one_of

PatternType = Literal[
    "dilated_sparse", "local_window", "global_local", "strided", "random", "hierarchical", "adaptive"
]
Levels = tuple[tuple[int, float], ...]
MAX_BLOCK_SIZE = 2**16
_MAX_LEVELS = 32
HIERARCHIES: dict[str, Levels] = {
    "standard": ((1, 0.5), (4, 0.25), (16, 0.25)),
    "fine": ((1, 0.75), (4, 0.25)),
    "long_range": ((1, 0.25), (4, 0.25), (16, 0.25), (64, 0.25)),
}


@dataclass(frozen=True)
class SparsePatternConfig:
    """Which blocks of `block_size` x `block_size` query-key pairs are kept. Hashable and free of tensors.

    `sparsity_ratio` is the fraction of blocks **kept** (0.01 is "99 % sparse"), under a causal mask of those
    in the lower triangle: the budget of every row. A row always keeps its own block. The types:

    - "local_window": the nearest blocks.
    - "dilated_sparse": the blocks that a dilated attention reaches at block granularity, nearest first:
      those of a row's own segment at distances that the segment's rate divides; then the nearest others.
    - "global_local": the first blocks of the sequence, which attend everywhere and are attended from
      everywhere, then the nearest blocks.
    - "strided": blocks at equal distances over the whole sequence; the nearest others fill the budget.
    - "random": blocks drawn by `seed`, for each head anew.
    - "hierarchical": the nearest blocks of the grid of each level (stride, share of the budget). `hierarchy`
      is a name of `HIERARCHIES` or the levels themselves.
    - "adaptive": the blocks whose pooled keys score best against the pooled queries; depends on the content.

    `global_tokens` makes that many first tokens global in any type, as far as half of the budget goes. After
    them `window_size`, in tokens, is kept first in any type; "local_window" and "global_local" keep nothing
    beyond it and may then stay below the budget.
    """

    pattern_type: PatternType = "dilated_sparse"
    sparsity_ratio: float = 0.1
    block_size: int = 128
    window_size: int | None = None
    global_tokens: int | None = None
    hierarchy: str | Sequence[tuple[int, float]] = "standard"
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("pattern_type", self.pattern_type, get_args(PatternType))
        ratio = finite_float("sparsity_ratio", self.sparsity_ratio)
        if not 0.0 < ratio <= 1.0:
            raise ValueError(f"sparsity_ratio is the fraction kept, above 0 and at most 1, got {ratio}")
        object.__setattr__(self, "sparsity_ratio", ratio)
        _whole_number("block_size", self.block_size, 1)
        if self.block_size > MAX_BLOCK_SIZE:
            raise ValueError(f"block_size must be at most {MAX_BLOCK_SIZE}, got {self.block_size}")
        if self.window_size is not None:
            _whole_number("window_size", self.window_size, 1)
            if self.window_size < self.block_size:
                raise ValueError(
                    f"window_size must hold at least one block of {self.block_size} tokens, "
                    f"got {self.window_size}"
                )
        if self.global_tokens is not None:
            _whole_number("global_tokens", self.global_tokens, 0)
        _whole_number("seed", self.seed, 0, bits=63)
        if not isinstance(self.hierarchy, str):
            object.__setattr__(self, "hierarchy", _check_levels(self.hierarchy))
        elif self.hierarchy not in HIERARCHIES:
            raise ValueError(
                f"hierarchy must be levels or one of {', '.join(map(repr, HIERARCHIES))}, "
                f"got {self.hierarchy!r}"
            )

    @property
    def levels(self) -> Levels:
        """The levels (stride in blocks, share of the budget) of a hierarchical pattern."""
        if isinstance(self.hierarchy, str):
            return HIERARCHIES[self.hierarchy]
        return tuple(self.hierarchy)

    @classmethod
    def of(cls, config: SparsePatternConfig | Mapping[str, Any] | None) -> SparsePatternConfig:
        """A config from itself, from its fields as a mapping, or the default one."""
        if isinstance(config, cls):
            return config
        if config is None:
            return cls()
        if not isinstance(config, Mapping):
            raise TypeError(
                f"sparse_config must be a SparsePatternConfig or a dict, got {type(config).__name__}"
            )
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in config if name not in known]:
            raise ValueError(f"sparse_config has the fields {', '.join(known)}, got {unknown}")
        return cls(**config)


def _whole_number(name: str, value: int, least: int, bits: int = 62) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value >= 2**bits:
        raise ValueError(f"{name} must be below 2**{bits}, got {value}")


def _check_levels(levels: Sequence[tuple[int, float]]) -> Levels:
    try:
        pairs = [(stride, share) for stride, share in levels]
    except (TypeError, ValueError):
        raise TypeError(f"hierarchy must hold pairs (stride, share), got {levels!r}") from None
    if not 1 <= len(pairs) <= _MAX_LEVELS:
        raise ValueError(f"hierarchy must have 1 to {_MAX_LEVELS} levels, got {len(pairs)}")
    checked = []
    for stride, share in pairs:
        _whole_number("a stride of hierarchy", stride, 1)
        share = finite_float("a share of hierarchy", share)
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a share of hierarchy must lie above 0 and at most at 1, got {share}")
        checked.append((stride, share))
    if sum(share for _, share in checked) > 1.0 + 1e-9:
        raise ValueError(f"the shares of hierarchy must add up to at most 1, got {tuple(checked)}")
    return tuple(checked)
