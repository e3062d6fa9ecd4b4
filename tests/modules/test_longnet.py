"""LongNet and LongNetLM: what their layers compute, padding, training, compilation, memory-less building."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention_pytorch.modules.longnet import LongNet, LongNetLM
from dilated_attention_pytorch.reference import dilated_attention_reference
from support.tolerances import assert_close

SEGMENTS, RATES = (4, 12), (1, 3)
SMALL: dict[str, Any] = {
    "d_model": 24,
    "nhead": 4,
    "dim_feedforward": 40,
    "segment_lengths": SEGMENTS,
    "dilation_rates": RATES,
}


def make_lm(**options: Any) -> LongNetLM:
    return randomised(LongNetLM(**{"vocab_size": 11, "num_layers": 2, **SMALL, **options}))


def make(**options: Any) -> LongNet:
    return randomised(LongNet(**{"num_encoder_layers": 2, "num_decoder_layers": 1, **SMALL, **options}))


def randomised(model: Any) -> Any:
    """Random values everywhere, so that no bias of zero or norm weight of one hides a mistake."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


class Plain:
    """The models in plain torch over the weights of a state dict; shares no code with the library but for
    the definition of attention.
    """

    def __init__(self, weights: dict[str, Tensor], *, num_heads: int = 4) -> None:
        self.weights, self.num_heads = weights, num_heads

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def heads(self, name: str, x: Tensor) -> Tensor:
        return self.linear(name, x).unflatten(-1, (self.num_heads, -1))

    def attend(self, name: str, x: Tensor, causal: bool, ignored: Tensor | None) -> Tensor:
        q, k, v = (self.heads(f"{name}.{each}_proj", x) for each in "qkv")
        mask = None if ignored is None else ~ignored
        out = dilated_attention_reference(q, k, v, SEGMENTS, RATES, is_causal=causal, key_mask=mask)
        return self.linear(f"{name}.out_proj", self.norm(f"{name}.inner_attn_ln", out.flatten(2)))

    def cross(self, name: str, x: Tensor, memory: Tensor, ignored: Tensor | None) -> Tensor:
        q = self.heads(f"{name}.q_proj", x)
        k, v = (self.heads(f"{name}.{each}_proj", memory) for each in "kv")
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(q.shape[-1])
        if ignored is not None:
            scores = scores.masked_fill(ignored[:, None, None], -math.inf)
        out = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v)
        return self.linear(f"{name}.out_proj", out.flatten(2))

    def stack(
        self,
        name: str,
        layers: int,
        x: Tensor,
        causal: bool,
        ignored: Tensor | None = None,
        memory: Tensor | None = None,
        memory_ignored: Tensor | None = None,
    ) -> Tensor:
        for i in range(layers):
            layer = f"{name}.layers.{i}"
            normed = self.norm(f"{layer}.self_attn_layer_norm", x)
            x = x + self.attend(f"{layer}.self_attn", normed, causal, ignored)
            if memory is not None:
                normed = self.norm(f"{layer}.encoder_attn_layer_norm", x)
                x = x + self.cross(f"{layer}.encoder_attn", normed, memory, memory_ignored)
            hidden = F.gelu(self.linear(f"{layer}.ffn.fc1", self.norm(f"{layer}.final_layer_norm", x)))
            x = x + self.linear(f"{layer}.ffn.fc2", self.norm(f"{layer}.ffn.ffn_layernorm", hidden))
        return self.norm(f"{name}.layer_norm", x)


def assert_same(
    actual: Tensor,
    expected: Tensor,
    model: nn.Module,
    inputs: list[Tensor],
    dtype: torch.dtype = torch.float64,
) -> None:
    """Outputs are equal, and so are the gradients of a random loss in all weights and inputs."""
    assert_close(actual, expected, dtype, "output")
    names, leaves = zip(*model.named_parameters(), strict=True)
    weight = torch.randn_like(expected)
    got = torch.autograd.grad((actual * weight).sum(), (*leaves, *inputs))
    want = torch.autograd.grad((expected * weight).sum(), (*leaves, *inputs))
    for name, a, b in zip((*names, *("input" for _ in inputs)), got, want, strict=True):
        assert_close(a, b, dtype, f"gradient of {name}")


@pytest.mark.parametrize("n", [1, 5, 29])
@pytest.mark.parametrize("tied", [True, False])
def test_language_model_is_its_formula(n: int, tied: bool) -> None:
    model = make_lm(position_encoding=None, tie_embeddings=tied, dtype=torch.float64)
    tokens = torch.randint(11, (3, n))
    ignored = torch.rand(3, n) < 0.3
    weights = dict(model.named_parameters())
    head = weights["embed_tokens.weight" if tied else "output_projection.weight"]
    for mask in (None, ignored):
        x = weights["embed_tokens.weight"][tokens] * math.sqrt(24)
        expected = Plain(weights).stack("decoder", 2, x, True, mask) @ head.T
        assert_same(model(tokens, key_padding_mask=mask), expected, model, [])


@pytest.mark.parametrize(("n", "m"), [(1, 1), (13, 29), (29, 5)])
def test_encoder_decoder_is_its_formula(n: int, m: int) -> None:
    model = make(position_encoding=None, dtype=torch.float64)
    src = torch.randn(2, n, 24, dtype=torch.float64, requires_grad=True)
    tgt = torch.randn(2, m, 24, dtype=torch.float64, requires_grad=True)
    ignored, later = torch.zeros(2, n, dtype=torch.bool), torch.zeros(2, m, dtype=torch.bool)
    ignored[0, n // 2 + 1 :] = later[1, m // 2 + 1 :] = True
    plain = Plain(dict(model.named_parameters()))
    memory = plain.stack("encoder", 2, src, False, ignored)
    masks = {"src_key_padding_mask": ignored, "tgt_key_padding_mask": later}
    expected = plain.stack("decoder", 1, tgt, True, later, memory, ignored)
    assert_same(model(src, tgt, **masks), expected, model, [src, tgt])
    masks["memory_key_padding_mask"] = torch.zeros_like(ignored)  # one's own instead of the source's
    memory = plain.stack("encoder", 2, src, True, ignored)
    expected = plain.stack("decoder", 1, tgt, False, later, memory)
    actual = model(src, tgt, **masks, src_is_causal=True, tgt_is_causal=False)
    assert_same(actual, expected, model, [src, tgt])


def test_the_target_is_the_source_by_default() -> None:
    model = make()
    src = torch.randn(2, 17, 24)
    assert torch.equal(model(src), model(src, src))
    assert not torch.allclose(model(src), model(src, torch.randn(2, 17, 24)))
    padding = torch.arange(17) < torch.tensor([[5], [0]])  # on the left, where causal queries would see it
    padded = model(src, src_key_padding_mask=padding)
    masks = {"src_key_padding_mask": padding, "tgt_key_padding_mask": padding}
    assert torch.equal(padded, model(src, src, **masks))
    src[padding] += 1
    assert torch.allclose(padded[~padding], model(src, src_key_padding_mask=padding)[~padding])
    own = torch.zeros_like(padding)  # what is said is done
    assert torch.equal(
        model(src, **{**masks, "tgt_key_padding_mask": own}),
        model(src, src, **{**masks, "tgt_key_padding_mask": own}),
    )


def test_dilated_cross_attention_reads_the_positions_of_its_segments() -> None:
    model = make(cross_attention="dilated", segment_lengths=(4,), dilation_rates=(1,), num_encoder_layers=1)
    src, tgt = torch.randn(2, 1, 12, 24, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(src, tgt)[0, 5].sum(), src)
    assert gradient[0].abs().sum(-1).nonzero()[:, 0].tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="one shape"):
        model(src, tgt[:, :5])


def test_the_decoder_runs_step_by_step() -> None:
    model = make(dtype=torch.float64)
    src, tgt = (torch.randn(2, n, 24, dtype=torch.float64) for n in (13, 29))
    with torch.no_grad():
        memory, caches = model.encoder(src), model.decoder.make_caches(2)
        steps = [model.decoder(part, memory, caches=caches) for part in tgt.split([11, *[1] * 18], 1)]
        assert_close(torch.cat(steps, 1), model(src, tgt), torch.float64)


@pytest.mark.parametrize("position_encoding", [None, "rotary", "xpos"])
def test_the_future_cannot_change_the_past(position_encoding: str | None) -> None:
    model = make_lm(position_encoding=position_encoding, dtype=torch.float64)
    tokens = torch.randint(11, (2, 40))
    changed = tokens.clone()
    changed[:, 25:] = (tokens[:, 25:] + 1) % 11
    one, two = model(tokens), model(changed)
    assert_close(one[:, :25], two[:, :25], torch.float64)
    assert not torch.allclose(one[:, 25], two[:, 25])


def test_order_matters_only_with_positions_or_masks() -> None:
    tokens = torch.tensor([[3, 1, 4, 1]])
    swapped = tokens[:, [1, 0, 2, 3]]
    full: dict[str, Any] = {"segment_lengths": (8,), "dilation_rates": (1,), "num_layers": 1}
    for encoding, is_same in ((None, True), ("rotary", False), ("xpos", False)):
        # One causal layer sees a set of tokens before the last one, unless they have positions.
        model = make_lm(position_encoding=encoding, dtype=torch.float64, **full)
        assert torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1]) is is_same


@pytest.mark.parametrize("rows", [1, 3])
def test_padding_behind_a_row_changes_nothing(rows: int) -> None:
    model = make_lm(dtype=torch.float64)
    lengths = [29, 7, 1][:rows]
    tokens = torch.randint(11, (rows, 29))
    whole = model(tokens)
    for row, length in enumerate(lengths):
        alone = model(tokens[row : row + 1, :length])
        assert_close(whole[row : row + 1, :length], alone, torch.float64)


@contextmanager
def saved_values() -> Iterator[list[int]]:
    """The sizes of all tensors that are kept for backward."""
    sizes: list[int] = []

    def keep(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield sizes


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_checkpoints_give_the_same_gradients(dropout: float) -> None:
    gradients = []
    tokens = torch.randint(11, (2, 29))
    torch.manual_seed(1)
    model = make_lm(dropout=dropout, dtype=torch.float64)
    again = make_lm(dropout=dropout, dtype=torch.float64, checkpoint_activations=True)
    again.load_state_dict(model.state_dict())
    for each in (model, again):
        torch.manual_seed(2)
        with saved_values() as saved:
            loss = F.cross_entropy(each(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        gradients.append((sum(saved), torch.autograd.grad(loss, list(each.parameters()))))
    (plain_size, plain), (checkpointed_size, checkpointed) = gradients
    for a, b in zip(checkpointed, plain, strict=True):
        assert_close(a, b, torch.float64, "gradient")
    assert checkpointed_size < plain_size / 4


@pytest.mark.parametrize("cls", [LongNetLM, LongNet])
def test_builds_without_memory_and_is_initialised_later(cls: type[nn.Module]) -> None:
    options = {"vocab_size": 11, "num_layers": 2} if cls is LongNetLM else {"num_encoder_layers": 3}
    with torch.device("meta"):
        model = cls(**options, **SMALL)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    torch.manual_seed(1)
    usual = cls(**options, **SMALL)
    for (name, a), b in zip(model.state_dict().items(), usual.state_dict().values(), strict=True):
        if b.std() == 0:  # biases of zero and norms of one
            assert torch.equal(a, b), name
        else:  # another draw of the same distribution
            assert not torch.equal(a, b), name
            assert 0.7 < a.std() / b.std() < 1.4, name
            assert a.mean().abs() < 0.2 * b.std(), name


def test_initial_weights_have_the_gain_of_deep_models() -> None:
    """arXiv:2210.06423, and Xavier's deviation sqrt(2 / (fan in + fan out))."""
    options: dict[str, Any] = {"d_model": 128, "nhead": 2, "dim_feedforward": 512}
    model = LongNet(**options, num_encoder_layers=4, num_decoder_layers=3)
    encoder, decoder = math.sqrt(math.log(9) * math.log(8) / 3), math.sqrt(math.log(9))
    for stack, gain in ((model.encoder, encoder), (model.decoder, decoder)):
        layer = stack.layers[0]
        for name, size, factor in (
            ("self_attn.q_proj", 256, 1.0),
            ("self_attn.v_proj", 256, gain),
            ("self_attn.out_proj", 256, gain),
            ("ffn.fc1", 640, gain),
            ("ffn.fc2", 640, gain),
        ):
            deviation = layer.get_submodule(name).weight.std().item()
            assert deviation == pytest.approx(factor * math.sqrt(2 / size), rel=0.05), name
    language = LongNetLM(1000, num_layers=5, **options)
    deviation = language.decoder.layers[4].self_attn.v_proj.weight.std().item()
    assert deviation == pytest.approx(math.sqrt(math.log(10) * 2 / 256), rel=0.05)
    assert language.embed_tokens.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    logits = language(torch.randint(1000, (1, 64)))
    assert 0.5 < logits.std() < 2  # nothing is sure yet
    # Without sub-layer norms there is no gain, unless it is asked for.
    plain = LongNet(**options, sub_layer_norm=False).encoder.layers[0].ffn.fc1.weight.std().item()
    assert plain == pytest.approx(math.sqrt(2 / 640), rel=0.05)
    chosen = LongNet(**options, gamma_init=3.0).encoder.layers[0].ffn.fc1.weight.std().item()
    assert chosen == pytest.approx(3 * math.sqrt(2 / 640), rel=0.05)


def test_compiled_model_matches_in_one_graph_for_all_lengths() -> None:
    model = make_lm(dtype=torch.float64, num_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (29, 41):
            tokens = torch.randint(11, (2, n))
            assert_same(compiled(tokens), model(tokens), model, [])


def test_model_compiled_by_inductor_matches() -> None:
    torch._dynamo.reset()
    model = make_lm(num_layers=1)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n in (29, 41):
            tokens = torch.randint(11, (2, n))
            assert_close(compiled(tokens), model(tokens), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_stays_close(dtype: torch.dtype) -> None:
    exact = make_lm(dtype=torch.float64)
    with torch.no_grad():  # weights that all precisions hold
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(torch.float16).to(torch.bfloat16))
    model = make_lm(dtype=dtype)
    model.load_state_dict(exact.state_dict())
    tokens = torch.randint(11, (2, 29))
    logits = model(tokens)
    assert logits.dtype == dtype
    assert_close(logits, exact(tokens), dtype)


def test_autocast() -> None:
    model = make_lm()
    tokens = torch.randint(11, (2, 29))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    assert_close(logits, model(tokens), torch.bfloat16)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (torch.zeros(2, 5), TypeError, "tokens must be an int64 tensor, got torch.float32"),
        ([[1, 2]], TypeError, "tokens must be an int64 tensor, got list"),
        (torch.zeros(5, dtype=torch.int64), ValueError, r"tokens must be \(b, n\) .* got \(5,\)"),
        (torch.zeros(2, 0, dtype=torch.int64), ValueError, r"b and n at least 1, got \(2, 0\)"),
        (torch.tensor([[0, 11]]), ValueError, "tokens must be from 0 to vocab_size - 1 = 10, got 11"),
        (torch.tensor([[-1, 11]]), ValueError, "tokens must be from 0 to vocab_size - 1 = 10, got -1"),
        (
            torch.zeros(1, 2, dtype=torch.int64, device="meta"),
            ValueError,
            "device of the model, cpu, got meta",
        ),
    ],
)
def test_bad_tokens(tokens: Any, error: type[Exception], message: str) -> None:
    model = make_lm()
    with pytest.raises(error, match=message):
        model(tokens)
    with pytest.raises(error, match=message):
        model.generate(tokens, 1)


def test_bad_sources() -> None:
    model = make()
    with pytest.raises(ValueError, match=r"x must have the shape .* got \(2, 5, 23\)"):
        model(torch.randn(2, 5, 23))
    with pytest.raises(ValueError, match="key_padding_mask must be"):
        model(torch.randn(2, 5, 24), src_key_padding_mask=torch.zeros(2, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match="is_causal must be a bool, got 1"):
        model(torch.randn(2, 5, 24), tgt_is_causal=1)
