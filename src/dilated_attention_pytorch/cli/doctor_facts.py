"""What `doctor` finds out: versions, packages, machine, devices, kernels, memory. Plain data."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import torch

from .. import __version__
from ..bench.machine import machine_facts
from ..core import get_global_memory_pool, get_global_pattern_cache
from ..core.host_memory import device_memory, host_memory, numa_nodes
from ..kernels import Request, choose_kernel, kernels_for
from .doctor_checks import devices, dtypes_of, name_of

# What each optional package is for.
OPTIONAL = {
    "matplotlib": "nothing here needs it; figures of your own",
    "numpy": "nothing here needs it; arrays that share memory with tensors",
    "rich": "live figures of the demo",
    "huggingface_hub": "models of the Hugging Face Hub",
    "safetensors": "models that are saved and loaded",
    "tensorboard": "curves of the trainer",
    "transformers": "this attention inside Hugging Face models",
    "triton": "torch.compile on a GPU",
}


def collect_facts() -> dict[str, Any]:
    """What holds before anything was computed, by topic."""
    return {
        "versions": versions(),
        "packages": packages(),
        "machine": machine(),
        "devices": device_facts(),
        "distributed": distributed(),
        "kernels": kernels(),
    }


def kept() -> dict[str, Any]:
    """What outlives a call in this process."""
    return {
        "memory_pool": get_global_memory_pool().get_stats(),
        "pattern_cache": get_global_pattern_cache().get_stats(),
    }


def versions() -> dict[str, Any]:
    facts = machine_facts()
    names = ("python", "torch", "os")
    return {"dilated_attention_pytorch": __version__, **{name: facts[name] for name in names}}


def packages() -> dict[str, dict[str, str | None]]:
    return {name: {"version": _version(name), "for": use} for name, use in OPTIONAL.items()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Cores, threads and memory. `memory_limit` is below `memory_bytes` where a cgroup or ulimit binds."""
    facts, memory = machine_facts(), host_memory()
    return {
        "cpu": facts["cpu"],
        "cpu_capability": facts["cpu_capability"],
        "cores": facts["cores"],
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else facts["cores"],
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "load": facts["load"],
        "memory_bytes": facts["memory_bytes"],
        "memory_limit": None if memory is None else memory.total,
        "memory_available": None if memory is None else memory.available,
        "numa_nodes": numa_nodes(),
    }


def device_facts() -> list[dict[str, Any]]:
    """The GPUs that torch can use; where it can use none, why."""
    found = []
    for device in devices()[1:]:
        memory = device_memory(device)
        found.append(
            {
                "device": str(device),
                "name": torch.cuda.get_device_name(device) if device.type == "cuda" else "Apple GPU",
                "memory_bytes": None if memory is None else memory.total,
                "memory_available": None if memory is None else memory.available,
            }
        )
    return found


def why_no_gpu() -> str:
    built_for = torch.version.cuda or torch.version.hip
    if built_for is None:
        return "this torch is built for the CPU alone"
    return (
        f"this torch is built for {'CUDA' if torch.version.cuda else 'ROCm'} {built_for} and finds no device"
    )


def distributed() -> dict[str, Any]:
    """The backends of torch.distributed that can be used here."""
    dist = torch.distributed
    if not dist.is_available():
        return {"available": False, "backends": []}
    asks = {"gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available, "nccl": dist.is_nccl_available}
    return {"available": True, "backends": [name for name, ask in asks.items() if ask()]}


def kernels() -> list[dict[str, Any]]:
    """For each device, dtype and kernel: whether it is the one that "auto" takes, else why it cannot run."""
    found = []
    for device in devices():
        for dtype in dtypes_of(device):
            request = Request(device, dtype)
            chosen = choose_kernel(request).name
            for kernel in kernels_for(device):
                entry = {"device": str(device), "dtype": name_of(dtype), "kernel": kernel.name}
                found.append({**entry, "chosen": kernel.name == chosen, "why_not": kernel.why_not(request)})
    return found
