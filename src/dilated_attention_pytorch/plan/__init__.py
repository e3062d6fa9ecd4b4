"""WHICH rows meet: plans of jobs and runs, and block patterns; plain data that can print itself."""

from .block_pattern import BlockPattern
from .build_pattern import build_pattern, score_pattern
from .dilated import Shard, plan_crossing, plan_dilated
from .runs import DEFAULT_WORKSPACE_BYTES, Job, Plan, Region, Run, Shape

__all__ = [
    "DEFAULT_WORKSPACE_BYTES",
    "BlockPattern",
    "Job",
    "Plan",
    "Region",
    "Run",
    "Shape",
    "Shard",
    "build_pattern",
    "plan_crossing",
    "plan_dilated",
    "score_pattern",
]
