"""Paints the pictures of the documentation: each type of block pattern, drawn by the library itself.

python benchmarks/draw_patterns.py docs/images
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from dilated_attention_pytorch.block_sparse import build_block_pattern
from dilated_attention_pytorch.plan import BlockPattern
from dilated_attention_pytorch.spec import SparsePatternConfig

BLOCK, BLOCKS, PIXELS = 64, 64, 256
SEGMENT_LENGTHS, DILATION_RATES = (512, 2048, 4096), (1, 4, 8)


def example_patterns() -> dict[str, BlockPattern]:
    """A telling pattern of each type, by the name of its picture."""
    dilated = SparsePatternConfig("dilated_sparse", 0.28, BLOCK)  # as much as its three branches reach
    hierarchical = SparsePatternConfig("hierarchical", 0.125, BLOCK, hierarchy="long_range")
    topics = _topics(BLOCK * BLOCKS)
    return {
        "local_window": _build(SparsePatternConfig("local_window", 0.1, BLOCK)),
        "dilated_sparse": _build(dilated),
        "global_local": _build(SparsePatternConfig("global_local", 0.15, BLOCK)),
        "strided": _build(SparsePatternConfig("strided", 0.125, BLOCK)),
        "random": _build(SparsePatternConfig("random", 0.1, BLOCK)),
        "hierarchical": _build(hierarchical, blocks=2 * BLOCKS),
        "adaptive": build_block_pattern(
            SparsePatternConfig("adaptive", 0.25, BLOCK), BLOCK * BLOCKS, 1, query=topics, key=topics
        ),
        "causal": _build(dilated, is_causal=True),
    }


def draw_patterns(directory: Path) -> list[Path]:
    """Paints every example to `pattern_<name>.png` in a directory, and returns the files."""
    files = []
    for name, pattern in example_patterns().items():
        files.append(directory / f"pattern_{name}.png")
        pattern.draw(files[-1], pixels=PIXELS)
    return files


def _build(config: SparsePatternConfig, *, blocks: int = BLOCKS, is_causal: bool = False) -> BlockPattern:
    return build_block_pattern(
        config,
        BLOCK * blocks,
        1,
        is_causal=is_causal,
        segment_lengths=SEGMENT_LENGTHS,
        dilation_rates=DILATION_RATES,
    )


def _topics(n: int) -> Tensor:
    """(1, n, 1, 4): four topics that take turns for a while, the later the longer; a query seeks its own."""
    block = torch.arange(n) // BLOCK
    topic = (block + 1).sqrt().mul(2).long() % 4
    noise = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    return (4.0 * torch.nn.functional.one_hot(topic, 4) + 0.5 * noise).view(1, n, 1, 4)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where the pictures go; it must be there")
    options = parser.parse_args(arguments)
    if not options.directory.is_dir():
        parser.error(f"there is no directory {options.directory}")
    print(*draw_patterns(options.directory), sep="\n")


if __name__ == "__main__":
    main()
