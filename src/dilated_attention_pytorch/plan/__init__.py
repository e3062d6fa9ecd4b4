"""WHICH rows meet: plans of jobs and runs, and block patterns; plain data that can print itself."""

from .block_pattern import BlockPattern
from .block_sparse import BYTES_A_THREAD, plan_blocks
from .build_pattern import build_pattern, choose_blocks
from .dilated import Shard, plan_crossing, plan_dilated
from .once import once_pays, plan_once
from .runs import DEFAULT_WORKSPACE_BYTES, UNBOUNDED, Job, Pass, Plan, Range, Region, Run, Shape

__all__ = [
    "BYTES_A_THREAD",
    "DEFAULT_WORKSPACE_BYTES",
    "UNBOUNDED",
    "BlockPattern",
    "Job",
    "Pass",
    "Plan",
    "Range",
    "Region",
    "Run",
    "Shape",
    "Shard",
    "build_pattern",
    "choose_blocks",
    "once_pays",
    "plan_blocks",
    "plan_crossing",
    "plan_dilated",
    "plan_once",
]
