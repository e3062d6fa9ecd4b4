"""The gate before the stopwatch: what is measured must first equal its definition, forward and gradients.

`compare` holds a call to a reference in float64. At full length, where no dense reference fits,
`compare_rows` computes chosen query rows from the definition, with the gradients of a loss over these rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...plan import BlockPattern
from ...spec import DilatedSpec

# Of inputs of a dtype against float64 results, absolute below 1 and relative above.
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
ROWS = 8
Keys = tuple[Tensor, Tensor]  # the keys (m,) that a query meets, and how often each head does (h or 1, m)


class WrongAnswerError(Exception):
    """A result differs from its definition: there is nothing to measure."""


def accept(name: str, error: float, dtype: str = "float32") -> float:
    """The error, if it is tolerable in the dtype."""
    tolerance = TOLERANCES[dtype]
    if not error <= tolerance:
        raise WrongAnswerError(
            f"{name}: the result is off by {error:.1e}, more than {tolerance:.0e}: not measured"
        )
    return error


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, absolute below 1 and relative to the largest value above; infinite for NaN.

    Where infinity is expected, as of rows that meet no key, nothing else will do.
    """
    actual, expected, is_infinite = actual.detach(), expected.detach(), expected.isinf()
    if (actual != expected)[is_infinite].any():
        return math.inf
    actual, expected = (x.masked_fill(is_infinite, 0.0) for x in (actual, expected))
    error = (actual - expected).abs().max().item() / max(1.0, expected.abs().max().item())
    return math.inf if math.isnan(error) else error  # max() may lose a NaN


def compare(
    attend: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    grad_out: Tensor | None,
) -> list[float]:
    """The errors of a call against its reference in float64: of out and what else both give, of gradients."""
    exact = None if grad_out is None else grad_out.double()
    expected = call(reference, [x.double() for x in inputs], exact)
    return [largest_error(*pair) for pair in zip(call(attend, inputs, grad_out), expected, strict=True)]


def call(
    attend: Callable[..., Any],
    inputs: Sequence[Tensor],
    grad_out: Tensor | None,
    weights: Sequence[Tensor] = (),
) -> list[Tensor]:
    """What an attention gives, and the gradients of its inputs and weights if there is a `grad_out`."""
    with torch.set_grad_enabled(grad_out is not None):
        leaves = [x.detach().requires_grad_(grad_out is not None) for x in inputs]
        found = attend(*leaves)
        results = found if isinstance(found, tuple) else (found,)
        gradients = () if grad_out is None else torch.autograd.grad(results[0], [*leaves, *weights], grad_out)
    return [*(x.detach() for x in results), *gradients]


def make_inputs(
    shape: Sequence[int],
    dtype: str = "float32",
    *,
    count: int = 3,
    backward: bool = False,
    rows: Iterable[int] | None = None,
    seed: int = 0,
) -> tuple[list[Tensor], Tensor | None]:
    """Seeded inputs, every byte of them written, and with `backward` the gradient of out.

    It is zero but at `rows` of the last sequence, if given: then they alone determine all gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": getattr(torch, dtype)}
    inputs = [torch.randn(*shape, **draw) for _ in range(count)]
    if not backward:
        return inputs, None
    if rows is None:
        return inputs, torch.randn(*shape, **draw)
    grad_out = torch.empty_like(inputs[0]).fill_(0.0)  # torch.zeros would leave the memory untouched
    for t in rows:
        grad_out[-1, t] = torch.randn(*shape[2:], **draw)
    return inputs, grad_out


def choose_rows(period: int, n: int, seed: int = 0) -> list[int]:
    """The ends of the sequence, both sides of a boundary in its middle, and positions by chance."""
    draw = random.Random(seed)
    boundary = period * (n // period // 2)
    places = {0, n - 1, max(0, boundary - 1), boundary % n}
    return sorted(places | {draw.randrange(n) for _ in range(ROWS - len(places))})


def dilated_keys(spec: DilatedSpec, num_heads: int, n: int, t: int) -> Keys:
    """What the query at position `t` meets in dilated attention, from its definition."""
    reach = [(t // w * w, min(n, t // w * w + w)) for w in spec.segment_lengths]
    position = torch.arange(min(lo for lo, _ in reach), max(hi for _, hi in reach))
    head = torch.arange(num_heads)[:, None]
    counts = torch.zeros(num_heads, len(position), dtype=torch.float64)
    for w, r in spec.branches:
        reached = (position // w == t // w) & (position % w % r == head % r) & (t % w % r == head % r)
        counts += reached & (position <= t) if spec.is_causal else reached
    met = counts.any(0)
    return position[met], counts[:, met]


def block_keys(pattern: BlockPattern, num_heads: int, t: int) -> Keys:
    """What the query at position `t` meets in block-sparse attention."""
    dense = torch.zeros(num_heads, pattern.n, dtype=torch.float64)
    for head in range(num_heads):
        row = (head if len(pattern) > 1 else 0) * pattern.rows + t // pattern.block_size
        first, last = pattern.starts[row : row + 2].tolist()
        inside = torch.arange(pattern.block_size)
        keys = (pattern.columns[first:last].long()[:, None] * pattern.block_size + inside).flatten()
        dense[head, keys[keys < (t + 1 if pattern.is_causal else pattern.n)]] = 1.0
    met = dense.any(0)
    return met.nonzero()[:, 0], dense[:, met]


def attend_row(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """out (h, d) and lse (h,) of one query q (h, d) that meets k and v (m, h, d) `counts` times.

    A head that meets no key has zeros and -inf, and gives no gradient.
    """
    meets = counts.sum(-1) > 0
    counts = torch.where(meets[:, None], counts, 1.0)
    scores = torch.einsum("hd,mhd->hm", q, k) / math.sqrt(q.shape[-1]) + counts.log()
    lse = scores.logsumexp(-1)
    out = torch.einsum("hm,mhd->hd", torch.exp(scores - lse[:, None]), v)
    return torch.where(meets[:, None], out, 0.0), lse.masked_fill(~meets, -math.inf)


def compare_rows(
    inputs: Sequence[Tensor],
    grad_out: Tensor | None,
    results: Sequence[Tensor],
    rows: Mapping[int, Keys],
    has_lse: bool = False,
) -> float:
    """Error of rows of the last sequence, and of all gradients, against the definition in float64.

    `inputs` and `grad_out` are those of `make_inputs` with these rows, `results` those of `call`.
    """
    q, k, v = (x[-1] for x in inputs)
    out, gradients = results[0], results[1 + has_lse :]
    met = torch.unique(torch.cat([keys for keys, _ in rows.values()]))
    sums = torch.zeros(2, len(met), *q.shape[1:], dtype=torch.float64)
    errors = []
    for t, (keys, counts) in rows.items():
        query, key, value = leaves = [x.double().requires_grad_() for x in (q[t], k[keys], v[keys])]
        row, row_lse = attend_row(query, key, value, counts)
        errors.append(largest_error(out[-1, t], row))
        if has_lse:
            errors.append(largest_error(results[1][-1, :, t], row_lse))
        if grad_out is not None:
            dq, *of_keys = torch.autograd.grad(row, leaves, grad_out[-1, t].double())
            errors.append(largest_error(gradients[0][-1, t], dq))
            sums[:, torch.searchsorted(met, keys)] += torch.stack(of_keys)
    if grad_out is not None:
        errors.append(_largest_outside(gradients[0], torch.tensor(list(rows))))
        for gradient, expected in zip(gradients[1:], sums, strict=True):
            errors += [largest_error(gradient[-1, met], expected), _largest_outside(gradient, met)]
    return max(errors)


def _largest_outside(gradient: Tensor, rows: Tensor) -> float:
    """The largest magnitude but at rows of the last sequence, where there should be zeros; without a copy."""
    outside = torch.ones(gradient.shape[:2], dtype=torch.bool)
    outside[-1, rows] = False
    parts = zip(*(torch.split(x.flatten(0, 1), 2**16) for x in (gradient, outside)), strict=True)
    largest = [part[where].abs().amax().item() for part, where in parts if where.any()]
    return max((math.inf if math.isnan(value) else value for value in largest), default=0.0)
