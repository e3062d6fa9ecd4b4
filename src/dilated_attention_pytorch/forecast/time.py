"""The time of an attention call on a CPU relative to that of dense attention, from its plan.

Torch's CPU flash kernel, which runs the tiles and dense attention alike, takes queries in blocks and the keys
that they see in blocks of `KEY_BLOCK`. So a causal tile computes whole blocks along the diagonal: up to
`KEY_BLOCK` keys it costs as much as one that is not causal. Costs are in units of a product of a score and a
feature at the kernel's best rate, and only their ratios have a meaning:

    a pair of query and key      d + SOFTMAX
    a query of a tile            QUERY * d, its share of unpacking keys and of starting rows
    an element packed or merged  MOVE
    backward                     BACKWARD times the kernel's forward, twice the moves

The constants were fitted on x86 with AVX2. The suite `forecast` of the bench compares with what is measured.
"""

from __future__ import annotations

import torch

from ..plan import Pass
from .call import Call

KEY_BLOCK = 512
SOFTMAX = 16
QUERY = 22
MOVE = 30
BACKWARD = 2.6


def relative_time(call: Call) -> float | None:
    """Time of the call over that of dense attention of the same inputs; None where nothing is known of it.

    That is other devices, and float16, in which dense attention may or may not have a fast kernel on a CPU.
    """
    if call.device.type != "cpu" or call.dtype == torch.float16:
        return None
    b, n, h, _, d = call.shape
    passes: tuple[Pass, ...] = ("forward", "backward") if call.train else ("forward",)
    dense = b * h * _kernel_work(n, n, d, call.spec.is_causal)
    own = sum(_pass_work(call, direction) for direction in passes)
    return own / (dense * (1 + BACKWARD if call.train else 1))


def _pass_work(call: Call, direction: Pass) -> float:
    plan, d = call.plan(direction), call.shape.d
    jobs = torch.stack([*(plan.column(x) for x in ("count", "causal", "heads")), plan.key_counts], 1)
    kinds, times = torch.unique(jobs, dim=0, return_counts=True)
    alike = zip(kinds.tolist(), times.tolist(), strict=True)
    return float(sum(num * _job_work(kind, d, direction) for kind, num in alike))


def _job_work(kind: list[int], d: int, direction: Pass) -> float:
    queries, causal, heads, keys = kind
    kernel = heads * _kernel_work(queries, keys, d, bool(causal))
    moved = 2 * d * (heads * queries + keys)
    if direction == "forward":
        return kernel + MOVE * moved
    return BACKWARD * kernel + 2 * MOVE * moved


def _kernel_work(queries: int, keys: int, d: int, is_causal: bool) -> float:
    """Of one head."""
    return computed_pairs(queries, keys, is_causal) * (d + SOFTMAX) + QUERY * queries * d


def computed_pairs(queries: int, keys: int, is_causal: bool) -> int:
    """Pairs that the kernel computes, of which under a causal mask some are then thrown away."""
    if not is_causal:
        return queries * keys
    # Blocks of queries divide those of keys: all queries of the j-th block of keys see j + 1 blocks.
    whole, rest = divmod(queries, KEY_BLOCK)
    return KEY_BLOCK**2 * whole * (whole + 1) // 2 + rest * min(keys, (whole + 1) * KEY_BLOCK)
