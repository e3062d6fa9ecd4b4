"""Segments of a branch: whole ones, those that a range of time cuts, those that two ranges share."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from ..plan import Range


class Segments(NamedTuple):
    """`num` equal segments from `start` on, `period` apart, and which of their positions meet.

    `queries` and `keys` are ranges of offsets from a segment's start: all of it, or what the ranges of time
    at hand leave of it. `length` is that of the whole segment, `window` the clamped segment length.
    """

    start: int
    num: int
    period: int
    length: int
    window: int
    queries: Range
    keys: Range

    @property
    def is_own(self) -> bool:
        """Whether the same positions ask and are asked."""
        return self.queries == self.keys


def rows_within(within: Range, offset: int, rate: int) -> tuple[int, int]:
    """(first, number) of the rows `offset + j * rate` that lie in a range."""
    first, after = (max(0, -(-(end - offset) // rate)) for end in within)
    return first, after - first


def branch_segments(window: int, time: Range, spans: Sequence[Range]) -> list[Segments]:
    """The segments of a branch inside a range of time, equal neighbours (also across documents) together."""
    groups: list[Segments] = []
    first = bisect_right(spans, time[0], key=itemgetter(0)) - 1
    after = bisect_left(spans, time[1], key=itemgetter(0))
    for span in spans[first:after]:
        for new in _span_segments(window, span, (max(span[0], time[0]), min(span[1], time[1]))):
            last = groups[-1] if groups else None
            if last and last[2:] == new[2:] and new.start == last.start + last.num * last.period:
                groups[-1] = last._replace(num=last.num + new.num)
            else:
                groups.append(new)
    return groups


def _span_segments(window: int, span: Range, time: Range) -> list[Segments]:
    clamped = min(window, span[1] - span[0])
    start = span[0] + (time[0] - span[0]) // clamped * clamped
    found = []
    if start < time[0]:  # cut at its beginning
        found.append(_part(start, clamped, span, time))
        start += clamped
    full = max(0, time[1] - start) // clamped
    if full:
        found.append(Segments(start, full, clamped, clamped, clamped, (0, clamped), (0, clamped)))
        start += full * clamped
    if start < time[1]:  # cut at its end, by the range or by the end of the span
        found.append(_part(start, clamped, span, time))
    return found


def _part(start: int, clamped: int, span: Range, time: Range) -> Segments:
    length = min(clamped, span[1] - start)
    within = _offsets(start, length, time)
    return Segments(start, 1, clamped, length, clamped, within, within)


def _offsets(start: int, length: int, time: Range) -> Range:
    return max(time[0], start) - start, min(time[1], start + length) - start


def crossing_segment(window: int, queries: Range, keys: Range, spans: Sequence[Range]) -> Segments | None:
    """The one segment that two disjoint ranges of time can have in common, or None."""
    earlier, later = sorted((queries, keys))
    if earlier[0] == earlier[1] or later[0] == later[1]:
        return None
    span = spans[bisect_right(spans, earlier[1] - 1, key=itemgetter(0)) - 1]
    clamped = min(window, span[1] - span[0])
    start = span[0] + (earlier[1] - 1 - span[0]) // clamped * clamped
    length = min(clamped, span[1] - start)
    if start + length <= later[0]:
        return None
    within = _offsets(start, length, queries), _offsets(start, length, keys)
    return Segments(start, 1, clamped, length, clamped, *within)
