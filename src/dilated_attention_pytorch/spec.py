"""WHAT is computed: the static description of a dilated attention call, validated once."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

HeadMixing = Literal["all", "grouped"]
HeadOffsets = Literal["interleaved", "blocked"]
Tail = Literal["exact", "phantom"]
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
        set_field(self, "segment_lengths", _positive_ints("segment_lengths", self.segment_lengths, 62))
        # Rates are multiplied with strides, and the products must fit 64 bits.
        set_field(self, "dilation_rates", _positive_ints("dilation_rates", self.dilation_rates, 31))
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise ValueError(
                "segment_lengths and dilation_rates must have the same length, got "
                f"{len(self.segment_lengths)} and {len(self.dilation_rates)}"
            )
        if self.scale is not None:
            set_field(self, "scale", finite_float("scale", self.scale))
        set_field(self, "dropout_p", finite_float("dropout_p", self.dropout_p))
        if not 0.0 <= self.dropout_p <= 1.0:
            raise ValueError(f"dropout_p must lie between 0 and 1, got {self.dropout_p}")
        one_of("head_mixing", self.head_mixing, get_args(HeadMixing))
        one_of("head_offsets", self.head_offsets, get_args(HeadOffsets))
        one_of("tail", self.tail, get_args(Tail))
        for name in ("is_causal", "detach_mixing"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")

    def scale_for(self, d: int) -> float:
        """The factor of the scores of heads with d features."""
        return 1.0 / math.sqrt(d) if self.scale is None else self.scale

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """`((segment length, dilation rate), ...)` in the caller's order."""
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))


def geometric_branches(n: int, first: int, ratio: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """LongNet's rule (arXiv 2307.02486, section 3.1): lengths and rates grow by one ratio until one spans n.

    A branch scores n w / r**2 pairs, so each costs a `ratio`-th of the one before, and all of them less than
    ratio / (ratio - 1) times the first: the cost grows with n.
    """
    segment_lengths, dilation_rates = [first], [1]
    while segment_lengths[-1] < n:
        segment_lengths.append(segment_lengths[-1] * ratio)
        dilation_rates.append(dilation_rates[-1] * ratio)
    return tuple(segment_lengths), tuple(dilation_rates)


def _positive_ints(name: str, values: Sequence[int], bits: int) -> tuple[int, ...]:
    if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__getitem__"):
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}")
    numbers = []
    for value in values:
        if isinstance(value, bool) or not (isinstance(value, int) or hasattr(value, "__index__")):
            raise TypeError(f"{name} must hold integers, got {value!r} of type {type(value).__name__}")
        numbers.append(operator.index(value))
    if not numbers:
        raise ValueError(f"{name} must name at least one branch, got none")
    if min(numbers) < 1:
        raise ValueError(f"{name} must be positive, got {tuple(numbers)}")
    if max(numbers) >= 2**bits:
        raise ValueError(f"{name} must be below 2**{bits}, got {tuple(numbers)}")
    return tuple(numbers)


def finite_float(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not -math.inf < number < math.inf:
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
