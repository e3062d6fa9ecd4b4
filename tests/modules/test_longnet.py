"""Stacks, LongNet and LongNetLM: what their layers compute, memory, caches, rings, compilation, bad calls."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention_pytorch import shard_sequence
from dilated_attention_pytorch.modules import LongNet, LongNetDecoder, LongNetEncoder, LongNetLM
from dilated_attention_pytorch.modules.longnet import magneto_gamma
from dilated_attention_pytorch.reference import dilated_attention_reference
from support.ranks import run_ranks
from support.tolerances import assert_close, assert_same_gradients
from support.weighed import randomised

SEGMENTS, RATES = (4, 12), (1, 3)
BRANCHES: dict[str, Any] = {"segment_lengths": SEGMENTS, "dilation_rates": RATES}
SMALL: dict[str, Any] = {"d_model": 24, "nhead": 4, "dim_feedforward": 40, **BRANCHES}
DOUBLE = torch.float64
B, N, M, E, L = 2, 29, 7, 24, 3
STACKS = [LongNetEncoder, LongNetDecoder]


def make_lm(**options: Any) -> LongNetLM:
    return randomised(LongNetLM(**{"vocab_size": 11, "num_layers": 2, **SMALL, **options}))


def make(**options: Any) -> LongNet:
    return randomised(LongNet(**{"num_encoder_layers": 2, "num_decoder_layers": 1, **SMALL, **options}))


def make_stack(cls: Any = LongNetEncoder, **options: Any) -> Any:
    torch.manual_seed(7)
    own = {"cross_attention": None} if cls is LongNetDecoder else {}
    return randomised(cls(**{"num_layers": L, "dtype": DOUBLE, **SMALL, **own, **options}))


def features(n: int = N, **options: Any) -> Tensor:
    return torch.randn(B, n, E, **{"dtype": DOUBLE, **options})


def padding(n: int) -> Tensor:
    return torch.arange(n) >= torch.tensor([[n - 3], [n]])


class Plain:
    """The models in plain torch over the weights of a state dict; shares no code with the library but for
    the definition of attention.
    """

    def __init__(self, model: nn.Module, *, num_heads: int = 4) -> None:
        self.weights, self.num_heads = dict(model.named_parameters()), num_heads

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def heads(self, name: str, x: Tensor) -> Tensor:
        return self.linear(name, x).unflatten(-1, (self.num_heads, -1))

    def attend(self, name: str, x: Tensor, causal: bool, ignored: Tensor | None) -> Tensor:
        q, k, v = (self.heads(f"{name}.{each}_proj", x) for each in "qkv")
        mask = None if ignored is None else ~ignored
        out = dilated_attention_reference(q, k, v, SEGMENTS, RATES, is_causal=causal, key_mask=mask)
        return self.linear(f"{name}.out_proj", self.norm(f"{name}.inner_attn_ln", out.flatten(2)))

    def cross(self, name: str, x: Tensor, memory: Tensor, ignored: Tensor | None = None) -> Tensor:
        given = {"q": x, "k": memory, "v": memory}
        q, k, v = (self.heads(f"{name}.{each}_proj", y).transpose(1, 2) for each, y in given.items())
        mask = None if ignored is None else ~ignored[:, None, None]
        out = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
        return self.linear(f"{name}.out_proj", out.flatten(2))

    def stack(
        self, name: str, layers: int, x: Tensor, causal: bool, ignored: Any = None, *of_memory: Any
    ) -> Tensor:
        for i in range(layers):
            layer = f"{name}.layers.{i}"
            normed = self.norm(f"{layer}.self_attn_layer_norm", x)
            x = x + self.attend(f"{layer}.self_attn", normed, causal, ignored)
            if of_memory:
                normed = self.norm(f"{layer}.encoder_attn_layer_norm", x)
                x = x + self.cross(f"{layer}.encoder_attn", normed, *of_memory)
            hidden = F.gelu(self.linear(f"{layer}.ffn.fc1", self.norm(f"{layer}.final_layer_norm", x)))
            x = x + self.linear(f"{layer}.ffn.fc2", self.norm(f"{layer}.ffn.ffn_layernorm", hidden))
        return self.norm(f"{name}.layer_norm", x)


def assert_same(actual: Tensor, expected: Tensor, model: nn.Module, *inputs: Tensor) -> None:
    """Outputs are equal, and so are the gradients of a random loss in all weights and inputs."""
    assert_close(actual, expected, DOUBLE, "output")
    assert_same_gradients(actual, expected, [*model.parameters(), *inputs], DOUBLE)


@pytest.mark.parametrize("n", [1, 5, 29])
@pytest.mark.parametrize("tied", [True, False])
def test_language_model_is_its_formula(n: int, tied: bool) -> None:
    model = make_lm(position_encoding=None, tie_embeddings=tied, dtype=DOUBLE)
    tokens = torch.randint(11, (3, n))
    plain = Plain(model)
    head = plain.weights["embed_tokens.weight" if tied else "output_projection.weight"]
    for mask in (None, torch.rand(3, n) < 0.3):
        x = plain.weights["embed_tokens.weight"][tokens] * math.sqrt(24)
        expected = plain.stack("decoder", 2, x, True, mask) @ head.T
        assert_same(model(tokens, key_padding_mask=mask), expected, model)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (13, 29), (29, 5)])
def test_encoder_decoder_is_its_formula(n: int, m: int) -> None:
    model = make(position_encoding=None, dtype=DOUBLE)
    src, tgt = features(n, requires_grad=True), features(m, requires_grad=True)
    ignored, later = torch.zeros(2, n, dtype=torch.bool), torch.zeros(2, m, dtype=torch.bool)
    ignored[0, n // 2 + 1 :] = later[1, m // 2 + 1 :] = True
    plain = Plain(model)
    memory = plain.stack("encoder", 2, src, False, ignored)
    masks = {"src_key_padding_mask": ignored, "tgt_key_padding_mask": later}
    expected = plain.stack("decoder", 1, tgt, True, later, memory, ignored)
    assert_same(model(src, tgt, **masks), expected, model, src, tgt)
    masks["memory_key_padding_mask"] = torch.zeros_like(ignored)  # one's own instead of the source's
    memory = plain.stack("encoder", 2, src, True, ignored)
    expected = plain.stack("decoder", 1, tgt, False, later, memory)
    actual = model(src, tgt, **masks, src_is_causal=True, tgt_is_causal=False)
    assert_same(actual, expected, model, src, tgt)


def test_the_target_is_the_source_by_default() -> None:
    model, src = make(), features(17, dtype=torch.float32)
    assert torch.equal(model(src), model(src, src))
    assert not torch.allclose(model(src), model(src, torch.randn(2, 17, 24)))
    ignored = torch.arange(17) < torch.tensor([[5], [0]])  # on the left, where causal queries would see it
    padded = model(src, src_key_padding_mask=ignored)
    masks = {"src_key_padding_mask": ignored, "tgt_key_padding_mask": ignored}
    assert torch.equal(padded, model(src, src, **masks))
    src[ignored] += 1
    assert torch.allclose(padded[~ignored], model(src, src_key_padding_mask=ignored)[~ignored])
    masks["tgt_key_padding_mask"] = torch.zeros_like(ignored)  # what is said is done
    assert torch.equal(model(src, **masks), model(src, src, **masks))


@pytest.mark.parametrize("position_encoding", [None, "rotary", "xpos"])
def test_order_and_the_future(position_encoding: str | None) -> None:
    """The future cannot change the past; one causal layer sees a set unless tokens have positions."""
    model = make_lm(position_encoding=position_encoding, dtype=DOUBLE)
    tokens = torch.randint(11, (2, 40))
    changed = torch.cat([tokens[:, :25], (tokens[:, 25:] + 1) % 11], 1)
    one, two = model(tokens), model(changed)
    assert_close(one[:, :25], two[:, :25], DOUBLE)
    assert not torch.allclose(one[:, 25], two[:, 25])
    full: dict[str, Any] = {"segment_lengths": (8,), "dilation_rates": (1,), "num_layers": 1}
    model = make_lm(position_encoding=position_encoding, dtype=DOUBLE, **full)
    last, swapped = (model(torch.tensor([row]))[0, -1] for row in ([3, 1, 4, 1], [1, 3, 4, 1]))
    assert torch.allclose(last, swapped) is (position_encoding is None)


@pytest.mark.parametrize("cross_attention", ["dense", "dilated", None, "an encoder"])
def test_stacks_run_their_layers_and_the_norm(cross_attention: str | None) -> None:
    is_encoder, x = cross_attention == "an encoder", features()
    own = {} if is_encoder else {"cross_attention": cross_attention}
    make = partial(make_stack, LongNetEncoder if is_encoder else LongNetDecoder, **own)
    m = N if cross_attention == "dilated" else M
    memory, ignored = (features(m), padding(m)) if cross_attention in ("dense", "dilated") else (None, None)
    given = (padding(N), True) if is_encoder else (memory, padding(N), ignored)
    stack = make()
    out, states = stack(x, *given, return_all=True)
    assert states[0] is x
    for layer, before, after in zip(stack.layers, states[:-1], states[1:], strict=True):
        masks = (None, *given) if is_encoder else (memory, None, None, padding(N), ignored)
        assert torch.equal(layer(before, *masks), after)
    assert torch.equal(out, stack.layer_norm(states[-1]))
    assert torch.equal(stack(x, *given), out)
    if not is_encoder:
        assert not torch.allclose(stack(x, *given, is_causal=False), out)
    bare = make(normalize_output=False)
    bare.load_state_dict({k: v for k, v in stack.state_dict().items() if not k.startswith("layer_norm")})
    assert torch.equal(bare(x, *given), states[-1])


@pytest.mark.parametrize("cls", STACKS)
def test_checkpoints_change_no_gradient(cls: Any) -> None:
    stack, x = make_stack(cls, dropout=0.2, drop_path_rate=0.3), features()
    results, saved = [], []
    for checkpointed in (False, True):
        stack.checkpoint_activations = checkpointed
        leaf = x.clone().requires_grad_()
        torch.manual_seed(5)
        kept: list[int] = []
        hooks = (lambda tensor, kept=kept: kept.append(tensor.numel()) or tensor, lambda tensor: tensor)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            out = stack(leaf, is_causal=True)
        gradients = torch.autograd.grad(out.square().sum(), [leaf, *stack.parameters()])
        results.append((out, *gradients))
        saved.append(sum(kept))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, DOUBLE)
    assert saved[1] < saved[0] / 3
    calls: list[nn.Module] = []
    for layer in stack.layers:
        layer.register_forward_pre_hook(lambda module, _: calls.append(module))
    for is_training, runs in ((True, 2), (False, 1)):  # evaluation keeps what it needs
        calls.clear()
        stack.train(is_training)(features(requires_grad=True), is_causal=True).sum().backward()
        assert len(calls) == runs * L


@pytest.mark.parametrize("position_encoding", [None, "rotary", "xpos"])
@pytest.mark.parametrize("cls", STACKS)
@torch.no_grad()
def test_decoding_equals_the_full_forward(cls: Any, position_encoding: str | None) -> None:
    options = {"position_encoding": position_encoding, "num_kv_heads": 1, "checkpoint_activations": True}
    stack, x = make_stack(cls, **options).train(), features(61)
    caches = stack.make_caches(B)
    assert len(caches) == L
    parts = [stack(part, is_causal=True, caches=caches) for part in x.split([30, 1, 17, 1, 12], 1)]
    assert_close(torch.cat(parts, 1), stack(x, is_causal=True), DOUBLE)


@torch.no_grad()
def test_decoding_with_a_memory_rows_of_different_lengths() -> None:
    stack = make_stack(LongNetDecoder, cross_attention="dense", position_encoding="rotary")
    x, memory, ignored = features(), features(M), padding(M)
    expected = stack(x, memory, None, ignored)
    caches = stack.make_caches(B, "cpu", DOUBLE)
    first, states = stack(x[:, :9], memory, None, ignored, caches=caches, lengths=[4, 9], return_all=True)
    assert [cache.lengths for cache in caches] == [(4, 9)] * L
    assert len(states) == L + 1
    assert_close(first[0, :4], expected[0, :4], DOUBLE)
    rest = torch.stack((x[0, 4:14], x[1, 9:19]))
    second = stack(rest, memory, None, ignored, caches=caches)
    assert_close(second, torch.stack((expected[0, 4:14], expected[1, 9:19])), DOUBLE)


@pytest.mark.parametrize("cls", [LongNetLM, LongNet])
def test_builds_without_memory_and_is_initialised_later(cls: type[nn.Module]) -> None:
    options = {"vocab_size": 11, "num_layers": 2} if cls is LongNetLM else {"num_encoder_layers": 3}
    with torch.device("meta"):
        model = cls(**options, **SMALL)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    torch.manual_seed(1)
    usual = cls(**options, **SMALL)
    for (name, a), b in zip(model.state_dict().items(), usual.state_dict().values(), strict=True):
        if b.std() == 0:  # biases of zero and norms of one
            assert torch.equal(a, b), name
        else:  # another draw of the same distribution
            assert not torch.equal(a, b), name
            assert 0.7 < a.std() / b.std() < 1.4, name
            assert a.mean().abs() < 0.2 * b.std(), name


def test_gains_and_drop_paths_by_depth() -> None:
    for stack, gain in (
        (make_stack(), magneto_gamma(L, 0)),
        (make_stack(LongNetDecoder), magneto_gamma(0, L, is_decoder=True)),
        (make_stack(LongNetDecoder, cross_attention="dense"), magneto_gamma(5, L, is_decoder=True)),
        (make_stack(gamma_init=1.5), 1.5),
        (make_stack(sub_layer_norm=False), 1.0),
        (make(num_encoder_layers=4, num_decoder_layers=3).encoder, magneto_gamma(4, 3)),
        (make(num_encoder_layers=4, num_decoder_layers=3).decoder, magneto_gamma(4, 3, is_decoder=True)),
        (make(sub_layer_norm=False).encoder, 1.0),
        (make(gamma_init=3.0).encoder, 3.0),
        (make_lm(num_layers=5).decoder, magneto_gamma(0, 5, is_decoder=True)),
    ):
        assert all(layer.ffn.gamma_init == layer.self_attn.gamma_init == gain for layer in stack.layers)
    assert [layer.drop_path.p for layer in make_stack(drop_path_rate=0.3).layers] == [0.0, 0.15, 0.3]
    assert make_stack(num_layers=1, drop_path_rate=0.3).layers[0].drop_path.p == 0.0


def test_initial_states_and_logits_are_moderate() -> None:
    torch.manual_seed(0)
    stack = LongNetEncoder(64, 4, 24, dim_feedforward=128, **BRANCHES)
    with torch.no_grad():
        assert stack(torch.randn(2, 50, 64), return_all=True)[1][-1].std() < 20
    language = LongNetLM(1000, 128, 2, 5, dim_feedforward=512)
    assert language.embed_tokens.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert 0.5 < language(torch.randint(1000, (1, 64))).std() < 2  # nothing is sure yet


def ring_results(x: Tensor, ignored: Tensor) -> list[Tensor]:
    """Output and the gradient of its squares, of a causal stack with positions and padding."""
    stack, x = make_stack(kind="ring", position_encoding="xpos"), x.clone().requires_grad_()
    out = stack(x, ignored, True)
    return [out.detach(), torch.autograd.grad(out.square().sum(), x)[0]]


def run_on_part(rank: int, x: Tensor, ignored: Tensor, expected: list[Tensor]) -> bool:
    for got, want in zip(ring_results(shard_sequence(x), shard_sequence(ignored)), expected, strict=True):
        assert_close(got, shard_sequence(want), DOUBLE)
    return True


def test_a_ring_of_two_processes_equals_one() -> None:
    x, ignored = features(), padding(N)
    assert run_ranks(2, run_on_part, x, ignored, ring_results(x, ignored)) == [True, True]


def test_compiled_model_matches_in_one_graph_for_all_lengths() -> None:
    model = make_lm(dtype=DOUBLE, num_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (29, 41):
            tokens = torch.randint(11, (2, n))
            assert_same(compiled(tokens), model(tokens), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_stays_close(dtype: torch.dtype) -> None:
    exact = make_lm(dtype=DOUBLE)
    with torch.no_grad():  # weights that all precisions hold
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(torch.float16).to(torch.bfloat16))
    model = make_lm(dtype=dtype)
    model.load_state_dict(exact.state_dict())
    tokens = torch.randint(11, (2, 29))
    logits = model(tokens)
    assert logits.dtype == dtype
    assert_close(logits, exact(tokens), dtype)
    if dtype == torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(model(tokens), exact(tokens), torch.bfloat16)


ZEROS = torch.zeros(1, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (torch.zeros(2, 5), TypeError, "tokens must be an int64 tensor, got torch.float32"),
        ([[1, 2]], TypeError, "tokens must be an int64 tensor, got list"),
        (ZEROS[0], ValueError, r"tokens must be \(b, n\) .* got \(2,\)"),
        (ZEROS[:, :0], ValueError, r"b and n at least 1, got \(1, 0\)"),
        (torch.tensor([[0, 11]]), ValueError, "tokens must be from 0 to vocab_size - 1 = 10, got 11"),
        (torch.tensor([[-1, 11]]), ValueError, "tokens must be from 0 to vocab_size - 1 = 10, got -1"),
        (ZEROS.to("meta"), ValueError, "device of the model, cpu, got meta"),
    ],
)
def test_bad_tokens(tokens: Any, error: type[Exception], message: str) -> None:
    model = make_lm()
    for call in (model, lambda tokens: model.generate(tokens, 1)):
        with pytest.raises(error, match=message):
            call(tokens)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"x": features()[0]}, ValueError, r"\(b, n, d_model\) with d_model 24, got \(29, 24\)"),
        ({"caches": []}, ValueError, "caches must hold one for each of 3 layers, got 0"),
        ({"lengths": [1, 1]}, ValueError, "lengths are for a cache, got none"),
        ({"key_padding_mask": padding(N - 1)}, ValueError, r"must be \(b, n\) = \(2, 29\), got"),
    ],
)
@pytest.mark.parametrize("cls", STACKS)
def test_bad_calls(cls: Any, call: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_stack(cls)(**{"x": features(), **call})


def last_cache(rows: int = B, seen: int = 0, **options: Any) -> Any:
    """The last cache of a stack that was made otherwise, or has seen tokens."""
    dtype = options.pop("cache_dtype", None)
    stack = make_stack(**options).eval()
    caches = stack.make_caches(rows, dtype=dtype)
    if seen:
        stack(features(seen), None, True, caches=caches)
    return caches[-1]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"rows": 3}, ValueError, "cache and query must have as many rows, got 3 and 2"),
        ({"segment_lengths": (6, 18)}, ValueError, r"its segment_lengths is \(6, 18\), not \(4, 12\)"),
        ({"num_kv_heads": 1}, ValueError, "its num_kv_heads is 1, not 4"),
        ({"cache_dtype": torch.float32}, ValueError, "must have one device and dtype, got"),
        (None, TypeError, "caches must hold DilatedKVCaches, got a NoneType"),
        ({"seen": 2}, ValueError, r"got lengths \(0, 0\) in layer 0 and \(2, 2\) in layer 2"),
    ],
)
@pytest.mark.parametrize("cls", STACKS)
@torch.no_grad()
def test_no_cache_takes_tokens_unless_all_can(
    cls: Any, how: Any, error: type[Exception], message: str
) -> None:
    stack, x = make_stack(cls).eval(), features()
    caches = stack.make_caches(B)
    with pytest.raises(error, match=message):
        stack(x, is_causal=True, caches=[*caches[:-1], None if how is None else last_cache(**how)])
    assert [cache.lengths for cache in caches] == [(0, 0)] * L
    assert_close(stack(x, is_causal=True, caches=caches), stack(x, is_causal=True), DOUBLE)


def test_other_errors_leave_all_caches_as_they_were() -> None:
    stack = make_stack().eval()
    stack.layers[0].requires_grad_(False)  # so that the first layer could run
    caches = stack.make_caches(B)
    for given, error, message in (
        (caches, ValueError, r"no gradient: call it under torch\.no_grad\(\)"),
        ([caches[0]] * L, ValueError, "caches must be one for each layer, got one for several"),
        (caches[0], TypeError, "must be a list with one for each layer, got a DilatedKVCache"),
    ):
        with pytest.raises(error, match=message):
            stack(features(), None, True, caches=given)
        assert [cache.lengths for cache in caches] == [(0, 0)] * L
    stack.requires_grad_(False)
    assert stack(features(), None, True, caches=caches).isfinite().all()


def test_model_compiled_by_inductor_matches() -> None:
    torch._dynamo.reset()
    model = make_lm(num_layers=1)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n in (29, 41):
            tokens = torch.randint(11, (2, n))
            assert_close(compiled(tokens), model(tokens), torch.float32)
