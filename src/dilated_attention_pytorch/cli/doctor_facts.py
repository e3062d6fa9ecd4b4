"""What `doctor` finds out: versions, packages, machine, devices, kernels; and a few seconds of proof, all
that can run here against its definition. Plain data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from .. import __version__, block_sparse, functional
from ..core import get_global_memory_pool, get_global_pattern_cache
from ..core.host_memory import device_memory, host_memory, numa_nodes
from ..kernels import Request, choose_kernel, kernels_for
from ..reference import block_sparse_attention_reference, dilated_attention_reference
from ..spec import Execution, SparsePatternConfig
from .bench.exactness import TOLERANCE, Check, run_checks
from .bench.measure import machine_facts

# What each optional package is for.
OPTIONAL = {
    "matplotlib": "charts of the demo and the bench",
    "numpy": "nothing here needs it; arrays that share memory with tensors",
    "rich": "live figures of the demo",
    "huggingface_hub": "models of the Hugging Face Hub",
    "safetensors": "models that are saved and loaded",
    "tensorboard": "curves of the trainer",
    "transformers": "this attention inside Hugging Face models",
    "triton": "torch.compile on a GPU",
}
LENGTH, HEADS, HEAD_DIM, BLOCK = 151, 4, 16, 16
BRANCHES = ((16, 64), (1, 4))
TOLERANCES = {torch.float64: TOLERANCE, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = tuple(TOLERANCES)


def collect_facts() -> dict[str, Any]:
    """What holds before anything was computed, by topic."""
    facts = machine_facts()
    versions = {name: facts[name] for name in ("python", "torch", "os")}
    return {
        "versions": {"dilated_attention_pytorch": __version__, **versions},
        "packages": {name: {"version": _version(name), "for": use} for name, use in OPTIONAL.items()},
        "machine": machine(facts),
        "devices": device_facts(),
        "distributed": distributed(),
        "kernels": kernels(),
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


def machine(facts: dict[str, Any]) -> dict[str, Any]:
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


def devices() -> list[torch.device]:
    """The devices of this machine that torch can use: cpu, every CUDA device, mps."""
    found = [torch.device("cpu")]
    found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [*found, torch.device("mps")] if torch.backends.mps.is_available() else found


def device_facts() -> list[dict[str, Any]]:
    """The GPUs that torch can use."""
    found = []
    for device in devices()[1:]:
        memory = device_memory(device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Apple GPU"
        total, free = (None, None) if memory is None else (memory.total, memory.available)
        found.append({"device": str(device), "name": name, "memory_bytes": total, "memory_available": free})
    return found


def why_no_gpu() -> str:
    built_for = torch.version.cuda or torch.version.hip
    if built_for is None:
        return "this torch is built for the CPU alone"
    kind = "CUDA" if torch.version.cuda else "ROCm"
    return f"this torch is built for {kind} {built_for} and finds no device"


def distributed() -> dict[str, Any]:
    """The backends of torch.distributed that can be used here."""
    dist = torch.distributed
    if not dist.is_available():
        return {"available": False, "backends": []}
    asks = {"gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available, "nccl": dist.is_nccl_available}
    return {"available": True, "backends": [name for name, ask in asks.items() if ask()]}


def requests() -> Iterator[tuple[str, str, Request]]:
    """Each device with each dtype, and their names; Apple's GPUs have no float64."""
    for device in devices():
        for dtype in DTYPES[1:] if device.type == "mps" else DTYPES:
            yield str(device), str(dtype).removeprefix("torch."), Request(device, dtype)


def kernels() -> list[dict[str, Any]]:
    """For each device, dtype and kernel: whether it is the one that "auto" takes, else why it cannot run."""
    found = []
    for device, dtype, request in requests():
        chosen = choose_kernel(request).name
        for kernel in kernels_for(request.device):
            entry = {"device": device, "dtype": dtype, "kernel": kernel.name}
            found.append({**entry, "chosen": kernel.name == chosen, "why_not": kernel.why_not(request)})
    return found


def verdicts() -> Iterator[Check]:
    """Options against the definition, then each kernel in each dtype, pooled memory and block patterns."""
    yield from run_checks()
    for device, dtype, request in requests():
        for kernel in kernels_for(request.device):
            if kernel.why_not(request) is None:
                yield check_call(
                    f"{kernel.name}, {dtype} on {device}", request, execution=Execution(kernel.name)
                )
    yield check_call(
        "pooled memory", Request(torch.device("cpu"), torch.float32), execution=Execution(memory="pool")
    )
    yield check_blocks()


def check_call(title: str, request: Request, **options: Any) -> Check:
    """Dilated attention by a kernel, against the definition in float64 of the same inputs."""
    calls = (functional.dilated_attention, dilated_attention_reference)
    return _compare(title, request, calls, (BRANCHES, BRANCHES), options)


def check_blocks() -> Check:
    """Block-sparse attention against the dense masked softmax of its pattern."""
    config = SparsePatternConfig("local_window", 0.4, BLOCK)
    pattern = block_sparse.build_block_pattern(config, LENGTH, HEADS, is_causal=True)
    calls = (block_sparse.block_sparse_attention, block_sparse_attention_reference)
    request = Request(torch.device("cpu"), torch.float64)
    given = ((pattern,), (pattern.to_dense(),))
    return _compare("block-sparse pattern", request, calls, given, {})


def _compare(title: str, request: Request, calls: Any, arguments: Any, options: dict[str, Any]) -> Check:
    """The largest errors of a call and of its gradients: absolute below 1, relative above."""
    generator, shape = torch.Generator().manual_seed(0), (1, LENGTH, HEADS, HEAD_DIM)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    results = []
    places: Any = (((request.device, request.dtype), options), (("cpu", torch.float64), {}))
    for (place, extra), call, given in zip(places, calls, arguments, strict=True):
        q, k, v, grad_out = (x.to(request.dtype).to(*place).detach() for x in drawn)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = call(q, k, v, *given, is_causal=True, **extra)
        results.append([out, *torch.autograd.grad(out, leaves, grad_out)])
    pairs = zip(*results, strict=True)
    errors = [((a.cpu().double() - b).abs() / b.abs().clamp(min=1.0)).max().item() for a, b in pairs]
    # torch's max keeps a NaN where Python's may lose it, and a NaN passes no check
    return Check(title, errors[0], torch.tensor(errors[1:]).max().item(), TOLERANCES[request.dtype])
