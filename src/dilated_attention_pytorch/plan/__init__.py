"""WHICH rows meet: plans made of tiles, and block patterns; plain data that can print itself."""

from .block_pattern import BlockPattern
from .block_sparse import BlockPlan, plan_blocks
from .build_pattern import build_pattern, score_pattern
from .dilated import DEFAULT_WORKSPACE_BYTES, Panel, Plan, plan_crossing, plan_dilated
from .heads import Part
from .shape import Shape
from .tiles import Tile

__all__ = [
    "DEFAULT_WORKSPACE_BYTES",
    "BlockPattern",
    "BlockPlan",
    "Panel",
    "Part",
    "Plan",
    "Shape",
    "Tile",
    "build_pattern",
    "plan_blocks",
    "plan_crossing",
    "plan_dilated",
    "score_pattern",
]
