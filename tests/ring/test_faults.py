"""Ranks that die, hang or disagree: every other rank gets a clear error in time, and nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch import dilated_attention
from dilated_attention_pytorch.ring import RingError, ring_dilated_attention
from ring.calls import attend_shard, attend_whole, expect_shard, run_shard
from ring.configurations import Inputs, blocks, dilated, drawn
from support.ranks import run_ranks, watch_ranks
from support.tolerances import assert_close

WORLD, VICTIM, TIMEOUT, SLACK = 4, 1, 3.0, 5.0
EVERYBODY = ((128, 1), (128, 2))  # segments that span all ranks: each needs all others
FAULTS: dict[str, Inputs] = {
    "ring": dilated("fault", (32,) * WORLD, EVERYBODY, h=4, h_kv=4, execution={"steps": 3}),
    "ulysses": dilated("fault", (32,) * WORLD, EVERYBODY, h=4, h_kv=4, strategy="ulysses"),
    "blocks": blocks("fault", (32,) * WORLD, drawn(8, density=0.9)),
}


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(TIMEOUT + 3.0)
    os._exit(9)


ENDS: dict[str, Callable[[], None]] = {"killed": kill_me, "hung": hang}


def at_kernel_call(count: int, act: Callable[[], None]) -> None:
    """Acts when this thread enters a kernel of the library for the `count`-th time: amid the work."""
    calls = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        code = frame.f_code
        if event != "call" or "/dilated_attention_pytorch/kernels/" not in code.co_filename:
            return
        calls += code.co_name in ("_forward", "_backward")
        if calls == count:
            sys.setprofile(None)
            act()

    sys.setprofile(watch)


def lose_a_rank(rank: int, kind: str, end: str, when: str) -> tuple[str, str, float]:
    """(pass, message of the RingError, seconds until it came) of a rank that stays alive."""
    config, stage = FAULTS[kind], "forward"
    leaves = tuple(config.shard(x, rank).requires_grad_() for x in config.tensors())
    attend_shard(config, rank, leaves)[0].sum().backward()  # all is well at first
    if rank == VICTIM and when == "before":
        ENDS[end]()
    if rank == VICTIM and when == "forward":
        at_kernel_call(1, ENDS[end])
    start = time.monotonic()
    try:
        out, _ = attend_shard(config, rank, leaves, timeout=TIMEOUT)
        stage = "backward"
        if rank == VICTIM and when == "backward":
            at_kernel_call(1, ENDS[end])
        start = time.monotonic() if when == "backward" else start
        out.sum().backward()
        stage = "next forward"  # for a rank that had all it needed when the victim was lost
        attend_shard(config, rank, leaves, timeout=TIMEOUT)
    except RingError as error:
        return stage, str(error), time.monotonic() - start
    raise AssertionError("no error")


LOSSES = {
    ("ring", "killed"): ("before", "forward", "backward"),
    ("ring", "hung"): ("forward", "backward"),
    ("ulysses", "killed"): ("forward", "backward"),
    ("ulysses", "hung"): ("before",),
    ("blocks", "killed"): ("forward",),
    ("blocks", "hung"): ("backward",),
}


@pytest.mark.parametrize(("kind", "end", "when"), [(*x, when) for x in LOSSES for when in LOSSES[x]])
def test_a_lost_rank_is_an_error_on_all_others(kind: str, end: str, when: str) -> None:
    outcomes = watch_ranks(WORLD, lose_a_rank, kind, end, when, timeout=60)
    assert outcomes[VICTIM].exit_code == (-signal.SIGKILL if end == "killed" else 9)
    for outcome in (*outcomes[:VICTIM], *outcomes[VICTIM + 1 :]):
        assert outcome.is_well, f"rank {outcome.rank}: exit code {outcome.exit_code}\n{outcome.error}"
        stage, message, seconds = outcome.value
        assert seconds < TIMEOUT + SLACK, f"rank {outcome.rank}: {seconds:.1f} s, {message}"
        assert re.search(r"group '.*' of 4 ranks", message), message
        if "agreeing on " in message:  # before anything else moves
            assert stage != "backward"
            continue
        assert re.search(r"step \d+ of \d+|tokens to heads|heads to tokens", message), message
        assert f"{stage.split()[-1]} pass" in message, (stage, message)


def check(place: int, group: Any, configs: Iterable[Inputs]) -> None:
    """The shards of a rank in a group, against one process."""
    for config in configs:
        actual = run_shard(config, place, group=group)
        for got, want in zip(actual, expect_shard(config, place, actual[0]), strict=True):
            assert_close(got, want, torch.float64, config.name)


def work(rank: int) -> None:
    check(rank, None, FAULTS.values())


def test_a_restarted_group_works() -> None:
    """After a loss, new processes start over."""
    watch_ranks(WORLD, lose_a_rank, "ring", "killed", "forward", timeout=60)
    run_ranks(WORLD, work)


PAIR: tuple[Inputs, ...] = (
    dilated("pair", (20, 25), ((45, 1), (45, 2)), h=4, h_kv=2),
    blocks("pair", (20, 25), drawn(6, "head"), h=4, h_kv=2),
)


def groups_of_a_larger_world(rank: int) -> None:
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    check(rank // 2, odd if rank % 2 else even, PAIR)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))
    check(rank, mesh, [dilated("mesh", (16, 15, 17, 16), ((64, 1), (40, 2)))])
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    check(rank % 2, grid["ring"], PAIR)
    check(rank // 2, grid["data"], PAIR)
    x, other = torch.randn(1, 4, 2, 4), even if rank % 2 else odd
    for group, error, message in (
        (other, ValueError, "not a member"),
        (grid, ValueError, "one-dimensional mesh"),
        ("everybody", TypeError, "group must be"),
    ):
        with pytest.raises(error, match=message):
            ring_dilated_attention(x, x, x, [8], [1], group=group, timeout=20.0)


def test_groups_and_meshes() -> None:
    assert run_ranks(4, groups_of_a_larger_world) == [None] * 4


def test_without_ranks_a_process_is_alone() -> None:
    config = dilated("alone", (40,), ((16, 1), (40, 2)))
    tensors = config.tensors()
    for got, want in zip(attend_shard(config, 0, tensors), attend_whole(config, tensors), strict=True):
        assert_close(got, want, torch.float64)
    out = ring_dilated_attention(*tensors, *config.lists, strategy="ulysses")
    assert_close(out, dilated_attention(*tensors, *config.lists), torch.float64)
