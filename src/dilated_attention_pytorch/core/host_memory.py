"""What the machine can still give: free memory under its limits, NUMA nodes, errors that mean "no more"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from ..checks import check_device

PROC, SYS = Path("/proc"), Path("/sys")
UNLIMITED = 2**60  # cgroups without a limit report a number near 2**63


class Memory(NamedTuple):
    """Bytes under the limit that binds first."""

    available: int
    total: int

    @property
    def is_scarce(self) -> bool:
        return self.available < self.total // 10


def host_memory() -> Memory | None:
    """Memory that this process can still get: free memory, cgroup limits or the address space, the least.

    None where the system does not tell (it tells on Linux).
    """
    return min([*_physical(), *_cgroups(), *_address_space()], default=None)


def device_memory(device: torch.device) -> Memory | None:
    """As `host_memory`, of any device; None where it cannot be asked."""
    if device.type == "cpu":
        return host_memory()
    if device.type == "cuda" and torch.cuda.is_available():
        return Memory(*torch.cuda.mem_get_info(device))
    return None


def normal_device(device: torch.device | str | None) -> torch.device:
    """One name for a device, however it was written: "cuda" is the current CUDA device, None the default."""
    device = check_device(device) or torch.get_default_device()
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


@lru_cache(maxsize=1)
def numa_nodes() -> int:
    """How many NUMA nodes this host has; 1 where the system does not tell."""
    return len(list((SYS / "devices/system/node").glob("node[0-9]*"))) or 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch or Python says that memory could not be had."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = r"DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc"
    return isinstance(error, RuntimeError) and re.search(words, str(error)) is not None


def asked_bytes(error: BaseException) -> int | None:
    """What the failed allocation asked for, where torch's message says it."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)", str(error))
    if found:
        return int(float(found[1]) * 2 ** (10 * ("bytes", "KiB", "MiB", "GiB").index(found[2])))
    return None if error.__cause__ is None else asked_bytes(error.__cause__)


def describe_bytes(nbytes: int | None) -> str:
    return "an unknown amount" if nbytes is None else f"{nbytes / 2**20:.1f} MiB"


def out_of_memory(error: BaseException, device: torch.device, tried: str) -> torch.OutOfMemoryError:
    """The error to raise when nothing helped: what was asked, what there is, what was tried."""
    memory = device_memory(device)
    available = describe_bytes(None if memory is None else memory.available)
    return torch.OutOfMemoryError(
        f"out of memory on {device}: {describe_bytes(asked_bytes(error))} were asked for, {available} "
        f"available, {tried}"
    )


def _physical() -> Iterator[Memory]:
    fields = _fields(PROC / "meminfo")
    if "MemAvailable" in fields and "MemTotal" in fields:
        yield Memory(fields["MemAvailable"] * 1024, fields["MemTotal"] * 1024)


def _cgroups() -> Iterator[Memory]:
    """The limits of this process's memory cgroup and of all above it, version 1 or 2."""
    for line in _lines(PROC / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = SYS / "fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = SYS / "fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's, while its own group is mounted as the root.
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            folder = root / str(group).lstrip("/")
            limit, usage = (next(iter(_lines(folder / name)), "") for name in names[:2])
            if limit.isdigit() and usage.isdigit() and int(limit) < UNLIMITED:
                reclaimable = _fields(folder / "memory.stat").get(names[2], 0)
                yield Memory(max(0, int(limit) - int(usage) + reclaimable), int(limit))


def _address_space() -> Iterator[Memory]:
    try:
        import resource  # not on every platform
    except ImportError:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _fields(PROC / "self/status").get("VmSize")
    if limit != resource.RLIM_INFINITY and used is not None:
        yield Memory(max(0, limit - used * 1024), limit)


def _fields(path: Path) -> dict[str, int]:
    """The lines `name: number ...` or `name number` of a file of the system."""
    pairs = (line.replace(":", " ").split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
