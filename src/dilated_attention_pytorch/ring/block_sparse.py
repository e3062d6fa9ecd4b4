"""Block-sparse attention over a sequence whose parts lie on several ranks: kept blocks travel, each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, overload

from torch import Tensor

from ..attention_op import check_execution
from ..block_ops import BY_THREADS, BlockOptions, sized
from ..block_sparse import block_sparse_attention, check_fit
from ..checks import (
    autocast_inputs,
    check_flags,
    check_inputs,
    check_positive_int,
    named_keywords,
    refuse_forward_mode,
)
from ..core.block_patterns import get_block_pattern_cache
from ..core.tracing import uncompiled
from ..plan import DEFAULT_WORKSPACE_BYTES, BlockPattern, Shape
from ..spec import DilatedSpec
from .agreement import agree, check_alone, nothing, rank_seed
from .autograd import CallTensors, attend
from .block_call import BlockCall, BlockSchedule
from .comm import Group, check_timeout, digest, find_ring


@overload
def ring_block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Any,
    *,
    return_lse: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...


@overload
def ring_block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Any, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...


@named_keywords  # type: ignore[misc]  # the overloads leave the options open
# Transfers cannot be traced: compilers break the graph here.
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
    kernel: str = "auto",
    workspace_bytes: int | None = None,
    memory: str = "fresh",
    use_pattern_cache: bool = True,
    timeout: float | timedelta | None = None,
    steps: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """`block_sparse_attention` over a sequence of which each rank of a group holds a contiguous part.

    Equals `block_sparse_attention` of the whole sequence, forward and gradients. A rank receives the blocks
    that its own rows keep, each once; shards may cut blocks, but are faster if they do not.

    Args:
        q: (b, n_local, h, d), this rank's tokens; n_local may differ between ranks and be 0 on some.
        k, v: (b, n_local, h_kv, d).
        pattern: of the whole sequence, the same on all ranks; or a function that makes it of the length.
        group, shard_lengths, key_mask, timeout, steps: as in `ring_dilated_attention`.
        Others: as in `block_sparse_attention`.

    Returns:
        out (b, n_local, h, d); with `return_lse` also lse (b, h, n_local).
    """
    ring = find_ring(group)
    if ring is None or ring.size == 1:
        check_timeout(timeout)
        check_alone(shard_lengths, q)
        check_positive_int("steps", steps)
        if not isinstance(pattern, BlockPattern) and callable(pattern) and isinstance(q, Tensor):
            pattern = pattern(q.shape[1])
        return block_sparse_attention(  # type: ignore[no-any-return, call-overload]
            *(q, k, v, pattern),
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            key_mask=key_mask,
            return_lse=return_lse,
            kernel=kernel,
            workspace_bytes=workspace_bytes,
            memory=memory,
            use_pattern_cache=use_pattern_cache,
        )
    with agree(ring, "ring_block_sparse_attention", q, timeout) as agreement:
        if not (isinstance(pattern, BlockPattern) or callable(pattern)):
            raise TypeError(f"pattern must be a BlockPattern or make one, got {type(pattern).__name__}")
        q, k, v = autocast_inputs(q, k, v)
        check_inputs(q, k, v, key_mask, None, least_length=0)
        refuse_forward_mode("ring_block_sparse_attention", q, k, v)
        check_execution(kernel, 1 if workspace_bytes is None else workspace_bytes, memory, use_pattern_cache)
        check_flags(is_causal=is_causal, return_lse=return_lse)
        check_positive_int("steps", steps)
        spec = DilatedSpec((1,), (1,), is_causal, scale, dropout_p)  # checks what both kinds share
        if isinstance(pattern, BlockPattern):
            check_fit(pattern, q, is_causal)
        facts = {
            "is_causal": int(is_causal),
            "workspace_bytes": workspace_bytes or BY_THREADS,
            "steps": steps,
            "pattern": digest(pattern.key) if isinstance(pattern, BlockPattern) else 0,
            "scale": digest(spec.scale),
            "dropout_p": digest(spec.dropout_p),
            "return_lse": int(return_lse),
        }
        lengths = agreement.on_call(q, k, v, key_mask, shard_lengths, facts)
    if not isinstance(pattern, BlockPattern):
        with agree(ring, "the pattern", q, timeout) as agreement:
            pattern = pattern(sum(lengths))
            check_fit(pattern, q, is_causal)
            agreement.on({"the pattern": digest(pattern.key)}, [])
    if sum(lengths) != pattern.n:
        raise ValueError(
            f"the pattern is for a length of {pattern.n}, got {sum(lengths)} tokens on all ranks"
        )
    if not q.shape[1]:
        return nothing(q, k, v, return_lse)
    b, _, h, d = q.shape
    shape = Shape(b, pattern.n, h, k.shape[2], d)
    sizes = q.element_size(), key_mask is not None, workspace_bytes or DEFAULT_WORKSPACE_BYTES, steps
    kept = pattern.causal() if is_causal else pattern
    schedule = BlockSchedule(shape, lengths, *sizes, pattern=kept)
    if use_pattern_cache:
        key = ("ring_schedule", kept.key, shape, lengths, sizes)
        schedule = get_block_pattern_cache().get_or_build(key, lambda: schedule)
    options = BlockOptions(
        recipe="",
        block_size=pattern.block_size,
        is_causal=is_causal,
        scale=spec.scale_for(d),
        dropout_p=spec.dropout_p,
        kernel=kernel,
        workspace_bytes=workspace_bytes or BY_THREADS,
        memory=memory,
        use_pattern_cache=use_pattern_cache,
    )
    seed = rank_seed(ring) if spec.dropout_p else None
    out, lse = attend(CallTensors(q, k, v, key_mask, seed), BlockCall(ring, schedule, sized(options)))
    return (out, lse) if return_lse else out
