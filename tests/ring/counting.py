"""Which keys the queries of a rank need from other ranks: counted in the dense mask of the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.reference import multiplicity

from .configurations import Blocks, Dilated, Inputs


def dense_mask(config: Inputs) -> Tensor:
    """(b, h, n, n) bool: query i attends key j; a key that key_mask hides counts as attended."""
    if isinstance(config, Blocks):
        mask = config.pattern(config).to_dense()
        shape = (config.b, config.h, config.n, config.n)
        mask = mask.view(shape) if len(mask) == config.b * config.h else mask.expand(shape)
        return mask.tril() if config.is_causal else mask
    assert isinstance(config, Dilated)
    options = {
        name: config.options[name]
        for name in ("is_causal", "head_mixing", "head_offsets")
        if name in config.options
    }
    counts = multiplicity(
        config.n,
        config.h,
        config.segment_lengths,
        config.dilation_rates,
        cu_seqlens=config.cu_seqlens(),
        **options,
    )
    return (counts > 0).expand(config.b, -1, -1, -1)


def needed_rows(config: Inputs) -> Tensor:
    """(ranks, ranks) int64: [i, j] counts the (batch, position, key head) on rank j that rank i attends."""
    mask = dense_mask(config)
    by_key_head = mask.unflatten(1, (config.h_kv, config.h // config.h_kv)).any(2)
    ranks = len(config.shards)
    rows = torch.zeros(ranks, ranks, dtype=torch.int64)
    for i in range(ranks):
        low, high = config.bounds(i)
        attended = by_key_head[:, :, low:high].any(2)  # (b, h_kv, n)
        for j in range(ranks):
            start, stop = config.bounds(j)
            rows[i, j] = attended[..., start:stop].sum()
    return rows.fill_diagonal_(0)


def forward_bytes(config: Inputs, rows: Tensor, rank: int) -> int:
    """A row of k and a row of v for everything needed from others; `rows` are `needed_rows`."""
    return int(rows[rank].sum()) * 2 * config.d * config.dtype.itemsize


def backward_bytes(config: Inputs, rows: Tensor, rank: int) -> int:
    """k and v again, and dk and dv of what this rank has sent, in float32 or better."""
    accurate = torch.promote_types(config.dtype, torch.float32).itemsize
    returned = int(rows[:, rank].sum()) * 2 * config.d * accurate
    return forward_bytes(config, rows, rank) + returned
