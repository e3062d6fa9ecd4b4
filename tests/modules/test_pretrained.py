"""Settings as plain data and JSON; models saved and loaded whole, or refused with the fact."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from dilated_attention_pytorch import SparsePatternConfig
from dilated_attention_pytorch.integrations.gigapath import LongNetViT
from dilated_attention_pytorch.modules import pretrained
from dilated_attention_pytorch.modules.longnet import (
    LongNet,
    LongNetDecoder,
    LongNetEncoder,
    LongNetLM,
)
from dilated_attention_pytorch.modules.longnet_config import LongNetConfig, LongNetLMConfig
from dilated_attention_pytorch.modules.pretrained import assign_tensors, write_tensors
from support.configurations import segment_and_rate
from support.tolerances import assert_close
from support.weighed import randomised

BRANCHES: dict[str, Any] = {"segment_lengths": (4, 12), "dilation_rates": (1, 3)}
SMALL: dict[str, Any] = {"d_model": 24, "nhead": 4, "dim_feedforward": 40, **BRANCHES}
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.lists(inner), st.dictionaries(st.text(), inner))


def make_lm(**options: Any) -> LongNetLM:
    return randomised(LongNetLM(**{"vocab_size": 11, "num_layers": 2, **SMALL, **options}))


BRANCH_LISTS = st.lists(segment_and_rate(5000, 20), min_size=1, max_size=4).map(
    lambda pairs: {name: [pair[i] for pair in pairs] for i, name in enumerate(BRANCHES)}
)
HEADS = st.sampled_from([(4, None), (4, 2), (6, 1), (1, 1)]).map(
    lambda heads: {"d_model": 8 * heads[0], "nhead": heads[0], "num_kv_heads": heads[1]}
)
OTHERS = st.fixed_dictionaries(
    {
        "dropout": st.floats(0, 0.9),
        "position_encoding": st.sampled_from([None, "rotary", "xpos"]),
        "sub_layer_norm": st.booleans(),
        "gamma_init": st.one_of(st.none(), st.floats(0.1, 3)),
        "attention_options": st.dictionaries(
            st.sampled_from(["head_offsets", "workspace_bytes", "bias"]),
            st.recursive(VALUES, nested, max_leaves=4),
        ),
    }
)


@given(BRANCH_LISTS, HEADS, OTHERS)
def test_json_keeps_every_setting(branches: Any, heads: Any, others: Any) -> None:
    for config in (
        LongNetConfig(num_encoder_layers=3, cross_attention="dilated", **branches, **heads, **others),
        LongNetLMConfig(vocab_size=7, pad_token=6, tie_embeddings=False, **branches, **heads, **others),
    ):
        read = type(config).from_json(config.to_json())
        assert read == config
        assert hash(read) == hash(config)
        assert read.to_json() == config.to_json()
        names = [field.name for field in dataclasses.fields(config)]
        assert list(json.loads(config.to_json())) == ["model", *names]
        assert json.loads(config.to_json())["model"] == config.model
        assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_a_config_cannot_be_changed_from_outside() -> None:
    options = {"sparse_config": {"list": [1, 2]}}
    config = LongNetConfig(kind="block_sparse", attention_options=options)
    options["sparse_config"]["list"].append(3)
    assert config.attention_options["sparse_config"] == {"list": (1, 2)}
    with pytest.raises(TypeError):
        config.attention_options["new"] = 1  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 5  # type: ignore[misc]


@pytest.mark.parametrize("config", [LongNetConfig, LongNetEncoder.config_class, LongNetViT.config_class])
def test_unknown_names_are_refused_at_once(config: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{config.__name__} has no 'n_head'\. Did you mean nhead\?$"):
        config(n_head=4)
    with pytest.raises(TypeError, match=rf"^{config.model} has no 'head_offset'\. Did you mean head_offsets"):
        config(attention_options={"head_offset": "blocked"})
    with pytest.raises(ValueError, match=r"must be those of the attention .* got .'cross_attention'."):
        make_lm(cross_attention="dense")


OWN = '{"model": "LongNetLM", "vocab_size": 5'


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (f'{OWN}, "heads": 2, "x": 1}}', ValueError, r"than its fields, got \['heads', 'x'\]"),
        (f'{OWN}, "dropout": NaN}}', ValueError, "must be finite, got NaN"),
        (f'{OWN}, "nhead": 2, "nhead": 2}}', ValueError, r"must not repeat keys, got \['nhead'\]"),
        (f'{OWN}, "nhead": 7}}', ValueError, "d_model must be a multiple of nhead"),
        (f"{OWN}, x", ValueError, "a config must be JSON, got text that is not: "),
        ('{"model": "LongNet"}', ValueError, 'must have "model": "LongNetLM", got \'LongNet\''),
        ('{"vocab_size": 5}', ValueError, 'must have "model": "LongNetLM", got no such key'),
        ('{"model": "LongNetLM"}', ValueError, r"keys \['vocab_size'\], got no \['vocab_size'\]"),
        ("[1, 2]", TypeError, "a config must be a mapping of names to values, got list"),
    ],
)
def test_bad_json(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LongNetLMConfig.from_json(text)


LM: dict[str, Any] = {"vocab_size": 11, "num_layers": 2}
UNTIED = {"tie_embeddings": False, "num_kv_heads": 2, "kind": "improved", "sub_layer_norm": False}
MODELS: list[tuple[Any, dict[str, Any]]] = [
    *((LongNetLM, {**LM, "dtype": dtype}) for dtype in (torch.float32, torch.float64, torch.bfloat16)),
    (LongNetLM, {**LM, **UNTIED}),
    (LongNetLM, {**LM, "head_mixing": "grouped", "activation": "swish", "checkpoint_activations": True}),
    (LongNetLM, {**LM, "head_offsets": "blocked", "rotary_base": 500.0, "normalize_output": False}),
    (LongNet, {"num_encoder_layers": 1, "num_decoder_layers": 2, "cross_attention": "dilated"}),
    (LongNetEncoder, {}),
    (LongNetEncoder, {"max_length": 16, "segment_lengths": None, "dilation_rates": None}),
    (LongNetEncoder, {"sub_layer_norm": False, "normalize_output": False, "position_encoding": "rotary"}),
    (LongNetDecoder, {"cross_attention": "dilated", "num_kv_heads": 2}),
    (LongNetDecoder, {"cross_attention": None, "head_offsets": "blocked", "gamma_init": 0.7}),
]


@pytest.mark.parametrize(("cls", "options"), MODELS)
def test_models_survive(cls: Any, options: dict[str, Any], tmp_path: Path) -> None:
    dtype, folder = options.get("dtype", torch.float32), tmp_path / "new" / "folder"
    layers = {"num_layers": 2} if cls in (LongNetEncoder, LongNetDecoder) else {}
    model = randomised(cls(**{**SMALL, **layers, **options}, dropout=0.1)).eval()
    model.save_pretrained(folder)
    loaded, state = cls.from_pretrained(folder), model.state_dict()
    assert not loaded.training
    assert loaded.config == copy.deepcopy(loaded).config == model.config
    assert repr(loaded) == repr(cls.from_config(model.config)) == repr(model)
    double = cls.from_config(model.config, dtype=torch.float64)
    assert {parameter.dtype for parameter in double.parameters()} == {torch.float64}
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    has_memory = options.get("cross_attention") is not None
    inputs = [torch.randn(2, 13, 24) for _ in range(2 if has_memory else 1)]
    inputs = [torch.randint(11, (2, 17))] if cls is LongNetLM else inputs
    # Weights at another address may be summed in another order.
    assert_close(loaded(*inputs), model(*inputs), dtype)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    # What was loaded is trainable memory of its own: the file stays as it is.
    loaded.train()(*inputs).sum().backward()
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    again = cls.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.items())
    loaded.save_pretrained(folder)  # over the files that it was loaded from
    assert not any(tensor.any() for tensor in cls.from_pretrained(folder).parameters())
    other = LongNetDecoder if cls is LongNetEncoder else LongNetEncoder
    with pytest.raises(ValueError, match=f'must have "model": "{other.__name__}", got \'{cls.__name__}\''):
        other.from_pretrained(folder)
    rule = f"the config of a {other.__name__} must be a {other.__name__}Config, got {cls.__name__}Config"
    with pytest.raises(TypeError, match=rule):
        other.from_config(model.config)


def test_a_stack_whose_settings_no_file_can_hold_is_used_but_not_saved(tmp_path: Path) -> None:
    pattern = SparsePatternConfig("local_window", 0.5, 4)
    stack = LongNetEncoder(**SMALL, num_layers=1, kind="block_sparse", sparse_config=pattern)
    assert stack(torch.randn(1, 9, 24)).shape == (1, 9, 24)
    with pytest.raises(TypeError, match=r"sparse_config'\] must be plain data, .* got SparsePatternConfig"):
        stack.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("one", "other"), [("standard", "improved"), ("improved", "standard")])
def test_files_of_one_kind_load_into_another(one: str, other: str, tmp_path: Path) -> None:
    model = make_lm(kind=one, num_kv_heads=2, dtype=torch.float64)
    model.save_pretrained(tmp_path / "one")
    loaded = LongNetLM.from_pretrained(tmp_path / "one", kind=other)
    assert loaded.config.kind == other
    tokens = torch.randint(11, (2, 9))
    torch.testing.assert_close(loaded(tokens), model.eval()(tokens), rtol=0, atol=1e-12)
    loaded.save_pretrained(tmp_path / "other")
    again = LongNetLM.from_pretrained(tmp_path / "other", kind=one)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def hub(folder: Path, calls: list[Any]) -> Callable[..., str]:
    """A stand-in of `snapshot_download`, whose repositories are folders."""

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repository, revision, allow_patterns))
        if not (folder / repository).is_dir():
            raise OSError("404: no such repository")
        return str(folder / repository)

    return download


def test_models_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub(tmp_path / "hub", calls))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    far, near = make_lm(), make_lm()
    far.save_pretrained(tmp_path / "hub" / "some-one" / "model_1.0")
    loaded = LongNetLM.from_pretrained("some-one/model_1.0", revision="v1", dtype=torch.float64)
    assert torch.equal(loaded.embed_tokens.weight, far.embed_tokens.weight.double())
    assert calls == [("some-one/model_1.0", "v1", ["config.json", "model.safetensors"])]
    near.save_pretrained("some-one/model_1.0")
    loaded = LongNetLM.from_pretrained("some-one/model_1.0")  # what is here comes first
    assert torch.equal(loaded.embed_tokens.weight, near.embed_tokens.weight)
    with pytest.raises(ValueError, match=r"revision must be that of a repository on the Hub, got .v1."):
        LongNetLM.from_pretrained("some-one/model_1.0", revision="v1")
    assert len(calls) == 1
    with pytest.raises(FileNotFoundError, match=r"'no/where' must be a folder, or .* from the Hub: 404"):
        LongNetLM.from_pretrained("no/where")
    wrong = ("nowhere", "../no/where", "./where", "a/b/c", "no/where.pth", tmp_path / "no", Path("no/where"))
    for name in wrong:
        with pytest.raises(FileNotFoundError, match=r"a model's folder must hold config\.json and"):
            LongNetLM.from_pretrained(name)
    assert len(calls) == 2


def test_slide_encoders_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub(tmp_path, calls))
    sizes: dict[str, Any] = {"in_chans": 6, "embed_dim": 24, "depth": 1, "nhead": 4}
    model = LongNetViT(**sizes, segment_lengths=(4, 12), dilation_rates=(1, 3), kind="improved")
    model.save_pretrained(tmp_path / "own" / "format")
    (tmp_path / "their" / "names").mkdir(parents=True)
    torch.save({"model": model.state_dict()}, tmp_path / "their" / "names" / "slide_encoder.pth")
    for name, options in (("own/format", {}), ("their/names", {"nhead": 4, "kind": "improved"})):
        loaded = LongNetViT.from_pretrained(name, **options)
        for key, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], tensor)
    files = ["slide_encoder.pth", "config.json", "model.safetensors"]
    assert calls == [("own/format", None, files), ("their/names", None, files)]
    prefixed = LongNetViT.from_pretrained("hf_hub:own/format")
    assert prefixed.config == model.config
    with pytest.raises(
        FileNotFoundError, match=r"404.*By hand: `hf download no/where slide_encoder\.pth --lo"
    ):
        LongNetViT.from_pretrained("hf_hub:no/where")
    plain = LongNetViT.from_pretrained("own/format", kind="standard")
    parted, joint = (each.encoder.layers[0].self_attn for each in (plain, model))
    assert torch.equal(parted.q_proj.weight, joint.qkv_proj.weight[:24])


def test_without_the_package_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = (
        "'some/one' must be a folder, or a repository on the Hugging Face Hub, got no such folder, and no "
        "huggingface_hub, .*`pip install huggingface_hub && hf download some/one"
    )
    with pytest.raises(
        FileNotFoundError, match=rf"{message} config\.json model\.safetensors --local-dir one`"
    ):
        LongNetLM.from_pretrained("some/one")
    with pytest.raises(
        FileNotFoundError, match=rf"{message} slide_encoder\.pth --revision v1 --local-dir one`"
    ):
        LongNetViT.from_pretrained("hf_hub:some/one", revision="v1")


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    model = make_lm()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == {name for name, _ in model.named_parameters()}
    assert not any("output" in name for name in saved)
    loaded = LongNetLM.from_pretrained(tmp_path)
    tokens = torch.randint(11, (1, 5))
    with torch.no_grad():
        loaded.embed_tokens.weight[3] = 0  # a token whose output weights are zero has a logit of zero
    assert (loaded(tokens)[..., 3] == 0).all()


def test_arguments_may_differ_from_those_saved(tmp_path: Path) -> None:
    model = make_lm(head_offsets="blocked")
    model.save_pretrained(tmp_path)
    loaded = LongNetLM.from_pretrained(tmp_path, dtype=torch.float64, device="cpu")
    tokens = torch.randint(11, (2, 9))
    torch.testing.assert_close(loaded(tokens), model.double().eval()(tokens), rtol=0, atol=1e-12)
    loaded = LongNetLM.from_pretrained(tmp_path, dropout=0.5, head_mixing="grouped")
    assert loaded.config.dropout == 0.5
    assert loaded.config.attention_options == {"head_offsets": "blocked", "head_mixing": "grouped"}
    with pytest.raises(ValueError, match=r"layers\.1\.\S+ is unexpected"):
        LongNetLM.from_pretrained(tmp_path, num_layers=1)
    with pytest.raises(TypeError, match=r"dtype must be a floating-point torch\.dtype, got torch\.int8"):
        LongNetLM.from_pretrained(tmp_path, dtype=torch.int8)


def test_loading_makes_no_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_lm().save_pretrained(tmp_path)
    read, given = pretrained.read_tensors, {}

    def watch(*arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        given.update(read(*arguments, **options))
        return dict(given)

    monkeypatch.setattr(pretrained, "read_tensors", watch)
    # Random numbers for weights that are overwritten would be wasted, and change the caller's.
    state = torch.get_rng_state()
    loaded = LongNetLM.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in loaded.named_parameters():
        assert parameter.data_ptr() == given[name].data_ptr()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (None, "embed_tokens.weight is missing$"),
        (torch.zeros(12, 24), r"embed_tokens.weight must be \(11, 24\), got \(12, 24\)$"),
        (torch.zeros(11, 24).long(), "embed_tokens.weight must be like torch.float32, got torch.int64$"),
        (torch.zeros(11, 24).cfloat(), "embed_tokens.weight must be like .*32, got torch.complex64$"),
        ("new", "new is unexpected$"),
        ("only new", r"is missing; .* and \d+ more$"),
    ],
    ids=["missing", "shape", "dtype", "complex", "unexpected", "many"],
)
def test_weights_that_do_not_fit(tmp_path: Path, weight: Any, message: str) -> None:
    make_lm().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    if isinstance(weight, str):
        state = {"new": torch.zeros(1), **(state if weight == "new" else {})}
    elif weight is None:
        del state["embed_tokens.weight"]
    else:
        state["embed_tokens.weight"] = weight
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"model.safetensors does not fit: .*{message}"):
        LongNetLM.from_pretrained(tmp_path)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "harm").mkdir, ()

    def refused(error: type[Exception], message: str, cls: Any = LongNetLM) -> None:
        with pytest.raises(error, match=message):
            cls.from_pretrained(tmp_path)

    refused(FileNotFoundError, r"must hold config.json and model.safetensors, got no .*config.json")
    make_lm().save_pretrained(tmp_path)
    refused(ValueError, 'a LongNetConfig must have "model": "LongNet", got \'LongNetLM\'', LongNet)
    weights = tmp_path / "model.safetensors"
    for held in (weights.read_bytes()[:-100], pickle.dumps(Harmful())):
        weights.write_bytes(held)
        refused(ValueError, r"model.safetensors must be a safetensors file, got one that is not")
    assert not (tmp_path / "harm").exists()
    weights.unlink()
    refused(FileNotFoundError, r"got no .*model\.safetensors")


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_lm().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == {"config.json", "model.safetensors"}

    def fail(path: Path, tensors: Any) -> None:
        path.write_bytes(b"half a file")
        raise OSError("the disk is full")

    monkeypatch.setattr(pretrained, "write_tensors", fail)
    with pytest.raises(OSError, match="the disk is full"):
        make_lm(num_layers=1).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_model_without_weights_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must have its weights to be saved, got embed_tokens\.weight"):
        make_lm(device="meta").save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_tensors_that_share_memory_are_written(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tensors = {"a": base, "b": base, "c": base.view(2, 3).t()}
    write_tensors(tmp_path / "file", tensors)
    for name, tensor in load_file(tmp_path / "file").items():
        assert torch.equal(tensor, tensors[name])


def test_a_tensor_that_no_file_gives_is_an_error() -> None:
    model = nn.Linear(2, 2, device="meta")
    model.register_buffer("table", torch.zeros(1, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="the state must hold all tensors of the model, got no table"):
        assign_tensors(model, {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
