"""What the machine can give, read from made-up /proc and /sys trees, and the errors that mean "no more"."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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

KIB, MIB = 2**10, 2**20
MEMINFO = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    600 kB\nHugePages_Total:    0\n"
NO_LIMIT_V1 = str(2**63 - 4096)


class Machine:
    """Files under `proc` and `sys` of a machine that does not exist."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def cgroup_v1(self, group: str, limit: str, usage: int, inactive: int = 0) -> None:
        folder = self.sys / "fs/cgroup/memory" / group
        self.write(folder / "memory.limit_in_bytes", f"{limit}\n")
        self.write(folder / "memory.usage_in_bytes", f"{usage}\n")
        self.write(folder / "memory.stat", f"cache 1\ninactive_file 7\ntotal_inactive_file {inactive}\n")

    def cgroup_v2(self, group: str, limit: str, usage: int, inactive: int = 0) -> None:
        folder = self.sys / "fs/cgroup" / group
        self.write(folder / "memory.max", f"{limit}\n")
        self.write(folder / "memory.current", f"{usage}\n")
        self.write(folder / "memory.stat", f"anon 1\ninactive_file {inactive}\nactive_file 5\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    monkeypatch.setattr(module, "PROC", machine.proc)
    monkeypatch.setattr(module, "SYS", machine.sys)
    numa_nodes.cache_clear()
    yield machine
    numa_nodes.cache_clear()


def test_absent_files(machine: Machine) -> None:
    assert host_memory() is None
    assert device_memory(torch.device("cpu")) is None
    assert numa_nodes() == 1


def test_meminfo_alone(machine: Machine) -> None:
    machine.write(machine.proc / "meminfo", MEMINFO)
    assert host_memory() == device_memory(torch.device("cpu")) == Memory(600 * KIB, 1000 * KIB)


@pytest.mark.parametrize(
    "text", ["", "MemTotal: 1000 kB\n", "MemAvailable: 5 kB\n", "MemAvailable\nMemTotal: x kB\n"]
)
def test_meminfo_without_the_fields(machine: Machine, text: str) -> None:
    machine.write(machine.proc / "meminfo", text)
    assert host_memory() is None


def test_cgroup_v1(machine: Machine) -> None:
    machine.write(machine.proc / "meminfo", MEMINFO)
    machine.write(
        machine.proc / "self/cgroup", "12:cpu,cpuacct:/box\n5:memory,hugetlb:/box\n1:name=systemd:/\n"
    )
    machine.cgroup_v1("", NO_LIMIT_V1, 1)
    machine.cgroup_v1("box", str(500 * KIB), 300 * KIB, inactive=50 * KIB)
    assert host_memory() == Memory(250 * KIB, 500 * KIB)
    machine.cgroup_v1("box", NO_LIMIT_V1, 300 * KIB)
    assert host_memory() == Memory(600 * KIB, 1000 * KIB)


def test_cgroup_v2(machine: Machine) -> None:
    machine.write(machine.proc / "meminfo", MEMINFO)
    machine.write(machine.proc / "self/cgroup", "0::/user.slice/job\n")
    machine.cgroup_v2("user.slice/job", str(400 * KIB), 100 * KIB, inactive=20 * KIB)
    assert host_memory() == Memory(320 * KIB, 400 * KIB)
    machine.cgroup_v2("user.slice/job", "max", 100 * KIB)
    assert host_memory() == Memory(600 * KIB, 1000 * KIB)


@pytest.mark.parametrize("binding", ["", "a", "a/b", "a/b/c"])
def test_nested_limits_bind_at_every_level(machine: Machine, binding: str) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/a/b/c\n")
    for group in ("", "a", "a/b", "a/b/c"):
        machine.cgroup_v2(group, str(400 * KIB) if group == binding else str(900 * KIB), 100 * KIB)
    assert host_memory() == Memory(300 * KIB, 400 * KIB)


def test_container_sees_its_group_as_the_root(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/docker/0123/not/mounted/here\n")
    machine.cgroup_v2("", str(400 * KIB), 100 * KIB)
    assert host_memory() == Memory(300 * KIB, 400 * KIB)


def test_both_versions_at_once(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "5:memory:/old\n0::/new\n")
    machine.cgroup_v1("old", str(400 * KIB), 100 * KIB)
    machine.cgroup_v2("new", str(500 * KIB), 300 * KIB)
    assert host_memory() == Memory(200 * KIB, 500 * KIB)


def test_cgroup_path_with_a_colon(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/a:b\n")
    machine.cgroup_v2("a:b", str(400 * KIB), 100 * KIB)
    assert host_memory() == Memory(300 * KIB, 400 * KIB)


def test_usage_above_the_limit_leaves_nothing(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/\n")
    machine.cgroup_v2("", str(100 * KIB), 130 * KIB)
    memory = host_memory()
    assert memory == Memory(0, 100 * KIB)
    assert memory.is_scarce


def test_half_a_group_is_no_limit(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/a\n")
    machine.write(machine.sys / "fs/cgroup/a/memory.max", "1000\n")
    assert host_memory() is None


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_tells() -> None:
    memory = host_memory()
    assert memory is not None
    assert 0 < memory.available <= memory.total


@pytest.mark.parametrize(("available", "scarce"), [(99, True), (100, False), (0, True), (1000, False)])
def test_scarce_is_below_a_tenth(available: int, scarce: bool) -> None:
    assert Memory(available, 1000).is_scarce is scarce


def test_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_memory(torch.device("meta")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_memory(torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device.index, 9))
    assert device_memory(torch.device("cuda:3")) == Memory(3, 9)


def test_numa_nodes_are_counted_once(machine: Machine) -> None:
    for name in ("node0", "node1", "node12", "possible", "nodes"):
        (machine.sys / "devices/system/node" / name).mkdir(parents=True)
    assert numa_nodes() == 3
    (machine.sys / "devices/system/node/node2").mkdir()
    assert numa_nodes() == 3


def torch_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    return caught.value


def test_torch_says_how_much_it_wanted() -> None:
    error = torch_error()
    assert is_out_of_memory(error)
    assert asked_bytes(error) == 4 << 50


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MemoryError(), None),
        (MemoryError("Unable to allocate 3 GiB"), None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), 5 << 29),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), 20 << 20),
        (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 512.00 KiB."), 512 << 10),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 7 bytes."
            ),
            7,
        ),
        (RuntimeError("std::bad_alloc"), None),
    ],
    ids=str,
)
def test_errors_that_mean_no_memory(error: BaseException, asked: int | None) -> None:
    assert is_out_of_memory(error)
    assert asked_bytes(error) == asked


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
    assert not is_out_of_memory(error)
    assert is_out_of_memory(RuntimeError("")) is False


def test_asked_bytes_come_from_the_first_cause() -> None:
    outer = torch.OutOfMemoryError("out of memory on cpu")
    assert asked_bytes(outer) is None
    outer.__cause__ = torch.OutOfMemoryError("again")
    outer.__cause__.__cause__ = torch_error()
    assert asked_bytes(outer) == 4 << 50


def test_describe_bytes() -> None:
    assert describe_bytes(None) == "an unknown amount"
    assert describe_bytes(3 * MIB // 2) == "1.5 MiB"
    assert describe_bytes(0) == "0.0 MiB"
