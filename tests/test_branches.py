"""Branches from a length, and what is said where branches do not suffice."""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import DilatedSpec, LongNetLM, branches_for
from dilated_attention_pytorch.cli import arguments
from dilated_attention_pytorch.cli.show import describe, make_picture
from dilated_attention_pytorch.modules.ring import RingOptions

ISOLATED = re.compile(r"\d+ tokens exceed the longest segment, \d+: tokens in different segments.*never meet")


@given(
    max_length=st.integers(1, 2**40),
    num_heads=st.one_of(st.none(), st.integers(1, 64)),
    first=st.integers(1, 5000),
    ratio=st.one_of(st.none(), st.integers(2, 9)),
)
def test_branches_span_the_length_and_nest(
    max_length: int, num_heads: int | None, first: int, ratio: int | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lengths, rates = branches_for(max_length, num_heads, first=first, ratio=ratio)
    spec = DilatedSpec(lengths, rates)  # which takes them
    assert spec.branches[0] == (first, 1)
    assert lengths[-1] >= max_length
    assert len(lengths) == 1 or lengths[-2] < max_length  # and none is superfluous
    for before, after in zip(spec.branches, spec.branches[1:], strict=False):
        assert after[0] % before[0] == 0
        assert after[1] % before[1] == 0
    assert all(w <= first * r * r for w, r in spec.branches)  # no branch costs more than the first
    left_out = num_heads is not None and max(rates) > num_heads
    assert len(caught) == left_out
    if left_out:
        assert f"serves {num_heads} of every {rates[-1]} positions" in str(caught[0].message)


def test_branches_of_known_lengths() -> None:
    assert branches_for(1000) == ((2048,), (1,))
    assert branches_for(32768) == ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))  # LongNet's
    assert branches_for(16384, 4) == ((2048, 4096, 8192, 16384), (1, 2, 4, 4))
    assert branches_for(2**17, ratio=8) == ((2048, 16384, 131072), (1, 8, 64))
    assert branches_for(2**20, 16, first=4096)[1] == (1, 4, 16, 16, 16)
    assert branches_for(torch.tensor(1000)) == ((2048,), (1,))  # an integer of another library


# What can be made from a length, and what else it takes; those that do not know their heads first.
NO_HEADS: dict[str, tuple[Any, ...]] = {
    "DilatedAttention": (),
    "ImprovedDilatedAttentionV2": (),
    "RingDilatedAttentionV3": (),
    "RingDilatedAttentionProduction": (),
    "BlockSparseDilatedAttention": (),
    "create_dilated_attention": ("auto",),
    "create_block_sparse_attention": ("base",),
}
MADE = NO_HEADS | {
    "MultiheadDilatedAttention": (32, 4),
    "ImprovedMultiheadDilatedAttention": (32, 4),
    "RingMultiheadDilatedAttention": (32, 4),
    "BlockSparseMultiheadDilatedAttention": (32, 4),
    "DilatedTransformerEncoderLayer": (32, 4),
    "DilatedTransformerDecoderLayer": (32, 4),
    "create_multihead_dilated_attention": ("auto", 32, 4),
    "LongNetEncoder": (32, 4, 1),
    "LongNetDecoder": (32, 4, 1),
    "LongNet": (32, 4, 1, 1, 8),
    "LongNetLM": (8, 32, 4, 1),
    "LongNetViT": (6, 32, 1, 4),
}


def specs(module: nn.Module) -> list[DilatedSpec]:
    found = (getattr(each, "spec", None) for each in module.modules())
    return [each for each in found if isinstance(each, DilatedSpec)]


@pytest.mark.parametrize("name", MADE)
def test_everything_is_made_from_a_length(name: str) -> None:
    def make(**options: Any) -> nn.Module:
        return getattr(dap, name)(*MADE[name], **options)

    rates = (1, 2, 4, 8) if name in NO_HEADS else (1, 2, 4, 4)
    made = specs(make(max_length=16384))
    assert {spec.branches for spec in made} == {tuple(zip((2048, 4096, 8192, 16384), rates, strict=True))}
    made = specs(make(max_length=16384, segment_lengths=[512, 1024], dilation_rates=[1, 4]))
    assert {spec.branches for spec in made} == {((512, 1), (1024, 4))}  # explicit lists win
    with pytest.raises((TypeError, ValueError), match="max_length"):
        make(max_length=-3)
    if name != "LongNetViT":  # which has segments of its own
        with pytest.raises(ValueError, match="given together, got dilation_rates alone"):
            make(dilation_rates=[1])


def test_factories_take_seq_len() -> None:
    made = dap.create_dilated_attention("auto", seq_len=16384)
    assert made.spec.branches[-1] == (16384, 8)
    assert "until one spans 16384 tokens" in str(made.choice)
    made = dap.create_multihead_dilated_attention("auto", 32, 4, seq_len=16384)
    assert specs(made)[0].branches[-1] == (16384, 4)
    with pytest.raises(ValueError, match="seq_len and max_length are one, got 5 and 6"):
        dap.create_dilated_attention("auto", seq_len=5, max_length=6)


def changed_output(model: LongNetLM, n: int) -> Tensor:
    """How much the logits of the last token change with the first token."""
    tokens = torch.zeros(2, n, dtype=torch.int64)
    tokens[1, 0] = 1
    with torch.no_grad():
        features = model.features(tokens)[:, -1]
    return (features[0] - features[1]).abs().max()


def layers_by_show(spec: DilatedSpec, shrink: int, num_heads: int) -> int:
    """After how many layers `show --layers` lets the last token see all; it advises shorter segments."""
    segments = [w // shrink for w in spec.segment_lengths]
    options = ["--segments", ",".join(map(str, segments)), "--rates", ",".join(map(str, spec.dilation_rates))]
    options += ["--length", str(max(segments)), "--heads", str(num_heads), "--causal", "--layers", "8"]
    parser = argparse.ArgumentParser()
    arguments.show(parser)
    layers = describe(make_picture(parser.parse_args(options)), 8)["layers"]
    return next(each["layer"] for each in layers if each["last_position"] == 1.0)


def test_the_first_token_reaches_the_last_within_the_layers_that_show_says() -> None:
    torch.manual_seed(0)
    model = LongNetLM(256, 32, 4, 4, max_length=16384, dim_feedforward=32).double().eval()
    layers = layers_by_show(specs(model)[0], 16, 4)
    assert layers <= 4
    del model.decoder.layers[layers:]
    assert changed_output(model, 16384) > 0


def test_defaults_below_the_length_warn_and_do_not_meet() -> None:
    torch.manual_seed(0)
    model = LongNetLM(256, 8, 2, 1, dim_feedforward=8).eval()
    with pytest.warns(UserWarning, match=ISOLATED.pattern) as caught:
        assert changed_output(model, 8193) == 0
    message = str(caught[0].message)
    assert "8193 tokens exceed the longest segment, 8192" in message
    assert "such as 8191 and 8192" in message
    assert "max_length=8193" in message
    assert "allow_isolated_segments=True" in message


def isolated(call: Callable[[], object]) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return sum(bool(ISOLATED.match(str(each.message))) for each in caught)


def test_a_module_warns_once_for_each_class_of_lengths() -> None:
    module = dap.DilatedAttention([8], [1])

    def call(n: int) -> int:
        x = torch.randn(1, n, 2, 4)
        return isolated(lambda: module(x, x, x))

    assert [call(n) for n in (8, 9, 15, 9, 16, 31, 33, 9)] == [0, 1, 0, 0, 1, 0, 1, 0]
    module = dap.DilatedAttention([8], [1], allow_isolated_segments=True)
    assert call(9) == 0
    assert pickle.loads(pickle.dumps(module)).allow_isolated_segments
    with pytest.raises(TypeError, match="allow_isolated_segments"):
        dap.DilatedAttention([8], [1], allow_isolated_segments="yes")  # type: ignore[arg-type]


def test_parts_of_a_ring_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    module = dap.RingDilatedAttentionV2([32], [1])
    monkeypatch.setattr(RingOptions, "num_processes", property(lambda _: 4))
    assert isolated(lambda: module.warn_isolated(8)) == 0
    assert isolated(lambda: module.warn_isolated(9)) == 1


def test_patterns_other_than_dilated_do_not_warn() -> None:
    x = torch.randn(1, 64, 2, 4)
    branches: dict[str, Any] = {"segment_lengths": [16], "dilation_rates": [1]}
    for kind, count in (("dilated_sparse", 1), ("local_window", 0)):
        module = dap.BlockSparseDilatedAttention(
            **branches, sparse_config={"pattern_type": kind, "block_size": 8}
        )
        assert isolated(lambda module=module: module(x, x, x)) == count  # type: ignore[misc]


def test_decoding_past_the_longest_segment_warns() -> None:
    model = LongNetLM(16, 8, 2, 2, segment_lengths=[8], dilation_rates=[1], dim_feedforward=8).eval()
    prompt = torch.zeros(1, 5, dtype=torch.int64)
    assert isolated(lambda: model.generate(prompt, 3)) == 0
    assert isolated(lambda: model.generate(prompt, 9)) == 2  # a layer each
    quiet: Any = {"segment_lengths": [8], "dilation_rates": [1], "allow_isolated_segments": True}
    model = LongNetLM(16, 8, 2, 2, dim_feedforward=8, **quiet).eval()
    assert isolated(lambda: model.generate(prompt, 9)) == 0
