"""The layout and the tensor parallelism of torchtitan: over ranks, the result is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dilated_attention_pytorch import dilated_attention
from dilated_attention_pytorch.integrations.torchtitan import TorchtitanAttention
from dilated_attention_pytorch.reference import dilated_attention_reference
from integrations.spread_heads import BRANCHES, inputs, one_process
from support.ranks import run_ranks
from support.tolerances import assert_close, assert_same_gradients


@pytest.mark.parametrize("is_causal", [True, False])
def test_torchtitan_layout(is_causal: bool) -> None:
    *leaves, _ = (x.requires_grad_() for x in inputs(2, 37, 6, 2))
    attention = TorchtitanAttention(**BRANCHES, head_offsets="blocked")
    q, k, v = (x.transpose(1, 2) for x in leaves)
    actual = attention(q, k, v, scale=0.4, enable_gqa=True, is_causal=is_causal)
    how = {"scale": 0.4, "is_causal": is_causal, "head_offsets": "blocked"}
    expected = dilated_attention_reference(*leaves, **BRANCHES, **how).transpose(1, 2)
    assert_close(actual, expected, torch.float64)
    assert_same_gradients(actual, expected, leaves, torch.float64)


def test_torchtitan_attention_is_causal_and_shows_itself() -> None:
    q, k, v, _ = (x.transpose(1, 2) for x in inputs(1, 37, 6, 6))
    attention = TorchtitanAttention(**BRANCHES)
    expected = dilated_attention(*(x.transpose(1, 2) for x in (q, k, v)), **BRANCHES, is_causal=True)
    assert torch.equal(attention(q, k, v), expected.transpose(1, 2))
    assert repr(attention) == ("TorchtitanAttention(segment_lengths=[5, 16, 40], dilation_rates=[1, 2, 3])")
    assert not list(attention.parameters())
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))


PLACEMENTS: dict[str, Any] = {"heads": Shard(1), "batches": Shard(0), "replicated": Replicate()}


def torchtitan_errors(rank: int, placed: str) -> list[float]:
    shape, how = (2, 37, 10, 2), {"is_causal": True}
    mesh = init_device_mesh("cpu", (2,))
    attention = TorchtitanAttention(**BRANCHES)
    *leaves, weight = (
        distribute_tensor(x.transpose(1, 2).contiguous(), mesh, [PLACEMENTS[placed]]).requires_grad_()
        for x in inputs(*shape)
    )
    out = attention(*leaves, enable_gqa=True)
    assert isinstance(out, DTensor)
    assert out.placements == (PLACEMENTS[placed],)
    results = out.detach(), *torch.autograd.grad(out, leaves, weight.detach())
    expected = one_process(*shape, **how)
    return [
        (x.full_tensor().transpose(1, 2) - y).abs().max().item()
        for x, y in zip(results, expected, strict=True)
    ]


@pytest.mark.parametrize("placed", PLACEMENTS)
def test_torchtitan_with_tensor_parallelism_is_one_process(placed: str) -> None:
    errors = run_ranks(2, torchtitan_errors, placed)
    assert max(max(row) for row in errors) < 1e-10, errors


def local_heads_error(rank: int) -> float:
    part, attention = (
        slice(3 * rank, 3 * rank + 3),
        TorchtitanAttention(**BRANCHES, head_group=dist.group.WORLD),
    )
    q, k, v = (x[:, :, part].transpose(1, 2) for x in inputs(2, 37, 6, 6)[:3])
    expected, *_ = one_process(2, 37, 6, 6, is_causal=True)
    alone = TorchtitanAttention(**BRANCHES)(q, k, v)
    assert (rank == 0) == torch.allclose(alone, attention(q, k, v))  # the number of a head matters
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))
    return (attention(q, k, v).transpose(1, 2) - expected[:, :, part]).abs().max().item()


def test_torchtitan_with_local_heads_is_one_process() -> None:
    assert max(run_ranks(2, local_heads_error)) < 1e-10


def torchtitan_messages(rank: int) -> list[str]:
    mesh, attention = init_device_mesh("cpu", (2,)), TorchtitanAttention(**BRANCHES)
    x = torch.randn(2, 3, 10, 4)
    heads, tokens = (distribute_tensor(x, mesh, [Shard(dim)]) for dim in (1, 2))
    partial = DTensor.from_local(x, mesh, [Partial()])
    messages = []
    for q, k, v in ((heads, x, x), (heads, heads, tokens), (tokens,) * 3, (partial,) * 3, (heads,) * 3):
        with pytest.raises((TypeError, ValueError), match="must") as error:
            attention(q, k, v)
        messages.append(str(error.value))
    return messages


def test_torchtitan_refuses_other_placements() -> None:
    for messages in run_ranks(2, torchtitan_messages):
        assert messages[0] == "q, k and v must all be DTensors if one is"
        assert "must be placed alike, got (Shard(dim=1),), (Shard(dim=1),) and (Shard(dim=2),)" in messages[1]
        assert "sharded by batch or once by heads, got (Shard(dim=2),)" in messages[2]
        assert "sharded by batch or once by heads, got (Partial(sum),)" in messages[3]
        assert messages[4] == "heads must be a multiple of the 2 ranks, got 3 and 3"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_lengths": [4, 4]}, "must have the same length, got 2 and 3"),
        ({"dropout": 0.1}, "have no 'dropout'. They must be among segment_lengths"),
        ({"kernel": "fast"}, "kernel must be"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchtitanAttention(**{**BRANCHES, **options})


def test_fewer_key_heads_must_be_meant() -> None:
    q, k, v, _ = (x.transpose(1, 2) for x in inputs(1, 10, 6, 2))
    with pytest.raises(ValueError, match="must have the same heads unless enable_gqa, got 6 and 2"):
        TorchtitanAttention(**BRANCHES)(q, k, v)
    with pytest.raises(TypeError, match="is_causal must be a bool, got 1"):
        TorchtitanAttention(**BRANCHES)(q, q, q, is_causal=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": [1.0]}, "q must have 4 dimensions, of which the second is heads, got list"),
        ({"q": torch.randn(4)}, r"q must have 4 dimensions, .* got \(4,\)"),
        ({"v": torch.randn(3, 10, 4)}, r"v must have 4 dimensions, .* got \(3, 10, 4\)"),
    ],
)
def test_other_inputs_than_four_dimensions_are_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchtitanAttention(**BRANCHES)(**{**dict.fromkeys("qkv", torch.randn(1, 3, 10, 4)), **changes})
