"""`plan`: its rule, its predictions against what a process really takes, the code that it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import plan_ring
from dilated_attention_pytorch.cli.bench.candidates import Config
from dilated_attention_pytorch.cli.bench.cases import Case, measure_candidate
from dilated_attention_pytorch.cli.bench.measure import measure_in_child
from dilated_attention_pytorch.cli.forecast import Call, Memory, predict_memory
from dilated_attention_pytorch.cli.main import main
from dilated_attention_pytorch.plan import Shape
from dilated_attention_pytorch.reference import multiplicity
from dilated_attention_pytorch.spec import DilatedSpec, branches_for
from support.executions import FUSED

ROOT = Path(__file__).resolve().parents[2]
# The C allocator keeps freed blocks of up to 32 MiB for later and cannot always use them: a tenth of a small
# call, differently from run to run. With fixed thresholds it returns them: what is held is what is measured.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
ENVIRONMENT = {**os.environ, **ALLOCATOR, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

# Prints the bytes that a process takes beyond the inputs of a call, as the bench measures them. Each case has
# a fork of its own, in which no freed memory of others hides: only that of warm-ups of 64 positions.
MEASURE = """
import json, os, sys, torch
from dilated_attention_pytorch import Execution, functional
from dilated_attention_pytorch.cli.bench.measure import read_status, reset_peak_memory

def make(case, n):
    heads = (case["h"], case["h_kv"], case["h_kv"], case["h"])[: 4 if case["train"] else 3]
    return [torch.randn(1, n, h, case["d"], dtype=getattr(torch, case["dtype"])) for h in heads]

def run(case, tensors, kernel="auto"):
    leaves = [x.requires_grad_(case["train"]) for x in tensors[:3]]
    execution = Execution(kernel, memory=case["memory"])
    options = {"is_causal": case["causal"], "execution": execution, "return_lse": True}
    out, lse = functional.dilated_attention(*leaves, *case["branches"], **options)
    return (out, lse, *torch.autograd.grad(out, leaves, tensors[3])) if case["train"] else (out, lse)

def measure(case):
    for kernel in ("auto", "stock"):  # either may run the case
        run(case, make(case, 64), kernel)
    tensors = make(case, case["n"])
    before = reset_peak_memory()
    results = run(case, tensors)
    print(read_status("VmHWM") - before, flush=True)

torch.set_num_threads(1)
for case in json.loads(sys.argv[1]):
    if os.fork() == 0:
        measure(case)
        os._exit(0)
    assert os.wait()[1] == 0
"""
NEAR, LADDER = ((256,), (1,)), ((256, 2048, 16384), (1, 8, 64))
MEASURED = [
    {"dtype": "float32", "branches": NEAR},
    {"dtype": "float32", "branches": LADDER, "causal": True},
    {"dtype": "float32", "branches": NEAR, "train": True, "causal": True},
    {"dtype": "bfloat16", "branches": NEAR, "n": 32768},
    {"dtype": "float16", "branches": LADDER, "train": True},
    {"dtype": "float32", "branches": NEAR, "h_kv": 2, "train": True},
    {"dtype": "float32", "branches": LADDER, "memory": "pool"},
]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def predicted(case: dict[str, Any]) -> Memory:
    shape = Shape(1, case["n"], case["h"], case["h_kv"], case["d"])
    spec = DilatedSpec(*case["branches"], case["causal"])
    return predict_memory(Call(shape, getattr(torch, case["dtype"]), spec, case["train"]))


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_is_what_a_process_takes() -> None:
    defaults = {"n": 16384, "h": 8, "h_kv": 8, "d": 64, "causal": False, "train": False, "memory": "fresh"}
    cases = [{**defaults, **given} for given in MEASURED]
    command = [sys.executable, "-W", "error", "-W", "ignore::UserWarning", "-c", MEASURE, json.dumps(cases)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT
    )
    assert result.returncode == 0, result.stderr
    for case, extra in zip(cases, map(int, result.stdout.split()), strict=True):
        memory = predicted(case)
        assert memory.peak == pytest.approx(memory.inputs + extra, rel=0.03), case
    config, names = Config(8, 64, *NEAR, is_causal=True), ("dilated_attention",)
    measured = measure_in_child(measure_candidate, Case("plan", config, 16384, names), *names)
    assert measured.why_not is None
    memory = predicted({**defaults, "dtype": "float32", "branches": NEAR, "causal": True})
    assert memory.results == 16384 * 8 * (64 + 1) * 4  # out and lse
    assert memory.peak == pytest.approx(memory.inputs + measured.counts["peak_extra"], rel=0.1)


GIVEN, APART = "as --segments and --rates say", "positions in different segments of 4096 never meet"


@pytest.mark.parametrize(
    ("arguments", "branches", "reason"),
    [
        ("--length 1000", ((2048,), (1,)), "1000 positions fit one segment of 2048, so"),
        ("--length 2049 --ratio 4", ((2048, 8192), (1, 4)), "LongNet's rule, lengths and rates times 4 from"),
        ("--length 70000 --ratio 8", ((2048, 16384, 131072), (1, 8, 8)), "131072 spans 70000 positions"),
        ("--length 70000 --ratio 8 --heads 64", ((2048, 16384, 131072), (1, 8, 64)), "LongNet's rule"),
        ("--length 32k --heads 12", branches_for(32768, 12), "lengths and rates times 2 from 2048 until"),
        ("--length 8k --segments 1k,8k --rates 1,4", ((1024, 8192), (1, 4)), GIVEN),
        ("--length 8k --segments 1k,4k --rates 1,4", ((1024, 4096), (1, 4)), f"{GIVEN}; {APART}"),
    ],
)
def test_branches_follow_the_rule_or_the_options(
    arguments: str, branches: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, *arguments.split())
    assert [found["segment_lengths"], found["dilation_rates"]] == [*map(list, branches)]
    assert found["reasons"][0].startswith("segments: ")
    assert reason in found["reasons"][0]
    is_lower = arguments in ("--length 70000 --ratio 8", "--length 32k --heads 12")
    assert ("a rate above the number of heads stays lower" in found["reasons"][1]) == is_lower
    assert not any("exceed" in reason or "of every" in reason for reason in found["reasons"])


def test_what_heads_leave_out_is_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="serves 4 of every") as warned:
        branches = branches_for(2**20, 4)
    found = plan(capsys, "--length", "1M", "--heads", "4")
    assert tuple(found["dilation_rates"]) == branches[1]
    assert f"rates: {warned[0].message}" in found["reasons"]


def test_flops_and_share_of_dense_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--length 300 --first-segment 64 --ratio 2 --heads 4 --head-dim 16 --layers 3 --batch 2"
    found = plan(capsys, *sizes.split(), "--causal", "--train", "--memory", "1GiB")
    branches = (found["segment_lengths"], found["dilation_rates"])
    assert branches == ([64, 128, 256, 512], [1, 2, 4, 4])
    counts = multiplicity(300, 4, *branches, is_causal=True)
    pairs = int((counts > 0 if "native" in FUSED else counts).sum())
    assert found["pairs"] == {"scored": 3 * 2 * pairs, "defined": 3 * 2 * int(counts.sum())}
    assert found["flops"] == {"forward": 3 * 2 * 4 * 16 * pairs, "backward": 3 * 2 * 10 * 16 * pairs}
    assert found["share_of_dense_flops"] == pytest.approx(pairs / (4 * 300 * 301 / 2))


def test_cost_grows_with_the_length(capsys: pytest.CaptureFixture[str]) -> None:
    heads = ["--heads", "1024", "--head-dim", "1", "--memory", "8GiB"]  # enough for every rate to grow
    small, large = (plan(capsys, "--length", length, "--causal", *heads) for length in ("256k", "1M"))
    assert 3.9 < large["flops"]["forward"] / small["flops"]["forward"] < 4.3
    assert large["memory"]["peak"] < 4.1 * small["memory"]["peak"]


def test_layers_keep_what_their_backward_needs(capsys: pytest.CaptureFixture[str]) -> None:
    one, three = (plan(capsys, "--length", "8k", "--train", "--layers", layers) for layers in ("1", "3"))
    layer = 4 * 8192 * 8 * 64 * 4 + 8192 * 8 * 4  # q, k, v, out and lse
    assert three["memory"]["peak"] - one["memory"]["peak"] == 2 * layer == three["memory"]["saved"]
    forward = plan(capsys, "--length", "8k", "--layers", "3")
    assert forward["memory"]["saved"] == 0


def test_budget_decides_and_names_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--memory", "3GiB", "--dtype", "bfloat16"]
    tight = plan(capsys, "--length", "1M", *arguments)
    assert (tight["memory_budget"], tight["fits"], tight["ranks_that_fit"]) == (3 * 2**30, False, 2)
    longest = tight["longest_length"]
    assert plan(capsys, "--length", str(longest), *arguments)["fits"]
    assert not plan(capsys, "--length", str(int(1.01 * longest)), *arguments)["fits"]
    little = plan(capsys, "--length", "8k", "--memory", "512MiB")
    assert little["options"]["workspace_bytes"] == 2 * 2**20 >= little["memory"]["workspace"]


def test_ranks_share_by_the_ring_s_own_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--length", "64k", "--ranks", "4", "--train", "--dtype", "bfloat16", "--causal")
    assert found["kind"] == "ring"
    branches = (found["segment_lengths"], found["dilation_rates"])
    sizes = {"num_heads": 8, "head_dim": 64, "num_ranks": 4}
    how: dict[str, Any] = {"dtype": torch.bfloat16, "is_causal": True, "strategy": found["strategy"]}
    schedule = plan_ring(*branches, 65536, **sizes, **how)
    received = [schedule.received_bytes(rank, "backward") for rank in range(4)]
    assert found["received_bytes"]["backward"] == max(received)
    assert found["memory"]["peak"] == schedule.memory_bytes(0, "backward")
    assert found["flops"]["forward"] == sum(schedule.flops(rank) for rank in range(4))
    assert found["pairs"]["scored"] == found["pairs"]["defined"]


@pytest.mark.parametrize(
    "arguments",
    [
        "--length 300 --causal",
        "--length 5000 --heads 4 --kv-heads 2 --dtype bfloat16 --train",
        "--length 700 --first-segment 64 --memory 256MiB --batch 2",
    ],
)
def test_code_runs_as_printed(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *arguments.split())
    namespace: dict[str, Any] = {}
    exec(found["code"], namespace)
    shape = (found["batch"], found["length"], found["heads"], found["head_dim"])
    assert namespace["out"].shape == shape
    assert namespace["out"].isfinite().all()
    module = namespace["attention"]
    assert module.spec.segment_lengths == tuple(found["segment_lengths"])
    assert module.enable_memory_pool == found["options"].get("enable_memory_pool", False)
    assert (namespace["q"].grad is not None) == found["train"]


def test_code_of_a_ring_runs_as_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--length 601 --first-segment 64 --ranks 2 --train --causal"
    code = plan(capsys, *arguments.split())["code"]
    assert code.startswith("# torchrun --nproc-per-node 2 this_file.py\n")
    file = tmp_path / "this_file.py"
    tell = "import os; open(os.environ['RANK'], 'w').write(str([*out.shape, *q.grad.shape]))\n"
    file.write_text(code + tell)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    result = subprocess.run([*command, str(file)], env=ENVIRONMENT, cwd=tmp_path, **pipes)
    assert result.returncode == 0, result.stderr
    for rank, n in enumerate((301, 300)):
        assert json.loads((tmp_path / str(rank)).read_text()) == [1, n, 8, 64] * 2


@pytest.mark.usefixtures("no_native")
def test_plans_for_devices_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--length", "128k", "--device", "cuda:1", "--dtype", "float16", "--memory", "16GB")
    assert 'device="cuda:1"' in found["code"]
    compile(found["code"], "code", "exec")
    on_cpu = plan(capsys, "--length", "128k", "--dtype", "float16", "--memory", "16GB")
    assert found["memory"]["workspace"] < on_cpu["memory"]["workspace"]  # no rows in float32
