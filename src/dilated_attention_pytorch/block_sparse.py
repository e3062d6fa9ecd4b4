"""The public functions of block-sparse attention: patterns, and attention over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import (
    autocast_inputs,
    check_device,
    check_flags,
    check_inputs,
    check_positive_int,
    named_keywords,
    refuse_forward_mode,
)
from .kernels import Request, choose_kernel
from .ops import (
    NO_TABLES,
    BlockSparse,
    Tensors,
    attention_op,
    block_spec,
    check_execution,
    write_execution,
    write_spec,
)
from .plan import BlockPattern, build_pattern, choose_blocks
from .plan.flex import dilated_block_mask, flex_block_sparse, why_not_flex
from .spec import DilatedSpec, Execution, SparsePatternConfig, resolve_branches

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    Blocks = BlockPattern | BlockMask


@named_keywords
def build_block_pattern(
    config: SparsePatternConfig | Mapping[str, Any],
    n: int,
    num_heads: int,
    *,
    is_causal: bool = False,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    query: Tensor | None = None,
    key: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> BlockPattern:
    """The blocks that a config keeps of n tokens: one layout for all heads, or one a head for "random".

    Args:
        config: see `SparsePatternConfig`; also its fields as a dict.
        n, num_heads: length of the sequence, and heads of the queries.
        is_causal: only the lower triangle is there, and `sparsity_ratio` counts in it.
        segment_lengths, dilation_rates: the branches of "dilated_sparse", as in `dilated_attention`; other
            types have none. Segments are rounded down to whole blocks; a block must fit a segment.
        query, key: (b, n, h, d) and (b, n, h_kv, d), for "adaptive" alone: blocks are scored by their mean
            queries and keys, and the pattern has a layout for each batch and head. Under `is_causal` the mean
            is of the queries up to the block's first. Positions that `key_mask` (b, n) hides do not count.
    """
    config = SparsePatternConfig.of(config)
    check_flags(is_causal=is_causal)
    check_positive_int("n", n)
    check_positive_int("num_heads", num_heads)
    branches = check_branches(config, segment_lengths, dilation_rates)
    if config.pattern_type == "adaptive":
        if query is None or key is None:
            raise ValueError('an "adaptive" pattern depends on query and key, and they are not given')
        check_inputs(query, key, key, key_mask, None)
        if query.shape[1:3] != (n, num_heads):
            rule = f"query must have the length {n} and {num_heads} heads"
            raise ValueError(f"{rule}, got shape {tuple(query.shape)}")
        with torch.no_grad():
            row = pool_queries(query, config.block_size, is_causal, key_mask)
            column = pool_queries(key, config.block_size, False, key_mask)
            return choose_blocks(row, column, n, config, is_causal, key_mask)
    if not (query is None and key is None and key_mask is None):
        rule = 'query, key and key_mask are for "adaptive" patterns'
        raise ValueError(f"{rule}, got one of {config.pattern_type!r}")
    with torch.device("cpu"):
        return build_pattern(config, n, num_heads, is_causal=is_causal, branches=branches)


def check_branches(
    config: SparsePatternConfig, segment_lengths: Sequence[int] | None, dilation_rates: Sequence[int] | None
) -> tuple[tuple[int, int], ...]:
    """The branches (segment length, rate) of a config's pattern; none but for "dilated_sparse"."""
    branches = DilatedSpec(*resolve_branches(segment_lengths, dilation_rates)).branches
    if config.pattern_type != "dilated_sparse":
        return ()
    size, shortest = config.block_size, min(length for length, _ in branches)
    if size > shortest:
        rule = "a block must fit a segment"
        raise ValueError(f"{rule}, got a block_size of {size} and a segment of {shortest}")
    return branches


@named_keywords
def create_dilated_block_mask(
    n: int,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    is_causal: bool = False,
    window_size: int | None = None,
    num_heads: int | None = None,
    block_size: int = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """FlexAttention's `BlockMask` of dilated branches, of a band along the diagonal, or of both together.

    A query sees the keys that some branch of `dilated_attention` shows it, and those less than `window_size`
    positions away. Each counts once: with one branch that is `dilated_attention`, with several it is not, as
    their softmax counts a key as often as branches reach it. `block_sparse_attention` takes the mask, on a
    CPU forward and backward, and `flex_attention` does.

    Made from formulas over pairs of blocks; no mask of n x n positions is evaluated. The mask itself has an
    entry for each pair of blocks, and for each head if heads differ.

    Args:
        n: length of the sequence.
        segment_lengths, dilation_rates: the branches, as in `dilated_attention`; none for a band alone.
        is_causal: a query sees only keys at or before its position.
        window_size: positions in tokens, the query's own included, to either side.
        num_heads: heads of the queries; head h selects the positions at offset h % rate, as in
            `dilated_attention`. Without it all heads select those at offset 0.
        block_size: positions of a block; FlexAttention on GPUs takes multiples of 128.
        device: of the mask.
    """
    check_flags(is_causal=is_causal)
    check_positive_int("n", n)
    check_positive_int("block_size", block_size)
    for name, value in (("window_size", window_size), ("num_heads", num_heads)):
        if value is not None:
            check_positive_int(name, value)
    if segment_lengths is None and dilation_rates is None and window_size is None:
        raise ValueError("a mask needs branches, a window_size or both, got neither")
    branches: tuple[tuple[int, int], ...] = ()
    if segment_lengths is not None or dilation_rates is not None:
        branches = DilatedSpec(segment_lengths, dilation_rates).branches  # type: ignore[arg-type]
    options: dict[str, Any] = {"is_causal": is_causal, "window_size": window_size, "num_heads": num_heads}
    options |= {"block_size": block_size, "device": check_device(device) or torch.device("cpu")}
    return dilated_block_mask(n, branches, **options)  # type: ignore[no-any-return]


def pool_queries(x: Tensor, block_size: int, is_causal: bool, mask: Tensor | None) -> Tensor:
    """(b, n, h, d) -> (b, h, blocks, d): the mean of each block, in float32 or better; differentiable.

    Under a causal mask the mean of as many positions that end with the block's first one, which is all that
    its first query may know. Positions that `mask` (b, n) hides do not count.
    """
    windows = _windows(x, block_size, mask, block_size - 1 if is_causal else 0)
    total, weight = (y.sum(2).transpose(1, 2) for y in windows)
    return total / weight.clamp_min(1.0)


def pool_keys(x: Tensor, block_size: int, mask: Tensor | None) -> Tensor:
    """(b, n, h, d) -> (b, n, h, d): the mean of the keys of a block up to each of them; differentiable.

    At the end of a block that is the mean of the block. Positions that `mask` (b, n) hides do not count.
    """
    total, weight = (y.cumsum(2).flatten(1, 2)[:, : x.shape[1]] for y in _windows(x, block_size, mask))
    return total / weight.clamp_min(1.0)


def _windows(x: Tensor, size: int, mask: Tensor | None, before: int = 0) -> tuple[Tensor, Tensor]:
    """x behind `before` zeros, and 1 for each position that counts, as (b, blocks, size, h, d)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    weight = x.new_ones(x.shape[0], x.shape[1], 1, 1)
    if mask is not None:
        x = x.masked_fill(~mask[:, :, None, None], 0.0)
        weight = mask[:, :, None, None].to(x.dtype)
    blocks = -(-x.shape[1] // size)
    padded = (F.pad(y, (0, 0, 0, 0, before, size))[:, : blocks * size] for y in (x, weight))
    x, weight = (y.reshape(len(y), blocks, size, *y.shape[2:]) for y in padded)
    return x, weight


def block_ends(n: int, block_size: int) -> Tensor:
    """The last position of each block."""
    return torch.arange(block_size - 1, n + block_size - 1, block_size, device="cpu").clamp_max(n - 1)


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Blocks, *, return_lse: Literal[False] = ..., **options: Any
) -> Tensor: ...


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Blocks, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...


@named_keywords  # type: ignore[misc]  # the overloads leave the options open
def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Blocks,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0,
    key_mask: Tensor | None = None,
    return_lse: bool = False,
    execution: Execution | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which each block of queries sees the blocks of keys that a pattern keeps:

        scores = (scale * q @ k.T).masked_fill(~pattern.to_dense(), -inf)
        out    = softmax(scores) @ v

    Time follows the density of the pattern; nothing of size n x n is made.

    Args:
        q: (b, n, h, d), float16, bfloat16, float32 or float64, any strides.
        k, v: (b, n, h_kv, d) of the same dtype and device; h_kv divides h (grouped-query attention).
        pattern: of length n, with one layout, one for each of the h heads, or one for each batch and head
            (b x h); see `build_block_pattern` and `BlockPattern.from_layout`. Or FlexAttention's `BlockMask`
            with its `mask_mod`, which each call converts; `BlockPattern.from_block_mask` does so once.
        is_causal: a query sees only keys at or before its position. A causal pattern asks for it.
        scale, dropout_p, key_mask, return_lse, execution: as in `dilated_attention`.

    Returns:
        out (b, n, h, d), contiguous, in the dtype of q; with `return_lse` also lse (b, h, n), in float32
        (float64 for float64). A query that sees no key gives zeros, lse -inf and zero gradients.

    Keys and values whose strides are no multiples of d are copied first. There is no second and no
    forward-mode derivative, and `torch.func.grad` cannot differentiate it.
    """
    if type(pattern).__name__ == "BlockMask":  # a look at its class would import the compiler
        num_heads = q.shape[2] if isinstance(q, Tensor) and q.dim() == 4 else None
        pattern = BlockPattern.from_block_mask(pattern, is_causal=is_causal, num_heads=num_heads)
    if not isinstance(pattern, BlockPattern):
        raise TypeError(f"pattern must be a BlockPattern, got {type(pattern).__name__}")
    check_flags(return_lse=return_lse)
    spec = block_spec(is_causal, scale, dropout_p)
    out, lse = attend_blocks(q, k, v, pattern, spec, execution, key_mask=key_mask)
    return (out, lse) if return_lse else out


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: BlockPattern | str,
    spec: DilatedSpec,
    execution: Execution | None = None,
    *,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of `block_sparse_attention`, also of the recipe of a pattern: checks, then the op."""
    q, k, v = autocast_inputs(q, k, v)
    check_inputs(q, k, v, key_mask, None)
    refuse_forward_mode("block_sparse_attention", q, k, v)
    execution = check_execution(execution)
    if isinstance(pattern, str):
        tables, work = NO_TABLES, BlockSparse(spec, pattern)
    else:
        check_fit(pattern, q, spec.is_causal)
        if pattern.n != (n := q.shape[1]):
            raise ValueError(f"the pattern is for a length of {pattern.n}, got tensors of length {n}")
        tables = pattern.starts, pattern.columns, pattern.tiles, pattern.tile_of
        work = BlockSparse(spec, pattern.key if execution.use_pattern_cache else "", pattern.block_size)
    # On CUDA without Triton FlexAttention where it can; else the op.
    request = Request(q.device, q.dtype, head_dim=q.shape[-1], tiled=tables[2] is not None)
    asks_flex = q.device.type == "cuda" and execution.kernel == "auto" and not torch.compiler.is_compiling()
    if asks_flex and choose_kernel(request).name != "triton":
        blocks = work.pattern(execution, Tensors(q, k, v)) if isinstance(pattern, str) else pattern
        if why_not_flex(q, blocks, spec.dropout_p) is None:
            blocks = blocks.causal() if spec.is_causal else blocks
            return flex_block_sparse(q, k, v, blocks, scale=spec.scale_for(q.shape[-1]), key_mask=key_mask)
    seed = torch.randint(2**62, (1,), device="cpu") if spec.dropout_p else None
    text = write_spec("blocks", spec, work.recipe, work.block_size)
    result: tuple[Tensor, Tensor] = attention_op(
        q, k, v, key_mask, None, seed, *tables, text, write_execution(execution)
    )
    return result


def check_fit(pattern: BlockPattern, q: Tensor, is_causal: bool) -> None:
    """Whether a pattern serves the batches and heads of a call; its length is for the caller to compare."""
    if not torch.compiler.is_compiling() and pattern.is_changed:
        raise ValueError("the tensors of a pattern must stay as they are, and were written to: make another")
    b, _, h, _ = q.shape
    if len(pattern) not in (1, h, b * h):
        raise ValueError(
            f"a pattern has 1 layout, one for each of the {h} heads or one for each of {b} x {h} batches and "
            f"heads, got {len(pattern)}"
        )
    if pattern.is_causal and not is_causal:
        raise ValueError("a causal pattern is for causal attention, got is_causal=False")
