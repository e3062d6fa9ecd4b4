"""Encoder and decoder stacks: layers in order, all states, checkpoints, caches, torchscale's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dilated_attention_pytorch import shard_sequence
from dilated_attention_pytorch.modules.longnet import LongNetDecoder, LongNetEncoder
from dilated_attention_pytorch.modules.transformer import magneto_gamma
from support.ranks import run_ranks
from support.tolerances import assert_close

B, N, M, E, H, L = 2, 29, 7, 12, 3, 3
SEGMENTS, RATES = (6, 16), (1, 2)
DOUBLE = torch.float64
STACKS = [LongNetEncoder, LongNetDecoder]


def make(cls: Any = LongNetEncoder, **options: Any) -> Any:
    sizes = {"segment_lengths": SEGMENTS, "dilation_rates": RATES, "dim_feedforward": 20, "dtype": DOUBLE}
    if cls is LongNetDecoder:
        sizes["cross_attention"] = None
    torch.manual_seed(7)
    stack = cls(E, H, L, **{**sizes, **options})
    for parameter in stack.parameters():
        if parameter.dim() == 1:  # so that no bias of zero or norm weight of one hides a mistake
            nn.init.normal_(parameter, std=0.4)
    return stack


def tokens(n: int = N, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(B, n, E, dtype=dtype)


def padding(n: int) -> Tensor:
    ignored = torch.zeros(B, n, dtype=torch.bool)
    ignored[0, -3:] = True
    return ignored


def test_encoder_runs_its_layers_and_the_norm() -> None:
    stack, x = make(), tokens()
    out, states = stack(x, padding(N), True, return_all=True)
    assert torch.equal(states[0], x)
    assert len(states) == L + 1
    for layer, before, after in zip(stack.layers, states, states[1:], strict=False):
        assert torch.equal(layer(before, None, padding(N), True), after)
    assert torch.equal(out, stack.layer_norm(states[-1]))
    assert torch.equal(stack(x, padding(N), True), out)
    bare = make(normalize_output=False)
    bare.load_state_dict({k: v for k, v in stack.state_dict().items() if not k.startswith("layer_norm")})
    assert bare.layer_norm is None
    assert torch.equal(bare(x, padding(N), True), states[-1])


@pytest.mark.parametrize("cross_attention", ["dense", "dilated", None])
def test_decoder_runs_its_layers_with_the_memory(cross_attention: str | None) -> None:
    stack, x = make(LongNetDecoder, cross_attention=cross_attention), tokens()
    m = N if cross_attention == "dilated" else M
    memory, ignored = (None, None) if cross_attention is None else (tokens(m), padding(m))
    out, states = stack(x, memory, padding(N), ignored, return_all=True)
    y = x
    for layer, after in zip(stack.layers, states[1:], strict=True):
        y = layer(y, memory, None, None, padding(N), ignored)
        assert torch.equal(y, after)
    assert torch.equal(out, stack.layer_norm(y))
    assert not torch.allclose(stack(x, memory, is_causal=False), stack(x, memory))


@pytest.mark.parametrize("cls", STACKS)
def test_checkpoints_change_no_gradient(cls: Any) -> None:
    stack, x = make(cls, dropout=0.2, drop_path_rate=0.3), tokens()
    results, saved = [], []
    for checkpointed in (False, True):
        stack.checkpoint_activations = checkpointed
        stack.zero_grad()
        leaf = x.clone().requires_grad_()
        torch.manual_seed(5)
        kept = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            out = stack(leaf, is_causal=True)
        out.square().sum().backward()
        results.append((out, leaf.grad, *(p.grad.clone() for p in stack.parameters())))
        saved.append(kept)
    for got, want in zip(*results, strict=True):
        assert_close(got, want, DOUBLE)
    assert saved[1] < saved[0] / 3


def test_checkpoints_in_training_only() -> None:
    stack = make(checkpoint_activations=True)
    calls: list[nn.Module] = []
    for layer in stack.layers:
        layer.register_forward_pre_hook(lambda module, _: calls.append(module))
    for is_training, runs in ((True, 2), (False, 1)):
        calls.clear()
        x = tokens().requires_grad_()
        stack.train(is_training)(x).sum().backward()
        assert len(calls) == runs * L


@pytest.mark.parametrize("position_encoding", [None, "rotary", "xpos"])
@pytest.mark.parametrize("cls", STACKS)
@torch.no_grad()
def test_decoding_equals_the_full_forward(cls: Any, position_encoding: str | None) -> None:
    stack = make(
        cls, position_encoding=position_encoding, num_kv_heads=1, checkpoint_activations=True
    ).train()
    x = tokens(61)
    expected = stack(x, is_causal=True)
    caches = stack.make_caches(B)
    assert len(caches) == L
    parts = [stack(part, is_causal=True, caches=caches) for part in x.split([30, 1, 17, 1, 12], 1)]
    assert_close(torch.cat(parts, 1), expected, DOUBLE)


@torch.no_grad()
def test_decoding_with_a_memory_rows_of_different_lengths() -> None:
    stack, x, memory = (
        make(LongNetDecoder, cross_attention="dense", position_encoding="rotary"),
        tokens(),
        tokens(M),
    )
    ignored = padding(M)
    expected = stack(x, memory, None, ignored)
    caches = stack.make_caches(B, "cpu", DOUBLE)
    first, states = stack(x[:, :9], memory, None, ignored, caches=caches, lengths=[4, 9], return_all=True)
    assert [cache.lengths for cache in caches] == [(4, 9)] * L
    assert len(states) == L + 1
    assert_close(first[0, :4], expected[0, :4], DOUBLE)
    rest = torch.stack((x[0, 4:14], x[1, 9:19]))
    second = stack(rest, memory, None, ignored, caches=caches)
    assert_close(second, torch.stack((expected[0, 4:14], expected[1, 9:19])), DOUBLE)


def test_gains_and_drop_paths_by_depth() -> None:
    for stack, gain in (
        (make(), magneto_gamma(L, 0)),
        (make(LongNetDecoder), magneto_gamma(0, L, is_decoder=True)),
        (make(LongNetDecoder, cross_attention="dense"), magneto_gamma(5, L, is_decoder=True)),
        (make(gamma_init=1.5), 1.5),
        (make(sub_layer_norm=False), 1.0),
    ):
        assert all(layer.ffn.gamma_init == layer.self_attn.gamma_init == gain for layer in stack.layers)
    assert [layer.drop_path.p for layer in make(drop_path_rate=0.3).layers] == [0.0, 0.15, 0.3]
    assert LongNetEncoder(E, H, 1, drop_path_rate=0.3).layers[0].drop_path.p == 0.0


def test_initial_activations_do_not_grow() -> None:
    torch.manual_seed(0)
    stack = LongNetEncoder(64, 4, 24, segment_lengths=(16,), dilation_rates=(1,), dim_feedforward=128)
    with torch.no_grad():
        _, states = stack(torch.randn(2, 50, 64), return_all=True)
    assert states[-1].std() < 20


def ring_results(x: Tensor, ignored: Tensor) -> list[Tensor]:
    """Output and the gradient of its squares, of a causal stack with positions and padding."""
    stack, x = make(kind="ring", position_encoding="xpos"), x.clone().requires_grad_()
    out = stack(x, ignored, True)
    return [out.detach(), torch.autograd.grad(out.square().sum(), x)[0]]


def run_on_part(rank: int, x: Tensor, ignored: Tensor, expected: list[Tensor]) -> bool:
    for got, want in zip(ring_results(shard_sequence(x), shard_sequence(ignored)), expected, strict=True):
        assert_close(got, shard_sequence(want), DOUBLE)
    return True


def test_a_ring_of_two_processes_equals_one() -> None:
    x, ignored = tokens(), padding(N)
    assert run_ranks(2, run_on_part, x, ignored, ring_results(x, ignored)) == [True, True]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_layers": 0}, ValueError, "num_layers must be a positive integer, got 0"),
        ({"batch_first": False}, TypeError, "batch_first is no option of a stack"),
        ({"colour": 1}, TypeError, "has no 'colour'"),
    ],
)
@pytest.mark.parametrize("cls", STACKS)
def test_bad_settings(cls: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cls(**{"d_model": E, "nhead": H, **options})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": [1]}, TypeError, "x must be a tensor, got list"),
        (
            {"x": tokens()[0]},
            ValueError,
            r"x must have the shape \(b, n, d_model\) with d_model 12, got \(29, 12\)",
        ),
        ({"return_all": 1}, TypeError, "return_all must be a bool, got 1"),
        ({"is_causal": "no"}, TypeError, "is_causal must be a bool, got 'no'"),
        ({"caches": []}, ValueError, "caches must hold one for each of 3 layers, got 0"),
        ({"lengths": [1, 1]}, ValueError, "lengths are for a cache, got none"),
        (
            {"key_padding_mask": padding(N - 1)},
            ValueError,
            r"key_padding_mask must be \(b, n\) = \(2, 29\), got",
        ),
    ],
)
@pytest.mark.parametrize("cls", STACKS)
def test_bad_calls(cls: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(cls)(**{"x": tokens(), **arguments})


def other(**settings: Any) -> Any:
    """The last cache of a stack that was made otherwise."""
    rows = settings.pop("rows", B)
    return make(**settings).make_caches(rows)[-1]


def advanced() -> Any:
    stack = make().eval()
    caches = stack.make_caches(B)
    with torch.no_grad():
        stack(tokens(2), None, True, caches=caches)
    return caches[-1]


@pytest.mark.parametrize(
    ("last", "error", "message"),
    [
        (lambda: other(rows=3), ValueError, "cache and query must have as many rows, got 3 and 2"),
        (
            lambda: other(segment_lengths=(6, 18)),
            ValueError,
            r"its segment_lengths is \(6, 18\), not \(6, 16\)",
        ),
        (lambda: other(num_kv_heads=1), ValueError, "its num_kv_heads is 1, not 3"),
        (
            lambda: make().make_caches(B, dtype=torch.float32)[-1],
            ValueError,
            "must have one device and dtype, got",
        ),
        (lambda: None, TypeError, "caches must hold DilatedKVCaches, got a NoneType"),
        (advanced, ValueError, r"the same tokens, got lengths \(0, 0\) in layer 0 and \(2, 2\) in layer 2"),
    ],
)
@pytest.mark.parametrize("cls", STACKS)
def test_no_cache_takes_tokens_unless_all_can(
    cls: Any, last: Any, error: type[Exception], message: str
) -> None:
    stack, x = make(cls).eval(), tokens()
    caches = stack.make_caches(B)
    with torch.no_grad():
        with pytest.raises(error, match=message):
            stack(x, is_causal=True, caches=[*caches[:-1], last()])
        assert [cache.lengths for cache in caches] == [(0, 0)] * L
        assert_close(stack(x, is_causal=True, caches=caches), stack(x, is_causal=True), DOUBLE)


def test_bad_memory_leaves_all_caches_as_they_were() -> None:
    stack, x, memory = make(LongNetDecoder, cross_attention="dense").eval(), tokens(), tokens(M)
    caches = stack.make_caches(B)
    with torch.no_grad():
        for bad in (memory[:1], memory[..., 1:], memory.float(), memory[:, :0], None):
            with pytest.raises((ValueError, TypeError), match=r"memory|batch of query|at least one position"):
                stack(x, bad, caches=caches)
            assert [cache.lengths for cache in caches] == [(0, 0)] * L
        assert_close(stack(x, memory, caches=caches), stack(x, memory), DOUBLE)


def test_weights_with_gradients_leave_all_caches_as_they_were() -> None:
    stack = make().eval()
    stack.layers[0].requires_grad_(False)  # so that the first layer could run
    caches = stack.make_caches(B)
    with pytest.raises(ValueError, match=r"no gradient: call it under torch\.no_grad\(\)"):
        stack(tokens(), None, True, caches=caches)
    assert [cache.lengths for cache in caches] == [(0, 0)] * L
    stack.requires_grad_(False)
    assert stack(tokens(), None, True, caches=caches).isfinite().all()


def test_each_layer_has_a_cache_of_its_own() -> None:
    stack = make().eval()
    cache = stack.make_caches(B)[0]
    with pytest.raises(ValueError, match="caches must be one for each layer, got one for several"):
        stack(tokens(), None, True, caches=[cache] * L)
    with pytest.raises(
        TypeError, match="caches must be a list with one for each layer, got a DilatedKVCache"
    ):
        stack(tokens(), None, True, caches=cache)
    assert cache.lengths == (0, 0)
