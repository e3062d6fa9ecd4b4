"""The gate of candidates: each is held against what it should compute before it is timed.

A reduced copy of the configuration is compared with the dense references in float64, forward and gradients.
Where a candidate runs at full length in a process of its own, chosen rows are computed from the definition,
together with the gradients of a loss over just these rows; not of those with projections and of peers.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..plan import BlockPattern
from ..reference import block_sparse_attention_reference, dilated_attention_reference
from .config import Config
from .gate import TOLERANCES, accept, attend_counted, choose_places, count_keys, largest_error, reach
from .module_candidates import Attend, Causal, Entry, entry_of
from .module_cases import CompareCase, ModuleConfig
from .peers import window_mask
from .sparse_candidates import make_pattern
from .sparse_gate import visible_keys

REDUCED_BLOCK, REDUCED_BLOCKS = 16, 24
ROW_KINDS = ("dense", "dilated", "block-sparse")


def make_inputs(
    entry: Entry, config: ModuleConfig, b: int, n: int, *, backward: bool, rows: Iterable[int] | None = None
) -> list[Tensor]:
    """Seeded inputs: q, k and v, or x for a candidate with projections; with `backward` the gradient of out.

    The gradient is zero but at `rows` of the first sequence, if they are given, else random everywhere.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (b, n, config.h * config.d) if entry.projects else (b, n, config.h, config.d)
    dtype = getattr(torch, config.dtype)
    inputs = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(entry.num_inputs)]
    if not backward:
        return inputs
    if rows is None:
        return [*inputs, torch.randn(shape, generator=generator, dtype=dtype)]
    grad_out = torch.empty(shape, dtype=dtype).fill_(0.0)  # torch.zeros would leave the memory untouched
    for t in rows:
        grad_out[0, t] = torch.randn(shape[2:], generator=generator, dtype=dtype)
    return [*inputs, grad_out]


def run_candidate(attend: Attend, tensors: Sequence[Tensor], backward: bool) -> list[Tensor]:
    """out, and with `backward` the gradients of the inputs and of the weights if it has any."""
    weights = list(attend.parameters()) if isinstance(attend, nn.Module) else []
    with torch.set_grad_enabled(backward):
        inputs = tensors[:-1] if backward else tensors
        leaves = [x.detach().requires_grad_(backward) for x in inputs]
        out = attend(*leaves)
        gradients = torch.autograd.grad(out, [*leaves, *weights], tensors[-1]) if backward else ()
    return [out.detach(), *gradients]


def check_candidate(case: CompareCase, name: str) -> float:
    """The largest error of a candidate in a reduced copy of a case, or `WrongAnswerError`."""
    entry = entry_of(name)
    config, n = reduce_case(case, entry)
    tensors = make_inputs(entry, config, min(case.b, 2), n, backward=case.backward)
    attend = entry.make(config, n)
    results = run_candidate(attend, tensors, case.backward)
    exact = [x.double() for x in tensors]
    expected = run_candidate(_definition(entry, config, n, attend, tensors), exact, case.backward)
    # Not the gradients of weights: sums over all tokens, some of terms that cancel, as those of key biases.
    pairs = list(zip(results, expected, strict=True))[: 1 + entry.num_inputs]
    error = max(largest_error(*pair) for pair in pairs)
    return accept(f"{case.name}, {name}", error, TOLERANCES[config.dtype])


def reduce_case(case: CompareCase, entry: Entry) -> tuple[ModuleConfig, int]:
    """The config with smaller blocks, shorter segments and as many tokens as a dense reference fits."""
    config = case.config
    block = min(config.block_size, REDUCED_BLOCK)
    n = (block * max(1, min(case.n // block, REDUCED_BLOCKS)) + 3) | 1  # the last block is partial
    if entry.kind == "local":
        n -= n % block
    factor = max(1.0, case.n / n)
    reduced = replace(
        config,
        block_size=block,
        sparsity=max(config.sparsity, 4 / REDUCED_BLOCKS),
        segment_lengths=tuple(max(block, int(w / factor)) for w in config.segment_lengths),
    )
    return reduced, n


def _definition(entry: Entry, config: ModuleConfig, n: int, attend: Attend, tensors: Sequence[Tensor]) -> Any:
    """What a candidate should compute, on float64 tensors."""
    if entry.projects or entry.kind == "adaptive":
        assert isinstance(attend, Causal)
        exact = copy.deepcopy(attend).double()
        module: Any = exact.module
        if entry.projects:
            module.attention = _Reference(entry, config, n)
        else:
            exact.module = _AdaptiveReference(module, _chosen_blocks(attend, tensors))
        return exact
    return _Reference(entry, config, n)


class _Reference(nn.Module):
    """The dense reference of a kind, called like an attention module."""

    def __init__(self, entry: Entry, config: ModuleConfig, n: int) -> None:
        super().__init__()
        self.is_causal = config.is_causal
        self.branches = (config.segment_lengths, config.dilation_rates)
        self.mask: Tensor | None = None
        if entry.kind == "dense":
            self.branches = ((n,), (1,))
        elif entry.kind == "block-sparse":
            self.mask = make_pattern(config, n).to_dense()
        elif entry.kind == "local":
            self.mask = window_mask(n, config.block_size, config.is_causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        if self.mask is not None:
            out = block_sparse_attention_reference(q, k, v, self.mask, is_causal=self.is_causal)
        else:
            out = dilated_attention_reference(q, k, v, *self.branches, is_causal=self.is_causal)
        assert isinstance(out, Tensor)
        return out


class _AdaptiveReference(nn.Module):
    """The dense reference over the blocks that an adaptive module chose, with its scores among q and k."""

    def __init__(self, module: Any, mask: Tensor) -> None:
        super().__init__()
        self.module, self.mask = module, mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        prepared = self.module._prepare(q, k, is_causal, None)
        wide = F.pad(v, (0, prepared.key.shape[-1] - v.shape[-1]))
        out = block_sparse_attention_reference(
            prepared.query, prepared.key, wide, self.mask, is_causal=is_causal, scale=prepared.scale
        )
        assert isinstance(out, Tensor)
        return out[..., : v.shape[-1]]


def _chosen_blocks(attend: Causal, tensors: Sequence[Tensor]) -> Tensor:
    """The mask of an adaptive module for these inputs, in their own precision."""
    module: Any = attend.module
    features = module.features(*tensors[:2], attend.is_causal)
    mask: Tensor = module.choose(*features, attend.is_causal).to_dense()
    return mask


def choose_rows(config: ModuleConfig, n: int) -> list[int]:
    return choose_places(config.segment_lengths[0], n, random.Random(0))


def rows_error(
    entry: Entry,
    config: ModuleConfig,
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    rows: Sequence[int],
) -> float | None:
    """Error of rows of the first sequence, and of all its gradients, against the definition in float64.

    `tensors` are those of `make_inputs` with these rows. None where a kind has no definition by rows.
    """
    if entry.projects or entry.kind not in ROW_KINDS:
        return None
    q, k, v, *grad_out = (x[0] for x in tensors)
    out, *gradients = (x[0] for x in results)
    pattern = make_pattern(config, len(q)) if entry.kind == "block-sparse" else None
    dilated = Config(config.h, config.d, (len(q),), (1,), config.is_causal)  # which is dense attention
    dilated = dilated if entry.kind == "dense" else config.dilated
    counted = {t: _count_row(pattern or dilated, len(q), t) for t in rows}
    spans = join_spans((lo, hi) for lo, hi, _ in counted.values())
    sums = {span: torch.zeros(2, span[1] - span[0], *q.shape[1:], dtype=torch.float64) for span in spans}
    errors = []
    for t, (lo, hi, counts) in counted.items():
        query, keys, values = leaves = [x.double().requires_grad_() for x in (q[t], k[lo:hi], v[lo:hi])]
        row, _ = attend_counted(query, keys, values, counts)
        errors.append(largest_error(out[t], row))
        if gradients:
            dq, *of_keys = torch.autograd.grad(row, leaves, grad_out[0][t].double())
            errors.append(largest_error(gradients[0][t], dq))
            first, last = next(span for span in spans if span[0] <= lo and hi <= span[1])
            sums[first, last][:, lo - first : hi - first] += torch.stack(of_keys)
    if gradients:
        errors.append(_largest_outside(gradients[0], [(t, t + 1) for t in rows]))
        for which, gradient in enumerate(gradients[1:]):
            errors += [largest_error(gradient[lo:hi], sums[lo, hi][which]) for lo, hi in spans]
            errors.append(_largest_outside(gradient, spans))
    return max(errors)


def _count_row(definition: BlockPattern | Config, n: int, t: int) -> tuple[int, int, Tensor]:
    """The keys from `lo` to `hi` that the query at `t` may meet, and how often each head does."""
    if isinstance(definition, Config):
        lo, hi = reach(definition, n, t)
        return lo, hi, count_keys(definition, t, lo, hi)
    keys = visible_keys(definition, 0, t)  # these patterns have one layout for all heads
    lo, hi = int(keys.min()), int(keys.max()) + 1
    counts = torch.zeros(1, hi - lo, dtype=torch.float64)
    counts[:, keys - lo] = 1.0
    return lo, hi, counts


def join_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of half-open spans, as disjoint ones in order."""
    joined: list[tuple[int, int]] = []
    for lo, hi in sorted(spans):
        if joined and lo < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(hi, joined[-1][1]))
        else:
            joined.append((lo, hi))
    return joined


def _largest_outside(x: Tensor, spans: Sequence[tuple[int, int]]) -> float:
    """The largest magnitude outside of spans, where there should be zeros; without a copy of x."""
    ends = [0, *(hi for _, hi in spans)]
    starts = [*(lo for lo, _ in spans), len(x)]
    gaps = [x[lo:hi] for lo, hi in zip(ends, starts, strict=True) if lo < hi]
    largest = [max(gap.max().item(), -gap.min().item()) for gap in gaps]
    return max((math.inf if math.isnan(value) else value for value in largest), default=0.0)
