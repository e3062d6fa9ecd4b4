"""State dicts of torchscale's LongNet: loaded, they give what a plain transcription of its formulas gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dilated_attention_pytorch.integrations.torchscale import (
    decoder_from_torchscale,
    encoder_from_torchscale,
    load_torchscale_state,
    torchscale_settings,
)
from dilated_attention_pytorch.modules import LongNetDecoder, LongNetEncoder
from integrations.transcription import Settings, State, layer_shapes, random_state, stack
from support.configurations import segment_and_rate

Branch = tuple[int, ...]
TOLERANCE = 1e-9
SCALES = [f"layers.{layer}.self_attn.xpos.scale" for layer in range(2)]
SCALE = (torch.arange(0, 4, 2) + 1.6) / 5.6  # of heads with four features
LIKE_TORCHSCALE: dict[str, Any] = {"dtype": torch.float64, "detach_mixing": True}
SHAPE: dict[str, Any] = {"segment_lengths": (16, 40), "dilation_rates": (1, 4), "dim_feedforward": 24}


def config(part: str, heads: int, segments: Any, rates: Any, **more: Any) -> dict[str, Any]:
    """Settings of torchscale for two layers with four features a head."""
    sizes = {"embed_dim": 4 * heads, "attention_heads": heads, "ffn_embed_dim": 24, "layers": 2}
    own = {f"{part}_{name}": value for name, value in sizes.items()}
    # torchscale takes lists as text.
    return {**own, "segment_length": str(list(segments)), "dilated_ratio": str(list(rates)), **more}


def weights(heads: int, **shape: bool) -> dict[str, Tensor]:
    return random_state(layer_shapes(2, 4 * heads, 24, **shape))


def assert_equal(
    module: LongNetEncoder | LongNetDecoder, state: State, how: Settings, n: int, m: int | None = None
) -> None:
    """Outputs and the gradients of inputs and of all weights are those of the transcription."""
    width = 4 * how.heads
    x = torch.randn(2, n, width, dtype=torch.float64, requires_grad=True)
    memory = [torch.randn(2, m, width, dtype=torch.float64, requires_grad=True)] if m else []
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
    out, expected = module(x, *memory), stack(leaves, "", x, how, *memory)
    assert (out - expected).abs().max() < TOLERANCE
    weight = torch.randn_like(expected)
    ours = dict(module.named_parameters())
    found = torch.autograd.grad((out * weight).sum(), [x, *memory, *(ours[name] for name in leaves)])
    wanted = torch.autograd.grad((expected * weight).sum(), [x, *memory, *leaves.values()])
    for name, a, b in zip(["x", *["memory"] * len(memory), *leaves], found, wanted, strict=True):
        assert (a - b).abs().max() < TOLERANCE * max(1.0, b.abs().max().item()), name


# Segments that do not divide the length, lengths below and above them, heads that are no multiple of rates.
ENCODERS = [
    (1, 4, (8, 32), (1, 2)),
    (2, 3, (2, 5), (2, 4)),
    (7, 5, (4, 100), (1, 3)),
    (63, 3, (16, 40, 70), (1, 2, 4)),
    (64, 4, (16, 64), (1, 4)),
    (501, 6, (30, 121, 1000), (1, 4, 16)),
    (1999, 3, (128, 750), (2, 5)),
    (5000, 2, (64, 333, 1600), (1, 3, 16)),
]


@pytest.mark.parametrize("detach_mixing", [True, False])
@pytest.mark.parametrize(("n", "heads", "segments", "rates"), ENCODERS)
def test_encoder_equals_transcription(
    n: int, heads: int, segments: Branch, rates: Branch, detach_mixing: bool
) -> None:
    state, how = weights(heads), {"dtype": torch.float64, "detach_mixing": detach_mixing}
    encoder = encoder_from_torchscale(config("encoder", heads, segments, rates), state, **how)
    assert_equal(encoder, state, Settings(heads, segments, rates, detach_mixing=detach_mixing), n)


@pytest.mark.parametrize(
    ("n", "heads", "segments", "rates", "base"),
    [
        (1, 4, (8, 32), (1, 2), 64),
        (63, 3, (16, 40), (1, 4), 64),
        (501, 5, (30, 121, 1000), (1, 4, 16), 64),
        (700, 2, (64, 333), (1, 3), None),
        (3001, 2, (128, 640), (1, 8), 64),
    ],
)
def test_causal_decoder_equals_transcription(
    n: int, heads: int, segments: Branch, rates: Branch, base: int | None
) -> None:
    state, positions, constants = weights(heads), {"xpos_rel_pos": False}, {}
    if base is not None:
        positions = {"xpos_rel_pos": True, "xpos_scale_base": base}
        constants = dict.fromkeys(SCALES, SCALE)
    told = config("decoder", heads, segments, rates, **positions)
    decoder = decoder_from_torchscale(told, {**state, **constants}, **LIKE_TORCHSCALE)
    assert_equal(decoder, state, Settings(heads, segments, rates, True, xpos_base=base), n)


def test_other_layers_equal_transcription() -> None:
    """With cross attention; and with relu, another epsilon and no sub-layer norms."""
    state, branches = weights(3, cross=True), ((16, 40), (1, 4))
    how = {"cross_attention": "dense", **LIKE_TORCHSCALE}
    decoder = decoder_from_torchscale(config("decoder", 3, *branches), state, **how)
    assert_equal(decoder, state, Settings(3, *branches, True), 63, m=29)
    state = weights(3, norms=False)
    more = {"subln": False, "activation_fn": "relu", "layernorm_eps": 1e-3}
    encoder = encoder_from_torchscale(config("encoder", 3, *branches, **more), state, **LIKE_TORCHSCALE)
    assert_equal(encoder, state, Settings(3, *branches, eps=1e-3, activation="relu"), 63)


def test_fused_projections_take_the_separate_ones() -> None:
    state, branches = weights(3), ((16, 40), (1, 4))
    how = {"dtype": torch.float64, "kind": "improved"}
    encoder = encoder_from_torchscale(config("encoder", 3, *branches), state, **how)
    x = torch.randn(2, 63, 12, dtype=torch.float64)
    assert (encoder(x) - stack(state, "", x, Settings(3, *branches))).abs().max() < TOLERANCE


@settings(max_examples=40)
@given(
    n=st.integers(1, 200),
    heads=st.integers(1, 7),
    branches=st.lists(segment_and_rate(250, 9), min_size=1, max_size=3),
    is_causal=st.booleans(),
)
def test_any_pattern_equals_transcription(
    n: int, heads: int, branches: list[tuple[int, int]], is_causal: bool
) -> None:
    torch.manual_seed(n)
    pattern, state = (heads, *zip(*branches, strict=True)), weights(heads)
    make = decoder_from_torchscale if is_causal else encoder_from_torchscale
    told = config("decoder" if is_causal else "encoder", *pattern)
    x = torch.randn(1, n, 4 * heads, dtype=torch.float64)
    expected = stack(state, "", x, Settings(*pattern, is_causal))
    assert (make(told, state, dtype=torch.float64)(x) - expected).abs().max() < TOLERANCE


def encoder_of(**options: Any) -> LongNetEncoder:
    return LongNetEncoder(12, 3, 2, **{**SHAPE, "head_offsets": "blocked", "tail": "phantom", **options})


def test_prefixes_and_wrappers_are_seen_through_and_the_rest_is_reported() -> None:
    state = random_state(layer_shapes(2, 12, 24), torch.float32)
    wrapped = {
        f"module.encoder.{name}".replace("layers.1.", "layers.1._orig_mod."): x for name, x in state.items()
    }
    wrapped |= {"module.decoder.layer_norm.weight": torch.zeros(3), "module.encoder.version": torch.zeros(1)}
    wrapped["module.encoder.embed_tokens.weight"] = torch.zeros(5, 12)
    encoder = encoder_of()
    report = load_torchscale_state(encoder, wrapped, prefix="encoder.", ignore=["embed_tokens."])
    assert report.missing == report.unexpected == ()
    assert report.dropped == ("version",)
    assert report.outside == ("module.decoder.layer_norm.weight", "encoder.embed_tokens.weight")
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_names_that_differ_are_reported_and_by_default_an_error_that_changes_nothing() -> None:
    state = random_state(layer_shapes(2, 12, 24), torch.float32)
    state["layers.7.odd"] = state.pop("layers.1.ffn.fc2.bias")
    encoder = encoder_of()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    message = r"layers\.1\.ffn\.fc2\.bias is missing; layers\.7\.odd is unexpected"
    with pytest.raises(ValueError, match=message):
        load_torchscale_state(encoder, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
    report = load_torchscale_state(encoder, state, strict=False)
    assert report.missing == ("layers.1.ffn.fc2.bias",)
    assert report.unexpected == ("layers.7.odd",)
    after = encoder.state_dict()
    assert torch.equal(after["layers.1.ffn.fc2.bias"], before["layers.1.ffn.fc2.bias"])
    assert torch.equal(after["layers.1.ffn.fc2.weight"], state["layers.1.ffn.fc2.weight"])


def test_weights_keep_the_dtype_of_the_module() -> None:
    encoder, state = encoder_of(dtype=torch.bfloat16), weights(3)
    load_torchscale_state(encoder, state)
    name = "layers.1.self_attn.q_proj.weight"
    assert torch.equal(encoder.state_dict()[name], state[name].bfloat16())


def test_a_decoder_needs_no_phantom_tail_and_xpos_is_checked() -> None:
    options = {"cross_attention": None, "head_offsets": "blocked", **SHAPE}
    decoder, turned = (LongNetDecoder(12, 3, 2, **options, position_encoding=x) for x in (None, "xpos"))
    state, scale = weights(3), SCALES[0]
    assert load_torchscale_state(decoder, state).missing == ()
    for module, given_scale, message in (
        (decoder, torch.ones(2), r'needs position_encoding="xpos", got layers\.0'),
        (turned, torch.ones(3), r"must be \(2,\) for heads of 4 features, got \(3,\)"),
        (turned, torch.ones(2), r"must be \(i \+ 0.4 d\) / \(1.4 d\)"),
    ):
        with pytest.raises(ValueError, match=message):
            load_torchscale_state(module, {**state, scale: given_scale})
    right = dict.fromkeys(SCALES, SCALE.half())
    assert load_torchscale_state(turned, {**state, **right}).dropped == tuple(SCALES)


TWICE = {start + name: x for name, x in weights(3).items() for start in ("encoder.", "decoder.")}
BLOCKS = LongNetEncoder(12, 3, 2, kind="block_sparse", sparse_config={"block_size": 8}, **SHAPE)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"module": torch.nn.Linear(2, 2)}, TypeError, "a LongNetEncoder or a LongNetDecoder, got Linear"),
        ({"state": []}, TypeError, "state must be a state dict of tensors, got list"),
        ({"strict": "no"}, TypeError, "strict must be a bool"),
        ({"ignore": "embed"}, TypeError, "ignore must be a sequence of strings, got 'embed'"),
        ({"ignore": [5]}, TypeError, r"ignore must be a sequence of strings, got \[5\]"),
        ({"state": {5: torch.zeros(1)}}, TypeError, "state must have strings as names, got 5"),
        ({"prefix": None}, TypeError, "prefix must be a string"),
        ({"more": {"module.layer_norm.bias": torch.zeros(12)}}, ValueError, r"got layer_norm\.bias twice"),
        ({"more": {"embed_tokens.weight": torch.zeros(5, 12)}}, ValueError, "see ignore for 'embed_tokens"),
        ({"state": weights(3, norms=False)}, ValueError, "needs sub_layer_norm=False"),
        ({"state": random_state(layer_shapes(4, 12, 24))}, ValueError, "and 20 more"),
        ({"state": TWICE}, ValueError, r"layers start with 'decoder\.', 'encoder\.': see prefix"),
        *(
            ({"strict": False, "more": {name: torch.zeros(2)}}, ValueError, f"must not have .*{fact}.*{name}")
            for name, fact in (
                ("relative_position.relative_attention_bias.weight", "relative position bias"),
                ("layers.1.moe_layer.gate.wg.weight", "mixture of experts"),
                ("layers.1.self_attn.q_proj.A.weight", "multiway"),
                ("layers.1.ffn.B.fc1.bias", "multiway"),
            )
        ),
        (
            {"strict": False, "more": {"layers.0.ffn.fc1.weight": torch.zeros(25, 12)}},
            ValueError,
            r"layers\.0\.ffn\.fc1\.weight must be \(24, 12\), got \(25, 12\)",
        ),
        # Modules that attend otherwise, or have no memory.
        (
            {"module": {"head_offsets": "interleaved"}},
            ValueError,
            "need .*='blocked'.*got head_offsets='int",
        ),
        ({"module": {"tail": "exact"}}, ValueError, "got tail='exact' in layer 0"),
        ({"module": {"head_mixing": "grouped"}}, ValueError, "got head_mixing='grouped'"),
        ({"module": {"position_encoding": "xpos"}}, ValueError, '"xpos" needs .*without XPOS'),
        ({"module": {"device": "meta"}}, ValueError, "must have memory to be copied to, got the meta device"),
        ({"module": BLOCKS}, ValueError, "dilated attention, got a BlockSparse"),
    ],
    ids=lambda value: "",
)
def test_errors_say_what_a_checkpoint_needs(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = {"module": {}, "state": weights(3), **change}
    call["module"] = encoder_of(**call["module"]) if isinstance(call["module"], dict) else call["module"]
    call["state"] = {**call["state"], **more} if (more := call.pop("more", None)) else call["state"]
    with pytest.raises(error, match=message):
        load_torchscale_state(**call)


def test_settings_are_translated_and_absent_ones_are_those_of_torchscale() -> None:
    branches = {"segment_length": "[1024, 2048]", "dilated_ratio": [1, 2]}
    found = torchscale_settings({**branches, "block_shift": True, "flash_attention": True})
    assert found["segment_lengths"] == (1024, 2048)
    assert found["dilation_rates"] == (1, 2)
    sizes = [found[name] for name in ("d_model", "nhead", "dim_feedforward", "num_layers")]
    assert sizes == [768, 12, 3072, 12]
    assert found["normalize_output"] is found["sub_layer_norm"] is True
    other = {"decoder_layers": 3, "encoder_layers": 5, "xpos_rel_pos": True, "normalize_output": False}
    decoder = torchscale_settings({**branches, **other}, "decoder")
    assert decoder["num_layers"] == 3
    assert decoder["position_encoding"] == "xpos"
    assert "normalize_output" not in decoder
    assert torchscale_settings({**branches, **other})["normalize_output"] is False
    # torchscale's sub-layer norms imply norms before the residual.
    assert torchscale_settings({**branches, "encoder_normalize_before": False})["sub_layer_norm"] is True


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"deepnorm": True}, "deepnorm must be False, these layers have no residuals scaled by DeepNorm"),
        ({"moe_freq": 2}, "moe_freq must be 0, .* no mixtures of experts, got 2"),
        ({"multiway": True}, "multiway must be False"),
        ({"layernorm_embedding": True}, "no norm of the embeddings"),
        ({"no_scale_embedding": False}, r"embeddings scaled by sqrt\(embed_dim\)"),
        ({"rel_pos_buckets": 32, "max_rel_pos": 128}, "relative position bias, got rel_pos_buckets=32"),
        ({"rel_pos_buckets": None}, "rel_pos_buckets must be an integer, got None"),
        ({"rel_pos_buckets": 32, "max_rel_pos": "128"}, "max_rel_pos must be an integer, got '128'"),
        ({"subln": False, "encoder_normalize_before": False}, "got encoder_normalize_before=False"),
        ({"dilated_rates": [1]}, r"settings of torchscale's LongNet only, got \['dilated_rates'\]"),
        ({"segment_length": "__import__('os').getcwd()"}, 'must be a list of integers, got "__imp'),
        ({"segment_length": None}, "segment_length must be a list of integers, got None"),
        ({"dilated_ratio": [1, 2.5]}, r"dilated_ratio must be a list of integers, got \[1, 2.5\]"),
        ({"dilated_ratio": []}, r"dilated_ratio must be a list of integers, got \[\]"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torchscale_settings({"segment_length": [8], "dilated_ratio": [1], **more})


@pytest.mark.parametrize(
    ("given_config", "part", "message"),
    [
        ("[1]", "encoder", "config must be a mapping of torchscale's settings, got str"),
        ({}, "both", "part must be one of 'encoder', 'decoder', got 'both'"),
        ({5: 1, "vocab_size": 2}, "encoder", "config must have strings as names, got 5"),
        *(
            ({name: "False"}, "encoder", f"{name} must be a bool, got 'False'")
            for name in ("subln", "checkpoint_activations", "normalize_output", "xpos_rel_pos")
        ),
        ({"encoder_normalize_before": "False"}, "encoder", "encoder_normalize_before must be a bool"),
        ({"decoder_normalize_before": "False"}, "encoder", "decoder_normalize_before must be a bool"),
    ],
)
def test_settings_of_another_type_or_part_are_errors(given_config: Any, part: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        torchscale_settings(given_config, part)


def test_the_transcription_tells_wrong_formulas_apart() -> None:
    """Each choice that sets torchscale apart changes its result, so agreeing with it says something."""
    state = weights(4)
    x = torch.randn(1, 63, 16, dtype=torch.float64)
    how = Settings(4, (16, 40), (1, 2))
    expected = stack(state, "", x, how)
    shape = {"segment_lengths": (16, 40), "dilation_rates": (1, 2), "dim_feedforward": 24}
    for options in ({"head_offsets": "interleaved"}, {"tail": "exact"}, {"layer_norm_eps": 1e-3}):
        pattern = {"head_offsets": "blocked", "tail": "phantom", **options}
        module = LongNetEncoder(16, 4, 2, **shape, **pattern, dtype=torch.float64)
        module.load_state_dict(state)
        assert (module(x) - expected).abs().max() > 1e-5, options
    assert (stack(state, "", x, replace(how, xpos_base=64)) - expected).abs().max() > 1e-5
