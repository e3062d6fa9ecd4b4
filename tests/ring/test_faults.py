"""Ranks that die, hang or disagree: every other rank gets a clear error in time, and nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
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


@pytest.mark.parametrize(
    ("kind", "end", "when"),
    [
        ("ring", "killed", "before"),
        ("ring", "killed", "forward"),
        ("ring", "killed", "backward"),
        ("ring", "hung", "forward"),
        ("ring", "hung", "backward"),
        ("ulysses", "killed", "forward"),
        ("ulysses", "killed", "backward"),
        ("ulysses", "hung", "before"),
        ("blocks", "killed", "forward"),
        ("blocks", "hung", "backward"),
    ],
)
def test_a_lost_rank_is_an_error_on_all_others(kind: str, end: str, when: str) -> None:
    outcomes = watch_ranks(WORLD, lose_a_rank, kind, end, when, timeout=60)
    assert outcomes[VICTIM].exit_code == (-signal.SIGKILL if end == "killed" else 9)
    for outcome in outcomes:
        if outcome.rank == VICTIM:
            continue
        assert outcome.is_well, f"rank {outcome.rank}: exit code {outcome.exit_code}\n{outcome.error}"
        stage, message, seconds = outcome.value
        assert seconds < TIMEOUT + SLACK, f"rank {outcome.rank}: {seconds:.1f} s, {message}"
        assert re.search(r"group '.*' of 4 ranks", message), message
        if "agreeing on " in message:  # before anything else moves
            assert stage != "backward"
            continue
        assert re.search(r"step \d+ of \d+|tokens to heads|heads to tokens", message), message
        assert f"{stage.split()[-1]} pass" in message, (stage, message)


def work(rank: int) -> None:
    for config in FAULTS.values():
        actual = run_shard(config, rank)
        for got, want in zip(actual, expect_shard(config, rank, actual[0]), strict=True):
            assert_close(got, want, torch.float64, config.name)


def test_a_restarted_group_works() -> None:
    """After a loss, new processes start over."""
    watch_ranks(WORLD, lose_a_rank, "ring", "killed", "forward", timeout=60)
    run_ranks(WORLD, work)


PAIR = dilated("pair", (20, 25), ((45, 1), (45, 2)), h=4, h_kv=2)
PAIR_BLOCKS = blocks("pair", (20, 25), drawn(6, "head"), h=4, h_kv=2)


def check_pair(place: int, group: Any) -> None:
    """The shards of two ranks in a group, against one process."""
    for config in (PAIR, PAIR_BLOCKS):
        actual = run_shard(config, place, group=group)
        expected = expect_shard(config, place, actual[0])
        for got, want in zip(actual, expected, strict=True):
            assert_close(got, want, torch.float64, config.name)


def groups_of_a_larger_world(rank: int) -> str:
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    check_pair(rank // 2, odd if rank % 2 else even)
    message = ""
    x = torch.randn(1, 4, 2, 4)
    try:
        ring_dilated_attention(x, x, x, [8], [1], group=even, timeout=20.0)
    except ValueError as error:
        message = str(error)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))
    four = dilated("mesh", (16, 15, 17, 16), ((64, 1), (40, 2)))
    for got, want in zip(run_shard(four, rank, group=mesh), expect_shard(four, rank, x), strict=True):
        assert_close(got, want, torch.float64, "a 1-D mesh")
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    check_pair(rank % 2, grid["ring"])
    check_pair(rank // 2, grid["data"])
    with pytest.raises(ValueError, match=r"1-D|dimension"):
        ring_dilated_attention(x, x, x, [8], [1], group=grid, timeout=20.0)
    with pytest.raises(TypeError, match="group"):
        ring_dilated_attention(x, x, x, [8], [1], group="everybody", timeout=20.0)
    return message


def test_groups_and_meshes() -> None:
    messages = run_ranks(4, groups_of_a_larger_world)
    assert messages[0] == messages[2] == ""
    for message in (messages[1], messages[3]):
        assert "member" in message


def test_without_ranks_a_process_is_alone() -> None:
    config = dilated("alone", (40,), ((16, 1), (40, 2)))
    tensors = config.tensors()
    for got, want in zip(attend_shard(config, 0, tensors), attend_whole(config, tensors), strict=True):
        assert_close(got, want, torch.float64)
    out = ring_dilated_attention(*tensors, config.segment_lengths, config.dilation_rates, strategy="ulysses")
    assert_close(
        out, dilated_attention(*tensors, config.segment_lengths, config.dilation_rates), torch.float64
    )
