"""Attention of packed rows in plain tensor operations: any device and dtype, masks, dropout, NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .contract import Attended, Dropout, Gradients, How, Op, Outputs

MAX_SCORES = 2**21  # elements of a score block; more blocks instead of more memory


def _forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> Outputs:
    grouped = _group(q, k)
    out, lse = torch.empty_like(grouped), grouped.new_empty(grouped.shape[:3], dtype=_compute_dtype(q))
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    for units, rows in _blocks(grouped, keys):
        hidden = _hidden(how, units, rows, k)
        scores = _scores(grouped[units, :, rows], keys[units], how.scale, hidden)
        block_lse = torch.logsumexp(scores, -1)
        block_lse.masked_fill_(block_lse == math.inf, math.nan)  # its probabilities are inf - inf
        # An empty row has lse -inf; a finite stand-in keeps exp(-inf - lse) at 0 there.
        probs = torch.exp(scores - block_lse.clamp_min(torch.finfo(scores.dtype).min).unsqueeze(-1))
        probs = probs if how.dropout is None else probs * _keep(how.dropout, probs, units, rows)
        out[units, :, rows] = _weighted_sum(probs, values[units].unsqueeze(1), hidden).to(q.dtype)
        lse[units, :, rows] = block_lse
    return out.view(q.shape), lse.view(q.shape[:3])


def _backward(x: Attended) -> Gradients:
    q, k, v, out, lse, grad_out, grad_lse, how = x
    grouped, keys, values = _group(q, k), k.flatten(0, 1), v.flatten(0, 1)
    compute = _compute_dtype(q)
    lse, grad_out, out = (x.reshape(grouped.shape[: x.dim()]) for x in (lse, grad_out, out))
    dq = torch.empty_like(grouped)
    dk, dv = torch.zeros_like(keys, dtype=compute), torch.zeros_like(values, dtype=compute)
    for units, rows in _blocks(grouped, keys):
        hidden = _hidden(how, units, rows, k)
        queries, grad = grouped[units, :, rows].to(compute), grad_out[units, :, rows].to(compute)
        key, value = keys[units].to(compute), values[units].to(compute)
        probs = torch.exp(_scores(queries, key, how.scale, hidden) - lse[units, :, rows].unsqueeze(-1))
        if hidden is not None:  # where lse is NaN, or the row would spoil keys that it does not see
            probs.masked_fill_(hidden, 0.0)
        d_probs = grad @ value.unsqueeze(1).transpose(-1, -2)
        used = probs
        if how.dropout is not None:
            keep = _keep(how.dropout, probs, units, rows)
            used, d_probs = probs * keep, d_probs * keep
        delta = (grad * out[units, :, rows].to(compute)).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse.reshape(lse.shape)[units, :, rows].unsqueeze(-1)
        d_scores = probs * (d_probs - delta) * how.scale
        if hidden is not None:
            d_scores.masked_fill_(hidden, 0.0)
        dq[units, :, rows] = _weighted_sum(d_scores, key.unsqueeze(1), hidden).to(q.dtype)
        unseen = None if hidden is None else hidden.transpose(-1, -2)
        dk[units] += _weighted_sum(d_scores.transpose(-1, -2), queries, unseen).sum(1)
        dv[units] += _weighted_sum(used.transpose(-1, -2), grad, unseen).sum(1)
    return dq.view(q.shape), dk.to(k.dtype).view(k.shape), dv.to(v.dtype).view(v.shape)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _group(q: Tensor, k: Tensor) -> Tensor:
    """(B, H, N, d) -> (B x H_kv, group, N, d): the query heads that share a key head side by side."""
    return q.reshape(k.shape[0] * k.shape[1], q.shape[1] // k.shape[1], q.shape[2], q.shape[3])


def _blocks(grouped: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    units, group, rows, _ = grouped.shape
    per_row = group * keys.shape[1]
    rows_fit = min(rows, max(1, MAX_SCORES // per_row))
    units_fit = max(1, MAX_SCORES // (per_row * rows_fit))
    for unit in range(0, units, units_fit):
        for row in range(0, rows, rows_fit):
            yield slice(unit, min(unit + units_fit, units)), slice(row, min(row + rows_fit, rows))


def _hidden(how: How, units: slice, rows: slice, k: Tensor) -> Tensor | None:
    """True where a score is out of sight, broadcastable to (units, group, rows, keys)."""
    hidden = None
    if how.mask is not None:
        hidden = ~how.mask.flatten(0, 1)[units, None, None, :]
    if how.is_causal:
        index = torch.arange(k.shape[2], device=k.device)
        later = index > index[rows, None]
        hidden = later if hidden is None else hidden | later
    if how.pairs is not None:
        unseen = ~how.pairs.repeat_interleave(k.shape[1], 0)[units, None, rows]
        hidden = unseen if hidden is None else hidden | unseen
    return hidden


def _scores(q: Tensor, k: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    compute = _compute_dtype(q)
    scores = (q.to(compute) @ k.to(compute).unsqueeze(1).transpose(-1, -2)) * scale
    return scores if hidden is None else scores.masked_fill_(hidden, -math.inf)


def _weighted_sum(weights: Tensor, x: Tensor, hidden: Tensor | None) -> Tensor:
    """weights @ x, in which what is not finite reaches only rows that see it (0 x NaN would reach all)."""
    x = x.to(weights.dtype)
    if hidden is None or bool(torch.isfinite(x).all()):
        return weights @ x
    seen = (~hidden).to(weights.dtype).expand(weights.shape)
    total = weights @ torch.where(torch.isfinite(x), x, 0.0)
    for bad, where in ((math.inf, x == math.inf), (-math.inf, x == -math.inf), (math.nan, x.isnan())):
        total = total + torch.where(seen @ where.to(weights.dtype) > 0, bad, 0.0)
    return total


def _keep(dropout: Dropout, probs: Tensor, units: slice, rows: slice) -> Tensor:
    """A 0-or-1/(1-p) factor of each probability (units, group, rows, keys)."""
    row_ids = dropout.rows.reshape(-1, probs.shape[1], dropout.rows.shape[-1])[units, :, rows]
    key_ids = dropout.keys.flatten(0, 1)[units]
    of_rows, of_keys = _shift(_mix(row_ids + dropout.seed), 32) | 1, _mix_keys(key_ids) | 1
    # The upper bits of a product of odd numbers depend on all bits of both: one multiplication a pair.
    bits = (of_rows.unsqueeze(-1) * of_keys[:, None, None]).bitwise_and_(_WORD)
    kept = bits >= 2 * int(dropout.p * 2**31)
    return kept.to(probs.dtype) * (1.0 / (1.0 - dropout.p) if dropout.p < 1.0 else 0.0)


_WORD = 2**32 - 1
_KEY_FACTORS = (0x7FEB352D, 0x846CA68B)  # of lowbias32
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # of SplitMix64, as signed integers


def _mix(x: Tensor) -> Tensor:
    """SplitMix64: neighbouring numbers become numbers that differ in all bits."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x = (x ^ _shift(x, shift)) * factor
    return x ^ _shift(x, 31)


def _mix_keys(x: Tensor) -> Tensor:
    """In 32 bits, as many as GPUs multiply at once: their kernel does this for every tile."""
    x = x & _WORD
    for shift, factor in zip((16, 15), _KEY_FACTORS, strict=True):
        x = (x ^ (x >> shift)) * factor & _WORD
    return x ^ (x >> 16)


def _shift(x: Tensor, by: int) -> Tensor:
    """To the right, zeros following."""
    kept: Tensor = (x >> by) & (2 ** (64 - by) - 1)
    return kept


EAGER_OP = Op(_forward, _backward, widens=True)
