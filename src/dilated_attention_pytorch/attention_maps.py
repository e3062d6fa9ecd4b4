"""Attention probabilities of chosen query rows, and weighted sums of all rows, without the full matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import check_dense, check_inputs, document_bounds, named_keywords
from .functional import attend
from .ops import without_autocast
from .plan.dilated import branch_heads
from .spec import DilatedSpec, Execution, HeadMixing, HeadOffsets, Tail

_INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@named_keywords
def attention_rows(
    q: Tensor,
    k: Tensor,
    rows: Sequence[int] | Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_mixing: HeadMixing = "all",
    head_offsets: HeadOffsets = "interleaved",
    tail: Tail = "exact",
) -> Tensor:
    """The probabilities with which the query positions `rows` attend to every key: (b, h, len(rows), n).

    q is (b, n, h, d) and k (b, n, h_kv, d); the options are those of `dilated_attention`, so that
    `attention_rows(...) @ v` equals its rows. A key that several branches reach holds the sum of its shares.
    Rows that no branch selects are zero; with tail="phantom" rows may sum to less than 1. The result is in
    float32 (float64 for float64) and differentiable. Memory grows with len(rows) x n: choose few rows of long
    sequences.
    """
    spec = DilatedSpec(
        segment_lengths,
        dilation_rates,
        is_causal,
        scale,
        head_mixing=head_mixing,
        head_offsets=head_offsets,
        tail=tail,
    )
    check_inputs(q, k, k, key_mask, cu_seqlens)
    n, h, d = q.shape[1:]
    index = row_index(rows, n, q.device)
    counts, phantoms = _counts(spec, index, n, h, k.shape[2], cu_seqlens)
    dtype = torch.promote_types(q.dtype, torch.float32)
    query = q[:, index].to(dtype).unflatten(2, (k.shape[2], -1))  # type: ignore[no-untyped-call]
    with without_autocast(q.device):
        scores = torch.einsum("bikgd,bjkd->bkgij", query, k.to(dtype)).flatten(1, 2)
    scores = scores * spec.scale_for(d)
    visible = (counts > 0) & (scores != -math.inf)  # a score may overflow
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    scores = torch.where(visible, scores + counts.clamp_min(1).to(dtype).log(), -math.inf)
    phantom_score = torch.where(phantoms > 0, phantoms.clamp_min(1).to(dtype).log(), -math.inf)
    phantom_score = phantom_score.unsqueeze(-1).expand(*scores.shape[:-1], 1)
    empty = ~visible.any(-1, keepdim=True)
    # Softmax of a row without keys is NaN, in its gradient too; such rows are computed on zeros and cleared.
    logits = torch.cat((scores, phantom_score), -1).masked_fill(empty, 0.0)
    return torch.softmax(logits, -1)[..., :n].masked_fill(empty, 0.0)


def attention_sums(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    spec: DilatedSpec,
    execution: Execution | None = None,
    *,
    residual: bool = False,
) -> Tensor:
    """`weights @ A` for weights (b, r, n), where A (b, n, n) is the mean of the heads' probabilities.

    With `residual` it is `weights @ M`: M is A plus the identity, each row divided by its sum. A is never
    built: the product is the gradient of `A @ v` in v, so that a pass of the attention itself, forward and
    backward, serves as many rows of weights as heads have features. Not differentiable; in float32 (float64
    for float64).
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    h, d = q.shape[2:]
    # What inference mode made cannot be saved for a backward pass, and its copies can.
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(q.device):
        q, k = (x.detach().to(dtype, copy=x.is_inference()) for x in (q, k))
        v = torch.ones_like(k, requires_grad=True)
        out, _ = attend(q, k, v, spec, execution)
        if residual:  # each feature of out holds the sum of a row
            weights = weights / (1 + out.detach()[..., 0].mean(-1)).unsqueeze(1)
        found = []
        for part in torch.split(weights.to(dtype), d, 1):
            grad_out = torch.zeros_like(out)
            grad_out[..., : part.shape[1]] = part.mT.unsqueeze(2) / h
            [gradient] = torch.autograd.grad(out, v, grad_out, retain_graph=True)
            found.append(gradient[..., : part.shape[1]].sum(2).mT)
    sums = torch.cat(found, 1)
    return sums + weights if residual else sums


def row_index(rows: Sequence[int] | Tensor, n: int, device: torch.device) -> Tensor:
    """`rows` as an int64 tensor of numbers below n."""
    if isinstance(rows, Tensor):
        check_dense("rows", rows, needs_values=True)
    try:
        index = torch.as_tensor(rows, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"rows must be a non-empty list of integers, got {rows!r}") from error
    if index.dtype not in _INDEX_DTYPES or index.dim() != 1 or not index.numel():
        raise ValueError(f"rows must be a non-empty list of integers, got {rows!r}")
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= n:
        raise ValueError(f"rows must lie between 0 and n - 1 = {n - 1}, got {low if low < 0 else high}")
    return index.long()


def _counts(
    spec: DilatedSpec, rows: Tensor, n: int, h: int, h_kv: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """How many branches connect each (head, row, key), and how many phantom keys each (head, row) sees."""
    keys = torch.arange(n, device=rows.device)
    bounds = torch.tensor(
        (0, n) if cu_seqlens is None else document_bounds(cu_seqlens, n), device=rows.device
    )
    document = torch.searchsorted(bounds, keys, right=True) - 1
    local, length = keys - bounds[document], bounds[document + 1] - bounds[document]
    counts = torch.zeros(h, rows.numel(), n, dtype=torch.int32, device=rows.device)
    phantoms = torch.zeros(h, rows.numel(), dtype=torch.int64, device=rows.device)
    for branch, (window, rate) in enumerate(spec.branches):
        heads = branch_heads(spec, branch, h, h_kv)
        if not heads:
            continue
        served = slice(heads[0].head, heads[-1].head + 1)
        offsets = torch.tensor([head.row for head in heads], device=rows.device)[:, None]
        clamped = length.clamp_max(window)
        segment = local // clamped
        selected = (local % clamped) % rate == offsets  # (heads, n)
        together = (document[rows, None] == document) & (segment[rows, None] == segment)
        if spec.is_causal:
            together = together & (keys <= rows[:, None])
        counts[served] += selected[:, rows, None] & together & selected[:, None, :]
        if spec.tail == "phantom" and not spec.is_causal:
            real = (torch.minimum(clamped, length - segment * clamped) - offsets + rate - 1) // rate
            phantoms[served] += torch.where(selected, (clamped + rate - 1) // rate - real, 0)[:, rows]
    return counts, phantoms
