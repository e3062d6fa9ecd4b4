"""One rank of a measurement: a process of its own that does what its parent says.

The first line on stdin says which rank of how many it is; each further line is a request, and its answer is
a line on stdout. Between requests the process sleeps, so that others can be measured meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..functional import dilated_attention
from ..ring import plan_ring, ring_dilated_attention, ring_traffic, shard_bounds
from .cases import case_from_dict
from .gate import largest_error
from .measure import NotMeasurableError, read_status, reset_peak_memory
from .ring_cases import RingConfig, RingMemoryCase, RingTimeCase

TIMEOUT = timedelta(minutes=30)


class Rank:
    """This process, its shard of the sequence and what it measures there. Alone, it holds all of it."""

    def __init__(self, case: RingTimeCase | RingMemoryCase, rank: int, size: int) -> None:
        self.case, self.rank, self.size = case, rank, size
        self.tensors: list[Tensor] = []

    def check(self, config: RingConfig, n: int, strategy: str) -> dict[str, Any]:
        """The error of this shard, out and gradients, against one process that has all tokens."""
        whole = make_tensors(config, n)
        own = slice(*shard_bounds(n))
        parts = [x[:, own].clone() for x in whole]
        ring_traffic().reset()
        results = attend(config, parts, self.case.backward, strategy)
        self._check_traffic(config, n, strategy)
        expected = attend(config, whole, self.case.backward)
        pairs = zip(results, expected, strict=True)
        return {"error": max(largest_error(x, y[:, own]) for x, y in pairs)}

    def _check_traffic(self, config: RingConfig, n: int, strategy: str) -> None:
        schedule = plan_ring(
            *(config.segment_lengths, config.dilation_rates, n),
            num_ranks=self.size,
            num_heads=config.h,
            head_dim=config.d,
            dtype=getattr(torch, config.dtype),
            is_causal=config.is_causal,
            strategy="ulysses" if strategy == "ulysses" else "ring",
        )
        planned = schedule.received_bytes(self.rank)
        if self.case.backward:
            planned += schedule.received_bytes(self.rank, "backward")
        received = ring_traffic().received_bytes
        if self.size > 1 and received != planned:
            raise RuntimeError(f"rank {self.rank} received {received} bytes where {planned} were planned")

    def prepare(self) -> dict[str, Any]:
        """Makes the tensors that are timed."""
        own = slice(*shard_bounds(self.case.n))
        self.tensors = [x[:, own].clone() for x in make_tensors(self.case.config, self.case.n)]
        return {}

    def run(self, strategy: str) -> dict[str, Any]:
        ring_traffic().reset()
        attend(self.case.config, self.tensors, self.case.backward, strategy if self.size > 1 else None)
        return {"received": ring_traffic().received_bytes}

    def measure_memory(self, strategy: str) -> dict[str, Any]:
        """Peak memory of tensors, results and scratch. What libraries set up once is in place already."""
        start, stop = shard_bounds(self.case.n)
        try:
            before = reset_peak_memory()
            count = 4 if self.case.backward else 3
            tensors = make_tensors(self.case.config, stop - start, count, seed=self.rank)
            results = attend(self.case.config, tensors, self.case.backward, strategy)
            peak = read_status("VmHWM")
        except NotMeasurableError as error:
            return {"why_not": str(error)}
        held = sum(x.nbytes for x in (*tensors, *results))
        return {"peak": peak - before, "tensors": held, "received": ring_traffic().received_bytes}


def make_tensors(config: RingConfig, n: int, count: int = 4, seed: int = 0) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    generator = torch.Generator().manual_seed(seed)
    shape, dtype = (1, n, config.h, config.d), getattr(torch, config.dtype)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(count)]


def attend(
    config: RingConfig, tensors: list[Tensor], backward: bool, strategy: str | None = None
) -> list[Tensor]:
    """out, and with `backward` the gradients of q, k and v; with a strategy, of this rank's shard."""
    q, k, v = leaves = [x.detach().requires_grad_(backward) for x in tensors[:3]]
    branches = (config.segment_lengths, config.dilation_rates)
    if strategy is None:
        out = dilated_attention(q, k, v, *branches, is_causal=config.is_causal)
    else:
        out = ring_dilated_attention(q, k, v, *branches, is_causal=config.is_causal, strategy=strategy)
    return [out.detach(), *(torch.autograd.grad(out, leaves, tensors[3]) if backward else ())]


def _answer(rank: Rank, request: dict[str, Any]) -> dict[str, Any]:
    match request:
        case {"do": "check", "config": config, "n": n, "strategy": strategy}:
            return rank.check(RingConfig(**config), n, strategy)
        case {"do": "prepare"}:
            return rank.prepare()
        case {"do": "run", "strategy": strategy}:
            return rank.run(strategy)
        case {"do": "measure_memory", "strategy": strategy}:
            return rank.measure_memory(strategy)
    raise ValueError(f"no request {request!r}")


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    case = case_from_dict(settings["case"])
    assert isinstance(case, (RingTimeCase, RingMemoryCase))
    rank, size = settings["rank"], settings["size"]
    torch.set_num_threads(settings["threads"])
    if size > 1:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        where = f"file://{settings['store']}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=TIMEOUT)
    this = Rank(case, rank, size)
    for line in sys.stdin:
        print(json.dumps(_answer(this, json.loads(line))), flush=True)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
