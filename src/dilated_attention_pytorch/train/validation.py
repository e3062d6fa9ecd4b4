"""How well a model predicts text that it was not trained on, by how much of the text it has seen before."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..modules import LongNetLM
from .ranks import Ranks

FIRST_CONTEXT = 64  # bytes of context up to which all positions count as one class


def validate(
    model: LongNetLM, windows: Tensor, ranks: Ranks, cast: AbstractContextManager[Any], rows: int
) -> dict[str, Any]:
    """Bits per byte over `windows` (count, length + 1): of all, and by the bytes of context that there were.

    All ranks must call it. Every ring computes all windows, `rows` at a time.
    """
    length = windows.shape[1] - 1
    start, stop = ranks.own_bounds(length)
    nats = torch.zeros(length, dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        for part in torch.split(windows, rows):
            tokens, targets = ranks.own_part(part[:, :-1]), ranks.own_part(part[:, 1:])
            with torch.no_grad(), cast:
                logits = model(tokens)
            losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
            nats[start:stop] += losses.view_as(targets).double().sum(0).cpu()
    finally:
        model.train(was_training)
    summed = ranks.sum(nats.to(ranks.device)).cpu() if ranks.size > 1 else nats
    bits = summed / (math.log(2) * len(windows) * ranks.num_rings)
    return {
        "bits_per_byte": bits.mean().item(),
        "by_context": {f"{a + 1}-{b}": bits[a:b].mean().item() for a, b in context_classes(length)},
    }


def context_classes(length: int) -> list[tuple[int, int]]:
    """[start, stop) of positions, doubling: the first has up to FIRST_CONTEXT bytes of context."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, max(FIRST_CONTEXT, 2 * edges[-1])))
    return list(pairwise(edges))
