"""What attends to what, in numbers: counts of every pair, coverage, receptive field over layers."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..block_sparse import build_block_pattern
from ..plan.dilated import branch_heads
from ..reference import multiplicity
from ..spec import DilatedSpec, SparsePatternConfig
from .text import show_count

MAX_PAIRS = 2**26  # of all heads and branches: about half a GiB of counts


@dataclass(frozen=True)
class Picture:
    """Counts (heads, n, n) of how often a query (row) meets a key (column), and how to name the heads.

    `heads` are those of each layer of `counts`: heads that look alike are drawn once.
    """

    title: str
    counts: Tensor
    heads: tuple[tuple[int, ...], ...]
    is_causal: bool
    facts: dict[str, Any]

    @property
    def n(self) -> int:
        return self.counts.shape[-1]

    @property
    def together(self) -> Tensor:
        """(n, n) counts over all heads."""
        weights = torch.tensor([len(heads) for heads in self.heads])
        return (self.counts * weights[:, None, None]).sum(0)


def make_picture(options: Namespace) -> Picture:
    """From the options of the command; a ValueError states what does not fit."""
    return _dilated(options) if options.pattern is None else _blocks(options)


def _dilated(options: Namespace) -> Picture:
    spec = DilatedSpec(
        options.segments,
        options.rates,
        options.causal,
        head_mixing=options.mixing,
        head_offsets=options.offsets,
    )
    n, num_heads = options.length, options.heads
    _check_size(n, num_heads * len(spec.branches))
    offsets: list[list[int | None]] = [[None] * len(spec.branches) for _ in range(num_heads)]
    for branch in range(len(spec.branches)):
        for head in branch_heads(spec, branch, num_heads, num_heads):
            offsets[head.head][branch] = head.row
    counts = multiplicity(
        n,
        num_heads,
        spec.segment_lengths,
        spec.dilation_rates,
        is_causal=spec.is_causal,
        head_mixing=spec.head_mixing,
        head_offsets=spec.head_offsets,
    )
    classes: dict[tuple[int | None, ...], list[int]] = {}
    for number, of_head in enumerate(offsets):
        classes.setdefault(tuple(of_head), []).append(number)
    branches = [{"segment_length": w, "dilation_rate": r} for w, r in spec.branches]
    facts = {"branches": branches, "offsets": offsets, "head_mixing": spec.head_mixing}
    title = ", ".join(f"segments of {w} at rate {r}" for w, r in spec.branches)
    heads = tuple(map(tuple, classes.values()))
    return Picture(title, counts[[same[0] for same in heads]], heads, spec.is_causal, facts)


def _blocks(options: Namespace) -> Picture:
    if options.pattern == "adaptive":
        raise ValueError("an adaptive pattern depends on queries and keys, of which there are none to show")
    config = SparsePatternConfig(
        options.pattern,
        options.density,
        options.block_size,
        window_size=options.window,
        global_tokens=options.global_tokens,
        seed=options.seed,
    )
    _check_size(options.length, options.heads)
    pattern = build_block_pattern(
        config,
        options.length,
        options.heads,
        is_causal=options.causal,
        segment_lengths=options.segments,
        dilation_rates=options.rates,
    )
    layouts = pattern.to_dense().to(torch.int64)
    if pattern.is_causal:
        layouts = layouts.tril()
    alike = len(layouts) == 1
    heads = (tuple(range(options.heads)),) if alike else tuple((head,) for head in range(options.heads))
    facts = {
        "pattern": config.pattern_type,
        "block_size": config.block_size,
        "density": pattern.density,
        "density_asked": config.sparsity_ratio,
    }
    title = f"{config.pattern_type}, {pattern.density:.1%} of the blocks of {config.block_size}"
    return Picture(title, layouts, heads, options.causal, facts)


def _check_size(n: int, maps: int) -> None:
    if maps * n * n > MAX_PAIRS:
        most = int((MAX_PAIRS / maps) ** 0.5)
        raise ValueError(
            f"every pair of every head and branch is counted, {show_count(MAX_PAIRS)}at most: with these "
            f"heads and branches --length must be at most {most}, got {n} (shorter segments look the same)"
        )


def permitted(n: int, is_causal: bool) -> Tensor:
    """(n,) float: how many positions each query may see at all."""
    return torch.arange(1, n + 1).double() if is_causal else torch.full((n,), float(n), dtype=torch.float64)


def describe(picture: Picture, layers: int) -> dict[str, Any]:
    """All numbers of a picture; `layers` is a list of what is reached after 1, 2, ... layers."""
    n, allowed = picture.n, permitted(picture.n, picture.is_causal)
    of_class = (picture.counts > 0).sum(-1).double() / allowed
    reached = (picture.counts > 0).any(0)
    by_head, without = [0.0] * sum(map(len, picture.heads)), [0] * sum(map(len, picture.heads))
    for share, heads in zip(of_class, picture.heads, strict=True):
        for head in heads:
            by_head[head], without[head] = share.mean().item(), int((share == 0).sum())
    weights = torch.tensor([len(heads) for heads in picture.heads])
    most = int(picture.counts.max())
    per_class = torch.stack([torch.bincount(x.flatten(), minlength=most + 1) for x in picture.counts])
    pairs = (per_class * weights[:, None]).sum(0).tolist()
    scored = sum(times * count for times, count in enumerate(pairs))
    return {
        "length": n,
        "heads": len(by_head),
        "is_causal": picture.is_causal,
        **picture.facts,
        "head_classes": [list(heads) for heads in picture.heads],
        "scored_pairs": scored,
        "share_of_dense": scored / (len(by_head) * allowed.sum().item()),
        "multiplicity": {str(times): count for times, count in enumerate(pairs) if times and count},
        "coverage": _summary(reached.sum(-1) / allowed),
        "coverage_by_head": by_head,
        "positions_without_keys": without,
        "layers": [
            {"layer": layer, **_summary(field.sum(-1) / allowed)}
            for layer, field in enumerate(receptive_fields(reached, layers), 1)
        ],
    }


def _summary(share: Tensor) -> dict[str, float]:
    """Of all positions, and of the last one, which under a causal mask has the most to see."""
    return {
        "mean": share.mean().item(),
        "least": share.min().item(),
        "last_position": share[-1].item(),
    }


def receptive_fields(reached: Tensor, layers: int) -> list[Tensor]:
    """(n, n) bool after 1, 2, ... layers: a projection mixes the heads, and the residual keeps a row."""
    step = (reached | torch.eye(len(reached), dtype=torch.bool)).float()
    fields = [step > 0]
    for _ in range(1, layers):
        fields.append(fields[-1].float() @ step > 0)
    return fields


def even_cells(n: int, most: int) -> int:
    """Cells a side: one a position if they fit, else a number that divides the positions, if one does."""
    if n <= most:
        return n
    return next((cells for cells in range(most, most // 2, -1) if n % cells == 0), most)


def shrink(counts: Tensor, cells: int) -> Tensor:
    """(cells, cells) float: the mean count of the pairs of each cell; at most one cell a position."""
    n = len(counts)
    cells = min(n, cells)
    edges = torch.arange(cells + 1) * n // cells
    sums = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    sums[1:, 1:] = counts.double().cumsum(0).cumsum(1)
    corners = sums[edges][:, edges]
    totals = corners[1:, 1:] - corners[:-1, 1:] - corners[1:, :-1] + corners[:-1, :-1]
    sizes = edges.diff().double()
    return totals / (sizes[:, None] * sizes)
