"""The gate of candidates: each is held against what it should compute before it is timed.

A reduced copy of the configuration is compared with the dense references in float64, forward and gradients.
Where a candidate runs at full length in a process of its own, chosen rows are computed from the definition,
together with the gradients of a loss over just these rows; not of those with projections and of peers.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..plan import BlockPattern
from ..reference import block_sparse_attention_reference, dilated_attention_reference
from .config import Config
from .gate import TOLERANCES, accept, attend_counted, choose_places, largest_error, met_keys
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
    counted = {t: _met_keys(pattern or dilated, len(q), t) for t in rows}
    met = torch.unique(torch.cat([keys for keys, _ in counted.values()]))
    sums = torch.zeros(2, len(met), *q.shape[1:], dtype=torch.float64) if gradients else None
    errors = []
    for t, (keys, counts) in counted.items():
        query, key, value = leaves = [x.double().requires_grad_() for x in (q[t], k[keys], v[keys])]
        row, _ = attend_counted(query, key, value, counts)
        errors.append(largest_error(out[t], row))
        if sums is not None:
            dq, *of_keys = torch.autograd.grad(row, leaves, grad_out[0][t].double())
            errors.append(largest_error(gradients[0][t], dq))
            sums[:, torch.searchsorted(met, keys)] += torch.stack(of_keys)
    if sums is not None:
        errors.append(_largest_outside(gradients[0], torch.tensor(rows)))
        for gradient, expected in zip(gradients[1:], sums, strict=True):
            errors += [largest_error(gradient[met], expected), _largest_outside(gradient, met)]
    return max(errors)


def _met_keys(definition: BlockPattern | Config, n: int, t: int) -> tuple[Tensor, Tensor]:
    """The keys (m,) that the query at `t` meets, in order, and how often each head does, (h, m)."""
    if isinstance(definition, Config):
        return met_keys(definition, n, t)
    keys = visible_keys(definition, 0, t)  # these patterns have one layout for all heads
    return keys, torch.ones(1, len(keys), dtype=torch.float64)


def _largest_outside(x: Tensor, rows: Tensor) -> float:
    """The largest magnitude in other rows, where there should be zeros; in parts, without a copy of x."""
    outside = torch.ones(len(x), dtype=torch.bool)
    outside[rows] = False
    largest = [part[where].abs().amax().item() for part, where in _parts(x, outside) if where.any()]
    return max((math.inf if math.isnan(value) else value for value in largest), default=0.0)


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(x, 2**16) for x in tensors), strict=True)
