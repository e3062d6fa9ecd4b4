"""WHO competes: dilated attention as users call it, and the bare kernel on ready-made tiles.

The bare kernel is PyTorch's CPU flash attention, called directly on contiguous tensors of the shapes that
the engine's own plan cuts: for the forward pass the forward plan's tiles; for the backward pass the backward
plan's, with out and lse made beforehand. It packs nothing, merges nothing and keeps no result, and is so
a time that an engine over this kernel can approach but not beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .. import functional
from ..core import AttentionBufferManager, reset_global_pattern_cache
from ..kernels.batches import batches_of
from ..plan import Plan, Shape, plan_dilated
from ..spec import Execution
from .cases import PoolCase, TimeCase
from .config import Config

Candidate = Callable[[], object]
Direction = Literal["forward", "backward"]

# Tensors of a candidate lie one after the other in memory and start over beyond this many elements: enough to
# leave every cache between two uses of a row, and little enough to fit beside the other candidate.
ARENA_NUMEL = 2**25


class Arena:
    """Random float32 memory from which contiguous tensors are cut, one after the other."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], seed: int) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        numel = min(sum(sizes), max([ARENA_NUMEL, *sizes]))
        self.memory = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        self.position = 0

    def take(self, shape: tuple[int, ...]) -> Tensor:
        numel = math.prod(shape)
        if self.position + numel > self.memory.numel():
            self.position = 0
        start, self.position = self.position, self.position + numel
        return self.memory[start : start + numel].view(shape)


def attend(
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    memory: str = "fresh",
    use_pattern_cache: bool = True,
) -> tuple[Tensor, Tensor]:
    """out and lse of the library under test: the one call that is checked and measured."""
    result = functional.dilated_attention(
        q,
        k,
        v,
        config.segment_lengths,
        config.dilation_rates,
        is_causal=config.is_causal,
        return_lse=True,
        execution=Execution(memory=memory, use_pattern_cache=use_pattern_cache),
    )
    assert isinstance(result, tuple)
    return result


def dilated_candidate(case: TimeCase) -> Candidate:
    """All calls of a case through the public function; with backward, the gradients of q, k and v."""
    config = case.config
    shapes = [(b, n, config.h, config.d) for b, n in case.calls]
    arenas = [Arena(shapes, seed) for seed in range(4 if case.backward else 3)]
    calls = [[arena.take(shape) for arena in arenas] for shape in shapes]

    def run() -> None:
        if case.new_lengths:
            reset_global_pattern_cache()
        for tensors in calls:
            if case.backward:
                q, k, v = leaves = [x.detach().requires_grad_() for x in tensors[:3]]
                torch.autograd.grad(attend(config, q, k, v)[0], leaves, tensors[3])
            else:
                attend(config, *tensors)

    return run


def pool_candidates(case: PoolCase, managers: list[AttentionBufferManager]) -> dict[str, Candidate]:
    """The calls of a case with fresh memory and with each kind of pooled memory, on the same tensors.

    A buffer manager lives as long as `managers`, to which it is added.
    """
    managers.append(AttentionBufferManager())
    shapes = [(b, n, case.config.h, case.config.d) for b, n in case.calls]
    arenas = [Arena(shapes, seed) for seed in range(4)]
    calls = [[arena.take(shape) for arena in arenas] for shape in shapes]

    def candidate(memory: str, use_pattern_cache: bool = True) -> Candidate:
        def run() -> None:
            for tensors in calls:
                q, k, v = leaves = [x.detach().requires_grad_(case.backward) for x in tensors[:3]]
                out, _ = attend(case.config, q, k, v, memory=memory, use_pattern_cache=use_pattern_cache)
                if case.backward:
                    torch.autograd.grad(out, leaves, tensors[3])

        return run

    names = {"fresh": "fresh", "pool": "pool", "lightweight": "lightweight", "manager": managers[-1].name}
    pooled = {name: candidate(memory) for name, memory in names.items()}
    return {**pooled, "no plan cache": candidate("fresh", use_pattern_cache=False)}


def bare_candidate(case: TimeCase) -> Candidate:
    """The flash kernel alone, on ready-made tensors of the tile shapes of the case."""
    scale = 1.0 / math.sqrt(case.config.d)
    forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    forward_tiles = _ready_tiles(case, "forward")
    backward_tiles = []
    ready = _ready_tiles(case, "backward") if case.backward else []
    gradients = Arena([tuple(q.shape) for q, *_ in ready], 3)
    for q, k, v, is_causal in ready:
        out, lse = forward_op(q, k, v, 0.0, is_causal, attn_mask=None, scale=scale)
        grad_out = gradients.take(tuple(q.shape))
        backward_tiles.append((grad_out, q, k, v, out, lse, 0.0, is_causal))

    def run() -> None:
        for q, k, v, is_causal in forward_tiles:
            forward_op(q, k, v, 0.0, is_causal, attn_mask=None, scale=scale)
        for tile in backward_tiles:
            backward_op(*tile, attn_mask=None, scale=scale)

    return run


def count_flops(case: TimeCase) -> int:
    """Floating point operations of the matrix products: 2 a pair and feature in forward, 5 in backward."""
    pairs = sum(_plan(case.config, b, n, "forward").num_pairs for b, n in case.calls)
    return 2 * (7 if case.backward else 2) * case.config.d * pairs


def _plan(config: Config, b: int, n: int, direction: Direction) -> Plan:
    return plan_dilated(
        config.spec, Shape(b, n, config.h, config.h, config.d), itemsize=4, direction=direction
    )


def _ready_tiles(case: TimeCase, direction: Direction) -> list[tuple[Tensor, Tensor, Tensor, bool]]:
    d = case.config.d
    plans = [_plan(case.config, b, n, direction) for b, n in case.calls]
    batches = [batch for plan in plans for _, each in batches_of(plan, 4) for batch in each]
    q_shapes = [(*batch.queries.shape, d) for batch in batches]
    k_shapes = [(*batch.keys[0].rows.shape, d) for batch in batches]
    q, k, v = Arena(q_shapes, 0), Arena(k_shapes, 1), Arena(k_shapes, 2)
    return [
        (q.take(q_shape), k.take(k_shape), v.take(k_shape), batch.keys[0].is_causal)
        for batch, q_shape, k_shape in zip(batches, q_shapes, k_shapes, strict=True)
    ]
