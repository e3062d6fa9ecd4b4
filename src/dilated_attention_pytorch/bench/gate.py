"""The gate before the stopwatch: what is measured must first be right.

Two independent checks. A reduced copy of the configuration (shorter segments, an odd length) is compared with
the dense reference, forward and gradients. And at full length, where no dense reference fits, chosen query
rows are computed from the definition in float64, together with the gradients of a loss over just these rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core import AttentionBufferManager
from ..reference import dilated_attention_reference
from .candidates import attend
from .cases import DilatedCase, PoolCase, TimeCase
from .config import Config

# Of inputs of a dtype against float64 results, absolute below 1 and relative above.
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
TOLERANCE = TOLERANCES["float32"]
REDUCED_LENGTH = 256
ROWS_PER_CALL = 8
LONGEST_CHECKED = 32768


class WrongAnswerError(Exception):
    """The library's result differs from the definition: there is nothing to measure."""


@dataclass(frozen=True)
class Call:
    """Inputs of one call, all (b, n, h, d), and the query rows (batch, position) that are checked.

    `grad_out`, present when gradients are asked for, is zero outside the rows: then the rows alone determine
    all three gradients, at every position.
    """

    config: Config
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor | None
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Results:
    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...] = ()


def make_call(config: Config, b: int, n: int, *, backward: bool = False, seed: int = 0) -> Call:
    """Seeded random inputs, every byte of them written."""
    generator = torch.Generator().manual_seed(seed)
    shape = (b, n, config.h, config.d)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    rows = _choose_rows(config, b, n, seed)
    grad_out = None
    if backward:
        grad_out = torch.empty(shape).fill_(0.0)  # torch.zeros would leave the memory untouched
        for row in rows:
            grad_out[row] = torch.randn(shape[2:], generator=generator)
    return Call(config, q, k, v, grad_out, rows)


def run_call(call: Call, memory: str = "fresh") -> Results:
    """One call of the library, with gradients when the call holds a `grad_out`."""
    if call.grad_out is None:
        return Results(*attend(call.config, call.q, call.k, call.v, memory=memory))
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    out, lse = attend(call.config, *leaves, memory=memory)
    gradients = torch.autograd.grad(out, leaves, call.grad_out)
    return Results(out.detach(), lse.detach(), gradients)


def check_case(case: DilatedCase) -> float:
    """The largest error of a case, or `WrongAnswerError`.

    Memory and long cases check their rows after they are measured, on the very results: one call is enough.
    """
    backward = not isinstance(case, (TimeCase, PoolCase)) or case.backward
    errors = [reduced_error(case.config, _longest(case), backward=backward)]
    if isinstance(case, TimeCase):
        for i, (b, n) in enumerate(case.calls):
            call = make_call(case.config, b, n, backward=case.backward, seed=i)
            errors.append(rows_error(call, run_call(call)))
    elif isinstance(case, PoolCase):
        manager = AttentionBufferManager()
        # Longer calls have their rows checked where their memory is measured.
        for b, n in sorted({(b, min(n, LONGEST_CHECKED)) for b, n in case.calls}):
            call = make_call(case.config, b, n, backward=case.backward)
            fresh = run_call(call)
            errors.append(rows_error(call, fresh))
            for memory in ("pool", "lightweight", manager.name) * 2:  # first new buffers, then used ones
                if not _equal(fresh, run_call(call, memory)):
                    raise WrongAnswerError(f"{case.name}: memory={memory!r} changes the result: not measured")
    return accept(case.name, max(errors))


def _equal(one: Results, other: Results) -> bool:
    pairs = zip((one.out, one.lse, *one.gradients), (other.out, other.lse, *other.gradients), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def accept(name: str, error: float, tolerance: float = TOLERANCE) -> float:
    """The error, if it is tolerable."""
    if not error <= tolerance:
        raise WrongAnswerError(
            f"{name}: the result is off by {error:.1e}, more than {tolerance:.0e}: not measured"
        )
    return error


def reduced_error(config: Config, n: int, *, backward: bool) -> float:
    """Error against the dense reference, everything about `n / REDUCED_LENGTH` times shorter."""
    factor = max(1, n // REDUCED_LENGTH)
    segment_lengths = tuple(max(r, w // factor) for w, r in config.spec.branches)
    config = replace(config, segment_lengths=segment_lengths)
    n = (n // factor + 36) | 1  # odd and past a boundary, so that no branch fits evenly
    call = make_call(config, 1, n, backward=backward)
    if call.grad_out is not None:
        call.grad_out.copy_(torch.randn(call.grad_out.shape, generator=torch.Generator().manual_seed(1)))
    results = run_call(call)

    q, k, v = exact = [x.double().requires_grad_(backward) for x in (call.q, call.k, call.v)]
    branches = (config.segment_lengths, config.dilation_rates)
    out, lse = dilated_attention_reference(q, k, v, *branches, is_causal=config.is_causal, return_lse=True)
    return results_error(results, out, lse, exact, call.grad_out)


def results_error(
    results: Results, out: Tensor, lse: Tensor, leaves: Sequence[Tensor], grad_out: Tensor | None
) -> float:
    """Error against the reference's out and lse, and the gradients of its leaves if there is a `grad_out`."""
    errors = [largest_error(results.out, out), largest_error(results.lse, lse)]
    if grad_out is not None:
        gradients = torch.autograd.grad(out, leaves, grad_out.double())
        errors += [largest_error(*pair) for pair in zip(results.gradients, gradients, strict=True)]
    return max(errors)


def rows_error(call: Call, results: Results) -> float:
    """Error of the chosen rows, and of all gradients if there are any, against the definition in float64."""
    expected = [torch.zeros_like(x, dtype=torch.float64) for x in results.gradients]
    errors = []
    for batch, t in call.rows:
        keys, counts = met_keys(call.config, call.q.shape[1], t)
        given = (call.q[batch, t], call.k[batch, keys], call.v[batch, keys])
        q, k, v = leaves = [x.double().requires_grad_() for x in given]
        out, lse = attend_counted(q, k, v, counts)
        errors.append(largest_error(results.out[batch, t], out))
        errors.append(largest_error(results.lse[batch, :, t], lse))
        if call.grad_out is not None:
            dq, dk, dv = torch.autograd.grad(out, leaves, call.grad_out[batch, t].double())
            expected[0][batch, t] += dq
            expected[1][batch, keys] += dk
            expected[2][batch, keys] += dv
    errors += [largest_error(*pair) for pair in zip(results.gradients, expected, strict=True)]
    return max(errors)


def attend_row(config: Config, q: Tensor, k: Tensor, v: Tensor, *, t: int, lo: int) -> tuple[Tensor, Tensor]:
    """out (h, d) and lse (h,) of the query q (h, d) at position `t`; k and v (m, h, d) start at `lo`."""
    return attend_counted(q, k, v, count_keys(config, t, lo, lo + k.shape[0]))


def met_keys(config: Config, n: int, t: int) -> tuple[Tensor, Tensor]:
    """The keys (m,) that the query at position `t` meets in some head, and how often each does: (h, m)."""
    lo, hi = reach(config, n, t)
    counts = count_keys(config, t, lo, hi)
    keys = counts.any(0).nonzero()[:, 0]
    return lo + keys, counts[:, keys]


def count_keys(config: Config, t: int, lo: int, hi: int) -> Tensor:
    """How often each head's query at position `t` meets each key from `lo` to `hi`: (h, hi - lo)."""
    position = torch.arange(lo, hi)
    head = torch.arange(config.h)[:, None]
    counts = torch.zeros(config.h, hi - lo, dtype=torch.float64)
    for w, r in config.spec.branches:
        reached = (position // w == t // w) & (position % w % r == head % r) & (t % w % r == head % r)
        counts += reached & (position <= t) if config.is_causal else reached
    return counts


def attend_counted(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """out (h, d) and lse (h,) of one query q (h, d) that meets k and v (m, h, d) `counts` (h, m) times.

    A head that meets no key has zeros and -inf, and gives no gradient.
    """
    meets = counts.sum(-1) > 0
    counts = torch.where(meets[:, None], counts, 1.0)
    scores = torch.einsum("hd,mhd->hm", q, k) / math.sqrt(q.shape[-1]) + counts.log()
    lse = scores.logsumexp(-1)
    out = torch.einsum("hm,mhd->hd", torch.exp(scores - lse[:, None]), v)
    return torch.where(meets[:, None], out, 0.0), lse.masked_fill(~meets, -math.inf)


def reach(config: Config, n: int, t: int) -> tuple[int, int]:
    """The positions that any branch can connect with `t`."""
    starts = [t // w * w for w in config.segment_lengths]
    ends = [min(n, start + w) for start, w in zip(starts, config.segment_lengths, strict=True)]
    return min(starts), max(ends)


def _choose_rows(config: Config, b: int, n: int, seed: int) -> tuple[tuple[int, int], ...]:
    draw = random.Random(seed)
    return tuple((draw.randrange(b), t) for t in choose_places(config.segment_lengths[0], n, draw))


def choose_places(period: int, n: int, draw: random.Random) -> list[int]:
    """The ends of the sequence, both sides of a boundary in its middle, and positions by chance."""
    boundary = period * (n // period // 2)
    places = {0, n - 1, max(0, boundary - 1), boundary % n}
    places |= {draw.randrange(n) for _ in range(ROWS_PER_CALL - len(places))}
    return sorted(places)


def _longest(case: DilatedCase) -> int:
    return max(n for _, n in case.calls) if isinstance(case, (TimeCase, PoolCase)) else case.n


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, absolute below 1 and relative to the largest value above; infinite for NaN."""
    expected = expected.detach()
    largest = max(1.0, expected.abs().max().item())
    error = (actual - expected).abs().max().item() / largest
    return math.inf if math.isnan(error) else error  # max() may lose a NaN
