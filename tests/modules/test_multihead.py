"""Multihead attention: equal to `nn.MultiheadAttention` and a dense computation, strict about input."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from dilated_attention_pytorch import DilatedAttention, ImprovedDilatedAttention
from dilated_attention_pytorch.modules.multihead import (
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    MultiheadModule,
)
from support.tolerances import assert_close, assert_same_gradients
from support.weighed import randomised

B, N, E, H = 3, 11, 12, 3
SEGMENTS, RATES = (4, 11), (1, 3)
DOUBLE = torch.float64
CLASSES = [MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention]
Class = type[MultiheadDilatedAttention]
State = dict[str, Tensor | None]
of_each_class = pytest.mark.parametrize("cls", CLASSES)
of_each_pair = pytest.mark.parametrize(("one", "other"), [CLASSES, CLASSES[::-1]])
with_and_without_bias = pytest.mark.parametrize("bias", [True, False])


def make(cls: Class = MultiheadDilatedAttention, **options: Any) -> MultiheadDilatedAttention:
    """One full-length branch in float64, which is dense attention."""
    return cls(E, H, **{"segment_lengths": (N,), "dilation_rates": (1,), "dtype": DOUBLE, **options})


def theirs(**options: Any) -> nn.MultiheadAttention:
    return randomised(nn.MultiheadAttention(E, H, **{"batch_first": True, "dtype": DOUBLE, **options}))


def separate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of nn.MultiheadAttention as they are with kdim or vdim."""
    weights = zip("qkv", state["in_proj_weight"].chunk(3), strict=True)
    others = {name: x for name, x in state.items() if name != "in_proj_weight"}
    return {**others, **{f"{x}_proj_weight": weight for x, weight in weights}}


def changed(state: dict[str, Tensor], change: State) -> dict[str, Any]:
    return {name: x for name, x in {**state, **change}.items() if x is not None}


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, N, E)), dtype=DOUBLE)


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
    named = {name: x for name, x in grads.items() if name.startswith("out_proj")}
    for kind in {name.split(".")[1] for name in grads}:
        parts = ["qkv_proj"] if module.fused_qkv else ["q_proj", "k_proj", "v_proj"]
        named[f"in_proj_{kind}"] = torch.cat([grads[f"{part}.{kind}"] for part in parts])
    return named


@of_each_class
@pytest.mark.parametrize("is_self", [True, False], ids=["self", "distinct inputs"])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("batch_first", [True, False])
@with_and_without_bias
def test_equals_torch(cls: Class, is_self: bool, masks: str, batch_first: bool, bias: bool) -> None:
    expected = theirs(bias=bias, batch_first=batch_first)
    module = make(cls, layer_norm=False, bias=bias, batch_first=batch_first)
    module.load_multihead_state_dict(expected.state_dict())
    shape = (B, N, E) if batch_first else (N, B, E)
    inputs = [tokens(*shape) for _ in range(1 if is_self else 3)]
    ignored = padding() if masks in ("padding", "both") else None
    causal = masks in ("causal", "both")
    weight, results = tokens(*shape), []
    for each, options in (
        (module, {"is_causal": causal}),
        (expected, {"attn_mask": causal_mask() if causal else None, "need_weights": False}),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, weights = each(*(leaves * 3 if is_self else leaves), key_padding_mask=ignored, **options)
        assert weights is None
        (out * weight).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results, strict=True):
        assert_close(got, want, DOUBLE, "output, or gradient of an input")
    named, wanted = torch_gradients(module), dict(expected.named_parameters())
    assert named.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert_close(named[name], parameter.grad, DOUBLE, f"gradient of {name}")


def test_fused_projection_runs_once_and_only_where_all_inputs_are_one() -> None:
    module = make(ImprovedMultiheadDilatedAttention)
    calls: list[nn.Module] = []
    module.qkv_proj.register_forward_hook(lambda layer, *_: calls.append(layer))
    x, y = tokens(2, B, N, E)
    for inputs in ((x, x, y), (x, y, y), (x, y, x)):
        assert_close(module(*inputs)[0], module(*(each.clone() for each in inputs))[0], DOUBLE)
    assert not calls
    assert torch.equal(module(x)[0], module(x, x, x)[0])
    assert calls == [module.qkv_proj] * 2
    assert torch.equal(module(x, y)[0], module(x, y, y)[0])
    assert not torch.allclose(module(x, y)[0], module(x, y, x)[0])


@of_each_class
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_grouped_heads_and_norm_equal_a_dense_computation(cls: Class, num_kv_heads: int) -> None:
    width, heads, d = 24, 4, 6
    module = randomised(
        cls(width, heads, (N,), (1,), num_kv_heads=num_kv_heads, layer_norm_eps=0.01, dtype=DOUBLE)
    )
    parts = module._qkv_parameters()
    inputs = tokens(3, B, N, width).requires_grad_()
    for query, key, value in ((inputs[0],) * 3, tuple(inputs)):
        q, k, v = (
            (x @ w.T + b).view(B, N, -1, d).transpose(1, 2)
            for x, w, b in zip((query, key, value), *parts, strict=True)
        )
        k, v = (x.repeat_interleave(heads // num_kv_heads, 1) for x in (k, v))
        mask = (~padding())[:, None, None, :] & ~causal_mask()
        dense = scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(B, N, width)
        norm, last = module.inner_attn_ln, module.out_proj
        dense = layer_norm(dense, (width,), norm.weight, norm.bias, 0.01) @ last.weight.T + last.bias
        out, _ = module(query, key, value, key_padding_mask=padding(), is_causal=True)
        assert_close(out, dense, DOUBLE, "output")
        assert_same_gradients(out, dense, [inputs], DOUBLE)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_float_masks_mean_what_they_mean_in_torch(dtype: torch.dtype) -> None:
    module, x = make(), tokens()
    ignored = torch.zeros(B, N, dtype=dtype).masked_fill(padding(), -math.inf)
    assert torch.equal(module(x, key_padding_mask=ignored)[0], module(x, key_padding_mask=padding())[0])
    causal = module(x, is_causal=True)[0]
    assert not torch.allclose(causal, module(x)[0])
    for mask in (causal_mask(), causal_mask(dtype)):
        assert torch.equal(module(x, attn_mask=mask)[0], causal)
        assert torch.equal(module(x, attn_mask=mask, is_causal=True)[0], causal)


@pytest.mark.parametrize("fused_qkv", [False, True])
@pytest.mark.parametrize("num_kv_heads", [8, 2])
def test_initial_gains(fused_qkv: bool, num_kv_heads: int) -> None:
    heads, gamma = {"num_kv_heads": num_kv_heads, "fused_qkv": fused_qkv}, 3.0
    module = MultiheadModule(256, 8, DilatedAttention(), gamma_init=gamma, **heads)
    weights, biases = module._qkv_parameters()
    for weight, gain in zip((*weights, module.out_proj.weight), (1.0, 1.0, gamma, gamma), strict=True):
        std = gain * math.sqrt(2 / sum(weight.shape))
        assert weight.std().item() == pytest.approx(std, rel=0.03)
        assert abs(weight.mean().item()) < 0.03 * std
    assert not any(bias.any() for bias in (*biases, module.out_proj.bias))
    assert torch.equal(module.inner_attn_ln.weight, torch.ones(256))


def test_fused_and_separate_start_alike() -> None:
    modules, x = [make(cls, num_kv_heads=1, gamma_init=2.0) for cls in CLASSES], tokens()
    for module in modules:
        torch.manual_seed(5)
        module.reset_parameters()
    assert_close(modules[0](x)[0], modules[1](x)[0], DOUBLE)


@of_each_class
def test_copies_pickles_and_state_dicts(cls: Class) -> None:
    module = randomised(make(cls, num_kv_heads=1, batch_first=False))
    x, loaded = tokens(N, B, E), make(cls, num_kv_heads=1, batch_first=False)
    loaded.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(twin(x)[0], module(x)[0])
    inputs = {"qkv_proj"} if cls is ImprovedMultiheadDilatedAttention else {"q_proj", "k_proj", "v_proj"}
    layers = (*inputs, "inner_attn_ln", "out_proj")
    assert module.state_dict().keys() == {f"{x}.{kind}" for x in layers for kind in ("weight", "bias")}
    bare = make(cls, bias=False, layer_norm=False).state_dict()
    assert bare.keys() == {f"{name}.weight" for name in (*inputs, "out_proj")}


@of_each_class
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_compiles_into_one_graph_once(cls: Class, mask: str) -> None:
    torch._dynamo.reset()
    module = randomised(cls(E, H, SEGMENTS, RATES, num_kv_heads=1))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    ignored = padding() if mask == "bool" else torch.zeros(B, N).masked_fill(padding(), -math.inf)
    causal = None if mask == "bool" else causal_mask(torch.float32)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            x = torch.randn(B, N, E, requires_grad=True)
            got, want = (
                each(x, key_padding_mask=ignored, attn_mask=causal)[0] for each in (compiled, module)
            )
            assert_close(got, want, torch.float32)
            assert_same_gradients(got, want, [x, *module.parameters()], torch.float32)
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


@of_each_class
@pytest.mark.parametrize("is_self", [True, False])
def test_autocast(cls: Class, is_self: bool) -> None:
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
    layer = randomised(nn.TransformerEncoderLayer(E, H, 8, dropout=0.0, batch_first=True, dtype=DOUBLE))
    twin = copy.deepcopy(layer)
    twin.self_attn = make(layer_norm=False)
    twin.self_attn.load_multihead_state_dict(layer.self_attn.state_dict())
    x, results = tokens(), []
    for each in (twin, layer):
        encoder = nn.TransformerEncoder(each, 2, enable_nested_tensor=each is twin).train(is_training)
        with torch.no_grad():
            out = encoder(x, mask=causal_mask(), src_key_padding_mask=padding(), is_causal=True)
        results.append(out)
    assert_close(*results, DOUBLE)


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
    assert torch.equal(weights, torch.ones(B, N, N).tril() * ~padding()[:, None, :])
    assert torch.equal(out, module(x, key_padding_mask=padding(), is_causal=True)[0])
    assert module(x)[1] is None


def test_without_weights_to_give_need_weights_raises() -> None:
    class Silent(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
            return query

    with pytest.raises(ValueError, match="need_weights needs attention_weights, got a Silent"):
        MultiheadModule(E, H, Silent())(X, need_weights=True)


THEIRS, ONE, X = theirs().state_dict(), torch.ones(1), torch.zeros(B, N, E)


@pytest.mark.parametrize(
    ("options", "change", "error", "message"),
    [
        ({}, {"in_proj_bias": None}, ValueError, "does not fit: in_proj_bias is missing$"),
        ({}, {"in_proj_weight": None}, ValueError, "q_proj_weight is missing; k_proj_weight is missing; v"),
        ({}, {"bias_k": ONE}, ValueError, "does not fit: bias_k is unexpected$"),
        ({}, {"q_proj_weight": torch.ones(E, E)}, ValueError, "does not fit: q_proj_weight is unexpected$"),
        ({}, {"in_proj_weight": torch.ones(E, E)}, ValueError, r"must be \(36, 12\), got \(12, 12\)$"),
        (
            {},
            {"x": ONE, "out_proj.bias": ONE},
            ValueError,
            r"x is unexpected; out_proj.bias must .* got \(1,\)$",
        ),
        (
            {},
            {"out_proj.bias": torch.ones(E).to("meta")},
            ValueError,
            r"out_proj\.bias must have values, got",
        ),
        ({}, {"in_proj_weight": 1}, TypeError, "state must be a state dict of tensors, got dict"),
        ({"device": "meta"}, {}, ValueError, "in_proj_weight must have memory to be copied to, got the meta"),
        ({"bias": False}, {}, ValueError, r"in_proj_bias is unexpected; out_proj\.bias is unexpected"),
        ({"num_kv_heads": 1}, {}, ValueError, "as many key as query heads, got num_kv_heads=1 and"),
    ],
)
@of_each_class
def test_a_state_that_does_not_fit_changes_nothing(
    cls: Class, options: dict[str, Any], change: State, error: type[Exception], message: str
) -> None:
    module = make(cls, **options)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error, match=message):
        module.load_multihead_state_dict(changed(THEIRS, change))
    if not options.get("device"):
        assert all(torch.equal(before[name], x) for name, x in module.state_dict().items())


DENSE, PADDING = "query must be a dense floating-point tensor, got", "key_padding_mask must be"
NESTED = torch.nested.nested_tensor([torch.zeros(N, E)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query": X[0]}, ValueError, r"query must have the shape \(b, n, embed_dim\) with embed_dim 12"),
        ({"query": X.long()}, TypeError, f"{DENSE} .* of torch.int64"),
        ({"query": X.to_sparse()}, TypeError, f"{DENSE} torch.sparse_coo"),
        ({"query": NESTED}, TypeError, f"{DENSE} a nested one"),
        ({"query": X.double()}, TypeError, "query must have the dtype of the weights, .* torch.float64"),
        ({"key": X.bfloat16()}, TypeError, "key must have the dtype of the weights, .* torch.bfloat16"),
        ({"query": X.to("meta")}, ValueError, "query must be on the device of the weights, cpu, got meta"),
        ({"key": X[:, 1:]}, ValueError, r"need one shape .* \(3, 11, 12\), \(3, 10, 12\) and \(3, 10"),
        ({"key": X, "value": X[1:]}, ValueError, r"need one shape .* and \(2, 11, 12\)"),
        ({"query": X[:, :0]}, ValueError, "at least one position"),
        ({"key_padding_mask": padding().int()}, TypeError, f"{PADDING} .* got torch.int32"),
        ({"key_padding_mask": padding().T}, ValueError, rf"{PADDING} \(b, n\) = \(3, 11\), got \(11, 3\)"),
        ({"key_padding_mask": padding().to("meta")}, ValueError, f"{PADDING} on the device of query, cpu"),
        ({"key_padding_mask": padding().float()}, ValueError, "must hold only 0 .* got other values"),
        ({"attn_mask": causal_mask().int()}, TypeError, "attn_mask must be .* got torch.int32"),
        ({"attn_mask": causal_mask()[1:]}, ValueError, r"attn_mask must be \(n, n\) = \(11, 11\), got \(10"),
        ({"attn_mask": ~causal_mask()}, ValueError, "the pattern decides .* got another mask"),
        ({"attn_mask": causal_mask().float()}, ValueError, "the pattern decides .* got another mask"),
    ],
)
@of_each_class
def test_bad_input_raises(
    cls: Class, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cls(E, H, SEGMENTS, RATES)(**{"query": X, **arguments})


def test_a_bad_layout_names_the_layout_in_force() -> None:
    module = MultiheadDilatedAttention(E, H, SEGMENTS, RATES, batch_first=False)
    with pytest.raises(ValueError, match=r"query must have the shape \(n, b, embed_dim\)"):
        module(torch.zeros(N, E))
    with pytest.raises(ValueError, match=r"key_padding_mask must be \(b, n\) = \(3, 11\), got \(11, 3\)"):
        module(torch.zeros(N, B, E), key_padding_mask=padding().T)


@of_each_class
def test_options_reach_the_attention(cls: Class) -> None:
    module = cls(E, H, SEGMENTS, RATES, tail="phantom", kernel="eager", dtype=DOUBLE, device="cpu")
    kind = ImprovedDilatedAttention if cls is ImprovedMultiheadDilatedAttention else DilatedAttention
    assert type(module.attention) is kind
    assert (module.attention.spec.tail, module.attention.kernel) == ("phantom", "eager")
    assert module.float()(X)[0].dtype == torch.float32  # the declaration of dtype is that of the parameters
    for options in ({"colour": 1}, {"fused_qkv": True}):
        with pytest.raises(TypeError, match=next(iter(options))):
            cls(E, H, SEGMENTS, RATES, **options)


@of_each_class
def test_both_names_of_dropout(cls: Class) -> None:
    for options in (
        {"dropout": 0.4},
        {"attention_dropout": 0.4},
        {"dropout": 0.4, "attention_dropout": 0.4},
        {"dropout": None, "attention_dropout": 0.4},
    ):
        module, x = cls(E, H, SEGMENTS, RATES, **options), torch.randn(B, N, E)
        assert module.attention.spec.dropout_p == 0.4
        assert not torch.equal(module(x)[0], module(x)[0])
        assert torch.equal(module.eval()(x)[0], module(x)[0])
    assert cls(E, H, SEGMENTS, RATES, dropout=None).attention.spec.dropout_p == 0.0
    with pytest.raises(ValueError, match=r"are one option, got the two values 0\.1 and 0\.2"):
        cls(E, H, SEGMENTS, RATES, dropout=0.1, attention_dropout=0.2)


def test_prints_itself_and_takes_an_empty_batch() -> None:
    module = MultiheadDilatedAttention(E, H, SEGMENTS, RATES, num_kv_heads=1)
    assert "embed_dim=12, num_heads=3, num_kv_heads=1, gamma_init=1.0, batch_first=True" in repr(module)
    shown = "(attention): DilatedAttention(segment_lengths=(4, 11), dilation_rates=(1, 3))"
    assert shown in repr(module)
    assert module(X[:0])[0].shape == (0, N, E)


@pytest.mark.parametrize("num_kv_heads", [None, 1])
@with_and_without_bias
@of_each_pair
def test_weights_of_one_kind_load_into_another(
    one: Class, other: Class, bias: bool, num_kv_heads: int | None
) -> None:
    """Fused projections and separate ones are the same weights; inside models too, by their prefixes."""
    options: dict[str, Any] = {"bias": bias, "num_kv_heads": num_kv_heads}
    source, target = (nn.ModuleDict({"layer": make(cls, **options)}) for cls in (one, other))
    state, x = randomised(source).state_dict(), tokens()
    names = list(state)
    target.load_state_dict(state)
    assert list(state) == names  # the caller's dict is as it was
    torch.testing.assert_close(source["layer"](x)[0], target["layer"](x)[0], rtol=0, atol=1e-12)


@with_and_without_bias
@pytest.mark.parametrize("are_separate", [True, False])
@of_each_class
def test_torchs_weights_load_by_every_way(cls: Class, are_separate: bool, bias: bool) -> None:
    """`load_multihead_state_dict`, `load_state_dict`, and as part of a model."""
    expected, x = theirs(bias=bias), tokens()
    state = separate(expected.state_dict()) if are_separate else expected.state_dict()
    names = list(state)
    by_name, ours, part = (make(cls, layer_norm=False, bias=bias) for _ in range(3))
    by_name.load_multihead_state_dict(state)
    ours.load_state_dict(state)
    nn.ModuleDict({"layer": part}).load_state_dict({f"layer.{name}": x for name, x in state.items()})
    assert list(state) == names  # the caller's dict is as it was
    assert_close(by_name(x)[0], expected(x, x, x)[0], DOUBLE)
    assert torch.equal(by_name.out_proj.weight, expected.out_proj.weight)
    for module in (ours, part):
        assert all(torch.equal(by_name.state_dict()[name], x) for name, x in module.state_dict().items())


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"layer_norm": True}, {}, r"Missing key\(s\) in state_dict: .inner_attn_ln\.weight., ."),
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
@of_each_class
def test_torchs_names_are_as_strict(cls: Class, options: Any, change: State, message: str) -> None:
    module = make(cls, **{"layer_norm": False, **options})
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(changed(theirs().state_dict(), change))


def test_padding_over_all_keys_leaves_the_bias() -> None:
    module = randomised(make(layer_norm=False))
    out, _ = module(tokens(), key_padding_mask=torch.ones(B, N, dtype=torch.bool))
    assert_close(out, module.out_proj.bias.expand(B, N, E), DOUBLE)
