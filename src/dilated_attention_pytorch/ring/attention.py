"""Dilated and block-sparse attention over a sequence whose shards lie on several ranks, and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..block_sparse import attend_blocks, check_fit
from ..checks import (
    check_bounds,
    check_flags,
    check_positive_int,
    document_bounds,
    named_keywords,
    one_of,
    whole_numbers,
)
from ..core.pattern_cache import get_block_pattern_cache, get_global_pattern_cache
from ..core.tracing import uncompiled
from ..functional import Lengths, Rates, attend as attend_alone, spec_of
from ..ops import BlockSparse, Tensors, block_spec
from ..plan import DEFAULT_WORKSPACE_BYTES, BlockPattern, Shape
from ..spec import DilatedSpec, Execution, HeadMixing, HeadOffsets, Tail, takes_spec
from .call import Result, RingSettings, agree_on_call
from .comm import Group, agree, digest
from .needs import BlockNeeds, DilatedNeeds
from .schedule import STRATEGIES, RingSchedule, Strategy
from .shards import check_lengths, even_shards


@overload
def ring_dilated_attention(
    q: Tensor, k: Tensor, v: Tensor, *branches: Any, return_lse: Literal[False] = ..., **options: Any
) -> Tensor: ...


@overload
def ring_dilated_attention(
    q: Tensor, k: Tensor, v: Tensor, *branches: Any, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...


@takes_spec  # type: ignore[misc]  # the overloads leave the options open
# Transfers cannot be traced: compilers break the graph here.
@uncompiled
def ring_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Lengths,
    dilation_rates: Rates = None,
    *,
    group: Group = None,
    strategy: str = "auto",
    shard_lengths: Sequence[int] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_mixing: HeadMixing = "all",
    head_offsets: HeadOffsets = "interleaved",
    tail: Tail = "exact",
    detach_mixing: bool = False,
    return_lse: bool = False,
    execution: Execution | None = None,
    timeout: float | timedelta | None = None,
) -> Result:
    """`dilated_attention` over a sequence of which each rank of a group holds a contiguous shard.

    Equals `dilated_attention` of the whole sequence, forward and gradients, for shards of any lengths.
    Segments within a shard need no communication. Of segments that several ranks share, each rank receives
    the keys and values that its own queries select, each once, while it computes with those it has.

    All ranks of the group call it, with the same options, and all of them run backward if one does.

    Args:
        q: (b, n_local, h, d), this rank's tokens; n_local may differ between ranks and be 0 on some.
        k, v: (b, n_local, h_kv, d).
        segment_lengths, dilation_rates: of the whole sequence, as in `dilated_attention`.
        group: a process group or one-dimensional DeviceMesh, by default all ranks; positions follow the order
            of its ranks. Without torch.distributed the call is `dilated_attention`.
        strategy: "ring" sends the keys that are needed; "ulysses" exchanges tokens for heads, so that each
            rank attends all tokens of some heads; "auto" takes what the schedule finds cheaper.
        shard_lengths: tokens of every rank; if given, they are checked against what the ranks hold.
        key_mask: (b, n_local) bool of the local keys, on all ranks or on none.
        cu_seqlens: boundaries of documents in the whole sequence, the same on every rank.
        execution: as in `dilated_attention`; communication buffers take at most another `workspace_bytes`,
            but for single keys of one head.
        timeout: seconds, or a timedelta, that a transfer may take; by default what the group was made with.
        Others: as in `dilated_attention`. `detach_mixing` needs "ulysses". With `dropout_p` each rank
            draws its own masks.

    Returns:
        out (b, n_local, h, d); with `return_lse` also lse (b, h, n_local).

    Raises RingError if a rank dies or a transfer takes too long, and ValueError, on all ranks, if they were
    called with different arguments.
    """
    branches, mixing = (segment_lengths, dilation_rates), (head_mixing, head_offsets, tail, detach_mixing)
    make_spec = partial(spec_of, *branches, is_causal, scale, dropout_p, *mixing)
    settings = RingSettings(group, strategy, shard_lengths, timeout, 1, execution, return_lse)
    return attend_ring(Tensors(q, k, v, key_mask, cu_seqlens), make_spec, settings)


@uncompiled
def attend_ring(tensors: Tensors, make_spec: Callable[[], DilatedSpec], settings: RingSettings) -> Result:
    """`ring_dilated_attention`. The spec is made here, so that all ranks learn of one that cannot be made."""
    (q, k, v, key_mask, cu_seqlens, *_), strategy = tensors, settings.strategy
    ring = settings.ring(q)
    if ring is None:
        given: dict[str, Any] = {"key_mask": key_mask, "cu_seqlens": cu_seqlens, "steps": settings.steps}
        alone = attend_alone(q, k, v, make_spec(), settings.execution, **given)
        return alone if settings.return_lse else alone[0]
    with agree(ring, "ring_dilated_attention", q, settings.timeout) as agreement:
        spec = make_spec()
        if spec.detach_mixing and strategy == "ring":
            raise ValueError(
                "detach_mixing needs the output of each branch in backward, which a ring does not keep: "
                'strategy must be "ulysses" or "auto", got "ring"'
            )
        call = agree_on_call(agreement, tensors, spec, settings)
    docs = None if cu_seqlens is None else document_bounds(cu_seqlens, call.shape.n)
    needs = DilatedNeeds(call.shape, spec, docs)
    strategy = "ulysses" if spec.detach_mixing else strategy
    return call.attend(needs, DEFAULT_WORKSPACE_BYTES, get_global_pattern_cache(), strategy)


@overload
def ring_block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Any, *, return_lse: Literal[False] = ..., **options: Any
) -> Tensor: ...


@overload
def ring_block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Any, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...


@named_keywords  # type: ignore[misc]  # the overloads leave the options open
@uncompiled
def ring_block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: BlockPattern | Callable[[int], BlockPattern],
    *,
    group: Group = None,
    shard_lengths: Sequence[int] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0,
    key_mask: Tensor | None = None,
    return_lse: bool = False,
    execution: Execution | None = None,
    timeout: float | timedelta | None = None,
) -> Result:
    """`block_sparse_attention` over a sequence of which each rank of a group holds a contiguous shard.

    Equals `block_sparse_attention` of the whole sequence, forward and gradients. A rank receives the blocks
    that its own rows keep, each once; shards may cut blocks, but are faster if they do not.

    Args:
        q: (b, n_local, h, d), this rank's tokens; n_local may differ between ranks and be 0 on some.
        k, v: (b, n_local, h_kv, d).
        pattern: of the whole sequence, the same on all ranks; or a function that makes it of the length.
        group, shard_lengths, key_mask, timeout: as in `ring_dilated_attention`.
        Others: as in `block_sparse_attention`.

    Returns:
        out (b, n_local, h, d); with `return_lse` also lse (b, h, n_local).
    """
    make_spec = partial(block_spec, is_causal, scale, dropout_p)
    settings = RingSettings(group, "auto", shard_lengths, timeout, 1, execution, return_lse)
    return attend_ring_blocks(Tensors(q, k, v, key_mask), pattern, make_spec, settings)


@uncompiled
def attend_ring_blocks(
    tensors: Tensors,
    pattern: BlockPattern | Callable[[int], BlockPattern],
    make_spec: Callable[[], DilatedSpec],
    settings: RingSettings,
) -> Result:
    """`ring_block_sparse_attention`. The spec is made here, so that all ranks learn of a bad one."""
    q, k, v, key_mask = tensors[:4]
    ring = settings.ring(q)
    if ring is None:
        if not isinstance(pattern, BlockPattern) and callable(pattern) and isinstance(q, Tensor):
            pattern = pattern(q.shape[1])
        if not isinstance(pattern, BlockPattern):
            raise TypeError(f"pattern must be a BlockPattern, got {type(pattern).__name__}")
        alone = attend_blocks(q, k, v, pattern, make_spec(), settings.execution, key_mask=key_mask)
        return alone if settings.return_lse else alone[0]
    with agree(ring, "ring_block_sparse_attention", q, settings.timeout) as agreement:
        if not (isinstance(pattern, BlockPattern) or callable(pattern)):
            raise TypeError(f"pattern must be a BlockPattern or make one, got {type(pattern).__name__}")
        spec, key = make_spec(), 0
        if isinstance(pattern, BlockPattern):
            _check_fit(pattern, q, spec.is_causal)
            key = digest(pattern.key)
        call = agree_on_call(agreement, tensors, spec, settings, key)
    n = call.shape.n
    if not isinstance(pattern, BlockPattern):
        with agree(ring, "the pattern", q, settings.timeout) as agreement:
            pattern = pattern(n)
            _check_fit(pattern, q, spec.is_causal)
            agreement.on({"the pattern": digest(pattern.key)}, [])
    if n != pattern.n:
        raise ValueError(f"the pattern is for a length of {pattern.n}, got {n} tokens on all ranks")
    kept = pattern.causal() if spec.is_causal else pattern
    size = BlockSparse(spec, "").default_bytes(torch.device("cpu"))  # the same on all ranks
    needs = BlockNeeds(call.shape, kept.key, kept, call.execution.workspace_bytes or size)
    return call.attend(needs, size, get_block_pattern_cache(), "ring")


def _check_fit(pattern: BlockPattern, q: Tensor, is_causal: bool) -> None:
    check_fit(pattern, q, is_causal)
    if pattern.tiles is not None:
        raise ValueError(
            f"a ring takes patterns of whole blocks, got one with {len(pattern.tiles)} tiles, of a mask_mod"
        )


def plan_ring(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    n: int | None = None,
    *,
    num_heads: int,
    head_dim: int,
    num_ranks: int | None = None,
    shard_lengths: Sequence[int] | None = None,
    num_kv_heads: int | None = None,
    batch_size: int = 1,
    dtype: torch.dtype = torch.float32,
    is_causal: bool = False,
    head_mixing: HeadMixing = "all",
    head_offsets: HeadOffsets = "interleaved",
    cu_seqlens: Sequence[int] | None = None,
    strategy: Strategy = "ring",
    masked: bool = False,
    return_lse: bool = False,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    steps: int = 1,
) -> RingSchedule:
    """The schedule of `ring_dilated_attention` for any number of ranks, without any of them.

    Either `n` and `num_ranks`, for shards as even as possible, or `shard_lengths`. `masked`: with a key_mask.
    `return_lse`: with lse, which "ulysses" has to exchange.
    """
    if shard_lengths is None:
        if n is None or num_ranks is None:
            raise ValueError("a schedule needs shard_lengths, or n and num_ranks")
        check_positive_int("num_ranks", num_ranks, bits=24)
        shard_lengths = even_shards(n, num_ranks)
    lengths = check_lengths(shard_lengths)
    total, num_kv_heads = sum(lengths), num_heads if num_kv_heads is None else num_kv_heads
    if n not in (None, total) or num_ranks not in (None, len(lengths)):
        found = f"{len(lengths)} shard_lengths of {total} tokens in all"
        raise ValueError(f"{found} contradict n={n} and num_ranks={num_ranks}")
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "num_kv_heads": num_kv_heads, "n": total}
    sizes |= {"batch_size": batch_size, "steps": steps, "workspace_bytes": workspace_bytes}
    for name, value in sizes.items():
        check_positive_int(name, value)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    one_of("strategy", strategy, STRATEGIES[1:])
    check_flags(masked=masked, return_lse=return_lse)
    docs = None if cu_seqlens is None else tuple(whole_numbers("cu_seqlens", cu_seqlens, None, 2**62))
    if docs is not None:
        check_bounds(docs, total)
    spec = DilatedSpec(segment_lengths, dilation_rates, is_causal, None, 0.0, head_mixing, head_offsets)
    needs = DilatedNeeds(Shape(batch_size, total, num_heads, num_kv_heads, head_dim), spec, docs)
    how = dtype.itemsize, masked, workspace_bytes, steps, strategy, return_lse
    return RingSchedule(needs, lengths, *how)
