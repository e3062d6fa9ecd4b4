"""Ring attention in models: checkpointing, DDP, FSDP2, compile, autocast, modules, helpers and torchrun."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch import (
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
    RingMultiheadDilatedAttention,
    block_sparse_attention,
    build_block_pattern,
    create_block_sparse_attention,
    create_dilated_attention,
    dilated_attention,
)
from dilated_attention_pytorch.ring import (
    ring_block_sparse_attention,
    ring_dilated_attention,
    shard_bounds,
    shard_positions,
    shard_sequence,
    unshard_sequence,
)
from support.ranks import run_ranks
from support.snippets import SNIPPETS
from support.tolerances import assert_close

N, WIDTH, HEADS = 45, 24, 4
BRANCHES: dict[str, Any] = {"segment_lengths": (8, 24, 45), "dilation_rates": (1, 2, 3)}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Two layers of attention between projections; `attend` is all that knows of ranks."""

    def __init__(self, attend: Attend, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(3)
        self.attend = attend
        self.project = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype) for _ in range(2))
        self.join = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2))
        with torch.no_grad():
            for x in self.parameters():
                x.copy_(torch.randn(x.shape, generator=rng, dtype=torch.float64).to(dtype) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        for project, join in zip(self.project, self.join, strict=True):
            q, k, v = project(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
            x = x + join(self.attend(q, k, v).flatten(2))
        return x


def tokens(b: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    rng = torch.Generator().manual_seed(5)
    return torch.randn(b, N, WIDTH, generator=rng, dtype=torch.float64).to(dtype)


def patterned() -> Any:
    return build_block_pattern({"pattern_type": "random", "block_size": 6, "sparsity_ratio": 0.5}, N, HEADS)


def sharded(kind: str, group: Any = None) -> Attend:
    options = {"group": group, "is_causal": True, "timeout": 30.0}
    if kind == "blocks":
        return partial(ring_block_sparse_attention, pattern=patterned(), **options)
    strategy = "ulysses" if kind == "ulysses" else "ring"
    return partial(ring_dilated_attention, **BRANCHES, **options, strategy=strategy)


def whole_gradients(kind: str = "dilated", b: int = 2) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradients of all parameters, of one process that sees everything."""
    attend = partial(dilated_attention, **BRANCHES, is_causal=True)
    if kind == "blocks":
        attend = partial(block_sparse_attention, pattern=patterned(), is_causal=True)
    model = Model(attend)
    out = model(tokens(b))
    out.square().sum().backward()
    return out.detach(), [x.grad for x in model.parameters()]


def check_gradients(model: nn.Module, expected: list[Tensor], factor: float, what: str) -> None:
    for (name, x), want in zip(model.named_parameters(), expected, strict=True):
        grad = x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
        assert_close(grad * factor, want, torch.float64, f"{what}: gradient of {name}")


def sum_over_ranks(model: nn.Module) -> None:
    for x in model.parameters():
        dist.all_reduce(x.grad)


def train_by_hand(rank: int) -> None:
    """Gradients summed over the ranks are those of the whole sequence, checkpointed in either mode or not.

    Also if a rank has no tokens.
    """
    modes = ("none", "reentrant", "not reentrant")
    plain = list[Tensor]()
    for kind, shard_lengths in product(("dilated", "ulysses", "blocks"), (None, (N, 0))):
        out, expected = whole_gradients(kind)
        shard = partial(shard_sequence, shard_lengths=shard_lengths)
        for mode in modes:
            model = Model(sharded(kind))
            x = shard(tokens()).detach().requires_grad_()  # reentrant checkpoints need an input with one
            got = model(x) if mode == "none" else checkpoint(model, x, use_reentrant=mode == "reentrant")
            assert_close(got, shard(out), torch.float64, f"{kind}, {mode}")
            got.square().sum().backward()
            own = [weight.grad.clone() for weight in model.parameters()]
            plain = own if mode == "none" else plain
            assert all(map(torch.equal, own, plain)), f"checkpointing changes bits: {kind}, {mode}"
            sum_over_ranks(model)
            check_gradients(model, expected, 1.0, f"{kind}, checkpointing {mode}")


def train_in_parallel(rank: int) -> None:
    """DDP and FSDP2 average over ranks that hold parts of one sum: times their number it is the sum."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    for kind in ("dilated", "blocks"):
        out, expected = whole_gradients(kind)
        model = Model(sharded(kind))
        ddp = DistributedDataParallel(copy.deepcopy(model))
        ddp(shard_sequence(tokens())).square().sum().backward()
        check_gradients(ddp.module, expected, 2.0, f"DDP, {kind}")
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        got = model(shard_sequence(tokens()))
        assert_close(got, shard_sequence(out), torch.float64, "FSDP2")
        got.square().sum().backward()
        check_gradients(model, expected, 2.0, f"FSDP2, {kind}")


def train_on_a_grid(rank: int) -> None:
    """Batches over one dimension of a mesh, sequences over the other."""
    from torch.nn.parallel import DistributedDataParallel

    _, expected = whole_gradients(b=4)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    x = shard_sequence(tokens(4), group=grid["ring"]).chunk(2)[grid["data"].get_local_rank()]
    ddp = DistributedDataParallel(Model(sharded("dilated", grid["ring"])))
    ddp(x).square().sum().backward()
    check_gradients(ddp.module, expected, 4.0, "DDP on a grid")


def compile_model(rank: int) -> None:
    import torch._dynamo

    warnings.simplefilter("ignore")  # torch's compiler warns of itself
    out, expected = whole_gradients()
    model = Model(sharded("dilated"))
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        got = compiled(shard_sequence(tokens()))
        assert_close(got, shard_sequence(out), torch.float64, "compiled")
        got.square().sum().backward()
        sum_over_ranks(model)
        check_gradients(model, expected, 1.0, "compiled")


def autocast_attention(rank: int) -> None:
    tensors = [shard_sequence(tokens(dtype=torch.float32)).unflatten(-1, (HEADS, -1)) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    for kind in ("dilated", "ulysses", "blocks"):
        attend = sharded(kind)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attend(leaves[0], leaves[1].bfloat16(), leaves[2])
            kept = attend(*(x.double() for x in leaves))
        assert out.dtype == torch.bfloat16
        assert kept.dtype == torch.float64
        assert torch.equal(out, attend(*(x.bfloat16() for x in leaves)))
        assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.float().sum(), leaves))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model = Model(attend, torch.float32)
            model(shard_sequence(tokens(dtype=torch.float32))).sum().backward()
        assert all(x.grad.isfinite().all() for x in model.parameters())


def inference(rank: int) -> None:
    q, k, v = (shard_sequence(tokens()).unflatten(-1, (HEADS, -1)) for _ in range(3))
    for kind in ("dilated", "ulysses", "blocks"):
        attend = sharded(kind)
        with torch.inference_mode():  # at first: plans that it makes serve training, too
            inferred = attend(q, k, v)
        assert torch.equal(attend(q, k, v), inferred)
        # Gradients of some tensors only; the ranks agree on which.
        leaf = k.clone().requires_grad_()
        (grad,) = torch.autograd.grad(attend(q, leaf, v).square().sum(), leaf)
        all_leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        want = torch.autograd.grad(attend(*all_leaves).square().sum(), all_leaves)[1]
        assert_close(grad, want, torch.float64, f"{kind}: dk alone")
        first = torch.autograd.grad(attend(*all_leaves).square().sum(), all_leaves[0], create_graph=True)
        with pytest.raises(RuntimeError):
            first[0].sum().backward()


def shard_and_join(rank: int) -> None:
    for lengths in (None, (5, 0, 40), (45, 0, 0)):
        x = tokens().requires_grad_()
        part = shard_sequence(x, shard_lengths=lengths)
        low, high = shard_bounds(N, shard_lengths=lengths)
        assert torch.equal(part, x[:, low:high])
        assert torch.equal(shard_positions(high - low), torch.arange(low, high))
        joined = unshard_sequence(part * 2)
        assert torch.equal(joined, x * 2)
        weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=x.dtype)
        (joined * weight).sum().backward()
        want = torch.zeros_like(x)
        want[:, low:high] = 2 * weight[:, low:high]
        assert torch.equal(x.grad, want)
        for dim in (0, 2, -1):
            y = x.detach().movedim(1, dim).contiguous()
            part = shard_sequence(y, dim, shard_lengths=lengths)
            assert torch.equal(unshard_sequence(part, dim), y)
    mask = torch.rand(2, N, generator=torch.Generator().manual_seed(1)) > 0.5
    assert torch.equal(unshard_sequence(shard_sequence(mask)), mask)
    assert shard_bounds(N) == (15 * rank, 15 * rank + 15)
    with pytest.raises(ValueError, match="shard_lengths"):
        shard_sequence(tokens(), shard_lengths=(5, 5, 5))
    with pytest.raises(ValueError, match="shard_lengths"):
        shard_bounds(N, shard_lengths=(N,))


WORLDS = {train_on_a_grid: 4, shard_and_join: 3}
TASKS = (train_by_hand, train_in_parallel, compile_model, autocast_attention, inference, *WORLDS)


@pytest.mark.parametrize("task", TASKS)
def test_ranks(task: Callable[[int], None]) -> None:
    run_ranks(WORLDS.get(task, 2), task)


BLOCK = {"sparse_config": {"pattern_type": "global_local", "block_size": 4, "sparsity_ratio": 0.5}}
MULTIHEAD: dict[str, Any] = {"embed_dim": WIDTH, "num_heads": HEADS, **BRANCHES, "dtype": torch.float64}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "v2": lambda: RingDilatedAttentionV2(**BRANCHES),
    "v2 in steps": lambda: RingDilatedAttentionV2(**BRANCHES, ring_size=6, strategy="ring"),
    "v2 ulysses": lambda: RingDilatedAttentionV2(**BRANCHES, strategy="ulysses", timeout=30.0),
    "v2 options": lambda: RingDilatedAttentionV2(**BRANCHES, softmax_scale=0.2, head_mixing="grouped"),
    "v3": lambda: RingDilatedAttentionV3(**BRANCHES, cache_on_gpu=True),
    "production": lambda: RingDilatedAttentionProduction(**BRANCHES),
    "checkpointed": lambda: RingDilatedAttentionProduction(**BRANCHES, use_gradient_checkpointing=True),
    "factory ring": lambda: create_dilated_attention("ring", **BRANCHES, ring_size=2),
    "factory distributed": lambda: create_dilated_attention("distributed", **BRANCHES),
    "blocks": lambda: BlockSparseRingDilatedAttention(**BRANCHES, **BLOCK),
    "factory blocks": lambda: create_block_sparse_attention("ring", **BRANCHES, **BLOCK),
    "multihead": lambda: RingMultiheadDilatedAttention(**MULTIHEAD),
    "multihead blocks": lambda: BlockSparseRingMultiheadDilatedAttention(**MULTIHEAD, **BLOCK),
}  # fmt: skip


def module_results(name: str, shard: Callable[..., Tensor]) -> list[Tensor]:
    """Outputs, and gradients of inputs, of the causal and the masked call."""
    results = []
    torch.manual_seed(11)
    module = MODULES[name]()
    mask = torch.rand(2, N, generator=torch.Generator().manual_seed(4)) > 0.3
    for causal, masked in ((False, False), (True, False), (False, True)):
        x = shard(tokens()).clone().requires_grad_()
        part = shard(mask) if masked else None
        if name.startswith("multihead"):
            out, _ = module(x, x, x, is_causal=causal, key_padding_mask=None if part is None else ~part)
        else:
            heads = x.unflatten(-1, (HEADS, WIDTH // HEADS))
            out = module(heads, heads, heads, is_causal=causal, attention_mask=part)
        out.square().sum().backward()
        results += [out.detach(), x.grad]
    return results


def run_modules(rank: int, expected: dict[str, list[Tensor]]) -> list[str]:
    wrong = []
    for name in MODULES:
        actual = module_results(name, shard_sequence)
        for i, (got, want) in enumerate(zip(actual, expected[name], strict=True)):
            try:
                assert_close(got, shard_sequence(want), torch.float64)
            except AssertionError as error:
                wrong.append(f"{name}, result {i}, rank {rank}: {error}")
    with pytest.raises(ValueError, match="ring_size"):
        RingDilatedAttentionV2(**BRANCHES, ring_size=3)
    return wrong


def test_modules_on_two_ranks_are_those_of_one_process() -> None:
    """Without ranks the modules compute the whole sequence: here, in this process."""
    expected = {name: module_results(name, lambda x: x) for name in MODULES}
    wrong = [line for part in run_ranks(2, run_modules, expected) for line in part]
    assert not wrong, "\n" + "\n".join(wrong)


# Each process attends its half of a sequence and compares with a process that has it all.
RING_SNIPPETS = {name: text for name, text in SNIPPETS.items() if "RingDilated" in text or '"ring"' in text}
PROGRAM = """
import torch
import torch.distributed as dist
from dilated_attention_pytorch import create_dilated_attention, dilated_attention
from dilated_attention_pytorch.ring import shard_sequence

dist.init_process_group("gloo")
torch.set_num_threads(1)
models = []
{snippets}
torch.manual_seed(0)
n, options = 5000, {{"is_causal": True}}
for model in models:
    tensors = [torch.randn(1, n, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    whole = dilated_attention(*tensors, model.spec.segment_lengths, model.spec.dilation_rates, **options)
    part = model(*(shard_sequence(x) for x in tensors), **options)
    assert part.shape[1] == n // dist.get_world_size()
    torch.testing.assert_close(part, shard_sequence(whole), rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(whole)
    expected = torch.autograd.grad((whole * weight).sum(), tensors)
    actual = torch.autograd.grad((part * shard_sequence(weight)).sum(), tensors)
    for got, want in zip(actual, expected):
        torch.testing.assert_close(shard_sequence(got), shard_sequence(want), rtol=1e-10, atol=1e-10)
# In one write, or the lines of two ranks may mix.
print("rank %d of %d checked %d models\\n" % (dist.get_rank(), dist.get_world_size(), len(models)), end="")
dist.destroy_process_group()
"""


def test_the_snippets_run_under_torchrun(tmp_path: Path) -> None:
    lines = []
    for name, snippet in RING_SNIPPETS.items():
        # The documents go on with figures of earlier passes: they belong to one process.
        lines.append(snippet.partition("# After running some forward passes")[0])
        lines.append("models.append(attention)" if name.startswith("003") else "models.append(model)")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(snippets="\n".join(lines)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(p for p in sys.path if p)
    how: dict[str, Any] = {"env": {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}}
    done = subprocess.run(
        [*command, program], capture_output=True, text=True, timeout=120, check=False, **how
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(rf"of 2 checked {len(RING_SNIPPETS)} models", done.stdout)) == 2
