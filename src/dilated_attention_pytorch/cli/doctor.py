"""`doctor`: versions, packages, machine, devices, kernels; and a few seconds of proof, all that can run here
against its definition."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib import metadata
from itertools import product
from typing import Any

import torch

from .. import __version__, block_sparse, functional
from ..core import get_global_memory_pool, get_global_pattern_cache
from ..core.host_memory import device_memory, host_memory, numa_nodes
from ..kernels import TRITON, Request, choose_kernel, kernels_for, triton
from ..kernels.triton import tuned
from ..kernels.triton.tuning import Blocks
from ..reference import block_sparse_attention_reference, dilated_attention_reference
from ..spec import Execution, SparsePatternConfig
from .bench import gate
from .bench.exactness import HEADS, LENGTH, Check, run_checks
from .bench.measure import machine_facts
from .text import paint, print_json, show_bytes

# What each optional package is for.
OPTIONAL = {
    "matplotlib": "charts of demo and bench, pictures of patterns",
    "numpy": "nothing here needs it; arrays that share memory with tensors",
    "huggingface_hub": "models of the Hugging Face Hub",
    "safetensors": "models that are saved and loaded",
    "tensorboard": "curves of the trainer",
    "transformers": "this attention inside Hugging Face models",
    "triton": "this library's kernel for GPUs; torch.compile there",
}
BLOCK = 16
# Long enough for kernels that take all branches of a query at once.
BRANCHES: dict[str, Any] = {"segment_lengths": (64, 128), "dilation_rates": (1, 4), "is_causal": True}
Attend = Callable[..., Any]
CPU = torch.device("cpu")
BLOCK_HEAD_DIMS = (32, 64, 80, 96, 128, 256)
DTYPES = ("float64", "float32", "bfloat16", "float16")


def run(options: Namespace) -> int:
    """Prints the facts, then each check as it ends; 1 if one fails."""
    facts = collect_facts()
    if options.json:
        checks = list(run_all_checks())
        passed = all(check.passed for check in checks)
        print_json({**facts, "self_check": checks_as_dicts(checks), "passed": passed, **kept()})
        return 0 if passed else 1
    for title, lines in describe(facts).items():
        _print_section(title, lines)
    print()
    checks = show_checks(run_all_checks())
    if failed := sum(not check.passed for check in checks):
        print(
            paint(f"\n{failed} of {len(checks)} checks failed: do not trust results on this machine.", "red")
        )
    else:
        print(paint(f"\nAll {len(checks)} checks passed.", "green"))
    pool, cache = kept().values()
    held = f"{show_bytes(pool['total_allocated'])}, at most {show_bytes(pool['max_bytes'])}"
    plans = f"{cache['size']} plans of {show_bytes(cache['bytes'])}, at most {cache['max_size']} plans"
    values = {
        "memory pool": f"{held}; {pool['reuse_rate']:.0%} of requests reused memory",
        "pattern cache": plans,
    }
    _print_section("\nkept by this process after the checks", _pairs(values))
    return 1 if failed else 0


def checks_as_dicts(checks: Iterable[Check]) -> list[dict[str, Any]]:
    return [{**asdict(check), "passed": check.passed} for check in checks]


def collect_facts() -> dict[str, Any]:
    """What holds before anything was computed, by topic."""
    facts = machine_facts()
    versions = {name: facts[name] for name in ("python", "torch", "os")}
    return {
        "versions": {"dilated_attention_pytorch": __version__, **versions},
        "packages": {name: {"version": _version(name), "for": use} for name, use in OPTIONAL.items()},
        "machine": _machine(facts),
        "devices": [_gpu(device) for device in _devices()[1:]],
        "distributed": _distributed(),
        "kernels": list(_kernels()),
        "blocks": list(_blocks()),
    }


def kept() -> dict[str, Any]:
    """What outlives a call in this process."""
    pool, cache = get_global_memory_pool(), get_global_pattern_cache()
    return {"memory_pool": pool.get_stats(), "pattern_cache": cache.get_stats()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Cores, threads and memory. `memory_limit` is below `memory_bytes` where a cgroup or ulimit binds."""
    memory = host_memory()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else facts["cores"]
    return {
        **{name: facts[name] for name in ("cpu", "cpu_capability", "cores", "load", "memory_bytes")},
        "usable_cores": usable,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "memory_limit": None if memory is None else memory.total,
        "memory_available": None if memory is None else memory.available,
        "numa_nodes": numa_nodes(),
    }


def _devices() -> list[torch.device]:
    """The devices of this machine that torch can use: cpu, every CUDA device, mps."""
    found = [CPU, *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    return [*found, torch.device("mps")] if torch.backends.mps.is_available() else found


def _gpu(device: torch.device) -> dict[str, Any]:
    memory = device_memory(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Apple GPU"
    total, free = (None, None) if memory is None else (memory.total, memory.available)
    return {"device": str(device), "name": name, "memory_bytes": total, "memory_available": free}


def _distributed() -> dict[str, Any]:
    """The backends of torch.distributed that can be used here."""
    dist = torch.distributed
    if not dist.is_available():
        return {"available": False, "backends": []}
    asks = {"gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available, "nccl": dist.is_nccl_available}
    return {"available": True, "backends": [name for name, ask in asks.items() if ask()]}


def _requests() -> Iterator[tuple[str, str, Request]]:
    """Each device with each dtype, and their names; Apple's GPUs have no float64."""
    for device in _devices():
        for dtype in DTYPES[1:] if device.type == "mps" else DTYPES:
            yield str(device), dtype, Request(device, getattr(torch, dtype))


def _kernels() -> Iterator[dict[str, Any]]:
    """For each device, dtype and kernel: whether it is the one that "auto" takes, else why it cannot run."""
    for device, dtype, request in _requests():
        chosen = choose_kernel(request).name
        # Triton's interpreter takes CPU tensors when it is named.
        more = (TRITON,) if request.device == CPU and triton.interprets() else ()
        for kernel in (*kernels_for(request.device), *more):
            entry = {"device": device, "dtype": dtype, "kernel": kernel.name}
            yield {**entry, "chosen": kernel.name == chosen, "why_not": kernel.why_not(request)}


def _blocks() -> Iterator[dict[str, Any]]:
    """The blocks of the triton kernel where it can run: by device, dtype, pass and head size."""
    for device, dtype, request in _requests():
        for which, d in product(tuned.PASSES, BLOCK_HEAD_DIMS):
            if triton.why_not(request._replace(head_dim=d)) is None:
                blocks, is_tuned = triton.blocks_of(request.device, which, request.dtype, d)
                entry = {"device": device, "dtype": dtype, "pass": which, "head_dim": d}
                yield {**entry, "blocks": list(blocks), "tuned": is_tuned}


def run_all_checks() -> Iterator[Check]:
    """Options against the definition, then each kernel in each dtype, pooled memory and a block pattern."""
    yield from run_checks()
    executions = {
        f"{kernel.name}, {dtype} on {device}": (dtype, request, Execution(kernel.name))
        for device, dtype, request in _requests()
        for kernel in kernels_for(request.device)
        if kernel.why_not(request) is None
    }
    executions["pooled memory"] = ("float32", Request(CPU, torch.float32), Execution(memory="pool"))
    for title, (dtype, request, execution) in executions.items():
        attend = partial(functional.dilated_attention, **BRANCHES, execution=execution)
        define = partial(dilated_attention_reference, **BRANCHES)
        yield compare(title, dtype, request.device, attend, define)
    config = SparsePatternConfig("local_window", 0.4, BLOCK)
    pattern = block_sparse.build_block_pattern(config, LENGTH, HEADS, is_causal=True)
    attend = partial(block_sparse.block_sparse_attention, pattern=pattern, is_causal=True)
    define = partial(block_sparse_attention_reference, mask=pattern.to_dense(), is_causal=True)
    yield compare("block-sparse pattern", "float64", CPU, attend, define)


def compare(
    title: str,
    dtype: str,
    device: torch.device,
    attend: Attend,
    define: Attend,
    *,
    kv_heads: int = HEADS,
    d: int = 16,
) -> Check:
    """A call and its gradients on a device against the definition in float64 of the same inputs."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(1, LENGTH, h, d) for h in (HEADS, kv_heads, kv_heads, HEADS)]
    *inputs, grad_out = (torch.randn(x, generator=rng).to(getattr(torch, dtype)) for x in shapes)
    errors = gate.compare(lambda *x: attend(*(y.to(device) for y in x)).cpu(), define, inputs, grad_out)
    out, gradients = (
        math.nan if x == math.inf else x for x in (errors[0], max(errors[1:]))
    )  # of lost numbers
    return Check(title, out, gradients, gate.TOLERANCES[dtype])


def show_checks(checks: Iterable[Check]) -> list[Check]:
    """One line a check as it ends; the largest errors against what is tolerated."""
    print(paint("against the definition", "bold"), "(largest errors: forward, gradients)")
    done = []
    for check in checks:
        done.append(check)
        errors = f"{check.forward_error:.0e}, {check.gradient_error:.0e} (at most {check.tolerance:.0e})"
        print(f"  {mark(check.passed)} {check.title:<48} {errors}", flush=True)
    return done


def mark(passed: bool) -> str:
    return paint("ok  ", "green") if passed else paint("FAIL", "red")


def describe(facts: Mapping[str, Any]) -> dict[str, Iterable[str]]:
    """The facts as lines of text under their titles."""
    packages = {
        name: f"{x['version'] or 'not installed'} ({x['for']})" for name, x in facts["packages"].items()
    }
    gpus = {}
    for gpu in facts["devices"]:
        memory = "" if gpu["memory_bytes"] is None else f", {show_bytes(gpu['memory_bytes'])}"
        gpus[gpu["device"]] = gpu["name"] + memory
    backends = ", ".join(facts["distributed"]["backends"])
    return {
        "versions": _pairs(facts["versions"]),
        "optional packages": _pairs(packages),
        "machine": _pairs(_describe_machine(facts["machine"])),
        "GPUs": _pairs(gpus) if gpus else [f"none: {_why_no_gpu()}"],
        "torch.distributed": [backends or "no backend: rings of several processes cannot run"],
        "kernels": _describe_kernels(facts["kernels"]),
        **_describe_blocks(facts["blocks"]),
    }


def _why_no_gpu() -> str:
    for kind, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)):
        if version is not None:
            return f"this torch is built for {kind} {version} and finds no device"
    return "this torch is built for the CPU alone"


def _describe_machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    limit, physical = facts["memory_limit"], facts["memory_bytes"]
    memory = "unknown" if physical is None else show_bytes(physical)
    if limit is not None and physical is not None and limit < 0.99 * physical:
        memory += f", of which this process may use {show_bytes(limit)}"
    if facts["memory_available"] is not None:
        memory += f", {show_bytes(facts['memory_available'])} available"
    return {
        "cpu": f"{facts['cpu']} ({facts['cpu_capability']})",
        "cores": f"{facts['cores']}, {facts['usable_cores']} of them for this process",
        "threads": f"{facts['threads']} in a kernel, {facts['interop_threads']} between kernels",
        "load": facts["load"],
        "memory": memory,
        "NUMA nodes": facts["numa_nodes"],
    }


def _by_dtype(told: Iterable[tuple[str, str, str, str]]) -> list[str]:
    """Lines of (name, device, dtype, word): one for all dtypes of a device of which the same can be said."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, device, dtype, word in told:
        alike.setdefault((name, device, word), []).append(dtype)
    return [f"{name:<16} {device}, {' '.join(x)}: {word}" for (name, device, word), x in alike.items()]


def _describe_kernels(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    told = []
    for entry in entries:
        word = "can run when named" if entry["why_not"] is None else f"cannot: {entry['why_not']}"
        word = "taken by auto" if entry["chosen"] else word
        told.append((entry["kernel"], entry["device"], entry["dtype"], word))
    return _by_dtype(told)


def _describe_blocks(entries: Iterable[Mapping[str, Any]]) -> dict[str, Iterable[str]]:
    """Blocks by head size, where the triton kernel can run."""
    by_size: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for entry in entries:
        word = f"{Blocks(*entry['blocks'])} {'tuned here' if entry['tuned'] else 'shipped'}"
        sizes = by_size.setdefault((entry["pass"], entry["device"], entry["dtype"]), {})
        sizes.setdefault(word, []).append(str(entry["head_dim"]))
    words = ["; ".join(f"{' '.join(d)}: {word}" for word, d in sizes.items()) for sizes in by_size.values()]
    lines = _by_dtype((*key, word) for key, word in zip(by_size, words, strict=True))
    return {"blocks of triton, by head size (queries x keys, warps, stages)": lines} if lines else {}


def _print_section(title: str, lines: Iterable[str]) -> None:
    print(paint(title, "bold"))
    for line in lines:
        print(f"  {line}")


def _pairs(values: Mapping[str, Any]) -> Iterator[str]:
    width = max(16, *map(len, values))
    return (f"{name:<{width}} {value}" for name, value in values.items())
