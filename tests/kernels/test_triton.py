"""The Triton kernel without a GPU: tables, traffic, choice; in other processes interpreted and compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import triton_compile
from hypothesis import given, settings
from torch import Tensor
from triton_compile import TRITON_BEGIN, TRITON_END

from dilated_attention_pytorch import BlockPattern, DilatedSpec
from dilated_attention_pytorch.core.workspace import Workspace
from dilated_attention_pytorch.kernels import Inputs, Merged, Request, choose_kernel, triton
from dilated_attention_pytorch.kernels.triton import tables, tuning
from dilated_attention_pytorch.plan import UNBOUNDED, Plan, Shape, plan_blocks, plan_dilated
from dilated_attention_pytorch.plan.runs import COLUMN
from support.configurations import Configuration, configurations
from support.plans import count_pairs

CPU, GPU = torch.device("cpu"), torch.device("cuda")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
BENCHMARKS = Path(triton_compile.__file__).parent
PARTS = 4
SHARED = {"sm_80": 99, "sm_90": 227, "sm_100": 227, "gfx942": 64}  # KiB of a program; 99 of GPUs for desktops
VECTORS = {128: (".128", "dwordx4"), 64: (".64", "dwordx2")}  # how the names of loads end, by bits
MOST_STACK = 512  # bytes, spilled before the loops and read after them


def run_program(name: str, *arguments: str, **environment: str) -> str:
    folder = BENCHMARKS if name == "triton_compile.py" else Path(__file__).parent
    command = [sys.executable, str(folder / name), *arguments]
    variables = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"} | environment
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@needs_triton
@pytest.mark.parametrize("part", range(PARTS))
def test_interpreted_it_equals_the_definition(part: int) -> None:
    run_program("triton_search.py", str(part), str(PARTS), TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("target", list(SHARED))
def test_every_configuration_compiles_without_local_memory_in_its_loops(target: str) -> None:
    lines = run_program("triton_compile.py", target).splitlines()
    expected = sum(len(row) for (name, _, _), row in tuning.TABLE.items() if name == target)
    assert len(lines) == expected + len(list(triton_compile.others(target)))
    for facts in map(json.loads, lines):
        memory = facts["memory"]
        assert not [x for x in memory if x.startswith(("LDL", "STL", "scratch"))], facts
        assert facts["stack"] <= MOST_STACK, facts
        assert facts["multiplies"] > 0, facts
        assert facts["shared"] <= SHARED[target] * 1024, facts
        check_loads(facts)


def check_loads(facts: dict[str, Any]) -> None:
    """Rows are read in whole vectors: as many as a tile has, and no others where nothing else is read."""
    bits, number = triton_compile.loaded(*(facts[x] for x in ("pass", "target", "dtype", "d", "blocks")))
    assert bits == (64 if facts["d"] == 20 else 128), facts
    names = ("LDGSTS.", "LDG.", "global_load", "buffer_load")
    loads = {x: count for x, count in facts["memory"].items() if x.startswith(names)}
    whole = {x: count for x, count in loads.items() if x.endswith(VECTORS[bits])}
    # In two loops, of tiles with and without a check. A compiler may move one load of four out of a loop.
    assert sum(whole.values()) >= 2 * number * 0.75, facts
    # Gradients of keys read lse and delta, row by row; and a mask is read key by key.
    assert whole == loads or facts["pass"] == "key_gradients" or facts["given"].get("MASKED"), facts


@pytest.mark.parametrize("target", list(SHARED))
@pytest.mark.parametrize("which", get_args(tuning.Pass))
def test_blocks_let_threads_load_whole_vectors(target: tuning.Target, which: tuning.Pass) -> None:
    """By the arithmetic that the compiled configurations confirm."""
    for d in (20, *range(24, 129, 8), 256):  # of those between, the smaller part is read in shorter ones
        blocks = tuning.blocks_for(target, which, 2, d)
        bits, _ = triton_compile.loaded(which, target, "fp16", d, blocks)
        assert bits == (64 if d == 20 else 128), (d, blocks)


def test_the_page_shows_the_record_of_every_configuration() -> None:
    page = triton_compile.PAGE.read_text()
    assert page.partition(TRITON_BEGIN)[2].partition(TRITON_END)[0] == triton_compile.render()
    names = ("pass", "target", "dtype", "d", "blocks")
    recorded = [
        [x[name] for name in names] for x in json.loads(triton_compile.RECORD.read_text())["compiled"]
    ]
    shipped = [x for target in triton_compile.TARGETS for x in triton_compile.shipped(target)]
    assert recorded == [[*x[:-1], list(x[-1])] for x in shipped]


@needs_triton
def test_the_launches_of_a_call_compile_as_they_are_made() -> None:
    assert run_program("triton_launch.py").split() == ["attend", "query_gradients", "key_gradients"]


@settings(max_examples=60)
@given(configurations(max_n=60))
def test_tiles_meet_every_pair_of_a_plan_once(config: Configuration) -> None:
    how: dict[str, Any] = {"itemsize": 4, "docs": config.docs, "workspace_bytes": UNBOUNDED}
    check_tables(plan_dilated(config.spec, config.shape, **how))


@pytest.mark.parametrize("layouts", [1, 4, 8])
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_meet_every_pair_of_a_block_pattern_once(layouts: int, is_causal: bool) -> None:
    layout = torch.rand(layouts, 9, 9, generator=torch.Generator().manual_seed(0)) > 0.4
    pattern = BlockPattern.from_layout(layout, 70, 8)
    pattern = pattern.causal() if is_causal else pattern
    given_: dict[str, Any] = {"itemsize": 4, "workspace_bytes": UNBOUNDED, "joins": False}
    plan = plan_blocks(pattern, Shape(2, 70, 4, 2, 16), **given_)
    check_tables(plan)
    assert len(tables.query_tables(plan, 32, CPU).runs) < len(plan.runs)  # blocks side by side are one run


def check_tables(plan: Plan, block: int = 16) -> None:
    b, n, h, h_kv, _ = plan.shape
    queries, keys = tables.query_tables(plan, block, CPU), tables.key_tables(plan, block, CPU)
    jobs = queries.jobs.long()
    # the same pairs, though runs that follow one another are joined
    joined = Plan(jobs, queries.runs.long(), plan.shape, plan.regions)
    assert torch.equal(count_pairs(joined, cuts=True), count_pairs(plan, cuts=True))
    for launch in queries.launches:  # no two programs write a row
        seen = torch.zeros(b, n, h, dtype=torch.int64)
        for job, number, row in queries.tiles[launch.first : launch.first + launch.number].tolist():
            table = dict(zip(COLUMN, jobs[job].tolist(), strict=True))
            rows = range(table["count"])[row : row + block]
            head = table["head"] + number * table["head_step"]
            seen[table["batch"], [table["start"] + i * table["step"] for i in rows], head] += 1
        assert seen.max() <= 1
    met = torch.zeros(len(plan), dtype=torch.int64)
    for launch in keys.launches:
        seen = torch.zeros(b, n, h_kv, dtype=torch.int64)
        for run, first in keys.tiles[launch.first : launch.first + launch.number].tolist():
            batch, kv, start, step, count, visit, num, _ = keys.keys[run].tolist()
            rows = range(count)[first : first + block]
            seen[batch, [start + i * step for i in rows], kv] += 1
            met.scatter_add_(0, keys.visits[visit : visit + num, 0].long(), torch.full((num,), len(rows)))
        assert seen.max() <= 1
    assert torch.equal(met, plan.key_counts)


class Recorder:
    """Takes the launches of a call instead of a GPU: how many, and the bytes of rows read and written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches = list[str]()
        self.bytes = 0
        monkeypatch.setattr(triton.Call, "_launch", lambda *args, **_: self.record(*args))

    def record(
        self, call: Any, which: str, launch: tables.Launch, opens: str, tensors: tuple[Tensor, ...]
    ) -> None:
        self.launches.append(which)
        plan = call.plan
        mine = plan.column("branch") == launch.branch
        queries = int((plan.column("count") * plan.column("heads"))[mine].sum())
        owners = tables.key_tables(plan, 64, CPU)
        (own,) = (x for x in owners.launches if x.branch == launch.branch)
        tiles = owners.tiles[own.first : own.first + own.number]
        keys = int(owners.keys[torch.unique(tiles[:, 0]).long(), 4].sum())
        row, carries = call.q.shape[-1] * call.q.element_size(), launch.carries[opens]
        rows, numbers = {
            "attend": (queries * (2 + carries) + 2 * keys, queries * (1 + carries)),
            "query_gradients": (queries * (4 + carries) + 2 * keys, queries * 2),
            "key_gradients": (queries * 2 + keys * (4 + 2 * carries), queries * 2),
        }[which]
        self.bytes += rows * row + numbers * 4


def run_recorded(plan: Plan, recorder: Recorder) -> Iterator[tuple[int, float]]:
    b, n, h, h_kv, d = plan.shape
    q, out, g = (torch.empty(b, n, h, d, dtype=torch.float16) for _ in range(3))
    k, v = (torch.empty(b, n, h_kv, d, dtype=torch.float16) for _ in range(2))
    inputs = Inputs(q, k, v, None, 0.125, 0.0, 0, Workspace())
    recorder.launches, recorder.bytes = [], 0
    triton.forward(plan, inputs)
    yield len(recorder.launches), recorder.bytes / 1e6
    recorder.launches, recorder.bytes = [], 0
    triton.backward(plan, inputs, Merged(out, torch.empty(b, h, n), g, None))
    yield len(recorder.launches), recorder.bytes / 1e6


def test_launches_and_bytes_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    shape, spec = Shape(1, 32768, 16, 16, 64), DilatedSpec((2048, 8192, 32768), (1, 4, 16))
    plan = plan_dilated(spec, shape, itemsize=2, workspace_bytes=UNBOUNDED)
    (launches, megabytes), (backward_launches, backward_megabytes) = run_recorded(plan, recorder)
    assert (launches, backward_launches) == (3, 6)
    assert megabytes < 400
    assert backward_megabytes < 1150
    pattern = BlockPattern.from_layout(torch.rand(1, 64, 64) > 0.9, 8192, 128)
    plan = plan_blocks(pattern, Shape(1, 8192, 4, 4, 64), itemsize=2, workspace_bytes=UNBOUNDED, joins=False)
    assert [launches for launches, _ in run_recorded(plan, recorder)] == [1, 2]


PARTS_OF_HEADS = {1: (16, 0), 16: (16, 0), 20: (32, 0), 24: (32, 0), 40: (32, 16), 48: (32, 16), 64: (64, 0)}
PARTS_OF_HEADS |= {72: (64, 16), 80: (64, 16), 96: (64, 32), 112: (128, 0), 160: (128, 32), 256: (256, 0)}


@pytest.mark.parametrize("d", list(PARTS_OF_HEADS))
def test_heads_are_split_where_that_is_cheaper_than_padding(d: int) -> None:
    assert tuning.head_parts(d, 2) == PARTS_OF_HEADS[d]
    first, second = tuning.head_parts(d, 4)
    assert d <= first + second <= max(16, 2 * d - 1)
    assert second == 0 or second >= 32


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton, "is_installed", lambda: False)
    reason = r"kernel 'triton' cannot run this call: triton is not installed, which `pip install"
    for device in (CPU, GPU):
        with pytest.raises(ValueError, match=reason):
            choose_kernel(Request(device, torch.float16), "triton")
    monkeypatch.setattr(triton, "is_installed", lambda: True)
    with pytest.raises(ValueError, match="it runs on cuda, and the tensors are on cpu"):
        choose_kernel(Request(CPU, torch.float16), "triton")


def test_auto_takes_it_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "is_installed", lambda: True)
    for capability, kernel in (((8, 0), "triton"), ((9, 0), "triton"), ((7, 5), "stock")):
        monkeypatch.setattr(triton.cuda, "_capability", lambda _, found=capability: found)
        assert choose_kernel(Request(GPU, torch.float16)).name == kernel
        assert choose_kernel(Request(GPU, torch.float32, head_dim=512)).name == "stock"
        assert choose_kernel(Request(GPU, torch.float64)).name == "eager"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_kernel(Request(CPU, torch.float16)).name != "triton"
    assert choose_kernel(Request(CPU, torch.float16), "triton").name == "triton"
