"""Trains a tiny model whose sequences are shared by rings of ranks, with several rings side by side.

    torchrun --nproc-per-node 4 examples/train_ring_ddp.py
    torchrun --nproc-per-node 4 examples/train_ring_ddp.py --fsdp

The ranks form a mesh of two dimensions, "data" x "ring". Ranks of one ring hold parts of the same sequences;
rings get different ones. The task is retrieval: the second half of a sequence repeats its first half, so the
answer lies half a sequence back, in another rank's part.

The loss is the mean over all answers. Each rank scales its own part of it so that the mean over ranks is the
loss; then averaging gradients over ALL ranks, data and ring alike, gives its gradient. This is what
DistributedDataParallel, and with --fsdp fully_shard, do here.
"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dilated_attention_pytorch import RingMultiheadDilatedAttention
from dilated_attention_pytorch.ring import shard_positions, shard_sequence

VOCABULARY, WIDTH, HEADS = 16, 64, 4


class Block(nn.Module):
    def __init__(self, length: int, ring: DeviceMesh) -> None:
        super().__init__()
        # The long branch spans the sequence: it is what crosses ranks.
        branches = {"segment_lengths": (length // 4, length), "dilation_rates": (1, 1)}
        self.attention = RingMultiheadDilatedAttention(
            WIDTH, HEADS, **branches, layer_norm=False, group=ring.get_group()
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), is_causal=True)[0]
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Model(nn.Module):
    """Predicts the next token of this rank's part of a sequence."""

    def __init__(self, length: int, ring: DeviceMesh) -> None:
        super().__init__()
        self.ring = ring
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(Block(length, ring) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        # Where this rank's tokens stand in the whole sequence.
        positions = shard_positions(tokens.shape[1], self.ring, tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.flatten(0, 1))  # a view of a result is what FSDP2 warns of
        return logits


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--ring", type=int, default=2, metavar="R", help="ranks that share a sequence (default: 2)"
    )
    parser.add_argument("--fsdp", action="store_true", help="shard parameters (FSDP2) instead of DDP")
    parser.add_argument("--steps", type=int, default=60, help="(default: %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a ring (default: %(default)s)")
    return parser.parse_args()


def make_batch(options: argparse.Namespace, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (batch, length) and the tokens that follow them; -100 where nothing can be known."""
    half = torch.randint(VOCABULARY, (options.batch, options.length // 2 + 1), generator=generator)
    sequence = torch.cat([half[:, :-1], half], dim=1)
    targets = sequence[:, 1:].clone()
    targets[:, : options.length // 2 - 1] = -100
    return sequence[:, :-1], targets


def train(options: argparse.Namespace, device_type: str) -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh(
        device_type, (size // options.ring, options.ring), mesh_dim_names=("data", "ring")
    )
    torch.manual_seed(0)  # the same parameters on every rank
    model: nn.Module = Model(options.length, mesh["ring"]).to(device_type)
    if options.fsdp:
        everyone = init_device_mesh(device_type, (size,))
        for block in model.blocks:
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)
    else:
        model = DistributedDataParallel(model)  # averages over the default group: all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Ranks of a ring draw the same sequences, rings draw different ones.
    generator = torch.Generator().manual_seed(1 + mesh.get_local_rank("data"))

    for step in range(options.steps):
        tokens, targets = (
            shard_sequence(x, group=mesh["ring"]).to(device_type) for x in make_batch(options, generator)
        )
        logits = model(tokens)
        # The parts hold different numbers of answers: each rank divides its sum by the mean number.
        answers = options.batch * (options.length // 2 + 1) / options.ring
        loss = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / answers
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == options.steps - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step:>3}  loss {mean.item() / size:.3f}", flush=True)


def main() -> None:
    options = parse()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    size = dist.get_world_size()
    if size % options.ring or options.length % (2 * options.ring):
        raise SystemExit(
            "--ring must divide the number of ranks, and twice --ring the length, got "
            f"{options.ring}, {size} and {options.length}"
        )
    # The model is gone before its groups: a DDP model that outlives them may wait for ever (seen with gloo).
    train(options, device_type)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
