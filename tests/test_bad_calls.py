"""Every public function and class, called with one bad argument: a ValueError or TypeError, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dilated_attention_pytorch as package
from dilated_attention_pytorch.checks import parse_json
from dilated_attention_pytorch.cli.bench.record import from_json
from dilated_attention_pytorch.cli.train import ConfigError, read_settings
from dilated_attention_pytorch.integrations.torchscale import _integers
from support.public_calls import BRANCHES, ENTRIES, MASK, MODEL, PATTERN, X

DEEP = "[" * 100_000


def test_there_are_many() -> None:
    assert sum(len(entry.cases()) for entry in ENTRIES.values()) > 5000


def test_every_public_name_has_an_entry() -> None:
    made_elsewhere = {"RingError", "RingSchedule"}
    named = {name.partition(".")[0].partition("(")[0] for name in ENTRIES}
    assert set(package.__all__) - made_elsewhere <= named


@pytest.mark.parametrize("name", ENTRIES)
def test_one_bad_argument(name: str) -> None:
    """First the valid call, then each bad value in the place of each argument."""
    entry = ENTRIES[name]
    entry.call(**entry.valid)
    wrong = []
    for argument, label, value in entry.cases():
        try:
            entry.call(**{**entry.valid, argument: value})
            wrong.append(f"{argument}, {label}: passed")
        except (ValueError, TypeError):
            pass
        except Exception as error:
            wrong.append(f"{argument}, {label}: {error!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("word", ["attention_mask", "attn_mask", "mask", "key_padding_mask"])
def test_masks_by_other_names(word: str) -> None:
    for name, args in {
        "dilated_attention": (X, X, X, [8], [1]),
        "ring_dilated_attention": (X, X, X, [8], [1]),
        "block_sparse_attention": (X, X, X, PATTERN),
        "attention_rows": (X, X, [1], [8], [1]),
    }.items():
        call = getattr(package, name)
        call(*args, key_mask=MASK)
        with pytest.raises(TypeError) as raised:
            call(*args, **{word: MASK})
        meant = "key_mask (b, n) bool, True = may be attended, is meant"
        assert str(raised.value) == f"{name} has no {word!r}; {meant}"


@pytest.mark.parametrize(
    ("name", "args", "word", "meant"),
    [
        ("dilated_attention", (X, X, X, [8], [1]), "causal", "is_causal?"),
        ("LongNetLM", (7,), "segment_length", "segment_lengths?"),
        ("LongNet", (), "dilation_rate", "dilation_rates?"),
        ("LongNetViT", (), "embed_dims", "embed_dim?"),
        ("LongNetEncoder", (), "droput", "dropout"),
        ("DilatedTransformerDecoderLayer", (8, 2), "cross_atention", "cross_attention"),
        ("MultiheadDilatedAttention", (8, 2), "segment_length", "segment_lengths?"),
        ("BlockSparseMultiheadDilatedAttention", (8, 2), "sparse_confg", "sparse_config?"),
        ("RingDilatedAttentionV3", ([4], [1]), "ringsize", "ring_size?"),
        ("RingDilatedAttentionProduction", (), "memory_poolsize", "memory_pool_size"),
        ("BlockSparseDilatedAttention", (), "head_mixing", None),
        ("create_dilated_attention", ("ring",), "ringsize", "ring_size?"),
        ("create_multihead_dilated_attention", (), "num_head", "num_heads"),
        ("create_block_sparse_attention", (), "sparsity", "sparsity_ratio?"),
    ],
)
def test_settings_by_wrong_names(name: str, args: tuple[Any, ...], word: str, meant: str | None) -> None:
    with pytest.raises(TypeError) as raised:
        getattr(package, name)(*args, **{word: None})
    hint = "" if meant is None else f" Did you mean {meant}"
    assert str(raised.value).startswith(f"{name} has no {word!r}.{hint}")


def test_wrong_names_within_options() -> None:
    with pytest.raises(TypeError, match=r"LongNetLM has no 'head_offset'\. Did you mean head_offsets\?"):
        package.LongNetLM(7, attention_options={"head_offset": 1})


def test_json_that_nests_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(DEEP)
    for read in (parse_json, package.LongNetLMConfig.from_json, from_json):
        with pytest.raises(ValueError, match="JSON must not nest deeper than Python can follow"):
            read(DEEP)
    with pytest.raises(ValueError, match="is not a block pattern"):
        package.BlockPattern.load(path)
    with pytest.raises(ConfigError, match="must be JSON"):
        read_settings(path)
    with pytest.raises(ValueError, match="segment_length must be a list of integers"):
        _integers({"segment_length": DEEP}, "segment_length")


def test_options_that_nest_too_deeply() -> None:
    options: Any = []
    for _ in range(10_000):
        options = [options]
    with pytest.raises(ValueError, match=r"attention_options.* must not nest more than 32 deep"):
        package.LongNetLM(7, **MODEL, sparse_config=options, kind="block_sparse")


def test_a_config_of_many_layers_beside_the_weights_of_two(tmp_path: Path) -> None:
    models = {
        "num_layers": package.LongNetLM(7, num_layers=2, **MODEL),
        "num_decoder_layers": package.LongNet(**MODEL, num_encoder_layers=2, num_decoder_layers=2),
    }
    for name, model in models.items():
        folder = tmp_path / name
        model.save_pretrained(folder)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, name: 100_000}))
        with pytest.raises(ValueError, match=rf"must hold 100000 layers \({name}\), got \d+ tensors in all"):
            type(model).from_pretrained(folder)


@pytest.mark.parametrize("name", ["segment_lengths", "dilation_rates"])
def test_branches_as_tensors_of_integers_pass(name: str) -> None:
    branches = {**BRANCHES, name: torch.tensor(BRANCHES[name])}
    assert package.DilatedSpec(**branches) == package.DilatedSpec(**BRANCHES)
