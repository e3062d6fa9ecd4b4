"""WHICH rows meet: plans made of tiles, plain data that can print itself."""

from .dilated import DEFAULT_WORKSPACE_BYTES, Panel, Plan, Shape, plan_dilated
from .tiles import Tile

__all__ = ["DEFAULT_WORKSPACE_BYTES", "Panel", "Plan", "Shape", "Tile", "plan_dilated"]
