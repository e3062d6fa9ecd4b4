"""The processes of a run: alone, or those that torchrun started, as rings of ranks side by side."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous

from ...modules import LongNetLM
from ...modules.ring import RingModule, RingOptions
from ...ring import shard_bounds
from . import RING_KINDS, ConfigError, TrainConfig

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """Where this process stands. A ring's ranks hold shards of the same sequences."""

    device: torch.device
    rank: int = 0
    size: int = 1
    ring_size: int = 1
    mesh: DeviceMesh | None = None  # "data" x "ring"; None alone

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def num_rings(self) -> int:
        return self.size // self.ring_size

    def own_rows(self, rows: Tensor) -> Tensor:
        """The rows of this rank's ring, of those of all rings."""
        return rows.chunk(self.num_rings)[self.rank // self.ring_size]

    def shard(self, rows: Tensor) -> Tensor:
        """This rank's shard of sequences (b, n) that its ring shares, on its device."""
        start, stop = self.bounds(rows.shape[1])
        return rows[:, start:stop].to(self.device)

    def bounds(self, n: int) -> tuple[int, int]:
        """Where this rank's shard of n tokens begins and ends."""
        return (0, n) if self.mesh is None else shard_bounds(n, self.mesh["ring"])

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def any(self, fact: bool) -> bool:
        """Whether it is so on any rank; all ranks hear the same."""
        return bool(self.sum(torch.tensor(int(fact), device=self.device)).item())

    def told(self, value: _T) -> _T:
        """The first rank's value, which must be plain data."""
        held = [value]
        if self.size > 1:
            dist.broadcast_object_list(held, src=0, device=self.device)
        return held[0]


@contextmanager
def join_ranks(config: TrainConfig) -> Iterator[Ranks]:
    """The ranks of this run: those of the default group if there is one, else those that torchrun started.

    Without either this process alone. A group that is made here ends with the run.
    """
    is_joined, device = dist.is_initialized(), choose_device(config.device)
    size = dist.get_world_size() if is_joined else int(os.environ.get("WORLD_SIZE", "1"))
    ring = (config.ring or size) if config.kind in RING_KINDS else 1
    check_ranks(config, size, ring)
    if size == 1:
        yield Ranks(device)
        return
    if not is_joined:
        _meet("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (size // ring, ring), mesh_dim_names=("data", "ring"))
    yield Ranks(device, dist.get_rank(), size, ring, mesh)
    # Not after an error: a peer may be gone, and the group would wait for it.
    gc.collect()
    if not is_joined:
        dist.destroy_process_group()


def _meet(backend: str) -> None:
    """Makes the default group of the processes that torchrun started."""
    environment = os.environ
    if environment.get("LOCAL_WORLD_SIZE") != environment["WORLD_SIZE"]:
        dist.init_process_group(backend)
        return
    # Where torchrun's own store serves the workers, it still has the addresses of those before a restart, and
    # the group would wait for them (pytorch issue 135712). On one host the count of restarts parts them.
    store, rank, size = next(rendezvous("env://"))
    store = PrefixStore(f"restart-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def check_ranks(config: TrainConfig, size: int, ring: int) -> None:
    if size % ring:
        raise ConfigError(f"ring must divide the number of ranks, got {ring} and {size}")
    if config.batch_size % (config.accumulation * (size // ring)):
        rule = "accumulation times the number of rings must divide batch_size"
        raise ConfigError(f"{rule}, got {config.accumulation}, {size // ring} and {config.batch_size}")
    if config.context_length < ring:
        raise ConfigError(
            f"a rank must have a byte of each sequence, got {ring} ranks and {config.context_length}"
        )


def choose_device(name: str) -> torch.device:
    """The device of this process; ranks on CUDA take the one of their number."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
            torch.cuda.set_device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # an assertion where torch is built without CUDA
        why = str(error).partition("\n")[0]
        rule = "device must be one that torch knows and finds here, such as cpu or cuda"
        raise ConfigError(f"{rule}, got {name!r}: {why}") from None
    return device


def place_model(model: LongNetLM, ranks: Ranks, shard_parameters: bool) -> None:
    """Gives the attention its ring, and with `shard_parameters` each rank a shard of the parameters."""
    model.to(ranks.device)
    if ranks.mesh is None:
        return
    ring = RingOptions(None, ranks.mesh["ring"].get_group(), None)
    for module in model.modules():
        if isinstance(module, RingModule):
            module.ring = ring
    if shard_parameters:
        everyone = init_device_mesh(ranks.device.type, (ranks.size,))
        for part in (*model.decoder.layers, model):
            fully_shard(part, mesh=everyone)
