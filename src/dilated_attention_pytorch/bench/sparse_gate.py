"""The gate of block-sparse attention: what is measured must first be right.

A reduced copy of each configuration is compared with the dense reference in float64, forward and gradients.
At full length, where no dense mask fits, chosen query rows are computed from the definition over the keys
that the pattern keeps for them, together with the gradients of a loss over just these rows.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..plan import BlockPattern
from ..reference import block_sparse_attention_reference
from .gate import TOLERANCES, Results, WrongAnswerError, accept, choose_places, largest_error, results_error
from .sparse_candidates import attend_sparse, entry_config, make_pattern
from .sparse_cases import PatternCase, SparseCase, SparseConfig, SparseTimeCase

REDUCED_BLOCK = 16
REDUCED_BLOCKS = 48


@dataclass(frozen=True)
class SparseCall:
    """Inputs (1, n, h, d) of one call, and the query rows that are checked.

    `grad_out`, present when gradients are asked for, is zero outside the rows: then the rows alone determine
    all three gradients, at every position.
    """

    config: SparseConfig
    pattern: BlockPattern
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor | None
    rows: tuple[int, ...]


def make_sparse_call(
    config: SparseConfig, n: int, pattern: BlockPattern, *, backward: bool = False
) -> SparseCall:
    """Seeded random inputs, every byte of them written."""
    generator = torch.Generator().manual_seed(0)
    shape, dtype = (1, n, config.h, config.d), getattr(torch, config.dtype)
    q, k, v = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3))
    rows = tuple(choose_places(config.block_size, n, random.Random(0)))
    grad_out = None
    if backward:
        grad_out = torch.zeros(shape, dtype=dtype)
        for t in rows:
            grad_out[0, t] = torch.randn(shape[2:], generator=generator, dtype=dtype)
    return SparseCall(config, pattern, q, k, v, grad_out, rows)


def run_sparse_call(call: SparseCall) -> Results:
    """One call of the library, with gradients when the call holds a `grad_out`."""
    if call.grad_out is None:
        return Results(*attend_sparse(call.config, call.q, call.k, call.v, call.pattern))
    q, k, v = leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    out, lse = attend_sparse(call.config, q, k, v, call.pattern)
    gradients = torch.autograd.grad(out, leaves, call.grad_out)
    return Results(out.detach(), lse.detach(), gradients)


def check_sparse_case(case: SparseCase, patterns: dict[str, BlockPattern]) -> float:
    """The largest error of a case, or `WrongAnswerError`; `patterns` are those of a time case, by entry.

    Memory cases check their rows after they are measured, on the very results: one call is enough.
    """
    errors = []
    if isinstance(case, SparseTimeCase):
        for entry in case.patterns:
            config, pattern = entry_config(case.config, entry), patterns[entry.name]
            check_density(f"{case.name}, {entry.name}", config, len(pattern), pattern.columns.numel(), case.n)
            errors.append(reduced_sparse_error(config, case.n, backward=case.backward))
            call = make_sparse_call(config, case.n, pattern, backward=case.backward)
            results = run_sparse_call(call)
            errors.append(sparse_rows_error(call, results.out, results.lse, results.gradients))
    else:
        errors.append(reduced_sparse_error(case.config, case.n, backward=not isinstance(case, PatternCase)))
    return accept_sparse(case, max(errors))


def accept_sparse(case: SparseCase, error: float) -> float:
    """The error, if it is tolerable in the dtype of the case."""
    return accept(case.name, error, TOLERANCES[case.config.dtype])


def check_density(name: str, config: SparseConfig, layouts: int, blocks: int, n: int) -> None:
    """Refuses a pattern whose density is not what was asked, within a block a row."""
    rows = -(-n // config.block_size)
    total = rows * (rows + 1) / 2 if config.is_causal else rows**2
    kept, asked = blocks / layouts, config.sparsity_ratio * total
    if abs(kept - asked) > rows:
        raise WrongAnswerError(
            f"{name}: the density is {kept / total:.4f} where {config.sparsity_ratio} was asked: not measured"
        )


def reduced_sparse_error(config: SparseConfig, n: int, *, backward: bool) -> float:
    """Error against the dense reference, with smaller blocks and fewer of them."""
    block = min(config.block_size, REDUCED_BLOCK)
    reduced_n = (block * min(n // config.block_size, REDUCED_BLOCKS) + 3) | 1  # the last block is partial
    config = replace(
        config,
        block_size=block,
        sparsity_ratio=max(config.sparsity_ratio, 4 / REDUCED_BLOCKS),
        segment_lengths=tuple(max(block, w * reduced_n // n) for w in config.segment_lengths),
    )
    call = make_sparse_call(config, reduced_n, make_pattern(config, reduced_n), backward=backward)
    if call.grad_out is not None:
        call.grad_out.copy_(torch.randn(call.grad_out.shape, generator=torch.Generator().manual_seed(1)))
    results = run_sparse_call(call)

    q, k, v = exact = [x.double().requires_grad_(backward) for x in (call.q, call.k, call.v)]
    out, lse = block_sparse_attention_reference(
        q, k, v, call.pattern.to_dense(), is_causal=config.is_causal, return_lse=True
    )
    return results_error(results, out, lse, exact, call.grad_out)


def sparse_rows_error(
    call: SparseCall, out: Tensor, lse: Tensor | None, gradients: tuple[Tensor, ...] = ()
) -> float:
    """Error of the chosen rows, and of all gradients if there are any, against the definition in float64.

    `lse` is None where a module does not return it.
    """
    expected = [torch.zeros_like(x, dtype=torch.float64) for x in gradients]
    errors = []
    for t in call.rows:
        for head in range(call.config.h):
            keys = visible_keys(call.pattern, head, t)
            leaves = [call.q[0, t, head], call.k[0, keys, head], call.v[0, keys, head]]
            q, k, v = leaves = [x.double().requires_grad_() for x in leaves]
            scores = k @ q / math.sqrt(call.config.d)
            row = scores.softmax(0) @ v
            errors.append(largest_error(out[0, t, head], row))
            if lse is not None:
                errors.append(largest_error(lse[0, head, t], scores.logsumexp(0)))
            if call.grad_out is not None:
                dq, dk, dv = torch.autograd.grad(row, leaves, call.grad_out[0, t, head].double())
                expected[0][0, t, head] += dq
                expected[1][0, keys, head] += dk
                expected[2][0, keys, head] += dv
    errors += [largest_error(*pair) for pair in zip(gradients, expected, strict=True)]
    return max(errors)


def visible_keys(pattern: BlockPattern, head: int, t: int) -> Tensor:
    """The positions that the query at `t` sees."""
    row = (head if len(pattern) > 1 else 0) * pattern.rows + t // pattern.block_size
    first, last = pattern.starts[row : row + 2].tolist()
    inside = torch.arange(pattern.block_size)
    keys = (pattern.columns[first:last].long()[:, None] * pattern.block_size + inside).flatten()
    return keys[keys < (t + 1 if pattern.is_causal else pattern.n)]
