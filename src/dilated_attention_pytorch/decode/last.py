"""The newest tokens of a sequence whose keys are all kept, as caches of other libraries do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import autocast_inputs, check_new_tokens, named_keywords, whole_numbers
from ..core.tracing import uncompiled
from ..ops import without_autocast
from ..spec import DilatedSpec, Execution, HeadMixing, HeadOffsets
from .attend import Stream, check_decoding
from .lanes import Lane
from .rows import row_runs


@named_keywords
@uncompiled
def attend_last(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    starts: Sequence[int] | Tensor | None = None,
    scale: float | None = None,
    head_mixing: HeadMixing = "all",
    head_offsets: HeadOffsets = "interleaved",
    execution: Execution | None = None,
) -> Tensor:
    """Causal dilated attention of the last m of n positions; reads only the keys that they select.

    Equals the last m rows of `dilated_attention(..., is_causal=True)` over all n positions.

    Args:
        q: (b, m, h, d), the queries of the last m positions.
        k, v: (b, n, h_kv, d), of all positions, m <= n.
        starts: (b,) integers, the first real position of each row (left padding): the row's segments are
            counted from there. A query before it gives zeros.
        segment_lengths, dilation_rates, scale, head_mixing, head_offsets, execution: as in
            `dilated_attention`; memory is fresh.

    Returns:
        out (b, m, h, d). It has no gradient: call it under `torch.no_grad()` or `torch.inference_mode()`.
    """
    branches = segment_lengths, dilation_rates
    spec = DilatedSpec(*branches, True, scale, head_mixing=head_mixing, head_offsets=head_offsets)
    q, k, v = autocast_inputs(q, k, v)
    check_new_tokens("attend_last", q, k, v)
    execution = check_decoding("attend_last", execution)
    (b, m, h, _), (n, h_kv) = q.shape, k.shape[1:3]
    if m > n:
        raise ValueError(f"q must have at most as many positions as k and v, got {m} and {n}")
    firsts = whole_numbers("starts", [0] * b if starts is None else starts, b, n)
    stream = Stream(spec, h, h_kv, execution)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    with torch.no_grad(), without_autocast(q.device):
        for rows, (first,) in row_runs([(first,) for first in firsts]):
            new = min(m, n - first)
            if new:
                queries, keys, values = q[rows, m - new :], k[rows, first:], v[rows, first:]
                out[rows, m - new :] = _attend_run(stream, queries, keys, values)
    return out


def _attend_run(stream: Stream, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = q.shape[1], k.shape[1]
    if m == 1:
        return stream.attend_one(q, n - 1, _Kept(k, v, n - 1))
    start = n - m
    return stream.attend_many(q, k[:, start:], v[:, start:], start, _Kept(k, v, start - 1))


@dataclass(frozen=True)
class _Kept:
    """All keys of a stream, (b, n, h_kv, d), of which the segments of `position` are read."""

    k: Tensor
    v: Tensor
    position: int

    def rows(self, lane: Lane, first: int, count: int) -> tuple[Tensor, Tensor]:
        begin = self.position // lane.window * lane.window + lane.offset + first * lane.rate
        times = slice(begin, begin + (count - 1) * lane.rate + 1, lane.rate)
        k, v = (lane.of_keys(x[:, times]).transpose(1, 2) for x in (self.k, self.v))
        return k, v
