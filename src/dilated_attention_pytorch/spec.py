"""WHAT is computed: the static description of a dilated attention call, validated once."""

from __future__ import annotations

import difflib
import json
import math
import numbers
import operator
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

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


Branches = tuple[tuple[int, ...], tuple[int, ...]]


def branches_for(
    max_length: int, num_heads: int | None = None, *, first: int = 2048, ratio: int | None = None
) -> Branches:
    """Segment lengths and dilation rates for sequences of up to `max_length` positions.

    LongNet's rule (arXiv 2307.02486, section 3.1): lengths and rates grow by one ratio, from a segment of
    `first` positions at rate 1, until a segment spans `max_length`. A branch scores n w / r**2 pairs a head,
    so each costs a `ratio`-th of the one before, and all of them less than ratio / (ratio - 1) times the
    first: the cost grows with the length, not with its square. With `num_heads` no branch costs more than
    the first.

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
    sizes = {"max_length": max_length, "num_heads": num_heads, "first": first, "ratio": ratio}
    for name, size in sizes.items():
        if size is not None or name in ("max_length", "first"):
            positive_int(name, size)
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
    max_length: int | None,
    num_heads: int | None = None,
) -> tuple[Sequence[int], Sequence[int]]:
    """Branches of a module: the lists if they are given, else those for `max_length`, else the defaults."""
    if (segment_lengths is None) != (dilation_rates is None):
        given = "segment_lengths" if dilation_rates is None else "dilation_rates"
        raise ValueError(f"segment_lengths and dilation_rates are given together, got {given} alone")
    if max_length is not None:
        positive_int("max_length", max_length)
    if segment_lengths is not None and dilation_rates is not None:
        return segment_lengths, dilation_rates
    if max_length is None:
        return DEFAULT_SEGMENT_LENGTHS, DEFAULT_DILATION_RATES
    return branches_for(max_length, num_heads)


def positive_int(name: str, value: object, bits: int = 62) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a positive int, got {value!r} of type {type(value).__name__}")
    number = operator.index(value)
    if not 0 < number < 2**bits:
        raise ValueError(f"{name} must be positive and below 2**{bits}, got {number}")
    return number


def _positive_ints(name: str, values: Sequence[int], bits: int) -> tuple[int, ...]:
    if hasattr(values, "tolist"):  # or tensors of booleans and of one column would pass as integers
        values = _listed(name, values)
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


def _listed(name: str, values: Any) -> Any:
    try:
        return values.tolist()
    except RuntimeError as error:
        rule = f"{name} must be a sequence of integers"
        raise TypeError(f"{rule}, got a {type(values).__name__} that cannot be read") from error


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


def close_names(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """The known names that are nearest to one that is not known, whatever their case."""
    by_lower = {each.lower(): each for each in known}
    return [by_lower[each] for each in difflib.get_close_matches(name.lower(), by_lower, n=most)]


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """A hint at the closest of the known names; empty if none is close."""
    close = close_names(name, known, most)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def refuse_unknown(
    owner: str, given: Iterable[str], known: Iterable[str], others: Iterable[str] = ()
) -> None:
    """Raises for a given keyword that `owner` does not know; `others` are names that may be meant."""
    known = set(known)
    for name in given:
        if name not in known:
            raise TypeError(f"{owner} has no {name!r}.{did_you_mean(name, sorted({*known, *others}), 1)}")


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """`json.loads`, to which JSON that nests too deeply is bad JSON like any other: a ValueError."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("JSON must not nest deeper than Python can follow, got text that does") from None
