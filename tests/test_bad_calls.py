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
from dilated_attention_pytorch.cli.train.config import ConfigError, read_settings
from dilated_attention_pytorch.integrations.torchscale import _integers
from support.public_calls import BRANCHES, CONFIG, ENTRIES, MASK, MODEL, PATTERN, X

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
    calls = {
        "dilated_attention": lambda **mask: package.dilated_attention(X, X, X, [8], [1], **mask),
        "ring_dilated_attention": lambda **mask: package.ring_dilated_attention(X, X, X, [8], [1], **mask),
        "block_sparse_attention": lambda **mask: package.block_sparse_attention(X, X, X, PATTERN, **mask),
        "attention_rows": lambda **mask: package.attention_rows(X, X, [1], [8], [1], **mask),
    }
    for name, call in calls.items():
        call(key_mask=MASK)
        with pytest.raises(TypeError) as raised:
            call(**{word: MASK})
        meant = "key_mask (b, n) bool, True = may be attended, is meant"
        assert str(raised.value) == f"{name} has no {word!r}; {meant}"


def test_other_keywords_of_functions() -> None:
    with pytest.raises(TypeError, match=r"^dilated_attention has no 'causal'\. Did you mean is_causal\?$"):
        package.dilated_attention(X, X, X, [8], [1], causal=True)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: package.LongNetLM(7, segment_length=[4]),
            "LongNetLM has no 'segment_length'. Did you mean segment_lengths?",
        ),
        (lambda: package.LongNet(dilation_rate=[4]), "LongNet has no 'dilation_rate'. Did you mean"),
        (lambda: package.LongNetViT(embed_dims=8), "LongNetViT has no 'embed_dims'. Did you mean embed_dim?"),
        (
            lambda: package.LongNetLM(7, attention_options={"head_offset": 1}),
            "LongNetLM has no 'head_offset'. Did you mean head_offsets?",
        ),
        (lambda: package.LongNetEncoder(droput=0.1), "LongNetEncoder has no 'droput'. Did you mean dropout"),
        (
            lambda: package.DilatedTransformerDecoderLayer(8, 2, cross_atention=None),
            "DilatedTransformerDecoderLayer has no 'cross_atention'. Did you mean cross_attention",
        ),
        (
            lambda: package.MultiheadDilatedAttention(8, 2, segment_length=[4]),
            "MultiheadDilatedAttention has no 'segment_length'. Did you mean segment_lengths?",
        ),
        (
            lambda: package.BlockSparseMultiheadDilatedAttention(8, 2, sparse_confg=CONFIG),
            "BlockSparseMultiheadDilatedAttention has no 'sparse_confg'. Did you mean sparse_config?",
        ),
        (
            lambda: package.RingDilatedAttentionV3([4], [1], ringsize=1),
            "RingDilatedAttentionV3 has no 'ringsize'. Did you mean ring_size?",
        ),
        (
            lambda: package.RingDilatedAttentionProduction(memory_poolsize=1),
            "RingDilatedAttentionProduction has no 'memory_poolsize'. Did you mean memory_pool_size",
        ),
        (
            lambda: package.BlockSparseDilatedAttention(head_mixing="all"),
            "BlockSparseDilatedAttention has no 'head_mixing'.",
        ),
        (
            lambda: package.create_dilated_attention("ring", ringsize=1),
            "create_dilated_attention has no 'ringsize'. Did you mean ring_size?",
        ),
        (
            lambda: package.create_multihead_dilated_attention(num_head=2),
            "create_multihead_dilated_attention has no 'num_head'. Did you mean num_heads",
        ),
        (
            lambda: package.create_block_sparse_attention(sparsity=0.1),
            "create_block_sparse_attention has no 'sparsity'. Did you mean sparsity_ratio?",
        ),
    ],
    ids=lambda x: x.split()[0] if isinstance(x, str) else "",
)
def test_settings_by_wrong_names(call: Any, says: str) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value).startswith(says)


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
