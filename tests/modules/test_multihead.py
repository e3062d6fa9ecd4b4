"""Multihead attention: equal to `nn.MultiheadAttention` and a dense computation, strict about input."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch import DilatedAttention, ImprovedDilatedAttention, dilated_attention
from dilated_attention_pytorch.modules.multihead import (
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    MultiheadModule,
)
from support.tolerances import assert_close

B, N, E, H = 3, 11, 12, 3
SEGMENTS, RATES = (4, 11), (1, 3)
CLASSES = [MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention]


def make(cls: type[MultiheadDilatedAttention], **options: Any) -> MultiheadDilatedAttention:
    """One full-length branch in float64, which is dense attention."""
    defaults = {"segment_lengths": (N,), "dilation_rates": (1,), "dtype": torch.float64}
    return cls(E, H, **{**defaults, **options})


def randomise(module: nn.Module) -> None:
    """Random values everywhere, so that no bias of zero or norm weight of one hides a mistake."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)


def padding() -> Tensor:
    ignored = torch.zeros(B, N, dtype=torch.bool)
    ignored[0, -3:] = ignored[1, 4] = True  # never the first key: dense attention has no answer without keys
    return ignored


def causal_mask(dtype: torch.dtype = torch.bool) -> Tensor:
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    return future if dtype == torch.bool else torch.zeros(N, N, dtype=dtype).masked_fill(future, -math.inf)


def torch_gradients(module: MultiheadModule) -> dict[str, Tensor]:
    """The gradients of the projections under the names of `nn.MultiheadAttention`."""
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    named = {name: grads[name] for name in ("out_proj.weight", "out_proj.bias") if name in grads}
    for kind in ("weight", "bias"):
        parts = [f"{x}_proj.{kind}" for x in "qkv"]
        if f"qkv_proj.{kind}" in grads:
            named[f"in_proj_{kind}"] = grads[f"qkv_proj.{kind}"]
        elif parts[0] in grads:
            named[f"in_proj_{kind}"] = torch.cat([grads[part] for part in parts])
    return named


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("is_self", [True, False], ids=["self", "distinct inputs"])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_torch(
    cls: type[MultiheadDilatedAttention], is_self: bool, masks: str, batch_first: bool, bias: bool
) -> None:
    expected = nn.MultiheadAttention(E, H, bias=bias, batch_first=batch_first, dtype=torch.float64)
    randomise(expected)
    module = make(cls, layer_norm=False, bias=bias, batch_first=batch_first)
    module.load_multihead_state_dict(expected.state_dict())
    shape = (B, N, E) if batch_first else (N, B, E)
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in range(1 if is_self else 3)]
    ignored = padding() if masks in ("padding", "both") else None
    causal = masks in ("causal", "both")
    weight, results = torch.randn(shape, dtype=torch.float64), []
    for each, options in (
        (module, {"is_causal": causal}),
        (expected, {"attn_mask": causal_mask() if causal else None, "need_weights": False}),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, weights = each(*(leaves * 3 if is_self else leaves), key_padding_mask=ignored, **options)
        assert weights is None
        (out * weight).sum().backward()
        results.append((out, [leaf.grad for leaf in leaves]))
    (out, grads), (torch_out, torch_grads) = results
    assert_close(out, torch_out, torch.float64, "output")
    for got, want in zip(grads, torch_grads, strict=True):
        assert_close(got, want, torch.float64, "gradient of an input")
    named = torch_gradients(module)
    wanted = dict(expected.named_parameters())
    assert named.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert_close(named[name], parameter.grad, torch.float64, f"gradient of {name}")


@pytest.mark.parametrize("cls", CLASSES)
def test_keys_default_to_query_and_values_to_keys(cls: type[MultiheadDilatedAttention]) -> None:
    module = make(cls)
    x, y = torch.randn(2, B, N, E, dtype=torch.float64)
    assert_close(module(x)[0], module(x, x.clone(), x.clone())[0], torch.float64)
    assert_close(module(x, y)[0], module(x, y, y)[0], torch.float64)
    assert not torch.allclose(module(x, y)[0], module(x)[0])
    assert not torch.allclose(module(x, y)[0], module(x, y, x)[0])


def test_fused_projection_runs_once_and_only_where_all_inputs_are_one() -> None:
    module = make(ImprovedMultiheadDilatedAttention)
    calls: list[nn.Module] = []
    module.qkv_proj.register_forward_hook(lambda layer, *_: calls.append(layer))
    x, y = torch.randn(2, B, N, E, dtype=torch.float64)
    for inputs in ((x, x, y), (x, y, y), (x, y, x)):
        assert_close(module(*inputs)[0], module(*(each.clone() for each in inputs))[0], torch.float64)
    assert not calls
    module(x, x, x)
    module(x)
    assert calls == [module.qkv_proj] * 2


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_grouped_heads_and_norm_equal_a_dense_computation(
    cls: type[MultiheadDilatedAttention], num_kv_heads: int
) -> None:
    embed_dim, heads, head_dim = 24, 4, 6
    options = {"num_kv_heads": num_kv_heads, "layer_norm_eps": 0.01, "dtype": torch.float64}
    module = cls(embed_dim, heads, (N,), (1,), **options)  # type: ignore[arg-type]
    randomise(module)
    state = module.state_dict()
    if cls is ImprovedMultiheadDilatedAttention:
        kv_dim = num_kv_heads * head_dim
        parts = [state[f"qkv_proj.{kind}"].split([embed_dim, kv_dim, kv_dim]) for kind in ("weight", "bias")]
    else:
        parts = [[state[f"{x}_proj.{kind}"] for x in "qkv"] for kind in ("weight", "bias")]
    inputs = torch.randn(3, B, N, embed_dim, dtype=torch.float64, requires_grad=True)
    for query, key, value in ((inputs[0],) * 3, tuple(inputs)):
        q, k, v = (
            (x @ w.T + b).view(B, N, -1, head_dim).transpose(1, 2)
            for x, w, b in zip((query, key, value), *parts, strict=True)
        )
        k, v = (x.repeat_interleave(heads // num_kv_heads, 1) for x in (k, v))
        mask = (~padding())[:, None, None, :] & ~causal_mask()
        dense = scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(B, N, embed_dim)
        dense = (dense - dense.mean(-1, keepdim=True)) / (
            dense.var(-1, correction=0, keepdim=True) + 0.01
        ).sqrt()
        dense = dense * state["inner_attn_ln.weight"] + state["inner_attn_ln.bias"]
        dense = dense @ state["out_proj.weight"].T + state["out_proj.bias"]
        out, _ = module(query, key, value, key_padding_mask=padding(), is_causal=True)
        assert_close(out, dense, torch.float64, "output")
        weight = torch.randn_like(dense)
        got, want = (torch.autograd.grad((x * weight).sum(), inputs)[0] for x in (out, dense))
        assert_close(got, want, torch.float64, "gradient")


@pytest.mark.parametrize("cls", CLASSES)
def test_the_pattern_is_that_of_the_function(cls: type[MultiheadDilatedAttention]) -> None:
    options = {"segment_lengths": SEGMENTS, "dilation_rates": RATES, "layer_norm": False}
    module = make(cls, **options, head_offsets="blocked")
    x = torch.randn(B, N, E, dtype=torch.float64)
    q, k, v = module._project(x, x, x)
    inner = dilated_attention(q, k, v, SEGMENTS, RATES, head_offsets="blocked", is_causal=True)
    assert torch.equal(module(x, is_causal=True)[0], module.out_proj(inner.flatten(2)))
    assert not torch.allclose(module(x)[0], make(cls, layer_norm=False)(x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_masks_mean_what_they_mean_in_torch(dtype: torch.dtype) -> None:
    module = make(MultiheadDilatedAttention)
    x = torch.randn(B, N, E, dtype=torch.float64)
    ignored = torch.zeros(B, N, dtype=dtype).masked_fill(padding(), -math.inf)
    assert torch.equal(module(x, key_padding_mask=ignored)[0], module(x, key_padding_mask=padding())[0])
    causal = module(x, is_causal=True)[0]
    assert not torch.allclose(causal, module(x)[0])
    for mask in (causal_mask(), causal_mask(dtype)):
        assert torch.equal(module(x, attn_mask=mask)[0], causal)
        assert torch.equal(module(x, attn_mask=mask, is_causal=True)[0], causal)


def test_padding_over_all_keys_leaves_the_bias() -> None:
    module = make(MultiheadDilatedAttention, layer_norm=False)
    randomise(module)
    x = torch.randn(B, N, E, dtype=torch.float64)
    out, _ = module(x, key_padding_mask=torch.ones(B, N, dtype=torch.bool))
    assert_close(out, module.out_proj.bias.expand(B, N, E), torch.float64)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("num_kv_heads", [8, 2])
def test_initial_gains(is_fused: bool, num_kv_heads: int) -> None:
    embed_dim, gamma = 256, 3.0
    options = {"num_kv_heads": num_kv_heads, "fused_qkv": is_fused}
    module = MultiheadModule(embed_dim, 8, DilatedAttention(), gamma_init=gamma, **options)  # type: ignore[arg-type]
    weights, biases = module._qkv_parameters()
    for weight, gain in zip((*weights, module.out_proj.weight), (1.0, 1.0, gamma, gamma), strict=True):
        std = gain * math.sqrt(2 / sum(weight.shape))
        assert weight.std().item() == pytest.approx(std, rel=0.03)
        assert abs(weight.mean().item()) < 0.03 * std
    assert not any(bias.any() for bias in (*biases, module.out_proj.bias))
    assert module.inner_attn_ln is not None
    assert torch.equal(module.inner_attn_ln.weight, torch.ones(embed_dim))


def test_fused_and_separate_start_alike() -> None:
    modules = [make(cls, num_kv_heads=1, gamma_init=2.0) for cls in CLASSES]
    for module in modules:
        torch.manual_seed(5)
        module.reset_parameters()
    x = torch.randn(B, N, E, dtype=torch.float64)
    assert_close(modules[0](x)[0], modules[1](x)[0], torch.float64)


@pytest.mark.parametrize("cls", CLASSES)
def test_copies_pickles_and_state_dicts(cls: type[MultiheadDilatedAttention]) -> None:
    module = make(cls, num_kv_heads=1, batch_first=False)
    randomise(module)
    x = torch.randn(N, B, E, dtype=torch.float64)
    loaded = make(cls, num_kv_heads=1, batch_first=False)
    loaded.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(twin(x)[0], module(x)[0])
    inputs = {"qkv_proj"} if cls is ImprovedMultiheadDilatedAttention else {"q_proj", "k_proj", "v_proj"}
    names = {
        f"{name}.{kind}" for name in (*inputs, "inner_attn_ln", "out_proj") for kind in ("weight", "bias")
    }
    assert module.state_dict().keys() == names
    assert make(cls, bias=False, layer_norm=False).state_dict().keys() == {
        f"{name}.weight" for name in (*inputs, "out_proj")
    }


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_compiles_into_one_graph_once(cls: type[MultiheadDilatedAttention], mask: str) -> None:
    torch._dynamo.reset()
    module = cls(E, H, SEGMENTS, RATES, num_kv_heads=1)
    randomise(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    ignored = padding() if mask == "bool" else torch.zeros(B, N).masked_fill(padding(), -math.inf)
    causal = None if mask == "bool" else causal_mask(torch.float32)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            x = torch.randn(B, N, E)
            results = []
            for each in (compiled, module):
                leaf = x.clone().requires_grad_()
                out, _ = each(leaf, key_padding_mask=ignored, attn_mask=causal)
                module.zero_grad()
                out.square().sum().backward()
                results.append((out, leaf.grad, *(p.grad for p in module.parameters())))
            for got, want in zip(*results, strict=True):
                assert_close(got, want, torch.float32)
    if mask == "float":
        with pytest.raises(RuntimeError, match="must hold only 0"):
            compiled(x, key_padding_mask=torch.ones(B, N), attn_mask=causal)
        with pytest.raises(RuntimeError, match="the pattern decides what is attended"):
            compiled(x, key_padding_mask=ignored, attn_mask=torch.zeros(N, N))


def test_compiled_fused_module_tells_distinct_inputs_apart() -> None:
    torch._dynamo.reset()
    module = ImprovedMultiheadDilatedAttention(E, H, SEGMENTS, RATES)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, y = torch.randn(2, B, N, E)
    for inputs in ((x, x, x), (x, y, x), (x, y, y), (x, x, y), (x, x, x)):
        assert_close(compiled(*inputs)[0], module(*inputs)[0], torch.float32)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("is_self", [True, False])
def test_autocast(cls: type[MultiheadDilatedAttention], is_self: bool) -> None:
    module = cls(E, H, SEGMENTS, RATES, dtype=torch.float32)
    x, y = torch.randn(2, B, N, E, requires_grad=True)
    inputs = (x, x, x) if is_self else (x, y, y)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(*inputs, key_padding_mask=padding())
    assert out.dtype == torch.bfloat16
    exact = copy.deepcopy(module).double()(*(i.double() for i in inputs), key_padding_mask=padding())[0]
    assert_close(out, exact, torch.bfloat16)
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_serves_in_the_encoder_of_torch(is_training: bool) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
    randomise(layer)
    twin = copy.deepcopy(layer)
    twin.self_attn = make(MultiheadDilatedAttention, layer_norm=False)  # type: ignore[assignment]
    twin.self_attn.load_multihead_state_dict(layer.self_attn.state_dict())
    x, results = torch.randn(B, N, E, dtype=torch.float64), []
    for each in (twin, layer):
        encoder = nn.TransformerEncoder(each, 2, enable_nested_tensor=each is twin).train(is_training)
        with torch.no_grad():
            out = encoder(x, mask=causal_mask(), src_key_padding_mask=padding(), is_causal=True)
        results.append(out)
    assert_close(*results, torch.float64)


class Weighing(DilatedAttention):
    """Uniform weights over what may be attended: enough to see what is passed on."""

    def attention_weights(
        self, query: Tensor, key: Tensor, is_causal: bool, attention_mask: Tensor | None
    ) -> Tensor:
        assert query.shape[:3] == (B, N, H)
        assert key.shape[:3] == (B, N, 1)
        seen = torch.ones(B, N, N, dtype=query.dtype)
        seen = seen.tril() if is_causal else seen
        return seen if attention_mask is None else seen * attention_mask[:, None, :]


@pytest.mark.parametrize("batch_first", [True, False])
def test_weights_come_from_the_attention(batch_first: bool) -> None:
    module = MultiheadModule(E, H, Weighing((N,), (1,)), num_kv_heads=1, batch_first=batch_first)
    x = torch.randn((B, N, E) if batch_first else (N, B, E))
    out, weights = module(x, key_padding_mask=padding(), need_weights=True, attn_mask=causal_mask())
    assert out.shape == x.shape
    expected = torch.ones(B, N, N).tril() * ~padding()[:, None, :]
    assert torch.equal(weights, expected)
    assert torch.equal(out, module(x, key_padding_mask=padding(), is_causal=True)[0])
    assert module(x)[1] is None


def test_without_weights_to_give_need_weights_raises() -> None:
    class Silent(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
            return query

    module = MultiheadModule(E, H, Silent())
    with pytest.raises(ValueError, match="need_weights needs attention_weights, got a Silent"):
        module(torch.randn(B, N, E), need_weights=True)


@pytest.mark.parametrize("cls", CLASSES)
def test_loads_separate_projections(cls: type[MultiheadDilatedAttention]) -> None:
    theirs = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    randomise(theirs)
    joint, separate = make(cls), make(cls)
    separate.load_state_dict(joint.state_dict())
    state = theirs.state_dict()
    joint.load_multihead_state_dict(state)
    weights = zip("qkv", state.pop("in_proj_weight").chunk(3), strict=True)
    separate.load_multihead_state_dict({**state, **{f"{x}_proj_weight": w for x, w in weights}})
    for name, value in joint.state_dict().items():
        assert torch.equal(separate.state_dict()[name], value)
    assert torch.equal(joint.out_proj.weight, theirs.out_proj.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_proj_bias": None}, "does not fit: in_proj_bias is missing$"),
        ({"in_proj_weight": None}, "q_proj_weight is missing; k_proj_weight is missing; v_proj_weight is"),
        ({"bias_k": torch.ones(1)}, "does not fit: bias_k is unexpected$"),
        ({"q_proj_weight": torch.ones(E, E)}, "does not fit: q_proj_weight is unexpected$"),
        ({"in_proj_weight": torch.ones(E, E)}, r"in_proj_weight must be \(36, 12\), got \(12, 12\)$"),
        (
            {"out_proj.bias": torch.ones(7), "x": torch.ones(1)},
            r"x is unexpected; out_proj.bias must be \(12,\), got \(7,\)$",
        ),
    ],
)
@pytest.mark.parametrize("cls", CLASSES)
def test_a_state_that_does_not_fit_changes_nothing(
    cls: type[MultiheadDilatedAttention], change: dict[str, Tensor | None], message: str
) -> None:
    module = make(cls)
    before = copy.deepcopy(module.state_dict())
    state = {**nn.MultiheadAttention(E, H).state_dict(), **change}
    with pytest.raises(ValueError, match=message):
        module.load_multihead_state_dict({name: x for name, x in state.items() if x is not None})
    assert all(torch.equal(before[name], x) for name, x in module.state_dict().items())


@pytest.mark.parametrize("cls", CLASSES)
def test_a_module_without_memory_takes_no_weights(cls: type[MultiheadDilatedAttention]) -> None:
    with pytest.raises(ValueError, match="in_proj_weight must have memory to be copied to, got the meta dev"):
        make(cls, device="meta").load_multihead_state_dict(nn.MultiheadAttention(E, H).state_dict())
    with pytest.raises(ValueError, match=r"out_proj\.bias must have values, got a tensor on the meta device"):
        make(cls).load_multihead_state_dict(nn.MultiheadAttention(E, H, device="meta").state_dict())


def test_states_that_no_multihead_attention_has() -> None:
    theirs = nn.MultiheadAttention(E, H)
    with pytest.raises(ValueError, match=r"in_proj_bias is unexpected; out_proj\.bias is unexpected"):
        make(MultiheadDilatedAttention, bias=False).load_multihead_state_dict(theirs.state_dict())
    with pytest.raises(TypeError, match="state must be a state dict of tensors, got MultiheadAttention"):
        make(MultiheadDilatedAttention).load_multihead_state_dict(theirs)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state must be a state dict of tensors, got dict"):
        make(MultiheadDilatedAttention).load_multihead_state_dict({"in_proj_weight": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="as many key as query heads, got num_kv_heads=1 and num_heads=3"):
        make(MultiheadDilatedAttention, num_kv_heads=1).load_multihead_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"embed_dim": 10}, ValueError, "embed_dim must be a multiple of num_heads, got 10 and 3"),
        ({"embed_dim": 12.0}, ValueError, r"embed_dim must be a positive integer, got 12\.0"),
        ({"num_kv_heads": 2}, ValueError, "num_kv_heads must divide num_heads, got 2 and 3"),
        ({"layer_norm_eps": "a"}, TypeError, "layer_norm_eps must be a number, got 'a'"),
        ({"gamma_init": math.nan}, ValueError, "gamma_init must be positive and finite, got nan"),
        ({"attention": len}, TypeError, "attention must be an nn.Module, got <built-in function len>"),
        ({"dtype": torch.int64}, TypeError, "dtype must be a floating-point torch.dtype, got torch.int64"),
    ],
)
def test_bad_settings_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MultiheadModule(**{"embed_dim": E, "num_heads": H, "attention": DilatedAttention(), **options})


X = torch.zeros(B, N, E)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query": 1}, TypeError, "query must be a tensor, got int"),
        (
            {"query": X[0]},
            ValueError,
            r"query must have the shape \(b, n, embed_dim\) with embed_dim 12, got",
        ),
        (
            {"query": X.long()},
            TypeError,
            "query must be a dense floating-point tensor, got .* of torch.int64",
        ),
        (
            {"query": X.to_sparse()},
            TypeError,
            "query must be a dense floating-point tensor, got torch.sparse_coo",
        ),
        (
            {"query": X.double()},
            TypeError,
            "query must have the dtype of the weights, torch.float32, got torch.float64",
        ),
        (
            {"query": X, "key": X.bfloat16()},
            TypeError,
            "key must have the dtype of the weights, .* torch.bfloat16",
        ),
        ({"query": X.to("meta")}, ValueError, "query must be on the device of the weights, cpu, got meta"),
        (
            {"query": X, "key": X[:, 1:]},
            ValueError,
            r"need one shape .* \(3, 11, 12\), \(3, 10, 12\) and \(3, 10",
        ),
        ({"query": X, "key": X, "value": X[1:]}, ValueError, r"need one shape .* and \(2, 11, 12\)"),
        ({"query": X[:, :0]}, ValueError, "at least one position"),
        ({"query": X, "key_padding_mask": [True]}, TypeError, "must be a bool or float tensor, got list"),
        (
            {"query": X, "key_padding_mask": padding().int()},
            TypeError,
            "key_padding_mask must be a bool or float tensor, got torch.int32",
        ),
        (
            {"query": X, "key_padding_mask": padding().T},
            ValueError,
            r"key_padding_mask must be \(b, n\) = \(3, 11\), got \(11, 3\)",
        ),
        (
            {"query": X, "key_padding_mask": padding().to("meta")},
            ValueError,
            "key_padding_mask must be on the device of query, cpu, got meta",
        ),
        (
            {"query": X, "key_padding_mask": padding().float()},
            ValueError,
            "must hold only 0 .* got other values",
        ),
        ({"query": X, "attn_mask": "causal"}, TypeError, "attn_mask must be a bool or float tensor, got str"),
        ({"query": X, "attn_mask": causal_mask().int()}, TypeError, "attn_mask must be .* got torch.int32"),
        (
            {"query": X, "attn_mask": causal_mask()[1:]},
            ValueError,
            r"attn_mask must be \(n, n\) = \(11, 11\), got \(10, 11\)",
        ),
        ({"query": X, "attn_mask": ~causal_mask()}, ValueError, "the pattern decides .* got another mask"),
        ({"query": X, "attn_mask": torch.zeros(N, N)}, ValueError, "the pattern decides .* got another mask"),
        (
            {"query": X, "attn_mask": causal_mask().float()},
            ValueError,
            "the pattern decides .* got another mask",
        ),
    ],
)
@pytest.mark.parametrize("cls", CLASSES)
def test_bad_input_raises(
    cls: type[MultiheadDilatedAttention], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cls(E, H, SEGMENTS, RATES)(**arguments)


def test_a_bad_layout_names_the_layout_in_force() -> None:
    module = MultiheadDilatedAttention(E, H, SEGMENTS, RATES, batch_first=False)
    with pytest.raises(ValueError, match=r"query must have the shape \(n, b, embed_dim\)"):
        module(torch.zeros(N, E))
    with pytest.raises(ValueError, match=r"key_padding_mask must be \(b, n\) = \(3, 11\), got \(11, 3\)"):
        module(torch.zeros(N, B, E), key_padding_mask=padding().T)
    with pytest.raises(TypeError, match="must be a dense floating-point tensor, got a nested one"):
        module(torch.nested.nested_tensor([torch.zeros(N, E)], layout=torch.jagged))


@pytest.mark.parametrize("cls", CLASSES)
def test_options_reach_the_attention(cls: type[MultiheadDilatedAttention]) -> None:
    module = cls(E, H, SEGMENTS, RATES, tail="phantom", kernel="eager", dtype=torch.float64, device="cpu")
    kind = ImprovedDilatedAttention if cls is ImprovedMultiheadDilatedAttention else DilatedAttention
    assert type(module.attention) is kind
    assert module.attention.spec.tail == "phantom"
    assert module.attention.kernel == "eager"
    assert module.float()(X)[0].dtype == torch.float32  # the declaration of dtype is that of the parameters
    for options in ({"colour": 1}, {"fused_qkv": True}):
        with pytest.raises(TypeError, match=next(iter(options))):
            cls(E, H, SEGMENTS, RATES, **options)


@pytest.mark.parametrize("cls", CLASSES)
def test_both_names_of_dropout(cls: type[MultiheadDilatedAttention]) -> None:
    for options in (
        {"dropout": 0.4},
        {"attention_dropout": 0.4},
        {"dropout": 0.4, "attention_dropout": 0.4},
        {"dropout": None, "attention_dropout": 0.4},
    ):
        module = cls(E, H, SEGMENTS, RATES, **options)  # type: ignore[arg-type]
        assert module.attention.spec.dropout_p == 0.4
        x = torch.randn(B, N, E)
        assert not torch.equal(module(x)[0], module(x)[0])
        assert torch.equal(module.eval()(x)[0], module(x)[0])
    assert cls(E, H, SEGMENTS, RATES, dropout=None).attention.spec.dropout_p == 0.0
    with pytest.raises(ValueError, match=r"are one option, got the two values 0\.1 and 0\.2"):
        cls(E, H, SEGMENTS, RATES, dropout=0.1, attention_dropout=0.2)


def test_prints_itself() -> None:
    text = repr(MultiheadDilatedAttention(E, H, SEGMENTS, RATES, num_kv_heads=1, batch_first=False))
    assert "embed_dim=12, num_heads=3, num_kv_heads=1, gamma_init=1.0, batch_first=False" in text
    assert "(attention): DilatedAttention(segment_lengths=(4, 11), dilation_rates=(1, 3))" in text


def test_an_empty_batch_gives_an_empty_output() -> None:
    assert MultiheadDilatedAttention(E, H, SEGMENTS, RATES)(X[:0])[0].shape == (0, N, E)


@pytest.mark.parametrize("num_kv_heads", [None, 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("one", "other"), [CLASSES, CLASSES[::-1]])
def test_weights_of_one_kind_load_into_another(
    one: type[MultiheadDilatedAttention],
    other: type[MultiheadDilatedAttention],
    bias: bool,
    num_kv_heads: int | None,
) -> None:
    """Fused projections and separate ones are the same weights; inside models too, by their prefixes."""
    options: dict[str, Any] = {"bias": bias, "num_kv_heads": num_kv_heads}
    source = nn.ModuleDict({"layer": make(one, **options)})
    target = nn.ModuleDict({"layer": make(other, **options)})
    randomise(source)
    state = source.state_dict()
    names = list(state)
    target.load_state_dict(state)
    assert list(state) == names  # the caller's dict is as it was
    x = torch.randn(B, N, E, dtype=torch.float64)
    torch.testing.assert_close(source["layer"](x)[0], target["layer"](x)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("cls", CLASSES)
def test_load_state_dict_takes_torchs_names(
    cls: type[MultiheadDilatedAttention], separate: bool, bias: bool
) -> None:
    theirs = nn.MultiheadAttention(E, H, bias=bias, batch_first=True, dtype=torch.float64)
    randomise(theirs)
    state = theirs.state_dict()
    if separate:  # as with kdim or vdim
        weights = zip("qkv", state.pop("in_proj_weight").chunk(3), strict=True)
        state.update({f"{x}_proj_weight": weight for x, weight in weights})
    names = list(state)
    ours, model = (make(cls, layer_norm=False, bias=bias) for _ in range(2))
    ours.load_state_dict(state)
    nn.ModuleDict({"layer": model}).load_state_dict({f"layer.{name}": x for name, x in state.items()})
    assert list(state) == names  # the caller's dict is as it was
    expected = make(cls, layer_norm=False, bias=bias)
    expected.load_multihead_state_dict(theirs.state_dict())
    for module in (ours, model):
        assert all(torch.equal(x, expected.state_dict()[name]) for name, x in module.state_dict().items())


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        (
            {"layer_norm": True},
            {},
            r"Missing key\(s\) in state_dict: .inner_attn_ln\.weight., .",
        ),
        ({}, {"bias_k": torch.ones(1)}, r"Unexpected key\(s\) in state_dict: .bias_k."),
        ({}, {"in_proj_weight": torch.ones(E, E)}, "Unexpected key.*in_proj_weight"),
        ({}, {"in_proj_weight": torch.ones(())}, "Unexpected key.*in_proj_weight"),
        ({}, {"q_proj_weight": torch.ones(E, E)}, r"Unexpected key.*_proj\.weight"),
        ({}, {"out_proj.bias": None}, r"Missing key.*out_proj\.bias"),
        ({}, {"in_proj_bias": None}, r"Missing key.*_proj\.bias"),
        ({"bias": False}, {}, "Unexpected key.*in_proj_bias"),
        ({"num_kv_heads": 1}, {}, "Unexpected key.*in_proj_weight"),
    ],
)
@pytest.mark.parametrize("cls", CLASSES)
def test_torchs_names_are_as_strict(
    cls: type[MultiheadDilatedAttention], options: Any, change: dict[str, Tensor | None], message: str
) -> None:
    state = {**nn.MultiheadAttention(E, H, dtype=torch.float64).state_dict(), **change}
    module = make(cls, **{"layer_norm": False, **options})
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict({name: x for name, x in state.items() if x is not None})


@pytest.mark.parametrize(("one", "other"), [CLASSES, CLASSES[::-1]])
def test_weights_of_another_kind_must_fit(
    one: type[MultiheadDilatedAttention], other: type[MultiheadDilatedAttention]
) -> None:
    with pytest.raises(RuntimeError, match=r"qkv_proj\.weight"):
        make(other).load_state_dict(make(one, num_kv_heads=1).state_dict())
