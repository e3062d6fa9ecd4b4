"""Transformer layers: equal to those of torch where they coincide, to plain formulas where they do not."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention_pytorch.modules.longnet import magneto_gamma
from dilated_attention_pytorch.modules.parts import ACTIVATIONS, DropPath, FeedForward
from dilated_attention_pytorch.modules.transformer import (
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
)
from dilated_attention_pytorch.ring import shard_sequence, unshard_sequence
from support.ranks import run_ranks
from support.tolerances import assert_close, assert_same_gradients
from support.weighed import randomised

B, N, M, E, H, FF = 2, 13, 9, 12, 3, 20
DOUBLE = torch.float64
SEGMENTS, RATES = (4, 13), (1, 2)


def make(cls: Any = DilatedTransformerEncoderLayer, **options: Any) -> Any:
    """One full branch without sub-layer norms, which is a layer of torch."""
    defaults = {"segment_lengths": (N,), "dilation_rates": (1,), "dim_feedforward": FF, "dropout": 0.0}
    return randomised(cls(E, H, **{**defaults, "sub_layer_norm": False, "dtype": DOUBLE, **options}), 0.4)


def take_weights(ours: Any, theirs: Any) -> None:
    """Of a layer of torch with norm_first."""
    is_decoder = isinstance(theirs, nn.TransformerDecoderLayer)
    ours.self_attn.load_multihead_state_dict(theirs.self_attn.state_dict())
    pairs = [(ours.self_attn_layer_norm, theirs.norm1), (ours.ffn.fc1, theirs.linear1)]
    pairs += [(ours.ffn.fc2, theirs.linear2)]
    pairs += [(ours.final_layer_norm, theirs.norm3 if is_decoder else theirs.norm2)]
    if is_decoder:
        ours.encoder_attn.load_multihead_state_dict(theirs.multihead_attn.state_dict())
        pairs.append((ours.encoder_attn_layer_norm, theirs.norm2))
    for own, other in pairs:
        own.load_state_dict(other.state_dict())


def causal_mask(n: int = N) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def padding(n: int = N) -> Tensor:
    ignored = torch.zeros(B, n, dtype=torch.bool)
    ignored[0, -3:] = ignored[1, 4] = True
    return ignored


@pytest.mark.parametrize("cross_attention", ["dense", "dilated"])
def test_cross_attention_has_the_options_of_the_layer(cross_attention: str) -> None:
    options = {"bias": False, "softmax_scale": 0.1, "attention_dropout": 0.25, "num_kv_heads": 1}
    cross = make(DilatedTransformerDecoderLayer, cross_attention=cross_attention, **options).encoder_attn
    assert [name for name, _ in cross.named_parameters() if "bias" in name] == []
    assert [cross.k_proj.out_features, cross.v_proj.out_features] == [E // H] * 2
    attention = cross.attention
    assert (attention.dropout if cross_attention == "dense" else attention.spec.dropout_p) == 0.25
    x, memory = (torch.randn(B, N, E, dtype=DOUBLE) for _ in range(2))
    q, k, v = (
        F.linear(a, p.weight) for a, p in ((x, cross.q_proj), (memory, cross.k_proj), (memory, cross.v_proj))
    )
    scores = q.unflatten(-1, (H, -1)).transpose(1, 2) @ k[:, None].mT * 0.1
    expected = (scores.softmax(-1) @ v[:, None]).transpose(1, 2).flatten(2) @ cross.out_proj.weight.T
    assert_close(cross.eval()(x, memory)[0], expected, DOUBLE)


def features(b: int = B, n: int = M, e: int = E, **options: Any) -> Tensor:
    return torch.randn(b, n, e, **{"dtype": DOUBLE, **options})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"memory": features(e=E - 1)}, ValueError, "memory must have the shape .* got"),
        ({"memory": features().float()}, TypeError, "memory must have the dtype of tgt, torch.float64, got"),
        ({"memory": features(device="meta")}, ValueError, "memory must be on the device"),
        ({"memory": features(B + 1)}, ValueError, "need one shape with the batch of query"),
        ({"memory": features(n=0)}, ValueError, "k must have at least one position, got none"),
        ({"memory_key_padding_mask": padding(N)}, ValueError, r"must be \(b, n\) = \(2, 9\)"),
        ({"memory_is_causal": True}, ValueError, "is_causal needs as many keys as queries, got 9 and 13"),
        ({"lengths": [1]}, ValueError, "lengths must have one entry for each of the 2 rows"),
    ],
)
def test_a_call_that_fails_leaves_its_cache_as_it_was(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    layer = make(DilatedTransformerDecoderLayer).eval()
    cache = layer.self_attn.make_cache(B)
    with torch.no_grad(), pytest.raises(error, match=message):
        layer(features(n=N), **{"memory": features(), **given}, cache=cache)
    assert cache.lengths == (0, 0)


def test_inputs_of_another_dtype_or_device() -> None:
    x = torch.randn(B, N, E)
    for layer in (make(), make(DilatedTransformerDecoderLayer, cross_attention=None)):
        with pytest.raises(TypeError, match=r"input must have the dtype of the weights, .*64, got .*32"):
            layer(x)
        with pytest.raises(ValueError, match="input must be on the device of the weights, cpu, got meta"):
            layer(x.double().to("meta"))
    layer = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.bfloat16()).isfinite().all()
        with pytest.raises(TypeError, match=r"input must have the dtype .* got torch\.float64"):
            layer(x.double())


@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("cls", [DilatedTransformerEncoderLayer, DilatedTransformerDecoderLayer])
def test_layers_equal_those_of_torch(cls: Any, masks: str, batch_first: bool, activation: str) -> None:
    is_decoder = cls is DilatedTransformerDecoderLayer
    options: dict[str, Any] = {"batch_first": batch_first, "activation": activation, "layer_norm_eps": 0.01}
    of_torch = nn.TransformerDecoderLayer if is_decoder else nn.TransformerEncoderLayer
    theirs = of_torch(E, H, FF, 0.0, norm_first=True, dtype=DOUBLE, **options)
    randomised(theirs)
    ours = make(cls, **options)
    take_weights(ours, theirs)
    ignored = [padding(), padding(M)] if masks in ("padding", "both") else [None, None]
    causal = causal_mask() if masks in ("causal", "both") else None
    leaves = [features(n=n) if batch_first else features(n, B) for n in ((N, M) if is_decoder else (N,))]
    for leaf in leaves:
        leaf.requires_grad_()
    names = ("tgt_key_padding_mask", "memory_key_padding_mask") if is_decoder else ("src_key_padding_mask",)
    hidden = dict(zip(names, ignored, strict=False))
    how = "tgt_is_causal" if is_decoder else "is_causal"
    expected = theirs(*leaves, causal, **hidden)
    out = ours(*leaves, **hidden, **{how: causal is not None})
    assert_close(out, expected, DOUBLE)
    assert_same_gradients(out, expected, leaves, DOUBLE)
    if causal is not None:
        assert_close(ours(*leaves, causal, **hidden, **{how: False}), expected, DOUBLE)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_layers_serve_in_the_stacks_of_torch(is_training: bool, is_causal: bool) -> None:
    options: dict[str, Any] = {"batch_first": True, "dtype": DOUBLE, "activation": "gelu", "norm_first": True}
    x, memory = (torch.randn(B, n, E, dtype=DOUBLE) for n in (N, M))
    mask = causal_mask() if is_causal else None
    results: list[list[Tensor]] = []
    encoder_layer = nn.TransformerEncoderLayer(E, H, FF, 0.0, **options)
    decoder_layer = nn.TransformerDecoderLayer(E, H, FF, 0.0, **options)
    randomised(encoder_layer), randomised(decoder_layer)
    own_encoder_layer, own_decoder_layer = make(), make(DilatedTransformerDecoderLayer)
    take_weights(own_encoder_layer, encoder_layer), take_weights(own_decoder_layer, decoder_layer)
    for first, second in ((own_encoder_layer, own_decoder_layer), (encoder_layer, decoder_layer)):
        encoder = nn.TransformerEncoder(first, 2, enable_nested_tensor=False).train(is_training)
        decoder = nn.TransformerDecoder(second, 2).train(is_training)
        with torch.no_grad():
            encoded = encoder(x, mask=mask, src_key_padding_mask=padding())
            decoded = decoder(x, memory, tgt_mask=mask, memory_key_padding_mask=padding(M))
        results.append([encoded, decoded])
    for got, want in zip(*results, strict=True):
        assert_close(got, want, DOUBLE)


@pytest.mark.parametrize("activation", ["gelu", "relu", "swish"])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_feed_forward_is_the_formula(activation: str, layer_norm: bool) -> None:
    norm: dict[str, Any] = {"layer_norm": layer_norm, "layer_norm_eps": 0.01}
    module = FeedForward(E, FF, activation=activation, **norm, dtype=DOUBLE)
    randomised(module)
    x = torch.randn(B, N, E, dtype=DOUBLE, requires_grad=True)
    hidden = x @ module.fc1.weight.T + module.fc1.bias
    gelu, swish = 0.5 * (1 + torch.erf(hidden / math.sqrt(2))), torch.sigmoid(hidden)
    plain = hidden * {"gelu": gelu, "swish": swish, "relu": hidden > 0}[activation]
    if (norm := module.ffn_layernorm) is not None:
        plain = F.layer_norm(plain, (FF,), norm.weight, norm.bias, 0.01)
    expected = plain @ module.fc2.weight.T + module.fc2.bias
    assert_close(module(x), expected, DOUBLE)
    assert_same_gradients(module(x), expected, [x, *module.parameters()], DOUBLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, DOUBLE])
def test_activation_in_float32_or_wider(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def activation(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x.abs()

    monkeypatch.setitem(ACTIVATIONS, "gelu", activation)  # type: ignore[arg-type]
    module = FeedForward(E, FF, dtype=dtype)
    x = torch.randn(B, N, E, dtype=dtype)
    out = module(x)
    assert (seen, out.dtype) == ([DOUBLE if dtype == DOUBLE else torch.float32], dtype)
    assert torch.equal(out, module.fc2(module.ffn_layernorm(module.fc1(x).abs())))


def test_dilated_cross_attention_has_the_pattern_of_the_layer() -> None:
    options = {"segment_lengths": SEGMENTS, "dilation_rates": RATES, "head_offsets": "blocked"}
    options |= {"num_kv_heads": 1}
    positions = {"position_encoding": "xpos", "rotary_base": 500.0, "xpos_scale_base": 64}
    layer = make(DilatedTransformerDecoderLayer, cross_attention="dilated", **positions, **options)
    x, memory = torch.randn(2, B, N, E, dtype=DOUBLE)
    own, cross = layer.self_attn.attention.spec, layer.encoder_attn.attention.spec
    assert own == cross
    assert layer.encoder_attn.positions is None
    y = x + layer.self_attn(layer.self_attn_layer_norm(x), is_causal=True)[0]
    y = y + layer.encoder_attn(layer.encoder_attn_layer_norm(y), memory, memory)[0]
    expected = y + layer.ffn(layer.final_layer_norm(y))
    assert_close(layer(x, memory), expected, DOUBLE)
    with pytest.raises(ValueError, match="self-attention patterns need one shape of query, key and value"):
        layer(x, memory[:, 1:])


@pytest.mark.parametrize("batch_first", [True, False])
def test_drop_path_drops_rows_and_keeps_the_mean(batch_first: bool) -> None:
    torch.manual_seed(0)
    module, x = DropPath(0.25, batch_first=batch_first), torch.ones(4000, 2, 3)
    x = x if batch_first else x.transpose(0, 1)
    out = module(x) if batch_first else module(x).transpose(0, 1)
    assert torch.equal(out, out[:, :1, :1].expand_as(out))
    kept = out[:, 0, 0]
    assert torch.equal(kept.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert kept.mean().item() == pytest.approx(1.0, abs=0.05)
    assert module.eval()(x) is x
    assert DropPath(0.0)(x) is x
    assert not DropPath(1.0)(x).any()


def test_every_dropout_acts_in_training_only() -> None:
    x = torch.randn(B, N, E, dtype=DOUBLE)
    for name in ("dropout", "attention_dropout", "activation_dropout", "drop_path"):
        layer = make(**{name: 0.5})
        assert not all(torch.equal(layer(x), layer(x)) for _ in range(8)), name
        assert torch.equal(layer.eval()(x), layer(x)), name


def test_gains_of_magneto() -> None:
    for layers, is_decoder, square in (
        ((12, 0), False, math.log(24)),
        ((0, 12), True, math.log(24)),
        ((6, 4), True, math.log(12)),
        ((6, 4), False, math.log(12) * math.log(12) / 3),
    ):
        assert magneto_gamma(*layers, is_decoder=is_decoder) == pytest.approx(math.sqrt(square))
    for layers, is_decoder, message in (
        ((0, 4), False, "the encoder must have layers, got 0"),
        ((3, 0), True, "the decoder must have layers, got 0"),
        ((3, 1.5), False, r"num_decoder_layers must be an integer of 0 or more, got 1\.5"),
    ):
        with pytest.raises(ValueError, match=message):
            magneto_gamma(*layers, is_decoder=is_decoder)


def test_initial_weights_have_the_gain() -> None:
    layer = DilatedTransformerDecoderLayer(256, 4, dim_feedforward=512, gamma_init=2.0)
    assert layer.encoder_attn is not None
    assert layer.self_attn.gamma_init == layer.encoder_attn.gamma_init == 2.0  # `test_multihead` draws them
    for part in (layer.ffn.fc1, layer.ffn.fc2):
        assert part.weight.std().item() == pytest.approx(2 * math.sqrt(2 / 768), rel=0.03)
        assert not part.bias.any()
    assert layer.encoder_attn.inner_attn_ln is None


def test_copies_pickles_and_repr() -> None:
    layer = make(DilatedTransformerDecoderLayer, drop_path=0.1).eval()
    x, memory = torch.randn(2, B, N, E, dtype=DOUBLE)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x, memory), layer(x, memory))
    assert "(drop_path): DropPath(p=0.1)" in repr(layer)
    assert "activation='gelu', gamma_init=1.0" in repr(layer)


def test_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    layer = DilatedTransformerDecoderLayer(E, H, SEGMENTS, RATES, FF, 0.0)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, memory = torch.randn(B, N, E), torch.randn(B, M, E)
    results = []
    for each in (compiled, layer):
        leaf = x.clone().requires_grad_()
        out = each(leaf, memory, memory_key_padding_mask=padding(M))
        results.append((out, torch.autograd.grad(out.square().sum(), leaf)[0]))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, torch.float32)


X = torch.zeros(B, N, E, dtype=DOUBLE)


@pytest.mark.parametrize(
    ("cross_attention", "arguments", "error", "message"),
    [
        ("dense", {}, ValueError, "dense cross attention needs a memory, got None"),
        ("dilated", {}, ValueError, "dilated cross attention needs a memory, got None"),
        ("dense", {"memory": 1}, TypeError, "key must be a tensor, got int"),
        ("dense", {"memory": X, "memory_mask": torch.zeros(N, N)}, ValueError, "got another mask"),
        ("dense", {"memory": X[:, 1:], "memory_is_causal": True}, ValueError, "is_causal needs as many keys"),
        ("dense", {"memory": X, "memory_is_causal": 1}, TypeError, "memory_is_causal must be a bool, got 1"),
        ("dense", {"memory": X, "tgt_is_causal": None}, TypeError, "is_causal must be a bool, got None"),
        (None, {"memory": X}, ValueError, "a layer without cross attention takes no memory, got memory"),
        (None, {"memory_mask": X, "memory_key_padding_mask": X}, ValueError, "got memory_mask, memory_key"),
        (None, {"memory_is_causal": True}, ValueError, "takes no memory, got memory_is_causal"),
        (None, {"tgt": X[..., 1:]}, ValueError, r"shape \(b, n, d_model\) with d_model 12, got"),
        (None, {"tgt": X.long()}, TypeError, "tgt must be a dense floating-point tensor"),
    ],
)
def test_bad_calls(
    cross_attention: str | None, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    layer = make(DilatedTransformerDecoderLayer, cross_attention=cross_attention)
    with pytest.raises(error, match=message):
        layer(**{"tgt": X, **arguments})
    if cross_attention == "dilated":
        with pytest.raises(ValueError, match=r"dilated cross attention needs all of the target .* a cache"):
            layer(X, X, cache=layer.self_attn.make_cache(B))


def ring_layer(cross_attention: str) -> Any:
    torch.manual_seed(3)
    pattern: Any = {"segment_lengths": SEGMENTS, "dilation_rates": RATES, "kind": "ring"}
    return make(DilatedTransformerDecoderLayer, cross_attention=cross_attention, **pattern)


def attend_memory_in_parts(rank: int, x: Tensor, memory: Tensor) -> Tensor:
    parts = [shard_sequence(each) for each in (x, memory)]
    with pytest.raises(ValueError, match="dense cross attention needs all of the memory in each process"):
        ring_layer("dense")(*parts)
    with torch.no_grad():
        return unshard_sequence(ring_layer("dilated")(*parts))


def test_in_a_ring_cross_attention_reads_the_whole_memory_or_is_refused() -> None:
    x, memory = torch.randn(2, B, N, E, dtype=DOUBLE)
    with torch.no_grad():
        expected = ring_layer("dilated")(x, memory)
        assert ring_layer("dense")(x, memory).shape == x.shape  # of one process
    for out in run_ranks(2, attend_memory_in_parts, x, memory):
        assert_close(out, expected, DOUBLE)
