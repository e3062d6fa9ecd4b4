"""Block-sparse attention over a sequence whose parts lie on several ranks: kept blocks travel, each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, overload

from torch import Tensor

from ..block_sparse import attend_blocks, check_fit
from ..checks import (
    autocast_inputs,
    check_flags,
    check_inputs,
    named_keywords,
    refuse_forward_mode,
)
from ..core.pattern_cache import get_block_pattern_cache
from ..core.tracing import uncompiled
from ..ops import BlockSparse, Tensors, block_spec, check_execution, run_options
from ..plan import DEFAULT_WORKSPACE_BYTES, BlockPattern, Shape
from ..spec import DilatedSpec, Execution
from .agreement import agree, check_alone, nothing, rank_seed
from .attention import RingSettings
from .block_schedule import BlockSchedule
from .call import RankCall, attend
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
    execution: Execution | None = None,
    timeout: float | timedelta | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`block_sparse_attention` over a sequence of which each rank of a group holds a contiguous part.

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
    options = RingSettings(group, shard_lengths=shard_lengths, timeout=timeout)
    of_call = {"key_mask": key_mask, "return_lse": return_lse}
    return attend_ring_blocks(q, k, v, pattern, make_spec, execution, options, **of_call)  # type: ignore[arg-type]


@uncompiled
def attend_ring_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: BlockPattern | Callable[[int], BlockPattern],
    make_spec: Callable[[], DilatedSpec],
    execution: Execution | None,
    options: RingSettings,
    *,
    key_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`ring_block_sparse_attention`. The spec is made here, so that all ranks learn of a bad one."""
    ring, steps = find_ring(options.group), options.steps
    if ring is None or ring.size == 1:
        check_timeout(options.timeout)
        check_alone(options.shard_lengths, q)
        check_flags(return_lse=return_lse)
        if not isinstance(pattern, BlockPattern) and callable(pattern) and isinstance(q, Tensor):
            pattern = pattern(q.shape[1])
        if not isinstance(pattern, BlockPattern):
            raise TypeError(f"pattern must be a BlockPattern, got {type(pattern).__name__}")
        out, lse = attend_blocks(q, k, v, pattern, make_spec(), execution, key_mask=key_mask)
        return (out, lse) if return_lse else out
    with agree(ring, "ring_block_sparse_attention", q, options.timeout) as agreement:
        if not (isinstance(pattern, BlockPattern) or callable(pattern)):
            raise TypeError(f"pattern must be a BlockPattern or make one, got {type(pattern).__name__}")
        q, k, v = autocast_inputs(q, k, v)
        check_inputs(q, k, v, key_mask, None, least_length=0)
        refuse_forward_mode("ring_block_sparse_attention", q, k, v)
        execution = check_execution(execution)
        check_flags(return_lse=return_lse)
        spec = make_spec()
        if isinstance(pattern, BlockPattern):
            check_fit(pattern, q, spec.is_causal)
        facts = {
            "is_causal": int(spec.is_causal),
            "workspace_bytes": execution.workspace_bytes or 0,
            "steps": steps,
            "pattern": digest(pattern.key) if isinstance(pattern, BlockPattern) else 0,
            "scale": digest(spec.scale),
            "dropout_p": digest(spec.dropout_p),
            "return_lse": int(return_lse),
        }
        lengths = agreement.on_call(q, k, v, key_mask, options.shard_lengths, facts)
    if not isinstance(pattern, BlockPattern):
        with agree(ring, "the pattern", q, options.timeout) as agreement:
            pattern = pattern(sum(lengths))
            check_fit(pattern, q, spec.is_causal)
            agreement.on({"the pattern": digest(pattern.key)}, [])
    if sum(lengths) != pattern.n:
        raise ValueError(
            f"the pattern is for a length of {pattern.n}, got {sum(lengths)} tokens on all ranks"
        )
    if not q.shape[1]:
        return nothing(q, k, v, return_lse)
    b, _, h, d = q.shape
    shape = Shape(b, pattern.n, h, k.shape[2], d)
    travels = execution.workspace_bytes or DEFAULT_WORKSPACE_BYTES
    sizes = q.element_size(), key_mask is not None, travels, steps
    kept = pattern.causal() if spec.is_causal else pattern
    schedule = BlockSchedule(shape, lengths, *sizes, pattern=kept)
    if execution.use_pattern_cache:
        key = ("ring_schedule", kept.key, shape, lengths, sizes)
        schedule = get_block_pattern_cache().get_or_build(key, lambda: schedule)
    seed = rank_seed(ring) if spec.dropout_p else None
    run = run_options(spec, d, execution, BlockSparse(spec, "").default_bytes())
    out, lse = attend(Tensors(q, k, v, key_mask, seed=seed), RankCall(ring, schedule, run))
    return (out, lse) if return_lse else out
