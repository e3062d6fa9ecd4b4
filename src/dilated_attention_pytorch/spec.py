"""WHAT is computed: static descriptions of dilated and block-sparse attention, validated once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import signature
from typing import Any, Literal, TypeVar, get_args

from .checks import (
    check_count,
    check_flags,
    check_positive_int,
    check_probabilities,
    finite_float,
    one_of,
    plain_int,
    positive_ints,
    refuse_unknown,
    share_of_one,
)

HeadMixing = Literal["all", "grouped"]
HeadOffsets = Literal["interleaved", "blocked"]
Tail = Literal["exact", "phantom"]
KernelName = Literal["auto", "native", "triton", "stock", "eager"]
_Function = TypeVar("_Function", bound=Callable[..., Any])
DEFAULT_SEGMENT_LENGTHS = (2048, 4096, 8192)
DEFAULT_DILATION_RATES = (1, 2, 4)


@dataclass(frozen=True)
class DilatedSpec:
    """Branches `(segment length, dilation rate)` and the options that shape the one softmax over them.

    Hashable and free of tensors, so that it can key a cache. `docs/semantics.md` defines every field.
    Constructing one validates it: a `TypeError` or `ValueError` states the rule and the fact.
    """

    segment_lengths: Sequence[int]  # stored as tuples
    dilation_rates: Sequence[int]
    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    head_mixing: HeadMixing = "all"
    head_offsets: HeadOffsets = "interleaved"
    tail: Tail = "exact"
    detach_mixing: bool = False

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the frozen dataclass' own way to store normalised values
        set_field(self, "segment_lengths", positive_ints("segment_lengths", self.segment_lengths, 62))
        # Rates are multiplied with strides, and the products must fit 64 bits.
        set_field(self, "dilation_rates", positive_ints("dilation_rates", self.dilation_rates, 31))
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise ValueError(
                "segment_lengths and dilation_rates must have the same length, got "
                f"{len(self.segment_lengths)} and {len(self.dilation_rates)}"
            )
        if wide := [(w, r) for w, r in self.branches if r > w]:
            exchanged = "; were segment_lengths and dilation_rates exchanged?"
            hint = exchanged if all(w <= r for w, r in self.branches) else ""
            raise ValueError(
                "dilation_rates must not exceed their segment_lengths, got rate "
                f"{wide[0][1]} for a segment of {wide[0][0]}{hint}"
            )
        if self.scale is not None:
            set_field(self, "scale", finite_float("scale", self.scale))
        set_field(self, "dropout_p", finite_float("dropout_p", self.dropout_p))
        check_probabilities(dropout_p=self.dropout_p)
        one_of("head_mixing", self.head_mixing, get_args(HeadMixing))
        one_of("head_offsets", self.head_offsets, get_args(HeadOffsets))
        one_of("tail", self.tail, get_args(Tail))
        check_flags(is_causal=self.is_causal, detach_mixing=self.detach_mixing)

    def scale_for(self, d: int) -> float:
        """The factor of the scores of heads with d features."""
        return 1.0 / math.sqrt(d) if self.scale is None else self.scale

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """`((segment length, dilation rate), ...)` in the caller's order."""
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))


SPEC_FIELDS = tuple(field.name for field in fields(DilatedSpec))


def takes_spec(function: _Function) -> _Function:
    """Lets a `DilatedSpec` stand for `segment_lengths, dilation_rates` and the options that it holds.

    It also refuses keywords that the function does not have, as `checks.named_keywords` does.
    """
    name, known = function.__name__, signature(function).parameters.keys()
    place = tuple(known).index("segment_lengths")

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        refuse_unknown(name, given, known)
        spec = args[place] if len(args) > place else given.get("segment_lengths")
        if not isinstance(spec, DilatedSpec):
            return function(*args, **given)
        twice = [each for each in SPEC_FIELDS[1:] if each in given]
        if twice or len(args) > place + 1:
            again = twice[0] if twice else SPEC_FIELDS[1]
            raise TypeError(f"{name} takes {again} from the DilatedSpec that it is given, got it again")
        return function(*args[:place], **{**given, **{each: getattr(spec, each) for each in SPEC_FIELDS}})

    return call  # type: ignore[return-value]


@dataclass(frozen=True)
class Execution:
    """How a call runs, not what it computes. Hashable and free of tensors; validated on construction.

    Args:
        kernel: "native" is this library's own for CPUs, "triton" that for GPUs, "stock" torch's fused
            attention, "eager" runs everywhere; a named kernel runs or raises why it cannot. "auto" takes the
            first that can; on a GPU, see docs/gpu.md.
        workspace_bytes: what gathered rows and accumulators may take. By default 32 MiB for dilated, 4 MiB a
            thread for block-sparse attention; on a GPU a sixteenth of its memory, at most 2 GiB.
        memory: where scratch and results come from: "fresh", "pool" (the global memory pool, which also frees
            and tries again when memory runs out), "lightweight" (the pool's scratch only), or the `name` of a
            buffer manager.
        use_pattern_cache: keep the plan of this shape for later calls; False plans each call anew.
    """

    kernel: str = "auto"
    workspace_bytes: int | None = None
    memory: str = "fresh"
    use_pattern_cache: bool = True

    def __post_init__(self) -> None:
        one_of("kernel", self.kernel, get_args(KernelName))
        if self.workspace_bytes is not None:
            check_positive_int("workspace_bytes", self.workspace_bytes)
        if not isinstance(self.memory, str):
            raise TypeError(f"memory must be the name of a source of memory, got {self.memory!r}")
        check_flags(use_pattern_cache=self.use_pattern_cache)


Branches = tuple[tuple[int, ...], tuple[int, ...]]


def branches_for(
    max_length: int, num_heads: int | None = None, *, first: int = 2048, ratio: int | None = None
) -> Branches:
    """Segment lengths and dilation rates for sequences of up to `max_length` positions.

    LongNet's rule (arXiv 2307.02486, section 3.1): lengths and rates grow by one ratio, from a segment of
    `first` positions at rate 1, until a segment spans `max_length`. A branch scores n w / r**2 pairs a head,
    so each costs a `ratio`-th of the one before, and all of them less than ratio / (ratio - 1) times the
    first: the cost grows with the length, not with its square. With `num_heads` no branch costs more than
    the first. The defaults are the best of the settings that docs/quality.md compares.

        >>> branches_for(32768)
        ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
        >>> branches_for(32768, num_heads=12)
        ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 8))

    Args:
        max_length: what the longest segment spans. Longer sequences fall into segments that never meet.
        num_heads: heads of the attention. Each serves one of the r residues of a branch, so where a rate
            would exceed them it stays below, as long as the branch costs no more than the first. Where it
            cannot, a UserWarning says what is left out.
        first: length of the segments in which every position meets every other.
        ratio: at least 2. By default 2 where five branches suffice, as in LongNet's own settings, else 4.

    Returns:
        `(segment_lengths, dilation_rates)`, as `dilated_attention` and all modules take them.
    """
    max_length, num_heads, first, ratio = map(plain_int, (max_length, num_heads, first, ratio))
    optional = {name: x for name, x in (("num_heads", num_heads), ("ratio", ratio)) if x is not None}
    for name, size in {"max_length": max_length, "first": first, **optional}.items():
        check_positive_int(name, size)
    if ratio == 1:
        raise ValueError("ratio must be at least 2, or the segments never span max_length, got 1")
    step = ratio or (2 if max_length <= 16 * first else 4)
    lengths, rates = [first], [1]
    while lengths[-1] < max_length:
        length, rate = lengths[-1] * step, rates[-1] * step
        if num_heads is not None and rate > num_heads:
            covered = rates[-1] * max(1, num_heads // rates[-1])
            rate = covered if length <= first * covered**2 else rate
        lengths.append(length)
        rates.append(rate)
    spec = DilatedSpec(lengths, rates)  # which checks that the numbers fit
    if num_heads is not None and rates[-1] > num_heads:
        warnings.warn(_left_out(lengths, rates, num_heads), stacklevel=2)
    return tuple(spec.segment_lengths), tuple(spec.dilation_rates)


def _left_out(lengths: list[int], rates: list[int], num_heads: int) -> str:
    served = max((w for w, r in zip(lengths, rates, strict=True) if r <= num_heads), default=lengths[0])
    return (
        f"with {num_heads} heads a branch of rate {rates[-1]} serves {num_heads} of every {rates[-1]} "
        f"positions; the others reach further than {served} positions only through several layers "
        f"(`dilated-attention show --layers` draws it; more heads or a longer first segment avoid it)"
    )


def resolve_branches(
    segment_lengths: Sequence[int] | None,
    dilation_rates: Sequence[int] | None,
    max_length: int | None = None,
    num_heads: int | None = None,
) -> tuple[Sequence[int], Sequence[int]]:
    """Branches: the lists if they are given, else those for `max_length`, else the defaults."""
    if (segment_lengths is None) != (dilation_rates is None):
        given = "segment_lengths" if dilation_rates is None else "dilation_rates"
        raise ValueError(f"segment_lengths and dilation_rates are given together, got {given} alone")
    if max_length is not None:
        check_positive_int("max_length", plain_int(max_length))
    if segment_lengths is not None and dilation_rates is not None:
        return segment_lengths, dilation_rates
    if max_length is None:
        return DEFAULT_SEGMENT_LENGTHS, DEFAULT_DILATION_RATES
    return branches_for(max_length, num_heads)


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
        rule = "is the fraction kept, above 0 and at most 1"
        ratio = share_of_one("sparsity_ratio", self.sparsity_ratio, rule)
        object.__setattr__(self, "sparsity_ratio", ratio)
        check_positive_int("block_size", self.block_size)
        if self.block_size > MAX_BLOCK_SIZE:
            raise ValueError(f"block_size must be at most {MAX_BLOCK_SIZE}, got {self.block_size}")
        if self.window_size is not None:
            check_positive_int("window_size", self.window_size)
            if self.window_size < self.block_size:
                rule = f"window_size must hold at least one block of {self.block_size} tokens"
                raise ValueError(f"{rule}, got {self.window_size}")
        if self.global_tokens is not None:
            check_count("global_tokens", self.global_tokens)
        check_count("seed", self.seed, bits=63)
        if not isinstance(self.hierarchy, str):
            object.__setattr__(self, "hierarchy", _check_levels(self.hierarchy))
        elif self.hierarchy not in HIERARCHIES:
            names = ", ".join(map(repr, HIERARCHIES))
            raise ValueError(f"hierarchy must be levels or one of {names}, got {self.hierarchy!r}")

    @property
    def levels(self) -> Levels:
        """The levels (stride in blocks, share of the budget) of a hierarchical pattern."""
        return HIERARCHIES[self.hierarchy] if isinstance(self.hierarchy, str) else tuple(self.hierarchy)

    @classmethod
    def of(cls, config: SparsePatternConfig | Mapping[str, Any] | None) -> SparsePatternConfig:
        """A config from itself, from its fields as a mapping, or the default one."""
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping | None):
            kind = type(config).__name__
            raise TypeError(f"sparse_config must be a SparsePatternConfig or a dict, got {kind}")
        config = config or {}
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in config if name not in known]:
            raise ValueError(f"sparse_config has the fields {', '.join(known)}, got {unknown}")
        return cls(**config)


def _check_levels(levels: Sequence[tuple[int, float]]) -> Levels:
    try:
        pairs = [(stride, share) for stride, share in levels]
    except (TypeError, ValueError):
        raise TypeError(f"hierarchy must hold pairs (stride, share), got {levels!r}") from None
    if not 1 <= len(pairs) <= _MAX_LEVELS:
        raise ValueError(f"hierarchy must have 1 to {_MAX_LEVELS} levels, got {len(pairs)}")
    for stride, _ in pairs:
        check_positive_int("a stride of hierarchy", stride)
    checked = tuple((stride, share_of_one("a share of hierarchy", share)) for stride, share in pairs)
    if sum(share for _, share in checked) > 1.0 + 1e-9:
        raise ValueError(f"the shares of hierarchy must add up to at most 1, got {checked}")
    return checked
