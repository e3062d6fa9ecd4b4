"""The definitions of dilated and block-sparse attention as dense masked softmaxes: the oracle, no fast path.

Time and memory grow with `n ** 2`. Everything faster in this library is tested against this file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .spec import DilatedSpec, HeadMixing, HeadOffsets, Tail, takes_spec

__all__ = ["block_sparse_attention_reference", "dilated_attention_reference", "multiplicity"]


@takes_spec
def dilated_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int] | DilatedSpec,
    dilation_rates: Sequence[int] | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_mixing: HeadMixing = "all",
    head_offsets: HeadOffsets = "interleaved",
    tail: Tail = "exact",
    detach_mixing: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to the multiset union of the keys that all branches reach, in one softmax.

    `q` is (b, n, h, d), `k` and `v` are (b, n, h_kv, d) where `h_kv` divides `h`. `key_mask` is (b, n) bool,
    True where a key may be attended. `cu_seqlens` (documents + 1,) packs documents into `b == 1`. Returns
    `out` (b, n, h, d) in the dtype of `q`, and with `return_lse` the natural log-sum-exp (b, h, n) in
    float32, or float64 for float64 inputs. A query that reaches no key gives zeros, `-inf`, zero gradients.

    Does not confine NaN or infinity: in a dense product they also reach outputs that do not depend on them.
    """
    lists, mixing = (segment_lengths, dilation_rates), (head_mixing, head_offsets, tail, detach_mixing)
    spec = DilatedSpec(*lists, is_causal, scale, dropout_p, *mixing)  # type: ignore[arg-type]
    b, n, h, _ = q.shape
    if h % k.shape[2]:
        raise ValueError(f"key heads must divide query heads, got {k.shape[2]} key and {h} query heads")
    if cu_seqlens is not None and b != 1:
        raise ValueError(f"cu_seqlens packs all documents into batch size 1, got batch size {b}")
    pairs, phantoms = _branches(spec, n, h, cu_seqlens, q.device)
    if key_mask is not None:
        pairs = torch.where(key_mask[:, None, None, :], pairs[:, None], False)

    scores, value = _scores(q, k, v, spec.scale)
    probs, lse = _softmax(scores, pairs.sum(0), phantoms.sum(0))
    if spec.detach_mixing or spec.dropout_p > 0:
        # Branch by branch, mixed by the softmax denominators: the same numbers, but the mixing weights can be
        # held constant, and a key that two branches reach is dropped in each of them on its own.
        probs = torch.zeros_like(probs)
        total = lse.masked_fill(lse == -math.inf, 0.0)
        for branch_pairs, branch_phantoms in zip(pairs, phantoms, strict=True):
            branch_probs, branch_lse = _softmax(scores, branch_pairs, branch_phantoms)
            weight = torch.exp(branch_lse - total).unsqueeze(-1)
            if spec.dropout_p > 0:
                branch_probs = F.dropout(branch_probs, spec.dropout_p)
            probs = probs + (weight.detach() if spec.detach_mixing else weight) * branch_probs
    out = (probs @ value).transpose(1, 2).to(q.dtype)
    return (out, lse) if return_lse else out


def block_sparse_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to the keys that a bool `mask` (1, h or b * h, n, n) allows, in one softmax.

    Tensors, results and rows without keys are those of `dilated_attention_reference`.
    """
    b, n, h, _ = q.shape
    if len(mask) not in (1, h, b * h):
        raise ValueError(f"a mask has 1, {h} or {b} x {h} layouts, got {len(mask)}")
    seen = mask.view(b, h, n, n) if len(mask) == b * h else mask.expand(b, h, n, n)
    if is_causal:
        seen = seen.tril()
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]

    scores, value = _scores(q, k, v, scale)
    probs, lse = _softmax(scores, seen, torch.zeros_like(scores[..., 0], dtype=torch.int64))
    out = (probs @ value).transpose(1, 2).to(q.dtype)
    return (out, lse) if return_lse else out


def multiplicity(
    n: int,
    num_heads: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    is_causal: bool = False,
    cu_seqlens: Tensor | None = None,
    head_mixing: HeadMixing = "all",
    head_offsets: HeadOffsets = "interleaved",
) -> Tensor:
    """How often query `i` of head `h` attends to key `j`: int64 counts (h, n, n), indexed `[h, i, j]`."""
    branches = (tuple(segment_lengths), tuple(dilation_rates))
    spec = DilatedSpec(*branches, is_causal, head_mixing=head_mixing, head_offsets=head_offsets)
    return _branches(spec, n, num_heads, cu_seqlens, torch.device("cpu"))[0].sum(0)


def _branches(
    spec: DilatedSpec, n: int, num_heads: int, cu_seqlens: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Which query meets which key (branches, h, n, n), and how many phantoms it meets (branches, h, n)."""
    bounds = torch.tensor([0, n], device=device) if cu_seqlens is None else cu_seqlens.to(device, torch.int64)
    if bounds[0] != 0 or bounds[-1] != n or (bounds.diff() < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to the sequence length {n}, got {bounds.tolist()}")
    index = torch.arange(n, device=device)
    document = torch.searchsorted(bounds, index, right=True) - 1
    t = index - bounds[document]
    length = bounds.diff()[document]

    pairs, phantoms = [], []
    for i, (w, r) in enumerate(spec.branches):
        selected = (t % w) % r == _offsets(spec, i, num_heads, device)[:, None]
        together = (document[:, None] == document) & ((t // w)[:, None] == t // w)
        lattice = together & selected[:, :, None] & selected[:, None, :]
        # Zero padding fills every segment up to ceil(w / r) lattice points, all after the last real query.
        padding = (length.clamp(max=w) + r - 1) // r - lattice.sum(-1)
        has_phantoms = spec.tail == "phantom" and not spec.is_causal
        phantoms.append(torch.where(selected, padding, 0) * has_phantoms)
        pairs.append(lattice & (index <= index[:, None]) if spec.is_causal else lattice)
    return torch.stack(pairs), torch.stack(phantoms)


def _offsets(spec: DilatedSpec, branch: int, num_heads: int, device: torch.device) -> Tensor:
    """The offset of every head (h,); -1, which selects nothing, for a head that does not serve the branch."""
    head = torch.arange(num_heads, device=device)
    rate = spec.dilation_rates[branch]
    if spec.head_mixing == "grouped":
        size, extra = divmod(num_heads, len(spec.branches))
        first = branch * size + min(branch, extra)
        is_member = (head >= first) & (head < first + size + (branch < extra))
        return torch.where(is_member, branch % rate, -1)
    if spec.head_offsets == "blocked":
        return head // math.ceil(num_heads / rate)
    return head % rate


def _scores(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """The scores (b, h, n, n) and values (b, h, n, d), in float32 or better."""
    dtype, (_, _, h, d) = torch.promote_types(q.dtype, torch.float32), q.shape
    query = q.to(dtype).transpose(1, 2)
    key, value = (x.to(dtype).repeat_interleave(h // x.shape[2], dim=2).transpose(1, 2) for x in (k, v))
    return query @ key.transpose(-1, -2) * (1 / math.sqrt(d) if scale is None else scale), value


def _softmax(scores: Tensor, counts: Tensor, phantoms: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and log-sum-exp of keys that count `counts` times, beside `phantoms` of logit 0."""
    logits = scores.masked_fill(counts == 0, -math.inf)
    # The shift cancels, so no gradient passes through it. A row without keys shifts by 0, never by -inf.
    top = logits.detach().amax(-1)
    top = torch.where((phantoms > 0) | (top == -math.inf), top.clamp(min=0.0), top)
    weights = counts * torch.exp(logits - top.unsqueeze(-1))
    total = weights.sum(-1) + phantoms * torch.exp(-top.clamp(min=0.0))  # 0 * exp(1000) would be NaN
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1.0)
    lse = (top + torch.log(total)).masked_fill(is_empty, -math.inf)
    return weights / total.unsqueeze(-1), lse
