"""The native kernel: every instruction set, threads, forks, sanitizers; and the plans that it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dilated_attention_pytorch import DilatedSpec, Execution, dilated_attention
from dilated_attention_pytorch.kernels import How, Request, choose_kernel, native
from dilated_attention_pytorch.kernels.native import build
from dilated_attention_pytorch.kernels.native.tasks import MANY_TASKS, tasks_of
from dilated_attention_pytorch.plan import Run, Shape, once, plan_dilated, plan_once
from dilated_attention_pytorch.plan.runs import Job
from dilated_attention_pytorch.reference import multiplicity
from support.configurations import Configuration, configurations
from support.executions import FUSED
from support.plans import count_pairs
from support.tolerances import assert_close

CPU, SHAPE = torch.device("cpu"), Shape(1, 8192, 4, 4, 64)
needs_compiler = pytest.mark.skipif("native" not in FUSED, reason="the native kernel is not compiled or off")
BRANCHES: dict[str, Any] = {"segment_lengths": (64, 256, 600), "dilation_rates": (1, 2, 6)}


def run(n: int = 600, heads: tuple[int, int] = (6, 3), dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    shapes = [(1, n, h, 40) for h in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, grad = (torch.randn(x, generator=generator).to(dtype).requires_grad_() for x in shapes)
    out = dilated_attention(q, k, v, **BRANCHES, is_causal=True, execution=Execution("native"))
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


@settings(max_examples=150)
@given(configurations(max_n=120))
def test_each_key_is_there_once_with_its_multiplicity(config: Configuration) -> None:
    given_ = {x: config.options()[x] for x in ("is_causal", "head_mixing", "head_offsets", "cu_seqlens")}
    plan = plan_once(replace(config.spec, tail="exact"), config.shape, config.docs)
    expected = multiplicity(config.n, config.h, config.segment_lengths, config.dilation_rates, **given_)
    assert torch.equal(count_pairs(plan, cuts=True), expected.expand(config.b, -1, -1, -1))
    assert plan.num_defined_pairs == config.b * int(expected.sum())
    assert plan.num_pairs == int(count_pairs(plan, cuts=True, scored=True).sum())
    assert plan.is_one_stage
    rows = plan.column("heads") * plan.column("count")
    served = int((expected.sum(-1) > 0).sum()) * config.b
    assert int(rows.sum()) == served  # no query is in two jobs


@settings(max_examples=100)
@given(configurations(max_n=120))
def test_tasks_of_the_backward_pass_have_their_keys_to_themselves(config: Configuration) -> None:
    plan = plan_once(config.spec, config.shape, config.docs)
    order, table, parts, num_owned, longest = tasks_of(plan, config.n)
    assert sorted(order.tolist()) == list(range(len(plan)))
    assert len(table) >= MANY_TASKS or parts > 1 or not len(plan)
    keys: dict[tuple[int, int], list[int]] = {}
    for number, first, end, start, after in table.tolist():
        assert after - start <= longest
        owner = Job._make(plan.jobs[order[first]].tolist())
        for job in map(Job._make, plan.jobs[order[first:end]].tolist()):
            assert (job.batch, job.kv) == (owner.batch, owner.kv)
            for met in map(Run._make, plan.runs[job.first_run : job.first_run + job.num_runs].tolist()):
                assert start <= met.start
                assert met.start + (met.count - 1) * met.step < after
        if number % parts == 0:
            keys.setdefault((owner.batch, owner.kv), []).extend(range(start, after))
    assert len(keys) == num_owned
    assert all(each == list(range(config.n)) for each in keys.values())


def test_where_rates_double_a_fifth_of_the_pairs_is_saved_and_plans_stay_small() -> None:
    spec = DilatedSpec((2048, 4096, 8192), (1, 2, 4))
    plan, by_branch = plan_once(spec, SHAPE), plan_dilated(spec, SHAPE, itemsize=4)
    assert 0.75 < plan.num_pairs / plan.num_defined_pairs < 0.85
    assert f"{plan.num_pairs} pairs scored, {plan.num_defined_pairs} of the definition" in str(plan)
    assert by_branch.num_pairs == by_branch.num_defined_pairs == plan.num_defined_pairs
    assert plan_once(spec, Shape(1, 2**20, 12, 12, 64)).nbytes < 16 * 2**20
    tasks = tasks_of(plan_once(spec, Shape(1, 2**20, 1, 1, 64)), 2**20)  # one long head is many tasks
    assert (len(tasks.table), tasks.parts, tasks.longest) == (128, 1, 8192)


def test_where_classes_are_too_small_branches_follow_one_another() -> None:
    assert once.once_pays(DilatedSpec((512, 4096), (1, 8)), SHAPE)
    assert not once.once_pays(DilatedSpec((512, 4096), (7, 12)), SHAPE)
    assert not once.once_pays(DilatedSpec((16, 4096), (1, 8)), SHAPE)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    for heads in ((6, 3), (1, 1)):  # with one head the backward pass splits it over threads
        results = []
        for threads in (1, 2, 2, 5):
            torch.set_num_threads(threads)
            k = torch.linspace(-1, 1, 5000 * 8).sin().view(1, 1, 5000, 8).to(dtype)
            one = native.NATIVE_OP.forward(k[:, :, :1], k, k, How(False, 1.0))  # its keys are split
            results.append([*run(heads=heads, dtype=dtype), *one])
        torch.set_num_threads(before)
        for other in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(other, results[0], strict=True))


@needs_compiler
def test_a_forked_process_can_use_it() -> None:
    expected = run()
    child = os.fork()
    if child == 0:
        os._exit(0 if all(torch.equal(x, y) for x, y in zip(run(), expected, strict=True)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run_search(library: Path | None = None, **environment: str) -> str:
    """Some random calls in another process; with memory that is not zero where it is fresh."""
    command = [sys.executable, str(Path(__file__).with_name("native_search.py"))]
    command += [] if library is None else [str(library)]
    variables = os.environ | {"MALLOC_PERTURB_": "165"} | environment
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@needs_compiler
@pytest.mark.parametrize("isa", list(build.SETS))
def test_instruction_sets(isa: str) -> None:
    ran = run_search(DILATED_ATTENTION_ISA=isa).split()[-1]
    if f" {isa}" not in Path("/proc/cpuinfo").read_text() and isa != "portable":
        pytest.skip(f"this machine has no {isa}")
    assert ran == isa


@needs_compiler
@pytest.mark.parametrize("isa", [*build.SETS, "aarch64"])
def test_plain_loops_give_the_same(isa: str, tmp_path: Path) -> None:
    """A program in C, which also runs where there is no Python: with an emulator for other processors."""
    source, program = Path(__file__).with_name("native_check.c"), str(tmp_path / "check")
    command = [program, "400"]
    if isa == "aarch64":
        compiler, emulator = "aarch64-linux-gnu-gcc", "qemu-aarch64"
        if not (shutil.which(compiler) and shutil.which(emulator)):
            pytest.skip(f"this machine has no {compiler} and {emulator}")
        parts = [build.FOLDER / "kernel.c", build.FOLDER / "dispatch.c", "-DNAME=dap_portable", "-static"]
        command = [emulator, program, "100"]
    else:
        compiler, parts = "cc", [native.LIBRARY, f"-Wl,-rpath,{build.FOLDER}"]
    flags = [*build.FLAGS, f"-I{build.FOLDER}", "-lm", "-lpthread", "-o", program]
    subprocess.run([compiler, str(source), *map(str, parts), *flags], check=True)
    environment = os.environ | {"DILATED_ATTENTION_ISA": isa}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert float(result.stdout.split()[1]) < 1e-5


@needs_compiler
def test_a_causal_tile_that_holds_only_later_keys_is_cut() -> None:
    """With few visible keys all that a vector of queries sees may lie before the first of them."""
    q, k, v = (torch.randn(1, 700, 2, 16, requires_grad=True) for _ in range(3))
    mask = (torch.arange(700) % 90 == 0)[None]
    results = []
    for kernel in ("native", "eager"):
        out = dilated_attention(
            q, k, v, [700], [1], is_causal=True, key_mask=mask, execution=Execution(kernel)
        )
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for got, want in zip(*results, strict=True):
        assert_close(got, want, torch.float32)


@needs_compiler
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    try:
        library = build.build(tmp_path / "native.so", *flags)
    except build.BuildError as error:
        pytest.skip(f"the compiler has no sanitizers: {error}")
    query = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    ran = run_search(library, LD_PRELOAD=query.stdout.strip(), ASAN_OPTIONS="detect_leaks=0")
    assert ran.split()[-1] in build.SETS


def test_without_the_library_the_stock_kernel_serves(no_native: Path) -> None:
    request = Request(CPU, torch.float32)
    assert choose_kernel(request).name == "stock"
    with pytest.raises(ValueError, match=r"kernel 'native' cannot run this call: it is not compiled"):
        choose_kernel(request, "native")
    no_native.write_text("no library")
    native.load_library.cache_clear()
    assert "does not load" in str(native.why_not(request))


def test_without_a_compiler_the_build_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.BuildError, match="there is no C compiler: 'no-such-compiler' was not found"):
        build.build(tmp_path / "native.so")
    monkeypatch.setenv("CC", shutil.which("false") or "false")
    with pytest.raises(build.BuildError, match="failed"):
        build.build(tmp_path / "native.so")
    assert not list(tmp_path.iterdir())
