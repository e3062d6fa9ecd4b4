"""Attention over a sequence that two ranks share, held against one process that has all of it.

    torchrun --nproc-per-node 2 examples/ring_two_ranks.py

Each rank makes the same random sequence, keeps its own part, and attends. Then it does the same alone, with
all tokens, and prints how far the two are apart and how many bytes arrived, next to how many were planned.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from dilated_attention_pytorch import dilated_attention
from dilated_attention_pytorch.ring import (
    plan_ring,
    ring_dilated_attention,
    ring_traffic,
    shard_sequence,
    unshard_sequence,
)

SEGMENTS, RATES = (256, 1024, 4096), (1, 4, 16)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--length", type=int, default=4001, help="tokens in all (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--causal", action="store_true", help="no query sees the future")
    parser.add_argument(
        "--strategy",
        choices=("ring", "ulysses"),
        default="ring",
        help="move the keys that are needed, or exchange tokens for heads (default: %(default)s)",
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    shape = (1, options.length, options.heads, options.head_dim)
    generator = torch.Generator().manual_seed(0)  # the same sequence on every rank
    whole = [torch.randn(shape, generator=generator).to(device) for _ in range(4)]  # q, k, v, gradient of out
    q, k, v, grad_out = (shard_sequence(x) for x in whole)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    traffic = ring_traffic()
    traffic.reset()
    how = {"is_causal": options.causal}
    out = ring_dilated_attention(*leaves, SEGMENTS, RATES, strategy=options.strategy, **how)
    received = traffic.received_bytes
    gradients = torch.autograd.grad(out, leaves, grad_out)

    exact = [x.clone().requires_grad_() for x in whole[:3]]
    expected = dilated_attention(*exact, SEGMENTS, RATES, **how)
    expected_gradients = torch.autograd.grad(expected, exact, whole[3])
    error = (unshard_sequence(out.detach()) - expected.detach()).abs().max().item()
    pairs = zip(gradients, expected_gradients, strict=True)
    gradient_error = max((unshard_sequence(x) - y).abs().max().item() for x, y in pairs)

    plan = plan_ring(
        SEGMENTS,
        RATES,
        options.length,
        num_ranks=size,
        num_heads=options.heads,
        head_dim=options.head_dim,
        strategy=options.strategy,
        **how,
    )
    if rank == 0:
        print(plan)
        print(f"largest difference from one process: out {error:.1e}, gradients {gradient_error:.1e}")
    dist.barrier()
    line = f"rank {rank}: {q.shape[1]} tokens, received {received} bytes, planned {plan.received_bytes(rank)}"
    print(f"{line}\n", end="")  # in one piece: torchrun's ranks write unbuffered, and at the same time
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
