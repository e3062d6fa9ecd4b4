"""What a rank does with a configuration: the call on its shard and on the whole sequence; bytes it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch import block_sparse_attention, dilated_attention
from dilated_attention_pytorch.reference import multiplicity
from dilated_attention_pytorch.ring import RingSchedule, plan_ring, ring_traffic
from support.executions import ring, ring_blocks

from .configurations import SPANNING, Blocks, Dilated, Inputs, dilated

PLANNED = ("is_causal", "head_mixing", "head_offsets")  # options that decide what travels
NAMES = ("out", "lse", "dq", "dk", "dv")
TIMEOUT = 30.0  # of a transfer, where nothing is meant to fail


def attend_shard(
    config: Inputs, rank: int, tensors: tuple[Tensor, ...], **changes: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the rank's shards of q, k and v; `changes` are options of this call alone."""
    mask, shard = config.key_mask(), slice(*config.bounds(rank))
    options = {"key_mask": None if mask is None else mask[:, shard], "return_lse": True, "timeout": TIMEOUT}
    options |= config.options | config.execution
    if isinstance(config, Blocks):
        return ring_blocks(*tensors, config.pattern(config), **{**options, **changes})
    options |= {"strategy": config.strategy, "cu_seqlens": config.cu_seqlens(), **changes}
    return ring(*tensors, *config.lists, **options)


def plan_of(config: Dilated, strategy: str = "ring") -> RingSchedule:
    """The schedule of `attend_shard`."""
    return plan_ring(
        *config.lists,
        shard_lengths=config.shards,
        num_heads=config.h,
        num_kv_heads=config.h_kv,
        head_dim=config.d,
        batch_size=config.b,
        dtype=config.dtype,
        cu_seqlens=config.docs,
        strategy=strategy,
        masked=bool(config.hidden),
        return_lse=True,
        **{name: config.options[name] for name in PLANNED if name in config.options},
    )


def attend_whole(config: Inputs, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """(out, lse) of the whole sequence in this process."""
    options = {"key_mask": config.key_mask(), "return_lse": True, **config.options}
    if isinstance(config, Blocks):
        return block_sparse_attention(*tensors, config.pattern(config), **options)
    return dilated_attention(*tensors, *config.lists, cu_seqlens=config.cu_seqlens(), **options)


def differentiate(
    attend: Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    grad_out: Tensor,
    grad_lse: Tensor,
) -> list[Tensor]:
    """out, lse and the gradients of q, k and v."""
    leaves = tuple(x.detach().requires_grad_() for x in tensors)
    out, lse = attend(leaves)
    loss = (out * grad_out.to(out.dtype)).sum()
    if grad_lse.any():
        loss = loss + torch.where(lse.isfinite(), lse, 0.0).mul(grad_lse.to(lse.dtype)).sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


def run_shard(config: Inputs, rank: int, moved: list[int] | None = None, **changes: Any) -> list[Tensor]:
    """out, lse, dq, dk and dv of the rank's shard; `moved` gets the bytes received and sent in each pass."""
    low, high = config.bounds(rank)
    grad_out, grad_lse = config.gradients()
    traffic, counts = ring_traffic(), [] if moved is None else moved

    def count() -> None:
        counts.extend((traffic.received_bytes, traffic.sent_bytes))
        traffic.reset()

    def attend(leaves: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        traffic.reset()
        results = attend_shard(config, rank, leaves, **changes)
        count()
        return results

    # Whether lse has a gradient is the same on all ranks, as it would be for one loss of a model.
    shards = tuple(config.shard(x, rank) for x in config.tensors())
    results = differentiate(attend, shards, grad_out[:, low:high], grad_lse[:, :, low:high])
    count()
    return results


def expect_shard(config: Inputs, rank: int, out: Tensor) -> list[Tensor]:
    """What `run_shard` must give, from this process alone.

    float64 and float32 in their own precision; below that in float64, by a backward that starts from the
    output as all ranks rounded it (see `support.exactness`), of which `out` is this rank's part.
    """
    tensors, (grad_out, grad_lse) = config.tensors(), config.gradients()
    if config.dtype.itemsize <= 2:
        tensors = tuple(x.double() for x in tensors)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, out.detach().double().tolist())
        rounded = torch.cat([_as_tensor(x, config) for x in parts], 1)
        if not config.options.get("detach_mixing"):
            lost = attend_whole(config, tensors)[0] - rounded
            grad_lse = grad_lse + (lost * grad_out.double()).sum(-1).transpose(1, 2)
    whole = differentiate(lambda leaves: attend_whole(config, leaves), tensors, grad_out, grad_lse)
    low, high = config.bounds(rank)
    out, lse, *gradients = whole
    return [out[:, low:high], lse[..., low:high], *(x[:, low:high] for x in gradients)]


def _as_tensor(values: list[Any], config: Inputs) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(config.b, -1, config.h, config.d)


def check_kernel(rank: int, kernel: str) -> None:
    """Two ranks with a kernel against one process with the kernels that it takes by itself."""
    torch.use_deterministic_algorithms(False)
    sizes: dict[str, Any] = {"b": 2, "h": 4, "h_kv": 2, "d": 16, "dtype": torch.float32, "hidden": "some"}
    config = dilated(kernel, (23, 41), SPANNING, **sizes, options={"is_causal": True})
    got = run_shard(config, rank, kernel=kernel)
    for name, x, y in zip(NAMES, got, expect_shard(config, rank, got[0]), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def pair_counts(config: Inputs) -> Tensor:
    """(h, n, n): how often the definition counts each pair."""
    options = {name: config.options[name] for name in PLANNED if name in config.options}
    return multiplicity(config.n, config.h, *config.lists, cu_seqlens=config.cu_seqlens(), **options)


def needed_rows(config: Inputs) -> Tensor:
    """(ranks, ranks) int64: [i, j] counts the (batch, position, key head) on rank j that rank i attends.

    A key that key_mask hides counts as attended.
    """
    shape = (config.b, config.h, config.n, config.n)
    if isinstance(config, Blocks):
        mask = config.pattern(config).to_dense()
        mask = mask.view(shape) if len(mask) == config.b * config.h else mask.expand(shape)
        mask = mask.tril() if config.is_causal else mask
    else:
        mask = (pair_counts(config) > 0).expand(shape)
    by_key_head = mask.unflatten(1, (config.h_kv, config.h // config.h_kv)).any(2)
    attended = torch.stack([x.any(2) for x in by_key_head.split(config.shards, 2)])  # (ranks, b, h_kv, n)
    return torch.stack([x.sum((1, 2, 3)) for x in attended.split(config.shards, 3)], 1).fill_diagonal_(0)


def forward_bytes(config: Inputs, rows: Tensor, rank: int) -> int:
    """A row of k and a row of v for everything needed from others; `rows` are `needed_rows`."""
    return int(rows[rank].sum()) * 2 * config.d * config.dtype.itemsize


def backward_bytes(config: Inputs, rows: Tensor, rank: int) -> int:
    """k and v again, and dk and dv of what this rank has sent, in float32 or better."""
    accurate = torch.promote_types(config.dtype, torch.float32).itemsize
    returned = int(rows[:, rank].sum()) * 2 * config.d * accurate
    return forward_bytes(config, rows, rank) + returned
