"""Ranks that die, hang or disagree: every other rank gets a clear error in time, and nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch import BlockPattern, dilated_attention
from dilated_attention_pytorch.ring import RingError, ring_dilated_attention
from ring.calls import attend_shard, attend_whole, expect_shard, run_shard
from ring.configurations import Inputs, blocks, dilated, drawn
from support.executions import ring, ring_blocks
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


@dataclass(frozen=True)
class Disagreement:
    """What rank 1 does otherwise, and the error: what its own message says, and that of the others."""

    name: str
    says: str
    others_say: str = ""  # the same, unless rank 1 alone is to blame
    options: dict[str, Any] = field(default_factory=dict)  # of rank 1
    common: dict[str, Any] = field(default_factory=dict)  # of all ranks
    shape: dict[str, int] = field(default_factory=dict)  # of rank 1
    change: Callable[[list[Tensor]], list[Tensor]] = list  # of q, k and v
    error: type[Exception] = ValueError
    pattern: str = ""  # block-sparse attention; on rank 1 with another "pattern" or "length"


REFUSED = "rank 1.*refused"
LENGTHS = (8, 8, 8)
MASK = torch.ones(2, 8, dtype=torch.bool)
MASKED = {"key_mask": MASK}
OTHER_DOCUMENTS = {"cu_seqlens": torch.tensor([0, 7, 24])}
DOCUMENTS = {"cu_seqlens": torch.tensor([0, 5, 24])}


def as_integers(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().long() for x in tensors]


DISAGREEMENTS = (
    Disagreement("causal", "is_causal", options={"is_causal": True}),
    Disagreement("segments", "segment_lengths", options={"segment_lengths": (12, 24)}),
    Disagreement("rates", "dilation_rates", options={"dilation_rates": (1, 3)}),
    Disagreement("branches", "segment_lengths", options={"segment_lengths": (8,), "dilation_rates": (1,)}),
    Disagreement("scale", "scale", options={"scale": 0.1}),
    Disagreement("mixing", "head_mixing", options={"head_mixing": "grouped"}),
    Disagreement("offsets", "head_offsets", options={"head_offsets": "blocked"}),
    Disagreement("tail", "tail", options={"tail": "phantom"}),
    Disagreement("detached", "detach_mixing", options={"detach_mixing": True}, common={"strategy": "auto"}),
    Disagreement("strategy", "strategy", options={"strategy": "ulysses"}, common={"strategy": "ring"}),
    Disagreement("dropout", "dropout_p", options={"dropout_p": 0.1}),
    Disagreement("steps", "steps", options={"steps": 2}, common={"strategy": "ring"}),
    Disagreement("batch", "batch|b ", shape={"b": 3}),
    Disagreement("heads", "head", shape={"h": 6}),
    Disagreement("key heads", "head", shape={"h_kv": 1}),
    Disagreement("features", "head_dim|features|d ", shape={"d": 5}),
    Disagreement("dtype", "dtype", change=lambda x: [y.double() for y in x]),
    Disagreement("gradients", "grad", change=lambda x: [y.detach() for y in x]),
    Disagreement("mask", "key_mask", options=MASKED),
    Disagreement("documents", "cu_seqlens", options=DOCUMENTS, common=OTHER_DOCUMENTS),
    Disagreement("documents of one rank", "cu_seqlens", options=DOCUMENTS),
    Disagreement("lengths that do not fit", "shard_lengths", f"shard_lengths|{REFUSED}",
                 common={"shard_lengths": (8, 9, 7)}),
    Disagreement("lengths of too few ranks", "shard_lengths", common={"shard_lengths": (8, 16)}),
    Disagreement("negative lengths", "shard_lengths", common={"shard_lengths": (-8, 24, 8)}),
    Disagreement("another length", "shard_lengths", f"shard_lengths|{REFUSED}", shape={"n": 9},
                 common={"shard_lengths": LENGTHS}),
    Disagreement("integers", "float16", REFUSED, change=as_integers, error=TypeError),
    Disagreement("three dimensions", "4 dimensions", REFUSED, change=lambda x: [x[0][0], *x[1:]]),
    Disagreement("a list", "tensor", REFUSED, change=lambda x: [[1.0], *x[1:]], error=TypeError),
    Disagreement("two dtypes", "dtype", REFUSED, change=lambda x: [x[0].double(), *x[1:]], error=TypeError),
    Disagreement("shapes of k and v", "shape", REFUSED, change=lambda x: [x[0], x[1][:, 1:], x[2]]),
    Disagreement("heads that do not divide", "heads", REFUSED, shape={"h_kv": 3}),
    Disagreement("negative segment", "segment_lengths", REFUSED, options={"segment_lengths": (8, -1)}),
    Disagreement("shape of the mask", "key_mask", REFUSED, options={"key_mask": MASK[:, 1:]}, common=MASKED),
    Disagreement("dtype of the mask", "key_mask", REFUSED, options={"key_mask": MASK.float()}, common=MASKED,
                 error=TypeError),
    Disagreement("memory", "memory", REFUSED, options={"memory": "cloud"}),
    Disagreement("unknown strategy", "strategy", REFUSED, options={"strategy": "star"}),
    Disagreement("steps below one", "steps", REFUSED, options={"steps": 0}),
    Disagreement("detached ring", "detach_mixing", common={"strategy": "ring", "detach_mixing": True}),
    Disagreement("patterns", "pattern", pattern="pattern"),
    Disagreement("length of the pattern", "length|pattern", pattern="length"),
    Disagreement("blocks: causal", "is_causal", options={"is_causal": True}, pattern="same"),
    Disagreement("blocks: gradients", "grad", change=lambda x: [y.detach() for y in x], pattern="same"),
    Disagreement("blocks: integers", "float16", REFUSED, change=as_integers, error=TypeError, pattern="same"),
    Disagreement("lengths that differ", "shard_lengths", options={"shard_lengths": (7, 8, 9)},
                 common={"shard_lengths": LENGTHS}),
    Disagreement("timeout", "timeout", REFUSED, options={"timeout": -1.0}),
)  # fmt: skip


def call(rank: int, case: Disagreement) -> Any:
    is_odd = rank == 1
    shape = {
        "b": 1 if "cu_seqlens" in {**case.options, **case.common} else 2,
        "n": 8,
        "h": 4,
        "h_kv": 2,
        "d": 4,
    }
    shape |= case.shape if is_odd else {}
    b, n, h, h_kv, d = (shape[name] for name in ("b", "n", "h", "h_kv", "d"))
    tensors = [torch.randn(b, n, heads, d, requires_grad=True) for heads in (h, h_kv, h_kv)]
    tensors = case.change(tensors) if is_odd else tensors
    options = {"timeout": 20.0, **case.common, **(case.options if is_odd else {})}
    if case.pattern:
        block = {"pattern": 3, "length": 2}.get(case.pattern, 2) if is_odd else 2
        length = 26 if is_odd and case.pattern == "length" else 24
        layout = torch.ones(-(-length // block), -(-length // block), dtype=torch.bool)
        pattern = BlockPattern.from_layout(layout, length, block)
        return ring_blocks(*tensors, pattern, **options)
    branches = {"segment_lengths": (8, 24), "dilation_rates": (1, 2), **options}
    return ring(*tensors, **branches)


def disagree(rank: int) -> dict[str, tuple[str, str]]:
    """The type and message of the error of each case; after each of them the group still works."""
    errors = {}
    for case in DISAGREEMENTS:
        try:
            call(rank, case)
            errors[case.name] = "no error", ""
        except Exception as error:
            errors[case.name] = type(error).__name__, str(error)
        try:
            assert call(rank, Disagreement("healthy", "")).shape == (2, 8, 4, 4)
        except Exception as error:  # the ranks no longer match: no use to go on
            before = ": ".join(errors[case.name])
            errors[case.name] = "broken group", f"{before}; afterwards {error!r}"
            return errors
    return errors


def test_ranks_that_disagree_or_err_get_clear_errors_everywhere() -> None:
    wrong = []
    outcomes = watch_ranks(3, disagree, timeout=90)
    for outcome in outcomes:
        rank, errors = outcome.rank, outcome.value
        if errors is None:
            wrong.append(f"rank {rank}: exit code {outcome.exit_code} {outcome.error}")
            continue
        for case in DISAGREEMENTS:
            kind, message = errors.get(case.name, ("not reached", ""))
            says = case.says if rank == 1 or not case.others_say else case.others_say
            kinds = (case.error.__name__,) if rank == 1 else (case.error.__name__, "ValueError")
            if kind not in kinds or not re.search(says, message):
                wrong.append(f"{case.name}, rank {rank}: {kind}: {message!r}, not {kinds[0]}: {says}")
    assert not wrong, "\n" + "\n".join(wrong)


def no_tokens(rank: int) -> str:
    x = torch.randn(1, 0, 2, 4)
    with pytest.raises(ValueError, match=r"position|token") as caught:
        ring_dilated_attention(x, x, x, [8], [1], timeout=20.0)
    return str(caught.value)


def test_no_token_anywhere() -> None:
    assert len(run_ranks(2, no_tokens)) == 2


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
