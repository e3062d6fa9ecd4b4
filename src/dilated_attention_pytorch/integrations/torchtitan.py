"""Dilated attention in the tensor layout of torchtitan, and with its tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..checks import check_flags
from .deepspeed import Group, attend_heads, check_four_dimensions, local_heads
from .transformers import call_options, check_settings


class TorchtitanAttention(nn.Module):
    """Takes the place of torchtitan's `ScaledDotProductAttentionWrapper` as the inner attention of a layer.

    Args:
        segment_lengths, dilation_rates: one entry a branch.
        head_group: the group over which tensor parallelism spreads the heads, where q, k and v come as plain
            tensors of this rank's heads. DTensors know by themselves, and need none.
        options: head_mixing, head_offsets, tail, detach_mixing, kernel, workspace_bytes, memory and
            use_pattern_cache, as in `DilatedSpec` and `Execution`.

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
        check_four_dimensions(q, k, v, "of which the second is heads")
        if not enable_gqa and q.shape[1] != k.shape[1]:
            rule = "q, k and v must have the same heads unless enable_gqa"
            raise ValueError(f"{rule}, got {q.shape[1]} and {k.shape[1]}")
        options = {**call_options(self.settings), "scale": scale, "is_causal": is_causal}
        if isinstance(q, DTensor):
            return _attend_sharded(q, k, v, options)
        if self.head_group is not None:
            options["head_slice"] = local_heads(q.shape[1], k.shape[1], self.head_group)
        return _attend(q, k, v, options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


def _attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend_heads(q, k, v, **options).transpose(1, 2)


def _attend_sharded(q: DTensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    if not (isinstance(k, DTensor) and isinstance(v, DTensor)):
        raise TypeError("q, k and v must all be DTensors if one is")
    mesh, placements, heads = q.device_mesh, q.placements, Shard(1)
    if not placements == k.placements == v.placements:
        places = f"{placements}, {k.placements} and {v.placements}"
        raise ValueError(f"q, k and v must be placed alike, got {places}")
    unknown = [place for place in placements if place not in (Shard(0), heads, Replicate())]
    if unknown or placements.count(heads) > 1:
        rule = "q, k and v must be replicated or sharded by batch or once by heads"
        raise ValueError(f"{rule}, got {placements}")
    local_q, local_k, local_v = (x.to_local(grad_placements=placements) for x in (q, k, v))
    if heads in placements:
        dim, h, h_kv = placements.index(heads), q.shape[1], k.shape[1]
        if h % mesh.size(dim) or h_kv % mesh.size(dim):
            raise ValueError(f"heads must be a multiple of the {mesh.size(dim)} ranks, got {h} and {h_kv}")
        options["head_slice"] = (mesh.get_local_rank(dim) * local_q.shape[1], h)
    out = _attend(local_q, local_k, local_v, options)
    return DTensor.from_local(out, mesh, placements, shape=q.shape, stride=q.stride())
