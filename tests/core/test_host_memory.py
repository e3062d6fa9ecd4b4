"""What the machine can give, read from made-up /proc and /sys trees, and the errors that mean "no more"."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.core import host_memory as module
from dilated_attention_pytorch.core.host_memory import (
    Memory,
    asked_bytes,
    describe_bytes,
    device_memory,
    host_memory,
    is_out_of_memory,
    numa_nodes,
)

KIB = 2**10
MEMINFO = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    600 kB\nHugePages_Total:    0\n"
NO_LIMIT_V1 = str(2**63 - 4096)


class Machine:
    """Files under `proc` and `sys` of a machine that does not exist."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def cgroup(self, version: int, group: str, limit: str, usage: int, inactive: int = 0) -> None:
        folder = self.sys / ("fs/cgroup/memory" if version == 1 else "fs/cgroup") / group
        v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        names = v1 if version == 1 else ("memory.max", "memory.current", "inactive_file")
        self.write(folder / names[0], f"{limit}\n")
        self.write(folder / names[1], f"{usage}\n")
        self.write(folder / "memory.stat", f"anon 1\nx_inactive_file 7\n{names[2]} {inactive}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    monkeypatch.setattr(module, "PROC", machine.proc)
    monkeypatch.setattr(module, "SYS", machine.sys)
    numa_nodes.cache_clear()
    yield machine
    numa_nodes.cache_clear()


def test_meminfo_alone(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/a\n")
    machine.write(machine.sys / "fs/cgroup/a/memory.max", "1000\n")  # half a group is no limit
    assert host_memory() is device_memory(torch.device("cpu")) is None
    for text in ("", "MemTotal: 1000 kB\n", "MemAvailable: 5 kB\n", "MemAvailable\nMemTotal: x kB\n"):
        machine.write(machine.proc / "meminfo", text)
        assert host_memory() is None
    machine.write(machine.proc / "meminfo", MEMINFO)
    assert host_memory() == device_memory(torch.device("cpu")) == Memory(600 * KIB, 1000 * KIB)


V1, V2 = "12:cpu,cpuacct:/box\n5:memory,hugetlb:/box\n1:name=systemd:/\n", "0::/a/b:c\n"
LIMIT, SMALL = str(900 * KIB), str(400 * KIB)


@pytest.mark.parametrize(
    ("own", "groups", "expected"),
    [
        (V1, [(1, "", NO_LIMIT_V1, 1), (1, "box", SMALL, 100 * KIB, 20 * KIB)], (320, 400)),
        (V1, [(1, "box", NO_LIMIT_V1, 100 * KIB)], (600, 1000)),
        (V2, [(2, "a/b:c", SMALL, 100 * KIB, 20 * KIB)], (320, 400)),
        (V2, [(2, "a/b:c", "max", 100 * KIB)], (600, 1000)),
        # At every level, of which a container may see its own as the root.
        (V2, [(2, "a/b:c", LIMIT, 100 * KIB), (2, "a", SMALL, 100 * KIB)], (300, 400)),
        (V2, [(2, "", SMALL, 100 * KIB)], (300, 400)),
        (V2 + V1, [(1, "box", SMALL, 100 * KIB), (2, "a", str(500 * KIB), 300 * KIB)], (200, 500)),
        (V2, [(2, "", SMALL, 430 * KIB)], (0, 400)),  # more than the limit leaves nothing
    ],
)
def test_limits_of_cgroups(
    machine: Machine, own: str, groups: list[tuple[Any, ...]], expected: tuple[int, int]
) -> None:
    machine.write(machine.proc / "meminfo", MEMINFO)
    machine.write(machine.proc / "self/cgroup", own)
    for group in groups:
        machine.cgroup(*group)
    assert host_memory() == Memory(expected[0] * KIB, expected[1] * KIB)


def test_address_space_of_a_made_up_process(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    machine.write(machine.proc / "meminfo", MEMINFO)
    machine.write(machine.proc / "self/status", "Name:\tx\nVmPeak:\t 900 kB\nVmSize:\t 300 kB\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (500 * KIB, resource.RLIM_INFINITY))
    assert host_memory() == Memory(200 * KIB, 500 * KIB)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert host_memory() == Memory(600 * KIB, 1000 * KIB)
    monkeypatch.setitem(sys.modules, "resource", None)  # other platforms
    assert host_memory() == Memory(600 * KIB, 1000 * KIB)


LIMITED = """
import resource
from dilated_attention_pytorch.core.host_memory import _fields, host_memory, PROC
free = 50 * 2**20
limit = _fields(PROC / "self/status")["VmSize"] * 1024 + free
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
memory = host_memory()
assert memory.total == limit, memory
assert 0.8 * free < memory.available <= free, memory
assert memory.is_scarce
block = bytearray(20 * 2**20)
assert memory.available - host_memory().available >= len(block)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_address_space_limit_of_this_system() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", LIMITED], check=True, timeout=120)


def test_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_memory(torch.device("meta")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_memory(torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device.index, 9))
    assert device_memory(torch.device("cuda:3")) == Memory(3, 9)
    assert [Memory(available, 1000).is_scarce for available in (0, 99, 100, 1000)] == [
        True,
        True,
        False,
        False,
    ]
    assert [describe_bytes(x) for x in (None, 3 * 2**19, 0)] == ["an unknown amount", "1.5 MiB", "0.0 MiB"]


def test_numa_nodes_are_counted_once(machine: Machine) -> None:
    assert numa_nodes() == 1
    numa_nodes.cache_clear()
    for name in ("node0", "node1", "node12", "possible", "nodes"):
        (machine.sys / "devices/system/node" / name).mkdir(parents=True)
    assert numa_nodes() == 3
    (machine.sys / "devices/system/node/node2").mkdir()
    assert numa_nodes() == 3


def torch_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    return caught.value


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch_error(), 4 << 50),
        (MemoryError("Unable to allocate 3 GiB"), None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), 5 << 29),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), 20 << 20),
        (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 512.00 KiB."), 512 << 10),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 7 bytes."), 7),
        (RuntimeError("std::bad_alloc"), None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_that_mean_no_memory(error: BaseException, asked: int | None) -> None:
    assert is_out_of_memory(error)
    assert asked_bytes(error) == asked
    outer = torch.OutOfMemoryError("out of memory on cpu")
    assert asked_bytes(outer) is None
    outer.__cause__ = torch.OutOfMemoryError("again")
    outer.__cause__.__cause__ = error
    assert asked_bytes(outer) == asked


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape '[3]' is invalid for input of size 4"),
        ValueError("DefaultCPUAllocator: can't allocate memory"),
        KeyError("std::bad_alloc"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_errors_that_mean_something_else(error: BaseException) -> None:
    assert is_out_of_memory(error) is False
