"""Models of transformers with dilated attention: equal to sdpa, to the reference, and to rows alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, strategies as st
from torch import Tensor, nn

from dilated_attention_pytorch import dilated_attention
from dilated_attention_pytorch.integrations import transformers as integration
from dilated_attention_pytorch.integrations.transformers import (
    dilated_attention_forward,
    dilated_attention_mask,
    load,
    register,
    use_dilated_attention,
)
from dilated_attention_pytorch.reference import dilated_attention_reference
from dilated_attention_pytorch.spec import branches_for
from support.programs import run_program
from support.tolerances import assert_close, assert_same_gradients

FULL = {"segment_lengths": [64], "dilation_rates": [1]}
DILATED = {"segment_lengths": [4, 16, 64], "dilation_rates": [1, 2, 4]}
VOCAB = 61
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # logits and attention that are far from uniform
    "pad_token_id": 0,
    "eos_token_id": None,
}
PADDED = torch.tensor([[0] * 5 + [1] * 14, [1] * 19, [0] * 12 + [1] * 7])
MASKS: dict[str, Tensor | None] = {
    "none": None,
    "left": PADDED,
    "right": PADDED.flip(1),
    "both": torch.stack([PADDED[0], PADDED.flip(1)[0], PADDED[0] * PADDED.flip(1)[2]]),
}


Make = Callable[..., transformers.PreTrainedModel]


def maker(family: str, head: str = "ForCausalLM", **sizes: Any) -> Make:
    def make(**options: Any) -> transformers.PreTrainedModel:
        config = getattr(transformers, f"{family}Config")(**{**TINY, **sizes, **options})
        return getattr(transformers, family.removesuffix("Text") + head)(config)

    return make


LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None}
llama = maker("Llama")
bert = maker("Bert", "ForMaskedLM", **QUIET)
DECODERS: dict[str, Make] = {
    "llama": llama,
    "llama gqa": maker("Llama", num_key_value_heads=2),
    "qwen3": maker("Qwen3", num_key_value_heads=2, head_dim=12),
    "deepseek": maker("DeepseekV3", first_k_dense_replace=2, **LATENT),
    "gpt2": maker("GPT2", "LMHeadModel", scale_attn_by_inverse_layer_idx=True, **NO_DROPOUT),
}
ENCODERS = {"bert": bert, "roberta": maker("Roberta", "ForMaskedLM", **QUIET)}
MODELS = {**DECODERS, **ENCODERS}


def made(make: Make, settings: dict[str, Any] | None = None, **options: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = make(**options).eval()
    if settings is not None:
        use_dilated_attention(model, settings)
    return model


def twins(make: Make, settings: dict[str, Any]) -> list[transformers.PreTrainedModel]:
    """The same model with sdpa and with dilated attention."""
    return [made(make, attn_implementation="sdpa"), made(make, settings)]


def token_places(ids: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones_like(ids).bool() if mask is None else mask.bool()


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def assert_near_gradients(actual: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> None:
    for a, b in zip(actual, expected, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            assert_near(a, b, 1e-4 * max(1.0, b.abs().max().item()))


def tokens(b: int, n: int) -> Tensor:
    return torch.randint(1, VOCAB, (b, n), generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("model", MODELS)
def test_one_full_branch_is_sdpa(model: str, mask: str) -> None:
    given, ids = MASKS[mask], tokens(3, 19)
    is_token = token_places(ids, given)
    results = []
    for each in twins(MODELS[model], FULL):
        out = each(ids, attention_mask=given, labels=ids.masked_fill(~is_token, -100))
        out.loss.backward()
        gradients = [p.grad for p in each.parameters() if p.grad is not None]
        results.append((out.logits[is_token], torch.cat([g.flatten() for g in gradients])))
    (expected, gradient), (actual, dilated_gradient) = results
    assert expected.abs().max() > 1.0
    assert_near(actual, expected)
    assert_near(dilated_gradient, gradient, 1e-4 * gradient.abs().max().item())


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize("model", DECODERS)
def test_one_full_branch_generates_the_tokens_of_sdpa(model: str, mask: str, options: dict[str, Any]) -> None:
    ids, how = tokens(3, 19), {"do_sample": False, "max_new_tokens": 12, "disable_compile": True, **options}
    expected, actual = (
        each.generate(ids, attention_mask=MASKS[mask], **how) for each in twins(DECODERS[model], FULL)
    )
    assert expected.shape == (3, 31)
    assert len(expected[:, 19:].unique()) > 5
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "use", [{}, {"cache_implementation": "static"}, {"use_cache": False}, {"prefill_chunk_size": 5}], ids=str
)
@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize("model", DECODERS)
def test_dilated_generation_is_the_full_forward(model: str, mask: str, use: dict[str, Any]) -> None:
    each, ids, given = made(DECODERS[model], DILATED), tokens(3, 19), MASKS[mask]
    how = {"do_sample": False, "max_new_tokens": 20, "disable_compile": True, **use}
    out = each.generate(ids, attention_mask=given, output_logits=True, return_dict_in_generate=True, **how)
    steps = torch.stack(out.logits, 1)
    starts = [0] * 3 if given is None else (given == 0).sum(1).tolist()
    for row, start in enumerate(starts):
        alone = each(out.sequences[row : row + 1, start:]).logits[0, 18 - start : -1]
        assert_near(steps[row], alone)
        assert torch.equal(out.sequences[row, 19:], alone.argmax(-1))
    sdpa = made(DECODERS[model], attn_implementation="sdpa")
    assert (sdpa(out.sequences).logits[:, 18:-1] - steps).abs().max() > 1e-2  # dilation does something


def oracle(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any) -> Any:
    """The reference as an attention function, for rows without padding."""
    assert mask is None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    how = {"is_causal": module.is_causal, "scale": kwargs["scaling"]}
    return dilated_attention_reference(q, k, v, **DILATED, **how), None


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("model", MODELS)
def test_dilated_rows_are_those_of_the_reference_alone(model: str, mask: str) -> None:
    if "oracle" not in transformers.AttentionInterface().valid_keys():
        transformers.AttentionInterface.register("oracle", oracle)  # without a mask function: gets no mask
    ids, given = tokens(3, 19), MASKS[mask]
    is_token = token_places(ids, given)
    dilated, exact = made(MODELS[model], DILATED), made(MODELS[model], attn_implementation="oracle")
    positions = (is_token.cumsum(1) - 1).clamp(min=0) + (1 if model == "roberta" else 0)
    out = dilated(ids, attention_mask=given, position_ids=positions).logits
    rows = [exact(ids[row, is_token[row]][None]).logits[0] for row in range(3)]
    assert_near(out[is_token], torch.cat(rows))
    weight = torch.randn_like(out[is_token])
    gradients = []
    for each, logits in ((dilated, out[is_token]), (exact, torch.cat(rows))):
        (logits * weight).sum().backward()
        gradients.append([p.grad for p in each.parameters()])
    assert_near_gradients(*gradients)


def test_checkpointed_layers_have_the_same_gradients() -> None:
    ids, gradients = tokens(2, 33), []
    for checkpointed in (False, True):
        each = made(llama, DILATED).train()
        if checkpointed:
            each.gradient_checkpointing_enable()
        each(ids, labels=ids, attention_mask=PADDED[:2, :1].expand(2, 33) | 1).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in each.parameters()]))
    assert torch.equal(*gradients)


# What torch's compiler says to itself where a graph ends, as it does at a mask.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_model_is_the_eager_one() -> None:
    each = made(llama, DILATED, num_hidden_layers=1)
    compiled = torch.compile(each, backend="eager")
    for n, padding in ((19, 0), (33, 6)):
        mask = torch.ones(2, n, dtype=torch.long)
        mask[0, :padding] = 0
        expected, actual = (model(tokens(2, n), attention_mask=mask).logits for model in (each, compiled))
        assert_near(actual, expected, 1e-5)


def on_tokens(model: Any, **options: Any) -> Tensor:
    """Logits of three rows with padding before them, at the tokens."""
    logits: Tensor = model(tokens(3, 19), attention_mask=PADDED, **options).logits
    return logits[PADDED.bool()]


def test_half_precision_and_autocast_run() -> None:
    exact = made(llama, DILATED)
    expected = on_tokens(exact)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = on_tokens(exact)
    for actual in (mixed, on_tokens(made(llama, DILATED).bfloat16())):
        assert (actual - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_bidirectional_call_of_a_decoder() -> None:
    expected, actual = (on_tokens(each, is_causal=False) for each in twins(llama, FULL))
    assert_near(actual, expected)


def test_packed_documents_are_those_alone() -> None:
    each, ids, lengths = made(llama, DILATED), tokens(2, 19), ((19,), (7, 1, 11))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    out = each(ids, position_ids=positions, use_cache=False).logits
    for row, parts in enumerate(lengths):
        alone = [each(part).logits[0] for part in ids[row : row + 1].split(parts, 1)]
        assert_near(out[row], torch.cat(alone), 1e-5)
    bounds = torch.tensor([0, 7, 8, 19], dtype=torch.int32)  # of the last row
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "position_ids": positions[1:]}
    assert_near(each(ids[1:], use_cache=False, **packed).logits[0], torch.cat(alone), 1e-5)


def test_saved_model_comes_back_dilated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each, ids, auto = made(llama, DILATED), tokens(1, 19), transformers.AutoModelForCausalLM
    expected = each(ids).logits
    each.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path).eval()
    assert again.config.dilated_attention == DILATED
    assert torch.equal(again(ids).logits, expected)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(load(auto, tmp_path / "again").eval()(ids).logits, expected)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.dilated_attention = FULL
    other = auto.from_pretrained(tmp_path, config=config, attn_implementation="dilated").eval()
    assert not torch.equal(other(ids).logits, expected)
    dense = auto.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert torch.equal(dense(ids).logits, made(llama, attn_implementation="sdpa")(ids).logits)
    by_config = made(llama, attn_implementation="dilated", dilated_attention=DILATED)
    assert torch.equal(by_config(ids).logits, expected)
    by_config.save_pretrained(tmp_path / "made")
    assert torch.equal(auto.from_pretrained(tmp_path / "made").eval()(ids).logits, expected)
    made(llama).save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="settings must be given where a model was saved without them"):
        load(auto, tmp_path / "plain")
    assert torch.equal(load(auto, tmp_path / "plain", DILATED).eval()(ids).logits, expected)
    monkeypatch.delitem(transformers.AttentionInterface._global_mapping, "dilated")
    with pytest.raises(ValueError, match='attn_implementation="dilated"` is not supported'):
        auto.from_pretrained(tmp_path)  # where register() was forgotten


def test_branches_for_a_length() -> None:
    each, ids = made(llama, {"max_length": 4096}), tokens(1, 19)
    assert each.config.dilated_attention == {"max_length": 4096}
    lists = dict(zip(("segment_lengths", "dilation_rates"), branches_for(4096, 4), strict=True))
    assert torch.equal(each(ids).logits, made(llama, lists)(ids).logits)
    both = made(llama, {**DILATED, "max_length": 4096})  # lists win
    assert torch.equal(both(ids).logits, made(llama, DILATED)(ids).logits)
    # The length of the config is the last resort.
    each = made(llama, {}, max_position_embeddings=4096)
    assert each.config.dilated_attention == {"max_length": 4096}
    expected = each(ids).logits
    each.config.dilated_attention = {}
    assert torch.equal(each(ids).logits, expected)
    x, part = torch.randn(1, 4, 10, 8), layer()
    part.config.dilated_attention = {}
    with pytest.raises(ValueError, match="must include max_length, or segment_lengths and dilation_rates"):
        dilated_attention_forward(part, x, x, x, None)


SHORT = {"segment_lengths": [4, 16], "dilation_rates": [1, 2]}


def test_isolated_segments_are_told_once_a_module_and_length_class() -> None:
    each = made(llama, SHORT, num_hidden_layers=1)
    message = r"^19 tokens exceed the longest segment, 16: .* never meet\. Give max_length=19 .* allow_isol"
    with pytest.warns(UserWarning, match=message):
        each(tokens(1, 19))
    each(tokens(1, 20))  # warnings are errors here
    padded = torch.ones(2, 40)
    padded[:, 16:] = 0
    each(tokens(2, 40), attention_mask=padded)  # 16 tokens are left
    with pytest.warns(UserWarning, match="40 tokens exceed the longest segment, 16"):
        expected = each(tokens(1, 40)).logits
    quiet = made(llama, {**SHORT, "allow_isolated_segments": True}, num_hidden_layers=1)
    assert torch.equal(quiet(tokens(1, 40)).logits, expected)


# The attention function by itself, in float64, against the reference of each row's tokens alone.


def layer(is_causal: bool = True, **settings: Any) -> Any:
    config = SimpleNamespace(dilated_attention={**DILATED, "allow_isolated_segments": True, **settings})
    return SimpleNamespace(config=config, is_causal=is_causal)


def expected_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """(b, N, h, d) by the reference over the tokens of each row, zeros elsewhere.

    A padded first place that sees both ways takes the place of the first token.
    """
    rows = []
    for row, is_token in enumerate(mask):
        out = torch.zeros_like(q[row])
        if is_token.any():
            own_q, own_k, own_v = (x[row, is_token][None] for x in (q, k, v))
            result = dilated_attention_reference(own_q, own_k, own_v, **options)[0]
            out = out.index_put((is_token.nonzero()[:, 0],), result)
            if not is_token[0] and not options["is_causal"]:
                own_q = torch.cat([q[row, None, :1], own_q[:, 1:]], 1)
                first = dilated_attention_reference(own_q, own_k, own_v, **options)[0, :1]
                out = torch.cat([first, out[1:]])
        rows.append(out)
    return torch.stack(rows)


@given(data=st.data())
def test_function_is_the_reference_of_tokens(data: st.DataObject) -> None:
    b, total, h_kv = (data.draw(st.integers(*bounds)) for bounds in ((1, 3), (1, 40), (1, 2)))
    n = data.draw(st.integers(1, total))
    causal = n < total or data.draw(st.booleans())
    how = {
        "segment_lengths": data.draw(st.lists(st.integers(4, 50), min_size=2, max_size=2)),
        "dilation_rates": data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2)),
        "head_mixing": data.draw(st.sampled_from(["all", "grouped"])),
        "head_offsets": data.draw(st.sampled_from(["interleaved", "blocked"])),
        "tail": data.draw(st.sampled_from(["exact", "phantom"])),
    }
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    q, k, v = (
        torch.randn(b, total, h, 3, dtype=torch.float64, generator=rng).requires_grad_()
        for h in (2 * h_kv, h_kv, h_kv)
    )
    shares = data.draw(st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.1]), min_size=b, max_size=b))
    mask = torch.rand(b, total, generator=rng) < torch.tensor(shares)[:, None]
    expected = expected_rows(q, k, v, mask, is_causal=causal, scale=0.4, **how)[:, -n:]
    call = [x.transpose(1, 2) for x in (q[:, -n:], k, v)]
    actual, weights = dilated_attention_forward(layer(causal, **how), *call, mask, scaling=0.4)
    assert weights is None
    assert_close(actual, expected, torch.float64)
    if mask.any():
        assert_same_gradients(actual, expected, (q, k, v), torch.float64)
    with torch.no_grad():  # new tokens alone
        actual, _ = dilated_attention_forward(layer(causal, **how), *call, mask, scaling=0.4)
    assert_close(actual, expected, torch.float64)


def test_new_tokens_read_no_unused_room_of_a_static_cache() -> None:
    q, k, v = (torch.randn(2, 4, 30, 8) for _ in range(3))
    k[:, :, 25:], v[:, :, 25:] = torch.nan, torch.nan
    mask = torch.ones(2, 25, dtype=torch.bool)
    with torch.no_grad():
        actual, _ = dilated_attention_forward(layer(), q[:, :, 22:25], k, v, mask)
    full = (x[:, :, :25].transpose(1, 2) for x in (q, k, v))
    torch.testing.assert_close(actual, dilated_attention(*full, **DILATED, is_causal=True)[:, 22:])


@pytest.mark.parametrize("n", [3, 20])
def test_dropout_acts(n: int) -> None:
    q, k, v = (torch.randn(1, 4, 20, 8) for _ in range(3))
    plain, kept, dropped = (
        dilated_attention_forward(layer(), q[:, :, -n:], k, v, None, dropout=p)[0] for p in (0.0, 0.5, 1.0)
    )
    assert not dropped.any()
    assert not torch.allclose(plain, kept)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ([64], TypeError, "settings of dilated attention must be a dict, got list"),
        ({"max_length": 0}, ValueError, "max_length must be a positive integer, got 0"),
        ({"max_length": "8"}, ValueError, "max_length must be a positive integer, got '8'"),
        ({**FULL, "max_length": 0}, ValueError, "max_length must be a positive integer, got 0"),
        ({**FULL, "allow_isolated_segments": 1}, TypeError, "allow_isolated_segments must be"),
        ({**FULL, "sliding_layers": "mine"}, ValueError, "sliding_layers must be one of 'refuse', 'own'"),
        ({"segment_lengths": [4]}, ValueError, "got no dilation_rates"),
        ({**FULL, "dropout": 1.0, "scale": 1.0}, ValueError, "no 'dropout', 'scale'. .* among .* max_length"),
        ({"segment_length": [4]}, ValueError, r"no 'segment_length'\. Did you mean segment_lengths\?$"),
        ({**FULL, "segment_lengths": [0]}, ValueError, r"segment_lengths must be positive, got \(0,\)"),
        ({**FULL, "dilation_rates": [1, 2]}, ValueError, "must have the same length, got 1 and 2"),
        ({**FULL, "kernel": "fast"}, ValueError, "kernel must be"),
        ({**FULL, "tail": "none"}, ValueError, "tail must be one of"),
    ],
    ids=str,
)
def test_bad_settings(settings: Any, error: type[Exception], message: str) -> None:
    each = made(llama)
    with pytest.raises(error, match=message):
        use_dilated_attention(each, settings)
    assert each.config._attn_implementation == "sdpa"
    register()
    each.set_attn_implementation("dilated")
    each.config.dilated_attention = settings
    with pytest.raises(error, match=message):
        each(tokens(1, 5))


def test_settings_and_models_of_transformers_are_needed() -> None:
    register()
    message = r"needs its settings, as in config.dilated_attention = .* LlamaConfig"
    with pytest.raises(ValueError, match=message):
        made(llama, attn_implementation="dilated")(tokens(1, 5))
    with pytest.raises(TypeError, match="model must be a PreTrainedModel of transformers, got Linear"):
        use_dilated_attention(nn.Linear(2, 2), FULL)


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "my_sdpa", "a/b", "", 3])
def test_bad_names(name: Any) -> None:
    with pytest.raises(ValueError, match="name must"):
        register(name)
    assert transformers.AttentionInterface()["sdpa"] is not dilated_attention_forward


def test_registering_twice_and_under_another_name() -> None:
    for name in ("dilated", "dilated", "longnet"):
        register(name)
    each, ids = made(llama, attn_implementation="longnet", dilated_attention=DILATED), tokens(1, 19)
    assert torch.equal(each(ids).logits, made(llama, DILATED)(ids).logits)


mistral = maker("Mistral", num_key_value_heads=2, sliding_window=8)
gemma3 = maker("Gemma3Text", head_dim=8, num_key_value_heads=2, sliding_window=6)
modernbert = maker("ModernBert", "ForMaskedLM", local_attention=6, **QUIET)
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("make", [modernbert, gemma3])
def test_sliding_layers_keep_their_own_attention_if_asked(make: Make, mask: str) -> None:
    ids, given = tokens(3, 19), MASKS[mask]
    is_token = token_places(ids, given)
    for first in ("full_attention", "sliding_attention"):  # masks of layers that are not there harm nobody
        kinds = [first, "full_attention"]
        eager = made(make, layer_types=kinds, attn_implementation="eager")
        each = made(make, layer_types=kinds)
        use_dilated_attention(each, {**FULL, "sliding_layers": "own"})
        expected, actual = (model(ids, attention_mask=given).logits[is_token] for model in (eager, each))
        assert_near(actual, expected)
        use_dilated_attention(each, FULL)
        if first == "full_attention":
            assert torch.equal(each(ids, attention_mask=given).logits[is_token], actual)
        else:
            with pytest.raises(ValueError, match=r'a sliding window .* by "sliding_layers": "own"'):
                each(ids, attention_mask=given)
        use_dilated_attention(each, {**DILATED, "sliding_layers": "own"})
        assert (each(ids, attention_mask=given).logits[is_token] - expected).abs().max() > 1e-2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_mixed_model_generates_the_tokens_of_sdpa(cache: str) -> None:
    ids, kinds = tokens(2, 19), ["sliding_attention", "full_attention"]
    sdpa, each = (made(gemma3, layer_types=kinds, attn_implementation="sdpa") for _ in range(2))
    use_dilated_attention(each, {**FULL, "sliding_layers": "own"})
    how = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True, "cache_implementation": cache}
    expected, actual = (
        model.generate(ids, attention_mask=MASKS["left"][:2], **how) for model in (sdpa, each)
    )
    assert torch.equal(actual, expected)


SIZES = {"layers": 1, "attention_heads": 4, "ffn_dim": 48}
BART = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in SIZES.items()}
CROSSING = maker("Bert", "ForMaskedLM", is_decoder=True, add_cross_attention=True, **QUIET)
OF_PAIRS = r"bool with one entry a token, \(b, N\), .* of shape \(1, 1, 5, 5\)"


@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        (mistral, {}, "cannot honour a sliding window .* switch it off in the config"),
        (maker("Gemma2", head_dim=8), {}, "cannot honour a sliding window"),
        (maker("T5", "EncoderModel", **T5), {}, "cannot honour a position bias: position_bias must be None"),
        (CROSSING, {"encoder_hidden_states": torch.randn(1, 5, 32)}, "cross attention, got BertCrossAtt"),
        (CROSSING, {"encoder_hidden_states": torch.randn(1, 7, 32)}, "cross attention, got BertCrossAtt"),
        (maker("Bart", "Model", **BART), {"decoder_input_ids": tokens(1, 5)}, "has no cross attention"),
        (maker("Bart", "Model", **BART), {"decoder_input_ids": tokens(1, 7)}, "has no cross attention"),
        (llama, {"attention_mask": torch.ones(1, 1, 5, 5)}, OF_PAIRS),
        (llama, {"attention_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}, OF_PAIRS),
    ],
    ids=lambda value: "",
)
def test_what_models_ask_for_is_refused(make: Make, call: dict[str, Any], message: str) -> None:
    each = made(make, DILATED)
    with pytest.raises(ValueError, match=message):
        each(tokens(1, 5), **call)


ROW, PACKED = torch.randn(1, 4, 10, 8), torch.tensor([0, 4, 10])


def bounds(queries: Any, keys: Any = PACKED) -> dict[str, Any]:
    return {"cu_seq_lens_q": queries, "cu_seq_lens_k": keys}


def same_bounds(*values: int) -> dict[str, Any]:
    return bounds(torch.tensor(values), torch.tensor(values))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"softcap": 50.0}, ValueError, "soft capping of the scores: softcap must be None, got 50.0"),
        ({"s_aux": torch.ones(4)}, ValueError, r"attention sinks: s_aux must be None, .* shape \(4,\)"),
        ({"sliding_window": 8}, ValueError, "a sliding window .*: sliding_window must be None, got 8"),
        ({"cache": object()}, ValueError, "a paged cache: cache must be None"),
        ({"indices": torch.ones(4)}, ValueError, "a model that selects its own keys"),
        ({"block_indices": torch.ones(4)}, ValueError, "a model that selects its own blocks of keys"),
        ({"output_attentions": True}, ValueError, "attention weights as an output"),
        *(
            ({"attention_mask": mask}, ValueError, r"attention_mask must be bool .* for \(1, 10\) keys")
            for mask in (torch.ones(1, 10).long(), torch.ones(1, 10), torch.ones(1, 11).bool())
        ),
        (bounds(PACKED, torch.tensor([0, 5, 10])), ValueError, "must equal cu_seq_lens_k, .* got others"),
        (bounds(PACKED, None), TypeError, "cu_seq_lens_k must be an int32 or int64 tensor, got NoneType"),
        (bounds(None), TypeError, "cu_seq_lens_q must be an int32 or int64 tensor, got NoneType"),
        (bounds([0, 4, 10]), TypeError, "cu_seq_lens_q must be an int32 or int64 tensor, got list"),
        (bounds(PACKED.float()), TypeError, r"int32 or int64 tensor, got torch\.float32"),
        (bounds(PACKED[None]), ValueError, r"cu_seq_lens_q must have one dimension, got shape \(1, 3\)"),
        (same_bounds(0, 5), ValueError, r"cu_seq_lens_q must hold the boundaries .* length 10, got \(0, 5\)"),
        (same_bounds(3, 10), ValueError, "must run from 0"),
        (same_bounds(0, 30), ValueError, "must run from 0"),
        (same_bounds(0, 9, 5, 10), ValueError, r"must not decrease, got \(0, 9, 5, 10\)"),
        ({**bounds(PACKED), "query": ROW.expand(2, -1, -1, -1)}, ValueError, "without padding, got 2 rows"),
        ({**bounds(PACKED), "query": ROW[:, :, :3]}, ValueError, "continue from a cache, got 3 of 10 tokens"),
    ],
    ids=lambda value: "",
)
def test_what_layers_ask_for_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = {"query": ROW, "key": ROW, "value": ROW, "attention_mask": None}
    with pytest.raises(error, match=message):
        dilated_attention_forward(layer(), **{**call, **options})
    harmless = {**dict.fromkeys(options, None), **call, "output_attentions": False, "deterministic": True}
    dilated_attention_forward(layer(), **harmless)


def test_mistral_without_its_window_works() -> None:
    ids, without = tokens(1, 19), maker("Mistral", num_key_value_heads=2, sliding_window=None)
    expected, actual = (each(ids).logits for each in twins(without, FULL))
    assert_near(actual, expected)


def test_heads_of_other_ranks_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    part = layer()
    part.config.num_attention_heads = 8
    dilated_attention_forward(part, ROW, ROW, ROW, None)  # one process: the config may count otherwise
    monkeypatch.setattr(integration, "group_size", lambda: 2)
    message = "needs all 8 heads of a layer on one rank, got 4: tensor parallelism"
    with pytest.raises(ValueError, match=message):
        dilated_attention_forward(part, ROW, ROW, ROW, None)


def test_mask_that_forgets_the_cache_is_refused() -> None:
    each, ids = made(llama, DILATED), tokens(1, 8)
    with torch.no_grad():
        past = each(ids[:, :6], use_cache=True).past_key_values
        with pytest.raises(ValueError, match=r"must cover the 8 tokens so far, .* got shape \(1, 2\)"):
            each(ids[:, 6:], past_key_values=past, attention_mask=torch.ones(1, 2))


def test_cache_continues_with_gradients() -> None:
    each, ids = made(llama, DILATED), tokens(2, 30)
    past = each(ids[:, :21], use_cache=True).past_key_values
    out = each(ids[:, 21:], past_key_values=past).logits
    expected = each(ids).logits[:, 21:]
    assert_near(out, expected, 1e-5)
    weight = torch.randn_like(out)
    weights = list(each.parameters())
    assert_near_gradients(*(torch.autograd.grad((x * weight).sum(), weights) for x in (out, expected)))


def window(batch: Any, head: Any, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & (q - k < 3)


def blocks(batch: Any, head: Any, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) | (q // 2 == k // 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_function": window}, "not causal within documents"),
        ({"mask_function": blocks}, "not causal within documents"),
        ({"mask_function": window, "use_vmap": True}, "a mask function of the model's own"),
        ({"mask_function": window, "attention_mask": torch.ones(2, 6).bool()}, "function of the model's own"),
        ({"local_size": 4}, "cannot honour a sliding window .*, got local_size=4"),
        ({"kv_offset": 2}, "cannot honour a sliding window .*, got kv_offset=2"),
        ({"q_length": 7}, "has no cross attention, got 7 queries and 6 keys"),
        ({"q_length": 3, "attention_mask": torch.ones(2, 6).bool()}, "must cover the 3 tokens so far"),
    ],
    ids=lambda value: "",
)
def test_masks_that_are_refused(options: dict[str, Any], message: str) -> None:
    mask = dilated_attention_mask(**{"batch_size": 2, "q_length": 6, "kv_length": 6, **options})
    x = torch.randn(2, 4, 6, 8)
    with pytest.raises(ValueError, match=message):  # where a layer uses it: a model may have none that does
        dilated_attention_forward(layer(), x, x, x, mask)


def test_nothing_of_transformers_is_imported_before_it_is_used() -> None:
    code = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
from dilated_attention_pytorch.integrations.transformers import register
try:
    register()
except ImportError:
    print("refused")
"""
    assert run_program(sys.executable, "-c", code)[0] == "refused\n"


@pytest.mark.parametrize("model", ["llama gqa", "bert"])
def test_dilated_model_trains(model: str) -> None:
    each, ids = made(MODELS[model], DILATED, initializer_range=0.05).train(), tokens(2, 50)
    optimizer = torch.optim.AdamW(each.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = each(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    if model in DECODERS:  # what it learned it can tell
        out = each.eval().generate(ids[:, :10], attention_mask=torch.ones(2, 10), max_new_tokens=40)
        assert (out == ids).float().mean() > 0.9
