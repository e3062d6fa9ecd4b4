"""Dilated attention in the tensor layouts, and with the spread of heads, of torchtitan and DeepSpeed Ulysses.

Offsets of dilation depend on a head's number. Where the heads of a layer are spread over ranks, both adapters
count them over all ranks, so that the result is that of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..core.blocks import check_flags, check_positive_int
from ..functional import dilated_attention
from .settings import check_settings

Group = Any  # a ProcessGroup, or None for the default group


class TorchtitanAttention(nn.Module):
    """Takes the place of torchtitan's `ScaledDotProductAttentionWrapper` as the inner attention of a layer.

    Args:
        segment_lengths, dilation_rates: one entry a branch.
        head_group: the group over which tensor parallelism spreads the heads, where q, k and v come as plain
            tensors of this rank's heads. DTensors know by themselves, and need none.
        options: head_mixing, head_offsets, tail, detach_mixing, kernel, workspace_bytes, memory and
            use_pattern_cache, as in `dilated_attention`.

    Context parallelism, which spreads the tokens, is not for this module: torch's implementation knows only
    its own attention. `ring_dilated_attention` spreads tokens.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        head_group: Group = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.settings = check_settings(
            {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates, **options}
        )
        self.head_group = head_group

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
    ) -> Tensor:
        """Attention of (b, h, n, d) with keys and values (b, h_kv, n, d), all DTensors or none.

        `enable_gqa` must be True where h_kv is less than h, as for torch's own attention. DTensors may have
        their heads or batches sharded, or be replicated; the result is placed as q is.
        """
        check_flags(enable_gqa=enable_gqa, is_causal=is_causal)
        if not enable_gqa and q.shape[1] != k.shape[1]:
            raise ValueError(
                f"q, k and v must have the same heads unless enable_gqa, got {q.shape[1]} and {k.shape[1]}"
            )
        options = {**self.settings, "scale": scale, "is_causal": is_causal}
        if isinstance(q, DTensor):
            return self._attend_sharded(q, k, v, options)
        if self.head_group is not None:
            options["head_slice"] = _even_slice(q.shape[1], self.head_group)
        return self._attend(q, k, v, options)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = dilated_attention(q, k, v, **options)
        return out.transpose(1, 2)

    def _attend_sharded(self, q: DTensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        if not (isinstance(k, DTensor) and isinstance(v, DTensor)):
            raise TypeError("q, k and v must all be DTensors if one is")
        mesh, placements = q.device_mesh, q.placements
        if not placements == k.placements == v.placements:
            raise ValueError(
                f"q, k and v must be placed alike, got {placements}, {k.placements} and {v.placements}"
            )
        unknown = [place for place in placements if place not in (Shard(0), Shard(1), Replicate())]
        if unknown or placements.count(Shard(1)) > 1:
            raise ValueError(
                f"q, k and v must be replicated or sharded by batch or once by heads, got {placements}"
            )
        local_q, local_k, local_v = (x.to_local(grad_placements=placements) for x in (q, k, v))
        if Shard(1) in placements:
            rank = mesh.get_local_rank(placements.index(Shard(1)))
            size = mesh.size(placements.index(Shard(1)))
            if q.shape[1] % size or k.shape[1] % size:
                raise ValueError(
                    f"heads must be a multiple of the {size} ranks, got {q.shape[1]} and {k.shape[1]}"
                )
            options["head_slice"] = (rank * local_q.shape[1], q.shape[1])
        out = self._attend(local_q, local_k, local_v, options)
        return DTensor.from_local(out, mesh, placements, shape=q.shape, stride=q.stride())

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    group: Group = None,
    num_heads: int | None = None,
    batch_dim_idx: int = 0,
    **options: Any,
) -> Tensor:
    """Local attention for `deepspeed.sequence.layer.DistributedAttention`: all tokens of this rank's heads.

        branches = {"segment_lengths": [2048, 8192], "dilation_rates": [1, 4]}
        local = functools.partial(ulysses_attention, group=group, is_causal=True, **branches)
        attention = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)
        out = attention(q, k, v, 0)

    Args:
        q: (b, n, h, d), or (n, b, h, d) with `batch_dim_idx=1`: the heads that the all-to-all gave this rank.
        k, v: the same with h_kv heads.
        group: the sequence parallel group that was given to `DistributedAttention`.
        num_heads: of all ranks together, needed where they are no multiple of the ranks. DeepSpeed then gives
            the first ranks one head more; h and h_kv must be equal.
        batch_dim_idx: the dimension of the batch, as DeepSpeed's `forward` has it.
        options: of `dilated_attention`: is_causal, scale, dropout_p, head_mixing, head_offsets, ...

    Returns:
        The attention, in the layout of q.

    `ring_dilated_attention(..., strategy="ulysses")` does the exchange as well, without DeepSpeed and for
    shards of any lengths.
    """
    if batch_dim_idx not in (0, 1):
        raise ValueError(f"batch_dim_idx must be 0 or 1, got {batch_dim_idx!r}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            shown = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must have 4 dimensions, of which the third is heads, got {shown}")
    h = q.shape[2]
    head_slice = (
        _even_slice(h, group) if num_heads is None else _uneven_slice(h, k.shape[2], num_heads, group)
    )
    if batch_dim_idx == 1:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out: Tensor = dilated_attention(
        q, k, v, segment_lengths, dilation_rates, head_slice=head_slice, **options
    )
    return out.transpose(0, 1) if batch_dim_idx == 1 else out


def _even_slice(h: int, group: Group) -> tuple[int, int]:
    """(first, total) of h heads on each rank."""
    if not dist.is_initialized():
        raise RuntimeError(
            "the heads of a group need torch.distributed.init_process_group, which was not called"
        )
    return dist.get_rank(group) * h, dist.get_world_size(group) * h


def _uneven_slice(h: int, h_kv: int, num_heads: int, group: Group) -> tuple[int, int]:
    """(first, total) where the first ranks have one head more."""
    check_positive_int("num_heads", num_heads)
    rank, size = (x // h for x in _even_slice(h, group))
    share, extra = divmod(num_heads, size)
    expected = share + (rank < extra)
    if h != expected or (extra and h != h_kv):
        raise ValueError(
            f"{num_heads} heads on {size} ranks must give rank {rank} {expected} of q, k and v, "
            f"got {h} of q and {h_kv} of k and v"
        )
    return rank * share + min(rank, extra), num_heads
