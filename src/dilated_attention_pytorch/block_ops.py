"""The custom ops behind block-sparse attention, forward and backward, known to autograd and compilers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import block_engine
from .attention_op import attention_inputs, register_attention, with_memory, without_autocast
from .core.block_patterns import get_block_pattern_cache
from .core.workspace import Workspace
from .engine import Merged
from .plan import BlockPattern, BlockPlan, build_pattern, plan_blocks
from .plan.block_sparse import BYTES_A_THREAD
from .spec import SparsePatternConfig


class BlockOptions(NamedTuple):
    """The static part of a call, in the order of the ops' schema.

    The pattern is either built here, from a `recipe`, or given by tensors beside the options; then `recipe`
    is the pattern's key, under which its schedule is cached, or empty if it is not worth keeping.
    """

    recipe: str
    block_size: int
    is_causal: bool
    scale: float
    dropout_p: float
    kernel: str
    workspace_bytes: int
    memory: str
    use_pattern_cache: bool


BY_THREADS = 0  # a workspace_bytes that is known only where the op runs: compilers cannot ask for threads
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? starts, Tensor? columns, Tensor? key_mask, Tensor? seed"
_OPTIONS = (
    "str recipe, int block_size, bool is_causal, float scale, float dropout_p, str kernel, "
    "int workspace_bytes, str memory, bool use_pattern_cache"
)


def write_recipe(config: SparsePatternConfig, branches: Sequence[tuple[int, int]]) -> str:
    """A config as a string, which ops can take and compilers can guard on."""
    return json.dumps({"config": asdict(config), "branches": list(branches)})


@lru_cache(maxsize=256)
def _read_recipe(recipe: str) -> tuple[SparsePatternConfig, tuple[tuple[int, int], ...]]:
    content = json.loads(recipe)
    return SparsePatternConfig(**content["config"]), tuple(map(tuple, content["branches"]))


def recipe_pattern(q: Tensor, options: BlockOptions) -> BlockPattern:
    """The pattern that a call builds from its recipe."""
    return _plan(q, None, None, options).pattern


def _plan(q: Tensor, starts: Tensor | None, columns: Tensor | None, options: BlockOptions) -> BlockPlan:
    n, num_heads = q.shape[1], q.shape[2]
    build = partial(_build, n, num_heads, starts, columns, options)
    if not options.use_pattern_cache or not options.recipe:
        return build()
    # The same pattern may serve any number of heads, but not the draws of a random one.
    key = ("block_sparse", options.recipe, n, num_heads, options.is_causal)
    return get_block_pattern_cache().get_or_build(key, build)


def _build(
    n: int, num_heads: int, starts: Tensor | None, columns: Tensor | None, options: BlockOptions
) -> BlockPlan:
    if starts is not None and columns is not None:
        pattern = BlockPattern(n, options.block_size, starts.cpu(), columns.cpu())
        return plan_blocks(pattern.causal() if options.is_causal else pattern)
    config, branches = _read_recipe(options.recipe)
    return plan_blocks(build_pattern(config, n, num_heads, is_causal=options.is_causal, branches=branches))


def sized(options: BlockOptions) -> BlockOptions:
    """The options with a workspace of this many threads, unless they name one."""
    if options.workspace_bytes != BY_THREADS:
        return options
    return options._replace(workspace_bytes=BYTES_A_THREAD * torch.get_num_threads())


@torch.library.custom_op(
    "dilated_attention_pytorch::block_sparse_attention",
    mutates_args=(),
    schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor out, Tensor lse)",
)
def block_sparse_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    columns: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    *raw: Any,
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, h, n); arguments as in `block_sparse.block_sparse_attention`."""
    plan = _plan(q, starts, columns, BlockOptions(*raw))

    def attend(options: BlockOptions, workspace: Workspace) -> tuple[Tensor, Tensor]:
        inputs = attention_inputs(options, q, k, v, key_mask, seed, workspace)
        return block_engine.forward(plan, inputs, options.workspace_bytes)

    with without_autocast(q.device):
        return with_memory(sized(BlockOptions(*raw)), q.device, attend)


@torch.library.custom_op(
    "dilated_attention_pytorch::block_sparse_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
)
def block_sparse_attention_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    columns: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    *raw: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the forward's results and the gradients of its outputs."""
    plan = _plan(q, starts, columns, BlockOptions(*raw))

    def attend(options: BlockOptions, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
        inputs = attention_inputs(options, q, k, v, key_mask, seed, workspace)
        merged = Merged(out, lse, grad_out, grad_lse)
        return block_engine.backward(plan, inputs, options.workspace_bytes, merged)

    with without_autocast(q.device):
        return with_memory(sized(BlockOptions(*raw)), q.device, attend)


register_attention(block_sparse_attention_op, block_sparse_attention_backward_op, num_tensors=7)


def _flops(matmuls: int, q: Tensor, starts: Tensor | None, columns: Tensor | None, raw: Sequence[Any]) -> int:
    pattern = _plan(q, starts, columns, BlockOptions(*raw)).pattern
    return 2 * matmuls * q.shape[-1] * pattern.num_pairs * (q.shape[0] * q.shape[2] // len(pattern))


@register_flop_formula(torch.ops.dilated_attention_pytorch.block_sparse_attention, get_raw=True)
def _(
    q: Tensor, _k: Any, _v: Any, starts: Any, columns: Any, _mask: Any, _seed: Any, *raw: Any, **_: Any
) -> int:
    return _flops(2, q, starts, columns, raw)


@register_flop_formula(torch.ops.dilated_attention_pytorch.block_sparse_attention_backward, get_raw=True)
def _(*args: Any, **_: Any) -> int:
    q, _k, _v, starts, columns, _mask, _seed, *raw = args[4:]  # after the gradients, out and lse
    return _flops(5, q, starts, columns, raw)
