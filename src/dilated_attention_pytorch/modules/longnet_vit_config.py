"""Settings of `LongNetViT`, and the segment lengths that Prov-GigaPath derives from the size of a slide."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..checks import check_flags, check_positive_int
from .longnet_config import StackConfig

GIGAPATH_RATES = (1, 2, 4, 8, 16)
GIGAPATH_SEGMENTS = (1024, 5792, 32768, 185363, 1048576)


def gigapath_segment_lengths(max_wsi_size: int = 262144, tile_size: int = 256) -> tuple[int, ...]:
    """Five lengths from 1024 up to all tiles of a square slide of `max_wsi_size` pixels, in equal ratios.

    The powers of two 10 .. e in five equal steps, cut to integers, where 2 ** e is the largest power of two
    that is not more than the number of tiles.
    """
    check_positive_int("max_wsi_size", max_wsi_size)
    check_positive_int("tile_size", tile_size)
    side = max_wsi_size // tile_size
    if side < 1:
        raise ValueError(
            f"max_wsi_size must be at least tile_size {tile_size}, or no tile fits, got {max_wsi_size}"
        )
    last = (side * side).bit_length() - 1
    return tuple(math.floor(2.0 ** (10 + (last - 10) * step / 4)) for step in range(5))


@dataclass(frozen=True, kw_only=True, eq=False)
class LongNetViTConfig(StackConfig):
    """Settings of `LongNetViT`: of the layers, their number, and of the tiles; by default Prov-GigaPath's."""

    model: ClassVar[str] = "LongNetViT"
    layer_counts: ClassVar[tuple[str, ...]] = ("num_layers", "in_chans", "slide_ngrids", "tile_size")
    other_names: ClassVar[tuple[str, ...]] = ("embed_dim", "depth", "max_wsi_size")

    nhead: int = 16
    num_layers: int = 12
    dropout: float = 0.25
    drop_path_rate: float = 0.1
    in_chans: int = 1536
    slide_ngrids: int = 1000
    tile_size: int = 256
    global_pool: bool = False

    def __post_init__(self) -> None:
        if self.segment_lengths is None and self.dilation_rates is None and self.max_length is None:
            object.__setattr__(self, "segment_lengths", GIGAPATH_SEGMENTS)
            object.__setattr__(self, "dilation_rates", GIGAPATH_RATES)
        super().__post_init__()
        check_flags(global_pool=self.global_pool)
        if self.d_model % 4:
            raise ValueError(
                "embed_dim must be a multiple of 4, for sines and cosines of both coordinates of a tile, got "
                f"{self.d_model}"
            )
